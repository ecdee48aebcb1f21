"""In the graphs that conx makes to run, a weight that the model has several times is one initializer."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import conx
from conx.container.reader import Reader
from tests.builders import CPU, model, normal, one_thread, run_plain, same_bits
from tests.packing.kit import Packed, pack

pytestmark = pytest.mark.usefixtures("no_sync")

ROWS, WIDTH = 2050, 256  # 1 MB in float16
EMBEDDING = normal(ROWS, WIDTH, scale=0.05)
IN = "g (int64[1, n] i) =>"
TIED = {
    "folded": model(
        f"{IN} (float[1, n, {ROWS}] y) {{ e = Gather(w, i) y = MatMul(e, v) }}",
        {"w": EMBEDDING, "v": np.ascontiguousarray(EMBEDDING.T)},
    ),
    "transposed": model(
        f"{IN} (float[1, n, {ROWS}] y) {{ e = Gather(w, i) v = Transpose(w) y = MatMul(e, v) }}", {"w": EMBEDDING}
    ),
}
FEED = {"i": np.array([[0, 7, 7, ROWS - 1]])}


def held(packed: Packed, precision: str) -> dict[str, tuple[int, ...]]:
    """The large initializers of a graph."""
    made = packed.unpack(precision=precision)
    return {t.name: tuple(t.dims) for t in made.graph.initializer if np.prod(t.dims) > ROWS}


def operators(packed: Packed, precision: str) -> Counter[str]:
    return Counter(node.op_type for node in packed.unpack(precision=precision).graph.node)


def answer(packed: Packed, precision: str) -> Any:
    return conx.InferenceSession(packed.path, one_thread(), precision=precision, providers=CPU).run(None, FEED)[0]


@pytest.mark.parametrize("name", TIED)
def test_a_tied_embedding(name: str, tmp_path: Path) -> None:
    packed = pack(TIED[name], tmp_path, lossless=True)
    assert operators(packed, "original") == Counter(node.op_type for node in TIED[name].graph.node)
    for precision in ("fp32", "fp16"):
        assert held(packed, precision) == {"w": (ROWS, WIDTH)}
        assert operators(packed, precision)["FusedMatMul"] == 1
    assert operators(packed, "int8")["MatMulNBits"] == 1
    (want,) = run_plain(TIED[name].SerializeToString(), FEED)
    assert same_bits([answer(packed, "original")], [want])
    for precision, error in (("fp32", 1e-6), ("fp16", 3e-3), ("int8", 3e-2)):
        assert np.abs(answer(packed, precision) - want).max() <= error * np.abs(want).max()


@pytest.mark.parametrize("name", TIED)
def test_a_tied_embedding_in_codes(name: str, tmp_path: Path) -> None:
    """Rows are gathered of the codes, and the product takes floats, of which onnxruntime keeps its own copy alone."""
    packed = pack(TIED[name], tmp_path)
    assert held(packed, "fp32") == {"w": (ROWS, WIDTH), "w/codes": (ROWS, WIDTH)}
    assert held(packed, "fp16") == {"w": (ROWS, WIDTH)}
    with Reader(packed.path) as reader:
        graph = next(g for g in reader.index.graphs if "fp32" in g.precisions)
        assert {e.name: e.repacked for e in graph.externals if e.name in ("w", "w/codes")} == {
            "w": True,
            "w/codes": False,
        }
    want = answer(packed, "original")
    assert np.abs(answer(packed, "fp32") - want).max() <= 1e-6 * np.abs(want).max()


@pytest.mark.parametrize(
    ("body", "codes"),
    [
        ("e = Gather(w, i) y = MatMul(x, w)", True),
        ("e = Gather(w, i) y = MatMul(w, t) t = Transpose(x)", False),
        ("e = Gather(w, i) s = ReduceSum(w) y = Mul(x, s)", False),
        ("e = Gather(w, i) f = Gather <axis = 1> (w, i) y = MatMul(x, w)", False),
    ],
)
def test_when_an_embedding_stays_floats(body: str, codes: bool, tmp_path: Path) -> None:
    """Codes beside floats that onnxruntime reads as they are would only take more memory."""
    order = "t = Transpose(x) e = Gather(w, i) y = MatMul(w, t)" if "t = " in body else body
    made = model(f"g (int64[n] i, float[n, {ROWS}] x) => (float[n, m] y) {{ {order} }}", {"w": EMBEDDING})
    made.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "k"
    packed = pack(made, tmp_path)
    assert ("w/codes" in held(packed, "fp32")) is codes


@pytest.mark.parametrize("settings", [{}, {"lossless": True}], ids=str)
def test_equal_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    """A model whose layers share their weights, each under a name of its own."""
    same = normal(128, 128, scale=0.1)
    names = [f"w{i}" for i in range(6)]
    body = " ".join(f"h{i + 1} = MatMul(h{i}, {name})" for i, name in enumerate(names))
    made = model(f"g (float[n, 128] h0) => (float[n, 128] h6) {{ {body} }}", dict.fromkeys(names, same))
    packed = pack(made, tmp_path, **settings)
    count = {"original": 6, "fp32": 1, "fp16": 1, "int8": 2}  # codes and scales
    for precision, wanted in count.items():
        graph = packed.unpack(precision=precision).graph
        assert len(graph.initializer) == wanted
    feed = {"h0": normal(3, 128)}
    (want,) = conx.InferenceSession(packed.path, one_thread(), precision="original", providers=CPU).run(None, feed)
    (have,) = conx.InferenceSession(packed.path, one_thread(), precision="fp32", providers=CPU).run(None, feed)
    assert np.abs(have - want).max() <= 1e-6 * np.abs(want).max()


def test_what_is_not_shared_is_the_models_own_graph(tmp_path: Path) -> None:
    made = model("g (float[n, 64] x) => (float[n, 70] y) { y = MatMul(x, w) }", {"w": normal(64, 70)})
    packed = pack(made, tmp_path, lossless=True)
    with Reader(packed.path) as reader:
        assert ("fp32", "original") in [g.precisions for g in reader.index.graphs]
    onnx.checker.check_model(packed.unpack(precision="fp32"))

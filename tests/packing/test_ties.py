"""Equal weights are stored once, also under another shape or transposed, and come back as each of them was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

import conx
from tests.builders import CPU, give, model, normal, one_thread, run, run_plain, same_bits
from tests.packing.kit import Packed, matmul, pack, pack_weights, raw_tensors

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
Turn = Callable[[Array], Array]

# A shape, and what makes the second weight of the first.
TURNS: dict[str, tuple[tuple[int, ...], Turn]] = {
    "same": ((60, 70), lambda w: w),
    "transposed": ((60, 70), lambda w: w.T),
    "transposed square": ((64, 64), lambda w: w.T),
    "reshaped": ((60, 70), lambda w: w.reshape(30, 140)),
    "flat": ((60, 70), lambda w: w.reshape(-1)),
    "more dims": ((60, 70), lambda w: w.reshape(60, 7, 10)),
    "with ones": ((60, 70), lambda w: w.reshape(1, 60, 1, 70)),
    "transposed, with ones": ((60, 70), lambda w: w.T.reshape(70, 1, 60, 1)),
    "from ones": ((1, 60, 70), lambda w: w[0].T),
    "axes rotated": ((10, 20, 30), lambda w: w.transpose(1, 2, 0)),
    "axes rotated back": ((10, 20, 30), lambda w: w.transpose(2, 0, 1)),
    "last two exchanged": ((10, 20, 30), lambda w: w.transpose(0, 2, 1)),
    "kernel": ((16, 8, 5, 5), lambda w: w.transpose(1, 2, 3, 0)),
    "kernel, flat rows": ((16, 8, 5, 5), lambda w: w.reshape(16, -1)),
}
KINDS: list[Any] = [np.float32, np.float16, np.float64, np.int8, np.int64]


def pair(name: str, kind: Any = np.float32) -> tuple[Array, Array]:
    shape, turn = TURNS[name]
    values = normal(*shape) if np.dtype(kind).kind == "f" else normal(*shape) * 20
    first = values.astype(kind)
    return first, np.ascontiguousarray(turn(first))


def check_once(packed: Packed, lossless: bool) -> None:
    """One tensor is stored, for two uses; both come back."""
    assert [t.uses for t in packed.report.tensors] == [2]
    before, after = raw_tensors(onnx.load(packed.model)), raw_tensors(packed.unpack())
    assert [t[:3] for t in before] == [t[:3] for t in after]
    assert (before == after) is lossless


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", TURNS)
def test_lossless(name: str, kind: Any, tmp_path: Path) -> None:
    first, second = pair(name, kind)
    check_once(pack_weights({"a": first, "b": second}, tmp_path, lossless=True), lossless=True)


@pytest.mark.parametrize("settings", [{}, {"bits": 4, "block_size": 16}, {"palette": 5}], ids=str)
@pytest.mark.parametrize("name", [name for name in TURNS if name != "flat"])
def test_coded(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    first, second = pair(name)
    packed = pack_weights({"a": first, "b": second}, tmp_path, **settings)
    check_once(packed, lossless=False)
    assert packed.stored["a"].codec == ("palette" if "palette" in settings else "linear")
    turned = np.ascontiguousarray(TURNS[name][1](packed.values("a")))
    assert turned.tobytes() == packed.values("b").tobytes()


def test_vectors_stay_exact_beside_a_matrix_of_the_same_values(tmp_path: Path) -> None:
    values = normal(60, 70)
    packed = pack_weights({"a": values, "b": values.reshape(-1)}, tmp_path)
    assert packed.values("b").tobytes() == values.tobytes()


def test_scales_stay_exact_beside_a_weight_of_the_same_values(tmp_path: Path) -> None:
    values = np.abs(normal(64, 64))
    text = """g (float[4,64] x, int8[64,128] q) => (float[4,64] y, float[64,128] z) {
        y = MatMul(x, w) z = DequantizeLinear <axis = 1, block_size = 2> (q, s)
    }"""
    packed = pack(model(text, {"w": values, "s": values}, '<ir_version: 10, opset_import: ["": 21]>'), tmp_path)
    assert packed.values("s").tobytes() == values.tobytes()


@pytest.mark.parametrize("settings", [{"lossless": True}, {}], ids=str)
def test_wherever_they_are(settings: dict[str, Any], tmp_path: Path) -> None:
    """Initializers and Constant nodes of the main graph, of branches and of functions: one tensor."""
    values = normal(48, 48)
    made = model(
        """g (float[2,48] x, bool c) => (float[2,48] y) {
            a = MatMul(x, w) b = MatMul(a, given) d = local.Layer(b)
            y = If (c) <
                then_branch = p () => (float[2,48] py) { py = MatMul(d, inner) },
                else_branch = q () => (float[2,48] qy) { qy = Gemm <transB = 1> (d, turned) }
            >
        }
        <domain: "local", opset_import: ["": 17]> Layer (m) => (n) { n = MatMul(m, k) }""",
        {"w": values},
        '<ir_version: 8, opset_import: ["": 17, "local": 1]>',
    )
    branches = made.graph.node[-1].attribute
    branches[0].g.initializer.append(numpy_helper.from_array(values, "inner"))
    give(branches[1].g, "turned", np.ascontiguousarray(values.T))
    made.functions[0].node.insert(
        0, onnx.helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(values))
    )
    give(made.graph, "given", values)
    packed = pack(made, tmp_path, **settings)
    assert [t.uses for t in packed.report.tensors] == [5]
    back = packed.unpack()
    if "lossless" in settings:
        assert back == made
    session = conx.InferenceSession(packed.path, one_thread(), providers=CPU)
    for flag in (True, False):
        feeds = {"x": normal(2, 48, seed=1), "c": np.array(flag)}
        assert same_bits(run_plain(back.SerializeToString(), feeds), run(session, feeds))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("stored", [0, 1])
def test_one_grid_for_uses_whose_channels_differ(axis: int, stored: int, tmp_path: Path) -> None:
    """Each use would have its scales along its own axis: the one with the smaller error is taken for both."""
    values = normal(60, 70)
    values *= np.where(np.indices(values.shape)[axis] % 2, np.float32(0.1), np.float32(1))
    text = "g (float[n, 60] x) => (float[n, 60] y) { a = MatMul(x, w) y = MatMul(a, t) }"
    weights = {"w": values, "t": np.ascontiguousarray(values.T)}
    packed = pack(model(text, dict(list(weights.items())[:: 1 - 2 * stored])), tmp_path, bits=5)
    (tensor,) = (t for t in packed.stored.values() if t.codec == "linear")
    assert tensor.order is None
    assert tensor.params["axis"] == (axis if tensor.name == "w" else 1 - axis)
    assert packed.values("w").tobytes() == np.ascontiguousarray(packed.values("t").T).tobytes()
    alone = {}
    for name, use in (("w", "a = MatMul(x, w)"), ("t", "b = MatMul(a, t)")):
        other = pack(model(f"g (float[n, m] {use[11]}) => (float[n, k] {use[0]}) {{ {use} }}", {name: weights[name]}),
                     tmp_path, name, bits=5)  # fmt: skip
        alone[name] = other.error(name)
    assert packed.error(tensor.name) == pytest.approx(min(alone.values()), rel=1e-3)
    assert max(alone.values()) > 1.2 * min(alone.values())


DIFFERENT: dict[str, Turn] = {
    "one bit": lambda w: np.where(np.arange(w.size).reshape(w.shape) == 77, np.nextafter(w, np.float32(9)), w),
    "a sign of zero": lambda w: np.where(np.arange(w.size).reshape(w.shape) == 5, np.float32(-0.0), w),
    "rows in another order": lambda w: w[::-1],
    "two values exchanged": lambda w: np.concatenate([w.reshape(-1)[[1, 0]], w.reshape(-1)[2:]]).reshape(w.shape),
    "another type of as many bits": lambda w: w.view(np.int32),
    "a wider type": lambda w: w.astype(np.float64),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_is_not_equal(name: str, tmp_path: Path) -> None:
    """The sums that find transposed weights are equal for values in any order: those are compared."""
    values = normal(60, 70)
    values.reshape(-1)[5] = 0
    packed = pack_weights({"a": values, "b": np.ascontiguousarray(DIFFERENT[name](values))}, tmp_path, lossless=True)
    assert [t.uses for t in packed.report.tensors] == [1, 1]
    assert raw_tensors(packed.unpack()) == raw_tensors(onnx.load(packed.model))


def test_several_candidates(tmp_path: Path) -> None:
    """Weights of the same values in different orders, each of them twice."""
    a, b = normal(40, 40), normal(40, 40)[::-1].copy()
    weights = {"a": a, "b": b, "c": np.ascontiguousarray(b.T), "d": np.ascontiguousarray(a.T), "e": b.reshape(16, 100)}
    packed = pack_weights(weights, tmp_path, lossless=True)
    assert {t.name: t.uses for t in packed.report.tensors} == {"a": 2, "b": 3}
    assert raw_tensors(packed.unpack()) == raw_tensors(onnx.load(packed.model))


@pytest.mark.parametrize("pattern", ["first", "second"])
def test_a_pattern_for_either_name_counts(pattern: str, tmp_path: Path) -> None:
    values = normal(64, 64)
    made = matmul(values)
    made.graph.initializer[0].name = "first"
    made.graph.node[0].input[1] = "first"
    made.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.T), "second"))
    packed = pack(made, tmp_path, keep=[pattern])
    assert packed.report.lossless
    assert packed.values("second").tobytes() == np.ascontiguousarray(values.T).tobytes()


def test_ties_save_space(tmp_path: Path) -> None:
    values = normal(200, 200)
    once = pack_weights({"a": values}, tmp_path, lossless=True).report
    twice = pack_weights({"a": values, "b": np.ascontiguousarray(values.T)}, tmp_path, lossless=True).report
    assert twice.bytes - once.bytes < 300
    assert twice.source_bytes - once.source_bytes > values.nbytes


def test_equal_initializers_become_one_when_unpacked(tmp_path: Path) -> None:
    text = "g (float[n, 40] x) => (float[n, 40] y) { a = MatMul(x, u) b = MatMul(a, v) c = MatMul(b, w) y = Add(c, b) }"
    same = normal(40, 40)
    made = model(text, {"u": same, "v": normal(40, 40, seed=1), "w": same})
    for lossless in (True, False):
        packed = pack(made, tmp_path, lossless=lossless)
        merged = packed.unpack(dedup=True)
        onnx.checker.check_model(merged, full_check=True)
        assert [t.name for t in merged.graph.initializer] == ["u", "v"]
        feed = {"x": normal(3, 40, seed=5)}
        session = conx.InferenceSession(packed.path, one_thread(), precision="original", providers=CPU)
        wanted = run_plain(merged.SerializeToString(), feed)
        assert all(map(same_bits, wanted, session.run(None, feed)))
        with pytest.raises(ValueError, match="original and dedup exclude each other"):
            packed.unpack(dedup=True, original=True)

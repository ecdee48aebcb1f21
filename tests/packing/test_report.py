"""What packing says of a file: whether it is lossless, its errors by tensor, its progress."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

import conx
from tests.builders import model, normal, run_plain, same_bits
from tests.packing.kit import matmul, pack, pack_weights, raw_tensors

pytestmark = pytest.mark.usefixtures("no_sync")

FEW = np.random.default_rng(0).choice(normal(9), (64, 64)).astype(np.float32)


def on_a_grid() -> npt.NDArray[np.float32]:
    """Weights of many values that eight bits and a scale for each column hold exactly."""
    rng = np.random.default_rng(0)
    found = np.clip(np.rint(rng.normal(0, 12, (64, 64))), -127, 127) + 0.0  # no negative zeros
    found[0] = 127
    return (found * np.exp2(np.arange(64) % 5)).astype(np.float32)


FLAGS: list[Any] = [
    pytest.param({"w": normal(64, 64)}, {}, False, id="coded"),
    pytest.param({"w": normal(64, 64)}, {"lossless": True}, True, id="lossless"),
    pytest.param({"w": normal(64, 64)}, {"keep": ["w"]}, True, id="kept"),
    pytest.param({"w": normal(64, 64)}, {"lossless": True, "overrides": {"w": "bits:8"}}, False, id="coded by name"),
    pytest.param({"w": normal(64, 64), "v": normal(64, 64)[::-1].copy()}, {"keep": ["w"]}, False, id="one of two"),
    pytest.param({"w": normal(9), "i": np.arange(5000), "f": np.ones((64, 64), np.float32)}, {}, True, id="no matrix"),
    pytest.param({}, {}, True, id="nothing"),
    pytest.param({"w": FEW}, {}, True, id="few values"),
    pytest.param({"w": on_a_grid()}, {}, True, id="exact on the grid"),
]


@pytest.mark.parametrize(("weights", "settings", "lossless"), FLAGS)
def test_lossless_is_said_where_it_is_so(
    weights: dict[str, Any], settings: dict[str, Any], lossless: bool, tmp_path: Path
) -> None:
    text = "g (float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }"
    made = model(text if "w" in weights and weights["w"].ndim == 2 else text.replace("MatMul(x, w)", "Abs(x)"), weights)
    packed = pack(made, tmp_path, **settings)
    assert (raw_tensors(packed.unpack()) == raw_tensors(made)) is lossless
    assert packed.report.lossless is lossless
    assert conx.inspect(packed.path).lossless is lossless


def test_tensors_of_one_name_have_their_own_errors(tmp_path: Path) -> None:
    """Branches may use a name twice: here the second weight is stored exactly."""
    made = model(
        """g (float[64,64] x, bool c) => (float[64,64] y) {
            y = If (c) <
                then_branch = p () => (float[64,64] py) { py = MatMul(x, w) },
                else_branch = q () => (float[64,64] qy) { qy = MatMul(x, w) }
            >
        }"""
    )
    special = normal(64, 64, seed=1)
    special[0, 0] = np.nan
    for attribute, values in zip(made.graph.node[0].attribute, (normal(64, 64), special), strict=True):
        attribute.g.initializer.append(numpy_helper.from_array(values, "w"))
    errors = {t.codec: t.error for t in pack(made, tmp_path).report.tensors}
    assert errors["linear int8"] > 0
    assert errors["heads"] == 0


@pytest.mark.parametrize("weights", [{}, {"w": normal(64, 64)}, {"w": np.full((64, 64), np.inf, np.float32)}], ids=len)
def test_json_is_what_others_can_read(weights: dict[str, Any], tmp_path: Path) -> None:
    """No NaN or Infinity, which are no JSON."""
    packed = pack_weights(weights, tmp_path)
    for told in (packed.report.to_dict(), conx.inspect(packed.path).to_dict(), conx.inspect(packed.model).to_dict()):
        text = json.dumps(told, allow_nan=False)
        assert json.loads(text)["tensors"] == json.loads(json.dumps(told["tensors"]))
    assert packed.report.to_dict()["ratio"] == packed.report.bytes / packed.report.source_bytes


@pytest.mark.parametrize("threads", [1, 3])
def test_progress_of_checking(threads: int, tmp_path: Path) -> None:
    packed = pack_weights({f"w{i}": normal(64, 64 + i, seed=i) for i in range(20)}, tmp_path)
    calls: list[tuple[int, int]] = []
    conx.check(packed.path, deep=True, threads=threads, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]} == {sum(t.bytes for t in packed.report.tensors)}


def test_the_worst_is_named(tmp_path: Path) -> None:
    packed = pack_weights({f"w{i}": normal(64, 64, seed=i) for i in range(3)}, tmp_path, overrides={"w1": "bits:3"})
    (row,) = (r for r in packed.report.by_kind if r.kind == "linear int8")
    assert (row.worst_name, row.worst_error) == ("w1", packed.error("w1"))
    assert row.mean_error == pytest.approx(sum(packed.error(f"w{i}") for i in range(3)) / 3)
    assert packed.error("w1") > 5 * packed.error("w0")


@pytest.mark.parametrize("settings", [{}, {"lossless": True}, {"bits": 3, "block_size": 16}, {"palette": 4}], ids=str)
def test_what_comes_back_is_what_a_session_runs(settings: dict[str, Any], tmp_path: Path) -> None:
    packed = pack(matmul(normal(64, 48)), tmp_path, **settings)
    feeds = {"x": normal(5, 64, seed=1)}
    session = conx.InferenceSession(packed.path, providers=["CPUExecutionProvider"], precision="original")
    for precision in (None, "original"):
        back = packed.unpack(precision=precision)
        onnx.checker.check_model(back)
        assert same_bits(session.run(None, feeds), run_plain(back.SerializeToString(), feeds))

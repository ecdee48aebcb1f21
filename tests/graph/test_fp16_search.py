"""Nodes that stay float32 because of what the model computes, the float16 graph emulated, and float16 at the edges."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from conx.graph import fp16_search
from conx.graph.fp16 import Half, to_float16
from conx.graph.fp16_emulated import Emulation
from conx.graph.fp16_ranges import with_ranges
from conx.graph.fp16_search import BOUND, Run, search_float16
from conx.graph.read import SourceModel, read_model
from conx.graph.trial import Trial
from tests.builders import as_tensor, model, normal, run_plain, save
from tests.graph.test_fp16 import FLOAT, HALF, V, W, X, branches, number, types
from tests.graph.test_fp16_subgraphs import BRANCHES

LOWEST = float(np.finfo(np.float32).min)
EYE = np.eye(20, dtype=np.float32)
FEEDS = [{"x": X}, {"x": normal(2, 20, seed=10)}]


def opened(path: Path) -> Run:
    """The model on the CPU."""
    return lambda feed: run_plain(path, feed)


def refused(path: Path) -> Run:
    raise RuntimeError(f"{path.name}: no such operator")


def search(made: onnx.ModelProto, folder: Path, feeds: Any = None, **more: Any) -> Half:
    with read_model(save(made, folder / "m.onnx")) as source:
        return search_float16(source, more.pop("opener", opened), FEEDS if feeds is None else feeds, **more)


def complete(half: onnx.ModelProto, source: SourceModel, folder: Path) -> onnx.ModelProto:
    (folder / "complete").mkdir(exist_ok=True)
    return onnx.load(Trial(source.weights, folder / "complete").write(half))


def in_float16(half: onnx.ModelProto, made: onnx.ModelProto, feed: Mapping[str, Any], folder: Path) -> list[Any]:
    """What the reference computes, in true float16."""
    with read_model(save(made, folder / "m.onnx")) as source, np.errstate(all="ignore"):
        return list(ReferenceEvaluator(complete(half, source, folder)).run(None, dict(feed)))


def computed_in(half: onnx.ModelProto, op_type: str) -> set[int]:
    """The types that the nodes of a kind compute in, from shape inference."""
    known = onnx.shape_inference.infer_shapes(half).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*known.input, *known.value_info, *known.output)}
    return {kinds[node.output[0]] for node in known.node if node.op_type == op_type}


# What leaves the range

LARGE = """g (float[2, 20] x) => (float[2, 20] y) {
    h = MatMul(x, w) a = MatMul(h, up) b = Add(a, h) c = Relu(b) d = Mul(c, down) y = MatMul(d, v)
}"""


def test_values_beyond_the_range(tmp_path: Path) -> None:
    """Weights and constants are harmless each, what they make is not."""
    weights = {"w": W, "up": EYE * np.float32(6e4), "down": number(2.0**-16), "v": V}
    made = model(LARGE, weights)
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        plain = to_float16(source)
    assert not np.isfinite(in_float16(plain.model, made, FEEDS[0], tmp_path)[0]).all()
    half = search(made, tmp_path)
    assert half.kept.keys() == {"a", "b", "c", "d"}
    assert "range" in half.kept["a"]
    assert types(half.model) == {"w": HALF, "up": FLOAT, "down": FLOAT, "v": HALF}
    wanted = run_plain(tmp_path / "m.onnx", FEEDS[0])[0]
    got = in_float16(half.model, made, FEEDS[0], tmp_path)[0]
    np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3 * np.abs(wanted).max())
    assert half.error is not None
    assert half.error < BOUND**0.5


def test_inputs_beyond_the_range(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y) { h = MatMul(x, w) a = Mul(h, s) y = MatMul(a, v) }",
                 {"w": W, "s": number(1e-4), "v": V})  # fmt: skip
    half = search(made, tmp_path, [{"x": X * np.float32(1e5)}])
    assert half.kept.keys() == {"h", "a"}
    assert types(half.model) == {"w": FLOAT, "s": FLOAT, "v": HALF}


def test_large_values_that_a_branch_takes(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            a = MatMul(x, up)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { b = MatMul(a, down) yp = MatMul(b, v) },
                else_branch = q () => (float[2, 20] yq) { yq = MatMul(x, v) }
            >
        }""",
        {"up": EYE * np.float32(6e4), "down": EYE * np.float32(2.0**-14), "v": V},
    )
    half = search(made, tmp_path, [{"x": X, "c": np.array(True)}])
    assert half.kept.keys() == {"a", "b"}
    assert types(half.model) == {"up": FLOAT, "down": FLOAT, "v": HALF}


@pytest.mark.parametrize("lowest", [LOWEST, -1e9])
def test_masks_are_not_large_values(lowest: float, tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool[2, 20] m) => (float[2, 20] y) {
            s = MatMul(x, w) t = Where(m, s, lowest) p = Softmax(t) y = MatMul(p, v)
        }""",
        {"w": W, "v": V, "lowest": number(lowest)},
    )
    half = search(made, tmp_path, [{"x": X, "m": X > -1}])
    assert not half.kept
    assert types(half.model) == {"w": HALF, "v": HALF, "lowest": HALF}


def test_ranges() -> None:
    """Of inputs and values, empty ones too."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = Neg(x) b = Slice(a, zero, zero) c = Concat <axis = 0> (a, b) y = Exp(c)
        }""",
        {"zero": np.array([0])},
    )
    probed = with_ranges(made, ["x", "a", "y"])
    onnx.checker.check_model(probed)
    found = [float(end[0]) for end in run_plain(probed.SerializeToString(), {"x": X})[1:]]
    wanted = [X.min(), X.max(), -X.max(), -X.min(), np.exp(-X.max()), np.exp(-X.min())]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_empty_values(tmp_path: Path) -> None:
    made = model(
        """g (float[k, 20] x) => (float[k, 20] y, float[n, 20] e) {
            h = MatMul(x, w) b = Slice(h, zero, zero) e = Relu(b) y = MatMul(h, v)
        }""",
        {"w": W, "v": V, "zero": np.array([0])},
    )
    assert search(made, tmp_path).error is not None


# What costs accuracy


OFFSET = """g (float[2, 20] x) => (float[2, 20] y) {
    h = MatMul(x, w) i = Relu(h) a = Add(i, far) b = Sub(a, far) c = MatMul(b, v) d = Tanh(c) e = MatMul(d, v)
    f = Tanh(e) y = MatMul(f, v)
}"""


def test_a_sum_that_loses_its_small_part(tmp_path: Path) -> None:
    made = model(OFFSET, {"w": W, "v": V, "far": number(2000)})
    half = search(made, tmp_path)
    assert "a" in half.kept
    assert len(half.kept) < 3
    assert "accuracy" in half.kept["a"]
    assert types(half.model)["w"] == types(half.model)["v"] == HALF
    assert computed_in(half.model, "Add") == {FLOAT}
    assert half.error is not None
    assert half.error < BOUND**0.5
    wanted = run_plain(tmp_path / "m.onnx", FEEDS[0])[0]
    got = in_float16(half.model, made, FEEDS[0], tmp_path)[0]
    np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=4e-3 * np.abs(wanted).max())


def test_in_a_branch(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            h = MatMul(x, w)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { a = Add(h, far) b = Sub(a, far) yp = MatMul(b, v) },
                else_branch = q () => (float[2, 20] yq) { yq = MatMul(h, v) }
            >
        }""",
        {"w": W, "v": V, "far": number(2000)},
    )
    feeds = [{"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}]
    half = search(made, tmp_path, feeds)
    assert "a" in half.kept
    assert types(half.model)["w"] == types(half.model)["v"] == HALF
    assert half.error is not None
    assert half.error < BOUND**0.5


def test_a_model_that_hangs_in_the_balance(tmp_path: Path) -> None:
    """Any rounding anywhere is as bad: no node is to blame."""
    layers = " ".join(f"h{i + 1} = MatMul(h{i}, w) " for i in range(12))
    made = model(
        f"g (float[2, 20] x) => (float[2, 20] y) {{ h0 = MatMul(x, w) {layers} a = Mul(h12, far) y = Sin(a) }}",
        {"w": np.linalg.qr(normal(20, 20))[0], "far": number(2.0**12)},
    )
    half = search(made, tmp_path)
    assert not half.kept
    assert types(half.model)["w"] == HALF
    assert half.error is not None
    assert half.error > 0.1


def test_a_model_that_draws_numbers(tmp_path: Path) -> None:
    """Its outputs are others each time."""
    made = model(
        "g (float[2, 20] x) => (float[2, 20] y) { h = MatMul(x, w) r = RandomNormalLike(h) a = Add(h, r) y = Tanh(a) }",
        {"w": W},
    )
    assert not search(made, tmp_path).kept


def test_nothing_to_find(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y) { h = MatMul(x, w) a = Tanh(h) y = MatMul(a, v) }",
                 {"w": W, "v": V})  # fmt: skip
    half = search(made, tmp_path)
    assert not half.kept
    assert half.error is not None
    assert 0 < half.error < 2e-3


def test_models_that_cannot_be_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = model(OFFSET, {"w": W, "v": V, "far": number(2000)})
    with caplog.at_level(logging.INFO, logger="conx"):
        half = search(made, tmp_path, opener=refused)
    assert "could not be tried (RuntimeError" in caplog.text
    assert (half.kept, half.error) == ({}, None)
    assert types(half.model)["w"] == HALF
    assert search(made, tmp_path, []).error is None
    assert search(made, tmp_path, lambda: FEEDS).error is not None


def test_models_that_are_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp16_search, "SEARCH_MAX", 100)
    made = model(OFFSET, {"w": W, "v": V, "far": number(2000)})
    with caplog.at_level(logging.INFO, logger="conx"):
        assert search(made, tmp_path, opener=refused).error is None
    assert "too many" in caplog.text


# The emulation


@pytest.mark.parametrize("switched", [False, True])
def test_the_emulation_computes_what_float16_does(switched: bool, tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[2, 20] z) {
            h = MatMul(x, w) a = Add(h, bias) b = Mul(a, a) c = Exp(h) d = MatMul(c, v) e = Div(d, far) y = Relu(e)
            z = Sub(d, a)
        }""",
        {"w": W, "v": V, "bias": normal(20), "far": number(3)},
    )
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        half = to_float16(source)
        emulation = Emulation(half.model, half.narrow if switched else None)
        path = Trial(source.weights, tmp_path).write(emulation.run())
    onnx.checker.check_model(onnx.load(path))
    on = {name: np.array(True) for name in emulation.switches}
    wanted = in_float16(half.model, made, {"x": X}, tmp_path)
    for one, other in zip(wanted, run_plain(path, {"x": X} | on), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-3, atol=2e-3)
        assert np.mean(one == other) > 0.5  # but for sums in another order
    exact = run_plain(tmp_path / "m.onnx", {"x": X})
    off = {name: np.array(False) for name in on}
    for one, other in zip(exact, run_plain(path, {"x": X} | off), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5 if switched else 1, atol=1e-3)


def test_emulated_branches(tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i, scale=0.1)))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        half = to_float16(source)
        emulated = Trial(source.weights, tmp_path).write(Emulation(half.model, half.narrow).run())
    names = [v.name for v in onnx.load(emulated).graph.input][2:]
    assert names
    for c in (True, False):
        feed = {"x": X, "c": np.array(c)}
        wanted = run_plain(tmp_path / "m.onnx", feed)[0]
        for on in (True, False):
            got = run_plain(emulated, feed | {name: np.array(on) for name in names})[0]
            np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2)


# Nodes that are named, and float16 inputs and outputs


def test_nodes_that_are_to_be_kept(tmp_path: Path) -> None:
    made = model(LARGE, {"w": W, "up": EYE, "down": number(0.5), "v": V})
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        half = to_float16(source, {"a": "because: of this", "nothing": "no"})
        assert half.kept == {"a": "because: of this"}
        assert half.wide["because"] == 1
        assert types(half.model) == {"w": HALF, "up": FLOAT, "down": FLOAT, "v": HALF}
        onnx.checker.check_model(complete(half.model, source, tmp_path))
        assert list(half.narrow.values()) == ["h", "y"]


def edges(made: onnx.ModelProto) -> list[int]:
    return [v.type.tensor_type.elem_type for v in (*made.graph.input, *made.graph.output)]


def with_half_edges(made: onnx.ModelProto, feed: Mapping[str, Any], folder: Path) -> onnx.ModelProto:
    """The float16 graph with such edges, which answers as the source."""
    with read_model(save(made, folder / "m.onnx")) as source:
        half = complete(to_float16(source, io=True).model, source, folder)
    onnx.checker.check_model(half)
    wanted = run_plain(folder / "m.onnx", feed)
    given = {name: values.astype(np.float16) if values.dtype == np.float32 else values for name, values in feed.items()}
    for one, other in zip(wanted, run_plain(half.SerializeToString(), given), strict=True):
        assert other.dtype == (np.float16 if one.dtype == np.float32 else one.dtype)
        np.testing.assert_allclose(other.astype(np.float32), one, rtol=4e-3, atol=4e-3 * np.abs(one).max())
    return half


def test_float16_edges(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, int64[2] i) => (float[2, 20] y, float[2, 20] z, int64[2] j) {
            y = MatMul(x, w) z = MatMul(y, v) j = Neg(i)
        }""",
        {"w": W, "v": V},
    )
    half = with_half_edges(made, {"x": X, "i": np.array([1, 2])}, tmp_path)
    assert edges(half) == [HALF, TensorProto.INT64, HALF, HALF, TensorProto.INT64]
    assert "Cast" not in [node.op_type for node in half.graph.node]


def test_float16_edges_of_what_is_float32(tmp_path: Path) -> None:
    """Cast where the graph computes in float32, or had a cast of its own."""
    made = model(
        """g (float[2, 20] x, int64[2, 20] i) => (float[2, 20] y, float[2, 20] z, float[2, 20] u, float[20, 20] w) {
            a = MatMul(x, w) y = Exp(a) b = MatMul(y, v) z = Cast <to = 1> (b) u = Cast <to = 1> (i)
        }""",
        {"w": W, "v": V * np.float32(0.1)},
    )
    feed = {"x": X, "i": np.arange(40).reshape(2, 20)}
    half = with_half_edges(made, feed, tmp_path)
    assert edges(half) == [HALF, TensorProto.INT64, *[HALF] * 4]


def test_float16_edges_that_pass_through_branches(tmp_path: Path) -> None:
    """And a weight that can be fed."""
    made = model(BRANCHES.replace("bool c)", "bool c, float[20, 20] w)"), {"w": W})
    half = with_half_edges(made, {"x": X, "c": np.array(True)}, tmp_path)
    assert types(half) == {"w": HALF}
    feed = {"x": X.astype(np.float16), "c": np.array(False), "w": V.astype(np.float16)}
    assert run_plain(half.SerializeToString(), feed)[0].dtype == np.float16


def test_the_search_with_float16_edges(tmp_path: Path) -> None:
    made = model(OFFSET, {"w": W, "v": V, "far": number(2000)})
    half = search(made, tmp_path, io=True)
    assert "a" in half.kept
    assert edges(half.model) == [HALF, HALF]

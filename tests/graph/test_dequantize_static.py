"""Undoing what quantize_static does, as QDQ and with quantized operators."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType

from tests.builders import model, normal
from tests.graph.dequantize_kit import (
    Array,
    dynamic,
    float_outputs,
    near,
    operators,
    outputs,
    quantized_left,
    static,
    undo,
)

NET = """g (float[2,3,12,12] x) => (float[2,10] y) {
    c = Conv <pads = [1,1,1,1], strides = [2,2]> (x, W, b) r = Relu(c)
    d = Conv <group = 16, pads = [1,1,1,1]> (r, Wd, bd) k = Clip(d, zero, six)
    s = Add(k, r) m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (s)
    t = Sigmoid(m) u = Mul(t, m) l = LeakyRelu <alpha = 0.1> (u)
    v = Concat <axis = 1> (l, m) a = AveragePool <kernel_shape = [2,2]> (v)
    p = GlobalAveragePool(a) f = Flatten(p) g1 = Gemm <transB = 1> (f, W2, b2) n = MatMul(g1, W3) y = Softmax(n) }"""
SHAPES = {"W": (16, 3, 3, 3), "b": (16,), "Wd": (16, 1, 3, 3), "bd": (16,), "W2": (12, 32), "b2": (12,), "W3": (12, 10)}
# Their Relu or Clip is dropped, so that other operators are left in another order.
OPTIONS: dict[str, dict[str, Any]] = {
    "per tensor": {},
    "per channel": {"per_channel": True},
    "reduced range": {"per_channel": True, "reduce_range": True},
    "uint8 weights": {"weight_type": QuantType.QUInt8},
    "int8": {"activation_type": QuantType.QInt8},
    "symmetric": {"activation_type": QuantType.QInt8, "extra_options": {"ActivationSymmetric": True}},
}


def net() -> onnx.ModelProto:
    weights: dict[str, Array] = {n: normal(*s, seed=i, scale=0.4) for i, (n, s) in enumerate(SHAPES.items())}
    weights |= {"zero": np.array(0, np.float32), "six": np.array(6, np.float32)}
    weights["bd"] = weights["bd"] + np.float32(4)  # so that Clip has something to clip
    weights["Wd"] *= np.float32(3)
    return model(NET, weights)


FEEDS = [{"x": normal(2, 3, 12, 12, seed=20 + i)} for i in range(4)]


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_float_graph_is_back(options: str, form: str, tmp_path: Path) -> None:
    source = net()
    quantized = static(source, tmp_path, FEEDS, form, **OPTIONS[options])
    assert len(quantized_left(quantized)) > 10
    undone, made = undo(quantized)
    assert quantized_left(undone) == []
    assert made.report.left == []
    kinds = set(operators(source)) - {"MatMul", "Gemm"}
    assert kinds <= set(operators(undone))
    for feeds in FEEDS:
        near(outputs(undone, feeds), float_outputs(source, undone, feeds))


def test_wide_activations(tmp_path: Path) -> None:
    options = {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt16}
    quantized = static(net(), tmp_path, FEEDS, "QDQ", **options)
    undone, _ = undo(quantized)
    assert quantized_left(undone) == []
    near(outputs(undone, FEEDS[0]), float_outputs(net(), undone, FEEDS[0]))


@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_activations_may_stay_quantized(form: str, tmp_path: Path) -> None:
    quantized = static(net(), tmp_path, FEEDS, form, per_channel=True)
    undone, made = undo(quantized, keep_activations=True)
    assert set(quantized_left(undone)) == {"QuantizeLinear", "DequantizeLinear"}
    assert {left.reason for left in made.report.left} == {"quantization of activations is to stay"}
    assert {t.data_type for t in undone.graph.initializer if len(t.dims) > 1} == {onnx.TensorProto.FLOAT}
    near(outputs(undone, FEEDS[0]), outputs(quantized, FEEDS[0]), 0.02)


def test_other_options(tmp_path: Path) -> None:
    """Weights as QuantizeLinear and DequantizeLinear of floats; a pair for each user."""
    for extra in ({"AddQDQPairToWeight": True}, {"DedicatedQDQPair": True}, {"QDQKeepRemovableActivations": True}):
        quantized = static(net(), tmp_path, FEEDS, "QDQ", extra_options=extra)
        undone, _ = undo(quantized)
        assert quantized_left(undone) == []
        near(outputs(undone, FEEDS[0]), float_outputs(net(), undone, FEEDS[0]))


def test_a_transformer(tmp_path: Path) -> None:
    text = """g (float[2,6,16] x) => (float[2,6,16] y) {
        q = MatMul(x, Q) k = MatMul(x, K) v = MatMul(x, V) t = Transpose <perm = [0,2,1]> (k)
        s = MatMul(q, t) p = Softmax(s) a = MatMul(p, v) b = Add(a, x) n = LayerNormalization(b, gamma, beta)
        f = MatMul(n, F) g1 = Add(f, c) e = Erf(g1) h = Add(g1, e) o = MatMul(h, G) r, z = Split <axis = 2> (o)
        j = Concat <axis = 2> (z, r) y = Add(j, n) }"""
    shapes = {"Q": (16, 16), "K": (16, 16), "V": (16, 16), "F": (16, 64), "c": (64,), "G": (64, 16)}
    weights = {n: normal(*s, seed=i, scale=0.3) for i, (n, s) in enumerate(shapes.items())}
    weights |= {"gamma": normal(16, seed=8) + 1, "beta": normal(16, seed=9)}
    source = model(text, weights)
    feeds = [{"x": normal(2, 6, 16, seed=i)} for i in range(3)]
    for form in ("QDQ", "QOperator"):
        quantized = static(source, tmp_path, feeds, form, extra_options={"ForceQuantizeNoInputCheck": True})
        undone, _ = undo(quantized)
        assert quantized_left(undone) == []
        assert sorted(operators(undone)) == sorted(operators(source))
        near(outputs(undone, feeds[0]), float_outputs(source, undone, feeds[0]))


def test_quantized_where_pad_resize_and_argmax(tmp_path: Path) -> None:
    text = """g (bool[1,4,8,8] c, float[1,4,8,8] x) => (float[1,4,20,20] y, int64[1,1,8,8] best) {
        w = Conv <pads = [1,1,1,1]> (x, W) v = Sigmoid(x) s = Where(c, w, v) p = Pad(s, pads)
        y = Resize <mode = "nearest"> (p, none, scales) best = ArgMax <axis = 1> (w) }"""
    weights = {"W": normal(4, 4, 3, 3), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "none": np.zeros(0, np.float32)}
    source = model(text, weights | {"scales": np.array([1, 1, 2, 2], np.float32)})
    feeds = [{"c": normal(1, 4, 8, 8, seed=i) > 0, "x": normal(1, 4, 8, 8, seed=i + 5)} for i in range(3)]
    for form in ("QDQ", "QOperator"):
        quantized = static(source, tmp_path, feeds, form, extra_options={"ForceQuantizeNoInputCheck": True})
        undone, _ = undo(quantized)
        assert quantized_left(undone) == []
        near(outputs(undone, feeds[0]), float_outputs(source, undone, feeds[0]))


def test_dropped_relus_come_back_where_something_was_clipped(tmp_path: Path) -> None:
    """And only there: not after what is never below 0, nor at inputs."""
    text = """g (float[4,8] x) => (float[4,8] y) {
        a = Abs(x) m = MatMul(a, W) r = Relu(m) n = MatMul(r, V) s = Sigmoid(n) y = MatMul(s, W) }"""
    source = model(text, {"W": normal(8, 8), "V": normal(8, 8, seed=1)})
    feeds = [{"x": normal(4, 8, seed=i)} for i in range(4)]
    for form in ("QDQ", "QOperator"):
        quantized = static(source, tmp_path, feeds, form)
        assert "Relu" not in operators(quantized)
        undone, _ = undo(quantized)
        assert operators(undone) == ["Abs", "MatMul", "Relu", "MatMul", "Sigmoid", "MatMul"]
        near(outputs(undone, feeds[0]), float_outputs(source, undone, feeds[0]))


def test_integers_that_are_returned(tmp_path: Path) -> None:
    """They are made by ordinary operators, from the floats or, where activations stay quantized, exactly."""
    quantized = static(net(), tmp_path, FEEDS, "QOperator", per_channel=True)
    for node in quantized.graph.node:
        if node.op_type in ("QLinearAdd", "MaxPool"):
            value = helper.make_tensor_value_info(node.output[0], TensorProto.UINT8, [2, 16, None, None])
            quantized.graph.output.append(value)
    undone, made = undo(quantized)
    assert made.report.left == []
    want = outputs(quantized, FEEDS[0])
    for a, b in zip(outputs(undone, FEEDS[0])[1:], want[1:], strict=True):
        assert a.dtype == b.dtype == np.uint8
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 2
    kept, _ = undo(quantized, keep_activations=True)
    near(outputs(kept, FEEDS[0]), want, 1e-6)


def test_dynamic_and_static_agree_on_weights(tmp_path: Path) -> None:
    text = "g (float[4,32] x) => (float[4,16] y) { y = MatMul(x, W) }"
    source = model(text, {"W": normal(32, 16)})
    feeds = [{"x": normal(4, 32)}]
    one, _ = undo(dynamic(source, tmp_path, weight_type=QuantType.QInt8))
    two, _ = undo(static(source, tmp_path, feeds))
    assert [t.name for t in one.graph.initializer] == [t.name for t in two.graph.initializer] == ["W"]

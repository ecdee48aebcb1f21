"""Undoing what quantize_dynamic does, and the operators that onnxruntime fuses of it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType

from conx.graph.dequantize import FloatWeight
from tests.builders import model, normal
from tests.graph.dequantize_kit import (
    Array,
    describes,
    dynamic,
    exact,
    float_outputs,
    near,
    operators,
    outputs,
    quantized_left,
    undo,
)

MLP = """g (int64[N] ids) => (float[N,24] y) {
    e = Gather(E, ids) h = MatMul(e, W1) r = Relu(h) s = MatMul(r, W3) y = Gemm <transB = 1> (s, W2, b2) }"""
MLP_WEIGHTS = {"E": (60, 32), "W1": (32, 48), "W3": (48, 40), "W2": (24, 40), "b2": (24,)}
CNN = """g (float[2,3,9,9] x) => (float[2,8,5,5] y, float[2,16,9,9] c) {
    c = Conv <pads = [1,1,1,1]> (x, W, b) r = Relu(c)
    y = Conv <strides = [2,2], pads = [1,1,1,1], group = 2> (r, V) }"""
CNN_WEIGHTS = {"W": (16, 3, 3, 3), "b": (16,), "V": (8, 8, 3, 3)}
LSTM = """g (float[5,2,8] x) => (float[5,2,2,16] y, float[2,2,16] h) {
    y, h = LSTM <hidden_size = 16, direction = "bidirectional"> (x, W, R, B) }"""
LSTM_WEIGHTS = {"W": (2, 64, 8), "R": (2, 64, 16), "B": (2, 128)}
MODELS = {"mlp": (MLP, MLP_WEIGHTS), "cnn": (CNN, CNN_WEIGHTS), "lstm": (LSTM, LSTM_WEIGHTS)}
FEEDS: dict[str, dict[str, Array]] = {
    "mlp": {"ids": np.array([3, 59, 0, 17])},
    "cnn": {"x": normal(2, 3, 9, 9, seed=9)},
    "lstm": {"x": normal(5, 2, 8, seed=9)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "uint8": {"weight_type": QuantType.QUInt8},
    "int8": {"weight_type": QuantType.QInt8},
    "per channel": {"per_channel": True, "weight_type": QuantType.QInt8},
    "reduced range": {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8},
    "symmetric": {"weight_type": QuantType.QInt8, "extra_options": {"WeightSymmetric": True}},
}


def built(name: str) -> onnx.ModelProto:
    text, shapes = MODELS[name]
    return model(text, {n: normal(*shape, seed=i, scale=0.3) for i, (n, shape) in enumerate(shapes.items())})


def constants(proto: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_the_float_graph_is_back(name: str, options: str, tmp_path: Path) -> None:
    source = built(name)
    quantized = dynamic(source, tmp_path, **OPTIONS[options])
    assert quantized_left(quantized)
    undone, made = undo(quantized)
    assert quantized_left(undone) == []
    assert made.report.left == []
    assert sum(made.report.undone.values()) >= len(quantized_left(quantized))
    assert sorted(operators(undone)) == sorted(operators(source))
    near(outputs(undone, FEEDS[name]), float_outputs(source, undone, FEEDS[name]))
    near(outputs(undone, FEEDS[name]), outputs(source, FEEDS[name]), 0.05)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_have_their_names_and_exact_values(name: str, options: str, tmp_path: Path) -> None:
    quantized = dynamic(built(name), tmp_path, **OPTIONS[options])
    undone, made = undo(quantized)
    before, after = constants(quantized), constants(undone)
    weights = MODELS[name][1].keys() - {"b", "b2", "B"}
    for weight in weights:
        suffix = "_Transposed_quantized" if f"{weight}_Transposed_quantized" in before else "_quantized"
        stem = f"{weight}{suffix}".removesuffix("_quantized")
        codes, scale, zero = before[f"{weight}{suffix}"], before[f"{stem}_scale"], before[f"{stem}_zero_point"]
        if name == "lstm":
            scale, zero = (v.reshape(2, 1, -1) for v in (scale, zero))
        values = exact(codes, scale, zero)
        if name == "lstm" or suffix != "_quantized":
            values = values.swapaxes(-1, -2)
        np.testing.assert_array_equal(after[weight], values)
    floats = [w for w in made.weights if isinstance(w, FloatWeight)]
    assert floats
    for made_of in floats:
        assert made_of.exact
        number = made_of.codes
        raw = before[made.weights[number].name] if isinstance(number, int) else made_of.read_codes()
        np.testing.assert_array_equal(after[made_of.name], describes(made_of, raw))


def test_int8_activations(tmp_path: Path) -> None:
    """There the scale is computed by ordinary operators, which go too."""
    source = built("cnn")
    quantized = dynamic(source, tmp_path, extra_options={"ActivationSymmetric": True}, weight_type=QuantType.QInt8)
    undone, _ = undo(quantized)
    assert sorted(operators(undone)) == sorted(operators(source))


def test_products_of_two_activations(tmp_path: Path) -> None:
    text = "g (float[4,16] x, float[16,8] z) => (float[4,8] y) { y = MatMul(x, z) }"
    source = model(text)
    quantized = dynamic(source, tmp_path, extra_options={"MatMulConstBOnly": False})
    assert quantized_left(quantized)
    undone, _ = undo(quantized)
    assert operators(undone) == ["MatMul"]
    feeds = {"x": normal(4, 16), "z": normal(16, 8)}
    near(outputs(undone, feeds), outputs(source, feeds))


def test_in_subgraphs(tmp_path: Path) -> None:
    text = """g (bool c, float[4,32] x) => (float[4,32] y) {
        a = MatMul(x, W)
        y = If (c) <then_branch = t () => (float[4,32] p) { p = MatMul(a, W) },
                    else_branch = e () => (float[4,32] q) { q1 = MatMul(a, V) q = Add(q1, x) }> }"""
    source = model(text, {"W": normal(32, 32), "V": normal(32, 32, seed=1)})
    quantized = dynamic(source, tmp_path, extra_options={"EnableSubgraph": True})
    assert quantized_left(quantized).count("MatMulInteger") == 3
    undone, made = undo(quantized)
    assert sorted(operators(undone)) == sorted(operators(source))
    assert made.report.left == []
    for condition in (True, False):
        feeds = {"c": np.array(condition), "x": normal(4, 32, seed=5)}
        near(outputs(undone, feeds), outputs(source, feeds), 0.05)


def test_in_functions() -> None:
    """A local function with all of it inside, called with codes and scale."""
    head = '<ir_version: 9, opset_import: ["": 17, "local": 1]>'
    text = f"""{head} g (float[4,32] x) => (float[4,16] y) {{ y = local.dense (x, w_quantized, w_scale, w_zero) }}
        <opset_import: ["": 17], domain: "local"> dense (x, w, s, z) => (y) {{
        q, qs, qz = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, qz, z) f = Cast <to = 1> (i)
        k = Mul(qs, s) y = Mul(f, k) }}"""
    quantized = onnx.parser.parse_model(text)
    codes = np.random.default_rng(0).integers(-128, 128, (32, 16)).astype(np.int8)
    scale, zero = np.array(0.01, np.float32), np.array(3, np.int8)
    weights: dict[str, Array] = {"w_quantized": codes, "w_scale": scale, "w_zero": zero}
    for name, value in weights.items():
        quantized.graph.initializer.append(numpy_helper.from_array(value, name))
    undone, _ = undo(quantized)
    assert operators(undone) == ["MatMul"]
    feeds = {"x": normal(4, 32)}
    near(outputs(undone, feeds), [feeds["x"] @ exact(codes, scale, zero)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("channels", [True, False])
def test_fused_products(bias: bool, channels: bool) -> None:
    codes = np.random.default_rng(1).integers(0, 256, (32, 16)).astype(np.uint8)
    scale: Array = np.linspace(0.01, 0.02, 16, dtype=np.float32) if channels else np.array(0.01, np.float32)
    zero: Array = np.arange(16, dtype=np.uint8) if channels else np.array(120, np.uint8)
    weights: dict[str, Array] = {"W_quantized": codes, "s": scale, "z": zero, "b": normal(16)}
    text = f"""<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[4,32] x) => (float[4,16] y, float[4,16] v) {{
        y = com.microsoft.DynamicQuantizeMatMul (x, W_quantized, s, z{", b" if bias else ""})
        q, qs, qz = DynamicQuantizeLinear(x)
        v = com.microsoft.MatMulIntegerToFloat (q, W_quantized, qs, s, qz, z{", b" if bias else ""}) }}"""
    quantized = onnx.parser.parse_model(text)
    quantized.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    undone, _ = undo(quantized)
    assert set(operators(undone)) == ({"MatMul", "Add"} if bias else {"MatMul"})
    assert [t.name for t in undone.graph.initializer if len(t.dims) == 2] == ["W"]  # one for both
    feeds = {"x": normal(4, 32, seed=3)}
    want = feeds["x"] @ exact(codes, scale, zero) + (weights["b"] if bias else 0)
    near(outputs(undone, feeds), [want, want])
    near(outputs(undone, feeds), outputs(quantized, feeds), 0.03)


def test_attention(tmp_path: Path) -> None:
    text = """g (float[2,6,16] x, int32[2] m) => (float[2,6,16] y) {
        y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, W, b, m) }"""
    head = '<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>'
    source = model(text, {"W": normal(16, 48, scale=0.2), "b": normal(48, scale=0.1)}, head)
    quantized = dynamic(source, tmp_path, per_channel=True)
    assert quantized_left(quantized) == ["DynamicQuantizeLinear", "com.microsoft.QAttention"]
    undone, _ = undo(quantized)
    assert operators(undone) == ["com.microsoft.Attention"]
    feeds = {"x": normal(2, 6, 16), "m": np.array([6, 4], np.int32)}
    near(outputs(undone, feeds), float_outputs(source, undone, feeds))
    near(outputs(undone, feeds), outputs(quantized, feeds), 0.05)


def test_embed_layer_normalization() -> None:
    text = """g (int32[2,5] ids, int32[2,5] segments, int32[2,5] m) => (float[2,5,32] y, int32[2] k) {
        y, k = com.microsoft.QEmbedLayerNormalization (ids, segments, A_quantized, P_quantized, S_quantized,
            G_quantized, B_quantized, m, As, Ps, Ss, Gs, Bs, Az, Pz, Sz, Gz, Bz) }"""
    head = '<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>'
    weights: dict[str, Array] = {}
    shapes = {"A": (40, 32), "P": (8, 32), "S": (2, 32), "G": (32,), "B": (32,)}
    for i, (name, shape) in enumerate(shapes.items()):
        weights[f"{name}_quantized"] = np.random.default_rng(i).integers(0, 256, shape).astype(np.uint8)
        weights[f"{name}s"], weights[f"{name}z"] = np.array(0.01 * (i + 1), np.float32), np.array(100 + i, np.uint8)
    quantized = model(text, weights, head)
    undone, _ = undo(quantized)
    assert operators(undone) == ["com.microsoft.EmbedLayerNormalization"]
    found = constants(undone)
    for name in shapes:
        want = exact(weights[f"{name}_quantized"], weights[f"{name}s"], weights[f"{name}z"])
        np.testing.assert_array_equal(found[name], want)
    ids = np.array([[1, 2, 3, 4, 5], [39, 0, 7, 7, 7]], np.int32)
    feeds = {"ids": ids, "segments": ids % 2, "m": (ids > 0).astype(np.int32)}
    near(outputs(undone, feeds), outputs(quantized, feeds), 1e-5)


def test_what_is_not_understood_stays() -> None:
    text = """g (uint8[4,32] x) => (int32[4,16] y) { y = MatMulInteger(x, W) }"""
    quantized = model(text, {"W": np.ones((32, 16), np.uint8)})
    undone, made = undo(quantized)
    assert quantized_left(undone) == ["MatMulInteger"]
    assert [(left.op_type, left.node) for left in made.report.left] == [("MatMulInteger", "y")]
    assert "scaled" in made.report.left[0].reason
    assert made.report.undone == {}


def test_activations_may_stay_quantized(tmp_path: Path) -> None:
    source = built("mlp")
    undone, _ = undo(dynamic(source, tmp_path), keep_activations=True)
    left = quantized_left(undone)
    assert "MatMulInteger" not in left
    assert left.count("DynamicQuantizeLinear") == left.count("DequantizeLinear") == 2
    near(outputs(undone, FEEDS["mlp"]), outputs(dynamic(source, tmp_path), FEEDS["mlp"]), 1e-5)


def test_integer_inputs_are_scaled_by_ordinary_operators() -> None:
    """MatMulInteger of an input of integers: its scale comes in beside it."""
    text = """g (uint8[4,32] x, float s) => (float[4,16] y) {
        i = MatMulInteger(x, W, z) f = Cast <to = 1> (i) k = Mul(s, ws) y = Mul(f, k) }"""
    codes = np.random.default_rng(0).integers(-128, 128, (32, 16)).astype(np.int8)
    quantized = model(text, {"W": codes, "z": np.array(7, np.uint8), "ws": np.array(0.5, np.float32)})
    undone, _ = undo(quantized)
    assert operators(undone) == ["Cast", "Sub", "Mul", "MatMul"]
    feeds: dict[str, Array] = {"x": np.arange(128, dtype=np.uint8).reshape(4, 32), "s": np.array(0.1, np.float32)}
    near(outputs(undone, feeds), outputs(quantized, feeds))


def test_biases_that_are_quantized_as_the_model_runs() -> None:
    """Older quantizers divided the bias by the scale of the sums and added it to these."""
    text = """g (float[2,3,8,8] x) => (float[2,16,8,8] y) {
        q, qs, qz = DynamicQuantizeLinear(x) i = ConvInteger<pads = [1,1,1,1]>(q, W_quantized, qz, z)
        k = Mul(qs, ws) b1 = Div(b, k) b2 = Floor(b1) b3 = Cast<to = 6>(b2) r = Reshape(b3, dims)
        a = Add(i, r) f = Cast<to = 1>(a) y = Mul(f, k) }"""
    codes = np.random.default_rng(0).integers(0, 256, (16, 3, 3, 3)).astype(np.uint8)
    weights: dict[str, Array] = {"W_quantized": codes, "z": np.array(127, np.uint8), "ws": np.array(0.01, "<f4")}
    quantized = model(text, weights | {"b": normal(16), "dims": np.array([1, -1, 1, 1])})
    undone, _ = undo(quantized)
    assert operators(undone) == ["Conv"]
    assert len(undone.graph.node[0].input) == 3
    np.testing.assert_array_equal(constants(undone)["W"], exact(codes, weights["ws"], weights["z"]))
    feeds = {"x": normal(2, 3, 8, 8)}
    near(outputs(undone, feeds), outputs(quantized, feeds), 0.02)


def test_names_within_hide_no_others() -> None:
    """A branch whose own values have the names of outer ones."""
    inner = [helper.make_node("Relu", ["x"], ["d"]), helper.make_node("Add", ["d", "d"], ["r"])]
    branch = helper.make_graph(inner, "b", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)])
    text = "g (bool c, float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) }"
    quantized = model(text, {"s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)})
    node = helper.make_node("If", ["c"], ["i"], then_branch=branch, else_branch=branch)
    quantized.graph.node.extend([node, helper.make_node("Add", ["i", "d"], ["y"])])
    undone, _ = undo(quantized)
    feeds = {"c": np.array(True), "x": np.array([1, 2, -3, 4], np.float32)}
    near(outputs(undone, feeds), [3 * np.maximum(feeds["x"], 0) + np.minimum(feeds["x"], 0)])

"""Weights that a graph dequantizes itself, and weights in blocks."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from conx.graph.dequantize import FloatWeight, dequantized
from conx.graph.dequantize.files import complete, opened
from tests.builders import model, normal
from tests.graph.dequantize_kit import Array, describes, exact, float_outputs, near, operators, outputs, undo

MICROSOFT = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
RNG = np.random.default_rng(0)


def head(opset: int) -> str:
    return f'<ir_version: {10 if opset > 18 else 8}, opset_import: ["": {opset}]>'


def integers(kind: str, *shape: int) -> Array:
    limits = {"int4": (-8, 8), "uint4": (0, 16)}
    if kind in limits:
        return RNG.integers(*limits[kind], shape).astype(getattr(ml_dtypes, kind))
    limit = np.iinfo(np.dtype(kind))
    return RNG.integers(limit.min, limit.max + 1, shape).astype(kind)


def scales(*shape: int, dtype: Any = np.float32) -> Array:
    return np.asarray(RNG.random(shape) * 0.1 + 0.01, dtype)


def initializers(proto: onnx.ModelProto) -> dict[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


def check_descriptions(made: Any, undone: onnx.ModelProto, quantized: onnx.ModelProto) -> list[FloatWeight]:
    """What weights say of codes, scales and zero points gives the very values."""
    before, after = initializers(quantized), initializers(undone)
    found = [w for w in made.weights if isinstance(w, FloatWeight)]
    for weight in found:
        codes = weight.codes
        if weight.exact:
            stored = weight.read_codes()
            np.testing.assert_array_equal(after[weight.name], describes(weight, stored))
            if isinstance(codes, int):
                assert made.weights[codes].name in before
            else:
                assert isinstance(codes, np.ndarray)
            if weight.float_axis is not None and weight.block == 1:
                assert weight.shape[weight.float_axis] == weight.codes_shape[weight.axis or 0]
        blocks = list(weight.blocks(1 << 10))
        assert b"".join(b.tobytes() for b in blocks) == after[weight.name].tobytes()
    return found


KINDS = [("int8", 10), ("uint8", 13), ("int8", 17), ("int16", 21), ("uint16", 21), ("int4", 21), ("uint4", 23)]


@pytest.mark.parametrize(
    ("kind", "opset", "zero"), [("int32", 13, False), *((*kind, zero) for kind in KINDS for zero in (True, False))]
)
def test_per_tensor_and_per_axis(kind: str, opset: int, zero: bool) -> None:
    codes = integers(kind, 32, 40)
    text = (
        "g (float[3,32] x) => (float[3,40] y, float[3,40] z) { w = DequantizeLinear(W_quantized, s{0}) y = MatMul(x, w)"
    )
    points = (", p", ", q") if zero else ("", "")
    text = f"""g (float[3,32] x) => (float[3,40] y, float[3,40] z) {{
        w = DequantizeLinear(W_quantized, s{points[0]}) y = MatMul(x, w)
        v = DequantizeLinear{"<axis = -1>" if opset > 10 else ""}(V_quantized, t{points[1]}) z = MatMul(x, v) }}"""
    axis = (40,) if opset > 10 else ()
    weights = {"W_quantized": codes, "V_quantized": integers(kind, 32, 40), "s": scales(), "t": scales(*axis)}
    if zero:
        weights |= {"p": integers(kind), "q": integers(kind, *axis)}
    quantized = model(text, weights, head(opset))
    undone, made = undo(quantized)
    assert operators(undone) == ["MatMul", "MatMul"]
    found = initializers(undone)
    np.testing.assert_array_equal(found["W"], exact(codes, weights["s"], weights.get("p")))
    np.testing.assert_array_equal(found["V"], exact(weights["V_quantized"], weights["t"], weights.get("q")))
    (w, v) = check_descriptions(made, undone, quantized)
    assert (w.axis, v.axis) == (None, 1 if axis else None)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["int4", "uint8"])
def test_blocks(kind: str, axis: int) -> None:
    shape = (6, 33, 20)
    counts = tuple(-(-d // 8) if i == axis else d for i, d in enumerate(shape))
    text = f"""g (float[6,33,20] x) => (float[6,33,20] y) {{
        w = DequantizeLinear<axis = {axis}, block_size = 8>(Q, s, p) y = Add(x, w) }}"""
    weights = {"Q": integers(kind, *shape), "s": scales(*counts), "p": integers(kind, *counts)}
    quantized = model(text, weights, head(21))
    undone, made = undo(quantized)
    groups = np.arange(shape[axis]) // 8
    want = exact(weights["Q"], weights["s"].take(groups, axis), weights["p"].take(groups, axis))
    near(outputs(undone, {"x": np.zeros(shape, np.float32)}), [want], 0)
    (weight,) = check_descriptions(made, undone, quantized)
    assert (weight.axis, weight.block, weight.shared) == (axis, 8, False)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_small_floats(kind: str) -> None:
    codes = normal(32, 40).astype(getattr(ml_dtypes, kind))
    text = "g (float[3,32] x) => (float[3,40] y) { w = DequantizeLinear<axis = 1>(Q, s) y = MatMul(x, w) }"
    scale = scales(40)
    quantized = model(text, {"Q": codes, "s": scale}, head(21))
    undone, made = undo(quantized)
    (weight,) = check_descriptions(made, undone, quantized)
    assert (weight.exact, weight.codes) == (False, None)
    np.testing.assert_array_equal(initializers(undone)[weight.name], codes.astype(np.float32) * scale)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_stay_halves(dtype: Any) -> None:
    name = "float16" if dtype is np.float16 else "bfloat16"
    text = f"g ({name}[3,32] x) => ({name}[3,40] y) {{ w = DequantizeLinear<axis = 1>(Q, s) y = MatMul(x, w) }}"
    weights = {"Q": integers("int8", 32, 40), "s": scales(40, dtype=dtype)}
    undone, _ = undo(model(text, weights, head(21)))
    (found,) = initializers(undone).values()
    want = exact(weights["Q"], weights["s"].astype(np.float32)).astype(dtype)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


PLAIN = {
    "mul": ("f = Cast<to = 1>(Q) w = Mul(f, s)", False, ()),
    "mul, other side": ("f = Cast<to = 1>(Q) w = Mul(s, f)", False, ()),
    "sub after": ("f = Cast<to = 1>(Q) k = Cast<to = 1>(p) d = Sub(f, k) w = Mul(d, s)", True, ()),
    "sub before": ("i = Cast<to = 6>(Q) k = Cast<to = 6>(p) d = Sub(i, k) f = Cast<to = 1>(d) w = Mul(f, s)", True, ()),
    "rows": ("f = Cast<to = 1>(Q) k = Cast<to = 1>(p) d = Sub(f, k) w = Mul(d, s)", True, (32, 1)),
    "columns": ("f = Cast<to = 1>(Q) w = Mul(f, s)", False, (40,)),
    "transposed": ("t = Transpose(T) f = Cast<to = 1>(t) w = Mul(f, s)", False, (40,)),
    "reshaped": ("t = Reshape(R, dims) w = DequantizeLinear<axis = 1>(t, s)", False, (40,)),
    "twice reshaped": (
        "t = Reshape(R, dims) u = Identity(t) v = DequantizeLinear<axis = 0>(u, s) w = Neg(v)",
        False,
        (32,),
    ),
}


@pytest.mark.parametrize("form", PLAIN)
def test_plain_operators(form: str) -> None:
    nodes, zero, shape = PLAIN[form]
    text = f"g (float[3,32] x) => (float[3,40] y) {{ {nodes} y = MatMul(x, w) }}"
    codes = integers("int8", 32, 40)
    weights = {"Q": codes, "T": codes.T, "R": codes.reshape(4, 8, 40), "dims": np.array([32, 40]), "s": scales(*shape)}
    if zero:
        weights["p"] = integers("int8", *shape)
    quantized = model(text, weights)
    undone, made = undo(quantized)
    assert operators(undone) == (["Neg", "MatMul"] if form == "twice reshaped" else ["MatMul"])
    scale = weights["s"].reshape(32, 1) if form == "twice reshaped" else weights["s"]
    (weight,) = check_descriptions(made, undone, quantized)
    assert weight.exact
    np.testing.assert_array_equal(initializers(undone)[weight.name], exact(codes, scale, weights.get("p")))
    feeds = {"x": normal(3, 32)}
    near(outputs(undone, feeds), outputs(quantized, feeds))


def test_subtraction_that_may_wrap_is_left_alone() -> None:
    text = "g (float[3,32] x) => (float[3,40] y) { d = Sub(Q, p) f = Cast<to = 1>(d) w = Mul(f, s) y = MatMul(x, w) }"
    quantized = model(text, {"Q": integers("int8", 32, 40), "p": integers("int8"), "s": scales()})
    undone, _ = undo(quantized)
    assert operators(undone) == ["Sub", "Cast", "Mul", "MatMul"]


def test_constant_nodes_and_ties() -> None:
    """Codes in a Constant node, dequantized twice with the same scale and once with another."""
    text = """g (float[3,32] x) => (float[3,32] y) {
        a = DequantizeLinear(q, s, p) b = DequantizeLinear(q, s, p) c = DequantizeLinear(q, t, p)
        h = MatMul(x, a) k = MatMul(h, b) y = MatMul(k, c) }"""
    quantized = model(text, {"s": scales(), "t": scales(), "p": integers("uint8")})
    node = helper.make_node("Constant", [], ["q"], value=numpy_helper.from_array(integers("uint8", 32, 32)))
    quantized.graph.node.insert(0, node)
    undone, made = undo(quantized)
    assert operators(undone) == ["MatMul"] * 3
    assert len([w for w in made.weights if isinstance(w, FloatWeight)]) == 2
    near(outputs(undone, {"x": normal(3, 32)}), outputs(quantized, {"x": normal(3, 32)}))


@pytest.mark.parametrize(("rows", "plain"), [(True, True), (False, True), (False, False)])
def test_embeddings(rows: bool, plain: bool) -> None:
    """Codes are gathered first, and dequantized after; where each row has its scale, that is gathered too."""
    if plain:
        scale = "Gather(s, ids)" if rows else "Identity(s)"
        nodes = f"e = Gather(E_quantized, ids) f = Cast<to = 1>(e) k = {scale} y = Mul(f, k)"
    else:
        nodes = """e = Gather(E_quantized, ids) t = Transpose<perm = [1, 0, 2]>(e) u = DequantizeLinear(t, s)
            y = Transpose<perm = [1, 0, 2]>(u)"""
    shape = (50, 1) if rows else ()
    weights = {"E_quantized": integers("int8", 50, 32), "s": scales(*shape)}
    quantized = model(f"g (int64[2,5] ids) => (float[2,5,32] y) {{ {nodes} }}", weights)
    undone, made = undo(quantized)
    assert set(operators(undone)) <= {"Gather", "Transpose"}
    (weight,) = check_descriptions(made, undone, quantized)
    assert weight.name == "E"
    np.testing.assert_array_equal(initializers(undone)["E"], exact(weights["E_quantized"], weights["s"]))
    feeds = {"ids": np.arange(10).reshape(2, 5)}
    near(outputs(undone, feeds), outputs(quantized, feeds), 0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_nbits(bits: int, symmetric: bool) -> None:
    """K is no multiple of the block, and the number of blocks is odd."""
    source = model("g (float[3,72] x) => (float[3,24] y) { h = MatMul(x, W1) r = Relu(h) y = MatMul(r, W2) }",
                   {"W1": normal(72, 40), "W2": normal(40, 24, seed=1)}, MICROSOFT)  # fmt: skip
    quantizer = MatMulNBitsQuantizer(source, block_size=32, is_symmetric=symmetric, bits=bits, accuracy_level=1)
    quantizer.process()
    quantized = quantizer.model.model
    assert "com.microsoft.MatMulNBits" in operators(quantized)
    undone, made = undo(quantized)
    assert operators(undone) == ["MatMul", "Relu", "MatMul"]
    assert sorted(initializers(undone)) == ["W1", "W2"]
    feeds = {"x": normal(3, 72, seed=4)}
    near(outputs(undone, feeds), float_outputs(source, undone, feeds))
    near(outputs(undone, feeds), outputs(quantized, feeds))
    for weight in check_descriptions(made, undone, quantized):
        assert weight.exact
        assert (weight.axis, weight.block, weight.shared) == (1, 32, False)
        assert weight.codes_dtype.bits == bits
        assert weight.shape == weight.codes_shape[::-1]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("points", ["none", "packed", "floats", "odd floats"])
def test_matmul_nbits_by_hand(bits: int, points: str) -> None:
    length, rows, block = 80, 20, 16
    blocks = length // block
    codes = RNG.integers(0, 1 << bits, (rows, length)).astype(np.uint8)
    scale = scales(rows, blocks)
    zeros = RNG.integers(0, 1 << bits, (rows, blocks)).astype(np.uint8)
    weights = {"B": _packed(codes, bits).reshape(rows, blocks, -1), "s": scale, "b": normal(rows)}
    inputs = ["x", "B", "s", "", "", "b"]
    values = zeros.astype(np.float32)
    if points == "packed":
        weights["z"] = _packed(zeros, bits)
    elif points == "none":
        values[:] = 1 << (bits - 1)
    else:
        values += np.float32(0.25 if points == "odd floats" else 0)
        weights["z"] = values
    if points != "none":
        inputs[3] = "z"
    text = f"""g (float[3,80] x) => (float[3,20] y) {{
        y = com.microsoft.MatMulNBits<K = 80, N = 20, bits = {bits}, block_size = 16>({", ".join(inputs)}) }}"""
    quantized = model(text.replace(", , ,", ', "", "",').replace(", ,", ', "",'), weights, MICROSOFT)
    undone, made = undo(quantized)
    assert operators(undone) == ["MatMul", "Add"]
    (weight,) = check_descriptions(made, undone, quantized)
    assert weight.exact == (points != "odd floats")
    groups = np.arange(length) // block
    want = (codes.astype(np.float32) - values[:, groups]) * scale[:, groups]
    np.testing.assert_array_equal(initializers(undone)[weight.name], want.T)
    if bits == 4 or points in ("none", "packed"):  # onnxruntime's CPU has no others
        near(outputs(undone, {"x": normal(3, 80)}), outputs(quantized, {"x": normal(3, 80)}))


def _packed(codes: Array, bits: int) -> Array:
    """Rows of codes in bytes, the lowest bits first."""
    planes = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    return np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def test_groups_in_another_order() -> None:
    codes = RNG.integers(0, 16, (24, 64)).astype(np.uint8)
    groups = RNG.permutation(np.arange(64) // 16).astype(np.int32)
    scale = scales(24, 4)
    weights = {"B": _packed(codes, 4).reshape(24, 4, 8), "s": scale, "z": _packed(np.full((24, 4), 8, np.uint8), 4)}
    text = """g (float[3,64] x) => (float[3,24] y) {
        y = com.microsoft.MatMulNBits<K = 64, N = 24, bits = 4, block_size = 16>(x, B, s, z, g) }"""
    quantized = model(text, weights | {"g": groups}, MICROSOFT)
    undone, made = undo(quantized)
    (weight,) = check_descriptions(made, undone, quantized)
    np.testing.assert_array_equal(initializers(undone)[weight.name], ((codes - 8.0) * scale[:, groups]).T.astype("<f4"))
    near(outputs(undone, {"x": normal(3, 64)}), outputs(quantized, {"x": normal(3, 64)}))


@pytest.mark.parametrize("kind", ["int4", "uint4", "bytes"])
@pytest.mark.parametrize("zero", [True, False])
def test_gather_block_quantized(kind: str, zero: bool) -> None:
    rows, width, block = 30, 64, 16
    codes = integers("int4" if kind == "int4" else "uint4", rows, width)
    zeros = integers("int4" if kind == "int4" else "uint4", rows, width // block)
    scale = scales(rows, width // block)
    weights = {"E_Q4": codes, "s": scale, "z": zeros}
    if kind == "bytes":
        weights |= {"E_Q4": _packed(codes.astype(np.uint8), 4), "z": _packed(zeros.astype(np.uint8), 4)}
    text = f"""g (int64[2,3] ids) => (float[2,3,64] y) {{
        y = com.microsoft.GatherBlockQuantized<gather_axis = 0, quantize_axis = 1, block_size = 16
            {", bits = 4" if kind == "bytes" else ""}>(E_Q4, ids, s{", z" if zero else ""}) }}"""
    quantized = model(text, {k: v for k, v in weights.items() if zero or k != "z"}, MICROSOFT)
    undone, made = undo(quantized)
    assert operators(undone) == ["Gather"]
    (weight,) = check_descriptions(made, undone, quantized)
    assert weight.exact
    groups = np.arange(width) // block
    default = np.array(8 if kind == "bytes" else 0)
    points = zeros.astype(np.int64)[:, groups] if zero else default
    np.testing.assert_array_equal(initializers(undone)["E"], exact(codes, scale[:, groups], points))
    feeds = {"ids": np.array([[0, 1, 2], [29, 7, 7]])}
    near(outputs(undone, feeds), outputs(quantized, feeds))


@pytest.mark.parametrize("kind", [MatMulBnb4Quantizer.FP4, MatMulBnb4Quantizer.NF4])
def test_matmul_bnb4(kind: int) -> None:
    source = model("g (float[3,40] x) => (float[3,24] y) { y = MatMul(x, W) }", {"W": normal(40, 24)}, MICROSOFT)
    quantizer = MatMulBnb4Quantizer(source, kind, block_size=64)
    quantizer.process()
    quantized = quantizer.model.model
    assert operators(quantized) == ["com.microsoft.MatMulBnb4"]
    undone, made = undo(quantized)
    assert operators(undone) == ["MatMul"]
    assert list(initializers(undone)) == ["W"]
    (weight,) = check_descriptions(made, undone, quantized)
    assert not weight.exact
    near(outputs(undone, {"x": normal(3, 40)}), outputs(quantized, {"x": normal(3, 40)}))
    near(
        outputs(undone, {"x": np.eye(40, dtype=np.float32)[:3]}), outputs(quantized, {"x": np.eye(40, dtype="<f4")[:3]})
    )


@pytest.mark.parametrize("block", [0, 16])
def test_mixture_of_experts(block: int) -> None:
    experts, hidden, inter = 4, 32, 48
    first = RNG.integers(0, 16, (experts, inter, hidden)).astype(np.uint8)
    second = RNG.integers(0, 16, (experts, hidden, inter)).astype(np.uint8)
    counts = (hidden // block, inter // block) if block else ()
    s1 = scales(experts, inter, *counts[:1]) / 10
    s2 = scales(experts, hidden, *counts[1:]) / 10
    weights = {"a": _packed(first, 4), "b": _packed(second, 4), "s1": s1, "s2": s2}
    text = f"""g (float[6,32] x, float[6,4] r) => (float[6,32] y) {{
        y = com.microsoft.QMoE<k = 2, activation_type = "relu", normalize_routing_weights = 1, expert_weight_bits = 4
            {", block_size = 16" if block else ""}>(x, r, a, s1, "", b, s2) }}"""
    quantized = model(text, weights, MICROSOFT)
    undone, made = undo(quantized)
    assert operators(undone) == ["com.microsoft.MoE"]
    for weight, codes, scale in zip(
        check_descriptions(made, undone, quantized), (first, second), (s1, s2), strict=True
    ):
        full = scale[:, :, np.arange(codes.shape[2]) // block] if block else scale[..., None]
        np.testing.assert_array_equal(initializers(undone)[weight.name], exact(codes, full, np.array(8)))
    feeds = {"x": normal(6, 32), "r": normal(6, 4, seed=2)}
    near(outputs(undone, feeds), outputs(quantized, feeds), 1e-5)


def test_integers_at_the_edges_keep_their_types() -> None:
    """uint8 in and int8 out, by ordinary operators."""
    text = """g (uint8[2,3,4] x, uint8[2,3,4] u) => (int8[2,3,4] y, float[2,3,4] v) {
        f = DequantizeLinear(x, s, z) a = Add(f, f) y = QuantizeLinear(a, t, k)
        v = DequantizeLinear<axis = 1>(u, c, d) }"""
    weights = {"s": np.array(0.25, "<f4"), "z": np.array(7, np.uint8), "t": np.array(0.6, "<f4")}
    weights |= {"k": np.array(-3, np.int8), "c": scales(3), "d": integers("uint8", 3)}
    quantized = model(text, weights)
    undone, made = undo(quantized)
    assert made.report.left == []
    feeds = {"x": integers("uint8", 2, 3, 4), "u": integers("uint8", 2, 3, 4)}
    got, want = outputs(undone, feeds), outputs(quantized, feeds)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_overridable_weights_are_dequantized_as_the_model_runs() -> None:
    """From IR version 4 on an initializer that is an input too may be fed."""
    text = "g (float[3,32] x) => (float[3,40] y) { w = DequantizeLinear(Q, s) y = MatMul(x, w) }"
    quantized = model(text, {"Q": integers("int8", 32, 40), "s": scales()})
    quantized.graph.input.append(helper.make_tensor_value_info("Q", TensorProto.INT8, [32, 40]))
    undone, _ = undo(quantized)
    assert operators(undone) == ["Cast", "Mul", "MatMul"]
    feeds = {"x": normal(3, 32), "Q": integers("int8", 32, 40)}
    near(outputs(undone, feeds), outputs(quantized, feeds))


def test_models_of_contributed_operators_alone() -> None:
    """The float operators are of a domain that the model has not imported."""
    text = """g (float[3,64] x) => (float[3,8] y) {
        y = com.microsoft.MatMulNBits<K = 64, N = 8, bits = 8, block_size = 64>(x, B, s) }"""
    weights = {"B": RNG.integers(0, 256, (8, 1, 64)).astype(np.uint8), "s": scales(8, 1)}
    quantized = model(text, weights, '<ir_version: 8, opset_import: ["com.microsoft": 1]>')
    undone, _ = undo(quantized)
    assert operators(undone) == ["MatMul"]
    near(outputs(undone, {"x": normal(3, 64)}), outputs(quantized, {"x": normal(3, 64)}))


def test_models_of_version_3() -> None:
    """Where every initializer is an input too."""
    text = "g (float[3,32] x) => (float[3,40] y) { w = DequantizeLinear(W_quantized, s) y = MatMul(x, w) }"
    weights = {"W_quantized": integers("int8", 32, 40), "s": scales()}
    quantized = model(text, weights, '<ir_version: 3, opset_import: ["": 10]>')
    for tensor in quantized.graph.initializer:
        quantized.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    with opened(quantized) as source:
        undone = complete(dequantized(source))
    onnx.checker.check_model(undone, full_check=True)
    assert [v.name for v in undone.graph.input] == ["x", "W"]
    near(outputs(undone, {"x": normal(3, 32)}), outputs(quantized, {"x": normal(3, 32)}))

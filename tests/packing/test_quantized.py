"""A quantized model, packed: its own graph bit for bit, float graphs beside it, codes once, parameters counted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, matmul_nbits_quantizer

import conx
from conx.container.reader import Reader
from conx.packing import tensors
from tests.builders import CPU, model, normal, one_thread, save
from tests.graph.dequantize_kit import dynamic, near, operators, outputs, quantized_left, static
from tests.packing.kit import Packed, pack

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
Feed = dict[str, Array]
Quantizer = Callable[[onnx.ModelProto, Path], onnx.ModelProto]

NET = model(
    """
    g (float[1, 3, 12, 12] x) => (float[1, 40] y) {
        a = Conv<pads=[1, 1, 1, 1]>(x, k, kb)
        b = Relu(a)
        c = GlobalAveragePool(b)
        d = Flatten(c)
        e = Gemm<transB=1>(d, g1, gb)
        f = Relu(e)
        y = MatMul(f, m)
    }""",
    {
        "k": normal(64, 3, 3, 3, scale=0.2),
        "kb": normal(64, seed=1),
        "g1": normal(96, 64, seed=2, scale=0.2),
        "gb": normal(96, seed=3),
        "m": normal(96, 40, seed=4, scale=0.2),
    },
)
TEXT = model(
    """
    g (int64[1, n] i) => (float[n, 1, 32] y) {
        a = Gather(e, i)
        b = Transpose<perm=[1, 0, 2]>(a)
        c, h, s = LSTM<hidden_size=32>(b, w, r)
        d = Squeeze(c, one)
        y = MatMul(d, m)
    }""",
    {
        "e": normal(200, 24),
        "w": normal(1, 128, 24, seed=1, scale=0.2),
        "r": normal(1, 128, 32, seed=2, scale=0.2),
        "one": np.array([1]),
        "m": normal(32, 32, seed=3, scale=0.2),
    },
)
WIDE = model("g (float[n, 128] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": normal(128, 64, scale=0.1)})


def feed(made: onnx.ModelProto, seed: int = 0) -> Feed:
    (value,) = made.graph.input
    dims = [d.dim_value or 5 for d in value.type.tensor_type.shape.dim]
    if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        return {value.name: np.random.default_rng(seed).integers(0, 200, dims)}
    return {value.name: normal(*dims, seed=seed + 10)}


def blocks(bits: int, symmetric: bool) -> Quantizer:
    def run(made: onnx.ModelProto, _folder: Path) -> onnx.ModelProto:
        config = matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(
            block_size=32, is_symmetric=symmetric, accuracy_level=4, bits=bits
        )
        copied = onnx.ModelProto()
        copied.CopyFrom(made)
        quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(copied, algo_config=config)
        quantizer.process()
        found: onnx.ModelProto = quantizer.model.model
        return found

    return run


def by_cast(made: onnx.ModelProto, _folder: Path) -> onnx.ModelProto:
    """Codes, Cast, Mul by a column of scales."""
    found = onnx.ModelProto()
    found.CopyFrom(made)
    weight = numpy_helper.to_array(found.graph.initializer[0])
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    del found.graph.initializer[:]
    codes = np.rint(weight / scale).astype(np.int8)
    found.graph.initializer.extend([numpy_helper.from_array(codes, "w_q"), numpy_helper.from_array(scale, "w_s")])
    found.graph.node.insert(0, helper.make_node("Cast", ["w_q"], ["w_f"], to=1))
    found.graph.node.insert(1, helper.make_node("Mul", ["w_f", "w_s"], ["w"]))
    return found


def by_dequantize_linear(
    made: onnx.ModelProto, _folder: Path, axis: int = 1, unsigned: bool = False
) -> onnx.ModelProto:
    found = onnx.ModelProto()
    found.CopyFrom(made)
    weight = numpy_helper.to_array(found.graph.initializer[0])
    del found.graph.initializer[:]
    scale = np.abs(weight).max(axis=1 - axis).astype(np.float32) / np.float32(100)
    zero = np.arange(scale.size) % 50 + 100 if unsigned else np.zeros(scale.size, int)
    along = (slice(None), None) if axis == 0 else (None, slice(None))
    codes = np.rint(weight / scale[along]) + zero[along]
    kind = np.uint8 if unsigned else np.int8
    held = {"w_q": codes.astype(kind), "w_s": scale, "w_z": zero.astype(kind)}
    found.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in held.items())
    found.graph.node.insert(0, helper.make_node("DequantizeLinear", list(held), ["w"], axis=axis))
    return found


CASES: dict[str, tuple[onnx.ModelProto, Quantizer]] = {
    "dynamic": (NET, lambda m, f: dynamic(m, f, weight_type=QuantType.QInt8)),
    "dynamic, per channel": (NET, lambda m, f: dynamic(m, f, weight_type=QuantType.QUInt8, per_channel=True)),
    "dynamic, recurrent": (TEXT, lambda m, f: dynamic(m, f, weight_type=QuantType.QInt8)),
    "QDQ": (NET, lambda m, f: static(m, f, [feed(m, i) for i in range(4)])),
    "QDQ, per channel": (NET, lambda m, f: static(m, f, [feed(m, i) for i in range(4)], per_channel=True)),
    "QOperator": (NET, lambda m, f: static(m, f, [feed(m, i) for i in range(4)], "QOperator")),
    "8-bit blocks": (WIDE, blocks(8, True)),
    "8-bit blocks with zero points": (WIDE, blocks(8, False)),
    "4-bit blocks": (WIDE, blocks(4, True)),
    "4-bit blocks with zero points": (WIDE, blocks(4, False)),
    "Cast and Mul": (WIDE, by_cast),
    "DequantizeLinear": (WIDE, by_dequantize_linear),
    "DequantizeLinear, rows": (WIDE, lambda m, f: by_dequantize_linear(m, f, axis=0)),
    "DequantizeLinear, zero points": (WIDE, lambda m, f: by_dequantize_linear(m, f, unsigned=True)),
}
FLOATS = {"Cast and Mul", "DequantizeLinear", "DequantizeLinear, rows", "DequantizeLinear, zero points"}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, onnx.ModelProto, onnx.ModelProto, Packed]:
    """Name, float model, quantized one, and the latter packed."""
    made, quantize = CASES[request.param]
    quantized = quantize(made, tmp_path)
    return request.param, made, quantized, pack(quantized, tmp_path, name="q")


def test_its_own_graph_is_bit_for_bit(case: tuple[str, onnx.ModelProto, onnx.ModelProto, Packed]) -> None:
    name, made, quantized, packed = case
    given = feed(made)
    want = ort.InferenceSession(quantized.SerializeToString(), one_thread(), providers=CPU).run(None, given)
    served = ("original",) if name in FLOATS else ("original", "int8")
    for precision in served:
        session = conx.InferenceSession(packed.path, one_thread(), precision=precision, providers=CPU)
        np.testing.assert_array_equal(session.run(None, given)[0], want[0])
    assert conx.InferenceSession(packed.path, providers=CPU).precision == "original"
    again = conx.unpack(packed.path, packed.path.with_name("again.onnx"))
    assert again.read_bytes() == packed.model.read_bytes()


def test_float_graphs_have_its_weights(case: tuple[str, onnx.ModelProto, onnx.ModelProto, Packed]) -> None:
    _, made, quantized, packed = case
    given = feed(made)
    want = outputs(conx.dequantize(quantized), given)
    plain = packed.unpack(precision="fp32")
    assert quantized_left(plain) == []
    near(outputs(plain, given), want)
    for precision, bound in (("fp32", 1e-5), ("fp16", 5e-3)):
        session = conx.InferenceSession(packed.path, one_thread(), precision=precision, providers=CPU)
        near(session.run(None, given), want, bound)


def test_codes_are_stored_once(case: tuple[str, onnx.ModelProto, onnx.ModelProto, Packed]) -> None:
    """One stored tensor for the codes of each weight, and none beside it."""
    _, _, _, packed = case
    with Reader(packed.path) as reader:
        index = reader.index
        coded = {i for i, t in enumerate(index.tensors) if t.codec == "linear"}
        whole = sum(t.count for i, t in enumerate(index.tensors) if i not in coded)
        assert coded
        assert whole < 0.15 * sum(index.tensors[i].count for i in coded)
        for graph in index.graphs:
            used = {b.tensor for b in (*graph.holes, *graph.externals)}
            assert coded <= used
    assert packed.report.lossless


def test_parameters_are_those_of_the_float_model(
    case: tuple[str, onnx.ModelProto, onnx.ModelProto, Packed], tmp_path: Path
) -> None:
    _, made, _, packed = case
    plain = conx.inspect(save(made, tmp_path / "plain.onnx")).parameters
    assert conx.inspect(packed.model).parameters == plain
    assert conx.inspect(packed.path).parameters == plain
    assert conx.inspect(packed.path).quantization_parameters > 0
    assert conx.inspect(tmp_path / "plain.onnx").quantization_parameters == 0


@pytest.mark.parametrize("name", ["Cast and Mul", "DequantizeLinear", "DequantizeLinear, zero points"])
def test_int8_of_weights_alone(name: str, tmp_path: Path) -> None:
    """What dequantizes its weights as it runs computes with them as codes."""
    made, quantize = CASES[name]
    packed = pack(quantize(made, tmp_path), tmp_path, name="q")
    small = packed.unpack(precision="int8")
    assert operators(small) == ["com.microsoft.MatMulNBits"]
    session = conx.InferenceSession(packed.path, precision="int8", accuracy_level=0, providers=CPU)
    plain = conx.InferenceSession(packed.path, precision="fp32", providers=CPU)
    bound = 1e-5 if name == "DequantizeLinear" else 0.02
    near(session.run(None, feed(made)), plain.run(None, feed(made)), bound)


def test_one_code_tensor_of_two_scales(tmp_path: Path) -> None:
    """Equal codes that stand for other values are not shared."""
    codes = np.random.default_rng(0).integers(-100, 100, (64, 64)).astype(np.int8)
    text = """
    g (float[n, 64] x) => (float[n, 64] y) {
        v = DequantizeLinear(a, s) w = DequantizeLinear(b, t) u = DequantizeLinear(c, s)
        h = MatMul(x, v) i = MatMul(h, w) y = MatMul(i, u)
    }"""
    scales = {"s": np.array(0.01, np.float32), "t": np.array(0.02, np.float32)}
    made = model(text, {**dict.fromkeys("abc", codes), **scales})
    packed = pack(made, tmp_path)
    given = {"x": normal(3, 64)}
    want = outputs(conx.dequantize(made), given)
    near(conx.InferenceSession(packed.path, precision="fp32", providers=CPU).run(None, given), want)
    with Reader(packed.path) as reader:
        assert len(reader.index.tensors) == 2


def test_bits_asked_for_are_for_what_is_float_in_it(tmp_path: Path) -> None:
    """Without a wish nothing is coded a second time; with one, float weights are, and codes never."""
    made = model(
        "g (float[n, 64] x) => (float[n, 64] y) { v = DequantizeLinear(a, s) h = MatMul(x, v) y = MatMul(h, w) }",
        {
            "a": np.random.default_rng(0).integers(-100, 100, (64, 64)).astype(np.int8),
            "s": np.array(0.01, np.float32),
            "w": normal(64, 64),
        },
    )
    assert pack(made, tmp_path).report.lossless
    coarse = pack(made, tmp_path, bits=4)
    assert not coarse.report.lossless
    back = {t.name: numpy_helper.to_array(t) for t in coarse.unpack().graph.initializer}
    held = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    np.testing.assert_array_equal(back["a"], held["a"])
    assert (back["w"] != held["w"]).any()


def by_wide_codes(made: onnx.ModelProto) -> onnx.ModelProto:
    """DequantizeLinear of int16, of which the format has no codes."""
    found = onnx.ModelProto()
    found.CopyFrom(made)
    weight = numpy_helper.to_array(found.graph.initializer[0])
    del found.graph.initializer[:]
    scale = np.array(np.abs(weight).max() / 32767, np.float32)
    held: dict[str, Array] = {"w_q": np.rint(weight / scale).astype(np.int16), "w_s": scale}
    found.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in held.items())
    found.graph.node.insert(0, helper.make_node("DequantizeLinear", list(held), ["w"]))
    del found.opset_import[:]
    found.opset_import.add(domain="", version=21)
    found.ir_version = 10
    return found


def test_codes_that_the_format_has_not(tmp_path: Path) -> None:
    """A few values are stored beside them, so that there are float graphs all the same."""
    made = by_wide_codes(WIDE)
    packed = pack(made, tmp_path)
    given = feed(WIDE)
    want = outputs(conx.dequantize(made), given)
    for precision, bound in (("original", 1e-5), ("fp32", 1e-5), ("fp16", 5e-3)):
        near(conx.InferenceSession(packed.path, precision=precision, providers=CPU).run(None, given), want, bound)
    assert conx.inspect(packed.path).parameters == 128 * 64


def test_too_many_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tensors, "FREE_EXTRA", 100)
    packed = pack(by_wide_codes(WIDE), tmp_path)
    assert "no float graphs: the values of 'w' and 0 others cannot be had from its codes" in caplog.text
    assert conx.inspect(packed.path).precisions == ("fp16", "fp32", "int8", "original")
    conx.InferenceSession(packed.path, providers=CPU)

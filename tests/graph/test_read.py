"""The reader finds a tensor's values in whatever form the model holds them."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conx.dtypes import DType
from conx.errors import ModelError
from conx.graph.read import INLINE_MAX, Weight, read_model
from tests.builders import give, model, normal, save, varint

Array = npt.NDArray[Any]
COUNT = 1200  # elements: more than INLINE_MAX bytes for types of a byte or more


def only_weight(tensor: TensorProto, path: Path) -> Weight:
    """The weight that the reader makes of a model's only initializer, its values read."""
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }")
    made.graph.initializer.append(tensor)
    save(made, path)
    with read_model(path) as source:
        (weight,) = source.weights
        assert source.proto.graph.initializer[0].dims == tensor.dims
        assert source.proto.graph.initializer[0].name == tensor.name
        assert len(source.skeleton) < len(made.SerializeToString())
        values = weight.read()
        assert b"".join(block.tobytes() for block in weight.blocks(64)) == values.tobytes()
        data = values.tobytes()
    return Weight(0, weight.name, weight.dtype, weight.shape, weight.tag, None, 0, data)


def values_of(dtype: DType, count: int) -> Array:
    """Any values of the type, as NumPy and ml_dtypes have it."""
    rng = np.random.default_rng(dtype.number)
    if dtype in NAMES:
        kind: Any = np.dtype(getattr(ml_dtypes, NAMES[dtype]))
        if dtype.bits < 8:
            low = -(1 << dtype.bits >> 1) if dtype in (DType.INT2, DType.INT4) else 0
            numbers = rng.integers(low, low + (1 << dtype.bits), count)
            return numbers.astype(kind) if dtype is not DType.FLOAT4E2M1 else rng.standard_normal(count).astype(kind)
        return rng.integers(0, 256, count * dtype.bits // 8, dtype=np.uint8).view(kind)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, count).astype(bool)
    return rng.integers(0, 256, count * dtype.bits // 8, dtype=np.uint8).view(dtype.storage)


NAMES = {
    DType.BFLOAT16: "bfloat16",
    DType.FLOAT8E4M3FN: "float8_e4m3fn",
    DType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    DType.FLOAT8E5M2: "float8_e5m2",
    DType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    DType.FLOAT8E8M0: "float8_e8m0fnu",
    DType.UINT4: "uint4",
    DType.INT4: "int4",
    DType.FLOAT4E2M1: "float4_e2m1fn",
    DType.UINT2: "uint2",
    DType.INT2: "int2",
}


def packed(values: Array, dtype: DType) -> bytes:
    """The bytes of raw_data: elements smaller than a byte side by side, the first in the low bits."""
    if dtype.bits >= 8:
        return values.tobytes()
    per_byte = 8 // dtype.bits
    bits = values.view(np.uint8) & ((1 << dtype.bits) - 1)
    bits = np.concatenate([bits, np.zeros(-len(bits) % per_byte, np.uint8)]).reshape(-1, per_byte)
    return bytes((bits << (np.arange(per_byte, dtype=np.uint8) * dtype.bits)).sum(axis=1).astype(np.uint8))


@pytest.mark.floor
@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_raw_data(dtype: DType, tmp_path: Path) -> None:
    count = COUNT * 8 + 3
    content = packed(values_of(dtype, count), dtype)
    tensor = TensorProto(name="w", data_type=dtype.number, dims=[count], raw_data=content)
    weight = only_weight(tensor, tmp_path / "m.onnx")
    assert (weight.dtype, weight.shape, weight.data) == (dtype, (count,), content)


TYPED = {
    "float_data": [DType.FLOAT32, DType.COMPLEX64],
    "double_data": [DType.FLOAT64, DType.COMPLEX128],
    "int64_data": [DType.INT64],
    "uint64_data": [DType.UINT64, DType.UINT32],
    "int32_data": [
        DType.INT32,
        DType.INT16,
        DType.INT8,
        DType.UINT16,
        DType.UINT8,
        DType.BOOL,
        DType.FLOAT16,
        DType.BFLOAT16,
        DType.FLOAT8E4M3FN,
        DType.FLOAT8E4M3FNUZ,
        DType.FLOAT8E5M2,
        DType.FLOAT8E5M2FNUZ,
        DType.UINT4,
        DType.INT4,
        DType.FLOAT4E2M1,
    ],
}


@pytest.mark.floor
@pytest.mark.parametrize(("form", "dtype"), [(f, t) for f, types in TYPED.items() for t in types], ids=str)
def test_typed_data(form: str, dtype: DType, tmp_path: Path) -> None:
    """As onnx.proto says where each type's values go."""
    count = COUNT * 3 + 1
    values = values_of(dtype, count)
    if form in {"float_data", "double_data"}:  # NaNs would not survive Python's floats
        part = np.float32 if form == "float_data" else np.float64
        values = np.random.default_rng(0).standard_normal(count * (1 + (dtype.label[:3] == "com"))).astype(part)
        entries: Any = values.tolist()
        values = values.view(dtype.storage)
    elif dtype.bits < 8:
        entries = list(packed(values, dtype))
    elif dtype.is_float:
        entries = values.view(f"u{dtype.bits // 8}").tolist()
    else:
        entries = [int(value) for value in values]
    tensor = TensorProto(name="w", data_type=dtype.number, dims=[count])
    getattr(tensor, form).extend(entries)
    assert only_weight(tensor, tmp_path / "m.onnx").data == packed(values, dtype)


def test_typed_data_is_what_onnx_reads(tmp_path: Path) -> None:
    """The same for the helper that most models are made with."""
    for number in (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8, TensorProto.BOOL, TensorProto.UINT64):
        values = np.arange(2 * COUNT) % 2
        tensor = helper.make_tensor("w", number, [2, COUNT], values)
        weight = only_weight(tensor, tmp_path / "m.onnx")
        assert weight.shape == (2, COUNT)
        assert weight.data == numpy_helper.to_array(tensor).tobytes()


def test_data_in_several_fields_of_a_kind(tmp_path: Path) -> None:
    """Protobuf allows packed fields in pieces, and numbers that are not packed."""
    values = normal(3, 400)
    flat = values.tobytes()
    head = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3, 400]).SerializeToString()
    pieces = b"".join(b"\x22" + varint(len(part)) + part for part in (flat[:2000], flat[2000:4796]))
    content = head + pieces + b"\x25" + flat[4796:]
    tensor = TensorProto.FromString(content)
    assert numpy_helper.to_array(tensor).tobytes() == flat
    inner = b"\x2a" + varint(len(content)) + content  # GraphProto.initializer
    opset = helper.make_opsetid("", 17).SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x08\x3a" + varint(len(inner)) + inner + b"\x42" + varint(len(opset)) + opset)
    with read_model(path) as source:
        assert source.weights[0].read().tobytes() == flat


def test_strings_stay(tmp_path: Path) -> None:
    words = np.array(["a string of some length"] * 300, object)
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"s": words})
    content = save(made, tmp_path / "m.onnx").read_bytes()
    with read_model(tmp_path / "m.onnx") as source:
        assert source.weights == []
        assert source.skeleton == content


@pytest.mark.parametrize(("nbytes", "found"), [(INLINE_MAX, 0), (INLINE_MAX + 4, 1)])
def test_small_tensors_stay(nbytes: int, found: int, tmp_path: Path) -> None:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": normal(nbytes // 4)})
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert len(source.weights) == found


def test_a_model_without_weights_is_its_own_skeleton(tmp_path: Path) -> None:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }")
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert source.skeleton == made.SerializeToString()
        assert source.size == len(source.skeleton)


MISFITS: dict[str, tuple[TensorProto, str]] = {
    "too short": (TensorProto(data_type=1, dims=[400], raw_data=bytes(1599)), "1599 bytes of data, its shape [400]"),
    "too long": (TensorProto(data_type=1, dims=[4, 101], raw_data=bytes(1600)), "needs 1616"),
    "negative": (TensorProto(data_type=1, dims=[-400], raw_data=bytes(1600)), "shape [-400] is not possible"),
    "huge": (TensorProto(data_type=1, dims=[1 << 40, 2], raw_data=bytes(1600)), "is not possible"),
    "overflow": (TensorProto(data_type=1, dims=[1 << 62, 4], raw_data=bytes(1600)), "is not possible"),
    "int32 for float32": (TensorProto(data_type=1, dims=[1100], int32_data=[1] * 1100), "is not for it"),
    "int32 for int64": (TensorProto(data_type=7, dims=[1100], int32_data=[1] * 1100), "is not for it"),
    "float for int32": (TensorProto(data_type=6, dims=[1100], float_data=[1] * 1100), "is not for it"),
    "double for uint64": (TensorProto(data_type=13, dims=[300], double_data=[1] * 300), "is not for it"),
    "too many": (TensorProto(data_type=6, dims=[1101], int32_data=[1] * 1100), "has 4400 bytes of data"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_data_that_does_not_fit(misfit: str, tmp_path: Path) -> None:
    tensor, message = MISFITS[misfit]
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"layer/w": tensor})
    with pytest.raises(ModelError, match="layer/w") as caught:
        read_model(save(made, tmp_path / "m.onnx"))
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"hello, this is text", bytes(1000), b"\x80" * 40, b"\x08\x08"])
def test_what_is_no_model(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not an ONNX model"):
        read_model(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="folder"):
        read_model(tmp_path)


def test_constants_are_named_by_their_outputs(tmp_path: Path) -> None:
    """People have to find them, and tensors in nodes mostly have no names of their own."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
        a = MatMul(x, first)
        b = MatMul(a, named)
        y = If (c) <
            then_branch = p () => (float[2, 20] yp) { yp = MatMul(b, second) },
            else_branch = q () => (float[2, 20] yq) { yq = local.F(b) }
        >
    }
    <domain: "local", opset_import: ["": 17]> F (v) => (r) { r = MatMul(v, third) }
    """,
        head='<ir_version: 8, opset_import: ["": 17, "local": 1]>',
    )
    give(made.graph, "first", normal(20, 20))
    give(made.graph, "named", normal(20, 20))
    made.graph.node[0].attribute[0].t.name = "its own"
    branch = made.graph.node[4].attribute[0].g
    give(branch, "second", normal(20, 20))
    constant = helper.make_node("Constant", [], ["third"], value=numpy_helper.from_array(normal(20, 20)))
    made.functions[0].node.insert(0, constant)
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert {w.name for w in source.weights} == {"first", "its own", "second", "third"}


def test_tensors_everywhere(tmp_path: Path) -> None:
    """In every place of a model that can hold a tensor."""
    made = model("g (float[1] x, bool c) => (float[1] y) { y = Identity(x) }")
    values = {i: normal(300, seed=i) for i in range(9)}

    def tensor(i: int) -> TensorProto:
        return numpy_helper.from_array(values[i], f"w{i}")

    made.graph.initializer.append(tensor(0))
    made.graph.node.append(helper.make_node("Constant", [], ["a"], value=tensor(1)))
    sub = helper.make_graph([], "s", [], [helper.make_tensor_value_info("w2", 1, [300])], [tensor(2)])
    made.graph.node.append(helper.make_node("If", ["c"], ["b"], then_branch=sub, else_branch=sub))
    listed = helper.make_attribute("tensors", [tensor(3), tensor(4)])
    made.graph.node.append(onnx.NodeProto(op_type="Many", domain="d", output=["e"], attribute=[listed]))
    graphs = helper.make_attribute("graphs", [sub])
    made.graph.node.append(onnx.NodeProto(op_type="Many", domain="d", output=["f"], attribute=[graphs]))
    indices = numpy_helper.from_array(np.arange(300), "i5")
    sparse = helper.make_sparse_tensor(tensor(5), indices, [1000])
    made.graph.sparse_initializer.append(sparse)
    constant = helper.make_node("Constant", [], ["h"], value=tensor(6))
    default = helper.make_attribute("p", tensor(7))
    made.functions.append(helper.make_function("d", "F", [], ["h"], [constant], made.opset_import))
    made.functions[0].attribute_proto.append(default)
    made.training_info.add().initialization.initializer.append(tensor(8))
    content = save(made, tmp_path / "m.onnx").read_bytes()
    with read_model(tmp_path / "m.onnx") as source:
        found = sorted((w.name, w.read().tobytes()) for w in source.weights)
        wanted = [(f"w{i}", v.tobytes()) for i, v in values.items()] + [("w2", values[2].tobytes())] * 2
        wanted += [("i5", np.arange(300).tobytes())]
        assert found == sorted(wanted)
        assert len(source.skeleton) < len(content) - sum(w.nbytes for w in source.weights) + 40 * len(source.weights)
        assert source.proto.graph.sparse_initializer[0].dims == [1000]

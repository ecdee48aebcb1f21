"""Which element type each output of a node has, from those of its inputs: enough of type inference for floats.

onnx's own inference wants weights at hand, and knows nothing of com.microsoft's operators.
"""

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto

from conx.graph.schemas import Signature

__all__ = ["TYPE_ATTRIBUTES", "bound_types", "output_type"]

FLOAT, UNKNOWN = TensorProto.FLOAT, TensorProto.UNDEFINED

# Attributes that name the element type of an output, or the one to compute in.
TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type", "precision", "softmax_precision", "qk_matmul_precision"}
_OUTPUT = ("to", "dtype", "output_dtype")
_LIKE = {  # which input's type the output has, where no attribute says it
    "Bernoulli": 0,
    "CastLike": 1,
    "DequantizeLinear": 1,
    "EyeLike": 0,
    "OneHot": 2,
    "RandomNormalLike": 0,
    "RandomUniformLike": 0,
}
# Whose first output is float32 unless an attribute says otherwise.
_FLOAT = {"RandomNormal", "RandomUniform", "HannWindow", "HammingWindow", "BlackmanWindow"}
_TYPES = {
    "tensor(float)": FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(bfloat16)": TensorProto.BFLOAT16,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
    "tensor(uint8)": TensorProto.UINT8,
    "tensor(int8)": TensorProto.INT8,
    "tensor(string)": TensorProto.STRING,
}


def bound_types(found: Signature | None, kinds: Sequence[int]) -> dict[str, int]:
    """The types that the schema's variables have, from those of the inputs (`UNDEFINED`: not known)."""
    variables: dict[str, int] = {}
    for slot, kind in enumerate(kinds):
        if found is not None and kind != UNKNOWN:
            variable = found.input(slot)
            if "(" not in variable:
                variables.setdefault(variable, kind)
    return variables


def output_type(
    node: onnx.NodeProto,
    slot: int,
    found: Signature | None,
    variables: Mapping[str, int],
    kinds: Sequence[int],
    inner: Sequence[Sequence[int]],
) -> int:
    """The element type of an output, `UNDEFINED` if it is not known.

    Args:
        node: the node.
        slot: which of its outputs.
        found: its signature.
        variables: what `bound_types` gives.
        kinds: types of its inputs.
        inner: types of the outputs of each of its subgraphs.
    """
    if inner and node.op_type != "SequenceMap":  # which gives sequences of what its graph gives
        given = slot + (node.op_type == "Loop")
        return next((of[given] for of in inner if given < len(of) and of[given]), UNKNOWN)
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "Constant":
        return _constant_type(attributes)
    if node.op_type == "ConstantOfShape":
        return attributes["value"].t.data_type if "value" in attributes else FLOAT
    said = next((attributes[name] for name in _OUTPUT if name in attributes), None)
    if said is not None and said.type == onnx.AttributeProto.INT and said.i:
        return int(said.i)
    like = _LIKE.get(node.op_type)
    if like is not None and len(kinds) > like and kinds[like]:
        return kinds[like]
    if found is None:
        return UNKNOWN
    variable = found.output(slot)
    if variable in variables:
        return variables[variable]
    return FLOAT if node.op_type in _FLOAT else _TYPES.get(variable, UNKNOWN)


def _constant_type(attributes: Mapping[str, onnx.AttributeProto]) -> int:
    for name, attribute in attributes.items():
        if name == "value":
            return attribute.t.data_type
        if name == "sparse_value":
            return attribute.sparse_tensor.values.data_type
        if name.startswith("value_"):
            kinds = {"value_float": FLOAT, "value_floats": FLOAT, "value_int": TensorProto.INT64}
            return kinds.get(name, TensorProto.INT64 if name == "value_ints" else TensorProto.STRING)
    return UNKNOWN

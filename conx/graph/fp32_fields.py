"""16-bit floats in tensors, attributes and descriptions, and their becoming float32."""

from collections.abc import Collection

import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, TypeProto, numpy_helper

from conx.dtypes import DType
from conx.graph.fp16_types import TYPE_ATTRIBUTES
from conx.graph.fp16_values import as_float32
from conx.graph.read import weight_number

__all__ = ["SHORT", "element", "speaks_of", "widen_attributes", "widen_tensor", "widen_type"]

FLOAT, UNKNOWN = TensorProto.FLOAT, TensorProto.UNDEFINED
SHORT = {TensorProto.FLOAT16, TensorProto.BFLOAT16}


def element(described: TypeProto) -> tuple[int, str]:
    """The element type that a description says, `UNDEFINED` if none; and what holds the tensor.

    That is "" or the name of TypeProto's outermost field: "sequence_type" or "optional_type".
    """
    which = described.WhichOneof("value") or ""
    if which in ("sequence_type", "optional_type"):
        return element(getattr(described, which).elem_type)[0], which
    if which in ("tensor_type", "sparse_tensor_type"):
        return int(getattr(described, which).elem_type), ""
    return UNKNOWN, ""


def widen_type(described: TypeProto) -> None:
    """Make a description say float32, in a sequence or optional too."""
    which = described.WhichOneof("value")
    if which in ("sequence_type", "optional_type"):
        widen_type(getattr(described, which).elem_type)
    elif which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(described, which)
        if tensor.elem_type in SHORT:
            tensor.elem_type = FLOAT


def widen_tensor(tensor: TensorProto) -> None:
    """Make a tensor float32: the values of small ones, the type of stubs."""
    source = DType.from_number(tensor.data_type)
    if tensor.data_type not in SHORT or source is None:
        return
    if weight_number(tensor) is not None:
        tensor.data_type = FLOAT
        return
    wide = as_float32(numpy_helper.to_array(tensor).reshape(-1).view(source.storage), source)
    tensor.CopyFrom(numpy_helper.from_array(wide.reshape(tuple(tensor.dims)), tensor.name))


def widen_attributes(node: onnx.NodeProto) -> None:
    """Make what a node's attributes hold float32: types that they name, tensors, descriptions."""
    names = TYPE_ATTRIBUTES if node.domain in ("", "ai.onnx") else {"to", "dtype", "output_dtype"}
    for attribute in node.attribute:
        if attribute.name in names and attribute.type == AttributeProto.INT and attribute.i in SHORT:
            attribute.i = FLOAT
        elif attribute.type == AttributeProto.TENSOR:
            widen_tensor(attribute.t)
        elif attribute.type == AttributeProto.SPARSE_TENSOR:
            widen_tensor(attribute.sparse_tensor.values)
        elif attribute.type == AttributeProto.TYPE_PROTO:
            widen_type(attribute.tp)


def speaks_of(message: Message, kinds: Collection[int]) -> bool:
    """Whether a message has an element type among `kinds` anywhere: in tensors, attributes or descriptions."""
    if isinstance(message, TensorProto):
        return message.data_type in kinds
    if isinstance(message, TypeProto.Tensor | TypeProto.SparseTensor):
        return message.elem_type in kinds
    if isinstance(message, AttributeProto) and message.name in TYPE_ATTRIBUTES and message.i in kinds:
        return True
    inner = (value for field, value in message.ListFields() if field.message_type is not None)
    return any(speaks_of(each, kinds) for value in inner for each in ([value] if isinstance(value, Message) else value))

"""Do the tensors that stay in the graph hold what they claim? A runtime would find out when it is too late."""

import math
from collections.abc import Iterator
from typing import Any

import onnx

from conx.dtypes import DType
from conx.errors import ModelError
from conx.graph.read import SourceModel, weight_number

__all__ = ["check_inline_tensors"]

# The typed field of each element type, and how many of its entries an element takes.
FIELDS: dict[str, tuple[str, ...]] = {
    "float_data": ("float32", "complex64"),
    "double_data": ("float64", "complex128"),
    "int64_data": ("int64",),
    "uint64_data": ("uint64", "uint32"),
}
FIELD_OF = {label: name for name, labels in FIELDS.items() for label in labels}


def check_inline_tensors(source: SourceModel) -> None:
    """Compare the data of each small tensor with its dims and type.

    Raises:
        ModelError: naming the tensor.
    """
    model = source.proto
    for tensor in (*_graph_tensors(model.graph), *(t for f in model.functions for t in _node_tensors(f.node))):
        if weight_number(tensor) is None:
            _check(tensor, f"{source.path}: tensor {tensor.name!r}")


def _check(tensor: onnx.TensorProto, label: str) -> None:
    dims = list(tensor.dims)
    if any(d < 0 for d in dims) or math.prod(dims) > 1 << 40:
        raise ModelError(f"{label}: shape {dims} is not possible")
    count = math.prod(dims)
    if tensor.data_type == onnx.TensorProto.STRING:
        if len(tensor.string_data) != count:
            raise ModelError(f"{label} has {len(tensor.string_data)} strings, its shape {dims} needs {count}")
        return
    dtype = DType.from_number(tensor.data_type)
    if dtype is None:
        if tensor.data_type == onnx.TensorProto.UNDEFINED:
            raise ModelError(f"{label} has no element type")
        return
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != dtype.nbytes(count):
            raise ModelError(
                f"{label} has {len(tensor.raw_data)} bytes of data,"
                f" its shape {dims} of {dtype.label} needs {dtype.nbytes(count)}"
            )
        return
    name = FIELD_OF.get(dtype.label, "int32_data")
    wanted = count * 2 if dtype.label.startswith("complex") else count
    if dtype.bits < 8:
        wanted = dtype.nbytes(count)
    found = len(getattr(tensor, name))
    if found != wanted:
        raise ModelError(f"{label} has {found} entries of {name}, its shape {dims} of {dtype.label} needs {wanted}")


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (
                *([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
                *attribute.sparse_tensors,
            ):
                yield from (sparse.values, sparse.indices)
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graph_tensors(graph)

"""Counting parameters: those that the float model has, however a model is quantized.

A packed byte may hold several codes, and scales and zero points are none of the model's parameters. So what is counted
are the tensors of the dequantized graph, from their shapes.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from conx.dtypes import DType
from conx.graph.dequantize import Dequantized, FloatWeight, dequantized
from conx.graph.facts import is_quantized_model
from conx.graph.lift import nested_graphs
from conx.graph.read import SourceModel, weight_number
from conx.graph.ties import Tie

__all__ = ["parameter_facts", "undone"]

log = logging.getLogger("conx")

CODES = {DType.INT8, DType.UINT8, DType.INT4, DType.UINT4, DType.INT2, DType.UINT2}
# Element types that parameters have; other integers and bools are shapes, indices and constants of the graph.
PARAMETER_TYPES = {t for t in DType if t.is_float} | CODES


def undone(source: SourceModel) -> Dequantized | None:
    """The float model of a quantized one; None where nothing was quantized or it cannot be undone at all."""
    if not any(weight.dtype in CODES for weight in source.weights) and not is_quantized_model(source.proto):
        return None
    try:
        made = dequantized(source)
    except Exception as e:  # noqa: BLE001 - a fault in it must not cost the user his file, or his facts
        log.warning("%s: it could not be dequantized (%s: %s)", source.path, type(e).__name__, e)
        return None
    return made if made.report.undone else None


def parameter_facts(source: SourceModel, ties: Sequence[Tie], made: Dequantized | None) -> dict[str, Any]:
    """Counts of elements.

    Args:
        source: the model.
        ties: which of its weights are equal.
        made: its float model, if it is quantized.

    Returns:
        `parameters` of the float model, `unique_parameters` with equal weights counted once, `constants` (numbers
        without dims) and `quantization_parameters` (scales and zero points of weights).
    """
    model = source.proto if made is None else made.model
    parameters = constants = 0
    seen: set[int] = set()
    for tensor in _tensors(model):
        number = weight_number(tensor)
        if number is not None:
            seen.add(number)
        if DType.from_number(tensor.data_type) in PARAMETER_TYPES:
            parameters += math.prod(tensor.dims) if tensor.dims else 0
            constants += not tensor.dims
    if made is None:  # what operators hold in attributes
        parameters += sum(w.count for w in source.weights if w.number not in seen and w.dtype in PARAMETER_TYPES)
    tied = [w for w, tie in zip(source.weights, ties, strict=True) if tie.stored != w.number]
    repeated = sum(w.count for w in tied if w.number in seen and w.dtype.is_float)
    floats = [] if made is None else [w for w in made.weights if isinstance(w, FloatWeight) and w.number in seen]
    return {
        "parameters": parameters,
        "unique_parameters": parameters - repeated,
        "constants": constants,
        "quantization_parameters": sum(_operands(weight) for weight in floats),
    }


def _operands(weight: FloatWeight) -> int:
    zeros = weight.zero_point
    return int(weight.scale.size) + (0 if zeros is None else int(zeros.size))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of initializers and Constant nodes."""
    nodes = []
    for graph in (model.graph, *nested_graphs(model.graph)):
        yield from graph.initializer
        yield from (sparse.values for sparse in graph.sparse_initializer)
        nodes += graph.node
    for function in model.functions:
        nodes += function.node
        for node in function.node:
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    yield from graph.initializer
                    nodes += graph.node
    for node in nodes:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield attribute.t
                elif attribute.name == "sparse_value":
                    yield attribute.sparse_tensor.values

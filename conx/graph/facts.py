"""What a model is, in numbers: for `conx info`, and for the metadata of a packed file."""

from collections import Counter
from typing import Any

import onnx

from conx.dtypes import DType
from conx.graph.lift import nested_graphs
from conx.graph.read import SourceModel

__all__ = [
    "computes_in_floats",
    "graph_facts",
    "is_quantized_model",
    "is_quantized_operator",
]

# Parts of the names of operators that compute with quantized values, or make floats of them (DequantizeLinear).
QUANTIZED = ("quantize", "integer", "nbits", "qlinear", "qgemm", "qattention", "qmoe", "bnb4")


def graph_facts(source: SourceModel) -> dict[str, Any]:
    """Facts that need no weights: opsets, inputs and outputs, operators, counts. Maps and lists only."""
    model = source.proto
    graphs = [model.graph, *nested_graphs(model.graph)]
    operators = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for nodes in [*(g.node for g in graphs), *(f.node for f in model.functions)]
        for node in nodes
    )
    given = {t.name for t in model.graph.initializer}
    return {
        "functions": len(model.functions),
        "inputs": [_value(v) for v in model.graph.input if v.name not in given],
        "ir_version": model.ir_version,
        "nodes": sum(operators.values()),
        "operators": dict(sorted(operators.items())),
        "opsets": {o.domain or "ai.onnx": o.version for o in model.opset_import},
        "outputs": [_value(v) for v in model.graph.output],
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))),
        "subgraphs": len(graphs) - 1,
        "tensors": len(source.weights),
    }


def computes_in_floats(source: SourceModel) -> bool:
    """Whether no operator computes with quantized values; weights may be dequantized as the model runs."""
    return not any(is_quantized_operator(op) and op != "DequantizeLinear" for op in _operators(source.proto))


def is_quantized_model(model: onnx.ModelProto) -> bool:
    """Whether an operator has quantized operands, or makes floats of them."""
    return any(map(is_quantized_operator, _operators(model)))


def _operators(model: onnx.ModelProto) -> set[str]:
    nodes = [n for g in [model.graph, *nested_graphs(model.graph)] for n in g.node]
    return {node.op_type for node in [*nodes, *(n for f in model.functions for n in f.node)]}


def is_quantized_operator(op_type: str) -> bool:
    """Whether an operator has quantized operands."""
    return any(part in op_type.lower() for part in QUANTIZED)


def _value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    kind = value.type.tensor_type
    dtype = DType.from_number(kind.elem_type)
    found: dict[str, Any] = {"name": value.name, "type": dtype.label if dtype else value.type.WhichOneof("value") or ""}
    if kind.elem_type == onnx.TensorProto.STRING:
        found["type"] = "string"
    if kind.HasField("shape"):
        found["shape"] = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return found

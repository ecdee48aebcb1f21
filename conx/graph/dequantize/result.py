"""Undo the quantization of a model: `dequantized`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx
from onnx import helper

from conx.errors import ModelError
from conx.graph.dequantize.frames import Left, Run
from conx.graph.dequantize.operators import is_quantized_type
from conx.graph.dequantize.preparing import is_quantized, ready, taken_names
from conx.graph.dequantize.walk import walk_function, walk_graph
from conx.graph.dequantize.weights import FloatWeight
from conx.graph.lift import nested_graphs, subgraphs
from conx.graph.read import SourceModel, Weight, weight_number

__all__ = ["Dequantized", "Report", "dequantized"]


@dataclass
class Report:
    """What became of a model's quantization.

    Attributes:
        undone: how many of each operator are gone; "Cast, Mul" are weights dequantized by these.
        left: those that stay.
    """

    undone: dict[str, int] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Maps and lists, for JSON."""
        return asdict(self)


@dataclass
class Dequantized:
    """A float model.

    Attributes:
        model: its graph; weights are stubs, those made of codes with numbers beyond the source's.
        weights: the source's, and then what was made.
        report: what was done.
    """

    model: onnx.ModelProto
    weights: list[Weight | FloatWeight]
    report: Report


def dequantized(source: SourceModel, keep_activations: bool = False) -> Dequantized:
    """Make the float model of a quantized one, which is not changed.

    Weights are exactly what the quantized model computes with. What cannot be undone stays, and the report names it.

    Args:
        source: the model.
        keep_activations: whether QuantizeLinear and DequantizeLinear of activations stay; QLinear operators then become
            float operators between such pairs.

    Raises:
        ModelError: a node has not the inputs that its operator wants.
    """
    if not is_quantized(source.proto):
        return _unchanged(source, {})
    before = _count(source.proto)
    model = ready(source.proto)
    opsets = {o.domain: o.version for o in model.opset_import}
    opsets.setdefault("", opsets.get("ai.onnx", 1))
    run = Run(list(source.weights), source.weights, taken_names(model), opsets, keep_activations)
    constant = model.ir_version < 4  # there, initializers are inputs too, and constant nevertheless
    try:
        for function in model.functions:
            walk_function(run, function)
        walk_graph(run, model.graph, constant)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        text = f"{type(e).__name__}: {e}"
        raise ModelError(f"{source.path}: an operator's inputs or attributes are not as they should be ({text})") from e
    if model.ir_version < 4:
        known = {v.name for v in model.graph.input}
        new = [t for t in model.graph.initializer if t.name not in known]
        model.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in new)
    after = _count(model)
    undone = {op: n - after[op] for op, n in sorted(before.items()) if n > after[op]}
    if run.made["Cast, Mul"]:
        undone["Cast, Mul"] = run.made["Cast, Mul"]
    if not undone:
        return _unchanged(source, run.why)
    weights = _numbered(model, run.weights, len(source.weights))
    return Dequantized(model, weights, Report(undone, _left(model, run.why, keep_activations)))


def _graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    found = [model.graph, *nested_graphs(model.graph)]
    inner = [g for f in model.functions for node in f.node for g in subgraphs(node)]
    return [*found, *inner, *(g for graph in inner for g in nested_graphs(graph))]


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    own = [node for graph in _graphs(model) for node in graph.node]
    return [*own, *(node for function in model.functions for node in function.node)]


def _count(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in _nodes(model) if is_quantized_type(node.op_type))


def _unchanged(source: SourceModel, why: Mapping[str, str]) -> Dequantized:
    """The model as it is."""
    model = onnx.ModelProto()
    model.CopyFrom(source.proto)
    return Dequantized(model, list(source.weights), Report({}, _left(model, why)))


def _left(model: onnx.ModelProto, why: Mapping[str, str], keep: bool = False) -> list[Left]:
    found = []
    for node in _nodes(model):
        if is_quantized_type(node.op_type):
            first = next(filter(None, node.output), "")
            reason = "quantization of activations is to stay" if keep else "it is not known how to undo it"
            found.append(Left(node.op_type, node.name or first, why.get(first, reason)))
    return found


def _numbered(model: onnx.ModelProto, weights: list[Weight | FloatWeight], first: int) -> list[Weight | FloatWeight]:
    """Only the weights made that the graph uses, numbered in a row."""
    stubs = [t for graph in _graphs(model) for t in graph.initializer]
    stubs += [a.t for node in _nodes(model) for a in node.attribute if a.name == "value"]
    numbers: dict[int, int] = {}
    for tensor in stubs:
        number = weight_number(tensor)
        if number is not None and number >= first:
            new = numbers.setdefault(number, first + len(numbers))
            tensor.external_data[0].value = str(new)
    made = [weights[number] for number in numbers]
    return [*weights[:first], *(replace(w, number=first + i) for i, w in enumerate(made))]

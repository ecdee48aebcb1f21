"""Who uses a weight, and along which axis its output channels lie.

A weight is followed through operators that only move its axes or cut and join it (Transpose, Slice, Concat, Unsqueeze:
exporters reorder the gates of recurrent layers so), into subgraphs by outer scope and into local functions by their
arguments. What counts is the operator that finally computes with it: a matrix, kernel or embedding is coded
with a scale for each output channel, since errors of one channel must not spread to another.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper, numpy_helper

from conx.graph.read import SourceModel, weight_number

__all__ = ["ChannelAxis", "Use", "channel_axes", "weight_uses"]

KEEPS_AXES = ("Identity", "Cast", "Slice", "Concat", "Split")

Perm = tuple[int | None, ...]


@dataclass(frozen=True)
class Alias:
    """A value made of weight `number`: axis i of the value is axis perm[i] of the weight, None an axis put in."""

    number: int
    perm: Perm


@dataclass(frozen=True)
class Use:
    """Input `slot` of an operator; axis i of what it sees is axis perm[i] of the weight, None an axis put in."""

    op_type: str
    domain: str
    slot: int
    attributes: tuple[tuple[str, Any], ...]
    perm: Perm

    def attribute(self, name: str, default: int) -> int:
        value = dict(self.attributes).get(name, default)
        return value if isinstance(value, int) else default


@dataclass(frozen=True)
class ChannelAxis:
    """A scale for each position of `axis`; with `rows`, one for each position of all axes but `axis`."""

    axis: int
    rows: bool = False


def weight_uses(source: SourceModel) -> list[tuple[Use, ...]]:
    """The uses of each weight, by its number."""
    walk = _Walk(source)
    walk.graph(source.proto.graph, {})
    return [tuple(dict.fromkeys(uses)) for uses in walk.uses]


def channel_axes(use: Use, shape: tuple[int, ...]) -> ChannelAxis | None:
    """Where the output channels of this use lie in the weight (dims `shape`), or None if it is no such operator."""
    rank = len(use.perm)
    place = _PLACES.get((use.domain if use.domain != "ai.onnx" else "", use.op_type, use.slot))
    if place is None or len(shape) < 2:
        return None
    axis = place.axis
    if place.axis_attribute:
        axis = use.attribute(place.axis_attribute, axis)
    elif place.turned_by and use.attribute(place.turned_by, 0):
        axis = place.turned
    found = use.perm[axis] if -rank <= axis < rank else None
    return None if found is None else ChannelAxis(found, place.rows)


@dataclass(frozen=True)
class _Place:
    """The output channels' axis as an operator sees its input, negative from the end.

    `turned` instead where attribute `turned_by` is set; attribute `axis_attribute` says it where there is one. With
    `rows`, each position of all axes but `axis` is a channel of its own.
    """

    axis: int
    turned_by: str = ""
    turned: int = 0
    axis_attribute: str = ""
    rows: bool = False


_MS = "com.microsoft"
_PLACES: dict[tuple[str, str, int], _Place] = {
    ("", "MatMul", 0): _Place(-2),
    ("", "MatMul", 1): _Place(-1),
    ("", "Gemm", 0): _Place(0, "transA", 1),
    ("", "Gemm", 1): _Place(1, "transB", 0),
    (_MS, "FusedMatMul", 0): _Place(-2, "transA", -1),
    (_MS, "FusedMatMul", 1): _Place(-1, "transB", -2),
    (_MS, "FusedGemm", 1): _Place(1, "transB", 0),
    ("", "Conv", 1): _Place(0),
    ("", "DeformConv", 1): _Place(0),
    (_MS, "FusedConv", 1): _Place(0),
    ("", "ConvTranspose", 1): _Place(1),
    ("", "Gather", 0): _Place(0, axis_attribute="axis"),
    **{("", op, slot): _Place(-1, rows=True) for op in ("LSTM", "GRU", "RNN") for slot in (1, 2)},
    **{(_MS, op, 1): _Place(-1) for op in ("Attention", "PackedAttention")},
    **{(_MS, "EmbedLayerNormalization", slot): _Place(0) for slot in (2, 3, 4)},
    **{(_MS, "MoE", slot): _Place(-1, rows=True) for slot in (2, 4, 6)},
}


# What a name stands for: the weights that a value is made of, or a small tensor (operators have axes as inputs).
_Scope = dict[str, tuple[Alias, ...] | onnx.TensorProto]


class _Walk:
    def __init__(self, source: SourceModel) -> None:
        self.uses: list[list[Use]] = [[] for _ in source.weights]
        self.ranks = [len(w.shape) for w in source.weights]
        self.functions = {(f.domain, f.name, f.overload): f for f in source.proto.functions}
        self.seen: set[tuple[Any, ...]] = set()

    def graph(self, graph: onnx.GraphProto, outer: _Scope) -> None:
        scope = dict(outer)
        for value in graph.input:
            scope.pop(value.name, None)
        for tensor in graph.initializer:
            self._define(scope, tensor.name, tensor)
        self.nodes(graph.node, scope)

    def nodes(self, nodes: Iterable[onnx.NodeProto], scope: _Scope) -> None:
        for node in nodes:
            self._node(node, scope)
            for attribute in node.attribute:
                for sub in _graphs(attribute):
                    self.graph(sub, scope)

    def _define(self, scope: _Scope, name: str, tensor: onnx.TensorProto) -> None:
        number = weight_number(tensor)
        scope[name] = tensor if number is None else (Alias(number, tuple(range(self.ranks[number]))),)

    def _node(self, node: onnx.NodeProto, scope: _Scope) -> None:
        given = [(slot, scope[name]) for slot, name in enumerate(node.input) if name in scope]
        found = [(slot, aliases) for slot, aliases in given if isinstance(aliases, tuple)]
        for name in node.output:
            scope.pop(name, None)
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.name == "value":
                    self._define(scope, node.output[0], attribute.t)
        if not found:
            return
        function = self.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            self._call(function, dict(found))
            return
        attributes = {
            a.name: helper.get_attribute_value(a) for a in node.attribute if a.type in _PLAIN and not a.ref_attr_name
        }
        moved = self._moved(node, attributes, found, dict(given).get(1))
        if moved is not None:
            scope.update(dict.fromkeys(node.output, moved))
            return
        items = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(attributes.items()))
        for slot, aliases in found:
            for alias in aliases:
                self.uses[alias.number].append(Use(node.op_type, node.domain, slot, items, alias.perm))

    def _moved(
        self,
        node: onnx.NodeProto,
        attributes: Mapping[str, Any],
        found: list[tuple[int, tuple[Alias, ...]]],
        second: tuple[Alias, ...] | onnx.TensorProto | None,
    ) -> tuple[Alias, ...] | None:
        """What the node's outputs are made of, if it only moves axes, cuts or joins; else None."""
        if node.domain not in ("", "ai.onnx"):
            return None
        data = found[0][1] if found[0][0] == 0 else ()
        if node.op_type in KEEPS_AXES:
            return (
                tuple(alias for _, aliases in found for alias in aliases) if node.op_type == "Concat" else data or None
            )
        if node.op_type == "Transpose":
            return tuple(Alias(a.number, _transposed(a.perm, attributes.get("perm"))) for a in data)
        if node.op_type in ("Unsqueeze", "Squeeze"):
            axes = attributes.get("axes")
            if axes is None and isinstance(second, onnx.TensorProto):
                axes = numpy_helper.to_array(second).reshape(-1).tolist()
            change = _unsqueezed if node.op_type == "Unsqueeze" else _squeezed
            return tuple(Alias(a.number, change(a.perm, axes)) for a in data) if axes and data else None
        return None

    def _call(self, function: onnx.FunctionProto, given: dict[int, tuple[Alias, ...]]) -> None:
        key = (function.domain, function.name, function.overload, tuple(sorted(given.items(), key=lambda x: x[0])))
        if key in self.seen:
            return
        self.seen.add(key)
        self.nodes(function.node, {function.input[i]: a for i, a in given.items() if i < len(function.input)})


_PLAIN = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.STRING)


def _graphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.type == onnx.AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs


def _transposed(perm: Perm, turned: list[int] | None) -> Perm:
    order = range(len(perm))[::-1] if turned is None else turned
    return tuple(perm[i] for i in order) if sorted(order) == list(range(len(perm))) else perm


def _unsqueezed(perm: Perm, axes: list[int]) -> Perm:
    rank = len(perm) + len(axes)
    new = {axis % rank for axis in axes}
    rest = iter(perm)
    return tuple(None if i in new else next(rest, None) for i in range(rank))


def _squeezed(perm: Perm, axes: list[int]) -> Perm:
    gone = {axis % len(perm) for axis in axes} if perm else set()
    return tuple(axis for i, axis in enumerate(perm) if i not in gone)

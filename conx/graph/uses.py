"""Who uses a weight.

A weight is followed through operators that only move its axes or cut and join it (Transpose, Slice, Concat, Unsqueeze:
exporters reorder the gates of recurrent layers so; Reshape where it leaves axes alone), into subgraphs by outer scope
and into local functions by their arguments. What counts is the operator that finally computes with it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from conx.graph.read import SourceModel, weight_number

__all__ = ["Use", "weight_uses"]

KEEPS_SHAPE = ("Identity", "Cast")
KEEPS_AXES = ("Slice", "Concat", "Split")

Perm = tuple[int | None, ...]


@dataclass(frozen=True)
class Alias:
    """A value made of weight `number`.

    Axis i of the value is axis perm[i] of the weight, None one of no single axis. `dims` is None where it was cut.
    """

    number: int
    perm: Perm
    dims: tuple[int, ...] | None


@dataclass(frozen=True)
class Use:
    """Input `slot` of an operator; axis i of what it sees is axis perm[i] of the weight, None one of no single axis."""

    op_type: str
    domain: str
    slot: int
    attributes: tuple[tuple[str, Any], ...]
    perm: Perm

    def attribute(self, name: str, default: int) -> int:
        value = dict(self.attributes).get(name, default)
        return value if isinstance(value, int) else default


def weight_uses(source: SourceModel) -> list[tuple[Use, ...]]:
    """The uses of each weight, by its number."""
    walk = _Walk(source)
    walk.graph(source.proto.graph, {})
    return [tuple(dict.fromkeys(uses)) for uses in walk.uses]


# What a name stands for: the weights that a value is made of, or a small tensor (operators have axes as inputs).
_Scope = dict[str, tuple[Alias, ...] | onnx.TensorProto]


class _Walk:
    def __init__(self, source: SourceModel) -> None:
        self.uses: list[list[Use]] = [[] for _ in source.weights]
        self.shapes = [w.shape for w in source.weights]
        self.functions = {(f.domain, f.name, f.overload): f for f in source.proto.functions}
        self.seen: set[tuple[Any, ...]] = set()
        self.calling: list[tuple[str, str, str]] = []

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
        if number is None:
            scope[name] = tensor
        else:
            shape = self.shapes[number]
            scope[name] = (Alias(number, tuple(range(len(shape))), shape),)

    def _node(self, node: onnx.NodeProto, scope: _Scope) -> None:
        given = [(slot, scope[name]) for slot, name in enumerate(node.input) if name in scope]
        found = [(slot, aliases) for slot, aliases in given if isinstance(aliases, tuple)]
        for name in node.output:
            scope.pop(name, None)
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.name == "value":
                    self._define(scope, node.output[0], attribute.t)
        function = self.functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            self._call(function, dict(found))
            return
        if not found:
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
            parts = [alias for _, aliases in found for alias in aliases] if node.op_type == "Concat" else data
            return tuple(dict.fromkeys(Alias(a.number, a.perm, None) for a in parts)) or None
        if not data:
            return None
        if node.op_type in KEEPS_SHAPE:
            return data
        if node.op_type == "Transpose":
            return tuple(_transposed(a, _list(attributes, "perm")) for a in data)
        change = {"Unsqueeze": _unsqueezed, "Squeeze": _squeezed, "Reshape": _reshaped}.get(node.op_type)
        numbers = _list(attributes, "axes")
        if numbers is None and isinstance(second, onnx.TensorProto) and second.data_type == onnx.TensorProto.INT64:
            raw = second.raw_data
            numbers = np.frombuffer(raw[: len(raw) // 8 * 8], "<i8").tolist() or list(second.int64_data)
        return tuple(change(a, numbers) for a in data) if change and numbers else None

    def _call(self, function: onnx.FunctionProto, given: dict[int, tuple[Alias, ...]]) -> None:
        name = (function.domain, function.name, function.overload)
        key = (*name, tuple(sorted(given.items(), key=lambda x: x[0])))
        if key in self.seen or name in self.calling:  # ONNX allows no recursion
            return
        self.seen.add(key)
        self.calling.append(name)
        self.nodes(function.node, {function.input[i]: a for i, a in given.items() if i < len(function.input)})
        self.calling.pop()


_PLAIN = (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.STRING)


def _list(attributes: Mapping[str, Any], name: str) -> list[int] | None:
    """The integers of an attribute; None where it is not there or of another type."""
    value = attributes.get(name)
    return value if isinstance(value, list) else None


def _graphs(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.type == onnx.AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs


def _transposed(alias: Alias, order: list[int] | None) -> Alias:
    rank = len(alias.perm)
    turn = list(range(rank))[::-1] if order is None else order
    if sorted(turn) != list(range(rank)):
        return Alias(alias.number, (None,) * rank, None)
    dims = alias.dims and tuple(alias.dims[i] for i in turn)
    return Alias(alias.number, tuple(alias.perm[i] for i in turn), dims)


def _unsqueezed(alias: Alias, axes: list[int]) -> Alias:
    rank = len(alias.perm) + len(axes)
    new = {axis % rank for axis in axes}
    perm, dims = iter(alias.perm), iter(alias.dims or ())
    moved = tuple(None if i in new else next(perm, None) for i in range(rank))
    return Alias(alias.number, moved, alias.dims and tuple(1 if i in new else next(dims, 1) for i in range(rank)))


def _squeezed(alias: Alias, axes: list[int]) -> Alias:
    gone = {axis % max(1, len(alias.perm)) for axis in axes}
    kept = [i for i in range(len(alias.perm)) if i not in gone]
    dims = alias.dims and tuple(alias.dims[i] for i in kept)
    return Alias(alias.number, tuple(alias.perm[i] for i in kept), dims)


def _reshaped(alias: Alias, shape: list[int]) -> Alias:
    """Axes that keep their length and what lies behind them stay the same axis."""
    dims = alias.dims
    if dims is None:
        return Alias(alias.number, (None,) * len(shape), None)
    new = [dims[i] if d == 0 and i < len(dims) else d for i, d in enumerate(shape)]
    if -1 in new:
        known = math.prod(d for d in new if d != -1)
        new[new.index(-1)] = math.prod(dims) // known if known > 0 else 0
    behind = {(d, math.prod(dims[i + 1 :])): axis for i, (d, axis) in enumerate(zip(dims, alias.perm, strict=True))}
    perm = tuple(behind.get((d, math.prod(new[i + 1 :]))) for i, d in enumerate(new))
    return Alias(alias.number, perm, tuple(new))

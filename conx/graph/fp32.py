"""The float32 graph of a model that computes in float16 or bfloat16, wholly or in part.

Every value of 16 bits becomes float32: weights (their stubs say so, whoever binds them converts), constants, types in
attributes and descriptions, subgraphs. Casts between floats that change nothing any more go. Only where something
outside sets the type, at the graph's inputs and outputs and at operators that take nothing else or are not known, are
values cast to their former type and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from conx.errors import UnsupportedError
from conx.graph.fp16_graph import all_names, prepared
from conx.graph.fp16_types import bound_types, output_type
from conx.graph.fp32_fields import SHORT, element, speaks_of, widen_attributes, widen_tensor, widen_type
from conx.graph.lift import subgraphs
from conx.graph.read import SourceModel
from conx.graph.schemas import Signature, signature

__all__ = ["Value", "Widening", "to_float32"]

FLOAT, UNKNOWN = TensorProto.FLOAT, TensorProto.UNDEFINED
FLOATS = SHORT | {FLOAT}
STANDARD = ("", "ai.onnx")

# They take no float32, or mean another thing with it.
SHORT_ONLY = {
    "BitCast", "GemmaRotaryEmbedding", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight", "MatMulPacked",
    "MoEPacked", "PagedAttention", "QOrderedLongformerAttention", "RMSNormRotary", "RouterGateUpProj",
    "SparsePagedAttention",
}  # fmt: skip
# Sequences and optionals have the type of what they hold: these give what their first input has.
HOLDERS = {
    "ConcatFromSequence", "Identity", "Optional", "OptionalGetElement", "SequenceAt", "SequenceConstruct",
    "SequenceErase", "SequenceInsert", "SplitToSequence",
}  # fmt: skip
WRAPPING = {"Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap",
            "SplitToSequence"}  # fmt: skip


def to_float32(source: SourceModel) -> onnx.ModelProto:
    """The model with all its 16-bit floats made float32; `source.proto` itself if it has none.

    Weights stay stubs, those that were float16 or bfloat16 with the type float32. Inputs and outputs keep their types.
    The source is not changed.

    Raises:
        UnsupportedError: an input or output is an optional value of 16-bit floats, or a sequence of them before
            opset 17, which no operator can convert.
    """
    return Widening(source.proto).run() if speaks_of(source.proto, SHORT) else source.proto


@dataclass
class Value:
    """A value in scope: its element type in the source, and under which names it is had as which type."""

    kind: int
    names: dict[int, str]
    wrapped: str = ""  # in a "sequence_type" or an "optional_type"

    def seen_from_within(self) -> "Value":
        """For a subgraph, whose casts are its own."""
        return Value(self.kind, dict(self.names), self.wrapped)


_Scope = dict[str, Value]


class Widening:
    """One run of the pass over a model, whose weights may be stubs. The model itself is not changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = prepared(model)
        self.opsets = {o.domain: o.version for o in self.model.opset_import}
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))
        self.names = set(all_names(self.model.graph))
        self.kept: set[str] = set()  # names of values of 16 bits
        self.edges: set[str] = set()  # those of them that are outputs

    def run(self) -> onnx.ModelProto:
        """Convert; gives the new model."""
        graph = self.model.graph
        scope: _Scope = {}
        nodes: list[onnx.NodeProto] = []
        for info in graph.input:
            kind, wrapped = element(info.type)
            scope[info.name] = Value(kind, {kind: info.name}, wrapped)
            self.kept.add(info.name)
        fixed = {v.name for v in (*graph.input, *graph.output)}
        self.initializers(graph, scope, fixed)
        self.edges = {v.name for v in graph.output if element(v.type)[0] in SHORT}
        self.nodes(graph, scope, nodes, {v.name for v in graph.output})
        self.kept |= self.edges
        self.describe(graph)
        return self.model

    def inner(self, graph: onnx.GraphProto, outer: _Scope, given: Sequence[int]) -> list[int]:
        """Convert a subgraph, of whose inputs `given` are the types. Answers those of its outputs in the source."""
        scope = {name: value.seen_from_within() for name, value in outer.items()}
        for i, info in enumerate(graph.input):
            kind, wrapped = element(info.type)
            kind = kind or (given[i] if i < len(given) else UNKNOWN)
            scope[info.name] = Value(kind, {FLOAT if kind in SHORT else kind: info.name}, wrapped)
        self.initializers(graph, scope, set())
        self.nodes(graph, scope, [], {v.name for v in graph.output})
        for info in (*graph.input, *graph.output):
            widen_type(info.type)
        self.describe(graph)
        return [scope[v.name].kind if v.name in scope else UNKNOWN for v in graph.output]

    def describe(self, graph: onnx.GraphProto) -> None:
        """Make descriptions of values follow."""
        for info in graph.value_info:
            if info.name not in self.kept:
                widen_type(info.type)

    def initializers(self, graph: onnx.GraphProto, scope: _Scope, fixed: set[str]) -> None:
        for tensor in graph.initializer:
            kind = tensor.data_type
            if kind in SHORT and tensor.name not in fixed:
                self.initializer(tensor)
            scope[tensor.name] = Value(kind, {tensor.data_type: tensor.name})
        for sparse in graph.sparse_initializer:
            kind = sparse.values.data_type
            widen_tensor(sparse.values)
            scope[sparse.values.name] = Value(kind, {sparse.values.data_type: sparse.values.name})

    def initializer(self, tensor: TensorProto) -> None:
        """Convert an initializer of 16-bit floats."""
        widen_tensor(tensor)

    def nodes(self, graph: onnx.GraphProto, scope: _Scope, nodes: list[onnx.NodeProto], returned: set[str]) -> None:
        described = {v.name: element(v.type) for v in (*graph.value_info, *graph.output)}
        for node in graph.node:
            self.node(node, scope, nodes, described, returned)
        del graph.node[:]
        graph.node.extend(nodes)

    def node(
        self,
        node: onnx.NodeProto,
        scope: _Scope,
        nodes: list[onnx.NodeProto],
        described: dict[str, tuple[int, str]],
        returned: set[str],
    ) -> None:
        inputs = [scope.get(name) for name in node.input]
        if node.op_type == "Cast" and node.domain in STANDARD and inputs[0] is not None:
            to = int(helper.get_node_attr_value(node, "to"))
            if inputs[0].kind in FLOATS and to in FLOATS and self.cast(node, inputs[0], to, scope, nodes, returned):
                return
        version = self.opsets.get(node.domain, self.opsets[""] if node.domain == "ai.onnx" else 1)
        found = signature(node.domain, node.op_type, version)
        kinds = [UNKNOWN if value is None else value.kind for value in inputs]
        variables = bound_types(found, kinds)
        follows = found is not None and node.op_type not in SHORT_ONLY
        alike = follows and not any(subgraphs(node))
        for slot, value in enumerate(inputs):
            if value is not None and found is not None and alike and value.kind == UNKNOWN:
                like = variables.get(found.input(slot), UNKNOWN)
                if like in SHORT:  # its type follows from the others'
                    value.kind, value.names = like, {like: next(iter(value.names.values()))}
            if value is not None and value.kind in FLOATS:
                node.input[slot] = self.feed(node, value, FLOAT if follows else value.kind, nodes)
        given = [TensorProto.INT64, TensorProto.BOOL, *kinds[2:]] if node.op_type == "Loop" else kinds
        inner = [self.inner(graph, scope, given) for graph in subgraphs(node)]
        nodes.append(node)
        types = [self.output(node, slot, found, variables, inputs, inner) for slot in range(len(node.output))]
        if follows:
            widen_attributes(node)
        for slot, name in enumerate(node.output):
            if name:
                said, wrapped = described.get(name, (UNKNOWN, _holder(node, inputs)))
                kind = types[slot] or said
                scope[name] = Value(kind, {kind: name}, wrapped)
                if kind in SHORT:
                    self.define(node, slot, scope[name], follows, nodes, name in returned)

    def output(
        self,
        node: onnx.NodeProto,
        slot: int,
        found: Signature | None,
        variables: dict[str, int],
        inputs: list[Value | None],
        inner: list[list[int]],
    ) -> int:
        """The element type of an output in the source."""
        kinds = [UNKNOWN if value is None else value.kind for value in inputs]
        if node.domain in STANDARD:
            if node.op_type == "SequenceMap":
                return inner[0][slot] if slot < len(inner[0]) else UNKNOWN
            if node.op_type == "SequenceEmpty":
                return next((int(a.i) for a in node.attribute if a.name == "dtype"), int(FLOAT))
            if node.op_type == "Optional" and not kinds:
                return next((element(a.tp)[0] for a in node.attribute if a.name == "type"), int(UNKNOWN))
            if node.op_type in HOLDERS:
                return next((kind for kind in kinds if kind), int(UNKNOWN))
        return output_type(node, slot, found, variables, kinds, inner)

    def define(
        self,
        node: onnx.NodeProto,
        slot: int,
        value: Value,
        follows: bool,
        nodes: list[onnx.NodeProto],
        returned: bool,
    ) -> None:
        """Make a value that had 16 bits: as float32 under its name, or under another where that keeps its type."""
        name, kind = node.output[slot], value.kind
        edge = name in self.edges
        wide = self.fresh(name) if edge else name
        value.names = {FLOAT: wide}
        if not follows:
            short = name if edge or not returned else self.fresh(name)
            node.output[slot] = short
            value.names = {kind: short}
            self.kept.add(short)
            if returned and not edge:
                nodes.append(self.converter(short, wide, kind, FLOAT, value.wrapped))
                value.names[FLOAT] = wide
        else:
            self.widen_output(node, slot, value, wide, nodes)
            if edge:
                nodes.append(self.converter(wide, name, FLOAT, kind, value.wrapped))
                value.names[kind] = name

    def widen_output(
        self, node: onnx.NodeProto, slot: int, value: Value, wide: str, nodes: list[onnx.NodeProto]
    ) -> None:
        """Let a node, the last of `nodes`, give a float32 value of a name."""
        node.output[slot] = wide

    def feed(self, node: onnx.NodeProto, value: Value, wanted: int, nodes: list[onnx.NodeProto]) -> str:
        """The name under which a node is fed a value."""
        return self.use(value, wanted, nodes)

    def cast(
        self,
        node: onnx.NodeProto,
        value: Value,
        to: int,
        scope: _Scope,
        nodes: list[onnx.NodeProto],
        returned: set[str],
    ) -> bool:
        """A Cast of the model between floats: another name for the value, unless it is returned.

        Answers whether that was all.
        """
        name = node.output[0]
        wide = self.use(value, FLOAT, nodes)
        scope[name] = Value(to, {FLOAT: wide})
        if name in self.edges:
            nodes.append(helper.make_node("Cast", [wide], [name], node.name, to=to))
            scope[name].names[to] = name
        elif name in returned:
            nodes.append(helper.make_node("Identity", [wide], [name], node.name))
        return True

    def use(self, value: Value, wanted: int, nodes: list[onnx.NodeProto]) -> str:
        """The name under which a value has the wanted type, made if it is not there yet."""
        if wanted not in value.names:
            now, name = next(iter(value.names.items()))
            fresh = self.fresh(name)
            nodes.append(self.converter(name, fresh, now, wanted, value.wrapped))
            value.names[wanted] = fresh
            if wanted in SHORT:
                self.kept.add(fresh)
        return value.names[wanted]

    def converter(self, name: str, new: str, source: int, to: int, wrapped: str) -> onnx.NodeProto:
        """The node that gives a value another type than `source`."""
        if not wrapped:
            return helper.make_node("Cast", [name], [new], to=to)
        if self.opsets[""] < 17 or wrapped == "optional_type":
            kind = wrapped.partition("_")[0]
            raise UnsupportedError(f"{name!r} is {kind} of 16-bit floats, which opset {self.opsets['']} cannot cast")
        item, made = self.fresh(name), self.fresh(name)
        body = helper.make_graph(
            [helper.make_node("Cast", [item], [made], to=to)],
            "cast",
            [helper.make_tensor_value_info(item, source, None)],
            [helper.make_tensor_value_info(made, to, None)],
        )
        return helper.make_node("SequenceMap", [name], [new], body=body)

    def fresh(self, name: str) -> str:
        number, new = 0, f"{name}/fp32"
        while new in self.names:
            number += 1
            new = f"{name}/fp32_{number}"
        self.names.add(new)
        return new


def _holder(node: onnx.NodeProto, inputs: Sequence[Value | None]) -> str:
    """What holds the tensors that a node gives, as `element` says it, where nothing describes them."""
    if node.op_type in WRAPPING:
        return "optional_type" if node.op_type == "Optional" else "sequence_type"
    if node.op_type in ("Identity", "If", "Loop", "Scan"):
        return next((v.wrapped for v in inputs if v and v.wrapped), "")
    return ""

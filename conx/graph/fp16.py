"""The float16 graph of a float32 model.

Driven by operator schemas: for each node the type variables of its schema say which inputs and outputs may be float16
together. A node computes in float16 where its schema allows it and nothing speaks against it; where float16 and
float32 meet, casts are put in, one for each value and type. Inputs and outputs of the graph keep theirs.

Which nodes stay float32 follows from the values, as in mixed-precision training (Micikevicius et al., "Mixed Precision
Training", ICLR 2018, section 3): sums, powers, exponentials and the like overflow or lose small addends (`WIDE`);
a constant that float16 cannot hold keeps its node in float32, unless it is a bound that may be clipped (masks made of
the smallest float32); everything else takes the type of what it is fed, float32 if any of that is float32. What is
bounded returns to float16: what Softmax gives beside float16 values, and float16 values normalized in float32.

Works on names and scopes of the protobuf message itself, since sparse initializers and weights without data have to
pass through unharmed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper, numpy_helper

from conx.graph.fp16_graph import all_names, constants_to_initializers, drop_unused, narrow_edges, prepared
from conx.graph.fp16_rules import CLIPPED, MOVES, NARROW, STAGES, STATISTICS, TYPED, WIDE, WRAPS
from conx.graph.fp16_types import bound_types, output_type
from conx.graph.fp16_values import as_float32, half_tensor, values_hold
from conx.graph.fp32 import Widening
from conx.graph.fp32_fields import speaks_of
from conx.graph.lift import subgraphs
from conx.graph.read import SourceModel, Weight, weight_number
from conx.graph.schemas import Signature, signature

__all__ = ["Half", "to_float16"]

FLOAT, HALF, UNKNOWN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UNDEFINED


@dataclass
class Half:
    """The float16 model, and what became of which node. A node is named by its first output in the source.

    Attributes:
        model: the graph, its weights stubs.
        wide: why nodes stayed float32: {reason: number of nodes}.
        kept: those that were asked to stay float32, and why.
        narrow: nodes that compute in float16, in order: {first output in `model`: first output in the source}.
        values: values that are float16, and the nodes that give them.
        entries: float32 values that are cast to float16, and the nodes that they are cast for.
        error: square root of the error's power over the output's, of the worst output, where it was measured.
    """

    model: onnx.ModelProto
    wide: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    narrow: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    entries: dict[str, list[str]] = field(default_factory=dict)
    error: float | None = None


@dataclass
class _Value:
    """A value in scope: its type in the source, the type that it has now, and the names under which it is had."""

    original: int
    now: int
    names: dict[int, str]
    tensor: onnx.TensorProto | None = None  # of a constant
    graph: onnx.GraphProto | None = None  # where that is an initializer
    weight: bool = False  # made of large constants alone
    stage: str = ""  # of a normalization (STAGES), or "share" for the outputs of Softmax

    @property
    def name(self) -> str:
        """The name under which it was made: casts are made of that."""
        return next(iter(self.names.values()))

    def seen_from_within(self) -> "_Value":
        """For a subgraph, whose casts are its own. Constants are shared: their other type is an initializer."""
        if self.tensor is not None:
            return self
        return _Value(self.original, self.now, dict(self.names), weight=self.weight, stage=self.stage)


_Scope = dict[str, _Value]


def to_float16(source: SourceModel, keep: Mapping[str, str] | None = None, *, io: bool = False) -> Half:
    """Make the float16 model of a float32 one. Its weights stay stubs, those that are float16 with that type.

    Local functions are inlined where they can be. What is float16 in the source stays so; bfloat16 becomes float16
    where float32 would. The source is not changed.

    Args:
        source: the model.
        keep: nodes that stay float32, by their first output, and why.
        io: make the graph's float32 inputs and outputs float16 too, without casts. Otherwise they keep their types.
    """
    if speaks_of(source.proto, {TensorProto.BFLOAT16}):
        half = Half(Widening(source.proto).run())
    else:
        half = Half(prepared(source.proto))
    _Pass(half, source.weights, keep or {}, io).run()
    return half


class _Pass:
    def __init__(self, half: Half, weights: Sequence[Weight], keep: Mapping[str, str], io: bool) -> None:
        self.half, self.weights, self.keep, self.io = half, weights, keep, io
        self.model = half.model
        self.opsets = {o.domain: o.version for o in self.model.opset_import}
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))
        self.names = set(all_names(self.model.graph))
        self.copies: dict[str, str] = {}  # float16 initializers: whose they are
        self.fits: dict[tuple[int, bool, bool], bool] = {}
        self.edges: set[str] = set()  # inputs and outputs that become float16

    def run(self) -> None:
        graph = self.model.graph
        if self.io:
            self.edges = narrow_edges(graph)
        self.graph(graph, {})
        drop_unused(graph, self.copies)

    def graph(self, graph: onnx.GraphProto, outer: _Scope, given: Sequence[int] = ()) -> _Scope:
        """Convert a graph. `given` are the types of a subgraph's inputs. Answers its scope."""
        scope = {name: value.seen_from_within() for name, value in outer.items()}
        for i, info in enumerate(graph.input):
            kind = info.type.tensor_type.elem_type or (given[i] if i < len(given) else UNKNOWN)
            scope[info.name] = _Value(kind, kind, {kind: info.name})
            if info.name in self.edges:
                scope[info.name] = _Value(FLOAT, HALF, {HALF: info.name})
        fixed = {v.name for v in (*graph.input, *graph.output)}
        constants_to_initializers(graph, fixed)
        for tensor in graph.initializer:
            constant = None if tensor.name in fixed else tensor
            kind, large = tensor.data_type, weight_number(tensor) is not None
            if tensor.name not in self.edges:
                scope[tensor.name] = _Value(kind, kind, {kind: tensor.name}, constant, graph, large)
            elif kind == FLOAT:
                tensor.CopyFrom(half_tensor(tensor, tensor.name))
                scope[tensor.name] = _Value(FLOAT, HALF, {HALF: tensor.name})
        for sparse in graph.sparse_initializer:
            kind = sparse.values.data_type
            scope[sparse.values.name] = _Value(kind, kind, {kind: sparse.values.name})
        returned = {v.name for v in graph.output}
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            self.node(node, scope, nodes, returned)
        del graph.node[:]
        graph.node.extend(nodes)
        del graph.value_info[:]
        return scope

    def node(self, node: onnx.NodeProto, scope: _Scope, nodes: list[onnx.NodeProto], returned: set[str]) -> None:
        version = self.opsets.get(node.domain, self.opsets[""] if node.domain == "ai.onnx" else 1)
        found = signature(node.domain, node.op_type, version)
        inputs = [scope.get(name) for name in node.input]
        kinds = [UNKNOWN if value is None else value.original for value in inputs]
        if node.op_type == "Cast" and node.domain in ("", "ai.onnx") and inputs[0] is not None:
            self.cast(node, inputs[0], scope, nodes, node.output[0] in returned)
            return
        first = node.output[0] if node.output else ""
        variables = bound_types(found, kinds)
        half = set() if any(subgraphs(node)) else self.decide(node, found, inputs, variables)
        for slot, value in enumerate(inputs):
            if value is not None and value.original in (FLOAT, HALF):
                narrow = value.original == HALF or (found is not None and found.input(slot) in half)
                if narrow and value.now == FLOAT and value.tensor is None:
                    self.half.entries.setdefault(value.name, []).append(first)
                node.input[slot] = self.use(value, HALF if narrow else FLOAT, nodes)
        inner = self.subgraphs(node, scope, kinds)
        nodes.append(node)
        for slot, name in enumerate(node.output):
            if name:
                kind = output_type(node, slot, found, variables, kinds, inner)
                narrow = kind == FLOAT and found is not None and found.output(slot) in half
                self.define(node, slot, kind, narrow, scope, nodes, name in returned)
                if narrow:
                    self.half.values[name] = first
                scope[name].stage = _stage(node.op_type, inputs)
                scope[name].weight = node.op_type in MOVES and _moves_weights(found, inputs)
        if half:
            self.half.narrow[node.output[0]] = first

    def cast(
        self, node: onnx.NodeProto, value: _Value, scope: _Scope, nodes: list[onnx.NodeProto], returned: bool
    ) -> None:
        """A Cast of the model. Between float32 and float16 it gives another name to what is there already."""
        name, to = node.output[0], int(helper.get_node_attr_value(node, "to"))
        if name in self.edges and returned:
            node.output[0] = self.fresh(name)
            self.cast(node, value, scope, nodes, False)
            scope[name] = made = scope.pop(node.output[0])
            if HALF in made.names:
                nodes.append(helper.make_node("Identity", [made.names[HALF]], [name]))
            else:
                nodes.append(helper.make_node("Cast", [made.name], [name], to=HALF))
            return
        exact = to in (value.original, FLOAT)
        floats = {value.original, to} <= {FLOAT, HALF} and (exact or value.tensor is None)
        if not floats or returned:
            node.input[0] = value.names.get(to) or value.name
            nodes.append(node)
        if not floats:
            scope[name] = _Value(to, to, {to: name})
            return
        if returned and value.tensor is None:
            value.names.setdefault(to, name)
        if to == HALF:
            self.use(value, HALF, nodes)
        same = value.original == to
        scope[name] = value if same else _Value(to, to, value.names, weight=value.weight)

    def define(
        self,
        node: onnx.NodeProto,
        slot: int,
        kind: int,
        narrow: bool,
        scope: _Scope,
        nodes: list[onnx.NodeProto],
        returned: bool,
    ) -> None:
        """Put a node's output into scope; what the graph returns is cast back to its type under its name."""
        name = node.output[slot]
        if name in self.edges:
            scope[name] = _Value(FLOAT, HALF, {HALF: name})
            if not narrow:
                node.output[slot] = fresh = self.fresh(name)
                nodes.append(helper.make_node("Cast", [fresh], [name], to=HALF))
                scope[name] = _Value(FLOAT, FLOAT, {FLOAT: fresh, HALF: name})
        elif not narrow:
            scope[name] = _Value(kind, kind, {kind: name})
        elif returned:
            fresh = self.fresh(name)
            node.output[slot] = fresh
            nodes.append(helper.make_node("Cast", [fresh], [name], to=FLOAT))
            scope[name] = _Value(FLOAT, HALF, {HALF: fresh, FLOAT: name})
        else:
            scope[name] = _Value(FLOAT, HALF, {HALF: name})

    def use(self, value: _Value, wanted: int, nodes: list[onnx.NodeProto]) -> str:
        """The name under which a float value has the wanted type, made if it is not there yet."""
        if wanted not in value.names:
            fresh = self.fresh(value.name)
            if value.tensor is not None and value.graph is not None:
                value.graph.initializer.append(half_tensor(value.tensor, fresh))
                self.copies[fresh] = value.name
            else:
                nodes.append(helper.make_node("Cast", [value.name], [fresh], to=wanted))
            value.names[wanted] = fresh
        return value.names[wanted]

    def fresh(self, name: str) -> str:
        number = 0
        new = f"{name}/fp16"
        while new in self.names:
            number += 1
            new = f"{name}/fp16_{number}"
        self.names.add(new)
        return new

    def subgraphs(self, node: onnx.NodeProto, scope: _Scope, given: list[int]) -> list[list[int]]:
        """Convert the graphs in a node's attributes. What goes in and comes out of them stays as it was.

        Answers the types of what each graph gives.
        """
        if node.op_type == "Loop":
            given = [TensorProto.INT64, TensorProto.BOOL, *given[2:]]
        found = []
        for graph in subgraphs(node):
            inner = self.graph(graph, scope, given)
            found.append([inner[v.name].original if v.name in inner else UNKNOWN for v in graph.output])
        return found

    def decide(
        self, node: onnx.NodeProto, found: Signature | None, inputs: list[_Value | None], variables: dict[str, int]
    ) -> set[str]:
        """The type variables that become float16; empty where the node stays as it is."""
        floats = {name for name, kind in variables.items() if kind == FLOAT}
        if not floats or found is None:
            return set()
        half = floats & found.half
        kept = next((name for name in node.output if name in self.keep), None)
        if kept is not None and half:
            self.half.kept[kept] = self.keep[kept]
            return self.stays(self.keep[kept].partition(":")[0])
        given = zip(node.input, inputs, strict=True)
        if any(name and found.input(i) in half and _unknown(value) for i, (name, value) in enumerate(given)):
            return self.stays(f"{node.op_type} of values of unknown type")
        if not half or node.op_type in TYPED or node.op_type in WRAPS:
            return self.stays(f"{node.op_type} takes no float16") if not half else set()
        if node.op_type in WIDE or (node.op_type == "Mul" and len(set(node.input)) == 1):
            return self.stays(f"{node.op_type} can leave float16's range")
        fed = [v for i, v in enumerate(inputs) if v and found.input(i) in half and v.tensor is None]
        weights = _weights(found, inputs)
        moved = node.op_type in MOVES and all(v.weight for v in fed)
        leads = bool(weights) and (node.op_type in NARROW or moved)
        if not leads and not _is_at_home(fed):
            return self.stays(f"{node.op_type} of float32 values")
        for slot, value in enumerate(inputs):
            if value is not None and value.tensor is not None and found.input(slot) in half:
                strict = node.op_type in ("Mul", "Div") or (node.op_type, slot) in STATISTICS
                if not self.holds(value.tensor, strict, node.op_type in CLIPPED):
                    return self.stays(f"{node.op_type} with a constant that float16 cannot hold")
        return half

    def stays(self, reason: str) -> set[str]:
        self.half.wide[reason] = self.half.wide.get(reason, 0) + 1
        return set()

    def holds(self, tensor: onnx.TensorProto, strict: bool, clipped: bool) -> bool:
        """Whether a float32 constant keeps its meaning in float16."""
        number = weight_number(tensor)
        if number is None:
            return values_hold([numpy_helper.to_array(tensor).reshape(-1)], tensor.dims, strict, clipped)
        key = (number, strict, clipped)
        if key not in self.fits:
            weight = self.weights[number]
            blocks = (as_float32(block, weight.dtype) for block in weight.blocks(1 << 24))
            self.fits[key] = values_hold(blocks, weight.shape, strict, clipped)
        return self.fits[key]


def _weights(found: Signature | None, inputs: list[_Value | None]) -> list[_Value]:
    """The float inputs that are made of large constants alone."""
    return [v for i, v in enumerate(inputs) if v and v.weight and found is not None and found.input(i) in found.half]


def _is_at_home(fed: list[_Value]) -> bool:
    """Whether these values are float16, or may become it again."""
    own = [v.now == HALF or v.stage == "normalized" for v in fed]
    return any(own) and all(v.stage == "share" or yes for v, yes in zip(fed, own, strict=True))


def _stage(op_type: str, inputs: list[_Value | None]) -> str:
    """How far a node's output is on the way through a normalization in parts."""
    if op_type in ("ReduceMean", "Softmax"):
        return "mean" if op_type == "ReduceMean" else "share"
    stages = ("half" if v.now == HALF else "constant" if v.tensor is not None else v.stage for v in inputs if v)
    return STAGES.get((op_type, *stages), "")


def _moves_weights(found: Signature | None, inputs: list[_Value | None]) -> bool:
    """Whether all float inputs are constants, and one of them is large."""
    floats = [v for v in inputs if v is not None and v.original == FLOAT]
    return bool(_weights(found, inputs)) and all(v.weight or v.tensor is not None for v in floats)


def _unknown(value: _Value | None) -> bool:
    return value is None or value.original == UNKNOWN

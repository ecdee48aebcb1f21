"""The float16 graph of a float32 model.

Driven by operator schemas: for each node the type variables of its schema say which inputs and outputs may be float16
together. A node computes in float16 where its schema allows it and nothing speaks against it; where float16 and
float32 meet, casts are put in, one for each value and type. Inputs and outputs of the graph keep theirs.

Which nodes stay float32 follows from the values, as in mixed-precision training (Micikevicius et al., "Mixed Precision
Training", ICLR 2018, section 3): sums, powers, exponentials and the like overflow or lose small addends (`WIDE`);
a constant that float16 cannot hold keeps its node in float32, unless it is a bound that may be clipped (masks made of
the smallest float32); everything else takes the type of what it is fed, float32 if any of that is float32.

Works on names and scopes of the protobuf message itself, since sparse initializers and weights without data have to
pass through unharmed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from conx.graph.read import SourceModel, Weight, weight_number
from conx.graph.schemas import Signature, signature

__all__ = ["Half", "to_float16"]

FLOAT, HALF, UNKNOWN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UNDEFINED
LARGEST = 65504.0
LOST = 0.01  # relative error of a constant from which float16 does not hold it

# Stay float32: what they compute can leave float16's range, or sums up many values.
WIDE = {
    "Acosh", "Atanh", "Cosh", "CumSum", "Exp", "GridSample", "Log", "LogSoftmax", "LpNormalization", "Mod", "Pow",
    "Range", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Reciprocal", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Sinh",
    "Softplus", "Sqrt", "Tan", "Cos", "Sin", "DFT", "STFT",
}  # fmt: skip
# With a large weight they compute in float16 whatever they are fed: this is where its speed is.
NARROW = {
    "Attention", "BatchNormalization", "Conv", "ConvTranspose", "DeformConv", "Einsum", "EmbedLayerNormalization",
    "FusedConv", "FusedGemm", "FusedMatMul", "GRU", "Gather", "Gemm", "GroupNorm", "GroupNormalization",
    "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "MultiHeadAttention", "PackedAttention", "RNN",
    "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
}  # fmt: skip
# What only moves values: of a weight it gives a weight.
MOVES = {
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
}  # fmt: skip
# A constant beyond float16's range is a bound or a mask here, and may be clipped.
CLIPPED = {"Add", "Sub", "Where", "Max", "Min", "Clip", "Pad"}
# Whose outputs' type is said by an attribute: it stays.
TYPED = {"Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "Multinomial", "Bernoulli", "OneHot", "BitCast"}
STATISTICS = {("BatchNormalization", 3), ("BatchNormalization", 4)}  # small variances count


@dataclass
class Half:
    """The float16 model, and why nodes stayed float32: {reason: number of nodes}."""

    model: onnx.ModelProto
    wide: dict[str, int] = field(default_factory=dict)


@dataclass
class _Value:
    """A value in scope: its type in the source, the type that it has now, and the names under which it is had."""

    original: int
    now: int
    names: dict[int, str]
    tensor: onnx.TensorProto | None = None  # of a constant
    graph: onnx.GraphProto | None = None  # where that is an initializer
    weight: bool = False  # made of large constants alone

    def seen_from_within(self) -> "_Value":
        """For a subgraph, whose casts are its own. Constants are shared: their other type is an initializer."""
        if self.tensor is not None:
            return self
        return _Value(self.original, self.now, dict(self.names), weight=self.weight)


_Scope = dict[str, _Value]


def to_float16(source: SourceModel) -> Half:
    """Make the float16 model of a float32 one. Its weights stay stubs, those that are float16 with that type.

    Local functions are inlined. The source is not changed.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source.proto)
    model.ClearField("training_info")
    if model.functions:
        model = inliner.inline_local_functions(model)
    half = Half(model)
    _Pass(half, source.weights).run()
    return half


class _Pass:
    def __init__(self, half: Half, weights: Sequence[Weight]) -> None:
        self.half, self.weights = half, weights
        self.model = half.model
        self.opsets = {o.domain: o.version for o in self.model.opset_import}
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))
        self.names = set(_names(self.model.graph))
        self.fits: dict[tuple[int, bool], bool] = {}

    def run(self) -> None:
        graph = self.model.graph
        self.graph(graph, {})
        _drop_unused(graph)

    def graph(self, graph: onnx.GraphProto, outer: _Scope, given: Sequence[int] = ()) -> _Scope:
        """Convert a graph. `given` are the types of a subgraph's inputs. Answers its scope."""
        scope = {name: value.seen_from_within() for name, value in outer.items()}
        for i, info in enumerate(graph.input):
            kind = info.type.tensor_type.elem_type or (given[i] if i < len(given) else UNKNOWN)
            scope[info.name] = _Value(kind, kind, {kind: info.name})
        fixed = {v.name for v in (*graph.input, *graph.output)}
        _constants_to_initializers(graph, fixed)
        for tensor in graph.initializer:
            constant = None if tensor.name in fixed else tensor
            kind, large = tensor.data_type, weight_number(tensor) is not None
            scope[tensor.name] = _Value(kind, kind, {kind: tensor.name}, constant, graph, large)
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
        inner = self.subgraphs(node, scope, inputs)
        variables = _bound(found, inputs)
        half = self.decide(node, found, inputs, variables) if not inner else set()
        for slot, value in enumerate(inputs):
            if value is None or value.original != FLOAT:
                continue
            if node.op_type == "Cast" and node.domain in ("", "ai.onnx"):
                node.input[slot] = value.names[value.now]
            else:
                wanted = HALF if found is not None and found.input(slot) in half else FLOAT
                node.input[slot] = self.use(value, wanted, nodes)
        nodes.append(node)
        for slot, name in enumerate(node.output):
            if name:
                kind = self.output_type(node, slot, found, variables, inputs, inner)
                narrow = kind == FLOAT and found is not None and found.output(slot) in half
                self.define(node, slot, kind, narrow, scope, nodes, name in returned)
                scope[name].weight = node.op_type in MOVES and bool(_weights(found, inputs))

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
        if not narrow:
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
            name = value.names[value.now]
            fresh = self.fresh(name)
            if value.tensor is not None and value.graph is not None:
                value.graph.initializer.append(_half_tensor(value.tensor, fresh))
            else:
                nodes.append(helper.make_node("Cast", [name], [fresh], to=wanted))
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

    def subgraphs(self, node: onnx.NodeProto, scope: _Scope, inputs: list[_Value | None]) -> list[_Scope]:
        """Convert the graphs in a node's attributes. What goes in and comes out of them stays as it was."""
        given = [UNKNOWN if value is None else value.original for value in inputs]
        if node.op_type == "Loop":
            given = [TensorProto.INT64, TensorProto.BOOL, *given[2:]]
        found = []
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else []), *attribute.graphs):
                inner = self.graph(graph, scope, given)
                found.append({v.name: inner[v.name] for v in graph.output if v.name in inner})
        return found

    def output_type(
        self,
        node: onnx.NodeProto,
        slot: int,
        found: Signature | None,
        variables: dict[str, int],
        inputs: list[_Value | None],
        inner: list[_Scope],
    ) -> int:
        """The type that an output has in the source."""
        if inner:
            values = list(inner[0].values())
            skipped = 1 if node.op_type == "Loop" else 0
            return values[slot + skipped].original if slot + skipped < len(values) else UNKNOWN
        attributes = {a.name: a for a in node.attribute}
        if node.op_type == "Constant":
            return _constant_type(attributes)
        if node.op_type == "ConstantOfShape":
            return attributes["value"].t.data_type if "value" in attributes else FLOAT
        said = attributes.get("to", attributes.get("dtype"))
        if said is not None and said.type == onnx.AttributeProto.INT:
            return int(said.i)
        if node.op_type in ("CastLike", "OneHot") and inputs[-1] is not None:
            return inputs[-1].original
        if found is None:
            return UNKNOWN
        kind = found.output(slot)
        if kind in variables:
            return variables[kind]
        return _TYPES.get(kind, FLOAT if node.op_type in WIDE else UNKNOWN)

    def decide(
        self, node: onnx.NodeProto, found: Signature | None, inputs: list[_Value | None], variables: dict[str, int]
    ) -> set[str]:
        """The type variables that become float16; empty where the node stays as it is."""
        floats = {name for name, kind in variables.items() if kind == FLOAT}
        if not floats or found is None:
            return set()
        half = floats & found.half
        given = zip(node.input, inputs, strict=True)
        if any(name and found.input(i) in half and _unknown(value) for i, (name, value) in enumerate(given)):
            return self.stays(f"{node.op_type} of values of unknown type")
        if not half or node.op_type in TYPED:
            return self.stays(f"{node.op_type} takes no float16") if not half else set()
        if node.op_type in WIDE or (node.op_type == "Mul" and len(set(node.input)) == 1):
            return self.stays(f"{node.op_type} can leave float16's range")
        fed = [v for i, v in enumerate(inputs) if v and found.input(i) in half and v.tensor is None]
        weights = _weights(found, inputs)
        moved = node.op_type in MOVES and all(v.weight for v in fed)
        leads = bool(weights) and (node.op_type in NARROW or moved)
        if not leads and not (fed and all(v.now == HALF for v in fed)):
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
            return _holds([numpy_helper.to_array(tensor).reshape(-1)], tensor.dims, strict, clipped)
        key = (number, strict)
        if key not in self.fits:
            weight = self.weights[number]
            self.fits[key] = _holds(weight.blocks(1 << 24), weight.shape, strict, clipped)
        return self.fits[key]


def _weights(found: Signature | None, inputs: list[_Value | None]) -> list[_Value]:
    """The float inputs that are made of large constants alone."""
    return [v for i, v in enumerate(inputs) if v and v.weight and found is not None and found.input(i) in found.half]


def _unknown(value: _Value | None) -> bool:
    return value is None or value.original == UNKNOWN


def _bound(found: Signature | None, inputs: list[_Value | None]) -> dict[str, int]:
    """The types that the schema's variables have, from the inputs."""
    variables: dict[str, int] = {}
    for slot, value in enumerate(inputs):
        if found is not None and value is not None and value.original != UNKNOWN:
            kind = found.input(slot)
            if "(" not in kind:
                variables.setdefault(kind, value.original)
    return variables


def _holds(
    blocks: Sequence[npt.NDArray[np.float32]] | Iterator[npt.NDArray[np.float32]],
    dims: Sequence[int],
    strict: bool,
    clipped: bool,
) -> bool:
    """Whether float16 holds these values.

    None may lie beyond its range, unless they may be clipped, and none of a vector or scalar may be bent by more than
    LOST, of its own size if `strict`, else of the largest one's. Of matrices only the range counts.
    """
    vector = sum(d > 1 for d in dims) < 2
    for block in blocks:
        finite = block[np.isfinite(block)]
        size = np.abs(finite)
        if not clipped and size.max(initial=0) > LARGEST:
            return False
        if strict or vector:
            kept = size[(size > 0) & (size <= LARGEST)]
            with np.errstate(under="ignore"):
                bent = np.abs(kept.astype(np.float16).astype(np.float32) - kept)
            if (bent > LOST * (kept if strict else kept.max(initial=0))).any():
                return False
    return True


def _half_tensor(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """The constant as float16: a stub keeps its number, small data is rounded, beyond the range clipped."""
    if weight_number(tensor) is not None:
        stub = TensorProto()
        stub.CopyFrom(tensor)
        stub.name, stub.data_type = name, HALF
        return stub
    values = numpy_helper.to_array(tensor)
    bounded = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)
    with np.errstate(under="ignore"):
        return numpy_helper.from_array(bounded.astype(np.float16), name)


def _constants_to_initializers(graph: onnx.GraphProto, fixed: set[str]) -> None:
    """Float constants of nodes become initializers, which have another type more cheaply than by a cast."""
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.output[0] not in fixed:
            attribute = node.attribute[0]
            if attribute.name in ("value_float", "value_floats"):
                values = np.asarray(helper.get_attribute_value(attribute), np.float32)
                graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
            elif attribute.name == "value" and attribute.t.data_type == FLOAT:
                graph.initializer.append(attribute.t)
                graph.initializer[-1].name = node.output[0]
            else:
                continue
            del graph.node[i]


def _constant_type(attributes: dict[str, onnx.AttributeProto]) -> int:
    for name, attribute in attributes.items():
        if name == "value":
            return attribute.t.data_type
        if name == "sparse_value":
            return attribute.sparse_tensor.values.data_type
        if name.startswith("value_"):
            kinds = {"value_float": FLOAT, "value_floats": FLOAT, "value_int": TensorProto.INT64}
            return kinds.get(name, TensorProto.INT64 if name == "value_ints" else TensorProto.STRING)
    return UNKNOWN


_TYPES = {
    "tensor(float)": FLOAT,
    "tensor(float16)": HALF,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
    "tensor(uint8)": TensorProto.UINT8,
    "tensor(int8)": TensorProto.INT8,
    "tensor(string)": TensorProto.STRING,
}


def _names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (v.name for v in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
        for sub in _graphs_of(node):
            yield from _names(sub)


def _graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _used(graph: onnx.GraphProto) -> set[str]:
    used = {v.name for v in graph.output}
    for node in graph.node:
        used.update(node.input)
        for sub in _graphs_of(node):
            used |= _used(sub)
    return used


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop float32 constants that are only used as float16 now; those take their names."""
    used = _used(graph) | {v.name for v in graph.input}
    gone = {t.name for t in graph.initializer if t.name not in used}
    renamed = {t.name: t.name.rpartition("/fp16")[0] for t in graph.initializer if t.name not in gone}
    inner = {name for node in graph.node for sub in _graphs_of(node) for name in _names(sub)}
    renamed = {new: old for new, old in renamed.items() if old in gone and old not in inner}
    kept = [t for t in graph.initializer if t.name not in gone]
    for tensor in kept:
        tensor.name = renamed.get(tensor.name, tensor.name)
    copies = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
    del graph.initializer[:]
    graph.initializer.extend(copies)
    _rename_uses(graph, renamed.get)
    for node in graph.node:
        for sub in _graphs_of(node):
            _drop_unused(sub)


def _rename_uses(graph: onnx.GraphProto, new: Callable[[str, str], str]) -> None:
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = new(name, name)
        for sub in _graphs_of(node):
            _rename_uses(sub, new)

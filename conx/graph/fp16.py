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

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper, numpy_helper

from conx.graph.fp16_graph import all_names, constants_to_initializers, drop_unused, forget_defaults, inlined
from conx.graph.fp16_values import half_tensor, values_hold
from conx.graph.lift import subgraphs
from conx.graph.read import SourceModel, Weight, weight_number
from conx.graph.schemas import Signature, signature

__all__ = ["Half", "to_float16"]

FLOAT, HALF, UNKNOWN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UNDEFINED

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
# A constant beyond float16's range is a bound or a mask here, and may be clipped. Not where it is added: of a row that
# is masked throughout, float32 leaves nothing but the mask.
CLIPPED = {"Where", "Max", "Min", "Clip", "Pad"}
# Whose outputs' type is said by an attribute: it stays.
TYPED = {"Cast", "CastLike", "Constant", "ConstantOfShape", "EyeLike", "Multinomial", "Bernoulli", "OneHot", "BitCast"}
# What puts values into sequences and optionals: of these, schemas do not say which type they hold.
WRAPS = {"Optional", "OptionalGetElement", "SequenceConstruct", "SequenceInsert", "SplitToSequence"}
# How far a normalization in parts has come, from the operator and how far its inputs had. What it makes of float16
# values float16 holds again; and its factors have to be float16 then, for onnxruntime fuses them with what came in.
STAGES = {
    ("Add", "mean", "constant"): "mean",
    ("Add", "constant", "mean"): "mean",
    ("Sqrt", "mean"): "deviation",
    ("Reciprocal", "deviation"): "inverse",
    ("Div", "constant", "deviation"): "inverse",
    ("Sub", "half", "mean"): "centered",
    ("Div", "half", "deviation"): "normalized",
    ("Div", "centered", "deviation"): "normalized",
    ("Mul", "half", "inverse"): "normalized",
    ("Mul", "inverse", "half"): "normalized",
    ("Mul", "centered", "inverse"): "normalized",
    ("Mul", "inverse", "centered"): "normalized",
}
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


def to_float16(source: SourceModel) -> Half:
    """Make the float16 model of a float32 one. Its weights stay stubs, those that are float16 with that type.

    Local functions are inlined where they can be. The source is not changed.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source.proto)
    model.ClearField("training_info")
    if model.functions:
        model = inlined(model)
    if model.ir_version < 4:  # there, every initializer is an input too, and as constant as any
        forget_defaults(model.graph)
    half = Half(model)
    _Pass(half, source.weights).run()
    return half


class _Pass:
    def __init__(self, half: Half, weights: Sequence[Weight]) -> None:
        self.half, self.weights = half, weights
        self.model = half.model
        self.opsets = {o.domain: o.version for o in self.model.opset_import}
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))
        self.names = set(all_names(self.model.graph))
        self.copies: dict[str, str] = {}  # float16 initializers: whose they are
        self.fits: dict[tuple[int, bool, bool], bool] = {}

    def run(self) -> None:
        graph = self.model.graph
        self.graph(graph, {})
        drop_unused(graph, self.copies)

    def graph(self, graph: onnx.GraphProto, outer: _Scope, given: Sequence[int] = ()) -> _Scope:
        """Convert a graph. `given` are the types of a subgraph's inputs. Answers its scope."""
        scope = {name: value.seen_from_within() for name, value in outer.items()}
        for i, info in enumerate(graph.input):
            kind = info.type.tensor_type.elem_type or (given[i] if i < len(given) else UNKNOWN)
            scope[info.name] = _Value(kind, kind, {kind: info.name})
        fixed = {v.name for v in (*graph.input, *graph.output)}
        constants_to_initializers(graph, fixed)
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
        if node.op_type == "Cast" and node.domain in ("", "ai.onnx") and inputs[0] is not None:
            self.cast(node, inputs[0], scope, nodes, node.output[0] in returned)
            return
        variables = _bound(found, inputs)
        half = set() if any(subgraphs(node)) else self.decide(node, found, inputs, variables)
        for slot, value in enumerate(inputs):
            if value is not None and value.original in (FLOAT, HALF):
                narrow = value.original == HALF or (found is not None and found.input(slot) in half)
                node.input[slot] = self.use(value, HALF if narrow else FLOAT, nodes)
        inner = self.subgraphs(node, scope, inputs)
        nodes.append(node)
        for slot, name in enumerate(node.output):
            if name:
                kind = self.output_type(node, slot, found, variables, inputs, inner)
                narrow = kind == FLOAT and found is not None and found.output(slot) in half
                self.define(node, slot, kind, narrow, scope, nodes, name in returned)
                scope[name].stage = _stage(node.op_type, inputs)
                scope[name].weight = node.op_type in MOVES and _moves_weights(found, inputs)

    def cast(
        self, node: onnx.NodeProto, value: _Value, scope: _Scope, nodes: list[onnx.NodeProto], returned: bool
    ) -> None:
        """A Cast of the model. Between float32 and float16 it gives another name to what is there already."""
        name, to = node.output[0], int(helper.get_node_attr_value(node, "to"))
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

    def subgraphs(self, node: onnx.NodeProto, scope: _Scope, inputs: list[_Value | None]) -> list[list[int]]:
        """Convert the graphs in a node's attributes. What goes in and comes out of them stays as it was.

        Answers the types of what each graph gives.
        """
        given = [UNKNOWN if value is None else value.original for value in inputs]
        if node.op_type == "Loop":
            given = [TensorProto.INT64, TensorProto.BOOL, *given[2:]]
        found = []
        for graph in subgraphs(node):
            inner = self.graph(graph, scope, given)
            found.append([inner[v.name].original if v.name in inner else UNKNOWN for v in graph.output])
        return found

    def output_type(
        self,
        node: onnx.NodeProto,
        slot: int,
        found: Signature | None,
        variables: dict[str, int],
        inputs: list[_Value | None],
        inner: list[list[int]],
    ) -> int:
        """The type that an output has in the source."""
        if inner and node.op_type != "SequenceMap":  # which gives sequences of what its graph gives
            given = slot + (node.op_type == "Loop")
            return next((kinds[given] for kinds in inner if given < len(kinds) and kinds[given]), UNKNOWN)
        attributes = {a.name: a for a in node.attribute}
        if node.op_type == "Constant":
            return _constant_type(attributes)
        if node.op_type == "ConstantOfShape":
            return attributes["value"].t.data_type if "value" in attributes else FLOAT
        said = attributes.get("to", attributes.get("dtype"))
        if said is not None and said.type == onnx.AttributeProto.INT:
            return int(said.i)
        like = _LIKE.get(node.op_type)
        if like is not None and len(inputs) > like and (value := inputs[like]) is not None:
            return value.original
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
            self.fits[key] = values_hold(weight.blocks(1 << 24), weight.shape, strict, clipped)
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


def _bound(found: Signature | None, inputs: list[_Value | None]) -> dict[str, int]:
    """The types that the schema's variables have, from the inputs."""
    variables: dict[str, int] = {}
    for slot, value in enumerate(inputs):
        if found is not None and value is not None and value.original != UNKNOWN:
            kind = found.input(slot)
            if "(" not in kind:
                variables.setdefault(kind, value.original)
    return variables


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


_LIKE = {  # which input's type the output has, where no attribute says it
    "Bernoulli": 0,
    "CastLike": 1,
    "EyeLike": 0,
    "OneHot": 2,
    "RandomNormalLike": 0,
    "RandomUniformLike": 0,
}
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

"""Operators that only move, pick or compare integers: they do the same to the floats that these stand for."""

import math
from dataclasses import dataclass, replace

import onnx
from onnx import helper

from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.restore import alias, as_floats
from conx.graph.dequantize.values import Params, Value, leaves, same_params

__all__ = ["DATA", "POSITIVE", "move", "stays_positive"]

# The inputs that hold the data: how many of them from the first on, or None for all.
DATA: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "GatherElements", "GatherND",
         "Split", "Expand", "Tile", "MaxPool", "Resize", "Upsample", "DepthToSpace", "SpaceToDepth", "ReduceMax",
         "ReduceMin", "Compress", "ReverseSequence", "TopK", "ArgMax", "ArgMin"),
        (0,),
    ),
    "Pad": (0, 2), "Clip": (0, 1, 2), "Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2),
    "Concat": None, "Max": None, "Min": None,
}  # fmt: skip
# Outputs that are data; the others are indices, the same for integers and floats.
INDICES = {"ArgMax": (0,), "ArgMin": (0,), "TopK": (1,), "MaxPool": (1,)}
# Their output is never below 0, or only where an input is.
POSITIVE = {
    "Relu", "Sigmoid", "Softmax", "Abs", "Exp", "Sqrt", "Softplus", "HardSigmoid", "ReduceL1", "ReduceL2",
    "ReduceSumSquare",
}  # fmt: skip
_POSITIVE_OF = {
    "Add", "AveragePool", "Dropout", "GlobalAveragePool", "GlobalMaxPool", "Identity", "Mul", "Pow", "ReduceMean",
    "ReduceSum", "Sum", *DATA,
}  # fmt: skip


def stays_positive(node: onnx.NodeProto, inputs: list[Value | None]) -> bool:
    """Whether a node's output is never below 0."""
    if node.op_type in POSITIVE:
        return True
    if node.op_type == "Clip" and len(inputs) > 1 and inputs[1] is not None and inputs[1].constant is not None:
        return bool((inputs[1].constant.values() >= 0).all())
    if node.op_type not in _POSITIVE_OF:
        return False
    slots = DATA.get(node.op_type) or range(len(inputs))
    if node.op_type == "Pad" and len(inputs) < 3:
        slots = (0,)
    return all(v is None or _not_below_zero(v) for v in (inputs[i] for i in slots if i < len(inputs)))


def _not_below_zero(value: Value) -> bool:
    if value.positive:
        return True
    constant = value.constant
    small = constant is not None and constant.size <= 1 << 16 and constant.readable()
    return small and constant is not None and bool((constant.values() >= 0).all())


def move(node: onnx.NodeProto, frame: Frame) -> None:
    """An operator of the table, in the source. It stays for those who need its integers."""
    inputs = [frame.get(name) for name in node.input]
    slots = DATA[node.op_type]
    data = [inputs[i] for i in (range(len(inputs)) if slots is None else slots) if i < len(inputs)]
    first = next((v for v in data if v is not None), None)
    source = onnx.NodeProto()
    source.CopyFrom(node)
    frame.keep(node)
    for name in filter(None, node.output):
        frame.define(Value(name, first.kind if first else 0, positive=stays_positive(node, inputs)))
    _constant(node, inputs, frame)
    if first is None or not any(v is not None and (v.integer or _is_codes(v)) for v in data):
        _picked(node, inputs, frame)
        return
    params = next((v.integer.params for v in data if v and v.integer and v.integer.params), None)
    moved = Moved(source, tuple(inputs), params if params is not None and params.single() else None)
    for slot, name in enumerate(node.output):
        if not name:
            continue
        if slot in INDICES.get(node.op_type, ()):
            _redirect(moved, frame, node, slot)
        elif frame.values[name].constant is None:
            frame.values[name].integer = Part(moved, slot)
            if moved.params is None and first.fixed:
                frame.values[name].picks = first.fixed


def _is_codes(value: Value) -> bool:
    return value.constant is not None and not value.constant.dtype.is_float and value.constant.dtype.bits <= 16


def _redirect(moved: "Moved", frame: Frame, node: onnx.NodeProto, slot: int) -> None:
    """Indices are had from the floats, so that the integers need not be made."""
    if moved.params is None:
        return
    name = node.output[slot]
    outputs = moved.outputs(frame, moved.params, name, slot)
    if outputs is not None:
        node.output[slot] = frame.run.fresh(name, "integers")
        outputs[slot].kind = onnx.TensorProto.INT64
        alias(frame, name, outputs[slot])


@dataclass(frozen=True)
class Moved:
    """What a node of the table made of integers."""

    node: onnx.NodeProto
    inputs: tuple[Value | None, ...]
    params: Params | None

    def outputs(self, frame: Frame, params: Params, want: str, slot: int) -> list[Value] | None:
        """The outputs of the node when it is fed floats; `want` is the name of one of them."""
        key = ("moved", id(self.node), *params.key())
        found = frame.cached(key)
        if found is not None:
            return list(found.factors)
        node = onnx.NodeProto()
        node.CopyFrom(self.node)
        slots = DATA[node.op_type]
        for i in range(len(self.inputs)) if slots is None else slots:
            value = self.inputs[i] if i < len(self.inputs) else None
            if value is None:
                continue
            inner = self._inside(value, params)
            made = None if inner is None else as_floats(frame, value, inner)
            if made is None:
                return None
            node.input[i] = made.name
        for i, operand in enumerate(self.inputs):
            if operand is not None and slots is not None and i not in slots:
                node.input[i] = operand.name
        values = []
        for i, name in enumerate(self.node.output):
            new = want if i == slot and want else frame.run.fresh(name or node.op_type) if name else ""
            node.output[i] = new
            before = frame.get(name)
            values.append(Value(new, params.kind, positive=before is not None and before.positive))
        frame.nodes.append(node)
        frame.cache[key] = Value("", factors=tuple(values))
        for value in values:
            frame.define(value)
        return values

    def _inside(self, value: Value, params: Params) -> Params | None:
        """The scale and zero point of what the node is fed."""
        if params.single() and not any(v.picked for v in params.scale):
            return params
        if self.params is not None and same_params(self.params, params):
            return params
        if self.node.op_type != "Gather" or value.constant is None or _attribute(self.node, "axis") != 0:
            return None
        if any(v.picked for v in params.scale):
            return self._rows(params)
        indices, axis = self.inputs[1], params.axis
        if axis is None or axis < 0:  # counted from the last axis, which is the same
            return params if _behind(params, len(value.constant.shape) - 1) else None
        if indices is None or indices.rank is None or axis < indices.rank or params.block:
            return None
        return replace(params, axis=axis - indices.rank + 1)

    def _rows(self, params: Params) -> Params | None:
        """Where each row has its scale, which is gathered like the row."""
        scales: list[Value] = []
        for value in params.scale:
            if value.picked is None:
                scales.append(value)
                continue
            table, indices = value.picked
            if table.constant is None or indices != self.node.input[1]:
                return None
            rank = len(self.inputs[0].constant.shape) if self.inputs[0] and self.inputs[0].constant else 0
            dims = table.constant.shape
            full = table.constant.moved(("shape", dims + (1,) * (rank - len(dims))))
            scales.append(replace(table, constant=full))
        if params.zero is not None and params.zero.constant is not None and params.zero.constant.size > 1:
            return None
        return replace(params, scale=tuple(scales), axis=None)


def _behind(params: Params, axes: int) -> bool:
    """Whether all scales and zero points broadcast against the last axes alone."""
    values = (*params.scale, *([params.zero] if params.zero else []))
    return all(v.constant is not None and (v.constant.size == 1 or len(v.constant.shape) <= axes) for v in values)


@dataclass(frozen=True)
class Part:
    """One output of such a node."""

    moved: Moved
    slot: int

    @property
    def params(self) -> Params | None:
        return self.moved.params

    def floats(self, frame: Frame, params: Params, want: str) -> Value | None:
        outputs = self.moved.outputs(frame, params, want, self.slot)
        return None if outputs is None else outputs[self.slot]


def _attribute(node: onnx.NodeProto, name: str, default: int = 0) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _picked(node: onnx.NodeProto, inputs: list[Value | None], frame: Frame) -> None:
    """Scales that are moved: of rows, gathered; or a single one."""
    table = inputs[0] if inputs else None
    out = frame.values[node.output[0]]
    if table is not None and table.scalar and node.op_type in ("Reshape", "Squeeze", "Unsqueeze"):
        out.factors, out.scalar = leaves(table), True
    if node.op_type == "Gather" and table is not None and table.constant is not None and _attribute(node, "axis") == 0:
        out.picked = (table, node.input[1])


def _constant(node: onnx.NodeProto, inputs: list[Value | None], frame: Frame) -> None:
    """The output of a node that moves a constant's elements."""
    value = inputs[0] if inputs else None
    if value is None or value.constant is None or node.op_type not in ("Reshape", "Transpose", "Flatten", "Squeeze",
                                                                       "Unsqueeze"):  # fmt: skip
        return
    made = _new_shape(node, value.constant.shape, inputs[1] if len(inputs) > 1 else None)
    if made is None:
        return
    out = frame.values[node.output[0]]
    out.constant, out.home, out.rank = value.constant.moved(made), value.home, len(made[1])


def _new_shape(
    node: onnx.NodeProto, shape: tuple[int, ...], second: Value | None
) -> tuple[str, tuple[int, ...]] | None:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    rank = len(shape)
    if node.op_type == "Transpose":
        return "perm", tuple(attributes.get("perm", range(rank)[::-1]))
    if node.op_type == "Flatten":
        axis = attributes.get("axis", 1)
        axis = axis + rank if axis < 0 else axis
        first, rest = math.prod(shape[:axis]), math.prod(shape[axis:])
        return "shape", (first, rest)
    numbers = attributes.get("axes", attributes.get("shape"))
    if second is not None:
        if second.constant is None:
            return None
        numbers = [int(v) for v in second.constant.values().reshape(-1)]
    if node.op_type == "Reshape":
        return None if numbers is None else ("shape", _reshaped(shape, numbers, bool(attributes.get("allowzero"))))
    if node.op_type == "Squeeze":
        gone = {i for i, d in enumerate(shape) if d == 1} if numbers is None else {a % rank for a in numbers}
        return "shape", tuple(d for i, d in enumerate(shape) if i not in gone)
    if numbers is None:
        return None
    full = rank + len(numbers)
    new = {a % full for a in numbers}
    lengths = iter(shape)
    return "shape", tuple(1 if i in new else next(lengths) for i in range(full))


def _reshaped(shape: tuple[int, ...], numbers: list[int], zeros: bool) -> tuple[int, ...]:
    dims = [shape[i] if d == 0 and not zeros and i < len(shape) else d for i, d in enumerate(numbers)]
    if -1 in dims:
        rest = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(shape) // rest if rest else 0
    return tuple(dims)

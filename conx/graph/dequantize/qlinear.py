"""Operators with quantized inputs and outputs: QLinearConv, QLinearMatMul, QGemm and onnxruntime's other QLinear*."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.linear import Quantized, clipping, quantize, unclipped
from conx.graph.dequantize.moves import stays_positive
from conx.graph.dequantize.restore import alias, dequantized, weight
from conx.graph.dequantize.values import FLOAT, Params, Value, leaves

__all__ = ["QLINEAR", "qlinear"]


@dataclass(frozen=True)
class _Form:
    """Where an operator has what.

    Attributes:
        data: slots of the quantized inputs; scale and zero point follow each.
        scale: slot of the output's scale, which its zero point follows.
        make: adds the float operator: (frame, node, floats, name of the output) -> value.
        axes: axis of the scales of each input, where it has several.
    """

    data: tuple[int, ...]
    scale: int
    make: Callable[[Frame, onnx.NodeProto, Sequence[Value], str], Value | None]
    axes: tuple[int, ...] = ()


def qlinear(node: onnx.NodeProto, frame: Frame) -> None:
    """Make the float operator of a QLinear one."""
    form = _form(node)
    slots = form.data or tuple(range(2, len(node.input), 3))
    if any(a.name == "channels_last" and a.i for a in node.attribute):
        frame.stays(node, "its channels are last")
        return
    floats = []
    for i, slot in enumerate(slots):
        params = _params(frame, node, slot + 1, form.axes[i] if i < len(form.axes) else None)
        value = frame.get(node.input[slot])
        made = None if value is None or params is None else dequantized(frame, value, params)
        if made is None:
            frame.stays(node, "scales along an axis of values whose number of axes is not known")
            return
        floats.append(made)
    scale = frame.get(node.input[form.scale]) if form.scale < len(node.input) else None
    params = _params(frame, node, form.scale, None)
    if scale is not None and params is not None:
        made = _integers(node, frame, form, floats, scale, params)
    else:
        made = form.make(frame, node, floats, node.output[0])
        if made is not None:
            alias(frame, node.output[0], made)
    if made is None:
        frame.stays(node, "it has no float form here")


def _integers(
    node: onnx.NodeProto, frame: Frame, form: _Form, floats: Sequence[Value], scale: Value, params: Params
) -> Value | None:
    """Make the float operator of one whose output is quantized, and those integers of it for who needs them."""
    name = node.output[0]
    kind = params.zero.kind if params.zero is not None else TensorProto.UINT8
    want = frame.wanted.get(name, "")
    positive = stays_positive(_as_float_operator(node), list(floats))
    clips = clipping(params, kind, frame.run.opset, positive)
    made = form.make(frame, node, floats, "" if clips else want)
    if made is None:
        return None
    made.positive = positive
    twin = unclipped(frame, made, params, kind, want if clips else "")
    if frame.run.keep or not quantize(frame, twin, scale, params, kind, name):
        frame.emit("QuantizeLinear", [twin, scale, params.zero], name, kind=kind)
    known = Quantized(params, None if frame.run.keep else twin)
    return frame.define(Value(name, kind, made.rank, integer=known, positive=twin.positive))


def _form(node: onnx.NodeProto) -> _Form:
    """Where a node has what. QGemm's scales lie along its columns, which transB makes rows."""
    form = QLINEAR[node.op_type]
    turned = node.op_type == "QGemm" and any(a.name == "transB" and a.i for a in node.attribute)
    return replace(form, axes=(0, 0)) if turned else form


def _as_float_operator(node: onnx.NodeProto) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=node.op_type.removeprefix("QLinear"))


def _params(frame: Frame, node: onnx.NodeProto, slot: int, axis: int | None) -> Params | None:
    """Scale and zero point from input `slot` on."""
    scale = frame.get(node.input[slot]) if slot < len(node.input) else None
    zero = frame.get(node.input[slot + 1]) if slot + 1 < len(node.input) else None
    if scale is None:
        return None
    one = scale.scalar or scale.rank == 0 or (scale.constant is not None and scale.constant.size == 1)
    return Params(leaves(scale), zero, None if one else axis, kind=scale.kind or FLOAT)


def _attributes(node: onnx.NodeProto, *without: str) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute if a.name not in ("channels_last", *without)}


def _same(op_type: str, *without: str) -> Callable[[Frame, onnx.NodeProto, Sequence[Value], str], Value | None]:
    """The float operator that differs in nothing but its name."""

    def make(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
        rank = floats[0].rank
        like, kind = node.output[0], floats[0].kind or FLOAT
        return frame.emit(op_type, floats, want, like=like, kind=kind, rank=rank, **_attributes(node, *without))

    return make


def _conv(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
    bias = _bias(frame, node, 8, (1, 4), 1.0)
    inputs = [*floats, *([bias] if bias is not None else [])]
    return frame.emit("Conv", inputs, want, like=node.output[0], kind=FLOAT, rank=floats[1].rank, **_attributes(node))


def _gemm(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
    attributes = _attributes(node)
    bias = _bias(frame, node, 6, (1, 4), float(attributes.get("alpha", 1.0)))
    if bias is None and frame.run.opset < 11:
        bias = frame.constant(np.float32(0), node.output[0], FLOAT)
    return frame.emit("Gemm", [*floats, bias], want, like=node.output[0], kind=FLOAT, rank=2, **attributes)


def _bias(frame: Frame, node: onnx.NodeProto, slot: int, scales: tuple[int, int], factor: float) -> Value | None:
    """A bias of int32, whose scale is the product of the operands'."""
    value = frame.get(node.input[slot]) if slot < len(node.input) else None
    if value is None:
        return None
    parts = [frame.get(node.input[i]) for i in scales]
    scale = [leaf for v in parts if v is not None for leaf in leaves(v)]
    if factor != 1.0:
        scale.append(frame.constant(np.float32(factor), node.output[0], FLOAT))
    params = Params(tuple(scale), None, -1, kind=FLOAT)
    return weight(frame, value, params) or dequantized(frame, value, params, like=node.output[0])


def _softmax(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
    attributes = _attributes(node, "opset")
    opset = next((a.i for a in node.attribute if a.name == "opset"), frame.run.opset)
    # Before opset 13 the axes from `axis` on are one; that is the same where it is the last.
    if (opset < 13) != (frame.run.opset < 13) and attributes.get("axis", 1 if opset < 13 else -1) != -1:
        return None
    attributes.setdefault("axis", 1 if opset < 13 else -1)
    return frame.emit("Softmax", floats, want, like=node.output[0], kind=FLOAT, rank=floats[0].rank, **attributes)


def _reduce_mean(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
    attributes = _attributes(node)
    inputs = list(floats)
    if frame.run.opset >= 18 and "axes" in attributes:
        inputs.append(frame.constant(np.asarray(attributes.pop("axes"), np.int64), node.output[0]))
    return frame.emit("ReduceMean", inputs, want, like=node.output[0], kind=FLOAT, **attributes)


def _where(frame: Frame, node: onnx.NodeProto, floats: Sequence[Value], want: str) -> Value | None:
    condition = frame.get(node.input[0])
    return frame.emit("Where", [condition, *floats], want, like=node.output[0], kind=FLOAT, rank=floats[0].rank)


QLINEAR: dict[str, _Form] = {
    "QLinearConv": _Form((0, 3), 6, _conv, (1, 0)),
    "QLinearMatMul": _Form((0, 3), 6, _same("MatMul"), (-2, -1)),
    "QGemm": _Form((0, 3), 7, _gemm, (0, 1)),
    "QLinearAdd": _Form((0, 3), 6, _same("Add")),
    "QLinearMul": _Form((0, 3), 6, _same("Mul")),
    "QLinearAveragePool": _Form((0,), 3, _same("AveragePool")),
    "QLinearGlobalAveragePool": _Form((0,), 3, _same("GlobalAveragePool")),
    "QLinearSigmoid": _Form((0,), 3, _same("Sigmoid")),
    "QLinearLeakyRelu": _Form((0,), 3, _same("LeakyRelu")),
    "QLinearSoftmax": _Form((0,), 3, _softmax),
    "QLinearReduceMean": _Form((0,), 3, _reduce_mean),
    "QLinearConcat": _Form((), 0, _same("Concat")),
    "QLinearWhere": _Form((1, 4), 7, _where),
}

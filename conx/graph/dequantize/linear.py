"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear."""

from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto

from conx.dtypes import DType
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.restore import alias, dequantized
from conx.graph.dequantize.values import FLOAT, UNKNOWN, Params, Value, is_zero, leaves, same_params

__all__ = [
    "Quantized",
    "clipping",
    "dequantize_linear",
    "dynamic_quantize_linear",
    "quantize",
    "quantize_linear",
    "unclipped",
]

RANGES: dict[int, tuple[int, int]] = {
    TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127), TensorProto.UINT16: (0, 65535),
    TensorProto.INT16: (-32768, 32767), TensorProto.UINT4: (0, 15), TensorProto.INT4: (-8, 7),
    TensorProto.UINT2: (0, 3), TensorProto.INT2: (-2, 1),
}  # fmt: skip
SIX = 6.0  # Clip to 0 … 6 is the one clip beside Relu that networks use everywhere


@dataclass(frozen=True)
class Quantized:
    """Integers that a float value was quantized to; `twin` is that value, None where the rounding is to stay."""

    params: Params | None
    twin: Value | None

    def floats(self, _frame: Frame, params: Params, _want: str) -> Value | None:
        if self.twin is None or self.params is None or not same_params(self.params, params):
            return None
        return self.twin


def parameters(node: onnx.NodeProto, frame: Frame, slot: int, kind: int = UNKNOWN) -> Params | None:
    """Scale and zero point of (De)QuantizeLinear, from input `slot` on."""
    scale = frame.get(node.input[slot])
    zero = frame.get(node.input[slot + 1]) if len(node.input) > slot + 1 else None
    if scale is None:
        return None
    attributes = {a.name: a.i for a in node.attribute}
    block = attributes.get("block_size", 0)
    axis = attributes.get("axis", 1)
    one = not block and (scale.constant.size == 1 if scale.constant else scale.scalar or scale.rank == 0)
    return Params(leaves(scale), zero, None if one else axis, block, kind or scale.kind or FLOAT)


def dequantize_linear(node: onnx.NodeProto, frame: Frame) -> None:
    """Let its output be the floats that the integers stand for."""
    value = frame.get(node.input[0])
    attributes = {a.name: a.i for a in node.attribute}
    params = parameters(node, frame, 1, attributes.get("output_dtype", UNKNOWN))
    name = node.output[0]
    if value is None or params is None:
        frame.stays(node, "it has no scale")
        return
    if frame.run.keep and value.constant is None and (value.integer is None or _kept(value, params)):
        frame.keep(node)
        return
    claimed = name in frame.wanted.values()
    made = dequantized(frame, value, params, "" if claimed else name, name)
    if made is None:
        frame.stays(node, "scales along an axis of values whose number of axes is not known")
        return
    alias(frame, name, made)


def _kept(value: Value, params: Params) -> bool:
    return isinstance(value.integer, Quantized) and value.integer.twin is None and not params.block


def quantize_linear(node: onnx.NodeProto, frame: Frame) -> None:
    """Remember what was quantized; the integers themselves are made only for those who need integers."""
    value = frame.get(node.input[0])
    params = parameters(node, frame, 1)
    if value is None or params is None:
        frame.stays(node, "it has no scale")
        return
    attributes = {a.name: a.i for a in node.attribute}
    kind = attributes.get("output_dtype", 0) or (params.zero.kind if params.zero else TensorProto.UINT8)
    name = node.output[0]
    params = replace(params, kind=value.kind or params.kind)
    if frame.run.keep:
        frame.keep(node)
        frame.define(Value(name, kind, value.rank, integer=Quantized(params, None)))
        return
    twin = unclipped(frame, value, params, kind, frame.wanted.get(name, ""))
    scale = frame.get(node.input[1])
    if scale is None or not quantize(frame, value, scale, params, kind, name, bool(attributes.get("saturate", 1))):
        frame.stays(node, "this kind of quantization has no equivalent in ordinary operators")
    frame.define(Value(name, kind, value.rank, integer=Quantized(params, twin), positive=value.positive))


def quantize(
    frame: Frame, value: Value, scale: Value, params: Params, kind: int, name: str, saturate: bool = True
) -> bool:
    """Quantize by ordinary operators to integers of a name; whether that could be written."""
    dtype = DType.from_number(kind)
    if frame.run.opset < 11 or dtype is None or (kind not in RANGES and not dtype.is_float) or not params.single():
        return False
    made = value
    if value.kind not in (FLOAT, UNKNOWN):
        made = frame.emit("Cast", [value], like=name, kind=FLOAT, to=FLOAT)
    if scale.kind not in (FLOAT, UNKNOWN):
        scale = frame.emit("Cast", [scale], like=name, kind=FLOAT, to=FLOAT)
    made = frame.emit("Div", [made, scale], like=name, kind=FLOAT)
    if dtype.is_float:
        frame.emit("Cast", [made], name, kind=kind, to=kind, saturate=int(saturate))
        return True
    made = frame.emit("Round", [made], like=name, kind=FLOAT)
    if not is_zero(params.zero) and params.zero is not None:
        if params.zero.constant is not None:
            zero = frame.constant(params.zero.constant.values().reshape(()), params.zero.name, FLOAT)
        else:
            zero = frame.emit("Cast", [params.zero], like=name, kind=FLOAT, to=FLOAT)
        made = frame.emit("Add", [made, zero], like=name, kind=FLOAT)
    low, high = (frame.constant(np.float32(limit), name, FLOAT) for limit in RANGES[kind])
    made = frame.emit("Clip", [made, low, high], like=name, kind=FLOAT)
    frame.emit("Cast", [made], name, kind=kind, to=kind)
    return True


def clipping(params: Params, kind: int, opset: int, positive: bool) -> str:
    """The operator that quantization to integers of a kind does to values besides rounding them: Relu, Clip or "".

    onnxruntime's quantizer drops a Relu or Clip before QuantizeLinear, since the smallest integer stands for what they
    would give. So where the zero point is the smallest integer, whatever is below 0 was meant to become 0: also if no
    Relu was dropped, that is what the quantized model does. A range of exactly 0 … 6 was a Clip.

    Args:
        params: scale and zero point.
        kind: of the integers.
        opset: of the model.
        positive: whether the values are never below 0 anyway.
    """
    limits = RANGES.get(kind)
    if limits is None or not params.single() or len(params.scale) != 1 or params.scale[0].constant is None:
        return ""
    zero = 0 if params.zero is None else None
    if params.zero is not None and params.zero.constant is not None:
        zero = int(params.zero.constant.values().reshape(-1)[0])
    if zero != limits[0]:
        return ""
    scale = params.scale[0].constant.values().reshape(-1)[0]
    if np.float32(SIX / (limits[1] - limits[0])) == np.float32(scale) and opset >= 11:
        return "Clip"
    return "" if positive else "Relu"


def unclipped(frame: Frame, value: Value, params: Params, kind: int, want: str = "") -> Value:
    """The value that is quantized, after what the quantization's `clipping` does. Inputs and constants had nothing."""
    how = "" if value.fed or value.constant else clipping(params, kind, frame.run.opset, value.positive)
    if not how:
        return value
    key = ("unclipped", value.name, how)
    made = frame.cached(key)
    if made is None:
        limits = [frame.constant(v, value.name, value.kind or FLOAT) for v in (0.0, SIX)] if how == "Clip" else []
        made = frame.emit(how, [value, *limits], want, like=value.name, kind=value.kind, rank=value.rank)
        made.positive = True
        frame.cache[key] = made
    return made


def dynamic_quantize_linear(node: onnx.NodeProto, frame: Frame) -> None:
    """Remember what was quantized. The node stays for those who need integers."""
    value = frame.get(node.input[0])
    frame.keep(node)
    names = [*node.output, "", ""][:3]
    scale = frame.define(Value(names[1], FLOAT, 0, scalar=True))
    zero = frame.define(Value(names[2], TensorProto.UINT8, 0, scalar=True))
    if value is None:
        return
    params = Params((scale,), zero)
    twin = None if frame.run.keep else value
    frame.define(Value(names[0], TensorProto.UINT8, value.rank, integer=Quantized(params, twin)))

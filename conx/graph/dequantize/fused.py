"""Fused operators with quantized weights: DynamicQuantizeLSTM, QAttention, QEmbedLayerNormalization."""

import onnx
from onnx import helper

from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.products import MICROSOFT
from conx.graph.dequantize.restore import dequantized, weight
from conx.graph.dequantize.values import FLOAT, Params, Value, leaves

__all__ = ["attention", "embed_layer_normalization", "lstm"]

TO_LSTM = (("perm", (0, 2, 1)),)  # [directions, input, 4 * hidden] to [directions, 4 * hidden, input]


def lstm(node: onnx.NodeProto, frame: Frame) -> None:
    """DynamicQuantizeLSTM: W and R lie transposed, with a scale for each direction or each direction's column."""
    inputs = [frame.get(name) for name in [*node.input, *[""] * 12][:12]]
    made: list[Value | None] = []
    for slot, scale in ((1, 8), (2, 10)):
        codes, scales, zero = inputs[slot], inputs[scale], inputs[scale + 1]
        found = None
        if codes is not None and scales is not None:
            params = Params((_columns(scales),), _columns(zero) if zero is not None else None)
            found = weight(frame, codes, params, after=TO_LSTM)
        made.append(found)
    if frame.run.keep or None in made:
        reason = "quantization of activations is to stay" if frame.run.keep else "its weights are not constant"
        frame.stays(node, reason)
        return
    fed = [inputs[0], *made, *inputs[3:8]]
    _replace(node, frame, "LSTM", "", fed)


def _columns(value: Value) -> Value:
    """Scales of [directions] or [directions, columns] as they broadcast against the codes."""
    if value.constant is None:
        return value
    dims = value.constant.shape
    shape = (dims[0], 1, dims[1]) if len(dims) == 2 else (*dims, *[1] * (3 - len(dims)))
    return Value(value.name, value.kind, 3, value.constant.moved(("shape", shape)), value.home)


def attention(node: onnx.NodeProto, frame: Frame) -> None:
    """QAttention is Attention of what its first two inputs stand for."""
    value, codes, bias, scale, weight_scale, mask, zero, weight_zero, past = (
        frame.get(name) for name in [*node.input, *[""] * 9][:9]
    )
    if value is None or codes is None or scale is None or weight_scale is None:
        frame.stays(node, "an input is left out")
        return
    kind = scale.kind or FLOAT
    floats = dequantized(frame, value, Params(leaves(scale), zero, kind=kind))
    one = weight_scale.constant is not None and weight_scale.constant.size == 1
    matrix = dequantized(frame, codes, Params(leaves(weight_scale), weight_zero, None if one else -1, kind=kind))
    if floats is None or matrix is None:
        frame.stays(node, "its weight is not constant")
        return
    _replace(node, frame, "Attention", MICROSOFT, [floats, matrix, bias, mask, past])


def embed_layer_normalization(node: onnx.NodeProto, frame: Frame) -> None:
    """QEmbedLayerNormalization has five quantized tables and vectors, and all scales, then all zero points."""
    inputs = [frame.get(name) for name in [*node.input, *[""] * 18][:18]]
    made: list[Value | None] = []
    for i in range(5):
        codes, scale, zero = inputs[2 + i], inputs[8 + i], inputs[13 + i]
        found = None
        if codes is not None and scale is not None:
            found = dequantized(frame, codes, Params(leaves(scale), zero, kind=scale.kind or FLOAT))
            if found is None:
                frame.stays(node, "its weights are not constant")
                return
        made.append(found)
    _replace(node, frame, "EmbedLayerNormalization", MICROSOFT, [*inputs[:2], *made, inputs[7]])


def _replace(node: onnx.NodeProto, frame: Frame, op_type: str, domain: str, inputs: list[Value | None]) -> None:
    """The float operator with the node's outputs and attributes."""
    names = ["" if v is None else v.name for v in inputs]
    while names and not names[-1]:
        names.pop()
    made = helper.make_node(op_type, names, list(node.output), node.name, domain=domain)
    made.attribute.extend(node.attribute)
    frame.nodes.append(made)
    for name in filter(None, node.output):
        frame.define(Value(name))

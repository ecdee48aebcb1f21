"""Dequantization in plain operators: Cast, Sub, Mul, and products of scales."""

from dataclasses import replace

import onnx
from onnx import TensorProto, helper

from conx.dtypes import DType
from conx.graph.dequantize.constants import CODE_KINDS
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.linear import Quantized
from conx.graph.dequantize.products import Product, Sum
from conx.graph.dequantize.restore import alias, as_floats
from conx.graph.dequantize.values import Affine, Params, Value, leaves

__all__ = ["cast", "divide", "multiply", "round_off", "subtract"]

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
MAX_FACTORS = 6  # of a product of scales: activation, weight, and a few that somebody multiplied in


def cast(node: onnx.NodeProto, frame: Frame) -> None:
    """Integers as floats or wider integers: the first step of a dequantization."""
    value = frame.get(node.input[0])
    to = int(helper.get_node_attr_value(node, "to"))
    frame.keep(node)
    out = frame.define(Value(node.output[0], to, value.rank if value else None))
    if value is None:
        return
    out.scalar, out.positive = value.scalar, value.positive
    dtype = DType.from_number(to)
    if value.constant is not None and dtype is not None and value.constant.readable():
        out.constant, out.home = replace(value.constant, cast=dtype), value.home
    if to in FLOATS and value.kind in FLOATS and (value.factors or value.scalar):
        out.factors = leaves(value)
    if value.divided is not None and to == TensorProto.INT32:
        whole, scale = value.divided
        out.integer = Quantized(Params(scale, None, kind=whole.kind or TensorProto.FLOAT), whole)
    of = value.affine.of if value.affine is not None and not value.affine.params.scale else value
    if of.kind in CODE_KINDS or of.integer is not None:
        params = value.affine.params if value.affine is not None else Params(())
        wide = to in FLOATS or (dtype is not None and dtype.bits > 8 and dtype.storage.kind == "i")
        out.affine = Affine(of, replace(params, kind=to if to in FLOATS else params.kind), wide) if wide else None


def divide(node: onnx.NodeProto, frame: Frame) -> None:
    """A value by a scale: the first step of its quantization."""
    values = [frame.get(name) for name in node.input]
    frame.keep(node)
    out = frame.define(Value(node.output[0]))
    if len(values) == 2 and values[0] is not None and values[1] is not None:
        out.kind, out.rank, out.divided = values[0].kind, values[0].rank, (values[0], leaves(values[1]))


def round_off(node: onnx.NodeProto, frame: Frame) -> None:
    """Floor or Round: the second."""
    value = frame.get(node.input[0])
    frame.keep(node)
    out = frame.define(Value(node.output[0]))
    if value is not None:
        out.kind, out.rank, out.divided, out.positive = value.kind, value.rank, value.divided, value.positive


def subtract(node: onnx.NodeProto, frame: Frame) -> None:
    """The zero point, taken off after a cast."""
    values = [frame.get(name) for name in node.input]
    frame.keep(node)
    out = frame.define(Value(node.output[0]))
    value, zero = values if len(values) == 2 else (None, None)
    if value is None or zero is None:
        return
    out.kind, out.rank = value.kind, value.rank
    known = value.affine
    if known is not None and known.wide and known.params.zero is None and not known.params.scale:
        if zero.affine is not None and not zero.affine.params.scale and zero.affine.params.zero is None:
            zero = zero.affine.of  # a zero point of the integers' type, cast too
        out.affine = replace(known, params=replace(known.params, zero=zero))


def multiply(node: onnx.NodeProto, frame: Frame) -> None:
    """A scale, multiplied to what was cast; or one scale by another."""
    values = [frame.get(name) for name in node.input]
    name = node.output[0]
    if len(values) == 2 and None not in values:
        for value, factor in (values, values[::-1]):
            if value is not None and factor is not None and value.affine is not None and value.kind in FLOATS:
                scaled = _scaled(value.affine, factor)
                made = None if scaled is None else as_floats(frame, scaled.of, scaled.params, name)
                if made is not None:
                    frame.run.made["Cast, Mul"] += not isinstance(scaled and scaled.of.integer, Product | Sum)
                    alias(frame, name, made)
                    return
                if scaled is not None:
                    frame.keep(node)
                    frame.define(Value(name, value.kind, value.rank, affine=scaled))
                    return
    frame.keep(node)
    out = frame.define(Value(name))
    a, b = values if len(values) == 2 else (None, None)
    if a is None or b is None:
        return
    out.kind = a.kind or b.kind
    out.rank = max(a.rank, b.rank) if a.rank is not None and b.rank is not None else None
    out.positive = a.positive and b.positive
    if len(leaves(a)) + len(leaves(b)) <= MAX_FACTORS:
        out.factors = (*leaves(a), *leaves(b))


def _scaled(affine: Affine, factor: Value) -> Affine | None:
    """With one more factor; None where that is no scale."""
    scale = (*affine.params.scale, *leaves(factor))
    if len(scale) > MAX_FACTORS or factor.affine is not None or factor.integer is not None:
        return None
    return replace(affine, params=replace(affine.params, scale=scale))

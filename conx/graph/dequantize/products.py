"""Matrix products and convolutions of integers: MatMulInteger, ConvInteger and what onnxruntime makes of them.

MatMulInteger and ConvInteger give sums of products of `integer - zero_point`. The scales come later: their product is
multiplied to the sums, after a Cast. So the float operator is made when that multiplication is met, and the scale of a
weight is what is left of the factors when those of the activations are taken out.
"""

from dataclasses import dataclass, replace
from typing import Any

import onnx
from onnx import TensorProto, helper

from conx.graph.dequantize.constants import Constant
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.restore import alias, as_floats, dequantized, weight
from conx.graph.dequantize.values import FLOAT, Params, Value, is_zero, leaves, same

__all__ = [
    "Product",
    "Sum",
    "add",
    "dynamic_quantize_matmul",
    "integer_product",
    "matmul_integer_to_float",
    "multiplied",
]

MICROSOFT = "com.microsoft"
TRANSPOSED = "_Transposed"  # what onnxruntime's quantizer appends when it makes a MatMul of a Gemm with transB


def integer_product(node: onnx.NodeProto, frame: Frame) -> None:
    """MatMulInteger or ConvInteger: remember what is multiplied. The node stays for those who need its integers."""
    operands = [frame.get(name) for name in [*node.input, "", ""][:4]]
    frame.keep(node)
    a, b, a_zero, b_zero = operands
    if a is None or b is None:
        return
    attributes = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    product = Product(node.op_type == "ConvInteger", a, b, a_zero, b_zero, attributes)
    frame.define(Value(node.output[0], TensorProto.INT32, integer=product))
    frame.run.why.setdefault(node.output[0], "its result is not scaled in a way that could be understood")


@dataclass(frozen=True)
class Product:
    """Sums of products of integers; their zero point is 0, and the scale is that of one operand times the other's."""

    convolution: bool
    a: Value
    b: Value
    a_zero: Value | None
    b_zero: Value | None
    attributes: dict[str, Any]

    @property
    def params(self) -> None:
        """Not known: the scale is that of both operands."""

    def floats(self, frame: Frame, params: Params, want: str) -> Value | None:
        if not is_zero(params.zero) or params.axis is not None:
            return None
        found = self._scales(params.scale)
        if found is None:
            return None
        a = self._operand(frame, self.a, self.a_zero, found[0], params.kind, left=True)
        b = None if a is None else self._operand(frame, self.b, self.b_zero, found[1], params.kind, left=False)
        if a is None or b is None:
            return None
        name = "" if self.b.constant is None else self.b.constant.tensor.name
        return multiplied(frame, a, b, want, name, self.convolution, self.attributes, params.kind)

    def _scales(self, factors: tuple[Value, ...]) -> tuple[tuple[Value, ...], tuple[Value, ...]] | None:
        """The factors that are of the first operand, and of the second."""
        rest = list(factors)
        of: list[list[Value] | None] = [None, None]
        for i, (operand, zero) in enumerate(((self.a, self.a_zero), (self.b, self.b_zero))):
            own = operand.integer.params if operand.integer is not None else None
            if own is None or not same(own.zero, zero):
                continue
            taken = _without(rest, own.scale)
            if taken is None:
                return None
            rest, of[i] = taken, list(own.scale)
        open_ones = [i for i, scales in enumerate(of) if scales is None]
        if not open_ones:
            return None if rest else (tuple(of[0] or ()), tuple(of[1] or ()))
        if len(open_ones) == 1:
            of[open_ones[0]] = rest
        elif self.a.fixed and self.b.fixed:
            of = [*_split(rest, self.a, self.b)]
        else:
            fixed = 0 if self.a.fixed else 1
            of[fixed] = [v for v in rest if v.constant is not None]
            of[1 - fixed] = [v for v in rest if v.constant is None]
        if any(not of[i] and operand.fixed for i, operand in ((0, self.a), (1, self.b))):
            return None  # the scale of a weight is still to come
        return tuple(of[0] or ()), tuple(of[1] or ())

    def _operand(
        self, frame: Frame, value: Value, zero: Value | None, scales: tuple[Value, ...], kind: int, *, left: bool
    ) -> Value | None:
        if value.constant is None:
            return dequantized(frame, value, Params(scales, zero, kind=kind))
        rank = len(value.constant.shape)
        if self.convolution:
            axis = 1 if left else 0
            placed = [_channels(v, rank) for v in scales]
        else:
            axis = rank - 2 if left else rank - 1
            placed = [v if _spares(v, left) else None for v in scales]
        if any(v is None for v in placed):
            return None
        fitting = tuple(v for v in placed if v is not None)
        if self.convolution:
            return weight(frame, value, Params(fitting, zero, axis, kind=kind))
        zero_axis = zero.constant is not None and len(zero.constant.shape) == 1 if zero is not None else False
        if left and zero_axis and zero is not None and zero.constant is not None and zero.constant.size > 1:
            return None
        name, after = _untransposed(value.constant, rank, left)
        return weight(frame, value, Params(fitting, zero, None, kind=kind), after=after, name=name)


def _split(scales: list[Value], a: Value, b: Value) -> tuple[list[Value], list[Value]]:
    """The scales of two operands that are both made of constants: by name, or else in the order of the operands."""
    first = [v for v in scales if v.name == f"{_stem(a)}_scale"]
    second = [v for v in scales if v.name == f"{_stem(b)}_scale" and v not in first]
    rest = [v for v in scales if v not in first and v not in second]
    if not first and len(rest) > (not second):
        first = [rest.pop(0)]
    return first, [*second, *rest]


def _stem(value: Value) -> str:
    """The name that a constant's integers probably had as floats."""
    return value.fixed.removesuffix("_quantized")


def add(node: onnx.NodeProto, frame: Frame) -> None:
    """Add: of sums of products and a bias of integers, it is a sum of what both stand for."""
    values = [frame.get(name) for name in node.input]
    frame.keep(node)
    out = frame.define(Value(node.output[0]))
    a, b = values if len(values) == 2 else (None, None)
    if a is None or b is None:
        return
    out.kind = a.kind or b.kind
    out.rank = max(a.rank, b.rank) if a.rank is not None and b.rank is not None else None
    if isinstance(b.integer, Product):
        a, b = b, a
    if isinstance(a.integer, Product):
        out.integer = Sum(a, b)


@dataclass(frozen=True)
class Sum:
    """Sums of products and a bias of the same scale."""

    a: Value
    b: Value

    @property
    def params(self) -> None:
        """See `Product`."""

    def floats(self, frame: Frame, params: Params, want: str) -> Value | None:
        first = as_floats(frame, self.a, params)
        second = None if first is None else dequantized(frame, self.b, params)
        if first is None or second is None:
            return None
        return frame.emit("Add", [first, second], want, like=want or first.name, kind=params.kind, rank=first.rank)


def _untransposed(constant: Constant, rank: int, left: bool) -> tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Name and moves that give back the weight of a Gemm with transB, if it was one."""
    name = constant.tensor.name.removesuffix("_quantized")
    if rank == 2 and not left and name.endswith(TRANSPOSED) and name != TRANSPOSED:
        return name.removesuffix(TRANSPOSED), (("perm", (1, 0)),)
    return "", ()


def _without(values: list[Value], gone: tuple[Value, ...]) -> list[Value] | None:
    """The values without others; None if one of these is not among them."""
    rest = list(values)
    for value in gone:
        found = next((v for v in rest if v is value or v.name == value.name), None)
        found = found or next((v for v in rest if same(v, value)), None)
        if found is None:
            return None
        rest.remove(found)
    return rest


def _spares(scale: Value, left: bool) -> bool:
    """Whether a scale of a product is one of its columns (of its rows, if `left`) alone."""
    if scale.constant is None:
        return False
    dims = scale.constant.shape
    if scale.constant.size == 1:
        return True
    return dims[-1] == 1 if left else len(dims) < 2 or dims[-2] == 1


def _channels(scale: Value, rank: int) -> Value | None:
    """A scale of a convolution as one of output channels."""
    if scale.constant is None:
        return None
    dims = (1,) * (rank - len(scale.constant.shape)) + scale.constant.shape
    if len(dims) != rank or any(d != 1 for i, d in enumerate(dims) if i != 1):
        return scale if scale.constant.size == 1 else None
    return replace(scale, constant=scale.constant.moved(("shape", (dims[1],))))


def multiplied(
    frame: Frame,
    a: Value,
    b: Value,
    want: str,
    name: str = "",
    convolution: bool = False,
    attributes: dict[str, Any] | None = None,
    kind: int = FLOAT,
) -> Value:
    """The product of floats. `name` is that of the integers that `b` is made of."""
    like = want or a.name
    if convolution:
        return frame.emit("Conv", [a, b], want, like=like, kind=kind, rank=b.rank, **(attributes or {}))
    if name.removesuffix("_quantized").endswith(TRANSPOSED) and b.rank == 2:
        if frame.run.opset >= 11:
            return frame.emit("Gemm", [a, b], want, like=like, kind=kind, rank=2, transB=1)
        b = frame.emit("Transpose", [b], like=like, kind=kind, rank=2, perm=[1, 0])
    return frame.emit("MatMul", [a, b], want, like=like, kind=kind, rank=a.rank if b.rank == 2 else None)


def matmul_integer_to_float(node: onnx.NodeProto, frame: Frame) -> None:
    """MatMulIntegerToFloat has all scales and a bias as inputs."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = (frame.get(n) for n in [*node.input, "", "", ""][:7])
    if a is None or b is None or a_scale is None or b_scale is None:
        frame.stays(node, "an input is left out")
        return
    kind = a_scale.kind or b_scale.kind or FLOAT
    first = Params(leaves(a_scale), a_zero, None if _is_one(a_scale) else -2, kind=kind)
    second = Params(leaves(b_scale), b_zero, None if _is_one(b_scale) else -1, kind=kind)
    _product(node, frame, dequantized(frame, a, first), dequantized(frame, b, second), bias, kind)


def dynamic_quantize_matmul(node: onnx.NodeProto, frame: Frame) -> None:
    """DynamicQuantizeMatMul quantizes its first input itself."""
    a, b, b_scale, b_zero, bias = (frame.get(n) for n in [*node.input, "", ""][:5])
    if a is None or b is None or b_scale is None:
        frame.stays(node, "an input is left out")
        return
    if frame.run.keep:
        frame.stays(node, "quantization of activations is to stay")
        return
    kind = b_scale.kind or FLOAT
    params = Params(leaves(b_scale), b_zero, None if _is_one(b_scale) else -1, kind=kind)
    _product(node, frame, a, dequantized(frame, b, params), bias, kind)


def _is_one(value: Value) -> bool:
    return value.scalar or (value.constant is not None and value.constant.size == 1)


def _product(
    node: onnx.NodeProto, frame: Frame, a: Value | None, b: Value | None, bias: Value | None, kind: int
) -> None:
    if a is None or b is None:
        frame.stays(node, "scales along an axis of values whose number of axes is not known")
        return
    name = node.output[0]
    made = frame.emit("MatMul", [a, b], "" if bias is not None else name, like=name, kind=kind)
    if bias is not None:
        made = frame.emit("Add", [made, bias], name, kind=kind)
    alias(frame, name, made)

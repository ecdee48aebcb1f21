"""What a graph may want of a tensor beside its values: codes, scales and zero points (spec/conx.md, section 6)."""

from collections.abc import Callable, Sequence

import numpy as np

from conx.codecs.base import Array, Buffer, Codec, Decoder, TensorMeta
from conx.codecs.convert import convert
from conx.codecs.linear import Linear
from conx.codecs.quantizing import codes_on_grid
from conx.container.records import Binding, Tensor
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["code_type", "codes_decoder", "grid_decoder", "nibbles", "scales_of", "zero_code", "zero_points_of"]

SIGN = np.uint8(0x80)


def codes_decoder(codec: Codec, target: DType) -> Decoder:
    """The codec's own codes as INT8 or UINT8: of the other signedness they are moved by 128.

    Raises:
        FormatError: the codec has no codes.
    """
    linear = _linear(codec, "codes")
    move = _mover(linear.code, target)

    def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
        linear.decode_codes(start, count, streams, out.view(linear.code.storage))
        move(out)

    return decode


def grid_decoder(tensor: Tensor, values: Decoder, axis: int, scales: Array, target: DType) -> Decoder:
    """Codes made of the values, which `values` decodes to float32.

    Args:
        tensor: the stored tensor.
        values: decodes it to float32.
        axis: the axis of its shape with a scale for each position.
        scales: float32, finite.
        target: INT8 or UINT8.
    """
    if not np.isfinite(scales).all():
        raise FormatError("a scale of its grid is not finite")
    stored_axis = axis if tensor.order is None else tensor.order.index(axis)
    write = codes_on_grid(tensor.stored_shape, stored_axis, scales)
    move = _mover(DType.INT8, target)

    def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
        singles = np.empty(count, np.float32)
        values(start, count, streams, singles)
        write(singles, start, out.view(np.int8))
        move(out)

    return decode


def code_type(codec: Codec, binding: Binding) -> DType:
    """The type that a binding's codes have before they are moved to the one wanted."""
    return DType.INT8 if binding.grid is not None else _linear(codec, "codes").code


def zero_code(target: DType) -> int:
    """What pads codes of this type."""
    return {DType.UINT8: 128, DType.UINT4: 8}.get(target, 0)


def scales_of(tensor: Tensor, codec: Codec, side: Sequence[Buffer], binding: Binding) -> Array:
    """The codec's scales in the type and the order of axes wanted, each `repeat` times, flat."""
    linear = _linear(codec, "scales")
    wanted = _in_order(tensor, linear, linear.scales_from(side), binding, "scales")
    target = binding.dtype_of(tensor)
    if target is DType.FLOAT32:
        return wanted
    out = np.empty(wanted.size, target.storage)
    convert(wanted, DType.FLOAT32, target, out)
    return out


def zero_points_of(tensor: Tensor, codec: Codec, side: Sequence[Buffer], binding: Binding) -> Array:
    """The codec's zero points, one for each scale, as `codes_decoder` gives codes: a byte each."""
    linear = _linear(codec, "zero points")
    count = linear.layout(_meta(tensor)).count
    found = np.broadcast_to(linear.zero_points_from(side), (count,))
    wanted = _in_order(tensor, linear, found, binding, "zero points")
    target = binding.dtype_of(tensor)
    if target.bits < 8:
        return nibbles(wanted, linear.code, target, None)
    _mover(linear.code, target)(wanted)
    return wanted


def nibbles(codes: Array, source: DType, target: DType, pad: tuple[int, int] | None) -> Array:
    """Codes of 4 bits, two to a byte, the first in the low bits; of the other signedness they are moved by 8.

    Args:
        codes: flat, of the type `source`.
        source: INT8 or UINT8.
        target: INT4 or UINT4.
        pad: (length of the last axis, length that it is padded to).

    Raises:
        FormatError: a code has more than 4 bits.
    """
    low, high = (-8, 7) if source is DType.INT8 else (0, 15)
    if codes.size and not low <= int(codes.min()) <= int(codes.max()) <= high:
        raise FormatError(f"a graph wants its codes in 4 bits, but they are {codes.min()} to {codes.max()}")
    moved = codes.view(np.uint8) + np.uint8(8 if (source is DType.INT8) != (target is DType.INT4) else 0)
    if pad is not None:
        padded = np.full((moved.size // max(pad[0], 1), pad[1]), zero_code(target), np.uint8)
        padded[:, : pad[0]] = moved.reshape(-1, pad[0])
        moved = padded.reshape(-1)
    packed = moved[0::2] & 0x0F
    second = moved[1::2] << 4
    packed[: second.size] |= second
    return packed


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tensor.stored_shape, tensor.dtype)


def _linear(codec: Codec, what: str) -> Linear:
    if not isinstance(codec, Linear):
        raise FormatError(f"a graph wants its {what}, which the codec {codec.id!r} does not have")
    return codec


def _in_order(tensor: Tensor, linear: Linear, flat: Array, binding: Binding, what: str) -> Array:
    """Scales or zero points, whose dims are the tensor's with the number of scales along each axis."""
    meta = _meta(tensor)
    layout = linear.layout(meta)
    dims = [1] * len(meta.shape) if layout.shared else list(meta.shape)
    if linear.axis is not None:
        dims[linear.axis] = layout.blocks
    shaped = flat.reshape(dims)
    if tensor.order is not None:
        shaped = shaped.transpose([tensor.order.index(axis) for axis in range(len(dims))])
    if binding.perm is not None:
        shaped = shaped.transpose(binding.perm)
    wanted = binding.nbytes_of(tensor) * 8 // binding.dtype_of(tensor).bits
    if shaped.size * binding.repeat != wanted:
        raise FormatError(f"a graph wants {wanted} {what}, there are {shaped.size}, {binding.repeat} times each")
    return np.repeat(shaped.reshape(-1), binding.repeat)


def _mover(source: DType, target: DType) -> Callable[[Array], None]:
    """A function that turns bytes of one signedness into those of another, in place."""
    return _keep if source is target else _turn


def _turn(codes: Array) -> None:
    np.bitwise_xor(codes.view(np.uint8), SIGN, out=codes.view(np.uint8))


def _keep(_codes: Array) -> None:
    return

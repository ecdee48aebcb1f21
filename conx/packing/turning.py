"""The order in which the axes of a tensor are stored: its own, or with the first one last.

zstd finds equal runs, and makes a table of frequencies for each 128 KiB. So a matrix whose columns are equal or of very
different sizes (the heads of recognisers that were padded with unused classes, the bases of Fourier transforms) takes
less column by column. Both orders are tried on small pieces first, since most tensors gain nothing.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from conx.codecs.base import Array, Codec, Encoded, TensorMeta
from conx.codecs.heads import Heads
from conx.codecs.linear import Linear
from conx.codecs.palette import Palette
from conx.container.limits import SEGMENT
from conx.dtypes import DType
from conx.packing.choose import smallest_of

__all__ = ["Turned", "pieces", "smaller_order", "turned"]

SMALLEST = 4096  # elements; less gains nothing to speak of
GAIN = 0.99  # of the size in the tensor's own order: what is stored in another takes longer to load
GAIN_SMALLEST = 0.997  # where only the size counts
FIRST = (1 << 15, 3)  # elements of a piece, and how many pieces are tried of each order
SECOND = (SEGMENT, 6)  # and then where these let expect a gain


@dataclass(frozen=True)
class Turned:
    """A tensor with its axes stored in another order, and how it is coded so."""

    order: tuple[int, ...]
    encoded: Encoded


def smaller_order(encoded: Encoded, shape: tuple[int, ...], dtype: DType, *, smallest: bool = False) -> Turned | None:
    """The tensor in the other order, if that is smaller.

    Args:
        encoded: the tensor in its own.
        shape: dims.
        dtype: element type.
        smallest: whether only the size counts.
    """
    axis = next((i for i, d in enumerate(shape) if d > 1), len(shape))
    length, rest = prod(shape[: axis + 1]), prod(shape[axis + 1 :])
    stored = encoded.codec.stream_names(TensorMeta(shape, dtype))
    if not stored or dtype.bits < 8 or rest <= 1 or length * rest < SMALLEST:
        return None
    limit = GAIN_SMALLEST if smallest else GAIN
    codec, matrix = encoded.codec, encoded.data.reshape(length, rest)
    for piece, count in (FIRST, SECOND):
        if _tried(codec, matrix.T, dtype, piece, count) >= limit * _tried(codec, matrix, dtype, piece, count):
            return None
    order = (*range(axis), *range(axis + 1, len(shape)), axis)
    return Turned(order, turned(encoded, shape, dtype, order))


def turned(encoded: Encoded, shape: tuple[int, ...], dtype: DType, order: tuple[int, ...]) -> Encoded:
    """The same tensor with its axes stored in the order `order`; it decodes to the same values."""
    codec, side = encoded.codec, encoded.side
    data = np.ascontiguousarray(encoded.data.reshape(shape).transpose(order)).reshape(-1)
    if isinstance(codec, Heads):
        axes = codec.axis_list()
        mask = sum(1 << order.index(axis) for axis in axes)
        codes = dict(zip(axes, side, strict=True))
        return Encoded(replace(codec, axes=mask), tuple(codes[axis] for axis in order if axis in codes), data)
    if isinstance(codec, Linear) and codec.axis is not None:
        side = tuple(_turned_side(part, codec, TensorMeta(shape, dtype), order) for part in side)
        return Encoded(replace(codec, axis=order.index(codec.axis)), side, data)
    if isinstance(codec, Palette) and codec.axis is not None:
        return Encoded(replace(codec, axis=order.index(codec.axis)), side, data)
    return Encoded(codec, side, data)


def _turned_side(part: bytes, codec: Linear, meta: TensorMeta, order: tuple[int, ...]) -> bytes:
    """Scales or zero points; where there are blocks, each position of the other axes has its own."""
    layout = codec.layout(meta)
    if layout.shared or not layout.count:
        return part
    dims = [layout.blocks if axis == codec.axis else d for axis, d in enumerate(meta.shape)]
    values = np.frombuffer(part, f"V{len(part) // layout.count}")
    return np.ascontiguousarray(values.reshape(dims).transpose(order)).tobytes()


def _tried(codec: Codec, matrix: Array, dtype: DType, piece: int, count: int) -> float:
    """Bytes for an element of `count` pieces of a matrix, from its first corner to its last, or of all of it."""
    size, elements = 0.0, 0
    for rows, columns in pieces(matrix.shape, piece, count):
        part = np.ascontiguousarray(matrix[rows, columns])
        size += smallest_of([Encoded(codec, (), part.reshape(-1))], TensorMeta(part.shape, dtype))[1]
        elements += part.size
    return size / elements


def pieces(dims: tuple[int, ...], piece: int, count: int) -> list[tuple[slice, slice]]:
    """Rows and columns of pieces of a matrix: whole rows, as many as fit into `piece` elements, or a part of one."""
    length, width = dims
    rows, columns = max(1, min(length, piece // width)), min(width, piece)
    if columns == width and length <= rows * count:
        return [(slice(at, at + rows), slice(None)) for at in range(0, length, rows)]
    corners = [((length - rows) * i // (count - 1), (width - columns) * i // (count - 1)) for i in range(count)]
    return [(slice(row, row + rows), slice(column, column + columns)) for row, column in corners]

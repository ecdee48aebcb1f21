"""How one tensor is stored: the candidates that its values and the user's rule allow, and the smallest of them.

Sizes are compared by coding samples (whole small tensors, else some segments) with the same zstd settings that the
writer uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Encoded, TensorMeta
from conx.codecs.convert import convert
from conx.codecs.exact import NARROWER, narrowed
from conx.codecs.fill import Fill
from conx.codecs.heads import Heads
from conx.codecs.linear import Linear
from conx.codecs.palette import Palette
from conx.codecs.planes import Planes
from conx.codecs.raw import Raw
from conx.container.candidates import choose as choose_parameters
from conx.container.candidates import compress
from conx.container.limits import SEGMENT
from conx.dtypes import DType
from conx.graph.channels import ChannelAxis
from conx.packing.axes import Axes
from conx.packing.expected import HEAD_BITS, plain_heads, smallest_heads
from conx.quantize.grid import Grid, fit_grid
from conx.quantize.palette import Palette as FittedPalette
from conx.quantize.palette import exact_palette, fit_palette
from conx.quantize.rules import Rule

__all__ = ["MIN_CODED", "Choice", "as_float32", "choose", "smallest_of"]

MIN_CODED = 1024  # elements; smaller tensors are not worth any error
SAMPLES = 3  # segments looked at when sizes are compared
LARGEST = 2.0**127  # a code times a scale may be half a step larger than the value, and must stay finite
LOOSE = 1.02  # a lossless form that is no more than this much larger than a lossy one is preferred
FAST = 1.005  # heads that are no more than this much larger than planes are preferred, as they decode faster

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Choice:
    """A tensor ready to be stored. `lossless` tells whether it decodes to the same bits."""

    encoded: Encoded
    lossless: bool


def choose(data: Array, shape: tuple[int, ...], dtype: DType, rule: Rule, axes: Axes) -> Choice:
    """Decide how a tensor is stored.

    Args:
        data: the values, flat, in the storage type of `dtype`.
        shape: dims.
        dtype: element type.
        rule: what the user wants; applies only where `axes` says that the tensor may be coded.
        axes: where the output channels lie.
    """
    meta = TensorMeta(shape, dtype)
    exact = _exact(data, meta, rule.smallest)
    coded = _coded(data, meta, rule, axes) if not isinstance(exact[0].codec, Fill) else []
    few_values = any(isinstance(e.codec, Palette) for e in exact)
    if coded and few_values and not axes.known:
        coded = []
    if not coded:
        return Choice(_smallest_exact(exact, meta, rule.smallest)[0], True)
    best, size = smallest_of(coded, meta)
    lossless, lossless_size = _smallest_exact(exact, meta, rule.smallest)
    limit = LOOSE * size if few_values else size
    return Choice(lossless, True) if lossless_size <= limit else Choice(best, False)


def _exact(data: Array, meta: TensorMeta, smallest: bool) -> list[Encoded]:
    """The ways of storing the values bit for bit that can be of use."""
    if meta.count and meta.dtype.bits >= 8 and _all_equal(data):
        return [Encoded(Fill(), (data[:1].tobytes(),), data)]
    found = [Encoded(Raw(), (), data)]
    if meta.dtype.bits >= 8 and meta.dtype.bits <= 64:
        palette = exact_palette(data)
        if palette is not None:
            found.append(_palette(palette, None, None))
    if meta.dtype.is_float and meta.dtype.bits >= 8:
        kept, stored = _narrowest(data, meta.dtype)
        planes = Encoded(Planes(stored=stored), (), kept)
        found = [planes, *found] if meta.dtype.bits >= 16 else [*found, planes]
        if smallest and meta.dtype in HEAD_BITS:
            found = [smallest_heads(kept, meta, stored), *found]
        elif meta.dtype in HEAD_BITS and (stored or meta.dtype) is not DType.FLOAT64:
            found = [plain_heads(kept, stored), *found]
    return found


def _smallest_exact(exact: Sequence[Encoded], meta: TensorMeta, smallest: bool) -> tuple[Encoded, float]:
    """As `_smallest`, but unless the smallest is wanted, one that decodes faster where it is hardly larger."""
    best, size = smallest_of(exact, meta)
    if smallest or not isinstance(best.codec, Planes) or not isinstance(exact[0].codec, Heads):
        return best, size
    heads_size = _size(exact[0], meta)
    return (exact[0], heads_size) if heads_size <= FAST * size else (best, size)


def _narrowest(data: Array, dtype: DType) -> tuple[Array, DType | None]:
    """The values in the narrowest type that holds all of them exactly, and that type if it is not their own."""
    for stored in NARROWER.get(dtype, ()):
        narrow = narrowed(data, dtype, stored)
        if narrow is not None:
            return narrow, stored
    return data, None


def _all_equal(data: Array) -> bool:
    first = data[:1].tobytes()
    if data[-1:].tobytes() != first:
        return False
    block = np.repeat(data[:1], min(SEGMENT, data.size)).data.cast("B")
    parts = (data[i : i + SEGMENT] for i in range(0, data.size, SEGMENT))
    return all(part.data.cast("B") == block[: part.nbytes] for part in parts)


def _coded(data: Array, meta: TensorMeta, rule: Rule, axes: Axes) -> list[Encoded]:
    """The tensor on a grid, packed in the ways that can be smallest, or on a palette.

    Empty where that is not asked for or not possible.
    """
    if rule.lossless or axes.exact or not meta.dtype.codable or meta.count < MIN_CODED or len(meta.shape) < 2:
        return []
    values = as_float32(data, meta.dtype)
    blocks = (values[i : i + SEGMENT] for i in range(0, values.size, SEGMENT))
    if not all(np.abs(block).max() < LARGEST for block in blocks):  # false for NaN too
        return []
    if rule.palette is not None:
        return [_fitted_palette(values, meta, rule, axes.axes[0])]
    grids = (_grid(values.reshape(meta.shape), axis, rule) for axis in axes.axes)
    return _packed(min(grids, key=lambda grid: grid.noise))


def as_float32(data: Array, dtype: DType) -> npt.NDArray[np.float32]:
    """The values as float32, without a copy where they are."""
    if dtype is DType.FLOAT32:
        return data
    values = np.empty(data.size, np.float32)
    convert(data, dtype, DType.FLOAT32, values)
    return values


def _grid(values: npt.NDArray[np.float32], place: ChannelAxis, rule: Rule) -> Grid:
    axis, block = place.axis, None
    if rule.block_size is not None:
        axis = _summed_axis(values.shape, place)
        block = min(rule.block_size, values.shape[axis])
    elif place.rows or place.block is not None:
        block = place.block or values.shape[axis]
    return fit_grid(values, axis, block, rule.bits)


def _summed_axis(shape: tuple[int, ...], place: ChannelAxis) -> int:
    """The axis along which blocks run: the longest one that is not the output channels'."""
    if place.rows or place.block is not None:
        return place.axis
    return max((i for i in range(len(shape)) if i != place.axis), key=lambda i: (shape[i], i))


def _packed(grid: Grid) -> list[Encoded]:
    """The grid's codes, one, two or four to a byte."""
    codecs = [Linear(axis=grid.axis, block=grid.block, base=grid.base, pack=p) for p in _worthwhile_packs(grid.codes)]
    side = codecs[0].make_side(grid.scales if grid.log_codes is None else grid.log_codes)
    return [Encoded(codec, side, grid.codes) for codec in codecs]


def _worthwhile_packs(codes: npt.NDArray[np.int8]) -> list[int]:
    """How many codes to a byte can be smallest: not those where every other code would be an escape."""
    seen = np.abs(codes[:: max(1, codes.size >> 16)].astype(np.int16))
    return [1, *(pack for pack, largest in ((2, 7), (4, 1)) if np.count_nonzero(seen > largest) < seen.size / 2)]


def _palette(palette: FittedPalette, axis: int | None, group: int | None) -> Encoded:
    pack = next(p for p in (8, 4, 2, 1) if palette.entries <= 1 << (8 // p))
    codec = Palette(entries=palette.entries, axis=axis, group=group, pack=pack)
    return Encoded(codec, (palette.values.tobytes(),), palette.indices)


def _fitted_palette(values: npt.NDArray[np.float32], meta: TensorMeta, rule: Rule, place: ChannelAxis) -> Encoded:
    assert rule.palette is not None
    axis = group_of = None
    if rule.group is not None and not place.rows:
        axis = place.axis
        channel = np.arange(meta.shape[axis]) // rule.group
        index = [1] * len(meta.shape)
        index[axis] = -1
        group_of = np.broadcast_to(channel.reshape(index), meta.shape).reshape(-1)
    fitted = fit_palette(values, rule.palette, group_of)
    stored = np.empty(fitted.values.size, meta.dtype.storage)
    convert(fitted.values.reshape(-1), DType.FLOAT32, meta.dtype, stored)
    return _palette(
        replace(fitted, values=stored.reshape(fitted.values.shape)), axis, rule.group if axis is not None else None
    )


def smallest_of(candidates: Sequence[Encoded], meta: TensorMeta) -> tuple[Encoded, float]:
    """The smallest candidate, the first of equals, and its size."""
    sizes = [_size(candidate, meta) for candidate in candidates]
    smallest = min(sizes)
    return candidates[sizes.index(smallest)], smallest


def _size(encoded: Encoded, meta: TensorMeta) -> float:
    """Bytes that the tensor will take, estimated from samples of its segments."""
    count = meta.count
    if not encoded.codec.stream_names(meta):
        return sum(map(len, encoded.side))
    starts = range(0, count, SEGMENT)
    picked = (
        starts if len(starts) <= SAMPLES else [starts[i * (len(starts) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]
    )
    seen = 0
    segments = []
    for start in picked:
        stop = min(start + SEGMENT, count)
        segments.append(encoded.segment(meta, start, stop))
        seen += stop - start
    total = 0
    for streams in zip(*segments, strict=True):
        parameters = choose_parameters(streams)
        total += sum(len(compress(stream, parameters)) for stream in streams)
    side = sum(len(compress(s, choose_parameters([s]))) for s in encoded.side)
    return total * (count / max(1, seen)) + side

"""Heads relative to what a weight's place lets expect: which axes say something, and how many bits a head has best.

Weights of a row, a column or another slice along an axis are alike in size. The mean of the square roots of their
magnitudes is a measure of it that neither a few outliers nor many near-zeros spoil: of the measures that were tried on
real models (root mean square, mean logarithm, clipped ones) the one with the smallest files. To be independent of the
others, the axes add up in the logarithm, as in a table whose rows and columns have factors.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Encoded, TensorMeta
from conx.codecs.convert import convert
from conx.codecs.heads import ESCAPE, Heads
from conx.container.candidates import HUFFMAN, compress
from conx.container.limits import SEGMENT
from conx.dtypes import DType

__all__ = ["HEAD_BITS", "plain_heads", "smallest_heads"]

Array = npt.NDArray[Any]

HEAD_BITS = {DType.FLOAT64: (13, 14), DType.FLOAT32: (10, 11), DType.BFLOAT16: (9, 10), DType.FLOAT16: (8, 9)}
"""Bits of a head that are worth trying: the exponent and what of the mantissa is not uniform."""

_EXPONENT = {DType.FLOAT64: 11, DType.FLOAT32: 8, DType.BFLOAT16: 8, DType.FLOAT16: 5}
_STEPS = 4  # of a code, to an octave
_LARGEST_CODE = 255
_FEW = 1024  # elements of a tensor, and
_FEW_EACH = 16  # for each code, below which codes cost more than they save
_SAMPLES = 4  # segments
_BLOCK = 1 << 20  # elements looked at together


class _Form(NamedTuple):
    """A codec and what it needs, and an estimate of its bytes."""

    codec: Heads
    side: tuple[bytes, ...]
    size: float


def plain_heads(data: Array, stored: DType | None) -> Encoded:
    """Heads of 8 bits as they are, which decode fastest.

    Args:
        data: flat, of the type that is stored.
        stored: that type where it is not the tensor's.
    """
    return Encoded(Heads(stored=stored), (), data)


def smallest_heads(data: Array, meta: TensorMeta, stored: DType | None) -> Encoded:
    """The smallest form: bits and axes by trial on samples.

    Args:
        data: flat, of the type that is stored.
        meta: dims and type of the tensor.
        stored: the type that is stored where it is not the tensor's.
    """
    kind = stored or meta.dtype
    octaves = _octaves(data, meta.shape, kind)
    starts = range(0, data.size, SEGMENT)
    picked = starts[:: max(1, len(starts) // _SAMPLES)]
    forms = [
        _form(data, meta, stored, bits, sizes, picked)
        for bits in HEAD_BITS[kind]
        for sizes in ([{}, octaves] if octaves else [{}])
    ]
    codec, side, _ = min(forms, key=lambda form: form.size)
    if not codec.base and not codec.axes:
        return Encoded(codec, side, data)
    return Encoded(codec, side, codec.residuals(data, meta, side))


def _octaves(data: Array, shape: tuple[int, ...], kind: DType) -> dict[int, Array]:
    """The logarithm of the size along each axis that may be worth it, in octaves, less that of the whole."""
    axes = [i for i, dim in enumerate(shape) if dim > 1 and data.size >= _FEW_EACH * dim]
    if data.size < _FEW or len([dim for dim in shape if dim > 1]) < 2:
        return {}
    sums = {axis: np.zeros(shape[axis]) for axis in axes}
    inner = math.prod(shape[1:])
    rows = max(1, _BLOCK // inner)
    for first in range(0, shape[0], rows):
        block = _roots(data[first * inner : (first + rows) * inner], kind).reshape(-1, *shape[1:])
        for axis in axes:
            part = block.sum(axis=tuple(i for i in range(len(shape)) if i != axis), dtype=np.float32)
            if axis == 0:
                sums[0][first : first + rows] = part
            else:
                sums[axis] += part
    found = {}
    for axis, total in sums.items():
        least = total[total > 0].min(initial=np.inf)
        if np.isfinite(least):
            found[axis] = 2 * np.log2(np.maximum(total, least) / total.max())
    return found


def _roots(values: Array, kind: DType) -> npt.NDArray[np.float32]:
    """Square roots of the magnitudes; 0 for what is not finite."""
    single = np.empty(values.size, np.float32)
    with np.errstate(all="ignore"):
        convert(values, kind, DType.FLOAT32, single)
        np.abs(single, out=single)
        np.sqrt(single, out=single)
        if not np.isfinite(single.sum(dtype=np.float64)):
            np.nan_to_num(single, copy=False, nan=0.0, posinf=0.0)
    return single


def _form(
    data: Array, meta: TensorMeta, stored: DType | None, bits: int, octaves: dict[int, Array], starts: Sequence[int]
) -> _Form:
    """Codes, base and size of heads of so many bits."""
    kind = stored or meta.dtype
    fraction = bits - _EXPONENT[kind]
    shift = max(0, fraction - int(math.log2(_STEPS)))
    side = tuple(_codes(sizes, 1 << fraction >> shift) for sizes in octaves.values())
    axes = sum(1 << axis for axis in octaves)
    relative = Heads(bits, 0, axes, shift if axes else 0, stored)
    parts = [relative.residuals_of(data, meta, side, start, min(start + SEGMENT, data.size)) for start in starts]
    base = _base([relative.heads(part) for part in parts], bits)
    codec = Heads(bits, base, axes, shift if axes else 0, stored)
    size = float(sum(len(compress(part, HUFFMAN)) for part in side))
    scale = data.size / max(1, sum(part.size for part in parts))
    for part in parts:
        residuals = codec.heads(part) - np.uint16(base) & np.uint16((1 << bits) - 1)
        symbols = np.minimum(residuals, ESCAPE).astype(np.uint8)
        escapes = int(np.count_nonzero(symbols == ESCAPE)) if bits > 8 else 0
        size += scale * (len(compress(symbols.tobytes(), HUFFMAN)) + 2 * escapes + part.size * (16 - bits) / 8)
    return _Form(codec, side, size)


def _codes(octaves: Array, steps: int) -> bytes:
    """Codes of sizes, `steps` to the octave; what is too small for a code takes the smallest."""
    lowest = max(float(octaves.min()), float(octaves.max()) - _LARGEST_CODE / steps)
    codes = np.clip(np.rint((octaves - lowest) * steps), 0, _LARGEST_CODE)
    return codes.astype(np.uint8).tobytes()


def _base(heads: Sequence[Array], bits: int) -> int:
    """The first of the 255 consecutive heads (modulo 2^bits) that are most of all."""
    if bits == 8:
        return 0
    counts = np.zeros(1 << bits, np.int64)
    for part in heads:
        counts += np.bincount(part, minlength=counts.size)
    used = np.flatnonzero(counts)
    if not used.size:
        return 0
    running = np.concatenate([[0], np.cumsum(np.concatenate([counts, counts[: ESCAPE - 1]]))])
    covered = running[ESCAPE:] - running[:-ESCAPE]
    best = np.flatnonzero(covered == covered.max())
    return int(best[best.size // 2])

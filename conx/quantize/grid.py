"""Codes on a uniform grid: scales from the largest magnitude, codes by rounding.

`code = clip(rint(w / scale))` in float32, with a scale for each channel or block. With 8 bits the scale is
max|w| / 127, but not finer than 1/32 of the root mean square: codes are entropy-coded, so a finer step costs bits,
and in channels without large values it would buy less error than all others have. Fewer bits waste most of the grid
on the largest value; there the scale is the one of some candidates with the smallest squared error (clipping search
as in Banner et al., "Post training 4-bit quantization", NeurIPS 2019, section 3, by trial instead of by formula).

Scales are kept as one base and a logarithmic byte each (an eighth of an octave a step, rounded up so that the largest
value still fits), which costs no measurable error and a quarter of the bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.linear import log8_scales

__all__ = ["Grid", "fit_grid", "peak_scales"]

F32 = npt.NDArray[np.float32]
SLAB = 1 << 20  # elements worked on at once
LARGEST = 2.0**127
SMALLEST = np.float32(2.0**-149)
FINEST = 32  # steps in a root mean square
CLIPS = (1.0, 0.92, 0.85, 0.78, 0.7, 0.62, 0.54, 0.46)


@dataclass(frozen=True)
class Grid:
    """A tensor on a grid. `log_codes` and `base` are None where the scales had to stay float32."""

    codes: npt.NDArray[np.int8]
    scales: F32
    axis: int | None
    block: int | None
    base: float | None
    log_codes: npt.NDArray[np.uint8] | None

    @property
    def noise(self) -> float:
        """Mean square of the scales: to compare grids of one tensor by their error."""
        return float(np.square(self.scales.astype(np.float64)).mean())


def fit_grid(values: F32, axis: int | None, block: int | None, bits: int) -> Grid:
    """Code a float32 tensor (any dims; all values finite).

    Args:
        values: the tensor in stored order.
        axis: the axis that has a scale for each position, or along which blocks run; None: one scale.
        block: positions along `axis` that share a scale; None: all other axes share.
        bits: 2 to 8.
    """
    top = 2 ** (bits - 1) - 1
    view = _three_axes(values, axis)
    peaks = _peaks(view, axis is not None, block)
    scales = _at_least_smallest(peaks, top)
    if bits == 8:
        scales = np.maximum(scales, peaks * (_relative_rms(view, peaks, block) / np.float32(FINEST)))
    else:
        scales = _best_clip(view, scales, top, block)
    base, log_codes = _to_log8(scales)
    if log_codes is not None and base is not None:
        scales = log8_scales(base, log_codes.reshape(-1)).reshape(scales.shape)
    codes = np.empty(values.size, np.int8)
    _encode(view, scales, top, block, codes.reshape(view.shape))
    flat = np.ascontiguousarray(scales, np.float32).reshape(-1)
    return Grid(codes, flat, axis, block, base, None if log_codes is None else log_codes.reshape(-1))


def peak_scales(values: F32, axis: int) -> F32 | None:
    """The scales of int8 codes for each position of `axis`: max|w| / 127, rounded up to what bfloat16 holds.

    None where a value is not finite, or so large that a code times its scale would not be.
    """
    peaks = _peaks(_three_axes(values, axis), True, None).reshape(-1)
    if not (peaks < LARGEST).all():  # not true for NaN either
        return None
    scales = _at_least_smallest(peaks, 127)
    bits = scales.view(np.uint32)
    rounded: F32 = ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def _three_axes(values: F32, axis: int | None) -> F32:
    """(outer, channels, inner) with the scale's axis in the middle."""
    if axis is None:
        return values.reshape(1, 1, -1)
    outer = int(np.prod(values.shape[:axis], dtype=np.int64))
    return values.reshape(outer, values.shape[axis], -1)


def _peaks(view: F32, per_axis: bool, block: int | None) -> F32:
    """The largest magnitude under each scale; dims broadcast against `view` (blocks: middle axis divided)."""
    if block is not None:
        starts = np.arange(0, view.shape[1], block)
        high, low = np.maximum.reduceat(view, starts, axis=1), np.minimum.reduceat(view, starts, axis=1)
    else:
        axes = (0, 2) if per_axis else (0, 1, 2)
        high, low = view.max(axis=axes, keepdims=True), view.min(axis=axes, keepdims=True)
    peaks: F32 = np.maximum(high, -low)
    return peaks


def _at_least_smallest(peaks: F32, top: int) -> F32:
    """Peak / top, but never 0 or so rounded that the peak would not fit; 0 where all values are 0."""
    exact = peaks.astype(np.float64)
    with np.errstate(under="ignore"):
        scales = (exact / top).astype(np.float32)
        short = scales.astype(np.float64) * (top + 0.5) < exact
        scales = np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)
        found: F32 = np.where(peaks > 0, np.maximum(scales, SMALLEST), np.float32(0)).astype(np.float32)
        return found


def _relative_rms(view: F32, peaks: F32, block: int | None) -> F32:
    """Root mean square over the peak, under each scale."""
    sums = np.zeros(peaks.shape, np.float64)
    safe = np.where(peaks > 0, peaks, np.float32(1))
    for outer, middle, inner, at in _slabs(view, block):
        part = view[outer, middle, inner]
        with np.errstate(under="ignore"):
            _add_under(sums, np.square(part / _scale_part(safe, outer, at)), outer, at)
    counts = np.full((1, peaks.shape[1], 1), view.size // peaks.size)
    if block is not None:
        counts = np.minimum(block, view.shape[1] - block * np.arange(peaks.shape[1])).reshape(1, -1, 1)
    rms: F32 = np.sqrt(sums / counts).astype(np.float32)
    return rms


def _add_under(sums: npt.NDArray[Any], values: npt.NDArray[Any], outer: slice, at: slice) -> None:
    """Add a slab's values to the sums of the scales that they lie under."""
    target = sums[outer if sums.shape[0] > 1 else slice(None), at if sums.shape[1] > 1 else slice(None)]
    axes = tuple(i for i in range(3) if target.shape[i] == 1 and values.shape[i] != 1)
    target += values.sum(axis=axes, keepdims=True, dtype=sums.dtype) if axes else values


def _slabs(view: F32, block: int | None) -> list[tuple[slice, slice, slice, slice]]:
    """Parts of `view` of about SLAB elements: (outer, middle, inner) and the part of the scales' middle axis."""
    outer, middle, inner = view.shape
    if block is not None:
        at_once = max(1, SLAB // max(1, block * inner))
        outers = [slice(o, o + at_once) for o in range(0, outer, at_once)]
        blocks = range(-(-middle // block))
        return [(o, slice(b * block, (b + 1) * block), slice(None), slice(b, b + 1)) for o in outers for b in blocks]
    if outer * inner <= SLAB:
        step = max(1, SLAB // max(1, outer * inner))
        return [(slice(None), slice(m, m + step), slice(None), slice(m, m + step)) for m in range(0, middle, step)]
    if middle * inner <= SLAB:
        step = max(1, SLAB // max(1, middle * inner))
        return [(slice(o, o + step), slice(None), slice(None), slice(None)) for o in range(0, outer, step)]
    return [
        (slice(o, o + 1), slice(m, m + 1), slice(i, i + SLAB), slice(m, m + 1))
        for o in range(outer)
        for m in range(middle)
        for i in range(0, inner, SLAB)
    ]


def _scale_part(scales: F32, outer: slice, middle: slice) -> F32:
    """The scales of a slab, broadcastable against it."""
    first = outer if scales.shape[0] > 1 else slice(None)
    return scales[first, middle if scales.shape[1] > 1 else slice(None)]


def _round(part: F32, scale: F32, top: int) -> F32:
    """clip(rint(part / scale)) as float32; 0 where the scale is 0."""
    out = np.zeros(part.shape, np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.divide(part, scale, out=out, where=np.broadcast_to(scale != 0, part.shape))
    np.rint(out, out=out)
    return np.clip(out, -top, top, out=out)


def _encode(view: F32, scales: F32, top: int, block: int | None, codes: npt.NDArray[np.int8]) -> None:
    for outer, middle, inner, at in _slabs(view, block):
        codes[outer, middle, inner] = _round(view[outer, middle, inner], _scale_part(scales, outer, at), top)


def _best_clip(view: F32, scales: F32, top: int, block: int | None) -> F32:
    """Of each scale's candidates, the one with the smallest squared error."""
    best = np.full(scales.shape, np.inf)
    chosen = scales.copy()
    with np.errstate(over="ignore", under="ignore"):
        for clip in CLIPS:
            tried = np.where(scales > 0, np.maximum(scales * np.float32(clip), SMALLEST), scales).astype(np.float32)
            errors = _squared_errors(view, tried, top, block)
            better = errors < best
            best[better] = errors[better]
            chosen[better] = tried[better]
    return chosen


def _squared_errors(view: F32, scales: F32, top: int, block: int | None) -> npt.NDArray[Any]:
    errors = np.zeros(scales.shape, np.float64)
    for outer, middle, inner, at in _slabs(view, block):
        part, scale = view[outer, middle, inner], _scale_part(scales, outer, at)
        safe = np.where(scale > 0, scale, np.float32(1))
        off = np.square(_round(part, scale, top) - part / safe, dtype=np.float64)  # in steps: no overflow for any size
        _add_under(errors, off, outer, at)
    return errors * np.square(scales.astype(np.float64))


def _to_log8(scales: F32) -> tuple[float | None, npt.NDArray[np.uint8] | None]:
    """(base, log codes) whose steps are never below `scales`, or (None, None) where their range is too wide."""
    if scales.size < 2 or not scales.max() > 0:
        return None, None
    base = np.float32(scales.max())
    with np.errstate(divide="ignore"):
        octaves = np.log2(float(base)) - np.log2(scales.astype(np.float64))
    used = scales > 0
    if octaves[used].max() * 8 >= 255 or base < 2.0**-90:
        return None, None
    codes = np.where(used, np.floor(np.where(used, octaves, 0) * 8), 255).astype(np.uint8)
    short = used & (log8_scales(float(base), codes.reshape(-1)).reshape(scales.shape) < scales) & (codes > 0)
    codes[short] -= 1
    return float(base), codes

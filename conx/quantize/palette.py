"""Palettes: the few values a tensor really has, or the few that stand for it best.

Fitting is one-dimensional k-means by Lloyd's iteration (Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf.
Theory 28, 1982) on sorted values: clusters are ranges between midpoints, means come from cumulative sums. It starts
at even quantiles, and where many entries belong: with a density like the cube root of the values' (Panter and Dite,
"Quantization distortion in pulse-count modulation with nonuniform spacing of levels", Proc. IRE 39, 1951). The better
end counts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Palette", "exact_palette", "fit_palette"]

MAX_ENTRIES = 256
PROBE = 4096  # elements looked at before the whole tensor is
FIT_SAMPLE = 1 << 21  # elements that k-means sees
ITERATIONS = 40


@dataclass(frozen=True)
class Palette:
    """`values` [groups, entries] in the storage type of the tensor; `indices` flat, uint8."""

    values: npt.NDArray[Any]
    indices: npt.NDArray[np.uint8]

    @property
    def entries(self) -> int:
        return int(self.values.shape[1])


def exact_palette(data: npt.NDArray[Any]) -> Palette | None:
    """The palette of a tensor with at most 256 distinct bit patterns (flat, storage type), or None."""
    if data.dtype.itemsize not in (1, 2, 4, 8) or data.size == 0:
        return None
    bits = data.view(f"<u{data.dtype.itemsize}")
    step = max(1, bits.size // PROBE)
    if np.unique(bits[::step][: 2 * PROBE]).size > MAX_ENTRIES:
        return None
    known = np.zeros(0, bits.dtype)
    for start in range(0, bits.size, 1 << 20):
        known = np.union1d(known, bits[start : start + (1 << 20)])
        if known.size > MAX_ENTRIES:
            return None
    indices = np.empty(bits.size, np.uint8)
    for start in range(0, bits.size, 1 << 20):
        indices[start : start + (1 << 20)] = np.searchsorted(known, bits[start : start + (1 << 20)])
    return Palette(known.view(data.dtype).reshape(1, -1), indices)


def fit_palette(values: npt.NDArray[np.float32], bits: int, group_of: npt.NDArray[np.intp] | None = None) -> Palette:
    """The palette of 2^bits float32 values with the smallest squared error that Lloyd's iteration finds.

    Args:
        values: float32, flat, all finite.
        bits: 1 to 8.
        group_of: the group of each element; None: one group. Groups are numbered from 0 without gaps.
    """
    count = 1 if group_of is None else int(group_of.max()) + 1
    palettes = np.zeros((count, 2**bits), np.float32)
    indices = np.empty(values.size, np.uint8)
    for group in range(count):
        mine = slice(None) if group_of is None else np.flatnonzero(group_of == group)
        palettes[group], indices[mine] = _fit(values[mine], 2**bits)
    return Palette(palettes, indices)


def _fit(values: npt.NDArray[np.float32], entries: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    ordered = np.sort(values[:: max(1, values.size // FIT_SAMPLE)]).astype(np.float64)
    even = ordered[np.linspace(0, ordered.size - 1, entries).astype(np.intp)]
    palette = min(
        (_lloyd(ordered, first) for first in (even, _spread(ordered, entries))), key=lambda p: _error(ordered, p)
    )
    return palette, np.searchsorted(_middles(palette), values).astype(np.uint8)


def _spread(ordered: npt.NDArray[np.float64], entries: int) -> npt.NDArray[np.float64]:
    """Values whose density is like the cube root of that of `ordered`."""
    points = ordered[np.linspace(0, ordered.size - 1, min(ordered.size, PROBE)).astype(np.intp)]
    # Between equally likely points the density is 1 / gap; its cube root over the gap has the mass gap^(2/3).
    mass = np.concatenate([[0.0], np.cumsum(np.diff(points) ** (2 / 3))])
    spread: npt.NDArray[np.float64] = np.interp((np.arange(entries) + 0.5) / entries * mass[-1], mass, points)
    return spread


def _lloyd(ordered: npt.NDArray[np.float64], centers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The palette that the iteration comes to from these centers."""
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    for _ in range(ITERATIONS):
        edges = np.searchsorted(ordered, (centers[1:] + centers[:-1]) / 2)
        ends = np.concatenate([[0], edges, [ordered.size]])
        sizes = np.diff(ends)
        means = np.where(sizes > 0, np.diff(sums[ends]) / np.maximum(sizes, 1), centers)
        if np.array_equal(means, centers):
            break
        centers = means
    return np.sort(centers).astype(np.float32)


def _middles(palette: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return ((palette[1:].astype(np.float64) + palette[:-1]) / 2).astype(np.float32)


def _error(ordered: npt.NDArray[np.float64], palette: npt.NDArray[np.float32]) -> float:
    chosen = palette[np.searchsorted(_middles(palette), ordered)]
    return float(np.square(ordered - chosen).mean())

"""A float model and its quantized twin: graph and unquantized tensors of the one, codes of the other.

Weights are matched by name, and where names differ by shape and value: a dequantized weight of the twin lies within
half a step of the float one, also transposed. Every match is verified so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from conx.codecs.base import Array
from conx.dtypes import DType
from conx.errors import ModelError
from conx.graph.dequantize import FloatWeight
from conx.graph.parameters import undone
from conx.graph.read import SourceModel, Weight
from conx.graph.ties import Tie
from conx.packing.quantized import Coding, axes_and_shape, is_codable

__all__ = ["Pair", "PairReport", "find_pairs"]

HALF = 0.5 + 2.0**-8  # of a step; scales are rounded
SURE = 0.999  # of the weights within half a step, or clipped: a match
DOUBTFUL = 0.9  # a match that is reported as doubtful
SAMPLE = 4096  # weights looked at first
SMALLEST = 64  # elements; anything smaller says too little
ENOUGH = 0.5  # of the twin's codes must be matched


@dataclass(frozen=True)
class PairReport:
    """What became of the twin's weights: names of the float model's that have its codes, and of its own that fit none.

    `doubtful` are among those matched: some of their values are further than half a step away.
    """

    matched: tuple[str, ...]
    doubtful: tuple[str, ...]
    unmatched: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """A weight of the twin as it stands for a stored weight: with its codes' axes in the order `perm`."""

    twin: FloatWeight
    perm: tuple[int, ...]

    def coding(self) -> Coding:
        """The codes in the float weight's layout."""
        return Coding.of(self.twin).transposed(self.perm)


def find_pairs(source: SourceModel, ties: Sequence[Tie], twin: SourceModel) -> tuple[dict[int, Pair], PairReport]:
    """Match the weights of a quantized model with those of its float one.

    Args:
        source: the float model.
        ties: which of its weights is stored for which.
        twin: the quantized one.

    Returns:
        The twin's weights by the number of the stored weight, and a report.

    Raises:
        ModelError: the twin is not quantized, or is not one of this model.
    """
    made = undone(twin)
    theirs = [w for w in (made.weights if made is not None else ()) if isinstance(w, FloatWeight) and is_codable(w)]
    theirs = [w for w in theirs if w.count >= SMALLEST and axes_and_shape(w) is not None]
    if not theirs:
        raise ModelError(f"{twin.path}: holds no quantized weights; name the quantized form of {source.path}")
    ours = [w for w in source.weights if ties[w.number].stored == w.number and w.dtype is DType.FLOAT32]
    found: dict[int, Pair] = {}
    doubtful: list[str] = []
    unmatched: list[str] = []
    named = {w.name: w for w in ours}
    for weight in theirs:
        first = named.get(weight.name)
        tried = ([] if first is None else [first]) + [w for w in ours if w is not first and w.count == weight.count]
        match = _match(weight, (w for w in tried if w.number not in found))
        if match is None:
            unmatched.append(weight.name)
            continue
        number, pair, share = match
        found[number] = pair
        if share < SURE:
            doubtful.append(source.weights[number].name)
    matched = sum(pair.twin.count for pair in found.values())
    if matched < ENOUGH * sum(w.count for w in theirs):
        raise ModelError(
            f"{twin.path}: is no quantized form of {source.path}: of its {len(theirs)} quantized weights"
            f" {len(found)} lie within half a step of one there"
        )
    names = tuple(source.weights[number].name for number in found)
    return found, PairReport(names, tuple(doubtful), tuple(unmatched))


def _match(weight: FloatWeight, tried: Iterable[Weight]) -> tuple[int, Pair, float] | None:
    """The first of these that the weight surely is, else the one that it is most likely; with the share that fits."""
    best: tuple[int, Pair, float] | None = None
    for ours in tried:
        for pair in _layouts(weight, ours.shape):
            share = _share(pair, ours)
            if share >= SURE:
                return ours.number, pair, share
            if share >= DOUBTFUL and (best is None or share > best[2]):
                best = ours.number, pair, share
    return best


def _layouts(weight: FloatWeight, shape: tuple[int, ...]) -> list[Pair]:
    """The orders of the codes' axes that lead to this shape: as the twin has them, else transposed."""
    perm = axes_and_shape(weight)
    assert perm is not None  # others were left out
    orders = [perm, perm[::-1], tuple(range(len(perm)))]
    dims = weight.codes_shape
    return [Pair(weight, order) for order in dict.fromkeys(orders) if tuple(dims[i] for i in order) == shape]


def _share(pair: Pair, ours: Weight) -> float:
    """The share of values within half a step; a sample decides whether all are looked at."""
    coding = pair.coding()
    values = ours.read().reshape(ours.shape)
    step = max(1, values.size // SAMPLE)
    sampled = _fits(coding, values, slice(None, None, step))
    return sampled if sampled < DOUBTFUL or step == 1 else _fits(coding, values, slice(None))


def _fits(coding: Coding, values: Array, part: slice) -> float:
    """The share of a part of the values, flat, that lie within half a step of their code, or beyond the last one."""
    codes = coding.codes.reshape(-1)[part].astype(np.float64)
    scales = _spread(coding, coding.scales).reshape(-1)[part].astype(np.float64)
    zeros = 0.0 if coding.zeros is None else _spread(coding, coding.zeros).reshape(-1)[part].astype(np.float64)
    want = values.reshape(-1)[part].astype(np.float64)
    with np.errstate(invalid="ignore"):
        off = want - (codes - zeros) * scales
        near = np.abs(off) <= HALF * np.abs(scales)
        low, high = int(coding.codes.min()), int(coding.codes.max())
        beyond = off * np.sign(scales)  # scales may be negative
        clipped = ((codes == high) & (beyond > 0)) | ((codes == low) & (beyond < 0))
        allowed = clipped & (np.abs(off) <= 0.5 * np.abs(want))
    return float((near | allowed).mean())


def _spread(coding: Coding, array: Array) -> Array:
    """Scales or zero points, one for each code."""
    if coding.axis is not None and coding.block is not None:
        array = np.repeat(array, coding.block, axis=coding.axis)
        array = np.take(array, np.arange(coding.codes.shape[coding.axis]), axis=coding.axis)
    return np.broadcast_to(array, coding.codes.shape)

"""Equal weights, found by content: the same bytes, also under another shape or transposed.

One pass over the data computes a SHA-256 and two sums that no permutation changes. Equal hashes are equal tensors;
equal sums make a candidate for a transposed tie, which is proven by comparing the values.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conx.graph.read import Weight

__all__ = ["Tie", "find_ties", "shared_names"]

BLOCK = 1 << 24  # bytes read at once


@dataclass(frozen=True)
class Tie:
    """How a weight is had from the stored one: `stored` is its number, `perm` the permutation of that one's axes.

    A weight whose `stored` is its own number is itself stored. `perm` None: the same elements in the same order.
    """

    stored: int
    perm: tuple[int, ...] | None
    sha256: bytes


def find_ties(weights: list[Weight], progress: Callable[[int], None] | None = None) -> list[Tie]:
    """For each weight, by its number, which one to store.

    Args:
        weights: all of them, numbered from 0.
        progress: called with the bytes of each weight once it was read.
    """
    by_hash: dict[tuple[Any, ...], int] = {}
    by_sums: dict[tuple[Any, ...], list[int]] = {}
    ties: list[Tie] = []
    for weight in weights:
        digest, sums = _content(weight)
        key = (weight.dtype, weight.count, digest)
        known = by_hash.get(key)
        if known is not None:
            ties.append(Tie(known, None, digest))
        else:
            found = _transposed(weight, [weights[i] for i in by_sums.get((weight.dtype, weight.count, sums), [])])
            if found is None:
                by_hash[key] = weight.number
                by_sums.setdefault((weight.dtype, weight.count, sums), []).append(weight.number)
            ties.append(Tie(weight.number, None, digest) if found is None else Tie(*found, digest))
        if progress is not None:
            progress(weight.nbytes)
    return ties


def shared_names(weights: Sequence[Weight], ties: Sequence[Tie]) -> dict[int, list[str]]:
    """Of each stored weight that stands for others, the names of these."""
    found: dict[int, list[str]] = {}
    for weight, tie in zip(weights, ties, strict=True):
        if tie.stored != weight.number:
            found.setdefault(tie.stored, []).append(weight.name)
    return found


def _content(weight: Weight) -> tuple[bytes, tuple[int, int]]:
    digest = hashlib.sha256()
    total = squares = 0
    for block in weight.blocks(BLOCK):
        digest.update(block.data.cast("B"))
        words = block.view(f"<u{min(block.dtype.itemsize, 8)}")
        with np.errstate(over="ignore"):
            total += int(words.sum(dtype=np.uint64))
            mixed = words.astype(np.uint64)
            mixed *= mixed + np.uint64(0x9E3779B97F4A7C15)
            squares += int(mixed.sum(dtype=np.uint64))
    return digest.digest(), (total % (1 << 64), squares % (1 << 64))


def _transposed(weight: Weight, candidates: list[Weight]) -> tuple[int, tuple[int, ...]] | None:
    """A stored weight that has the same values with two groups of axes exchanged, and the permutation."""
    for other in candidates:
        for perm in _turns(other.shape, weight.shape):
            if _equal_turned(other, perm, weight):
                return other.number, perm
    return None


def _turns(stored: tuple[int, ...], wanted: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Permutations worth trying: a rotation of the axes or an exchange of the last two that fits the dims."""
    rank = len(stored)
    tried = [tuple(range(i, rank)) + tuple(range(i)) for i in range(1, rank)]
    if rank > 2:
        tried.append((*range(rank - 2), rank - 1, rank - 2))
    for perm in dict.fromkeys(tried):
        turned = [d for d in (stored[i] for i in perm) if d != 1]
        if turned == [d for d in wanted if d != 1]:
            yield perm


def _equal_turned(stored: Weight, perm: tuple[int, ...], wanted: Weight) -> bool:
    """Whether the stored values, transposed, are the wanted ones bit for bit. Unequal ones mostly differ at once."""
    if stored.dtype.bits < 8:
        return False
    turned = stored.read().reshape(stored.shape).transpose(perm)
    values = wanted.read().reshape(turned.shape)
    step = max(1, BLOCK // max(1, values[:1].nbytes))
    return all(
        np.ascontiguousarray(turned[i : i + step]).tobytes() == values[i : i + step].tobytes()
        for i in range(0, values.shape[0], step)
    )

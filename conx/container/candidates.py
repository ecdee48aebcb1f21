"""Which zstd parameters: several sets are tried and the smallest result wins.

zstd's levels look for repeated strings. Codes, exponents and mantissas are noise of low entropy, in which they find
short repetitions by chance and pay more for them than they save: at 3.2 bits of entropy, level 3 spends 3.9 bits. What
suits noise is a coder that leaves everything to Huffman: the fast strategy with the longest minimal match and the
smallest hash table. It must keep `target_length` at 0, as anything else switches Huffman off with this strategy.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

__all__ = [
    "CANDIDATES",
    "HUFFMAN",
    "LEVEL_1",
    "LEVEL_3",
    "LEVEL_9",
    "LEVEL_19",
    "SPARSE",
    "Candidate",
    "choose",
    "compress",
    "compress_best",
]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A named set of zstd parameters; 0 is zstd's own choice for the level."""

    name: str
    level: int
    strategy: int = 0
    min_match: int = 0
    hash_log: int = 0
    chain_log: int = 0
    search_log: int = 0


HUFFMAN = Candidate("huffman", 1, zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1)
"""Literals only, as good as: noise of 2.5 bits and more, 400 MB/s and more."""

SPARSE = Candidate("sparse", 16, zstandard.STRATEGY_BTOPT, min_match=7, hash_log=6, chain_log=6, search_log=1)
"""Runs and near repetitions, weighed by their price: noise below 2.5 bits, which Huffman alone codes badly; 25 MB/s."""

LEVEL_1 = Candidate("level-1", 1)
LEVEL_3 = Candidate("level-3", 3)
LEVEL_9 = Candidate("level-9", 9)
LEVEL_19 = Candidate("level-19", 19)
"""Text, tables and graphs; 2 MB/s."""

CANDIDATES = (HUFFMAN, LEVEL_1, LEVEL_3, SPARSE, LEVEL_9, LEVEL_19)

_WINDOW_LOG = 25
"""Wide enough for the largest frame (zstd takes less where the content is smaller), so that all are single segments."""

_SPARSE_BELOW = 3.2
"""Bits of order-0 entropy."""

_SMALL = 2**14
"""Bytes for which trying everything costs nothing."""

_REDUNDANT = 0.97
"""Coded size over order-0 entropy from which something repeats in earnest."""

_WORTH = {SPARSE: 0.99, LEVEL_9: 0.99, LEVEL_19: 0.98}
"""What a slow candidate must reach of the best so far."""

_local = threading.local()


def compress(data: bytes, candidate: Candidate) -> bytes:
    """`data` as one frame. The same data and candidate give the same frame, on any thread."""
    compressors: dict[str, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if candidate.name not in compressors:
        compressors[candidate.name] = zstandard.ZstdCompressor(compression_params=_parameters(candidate))
    return compressors[candidate.name].compress(data)


def compress_best(data: bytes) -> bytes:
    """`data` as one frame, by the candidate that makes it smallest."""
    return _best([data])[1][0]


def choose(samples: Sequence[bytes]) -> Candidate:
    """The candidate that makes `samples` smallest."""
    return _best(samples)[0]


def _best(samples: Sequence[bytes]) -> tuple[Candidate, list[bytes]]:
    """The candidate and its frames. Slow ones are tried only where they can win, and must win clearly."""
    total = sum(map(len, samples))
    entropy = _entropy(samples)
    best, frames, size = HUFFMAN, *_trial(samples, HUFFMAN)
    for candidate in CANDIDATES[1:]:
        if candidate is SPARSE and entropy >= _SPARSE_BELOW * total / 8:
            continue
        if candidate in {LEVEL_9, LEVEL_19} and total > _SMALL and size >= _REDUNDANT * entropy:
            continue
        found, found_size = _trial(samples, candidate)
        if found_size < size * _WORTH.get(candidate, 1):
            best, frames, size = candidate, found, found_size
    return best, frames


def _trial(samples: Sequence[bytes], candidate: Candidate) -> tuple[list[bytes], int]:
    frames = [compress(sample, candidate) for sample in samples]
    return frames, sum(map(len, frames))


def _entropy(samples: Sequence[bytes]) -> float:
    """Bytes that an ideal coder of single bytes needs, each sample with statistics of its own."""
    total = 0.0
    for sample in samples:
        if sample:
            counts = np.bincount(np.frombuffer(sample, np.uint8))
            counts = counts[counts > 0]
            total += float(np.sum(counts * np.log2(len(sample) / counts))) / 8
    return total


def _parameters(candidate: Candidate) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters(
        compression_level=candidate.level,
        strategy=candidate.strategy,
        min_match=candidate.min_match,
        hash_log=candidate.hash_log,
        chain_log=candidate.chain_log,
        search_log=candidate.search_log,
        window_log=_WINDOW_LOG,
        write_content_size=1,
        write_checksum=1,
        write_dict_id=0,
        threads=0,
    )

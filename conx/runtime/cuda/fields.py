"""Codes two or four to a byte on a device: where they lie in a stage, and the kernels that unpack them (fields.cu)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.runtime.cuda.batches import Addresses, Batch, padded
from conx.runtime.cuda.device import Bytes, Launch
from conx.runtime.cuda.sources import TILE_BYTES

__all__ = ["Fields"]

_SEGMENT_FIELDS = 7  # of the kernels' struct Segment


class Fields:
    """Codes two or four to a byte: where a batch's streams lie in the stage, and what is made of them in scratch.

    The stage has a row for each segment (struct Segment of fields.cu) and each level, then the streams. Two levels, if
    four codes lie in a byte: the nibbles of all segments first become symbols, which the fields then take.
    """

    def __init__(self, batch: Batch, pack: int) -> None:
        self.batch, self.pack = batch, pack
        self.levels = (pack,) if pack == 2 else (4, 2)
        rows = len(batch.sizes)
        self.table_bytes = rows * _SEGMENT_FIELDS * 8
        self.offsets: list[list[int]] = []
        at = padded(self.table_bytes * len(self.levels))
        for sizes in batch.sizes:
            self.offsets.append([])
            for size in sizes:
                self.offsets[-1].append(at)
                at = padded(at + size)
        self.stage_bytes = at
        # Scratch: the codes, the counts of each level, and the symbols of the nibbles.
        self.count_tiles = [[-(-sizes[level] // TILE_BYTES) for sizes in batch.sizes] for level in range(pack // 2)]
        self.codes_at = 0
        self.counts_at = [padded(batch.count)]
        self.counts_at.append(padded(self.counts_at[0] + 4 * sum(self.count_tiles[0])))
        self.symbols_at = padded(self.counts_at[1] + 4 * sum(self.count_tiles[-1])) if pack == 4 else 0
        symbols = sum(2 * sizes[1] for sizes in batch.sizes) if pack == 4 else 0
        self.scratch_bytes = self.symbols_at + symbols if pack == 4 else self.counts_at[1]

    def write(self, arrays: Sequence[Sequence[npt.NDArray[Any]]], stage: Bytes) -> None:
        for given, offsets in zip(arrays, self.offsets, strict=True):
            for array, at in zip(given, offsets, strict=True):
                stage[at : at + array.size] = array
        rows = np.array(self._rows(), "<i8")
        stage[: rows.nbytes] = rows.reshape(-1).view(np.uint8)

    def _rows(self) -> list[list[int]]:
        """As in struct Segment: packed, fields, escapes, escape_count, loose, out, tiles."""
        rows = []
        for level in range(len(self.levels)):
            out = tiles = symbols = 0
            for i, (sizes, offsets, count) in enumerate(
                zip(self.batch.sizes, self.offsets, self.batch.counts(), strict=True)
            ):
                fields = count if level == 0 else 2 * sizes[1]
                nested = level == 0 and self.pack == 4
                escapes = [symbols, 2 * sizes[1], 1] if nested else [offsets[level + 1], sizes[level + 1], 0]
                rows.append([offsets[level], fields, *escapes, out, tiles])
                out += fields
                tiles += self.count_tiles[level][i]
                symbols += 2 * sizes[1]
        return rows

    def launches(self, at: Addresses, center: int) -> tuple[list[Launch], int]:
        """The kernels, and the address of the codes that they make."""
        made: list[Launch] = []
        for level in reversed(range(len(self.levels))):
            rows = at.stage + level * self.table_bytes
            counts = at.scratch + self.counts_at[level]
            nested = level == 0 and self.pack == 4
            escapes = at.scratch + self.symbols_at if nested else at.stage
            out = at.scratch + (self.codes_at if level == 0 else self.symbols_at)
            grid = (max(1, *self.count_tiles[level]), len(self.batch.sizes))
            per_byte = self.levels[level]
            made.append(Launch("count", grid, (at.stage, rows, per_byte, counts)))
            unpack = (at.stage, rows, per_byte, counts, escapes, center if level == 0 else 0, out, at.flags)
            made.append(Launch("unpack", grid, unpack))
        return made, at.scratch + self.codes_at

"""Which parameter (scale, zero point, palette) belongs to which element of a flat range.

Seen as (outer, blocks, block, inner), a tensor in stored order has parameters that broadcast against it. A flat range
of such an array is a run of whole rows between two partial rows, and each of these is a flat range of an array with one
dimension less. So a range of any size falls into a handful of pieces, and each piece is one NumPy operation.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from conx.codecs.base import Array

__all__ = ["Layout", "Piece", "Spread"]

# NumPy's inner loop over a last axis much shorter than this costs more than the elements do.
_LONG_ROW = 1024


class Piece(NamedTuple):
    """Part of a range: elements and the parameters that broadcast against them."""

    start: int  # relative to the range
    stop: int
    dims: tuple[int, ...]  # of the elements between start and stop,
    columns: slice | None  # or only of these columns, if they are seen as a matrix of dims[0] rows
    params: Array

    def of(self, flat: Array) -> Array:
        """The piece's elements in a contiguous 1-D array that holds the range, as a view."""
        part = flat[self.start : self.stop]
        if self.columns is not None:
            part = part.reshape(self.dims[0], -1)[:, self.columns]
        return part.reshape(self.dims)


@dataclass(frozen=True)
class Layout:
    """Parameters over a tensor seen as (outer, length, inner): one for each `block` positions of the middle axis.

    If `shared`, the same ones for all outer and inner positions; otherwise each of these has its own. All `count` of
    them lie in row-major order.
    """

    outer: int
    length: int
    inner: int
    block: int
    shared: bool

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Layout":
        """One parameter for the tensor."""
        return cls(1, 1, math.prod(shape), 1, shared=True)

    @classmethod
    def along(cls, shape: tuple[int, ...], axis: int, block: int, *, shared: bool) -> "Layout":
        """A parameter for each `block` positions along an axis of `shape` (the last block may be shorter)."""
        length = shape[axis]
        return cls(
            math.prod(shape[:axis]), length, math.prod(shape[axis + 1 :]), max(min(block, length), 1), shared=shared
        )

    @property
    def blocks(self) -> int:
        """Blocks along the axis."""
        return -(-self.length // self.block)

    @property
    def count(self) -> int:
        """Number of parameters."""
        return self.blocks if self.shared else self.outer * self.blocks * self.inner

    @property
    def run(self) -> int:
        """Elements one after the other that have the same parameter, at most."""
        return self.block * self.inner if self.shared or self.inner == 1 else 1

    def runs(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """The parameter and the size of each such run among the elements start … start+count; there must be runs."""
        at, end = start, start + count
        while at < end:
            outer, inside = divmod(at, self.length * self.inner)
            block = inside // (self.block * self.inner)
            last = min((block + 1) * self.block, self.length) * self.inner
            size = min(last - inside, end - at)
            yield (block if self.shared else outer * self.blocks + block), size
            at += size

    def spread(self, params: Array) -> "Spread":
        """Lays the `count` parameters over the tensor."""
        if not params.size:  # a tensor without elements, whose other dims may be anything
            return Spread((1, 1, 1), 0, params)
        outer, inner = (1, 1) if self.shared else (self.outer, self.inner)
        shaped = params.reshape(outer, self.blocks, 1, inner)
        full = self.length // self.block
        if self.shared and self.inner == self.block == 1 and 0 < full < _LONG_ROW and self.outer > 1:
            # The same short row of parameters, over and over: take several rows for one.
            times = -(-_LONG_ROW // full)
            return Spread((full * times, 1, 1), 0, np.tile(shaped, (1, times, 1, 1)))
        return Spread((full, self.block, self.inner), self.length - full * self.block, shaped)


@dataclass(frozen=True)
class Spread:
    """Parameters of dims (outer or 1, blocks, 1, inner or 1) over elements of dims (outer, *dims).

    If `rest`, the middle axis has so many positions more, with the last block's parameters.
    """

    dims: tuple[int, int, int]
    rest: int
    params: Array

    def pieces(self, start: int, count: int) -> Iterator[Piece]:
        """The pieces of the elements start … start+count; together they are all of them, each once."""
        blocks, block, inner = self.dims
        if not self.rest:
            yield from _split((0, *self.dims), self.params, 0, start, count)
            return
        main = blocks * block * inner
        for at, row, skip, size in _spans(main + self.rest * inner, start, count):
            full, last = self.params[:, :blocks], self.params[:, blocks:]
            rows = size // (main + self.rest * inner)
            if rows:
                yield Piece(at, at + size, (rows, *self.dims), slice(0, main), _rows(full, row, rows))
                dims = (rows, 1, self.rest, inner)
                yield Piece(at, at + size, dims, slice(main, None), _rows(last, row, rows))
                continue
            in_main = min(max(main - skip, 0), size)
            yield from _split(self.dims, _rows(full, row, 1)[0], at, skip, in_main)
            in_last = max(skip - main, 0)
            yield from _split((1, self.rest, inner), _rows(last, row, 1)[0], at + in_main, in_last, size - in_main)


def _split(dims: tuple[int, ...], params: Array, at: int, start: int, count: int) -> Iterator[Piece]:
    """The pieces of a flat range of an array of `dims` (the first does not matter)."""
    for offset, row, skip, size in _spans(math.prod(dims[1:]), start, count):
        rows = size // math.prod(dims[1:])
        if rows:
            yield Piece(at + offset, at + offset + size, (rows, *dims[1:]), None, _rows(params, row, rows))
        else:
            yield from _split(dims[1:], _rows(params, row, 1)[0], at + offset, skip, size)


def _spans(row: int, start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """(offset in the range, row, elements to skip in it, size) of a partial row, whole rows and a partial row."""
    end, at = start + count, start
    while at < end:
        index, skip = divmod(at, row)
        size = min(row - skip, end - at) if skip or end - at < row else (end - at) // row * row
        yield at - start, index, skip, size
        at += size


def _rows(params: Array, first: int, rows: int) -> Array:
    return params if params.shape[0] == 1 else params[first : first + rows]

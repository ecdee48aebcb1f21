"""Which scale belongs to which code of a tensor: from the shapes that operators use to one form.

The form is that of the format's linear codec (`codecs.layout.Layout`): scales for each `block` positions along one
axis, shared by all other positions or not. Any array of scales that broadcasts against the codes has this form, if need
be with some scales repeated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conx.codecs.layout import Layout
from conx.graph.dequantize.constants import Array, Move, moved_shape

__all__ = ["Grid", "grid_of", "pulled"]


@dataclass(frozen=True)
class Grid:
    """Scales over a tensor.

    Attributes:
        axis: along which they lie; None: one for the tensor.
        block: positions of the axis that have one scale; the last block may be shorter.
        shared: whether all positions of the other axes have the same scales.
        dims: of the array of scales before it is spread out (see `flat`), each 1 or the length that it has in `full`.
        full: dims that it is repeated to.
        turn: axes in the order wanted, if it is transposed then.
    """

    axis: int | None = None
    block: int = 1
    shared: bool = True
    dims: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """The same, over a tensor of this shape."""
        if self.axis is None:
            return Layout.whole(shape)
        return Layout.along(shape, self.axis, self.block, shared=self.shared)

    @property
    def as_stored(self) -> bool:
        """Whether `flat` only flattens."""
        return self.dims == self.full and not self.turn

    def flat(self, values: Array) -> Array:
        """Scales or zero points in the order of the layout; `values` broadcast against `full`."""
        spread = np.broadcast_to(values, self.full)
        return np.ascontiguousarray(spread.transpose(self.turn) if self.turn else spread).reshape(-1)

    def before(self, move: Move, shape: tuple[int, ...]) -> "Grid | None":
        """The grid over the tensor that `move` makes this one of, of `shape`; None if there is none."""
        how, what = move
        if self.axis is None:
            return self
        if how == "perm":
            axis = what[self.axis]
            if self.shared:
                return replace(self, axis=axis)
            back = tuple(what.index(i) for i in range(len(what)))
            turn = tuple(self.turn[i] for i in back) if self.turn else back
            return replace(self, axis=axis, turn=() if turn == tuple(range(len(turn))) else turn)
        length, inner = what[self.axis], math.prod(what[self.axis + 1 :])
        for axis, dim in enumerate(shape):
            if dim == length and math.prod(shape[axis + 1 :]) == inner:
                return replace(self, axis=axis) if not self.turn else None
        return None


def grid_of(shape: tuple[int, ...], dims: tuple[int, ...], axis: int = -1, block: int = 0) -> Grid | None:
    """The grid of scales of `dims` over a tensor of `shape`, or None if they don't fit.

    Args:
        shape: of the tensor.
        dims: as many; each 1 or that of the tensor, but along `axis`, if `block` is not 0, the number of blocks.
        axis: the axis with blocks.
        block: positions of a block.
    """
    wanted = list(shape)
    if block:
        wanted[axis] = -(-shape[axis] // block)
    if len(dims) != len(shape) or any(d not in (1, w) for d, w in zip(dims, wanted, strict=True)):
        return None
    several = [i for i, d in enumerate(dims) if d != 1]
    if not several:
        return Grid(dims=dims, full=dims)
    if len(several) == 1 and not (block and axis == several[0]):
        return Grid(several[0], 1, True, dims, dims)
    if not block:
        axis = next((i for i, d in enumerate(dims) if d == 1 < shape[i]), len(shape) - 1)
        block = shape[axis] if dims[axis] == 1 < shape[axis] else 1
    full = tuple(-(-d // block) if i == axis else d for i, d in enumerate(shape))
    return Grid(axis, block, False, dims, full)


def pulled(grid: Grid, shape: tuple[int, ...], moves: Sequence[Move]) -> Grid | None:
    """The grid over a tensor of `shape` that becomes `grid` by moves; None if it is none."""
    found: Grid | None = grid
    for i in reversed(range(len(moves))):
        if found is None:
            return None
        found = found.before(moves[i], moved_shape(shape, moves[:i]))
    return found

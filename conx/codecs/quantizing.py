"""Codes of values on a given grid: clip(rint(float32(value) / scale)), in float32; 0 where the scale is 0.

This is how a tensor that is stored in another way is had as int8 codes while loading (spec/conx.md, views).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Array
from conx.codecs.layout import Layout

__all__ = ["LARGEST_CODE", "codes_on_grid"]

LARGEST_CODE = 127
"""Codes are symmetric: from -127 to 127."""


def codes_on_grid(
    shape: tuple[int, ...], axis: int, scales: npt.NDArray[np.float32]
) -> Callable[[Array, int, Array], None]:
    """A function of float32 values, the place of the first of them, and `out` (int8), which it fills with their codes.

    Args:
        shape: dims in the order in which the values come.
        axis: the axis with a scale for each position.
        scales: finite, one for each position. Values must be finite too; what others become is not defined.
    """
    used = scales != 0
    divisors = np.where(used, scales, np.float32(1)).astype(np.float32)
    spread = Layout.along(shape, axis, 1, shared=True).spread(divisors)
    unused = None if used.all() else Layout.along(shape, axis, 1, shared=True).spread(used.astype(np.float32))

    def write(values: Array, start: int, out: Array) -> None:
        with np.errstate(all="ignore"):
            steps = np.empty(values.size, np.float32)
            for piece in spread.pieces(start, values.size):
                np.divide(piece.of(values), piece.params, out=piece.of(steps))
            for piece in unused.pieces(start, values.size) if unused is not None else ():
                np.multiply(piece.of(steps), piece.params, out=piece.of(steps))
            np.rint(steps, out=steps)
            np.clip(steps, -LARGEST_CODE, LARGEST_CODE, out=steps)
            np.copyto(out, steps, casting="unsafe")

    return write

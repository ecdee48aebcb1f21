"""The format's values computed slowly and another way: what the codecs' tests compare with."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conx.dtypes import DType

Array = npt.NDArray[Any]

# ml_dtypes knows the types that NumPy lacks.
NATIVE: dict[DType, Any] = {
    DType.BFLOAT16: ml_dtypes.bfloat16,
    DType.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    DType.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    DType.FLOAT8E5M2: ml_dtypes.float8_e5m2,
    DType.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    DType.FLOAT8E8M0: ml_dtypes.float8_e8m0fnu,
}
FLOAT8 = [dtype for dtype in NATIVE if dtype is not DType.BFLOAT16]
TARGETS = [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16]

UNSIGNED = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}


def bits_of(values: Array) -> Array:
    """The bits of an array of floats or integers of whole bytes."""
    return np.ascontiguousarray(values).view(np.uint8)


def as_float64(values: Array, dtype: DType) -> npt.NDArray[np.float64]:
    """The exact values of an array of the storage type of `dtype`."""
    with np.errstate(all="ignore"):
        return values.view(NATIVE[dtype]).astype(np.float64) if dtype in NATIVE else values.astype(np.float64)


def rounded(values: npt.NDArray[np.float64], target: DType) -> Array:
    """float64 to float32, float16 or bfloat16 by the midpoints of neighbours; NaNs without regard to their bits."""
    label = UNSIGNED[target.bits]
    if target is DType.FLOAT32:
        with np.errstate(all="ignore"):
            single = values.astype(np.float32)
        lost = np.isinf(single) & np.isfinite(values)
        single[lost] = np.copysign(np.finfo(np.float32).max, values[lost])
        return single
    codes = np.arange(0x7C00 if target is DType.FLOAT16 else 0x7F80, dtype=np.uint16)
    grid = as_float64(codes.view(target.storage), target)  # the finite values from 0 upwards
    magnitude = np.abs(values)
    below = np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, grid.size - 1)
    above = np.minimum(below + 1, grid.size - 1)
    middle = (grid[below] + grid[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1))
    result = np.where(up, above, below).astype(label)
    result[np.isinf(values)] = codes.size
    result[np.isnan(values)] = codes.size + 1
    result |= np.where(np.signbit(values), 0x8000, 0).astype(label)
    return result.view(target.storage)


def converted(values: Array, source: DType, target: DType) -> Array:
    """What `convert` must give, NaNs without regard to their bits."""
    return rounded(as_float64(values, source), target)


def assert_same(actual: Array, expected: Array, dtype: DType) -> None:
    """Equal bits, but any NaN for any NaN."""
    assert actual.dtype == expected.dtype
    if dtype.is_float:
        nan = np.isnan(as_float64(expected, dtype))
        assert (np.isnan(as_float64(actual, dtype)) == nan).all()
        actual, expected = actual[~nan], expected[~nan]
    assert (bits_of(actual) == bits_of(expected)).all()


def parameter_places(shape: tuple[int, ...], axis: int, block: int, *, shared: bool) -> list[int]:
    """For each element in row-major order the place of its parameter, from the words of the specification."""
    dims = [-(-d // block) if i == axis else d for i, d in enumerate(shape)]
    numbers = np.arange(int(np.prod(dims))).reshape(dims)

    def places() -> Iterator[int]:
        for index in product(*map(range, shape)):
            position = index[axis] // block
            yield position if shared else int(numbers[(*index[:axis], position, *index[axis + 1 :])])

    return list(places())

"""Narrowing of floats that loses nothing, and its undoing (spec/codecs/planes.md, `stored`).

Many models' float32 weights were trained or shipped in a 16-bit type. What is bit for bit the same after narrowing and
widening is stored narrow. The bits of NaNs are moved, not converted: a processor would quiet a signalling NaN.
"""

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Array
from conx.codecs.convert import BLOCK, widen_to_float32
from conx.dtypes import DType

__all__ = ["NARROWER", "exact_as", "narrowed", "widen"]

# What each type may be stored as, smallest first, float16 before bfloat16.
NARROWER = {
    DType.FLOAT32: (DType.FLOAT16, DType.BFLOAT16),
    DType.FLOAT64: (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32),
}

_PROBE = 4096  # elements that tell most tensors apart

# bits, exponent bits, mantissa bits
_MANTISSA = {DType.FLOAT64: 52, DType.FLOAT32: 23, DType.FLOAT16: 10}
_INFINITY = {DType.FLOAT64: 0x7FF << 52, DType.FLOAT32: 0xFF << 23, DType.FLOAT16: 0x1F << 10}


def exact_as(values: Array, dtype: DType, stored: DType) -> bool:
    """Whether `values`, narrowed from `dtype` to `stored` and widened again, have the same bits.

    Args:
        values: 1-D float32 or float64.
        dtype: their type.
        stored: one of `NARROWER[dtype]`.
    """
    return all(_narrow(values[at : at + size], dtype, stored) is not None for at, size in _blocks(values.size))


def narrowed(values: Array, dtype: DType, stored: DType) -> Array | None:
    """`values` in the storage type of `stored`, or None where not all are exact in it; arguments as for `exact_as`."""
    out = np.empty(values.size, stored.storage)
    for at, size in _blocks(values.size):
        block = _narrow(values[at : at + size], dtype, stored)
        if block is None:
            return None
        out[at : at + size] = block
    return out


def widen(values: Array, stored: DType, dtype: DType, out: Array) -> None:
    """The inverse of `narrowed`: fills `out`, of `dtype`, from `values`, of `stored`."""
    with np.errstate(all="ignore"):
        if dtype is DType.FLOAT32:
            widen_to_float32(values, stored, out)
            return
        if stored is not DType.FLOAT32:
            single = np.empty(values.size, "<f4")
            widen_to_float32(values, stored, single)
            values = single
        np.copyto(out, values)
    _move_nans(values, DType.FLOAT32, out, DType.FLOAT64)


def _blocks(count: int) -> list[tuple[int, int]]:
    """(start, size) of the blocks to work on, the first one small."""
    starts = [0, *range(_PROBE, count, BLOCK)]
    return [(at, end - at) for at, end in zip(starts, [*starts[1:], count], strict=True)]


def _narrow(values: Array, dtype: DType, stored: DType) -> Array | None:
    with np.errstate(all="ignore"):
        if dtype is DType.FLOAT64:
            single = _cast(values, dtype, DType.FLOAT32)
            if single is None or stored is DType.FLOAT32:
                return single
            values = single
        if stored is DType.FLOAT16:
            return _cast(values, DType.FLOAT32, stored)
        halves = values.view("<u2").reshape(-1, 2)
        return None if halves[:, 0].any() else halves[:, 1].copy()


def _cast(values: Array, dtype: DType, stored: DType) -> Array | None:
    """One step, float64 to float32 or float32 to float16."""
    narrow = values.astype(stored.storage)
    _move_nans(values, dtype, narrow, stored)
    back = np.empty_like(values)
    widen(narrow, stored, dtype, back)
    bits = f"<u{values.dtype.itemsize}"
    return narrow if np.array_equal(back.view(bits), values.view(bits)) else None


def _move_nans(values: Array, source: DType, out: Array, target: DType) -> None:
    """Gives the NaNs of `out` the signs and the leading mantissa bits of those of `values`."""
    where = np.flatnonzero(np.isnan(values))
    if not where.size:
        return
    bits: npt.NDArray[np.uint64] = values.view(f"<u{values.dtype.itemsize}")[where].astype(np.uint64)
    mantissa = bits & np.uint64((1 << _MANTISSA[source]) - 1)
    shift = _MANTISSA[target] - _MANTISSA[source]
    mantissa = mantissa << np.uint64(shift) if shift >= 0 else mantissa >> np.uint64(-shift)
    sign = bits >> np.uint64(source.bits - 1) << np.uint64(target.bits - 1)
    out.view(f"<u{out.dtype.itemsize}")[where] = sign | np.uint64(_INFINITY[target]) | mantissa

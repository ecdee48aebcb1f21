"""Conversions between float types with the format's one rounding (spec/conx.md, Values).

To nearest, ties to even, straight from the source; finite values beyond the target's range become its largest finite
value, infinities stay, and a NaN becomes the quiet NaN of its sign without payload. NumPy alone gives infinities where
we saturate, has no bfloat16, and converts to and from float16 in software, element by element. So the bits are worked
on here, whole blocks at a time; the elements that need care (NaN, infinities, overflow) are rare and mended after.
"""

from collections.abc import Callable

import numpy as np

from conx.codecs.base import Array
from conx.codecs.float8 import FLOAT8, float8_values
from conx.dtypes import DType

__all__ = ["BLOCK", "SOURCES", "TARGETS", "check_target", "convert", "float32_to", "widen_to_float32"]

TARGETS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
SOURCES = TARGETS | {DType.FLOAT64} | FLOAT8

# Elements worked on at once: few enough for the temporaries to stay in a core's cache, enough to hide Python's calls.
BLOCK = 1 << 16

# Unsigned type of the bits; infinity (all exponent bits set), largest finite value, quiet NaN, sign.
_BITS = {
    DType.FLOAT32: ("<u4", 0x7F800000, 0x7F7FFFFF, 0x7FC00000, 0x80000000),
    DType.FLOAT16: ("<u2", 0x7C00, 0x7BFF, 0x7E00, 0x8000),
    DType.BFLOAT16: ("<u2", 0x7F80, 0x7F7F, 0x7FC0, 0x8000),
}

_Step = Callable[[Array, Array], None]
_U4 = np.uint32


def check_target(source: DType, target: DType) -> None:
    """Raises ValueError unless a tensor of `source` can be decoded into `target`."""
    if target is not source and not (source in SOURCES and target in TARGETS):
        raise ValueError(f"{source.label} cannot be decoded into {target.label}")


def convert(values: Array, source: DType, target: DType, out: Array) -> None:
    """Converts `values` into `out`.

    Args:
        values: 1-D, contiguous, of the storage type of `source`: any type to itself, or else a float type.
        source: element type of `values`.
        target: element type of `out`: that of `values`, float32, float16 or bfloat16.
        out: 1-D, as long as `values`, of the storage type of `target`; must not overlap `values`.

    Raises:
        ValueError: there is no such conversion.
    """
    check_target(source, target)
    if source is target:
        np.copyto(out.view(np.uint8), values.view(np.uint8))
    elif source in FLOAT8:
        table = np.empty(256, target.storage)
        convert(float8_values(source), DType.FLOAT32, target, table)
        np.take(table, values, out=out, mode="clip")
    else:
        step = _step(source, target, min(values.size, BLOCK))
        with np.errstate(all="ignore"):
            for at in range(0, values.size, BLOCK):
                step(values[at : at + BLOCK], out[at : at + BLOCK])


def float32_to(target: DType, size: int, *, bounded: bool = False) -> _Step:
    """A conversion `f(values, out)` of float32 arrays of up to `size` elements, which reuses its temporaries.

    Not for several threads at once. The caller silences floating-point warnings.

    Args:
        target: float16 or bfloat16.
        size: most elements of a call.
        bounded: promises that no value is a NaN, an infinity or beyond the target's range, which saves looking.
    """
    wide, narrow = np.empty(size, "<u4"), np.empty(size, "<u4")
    if target is DType.FLOAT16:
        return lambda values, out: _float32_to_float16(values, out, (wide, narrow), bounded)
    return lambda values, out: _float32_to_bfloat16(values, out, wide, bounded)


def widen_to_float32(values: Array, source: DType, out: Array) -> bool:
    """float16 or bfloat16 to float32, with a NaN's payload shifted left. Returns whether a NaN or infinity is there."""
    bits = out.view("<u4")
    if source is DType.BFLOAT16:
        np.copyto(bits, values)
        np.left_shift(bits, _U4(16), out=bits)
        return _any_magnitude(values, 0x7F80)
    # Put the exponent where float32 has it, and multiply by the difference of the biases: exact for subnormals too.
    half = values.view("<i2")
    np.copyto(out.view("<i4"), half)
    np.left_shift(bits, _U4(13), out=bits)
    np.bitwise_and(bits, _U4(0x8FFFE000), out=bits)
    np.multiply(out, np.float32(2.0**112), out=out)
    special = _any_magnitude(half, 0x7C00)
    if special:
        np.bitwise_or(bits, _U4(0x7F800000), out=bits, where=(half & 0x7C00) == 0x7C00)
    return special


def _step(source: DType, target: DType, size: int) -> _Step:
    """The conversion of a block."""
    if source is DType.FLOAT32:
        return float32_to(target, size)
    if source is DType.FLOAT64:
        return _float64_to_bfloat16 if target is DType.BFLOAT16 else lambda values, out: _numpy(values, target, out)
    if target is DType.FLOAT32:
        return lambda values, out: _to_float32(values, source, out)
    wide, narrow = np.empty(size, "<f4"), float32_to(target, size)

    def through_float32(values: Array, out: Array) -> None:
        _to_float32(values, source, wide[: values.size])
        narrow(wide[: values.size], out)

    return through_float32


def _to_float32(values: Array, source: DType, out: Array) -> None:
    if widen_to_float32(values, source, out):
        _mend(np.flatnonzero(np.isnan(out)), out, DType.FLOAT32, out)


def _float32_to_float16(values: Array, out: Array, scratch: tuple[Array, Array], bounded: bool) -> None:
    """Rounds by adding a power of two 2^13 times as large as the value's (and at least 2^-1, for subnormals).

    In the sum the last bit kept is float16's last, so the addition does the rounding. The low half of the sum's bits is
    the significand in units of that bit, with its leading one, which float16 counts into the exponent; the exponent
    (less one for it) comes from the addend. Only low halves matter from there on.
    """
    bits, result = values.view("<u4"), out.view("<u2")
    total, addend = scratch[0][: values.size], scratch[1][: values.size]
    np.bitwise_and(bits, _U4(0x7F800000), out=addend)
    addend.clip(_U4(0x38800000), _U4(0x47000000), out=addend)  # quicker than np.maximum
    np.add(addend, _U4(13 << 23), out=addend)
    np.bitwise_and(bits, _U4(0x7FFFFFFF), out=total)
    np.add(total.view("<f4"), addend.view("<f4"), out=total.view("<f4"))
    np.right_shift(addend, _U4(13), out=addend)
    np.add(total, addend, out=total)
    np.right_shift(bits, _U4(16), out=addend)
    np.bitwise_and(addend, _U4(0x8000), out=addend)
    np.add(total, addend, out=total)
    np.copyto(result, total, casting="unsafe")
    np.subtract(result, np.uint16((0x38800000 + (13 << 23) >> 13) % 65536), out=result)
    if not bounded and _any_magnitude(bits, 0x477FF000):  # from here on it rounds to infinity
        _mend(np.flatnonzero((bits & _U4(0x7FFFFFFF)) >= 0x477FF000), values, DType.FLOAT16, out)


def _float32_to_bfloat16(values: Array, out: Array, scratch: Array, bounded: bool) -> None:
    bits, rounded = values.view("<u4"), scratch[: values.size]
    np.right_shift(bits, _U4(16), out=rounded)
    np.bitwise_and(rounded, _U4(1), out=rounded)
    np.add(rounded, _U4(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _U4(16), out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    if not bounded and _any_magnitude(bits, 0x7F7F8000):  # from here on it rounds to infinity, or a NaN overflows
        _mend(np.flatnonzero((bits & _U4(0x7FFFFFFF)) >= 0x7F7F8000), values, DType.BFLOAT16, out)


def _float64_to_bfloat16(values: Array, out: Array) -> None:
    """Through float32 rounded to odd: the last bit set if anything was lost, so that no tie is seen where none was.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans. Computers 57(4), 2008, section 3.
    """
    single = values.astype("<f4")
    bits = single.view("<u4")
    error = np.abs(values) - np.abs(single.astype("<f8"))
    even = (bits & _U4(1)) == 0
    np.add(bits, _U4(1), out=bits, where=even & (error > 0))
    np.subtract(bits, _U4(1), out=bits, where=even & (error < 0))
    _float32_to_bfloat16(single, out, np.empty(values.size, "<u4"), bounded=False)


def _numpy(values: Array, target: DType, out: Array) -> None:
    """By NumPy's own cast, which rounds once, to infinity where we saturate."""
    np.copyto(out, values, casting="unsafe")
    label, infinity, _, _, sign = _BITS[target]
    if _any_magnitude(out.view(label), infinity):
        _mend(np.flatnonzero((out.view(label) & (sign - 1)) >= infinity), values, target, out)


def _any_magnitude(bits: Array, least: int) -> bool:
    """Whether some float has these bits or larger ones, sign aside: two reductions, no temporaries."""
    if not bits.size:
        return False
    width = bits.dtype.itemsize
    sign = 1 << 8 * width - 1
    return int(bits.view(f"<i{width}").max()) >= least or int(bits.view(f"<u{width}").max()) >= sign + least


def _mend(where: Array, values: Array, target: DType, out: Array) -> None:
    """Sets the elements `where` of `out`, whose sources are NaN, infinite or too large, to what they become."""
    label, infinity, largest, quiet, sign = _BITS[target]
    source = values[where]
    magnitude = np.where(np.isnan(source), quiet, np.where(np.isinf(source), infinity, largest))
    out.view(label)[where] = np.where(np.signbit(source), magnitude + sign, magnitude)

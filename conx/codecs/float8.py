"""The values of the 8-bit floats, computed from their definitions.

Sources: OCP 8-bit Floating Point Specification (E4M3, E5M2); arXiv 2206.02915 (the FNUZ variants: no negative zero, one
NaN at 0x80, a bias one higher); OCP Microscaling Formats (E8M0: a power of two without sign).
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from conx.dtypes import DType

__all__ = ["FLOAT8", "float8_values"]

# mantissa bits and exponent bias
_LAYOUTS = {
    DType.FLOAT8E4M3FN: (3, 7),
    DType.FLOAT8E4M3FNUZ: (3, 8),
    DType.FLOAT8E5M2: (2, 15),
    DType.FLOAT8E5M2FNUZ: (2, 16),
    DType.FLOAT8E8M0: (0, 127),
}

FLOAT8 = frozenset(_LAYOUTS)


@cache
def float8_values(dtype: DType) -> npt.NDArray[np.float32]:
    """The float32 value of each of the 256 bytes; all are exact. NaNs are quiet, without payload."""
    values = np.array([_value(dtype, byte) for byte in range(256)], dtype="<f4")
    values.flags.writeable = False
    return values


def _value(dtype: DType, byte: int) -> float:
    mantissa_bits, bias = _LAYOUTS[dtype]
    if dtype is DType.FLOAT8E8M0:
        return float("nan") if byte == 0xFF else 2.0 ** (byte - bias)
    sign = -1.0 if byte & 0x80 else 1.0
    if _is_nan(dtype, byte):
        return float(np.copysign(np.nan, sign))
    if dtype is DType.FLOAT8E5M2 and byte & 0x7F == 0x7C:
        return sign * float("inf")
    exponent, mantissa = byte >> mantissa_bits & 0x7F >> mantissa_bits, byte & (1 << mantissa_bits) - 1
    significand = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return float(sign * significand * 2.0 ** (max(exponent, 1) - bias))


def _is_nan(dtype: DType, byte: int) -> bool:
    if dtype in (DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2FNUZ):
        return byte == 0x80
    return byte & 0x7F == 0x7F if dtype is DType.FLOAT8E4M3FN else byte & 0x7F > 0x7C

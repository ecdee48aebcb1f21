"""Small unsigned fields, 2, 4 or 8 to a byte, the first in the lowest bits."""

import numpy as np
import numpy.typing as npt

from conx.errors import FormatError

__all__ = ["pack_fields", "unpack_fields"]

Bytes = npt.NDArray[np.uint8]

# Fields are spread by halves: with an integer of `per_byte` bytes for each byte, shift and mask until each field has a
# byte of its own. In NumPy this is several times faster than a table of 256 entries, and for single bits there is a
# function. Words are multiplied faster than shifted to the left.
_SPREAD: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {
    2: ("<u2", ((1 << 4, 0x0F0F),)),
    4: ("<u4", ((1 << 12, 0x000F000F), (1 << 6, 0x03030303))),
}


def pack_fields(fields: Bytes, per_byte: int) -> Bytes:
    """The fields' bytes; unused bits of the last are zero.

    Args:
        fields: 1-D, each less than 2^(8 / per_byte).
        per_byte: 1, 2, 4 or 8.
    """
    if per_byte == 1:
        return fields
    padding = -fields.size % per_byte
    if padding:
        fields = np.concatenate([fields, np.zeros(padding, np.uint8)])
    columns = fields.reshape(-1, per_byte)
    packed = columns[:, 0].copy()
    for i in range(1, per_byte):
        packed |= columns[:, i] << np.uint8(8 // per_byte * i)
    return packed


def unpack_fields(packed: Bytes, per_byte: int, out: Bytes) -> None:
    """The inverse of `pack_fields`: fills `out`, whose size is the number of fields.

    `packed` must have ceil(out.size / per_byte) bytes.

    Raises:
        FormatError: unused bits of the last byte are set.
    """
    if per_byte == 1:
        np.copyto(out, packed)
        return
    full = out.size // per_byte
    if full and per_byte == 8:
        np.copyto(out[: full * 8], np.unpackbits(packed[:full], bitorder="little"))
    elif full:
        label, steps = _SPREAD[per_byte]
        wide = out[: full * per_byte].view(label)
        np.copyto(wide, packed[:full])
        shifted = np.empty_like(wide)
        for factor, mask in steps:
            np.multiply(wide, wide.dtype.type(factor), out=shifted)
            np.bitwise_or(wide, shifted, out=wide)
            np.bitwise_and(wide, wide.dtype.type(mask), out=wide)
    rest = out.size - full * per_byte
    if rest:
        bits, last = 8 // per_byte, int(packed[full])
        for i in range(rest):
            out[full * per_byte + i] = last >> bits * i & (1 << bits) - 1
        if last >> bits * rest:
            raise FormatError(f"unused bits of the last byte of packed codes are set: {last:#04x}")

"""Packing of int8 codes one, two or four to a byte, with escapes (spec/codecs/linear.md).

zstd's Huffman stage spends a whole number of bits, at least one, on a byte. Two or four codes to a byte bring codes of
low entropy near it; the rare large codes go into a stream of their own instead of forbidding the packing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Buffer
from conx.codecs.checks import byte_streams
from conx.codecs.fields import pack_fields, unpack_fields
from conx.errors import FormatError

__all__ = ["PACKS", "pack_codes", "stream_names", "stream_sizes", "unpack_codes"]

Bytes = npt.NDArray[np.uint8]

PACKS = (1, 2, 4)

_NAMES = {1: ("codes",), 2: ("nibbles", "escapes"), 4: ("quads", "nibbles", "escapes")}
# What is added to a symbol to make a field, and the field that stands for an escape.
_BIAS = {2: 7, 4: 1}
_ESCAPE = {2: 15, 4: 3}


def stream_names(pack: int) -> tuple[str, ...]:
    """Names of the main streams."""
    return _NAMES[pack]


def stream_sizes(count: int, pack: int) -> tuple[int | None, ...]:
    """Bytes of each main stream for `count` codes; None where the content decides."""
    return (-(-count // pack),) + (None,) * (len(_NAMES[pack]) - 1)


def pack_codes(codes: npt.NDArray[Any], center: int, pack: int) -> list[bytes]:
    """The main streams of a segment.

    Args:
        codes: 1-D, int8 or uint8.
        center: the code that is taken as 0.
        pack: 1, 2 or 4 codes to a byte.
    """
    symbols = codes.view(np.uint8) - np.uint8(center % 256)
    return [stream.tobytes() for stream in _pack(symbols, pack)]


def _pack(symbols: Bytes, pack: int) -> list[Bytes]:
    if pack == 1:
        return [symbols]
    # As unsigned bytes, everything outside the direct range lies at or above the escape.
    fields = symbols + np.uint8(_BIAS[pack])
    escaped = symbols[fields >= _ESCAPE[pack]]
    np.minimum(fields, np.uint8(_ESCAPE[pack]), out=fields)
    return [pack_fields(fields, pack), *_pack(escaped, pack // 2)]


def unpack_codes(streams: Sequence[Buffer], count: int, center: int, pack: int, out: npt.NDArray[Any]) -> None:
    """The inverse of `pack_codes`.

    Args:
        streams: the main streams of a segment of `count` codes.
        count: number of codes.
        center: the code that is taken as 0.
        pack: 1, 2 or 4 codes to a byte.
        out: 1-D of `count` int8 or uint8.

    Raises:
        FormatError: the streams' number, sizes or unused bits do not fit.
    """
    arrays = byte_streams("linear", _NAMES[pack], streams, stream_sizes(count, pack))
    _unpack(arrays, _NAMES[pack], center % 256, pack, out.view(np.uint8))


def _unpack(arrays: Sequence[Bytes], names: Sequence[str], center: int, pack: int, out: Bytes) -> None:
    needed = -(-out.size // pack)
    if arrays[0].size != needed:
        raise FormatError(f"linear: stream '{names[0]}' has {arrays[0].size} bytes, but {out.size} codes need {needed}")
    if pack == 1:
        np.add(arrays[0], np.uint8(center), out=out)
        return
    unpack_fields(arrays[0], pack, out)
    # Most segments with a coarse step have few escapes or none; the largest field says so at a tenth of the cost.
    any_escaped = out.size > 0 and int(out.max()) == _ESCAPE[pack]
    where = np.flatnonzero(out == _ESCAPE[pack]) if any_escaped else np.empty(0, np.intp)
    escaped = np.empty(where.size, np.uint8)
    _unpack(arrays[1:], names[1:], center, pack // 2, escaped)
    np.add(out, np.uint8((center - _BIAS[pack]) % 256), out=out)
    if any_escaped:
        out[where] = escaped

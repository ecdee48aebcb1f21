"""Heads, rest and words become floats again (spec/codecs/heads.md), in as few passes over the data as NumPy allows.

What counts is the number of passes and their width: they run at the speed of the cache, so narrow ones are made first
and all temporaries are of a block. NumPy shifts bytes and words to the left slowly; it multiplies them fast.
"""

from collections.abc import Callable, Sequence

import numpy as np

from conx.codecs.base import Array
from conx.codecs.convert import BLOCK
from conx.codecs.fields import unpack_fields
from conx.codecs.layout import Spread
from conx.codecs.scratch import scratch
from conx.errors import FormatError

__all__ = ["ESCAPE", "LEAST_BITS", "WORD", "Joiner", "add_expected"]

WORD = 16
LEAST_BITS = 8
ESCAPE = 255
"""The symbol that stands for a residual of 255 or more, where heads have more than 8 bits."""

_SIGN = 0x8000
_HEAD_BITS = np.uint16(0x7FFF)


class Joiner:
    """Joins segments of one tensor; may be used by several threads at a time.

    Args:
        bits, base: of the codec.
        widths: of the planes of the rest, ascending from its lowest bits.
        adders: what each axis adds to the residuals: uint8 for heads of 8 bits, else uint16.
    """

    def __init__(self, bits: int, base: int, widths: Sequence[int], adders: Sequence[Spread]) -> None:
        low = WORD - 1 - bits
        self._bits, self._base, self._widths, self._adders = bits, base, widths, adders
        self._head_unit = np.uint16(1 << low)
        self._rest_sign = np.uint8(1 << low)
        self._rest_mask = np.uint16(_SIGN | (1 << low) - 1)

    def join(self, start: int, streams: Sequence[Array], out: Array, write: Callable[[int, int], None] | None) -> None:
        """Joins a segment, block by block.

        Args:
            start: its first element.
            streams: bytes of its main streams, of the right sizes.
            out: unsigned, for the bits of all elements; or of a block where there is `write`.
            write: called as `write(at, size)` with the place in the segment and the size of each block in `out`.

        Raises:
            FormatError: the escapes are wrong.
        """
        rest = iter(streams)
        symbols = next(rest)
        escapes = _checked(next(rest), self._bits) if self._bits > LEAST_BITS else None
        planes = [(width, next(rest)) for width in self._widths]
        words = [array.view("<u2") for array in rest]
        used = 0
        for at in range(0, symbols.size, BLOCK):
            part = symbols[at : at + BLOCK]
            size = part.size
            bits = out[at : at + size] if write is None else out[:size]
            top = scratch.top[:size] if words else bits
            if escapes is None:
                self._narrow_heads(start + at, part, top)
            else:
                used = self._wide_heads(start + at, part, escapes, used, top)
            self._rest(at, planes, top)
            if words:
                _lay_words([*(word[at : at + size] for word in words), top], bits)
            if write is not None:
                write(at, size)
        if escapes is not None and used != escapes.size:
            raise _count_error(used, escapes)

    def _narrow_heads(self, start: int, symbols: Array, top: Array) -> None:
        if self._base or self._adders:
            symbols = np.add(symbols, np.uint8(self._base), out=scratch.bytes[: symbols.size])
            add_expected(self._adders, start, symbols)
        np.copyto(top, symbols)
        np.multiply(top, self._head_unit, out=top)

    def _wide_heads(self, start: int, symbols: Array, escapes: Array, used: int, top: Array) -> int:
        """The same of more than 8 bits, modulo 2^bits; returns the escapes used so far."""
        np.copyto(top, symbols)
        if int(symbols.max()) == ESCAPE:
            where = np.flatnonzero(symbols == ESCAPE)
            found = escapes[used : used + where.size]
            used += where.size
            if found.size != where.size:
                raise _count_error(used, escapes)
            top[where] = found
        if self._base:
            np.add(top, np.uint16(self._base), out=top)
        add_expected(self._adders, start, top)
        np.multiply(top, self._head_unit, out=top)
        if self._base or self._adders:
            np.bitwise_and(top, _HEAD_BITS, out=top)
        return used

    def _rest(self, at: int, planes: Sequence[tuple[int, Array]], top: Array) -> None:
        """Adds the rest: widened as a signed byte, its sign fills the word, of which a mask leaves what is wanted."""
        field = scratch.field[: top.size]
        (width, plane), *more = planes
        if width == 8:
            fields = plane[at : at + top.size]
        else:
            fields = scratch.bytes[: top.size]
            unpack_fields(_part(plane, at, top.size, width), 8 // width, fields)
            for upper, plane in more:
                upper_fields = scratch.more[: top.size]
                unpack_fields(_part(plane, at, top.size, upper), 8 // upper, upper_fields)
                np.multiply(upper_fields, np.uint8(1 << width), out=upper_fields)
                np.bitwise_or(fields, upper_fields, out=fields)
                width += upper
            np.bitwise_xor(fields, self._rest_sign, out=fields)
            np.subtract(fields, self._rest_sign, out=fields)
        np.copyto(field, fields.view(np.int8), casting="unsafe")
        np.bitwise_and(field, self._rest_mask, out=field)
        np.bitwise_or(top, field, out=top)


def _lay_words(words: Sequence[Array], bits: Array) -> None:
    """Puts words, the lowest first, into their places: a step over memory is cheaper than to shift and to add."""
    np.copyto(bits, words[0])
    parts = bits.view("<u2")
    for i, word in enumerate(words[1:], 1):
        parts[i :: len(words)] = word


def add_expected(adders: Sequence[Spread], start: int, out: Array) -> None:
    """Adds what the axes say of the elements from `start`."""
    for spread in adders:
        for piece in spread.pieces(start, out.size):
            part = piece.of(out)
            np.add(part, piece.params, out=part, casting="unsafe")


def _checked(stream: Array, bits: int) -> Array:
    """The escapes."""
    if stream.size % 2:
        raise FormatError(f"heads: stream 'escapes' has {stream.size} bytes, but holds words of 2 bytes")
    escapes = stream.view("<u2")
    if escapes.size and not ESCAPE <= int(escapes.min()) <= int(escapes.max()) < 1 << bits:
        wrong = escapes[(escapes < ESCAPE) | (escapes >= 1 << bits)][0]
        raise FormatError(f"heads: an escape is {wrong}, but must be in {ESCAPE} … {(1 << bits) - 1}")
    return escapes


def _part(plane: Array, at: int, count: int, width: int) -> Array:
    """The bytes of a block's fields; blocks begin with a byte."""
    return plane[at * width // 8 : -(-(at + count) * width // 8)]


def _count_error(used: int, escapes: Array) -> FormatError:
    return FormatError(f"heads: {used} symbols or more are {ESCAPE}, but there are {escapes.size} escapes")

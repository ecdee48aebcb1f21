"""Floats cut into head, rest and words (spec/codecs/heads.md).

Lossless. The head, which is the exponent and perhaps some bits of the mantissa, is all that compresses in trained
weights. Weights of one row are alike in size, and so are those of one column: where the head is told relative to what
its place in the tensor lets expect, a bit of logarithmic arithmetic, the numbers that are left have less entropy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta, as_array
from conx.codecs.checks import Params, byte_streams, check_out, check_side
from conx.codecs.convert import BLOCK, TARGETS, check_target, convert
from conx.codecs.exact import NARROWER, widen
from conx.codecs.fields import pack_fields, unpack_fields
from conx.codecs.layout import Layout, Spread
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["ESCAPE", "MOST_BITS", "Heads"]

LEAST_BITS, MOST_BITS = 8, 15
MOST_SHIFT = 7
ESCAPE = 255
"""The symbol that stands for a residual of 255 or more, where heads have more than 8 bits."""

_TYPES = TARGETS | {DType.FLOAT64}
_WORD = 16


@dataclass(frozen=True)
class Heads:
    """Heads of `bits` bits, relative to `base` and to a code for each position along each of the axes in the mask.

    The data to encode are of the storage type of `stored`, or of the tensor's; where there is a base or an axis they
    are what `residuals` gives, not the values.
    """

    id: ClassVar[str] = "heads"

    bits: int = LEAST_BITS
    base: int = 0
    axes: int = 0
    shift: int = 0
    stored: DType | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Heads":
        """See `Codec.from_params`."""
        if meta.dtype not in _TYPES:
            raise FormatError(f"heads: element type {meta.dtype.label} is not a float of at least 16 bits")
        reader = Params(cls.id, params)
        bits = reader.required_int("bits", LEAST_BITS, MOST_BITS)
        base = reader.optional_int("base", 0, (1 << bits) - 1) or 0
        axes = reader.optional_int("axes", 1, (1 << len(meta.shape)) - 1) or 0
        shift = reader.optional_int("shift", 0, MOST_SHIFT) or 0
        label = reader.optional_text("stored", [dtype.label for dtype in NARROWER.get(meta.dtype, ())])
        reader.finish()
        if shift and not axes:
            raise reader.refuse("shift", shift, "absent without axes")
        return cls(bits, base, axes, shift, None if label is None else DType.from_label(label))

    def to_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"bits": self.bits}
        params |= {name: value for name in ("axes", "base", "shift") if (value := getattr(self, name))}
        return params if self.stored is None else params | {"stored": self.stored.label}

    def axis_list(self) -> list[int]:
        """The axes with codes, ascending."""
        return [axis for axis in range(self.axes.bit_length()) if self.axes >> axis & 1]

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return tuple(meta.shape[axis] for axis in self.axis_list())

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        escapes = ("escapes",) if self.bits > LEAST_BITS else ()
        rest = (f"rest{width}" for width in self.rest_widths())
        return ("heads", *escapes, *rest, *(f"word{i}" for i in range(self._words(meta))))

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        escapes = (None,) if self.bits > LEAST_BITS else ()
        rest = (-(-count * width // 8) for width in self.rest_widths())
        return (count, *escapes, *rest, *(2 * count,) * self._words(meta))

    def residuals(self, values: Array, meta: TensorMeta, side: Sequence[Buffer]) -> Array:
        """The data to encode: a copy of `values`, flat, the whole tensor, with residuals in place of the heads."""
        return self.residuals_of(values, meta, side, 0, values.size)

    def residuals_of(self, values: Array, meta: TensorMeta, side: Sequence[Buffer], start: int, stop: int) -> Array:
        """The same of the elements start … stop-1 only; `values` are all of the tensor's."""
        adders = self._adders(meta, side)
        out = values[start:stop].copy()
        tops = _tops(out)
        low = _WORD - 1 - self.bits
        for at in range(0, out.size, BLOCK):
            top = tops[at : at + BLOCK]
            expected = np.full(top.size, self.base, "<u2")
            _add(adders, start + at, expected)
            head = (top >> low & (1 << self.bits) - 1) - expected & (1 << self.bits) - 1
            tops[at : at + BLOCK] = top & (0x8000 | (1 << low) - 1) | head << low
        return out

    def heads(self, data: Array) -> Array:
        """What stands where heads stand in `data`, uint16: heads in values, or residuals."""
        return _tops(data) >> _WORD - 1 - self.bits & (1 << self.bits) - 1

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        if data.dtype != (self.stored or meta.dtype).storage:
            raise ValueError(f"heads of {(self.stored or meta.dtype).label} cannot hold {data.dtype}")
        low = _WORD - 1 - self.bits
        tops = _tops(data)
        residuals = self.heads(data)
        symbols = residuals if self.bits == LEAST_BITS else np.minimum(residuals, ESCAPE)
        streams = [symbols.astype(np.uint8).tobytes()]
        if self.bits > LEAST_BITS:
            streams.append(residuals[symbols == ESCAPE].astype("<u2").tobytes())
        rest = ((tops >> 15 << low) | (tops & (1 << low) - 1)).astype(np.uint8)
        for width in self.rest_widths():
            streams.append(pack_fields(rest & np.uint8((1 << width) - 1), 8 // width).tobytes())
            rest >>= np.uint8(width % 8)
        words = data.view("<u2").reshape(-1, data.dtype.itemsize // 2)
        return streams + [words[:, i].tobytes() for i in range(self._words(meta))]

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))
        stored = self.stored or meta.dtype
        adders = self._adders(meta, side)

        def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            arrays = byte_streams(self.id, self.stream_names(meta), streams, self.stream_sizes(meta, count))
            joining = _Joining(self, adders, arrays, count)
            values = out if stored is target else np.empty(min(count, BLOCK), stored.storage)
            change = widen if target is meta.dtype else convert
            for at in range(0, count, BLOCK):
                part = out[at : at + BLOCK]
                block = part if stored is target else values[: part.size]
                joining.join(start, at, block)
                if stored is not target:
                    change(block, stored, target, part)
            joining.finish()

        return decode

    def rest_widths(self) -> tuple[int, ...]:
        """Bits of each plane of the rest, which is the sign and what the top word has below the head."""
        rest = _WORD - self.bits
        return (8,) if rest == 8 else tuple(width for width in (4, 2, 1) if rest & width)

    def _words(self, meta: TensorMeta) -> int:
        """Words below the top one."""
        return (self.stored or meta.dtype).bits // _WORD - 1

    def _adders(self, meta: TensorMeta, side: Sequence[Buffer]) -> list[Spread]:
        """What each axis adds to the residuals."""
        unit = "u1" if self.bits == LEAST_BITS else "<u2"
        codes = [(as_array(part, "u1").astype("<u2") << self.shift).astype(unit) for part in side]
        layouts = [Layout.along(meta.shape, axis, 1, shared=True) for axis in self.axis_list()]
        return [layout.spread(part) for layout, part in zip(layouts, codes, strict=True)]


class _Joining:
    """Puts a segment together again, block by block, so that all temporaries stay in the cache."""

    def __init__(self, codec: Heads, adders: list[Spread], arrays: list[Array], count: int) -> None:
        self._codec = codec
        self._adders = adders
        rest = iter(arrays)
        self._symbols = next(rest)
        self._escapes = next(rest) if codec.bits > LEAST_BITS else np.empty(0, np.uint8)
        if self._escapes.size % 2:
            raise FormatError(f"heads: stream 'escapes' has {self._escapes.size} bytes, but holds words of 2 bytes")
        self._escapes = self._escapes.view("<u2")
        if self._escapes.size and not ESCAPE <= int(self._escapes.min()) <= int(self._escapes.max()) < 1 << codec.bits:
            wrong = self._escapes[(self._escapes < ESCAPE) | (self._escapes >= 1 << codec.bits)][0]
            raise FormatError(f"heads: an escape is {wrong}, but must be in {ESCAPE} … {(1 << codec.bits) - 1}")
        self._used = 0
        self._planes = [(width, next(rest)) for width in codec.rest_widths()]
        self._words = [array.view("<u2") for array in rest]
        size = min(count, BLOCK)
        self._top, self._field = np.empty(size, "<u2"), np.empty(size, "<u2")
        self._bytes = np.empty(size, np.uint8)
        self._more = np.empty(size if len(self._planes) > 1 else 0, np.uint8)
        self._wide = np.empty(size, f"<u{2 * (len(self._words) + 1)}") if self._words else self._top

    def join(self, start: int, at: int, out: Array) -> None:
        """Fills `out` with the elements from `at` of the segment that begins at `start`."""
        bits = out.view(f"<u{out.dtype.itemsize}")
        top = self._top[: out.size] if self._words else bits
        self._join_top(start, at, top)
        if not self._words:
            return
        np.copyto(bits, top)
        wide, kind = self._wide[: out.size], bits.dtype.type
        for word in reversed(self._words):
            np.left_shift(bits, kind(_WORD), out=bits)
            np.copyto(wide, word[at : at + out.size])
            np.bitwise_or(bits, wide, out=bits)

    def finish(self) -> None:
        """Raises FormatError where escapes are left."""
        if self._used != self._escapes.size:
            raise self._count_error(self._used)

    def _join_top(self, start: int, at: int, top: Array) -> None:
        low = _WORD - 1 - self._codec.bits
        self._heads(start, at, top)
        if low:
            np.left_shift(top, np.uint16(low), out=top)
        if self._codec.bits > LEAST_BITS:
            np.bitwise_and(top, np.uint16(0x7FFF), out=top)
        field = self._field[: top.size]
        self._rest(at, field, np.uint16(1 << low))
        np.bitwise_and(field, np.uint16(0x8000 | (1 << low) - 1), out=field)
        np.bitwise_or(top, field, out=top)

    def _heads(self, start: int, at: int, top: Array) -> None:
        """Heads; those of more than 8 bits modulo 2^16."""
        symbols = self._symbols[at : at + top.size]
        base, adders = self._codec.base, self._adders
        if self._codec.bits == LEAST_BITS:
            if base or adders:
                symbols = np.add(symbols, np.uint8(base), out=self._bytes[: top.size])
                _add(adders, start + at, symbols)
            np.copyto(top, symbols)
            return
        np.copyto(top, symbols)
        if symbols.size and int(symbols.max()) == ESCAPE:
            where = np.flatnonzero(symbols == ESCAPE)
            found = self._escapes[self._used : self._used + where.size]
            self._used += where.size
            if found.size != where.size:
                raise self._count_error(self._used)
            top[where] = found
        if base:
            np.add(top, np.uint16(base), out=top)
        _add(adders, start + at, top)

    def _rest(self, at: int, out: Array, sign: np.uint16) -> None:
        """The rest, its highest bit, `sign`, spread upwards."""
        (width, plane), *more = self._planes
        if width == 8:
            np.copyto(out, plane[at : at + out.size].view(np.int8), casting="unsafe")
            return
        fields = self._bytes[: out.size]
        unpack_fields(_part(plane, at, out.size, width), 8 // width, fields)
        for upper, plane in more:
            bits = self._more[: out.size]
            unpack_fields(_part(plane, at, out.size, upper), 8 // upper, bits)
            np.left_shift(bits, np.uint8(width), out=bits)
            np.bitwise_or(fields, bits, out=fields)
            width += upper
        np.copyto(out, fields)
        np.bitwise_xor(out, sign, out=out)
        np.subtract(out, sign, out=out)

    def _count_error(self, used: int) -> FormatError:
        return FormatError(f"heads: {used} symbols or more are {ESCAPE}, but there are {self._escapes.size} escapes")


def _part(plane: Array, at: int, count: int, width: int) -> Array:
    """The bytes of a block's fields; blocks begin with a byte."""
    return plane[at * width // 8 : -(-(at + count) * width // 8)]


def _add(adders: Sequence[Spread], start: int, out: Array) -> None:
    """Adds what the axes say of the elements from `start`."""
    for spread in adders:
        for piece in spread.pieces(start, out.size):
            part = piece.of(out)
            np.add(part, piece.params, out=part, casting="unsafe")


def _tops(values: Array) -> Array:
    """The highest word of each value, as a view."""
    return values.view("<u2")[values.dtype.itemsize // 2 - 1 :: values.dtype.itemsize // 2]

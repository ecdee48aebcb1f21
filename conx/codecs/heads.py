"""Floats cut into head, rest and words (spec/codecs/heads.md).

Lossless. The head, which is the exponent and perhaps some bits of the mantissa, is all that compresses in trained
weights. Weights of one row are alike in size, and so are those of one column: where the head is told relative to what
its place in the tensor lets expect, a bit of logarithmic arithmetic, the numbers that are left have less entropy.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta, as_array
from conx.codecs.checks import Params, byte_streams, check_out, check_side
from conx.codecs.convert import BLOCK, TARGETS, check_target, convert
from conx.codecs.exact import NARROWER, widen
from conx.codecs.fields import pack_fields
from conx.codecs.joining import ESCAPE, LEAST_BITS, WORD, Joiner, add_expected
from conx.codecs.layout import Layout, Spread
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["ESCAPE", "MOST_BITS", "Heads"]

MOST_BITS = 15
MOST_SHIFT = 7

_TYPES = TARGETS | {DType.FLOAT64}
_TABLE = 1 << 14  # elements


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
        if not self.axes:
            return []
        return [axis for axis in range(self.axes.bit_length()) if self.axes >> axis & 1]

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return tuple(meta.shape[axis] for axis in self.axis_list())

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return _stream_names(self.bits, self._words(meta))

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        escapes = (None,) if self.bits > LEAST_BITS else ()
        rest = [-(-count * width // 8) for width in _rest_widths(self.bits)]
        return (count, *escapes, *rest, *(2 * count,) * self._words(meta))

    def residuals(self, values: Array, meta: TensorMeta, side: Sequence[Buffer]) -> Array:
        """The data to encode: a copy of `values`, flat, the whole tensor, with residuals in place of the heads."""
        return self.residuals_of(values, meta, side, 0, values.size)

    def residuals_of(self, values: Array, meta: TensorMeta, side: Sequence[Buffer], start: int, stop: int) -> Array:
        """The same of the elements start … stop-1 only; `values` are all of the tensor's."""
        adders = self._adders(meta, side)
        out = values[start:stop].copy()
        tops = _tops(out)
        low = WORD - 1 - self.bits
        for at in range(0, out.size, BLOCK):
            top = tops[at : at + BLOCK]
            expected = np.full(top.size, self.base, "<u2")
            add_expected(adders, start + at, expected)
            head = (top >> low & (1 << self.bits) - 1) - expected & (1 << self.bits) - 1
            tops[at : at + BLOCK] = top & (0x8000 | (1 << low) - 1) | head << low
        return out

    def heads(self, data: Array) -> Array:
        """What stands where heads stand in `data`, uint16: heads in values, or residuals."""
        return _tops(data) >> WORD - 1 - self.bits & (1 << self.bits) - 1

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        if data.dtype != (self.stored or meta.dtype).storage:
            raise ValueError(f"heads of {(self.stored or meta.dtype).label} cannot hold {data.dtype}")
        low = WORD - 1 - self.bits
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
        names = self.stream_names(meta)
        joiner = Joiner(self.bits, self.base, self.rest_widths(), self._adders(meta, side))
        change = widen if target is meta.dtype else convert

        def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            arrays = byte_streams(self.id, names, streams, self.stream_sizes(meta, count))
            if stored is target:
                joiner.join(start, arrays, out.view(f"<u{out.dtype.itemsize}"), None)
                return
            values = np.empty(min(count, BLOCK), stored.storage)
            bits = values.view(f"<u{values.dtype.itemsize}")

            def write(at: int, size: int) -> None:
                change(values[:size], stored, target, out[at : at + size])

            joiner.join(start, arrays, bits, write)

        return decode

    def rest_widths(self) -> tuple[int, ...]:
        """Bits of each plane of the rest, which is the sign and what the top word has below the head."""
        return _rest_widths(self.bits)

    def _words(self, meta: TensorMeta) -> int:
        """Words below the top one."""
        return (self.stored or meta.dtype).bits // WORD - 1

    def _adders(self, meta: TensorMeta, side: Sequence[Buffer]) -> list[Spread]:
        """What the axes add to the residuals. The last ones together make a table, as NumPy adds short rows slowly."""
        if not side or not meta.count:
            return []
        unit = "u1" if self.bits == LEAST_BITS else "<u2"
        codes = [(as_array(part, "u1").astype("<u2") << self.shift).astype(unit) for part in side]
        named = list(zip(self.axis_list(), codes, strict=True))
        last = [(axis, part) for axis, part in named if math.prod(meta.shape[axis:]) <= _TABLE]
        adders = [_along(meta.shape, axis, part) for axis, part in named[: len(named) - len(last)]]
        if last:
            first = last[0][0]
            dims = meta.shape[first:]
            table = np.zeros(math.prod(dims), unit)
            add_expected([_along(dims, axis - first, part) for axis, part in last], 0, table)
            adders.append(_along((math.prod(meta.shape[:first]), table.size), 1, table))
        return adders


def _along(shape: tuple[int, ...], axis: int, codes: Array) -> Spread:
    return Layout.along(shape, axis, 1, shared=True).spread(codes)


@lru_cache
def _rest_widths(bits: int) -> tuple[int, ...]:
    rest = WORD - bits
    return (8,) if rest == 8 else tuple(width for width in (4, 2, 1) if rest & width)


@lru_cache
def _stream_names(bits: int, words: int) -> tuple[str, ...]:
    escapes = ("escapes",) if bits > LEAST_BITS else ()
    rest = (f"rest{width}" for width in _rest_widths(bits))
    return ("heads", *escapes, *rest, *(f"word{i}" for i in range(words)))


def _tops(values: Array) -> Array:
    """The highest word of each value, as a view."""
    return values.view("<u2")[values.dtype.itemsize // 2 - 1 :: values.dtype.itemsize // 2]

"""Indices into few values (spec/codecs/palette.md)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta, as_array
from conx.codecs.checks import Params, byte_streams, check_out, check_side, refuse_packed
from conx.codecs.convert import BLOCK, check_target, convert
from conx.codecs.fields import pack_fields, unpack_fields
from conx.codecs.layout import Layout
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["Palette"]

_PACKS = (1, 2, 4, 8)

_LookUp = Callable[[Array, int, Array], None]  # packed indices, place of the first, out


@dataclass(frozen=True)
class Palette:
    """`entries` values in a palette, one palette for each `group` positions of `axis` or for the tensor.

    The stored data are indices, uint8. `pack` of them lie in a byte.
    """

    id: ClassVar[str] = "palette"

    entries: int
    pack: int = 1
    axis: int | None = None
    group: int | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Palette":
        """See `Codec.from_params`."""
        refuse_packed(cls.id, meta)
        reader = Params(cls.id, params)
        pack = reader.pack(_PACKS)
        entries = reader.required_int("entries", 1, 1 << 8 // pack)
        axis = reader.axis(meta)
        group = reader.optional_int("group", 1)
        reader.finish()
        if (axis is None) != (group is None):
            raise FormatError(f"palette: parameters 'axis' ({axis}) and 'group' ({group}) go together")
        return cls(entries, pack, axis, group)

    def to_params(self) -> dict[str, Any]:
        params = {"axis": self.axis, "entries": self.entries, "group": self.group, "pack": self.pack}
        return {name: value for name, value in params.items() if value is not None}

    def layout(self, meta: TensorMeta) -> Layout:
        """Which palette belongs to which element."""
        if self.axis is None or self.group is None:
            return Layout.whole(meta.shape)
        return Layout.along(meta.shape, self.axis, self.group, shared=True)

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return (self.layout(meta).count * self.entries * meta.dtype.storage.itemsize,)

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return ("indices",)

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        return (-(-count // self.pack),)

    def make_side(self, values: Array) -> tuple[bytes, ...]:
        """The side streams for the palettes, (groups, entries) or flat, in the storage type of the tensor."""
        return (values.tobytes(),)

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        if data.dtype != np.uint8 or (data.size and int(data.max()) >= self.entries):
            raise ValueError(f"palette takes uint8 indices less than {self.entries}")
        return [pack_fields(data, self.pack).tobytes()]

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))
        stored = as_array(side[0], meta.dtype.storage)
        values = np.empty(stored.size, target.storage)
        convert(stored, meta.dtype, target, values)
        look_up = self._one(values) if self.axis is None else self._many(values, self.layout(meta))

        def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            (packed,) = byte_streams(self.id, self.stream_names(meta), streams, self.stream_sizes(meta, count))
            self._check(packed)
            look_up(packed, start, out)

        return decode

    def _check(self, packed: Array) -> None:
        """Raises FormatError if an index is too large; those of unused bits, which must be zero, never are."""
        bits = 8 // self.pack
        if self.entries == 1 << bits or not packed.size:
            return
        fields = ((packed >> np.uint8(bits * i)) & np.uint8((1 << bits) - 1) for i in range(self.pack))
        largest = max(int(field.max()) for field in fields)
        if largest >= self.entries:
            raise FormatError(f"palette: index {largest} in a palette of {self.entries} entries")

    def _one(self, values: Array) -> _LookUp:
        """For one palette: a table of the values that each byte stands for."""
        fields = np.empty(256 * self.pack, np.uint8)
        unpack_fields(np.arange(256, dtype=np.uint8), self.pack, fields)
        table = values[np.minimum(fields, self.entries - 1)].reshape(256, self.pack)

        def look_up(packed: Array, _start: int, out: Array) -> None:
            full = out.size // self.pack
            whole = out[: full * self.pack].reshape(full, self.pack)
            np.take(table, packed[:full], axis=0, out=whole, mode="clip")
            rest = np.empty(out.size - whole.size, np.uint8)
            unpack_fields(packed[full:], self.pack, rest)
            out[whole.size :] = values[rest]

        return look_up

    def _many(self, values: Array, layout: Layout) -> _LookUp:
        """For several palettes, which lie one after the other in `values`."""
        first = layout.spread(np.arange(layout.count, dtype=np.intp) * self.entries)

        def look_up(packed: Array, start: int, out: Array) -> None:
            indices = np.empty(out.size, np.uint8)
            unpack_fields(packed, self.pack, indices)
            places = np.empty(min(out.size, BLOCK), np.intp)
            for at in range(0, out.size, BLOCK):
                part = indices[at : at + BLOCK]
                for piece in first.pieces(start + at, part.size):
                    np.add(piece.of(part), piece.params, out=piece.of(places))
                np.take(values, places[: part.size], out=out[at : at + BLOCK], mode="clip")

        return look_up

"""One value everywhere (spec/codecs/fill.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta, as_array
from conx.codecs.checks import Params, byte_streams, check_out, check_side, refuse_packed
from conx.codecs.convert import check_target, convert
from conx.dtypes import DType

__all__ = ["Fill"]


@dataclass(frozen=True)
class Fill:
    """The value is the side stream; there are no main streams."""

    id: ClassVar[str] = "fill"

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Fill":
        """See `Codec.from_params`."""
        refuse_packed(cls.id, meta)
        Params(cls.id, params).finish()
        return cls()

    def to_params(self) -> dict[str, Any]:
        return {}

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return (meta.dtype.storage.itemsize,)

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return ()

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        return ()

    def make_side(self, value: Array) -> tuple[bytes, ...]:
        """The side streams for an array of the one value (storage type of the tensor)."""
        if value.size != 1:
            raise ValueError(f"fill takes one value, not {value.size}")
        return (value.tobytes(),)

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        return []

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))
        value = np.empty(1, target.storage)
        convert(as_array(side[0], meta.dtype.storage), meta.dtype, target, value)
        # Copied as integers, which have no NaN that a processor might quiet.
        bits = f"<u{min(value.itemsize, 8)}"
        pattern = value.view(bits)

        def decode(_start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            byte_streams(self.id, self.stream_names(meta), streams, self.stream_sizes(meta, count))
            out.view(bits).reshape(-1, pattern.size)[:] = pattern

        return decode

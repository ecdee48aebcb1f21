"""The bytes as they are (spec/codecs/raw.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta
from conx.codecs.checks import Params, byte_streams, check_out, check_side
from conx.codecs.convert import check_target, convert
from conx.dtypes import DType

__all__ = ["Raw"]


@dataclass(frozen=True)
class Raw:
    """Elements in the encoding of TensorProto.raw_data; of types smaller than a byte, packed bytes."""

    id: ClassVar[str] = "raw"

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Raw":  # noqa: ARG003 - the protocol's
        """See `Codec.from_params`."""
        Params(cls.id, params).finish()
        return cls()

    def to_params(self) -> dict[str, Any]:
        return {}

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return ()

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return ("raw",)

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        return (meta.dtype.nbytes(count),)

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        return [data.tobytes()]

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))

        def decode(_start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            (data,) = byte_streams(self.id, self.stream_names(meta), streams, self.stream_sizes(meta, count))
            convert(data.view(meta.dtype.storage), meta.dtype, target, out)

        return decode

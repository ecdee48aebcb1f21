"""Floats in byte planes (spec/codecs/planes.md).

Lossless. Only the exponents of trained weights are compressible; turning the bits left by one moves the sign out of the
exponent's byte, and every byte gets a stream of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta
from conx.codecs.checks import Params, byte_streams, check_out, check_side
from conx.codecs.convert import BLOCK, SOURCES, check_target, convert
from conx.codecs.exact import NARROWER, widen
from conx.codecs.scratch import scratch
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["Planes"]


@dataclass(frozen=True)
class Planes:
    """Byte planes of the values, or of the same values in a narrower type `stored` that holds them exactly.

    The data to encode are of the storage type of `stored`, if that is given: see `exact.narrowed`.
    """

    id: ClassVar[str] = "planes"

    stored: DType | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Planes":
        """See `Codec.from_params`."""
        if meta.dtype not in SOURCES:
            raise FormatError(f"planes: element type {meta.dtype.label} is not a float of whole bytes")
        reader = Params(cls.id, params)
        label = reader.optional_text("stored", [dtype.label for dtype in NARROWER.get(meta.dtype, ())])
        reader.finish()
        return cls(None if label is None else DType.from_label(label))

    def to_params(self) -> dict[str, Any]:
        return {} if self.stored is None else {"stored": self.stored.label}

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        return ()

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return tuple(f"plane{i}" for i in range(self._width(meta)))

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        return (count,) * self._width(meta)

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        width = self._width(meta)
        if data.dtype.itemsize != width:
            raise ValueError(f"planes of {width} bytes cannot hold {data.dtype}")
        bits = data.view(f"<u{width}")
        turned = bits << bits.dtype.type(1) | bits >> bits.dtype.type(8 * width - 1)
        columns = turned.view(np.uint8).reshape(-1, width)
        return [columns[:, width - 1 - i].tobytes() for i in range(width)]

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))
        stored = self.stored or meta.dtype
        width = self._width(meta)

        names = self.stream_names(meta)
        change = widen if target is meta.dtype else convert

        def decode(_start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            planes = byte_streams(self.id, names, streams, (count,) * width)
            values = out if stored is target else np.empty(min(count, BLOCK), stored.storage)
            for at in range(0, count, BLOCK):
                part = out[at : at + BLOCK]
                block = part if stored is target else values[: part.size]
                _join([plane[at : at + BLOCK] for plane in planes], block.view(f"<u{width}"))
                if stored is not target:
                    change(block, stored, target, part)

        return decode

    def _width(self, meta: TensorMeta) -> int:
        return (self.stored or meta.dtype).storage.itemsize


def _join(planes: Sequence[Array], out: Array) -> None:
    """Puts the planes' bytes together in `out` (unsigned, at most a block) and turns them back."""
    _gather(planes, out)
    lowest, unit = scratch.wide(out), out.dtype.type
    if out.itemsize > 2:
        np.left_shift(out, unit(8 * out.itemsize - 1), out=lowest)
    else:  # small integers are multiplied faster than shifted to the left
        np.multiply(out, unit(1 << 8 * out.itemsize - 1), out=lowest)
    np.right_shift(out, unit(1), out=out)
    np.bitwise_or(out, lowest, out=out)


def _gather(planes: Sequence[Array], out: Array) -> None:
    """Halves, quarters and so on: NumPy works on small integers faster, but with steps of a byte slowly."""
    if len(planes) == 1:
        np.copyto(out, planes[0])
    elif len(planes) == 2:
        np.copyto(out, planes[0])
        np.multiply(out, np.uint16(0x100), out=out)
        low = scratch.wide(out)
        np.copyto(low, planes[1])
        np.bitwise_or(out, low, out=out)
    else:
        middle = len(planes) // 2
        half = scratch.top[: out.size] if middle == 2 else np.empty(out.size, f"<u{middle}")
        _gather(planes[middle:], half)
        np.copyto(out, half)
        _gather(planes[:middle], half)
        out.view(half.dtype)[1::2] = half

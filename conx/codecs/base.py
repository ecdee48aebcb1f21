"""What a codec is: parameters, and the coding of one segment of one tensor. No files, no graphs, no ONNX.

A codec is a frozen dataclass whose fields are the parameters stored in the file (`spec/codecs/<id>.md`). The caller
splits a tensor (flat, in stored order) into segments; `encode` turns a segment into the raw bytes of its main streams,
and a `Decoder` turns them back into a slice of a buffer that the caller owns. Side streams (scales, palettes) are
needed by every segment and handed over once, when the decoder is made, so that tables can be prepared there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from conx.dtypes import DType

__all__ = ["Array", "Buffer", "Codec", "Decoder", "Encoded", "TensorMeta", "as_array"]

Array = npt.NDArray[Any]
Buffer = bytes | bytearray | memoryview

Decoder = Callable[[int, int, Sequence[Buffer], Array], None]
"""`decoder(start, count, streams, out)`: decode elements start … start+count (stored order) into `out`.

`out` is 1-D, contiguous, of the target's storage type, and holds exactly those elements. `streams` are the raw bytes of
the segment's main streams. Thread-safe: segments of one tensor may be decoded at the same time. Raises FormatError when
the streams do not fit.
"""


@dataclass(frozen=True)
class TensorMeta:
    """What a codec may know of a tensor: dims in stored order, and the element type."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def count(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n


class Codec(Protocol):
    """A codec's parameters, and what they allow."""

    id: ClassVar[str]

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> Self:
        """From the map in a file. Raises FormatError naming the parameter and its value."""
        ...

    def to_params(self) -> dict[str, Any]:
        """The map that goes into the file; defaults are left out."""
        ...

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        """Bytes of each side stream."""
        ...

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        """Name of each main stream; streams of one name have like statistics."""
        ...

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        """Bytes of each main stream in a segment of `count` elements; None where the content decides."""
        ...

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        """The main streams of a segment. `data` is 1-D: what the codec stores (values, codes or indices)."""
        ...

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """Prepare decoding into `target` (the tensor's own type, float32, float16 or bfloat16).

        Raises FormatError when the side streams do not fit, ValueError when the type cannot become the target.
        """
        ...


@dataclass(frozen=True)
class Encoded:
    """A tensor ready to be stored: the codec, its side streams, and its data, flat in stored order."""

    codec: Codec
    side: tuple[bytes, ...]
    data: Array

    def segment(self, meta: TensorMeta, start: int, stop: int) -> list[bytes]:
        """The main streams of elements start … stop-1; of types smaller than a byte, `start` begins one."""
        if meta.dtype.bits < 8:
            start, stop = meta.dtype.nbytes(start), meta.dtype.nbytes(stop)
        return self.codec.encode(self.data[start:stop], meta)


def as_array(buffer: Buffer, dtype: str | np.dtype[Any]) -> Array:
    """A stream's bytes as a 1-D array, without a copy."""
    return np.frombuffer(buffer, dtype=dtype)

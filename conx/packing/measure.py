"""What coding did to a weight."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Encoded, TensorMeta
from conx.codecs.convert import convert
from conx.container.limits import SEGMENT
from conx.dtypes import DType

__all__ = ["WeightError", "decoded", "measure"]


@dataclass(frozen=True)
class WeightError:
    """Error of a coded weight.

    Attributes:
        rms: root mean square of the error over that of the weight.
        peak: largest error over the weight's largest magnitude.
    """

    rms: float
    peak: float

    def to_map(self) -> dict[str, float]:
        """Six significant digits, for the metadata."""
        return {"peak": float(f"{self.peak:.6g}"), "rms": float(f"{self.rms:.6g}")}


def measure(encoded: Encoded, meta: TensorMeta, data: npt.NDArray[Any]) -> tuple[bytes, WeightError]:
    """SHA-256 of the values that a reader will decode, and their error, segment by segment.

    Args:
        encoded: the coded tensor, stored in the order of its shape.
        meta: its dims and type.
        data: the original values, flat, all finite, of the same type (float32, float16 or bfloat16).
    """
    decoder = encoded.codec.decoder(meta, encoded.side, meta.dtype)
    digest = hashlib.sha256()
    power = noise = largest = worst = 0.0
    out = np.empty(min(SEGMENT, meta.count), meta.dtype.storage)
    for start in range(0, meta.count, SEGMENT):
        stop = min(start + SEGMENT, meta.count)
        part = out[: stop - start]
        decoder(start, stop - start, encoded.segment(meta, start, stop), part)
        digest.update(part.data)
        wanted = _as_float64(data[start:stop], meta.dtype)
        off = _as_float64(part, meta.dtype) - wanted
        power += float(np.dot(wanted, wanted))
        noise += float(np.dot(off, off))
        largest = max(largest, float(np.abs(wanted).max()))
        worst = max(worst, float(np.abs(off).max()))
    rms = math.sqrt(noise / power) if power else 0.0
    return digest.digest(), WeightError(rms, worst / largest if largest else 0.0)


def decoded(encoded: Encoded, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[np.float32]:
    """The values that a reader will decode to float32, flat, of a tensor stored in the order of its shape."""
    meta = TensorMeta(shape, dtype)
    decoder = encoded.codec.decoder(meta, encoded.side, DType.FLOAT32)
    out = np.empty(meta.count, np.float32)
    for start in range(0, meta.count, SEGMENT):
        stop = min(start + SEGMENT, meta.count)
        decoder(start, stop - start, encoded.segment(meta, start, stop), out[start:stop])
    return out


def _as_float64(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float64]:
    if dtype is not DType.FLOAT32:
        single = np.empty(values.size, np.float32)
        convert(values, dtype, DType.FLOAT32, single)
        values = single
    return values.astype(np.float64)

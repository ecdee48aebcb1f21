"""What coding did to a weight."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Encoded, TensorMeta
from conx.codecs.convert import convert
from conx.container.limits import SEGMENT
from conx.dtypes import DType

__all__ = ["WeightError", "decode_encoded", "weight_error"]

BLOCK = 1 << 20  # elements compared at once


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


def decode_encoded(encoded: Encoded, meta: TensorMeta) -> npt.NDArray[Any]:
    """The values that a reader will decode, flat, in the tensor's own type."""
    out = np.empty(meta.count, meta.dtype.storage)
    decoder = encoded.codec.decoder(meta, encoded.side, meta.dtype)
    for start in range(0, meta.count, SEGMENT):
        stop = min(start + SEGMENT, meta.count)
        decoder(start, stop - start, encoded.codec.encode(encoded.data[start:stop], meta), out[start:stop])
    return out


def weight_error(data: npt.NDArray[Any], decoded: npt.NDArray[Any], dtype: DType) -> WeightError:
    """The error of `decoded` against `data`, both flat and of `dtype` (float32, float16 or bfloat16), all finite."""
    power = noise = 0.0
    largest = worst = 0.0
    for start in range(0, data.size, BLOCK):
        wanted, got = (_as_float64(a[start : start + BLOCK], dtype) for a in (data, decoded))
        off = got - wanted
        power += float(np.dot(wanted, wanted))
        noise += float(np.dot(off, off))
        largest = max(largest, float(np.abs(wanted).max()))
        worst = max(worst, float(np.abs(off).max()))
    return WeightError(math.sqrt(noise / power) if power else 0.0, worst / largest if largest else 0.0)


def _as_float64(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float64]:
    single = np.empty(values.size, np.float32)
    convert(values, dtype, DType.FLOAT32, single)
    return single.astype(np.float64)

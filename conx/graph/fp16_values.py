"""Which constants float16 can hold, and constants as float16."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from conx.codecs.convert import convert
from conx.dtypes import DType
from conx.graph.read import weight_number

__all__ = ["as_float32", "half_tensor", "values_hold"]

HALF = TensorProto.FLOAT16
LARGEST = 65504.0
LOST = 0.01  # relative error of a constant from which float16 does not hold it


def values_hold(
    blocks: Sequence[npt.NDArray[np.float32]] | Iterator[npt.NDArray[np.float32]],
    dims: Sequence[int],
    strict: bool,
    clipped: bool,
) -> bool:
    """Whether float16 holds these values.

    None may lie beyond its range, unless they may be clipped, and none of a vector or scalar may be bent by more than
    LOST, of its own size if `strict`, else of the largest one's. Of matrices only the range counts.
    """
    vector = sum(d > 1 for d in dims) < 2
    for block in blocks:
        finite = block[np.isfinite(block)]
        size = np.abs(finite)
        if not clipped and size.max(initial=0) > LARGEST:
            return False
        if strict or vector:
            kept = size[(size > 0) & (size <= LARGEST)]
            with np.errstate(under="ignore"):
                bent = np.abs(kept.astype(np.float16).astype(np.float32) - kept)
            if (bent > LOST * (kept if strict else kept.max(initial=0))).any():
                return False
    return True


def as_float32(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.float32]:
    """Float values, in the storage type of `dtype`, as float32."""
    if dtype is DType.FLOAT32:
        return values
    wide = np.empty(values.size, np.float32)
    convert(values, dtype, DType.FLOAT32, wide)
    return wide


def half_tensor(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """The constant as float16: a stub keeps its number, small data is rounded, beyond the range clipped."""
    if weight_number(tensor) is not None:
        stub = TensorProto()
        stub.CopyFrom(tensor)
        stub.name, stub.data_type = name, HALF
        return stub
    values = numpy_helper.to_array(tensor)
    bounded = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)
    with np.errstate(under="ignore"):
        return numpy_helper.from_array(bounded.astype(np.float16), name)

"""Dequantizing CuPy arrays where they lie, for `conx.dequantize_array`."""

import math
from functools import cache
from typing import Any

import cupy
import numpy as np

from conx.codecs.layout import Layout
from conx.dtypes import DType
from conx.runtime.cuda.cupy_device import CuPyDevice
from conx.runtime.cuda.recipes import linear_launch

__all__ = ["CuPyArrays"]


class CuPyArrays:
    """Arrays of the current GPU; everything runs on the current stream."""

    def array(self, given: Any) -> Any:
        return cupy.asarray(given)

    def parameters(self, given: Any, shape: tuple[int, ...], name: str, dtype: np.dtype[Any]) -> Any:
        """Scales or zero points, flat: as many as `shape` has elements, or one."""
        values = given if isinstance(given, cupy.ndarray) else np.asarray(given)
        if values.size != 1 and tuple(values.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, but needs {shape} or one value")
        if dtype.kind != "f":
            if values.dtype.kind not in "iu":
                raise ValueError(f"{name} is {values.dtype}, but must be integers")
            limits = np.iinfo(dtype)
            if values.size and (int(values.min()) < limits.min or int(values.max()) > limits.max):
                raise ValueError(f"{name} must be in {limits.min} … {limits.max}, as the codes")
        flat = cupy.asarray(values).reshape(-1).astype(dtype)
        return cupy.ascontiguousarray(cupy.broadcast_to(flat, (math.prod(shape),)))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return cupy.empty(shape, dtype)

    def write(self, codes: Any, code: DType, layout: Layout, scales: Any, zeros: Any, target: DType, out: Any) -> None:
        """Launches the kernel."""
        if codes.size == 0:
            return
        flat = cupy.ascontiguousarray(codes)
        launch = linear_launch(
            layout, 0, codes.size, target,
            signed=code is DType.INT8, zero_point=0, bounded=False, codes=flat.data.ptr, scales=scales.data.ptr,
            zeros=zeros.data.ptr, out=out.data.ptr,
        )  # fmt: skip
        _device(cupy.cuda.runtime.getDevice()).launch([launch], cupy.cuda.get_current_stream())


@cache
def _device(number: int) -> CuPyDevice:
    return CuPyDevice(number)

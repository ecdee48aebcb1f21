"""Memory at an address as an OrtValue, without a copy: through DLPack, for any device and element type.

CuPy's own export lacks bfloat16 and asks for streams; here only a description is handed over. It lies in memory of
Python's raw allocator and is freed by that allocator's C function, so nothing of Python runs when onnxruntime lets go
of it, be that after the interpreter's end. The memory that is described belongs to the caller.

Structures: DLManagedTensor of https://dmlc.github.io/dlpack/latest/c_api.html .
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import onnxruntime

from conx.dtypes import DType

__all__ = ["CPU_MEMORY", "CUDA_MEMORY", "ort_value_at"]

CPU_MEMORY, CUDA_MEMORY = 1, 2  # DLDeviceType

_FLOAT, _BFLOAT = 2, 4  # DLDataTypeCode
_CODES = {DType.FLOAT32: _FLOAT, DType.FLOAT16: _FLOAT, DType.BFLOAT16: _BFLOAT}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Described:
    """What `OrtValue.from_dlpack` takes."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def ort_value_at(address: int, dtype: DType, shape: Sequence[int], kind: int, number: int = 0) -> onnxruntime.OrtValue:
    """An OrtValue on memory of the caller's, which he keeps as long as the value or a session that has it lives.

    Args:
        address: of the first element.
        dtype: float32, float16 or bfloat16.
        shape: dims; the elements lie in row-major order without gaps.
        kind: CPU_MEMORY or CUDA_MEMORY.
        number: of the device, if there are several.
    """
    api = ctypes.pythonapi
    api.PyMem_RawMalloc.restype = ctypes.c_void_p
    dims = (ctypes.c_int64 * len(shape))(*shape)
    head = ctypes.sizeof(_Managed)
    block = api.PyMem_RawMalloc(ctypes.c_size_t(head + ctypes.sizeof(dims)))
    if not block:
        raise MemoryError("no memory for the description of a tensor")
    ctypes.memmove(block + head, dims, ctypes.sizeof(dims))
    tensor = _Tensor(address, kind, number, len(shape), _CODES[dtype], dtype.bits, 1, block + head, None, 0)
    free = ctypes.cast(api.PyMem_RawFree, ctypes.c_void_p).value
    managed = _Managed(tensor, None, free)
    ctypes.memmove(block, ctypes.byref(managed), head)
    api.PyCapsule_New.restype = ctypes.py_object
    capsule = api.PyCapsule_New(ctypes.c_void_p(block), b"dltensor", None)
    return onnxruntime.OrtValue.from_dlpack(_Described(capsule, (kind, number)))

"""A GPU, by CuPy. The only module that imports cupy.

Memory is taken from the driver itself, not from CuPy's pools, so that what is given back is free for onnxruntime at
once.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np

from conx.runtime.cuda.device import Bytes, Launch, Memory
from conx.runtime.cuda.sources import OPTIONS, THREADS, group_of, kernel_source
from conx.runtime.dlpack import CUDA_MEMORY

__all__ = ["CuPyDevice", "device_count", "versions"]

_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind


def device_count() -> int:
    """How many GPUs there are. Raises RuntimeError where there is no driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(str(error)) from error


def versions() -> dict[str, str]:
    """CuPy's, the CUDA runtime's, the driver's and the GPUs' names."""
    runtime = cupy.cuda.runtime
    found = {"cupy": cupy.__version__, "CUDA runtime": _version(runtime.runtimeGetVersion())}
    try:
        found["CUDA driver"] = _version(runtime.driverGetVersion())
        for number in range(device_count()):
            found[f"GPU {number}"] = runtime.getDeviceProperties(number)["name"].decode()
    except RuntimeError as error:
        found["GPU"] = str(error)
    return found


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class _Memory:
    """Memory of the device, until it is dropped."""

    def __init__(self, nbytes: int) -> None:
        self._memory = cupy.cuda.Memory(nbytes)
        self.nbytes = nbytes

    @property
    def address(self) -> int:
        return int(self._memory.ptr)


class CuPyDevice:
    """See `conx.runtime.cuda.device.Device`."""

    kind = CUDA_MEMORY

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._device = cupy.cuda.Device(number)
        self._lock = threading.Lock()
        self._modules: dict[str, Any] = {}
        self._kernels: dict[str, Any] = {}
        with self._device:
            self._kernel("fill_2")  # that there is a compiler, is shown here

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = cupy.cuda.Device(self.number)
        return context

    def alloc(self, nbytes: int) -> Memory:
        try:
            return _Memory(nbytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{nbytes} bytes on GPU {self.number}: {error}") from error

    def pinned(self, nbytes: int) -> Bytes:
        pointer = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(nbytes), 0)
        return np.frombuffer(pointer, np.uint8, nbytes)

    def stream(self) -> Any:
        return cupy.cuda.Stream(non_blocking=True)

    def upload(self, address: int, data: Bytes, stream: Any) -> None:
        cupy.cuda.runtime.memcpyAsync(address, data.ctypes.data, data.nbytes, _TO_DEVICE, stream.ptr)

    def launch(self, launches: Sequence[Launch], stream: Any) -> None:
        with stream:
            for launch in launches:
                arguments = tuple(map(np.int64, launch.arguments))
                self._kernel(launch.kernel)((*launch.grid, 1), (THREADS, 1, 1), arguments)

    def record(self, stream: Any) -> Any:
        event = cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
        return event

    def wait(self, event: Any) -> None:
        event.synchronize()

    def download(self, address: int, nbytes: int) -> Bytes:
        self.synchronize()
        data = np.empty(nbytes, np.uint8)
        cupy.cuda.runtime.memcpy(data.ctypes.data, address, nbytes, _TO_HOST)
        return data

    def synchronize(self) -> None:
        self._device.synchronize()

    def _kernel(self, name: str) -> Any:
        with self._lock:
            if name not in self._kernels:
                group = group_of(name)
                if group not in self._modules:
                    module = cupy.RawModule(code=kernel_source(group), options=OPTIONS, backend="nvrtc")
                    module.compile()
                    self._modules[group] = module
                self._kernels[name] = self._modules[group].get_function(name)
            return self._kernels[name]

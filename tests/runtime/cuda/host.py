"""The kernels compiled for the host, and a device that is the host.

`HostDevice` keeps to what is promised of a device and no more: what a stream is asked to do is done late, when an event
is waited for or everything is, and streams take turns by chance. So a stage that is filled again too early, or memory
that is dropped too early, gives wrong values or an error.
"""

import ctypes
import random
import shutil
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conx.runtime.cuda.device import Bytes, Launch
from conx.runtime.cuda.sources import kernel_names, kernel_source
from conx.runtime.dlpack import CPU_MEMORY

__all__ = ["COMPILER", "HostDevice", "HostMemory", "Kernels", "compile_kernels"]

COMPILER = shutil.which("g++") or shutil.which("clang++")
SHIM = Path(__file__).with_name("shim.h")
POISON = 0xA5


def compile_kernels(folder: Path, source: str | None = None) -> "Kernels":
    """Build the kernels (or another source) as a library of the host."""
    assert COMPILER is not None
    code, library = folder / "kernels.cpp", folder / "kernels.so"
    code.write_text(SHIM.read_text() + (source or kernel_source()))
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing"]
    subprocess.run([*command, "-shared", "-fPIC", "-o", library, code], check=True)
    return Kernels(library)


@cache
def parameter_counts() -> dict[str, int]:
    return kernel_names()


class Kernels:
    """Kernels that run on the host, a block after the other."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._lock = threading.Lock()

    def run(self, launch: Launch) -> None:
        assert len(launch.arguments) == parameter_counts()[launch.kernel], launch
        assert 0 < launch.grid[0] < 2**31, launch
        assert 0 < launch.grid[1] < 2**16, launch
        function = getattr(self._library, launch.kernel)
        arguments = [ctypes.c_longlong(argument) for argument in launch.arguments]
        with self._lock:
            for y in range(launch.grid[1]):
                for x in range(launch.grid[0]):
                    self._library.set_block(ctypes.c_longlong(x), ctypes.c_longlong(y))
                    function(*arguments)


class HostMemory:
    """Memory whose content is spoilt when it is given back, and surrounded by bytes that must not change."""

    MARGIN = 256

    def __init__(self, nbytes: int, kept: list[Bytes]) -> None:
        self._array = np.full(nbytes + 3 * self.MARGIN, POISON, np.uint8)
        kept.append(self._array)  # so that late accesses find the poison, not somebody else's memory
        skip = self.MARGIN + -(self._array.ctypes.data + self.MARGIN) % self.MARGIN
        self._inside = slice(skip, skip + nbytes)
        self.nbytes = nbytes
        self.address = self._array.ctypes.data + skip

    def content(self) -> Bytes:
        return self._array[self._inside]

    def check_margins(self) -> None:
        assert (self._array[: self._inside.start] == POISON).all(), "written before the beginning"
        assert (self._array[self._inside.stop :] == POISON).all(), "written beyond the end"

    def __del__(self) -> None:
        self.check_margins()
        self._array.fill(POISON)


class HostDevice:
    """The host as a device."""

    kind = CPU_MEMORY
    number = 0

    def __init__(self, kernels: Kernels, seed: int = 0, on: Callable[[str], None] = lambda _: None) -> None:
        self.kernels, self.random = kernels, random.Random(seed)
        self.kept: list[Bytes] = []
        self.given: list[weakref.ref[HostMemory]] = []
        self.streams: list[deque[Callable[[], None]]] = []
        self.lock = threading.RLock()
        self.on = on  # called with the name of each operation; what it raises, the operation raises

    def active(self) -> AbstractContextManager[Any]:
        self.on("active")
        return nullcontext()

    def alloc(self, nbytes: int) -> HostMemory:
        self.on("alloc")
        memory = HostMemory(nbytes, self.kept)
        self.given.append(weakref.ref(memory))
        return memory

    def pinned(self, nbytes: int) -> Bytes:
        self.on("pinned")
        return np.full(nbytes, POISON, np.uint8)

    def stream(self) -> Any:
        with self.lock:
            self.streams.append(deque())
            return self.streams[-1]

    def upload(self, address: int, data: Bytes, stream: Any) -> None:
        self.on("upload")
        assert data.flags.c_contiguous

        def copy() -> None:
            ctypes.memmove(address, data.ctypes.data, data.nbytes)

        with self.lock:
            stream.append(copy)

    def launch(self, launches: Sequence[Launch], stream: Any) -> None:
        self.on("launch")
        with self.lock:
            for launch in launches:
                stream.append(lambda launch=launch: self.kernels.run(launch))

    def record(self, stream: Any) -> Any:
        self.on("record")
        event = [stream, False]

        def come() -> None:
            event[1] = True

        with self.lock:
            stream.append(come)
        return event

    def wait(self, event: Any) -> None:
        self.on("wait")
        with self.lock:
            while not event[1]:
                event[0].popleft()()

    def download(self, address: int, nbytes: int) -> Bytes:
        self.synchronize()
        for memory in filter(None, (reference() for reference in self.given)):
            memory.check_margins()
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def synchronize(self) -> None:
        self.on("synchronize")
        with self.lock:
            while busy := [stream for stream in self.streams if stream]:
                self.random.choice(busy).popleft()()

"""What the pipeline needs of a GPU, as a protocol: CuPy fulfils it, and so does a host that only pretends (tests).

Memory is known by its address. Everything that takes a stream is asynchronous: in the order of the stream, and in no
order with that of other streams.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Device", "Launch", "Memory"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid (blocks along x and y) and arguments: addresses and integers of 64 bits."""

    kernel: str
    grid: tuple[int, int]
    arguments: tuple[int, ...]


class Memory(Protocol):
    """Memory of the device, given back when the object is dropped."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Device(Protocol):
    """One GPU. Thread-safe; a thread works with it inside `active`.

    Attributes:
        kind: of its memory, as in `conx.runtime.dlpack`.
        number: the device's.
    """

    kind: int
    number: int

    def active(self) -> AbstractContextManager[Any]:
        """A context in which this is the calling thread's device; after it, the former one is again."""
        ...

    def alloc(self, nbytes: int) -> Memory:
        """Memory on the device, aligned to 256 bytes. Raises MemoryError where there is too little."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Memory of the host that is never paged out, so that a copy from it runs by itself."""
        ...

    def stream(self) -> Any:
        """A new stream."""
        ...

    def upload(self, address: int, data: Bytes, stream: Any) -> None:
        """Copy to the device. `data` must stay as it is until an event recorded after this has come."""
        ...

    def launch(self, launches: Sequence[Launch], stream: Any) -> None:
        """Run kernels, one after the other."""
        ...

    def record(self, stream: Any) -> Any:
        """An event that comes when everything now in the stream is done."""
        ...

    def wait(self, event: Any) -> None:
        """Wait on the host for an event."""
        ...

    def download(self, address: int, nbytes: int) -> Bytes:
        """A copy of memory of the device, when everything asked for before is done."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until everything is done."""
        ...

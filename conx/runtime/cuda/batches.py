"""A batch of a tensor's segments, where its parts lie on a device, and what a recipe for decoding it can do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from conx.codecs import Buffer
from conx.runtime.cuda.device import Bytes, Launch
from conx.runtime.cuda.sources import TILE

__all__ = ["Addresses", "Batch", "Recipe", "Table", "padded", "tiles"]

_ALIGNMENT = 16

Table = npt.NDArray[Any] | int
"""What a recipe needs on the device for all batches: its content, or only a number of bytes."""


@dataclass(frozen=True)
class Batch:
    """Elements start … stop-1 (stored order): a run of segments, with the bytes of each one's main streams."""

    start: int
    stop: int
    sizes: tuple[tuple[int, ...], ...]
    segment: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def counts(self) -> list[int]:
        """Elements of each segment."""
        return [min(self.segment, self.count - i * self.segment) for i in range(len(self.sizes))]


@dataclass(frozen=True)
class Addresses:
    """Where things lie on the device. `out` is where the tensor begins, whatever the batch."""

    stage: int
    scratch: int
    out: int
    flags: int
    tables: tuple[int, ...]


class Recipe(Protocol):
    """Decoding of one tensor into one type."""

    @property
    def tables(self) -> tuple[Table, ...]: ...

    def joins(self, segment: int) -> bool:
        """Whether segments of so many elements can share a batch."""
        ...

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        """What runs once, when the tables are there."""
        ...

    def room(self, batch: Batch) -> tuple[int, int]:
        """Bytes of the stage and of the scratch memory."""
        ...

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        """Lay the main streams of each segment into the stage. Raises FormatError where a size is wrong."""
        ...

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        """The kernels that decode the batch."""
        ...


def tiles(count: int) -> int:
    """Blocks for so many elements."""
    return -(-count // TILE)


def padded(size: int) -> int:
    """Bytes, rounded up so that what follows is aligned for every load and store."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT

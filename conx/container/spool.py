"""Chunks on their way into a file: compressed by many threads, kept in a nameless file until their number is up.

A chunk's number, which is its place in the file, is reserved before its content is known, so that streams can be told
where they are at once. What ends up in the file depends on the order of the calls only, not on the threads.
"""

import hashlib
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np

from conx.container.candidates import Candidate, choose, compress, compress_best
from conx.container.limits import MAX_CHUNK_RAW, MAX_CHUNKS, PAGE_ROWS
from conx.container.table import Rows

__all__ = ["Choice", "Spool"]

T = TypeVar("T")

Choice = Future[Candidate]
"""A candidate that is being chosen."""

_PENDING = 2**26
_OVERHEAD = 2**12
"""Bytes that may wait for a thread, and what a chunk counts beside its content."""

_COPY = 2**22


class Spool:
    """Chunks by number. Not thread-safe: the threads are inside.

    Args:
        folder: Where the nameless file lies: on the disk that the final file goes to.
        executor: Threads that compress; None for the caller's.
    """

    def __init__(self, folder: Path, executor: Executor | None) -> None:
        # Nameless where the system can, so that it is gone even if the process is killed.
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by close()
        self._executor = executor
        self._end = 0
        self._offsets = array("Q")
        self._stored = array("I")
        self._raw = array("I")
        self._sha256 = bytearray()
        self._pending: deque[tuple[int, int, Future[tuple[bytes, bytes]]]] = deque()
        self._pending_cost = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def reserve(self, count: int = 1) -> int:
        """The first of `count` consecutive numbers, each of which must be put once."""
        first = len(self)
        if first + count > MAX_CHUNKS:
            raise ValueError(f"more than {MAX_CHUNKS} chunks")
        self._offsets.extend([0] * count)
        self._stored.extend([0] * count)
        self._raw.extend([0] * count)
        self._sha256 += bytes(32 * count)
        return first

    def choose(self, samples: Sequence[bytes]) -> Choice:
        """Begins to choose a candidate for chunks like `samples`."""
        return self._submit(lambda: choose(samples))

    def put(self, number: int, raw: bytes, choice: Choice | Candidate | None = None) -> None:
        """Begins to store the content of a chunk; without a choice, the best candidate for just this content."""
        if len(raw) > MAX_CHUNK_RAW:
            raise ValueError(f"a chunk of {len(raw)} bytes: at most {MAX_CHUNK_RAW}")

        def job() -> tuple[bytes, bytes]:
            if choice is None:
                frame = compress_best(raw)
            else:
                # Choices are submitted before the chunks that wait for them, so they run or are done by now.
                frame = compress(raw, choice if isinstance(choice, Candidate) else choice.result())
            return frame, hashlib.sha256(frame).digest()

        self._raw[number] = len(raw)
        cost = len(raw) + _OVERHEAD
        self._pending.append((number, cost, self._submit(job)))
        self._pending_cost += cost
        self._settle(0 if self._executor is None else _PENDING)

    def settle(self) -> None:
        """Waits until all that was put is stored."""
        self._settle(0)

    def rows(self) -> Iterator[Rows]:
        """The chunk table, page by page."""
        stored, raw = np.asarray(self._stored, np.uint32), np.asarray(self._raw, np.uint32)
        for i in range(0, len(self), PAGE_ROWS):
            page = slice(i, i + PAGE_ROWS)
            yield Rows(stored[page], raw[page], bytes(self._sha256[32 * i : 32 * (i + PAGE_ROWS)]))

    def copy_to(self, target: BinaryIO) -> None:
        """Writes all frames to `target`, by number."""
        for offset, size in self._runs():
            self._file.seek(offset)
            missing = size
            while missing:
                block = self._file.read(min(missing, _COPY))
                if not block:
                    raise OSError("the temporary file is cut short")
                target.write(block)
                missing -= len(block)

    def close(self) -> None:
        """Drops everything."""
        for _, _, future in self._pending:
            future.cancel()
        self._pending.clear()
        self._file.close()

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        if self._executor is not None:
            return self._executor.submit(job)
        done: Future[T] = Future()
        done.set_result(job())
        return done

    def _settle(self, most: int) -> None:
        while self._pending and self._pending_cost > most:
            number, cost, future = self._pending.popleft()
            frame, sha256 = future.result()
            self._pending_cost -= cost
            self._offsets[number] = self._end
            self._stored[number] = len(frame)
            self._sha256[32 * number : 32 * number + 32] = sha256
            self._end += self._write(frame)

    def _write(self, frame: bytes) -> int:
        self._file.seek(self._end)
        view = memoryview(frame)
        while view:
            view = view[self._file.write(view) :]
        return len(frame)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Consecutive chunks that also follow each other in the file, as (offset, size)."""
        begin, size = 0, 0
        for offset, stored in zip(self._offsets, self._stored, strict=True):
            if offset != begin + size:
                if size:
                    yield begin, size
                begin, size = offset, 0
            size += stored
        if size:
            yield begin, size

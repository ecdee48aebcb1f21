"""Writing a file: streams go into chunks as they come, then header, index, chunk table and chunks are put together.

Where a stream lies is known when it is added, as a chunk's number is reserved before its content is complete:
- A stream of less than 8 KiB shares a chunk with others of its kind, which have like statistics.
- A larger one has chunks of its own.
- Each segment of a tensor of several segments has chunks of its own, one for each main stream.
- Graphs share chunks, so that nearly equal ones are stored nearly once.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from conx.container.candidates import LEVEL_19, Candidate, compress_best
from conx.container.header import HEADER_SIZE, Header, serialize_header
from conx.container.index import parse_index, serialize_index
from conx.container.records import EMPTY_STREAM, Graph, Index, Original, Page, Stream, Tensor
from conx.container.spool import Choice, Spool
from conx.container.table import serialize_rows
from conx.container.target import Target

__all__ = ["Writer"]

_SMALL = 2**13
_GROUP = 2**18
_OWN = 2**22
_GRAPHS = 2**20
"""Raw bytes: below which streams share chunks, of a shared chunk, of a stream's own chunk, of a chunk of graphs."""

_SAMPLE = 2**18
"""Raw bytes by which zstd's parameters are chosen for all of a stream."""


class Writer:
    """A .conx file in the making. Call it from one thread; a context manager that drops what is not finished.

    The same calls give the same bytes, whatever the number of threads. Nothing appears at the target before `finish`
    has everything: frames lie in a nameless file beside it, and the file is written under a hidden name, then renamed.

    Args:
        target: The file to write, which may exist.
        executor: Threads that compress, with a queue that is first in, first out (as ThreadPoolExecutor's); None for
            the caller's thread. Do not call the writer from these threads.

    Raises:
        OSError: the target is a folder, or nothing can be written beside it.
    """

    def __init__(self, target: str | os.PathLike[str], executor: Executor | None = None) -> None:
        self._target = Target(target)
        self._spool = Spool(self._target.folder, executor)
        self._groups: dict[str, _Group] = {}
        self._graphs = _Group(0, bytearray())
        self._open = True

    def add_stream(self, data: bytes, kind: str) -> Stream:
        """Adds a stream: side streams, and the main streams of tensors of one segment.

        Args:
            data: The raw bytes.
            kind: Streams of one kind have like statistics, and small ones share chunks.
        """
        self._require_open()
        if not data:
            return EMPTY_STREAM
        if len(data) >= _SMALL:
            first = self._spool.reserve(-(-len(data) // _OWN))
            choice = None if len(data) <= _SAMPLE else self._spool.choose([data[:_SAMPLE]])
            self._put_pieces(first, data, _OWN, choice)
            return Stream(first, 0, len(data))
        group = self._groups.get(kind)
        if group is not None and len(group.data) + len(data) > _GROUP:
            self._spool.put(group.number, bytes(group.data))
            group = None
        if group is None:
            group = self._groups[kind] = _Group(self._spool.reserve(), bytearray())
        return group.add(data)

    def add_segments(self, names: Sequence[str], segments: Iterable[Sequence[bytes]]) -> tuple[Stream, ...]:
        """Adds a tensor's main streams.

        Args:
            names: Of each main stream; streams of one name are of one kind.
            segments: For each segment the raw bytes of its main streams. May be made while it is consumed.

        Returns:
            The main streams, for `Tensor.streams`.
        """
        self._require_open()
        rest = _of_width(len(names), segments)
        head = list(islice(rest, 2))
        if len(head) < 2:
            only = head[0] if head else [b""] * len(names)
            return tuple(self.add_stream(data, name) for name, data in zip(names, only, strict=True))
        first = len(self._spool)
        sizes = [0] * len(names)
        choices = [self._spool.choose([data[:_SAMPLE]]) for data in head[0]]
        for contents in chain(head, rest):
            number = self._spool.reserve(len(names))
            for j, (data, choice) in enumerate(zip(contents, choices, strict=True)):
                sizes[j] += len(data)
                self._spool.put(number + j, data, choice)
        return tuple(Stream(first + j, 0, size) for j, size in enumerate(sizes))

    def add_graph(self, data: bytes) -> Stream:
        """Adds a graph's message."""
        self._require_open()
        if not data:
            return EMPTY_STREAM
        group = self._graphs
        if not group.data or len(group.data) + len(data) > _GRAPHS:
            self._put_graphs()
            whole = (len(data) - 1) // _GRAPHS  # full chunks; the rest stays open for graphs to come
            first = self._spool.reserve(whole + 1)
            self._put_pieces(first, data[: whole * _GRAPHS], _GRAPHS, LEVEL_19)
            self._graphs = _Group(first + whole, bytearray(data[whole * _GRAPHS :]))
            return Stream(first, 0, len(data))
        return group.add(data)

    def finish(
        self,
        features: Iterable[str],
        graphs: Iterable[Graph],
        tensors: Iterable[Tensor],
        metadata: Mapping[str, Any],
        verify: Callable[[Path], Mapping[str, Any] | None] | None = None,
        originals: Iterable[Original] = (),
    ) -> bytes:
        """Puts the file together, and in its place.

        Args:
            features: In any order.
            graphs: With the streams that `add_graph` gave.
            tensors: With the streams that `add_stream` and `add_segments` gave.
            metadata: What canonical msgpack can hold.
            verify: Called with the finished file under its temporary name; an exception keeps it from its place. Where
                it answers with metadata, they are added, and the file is put together again.
            originals: Files of the model as it was, with the streams that `add_stream` and `add_graph` gave.

        Returns:
            The file_id.

        Raises:
            FormatError: the records break a rule of the format.
            ValueError: parameters or metadata hold what the index cannot.
            OSError: writing failed.
        """
        self._require_open()
        try:
            for group in self._groups.values():
                self._spool.put(group.number, bytes(group.data))
            self._groups.clear()
            self._put_graphs()
            self._spool.settle()
            pages, frames = self._make_pages()
            records = (tuple(graphs), tuple(tensors), pages, metadata, tuple(originals))
            index = Index(tuple(sorted(set(features))), *records)
            header = self._assemble(index, frames)
            found = verify(self._target.temporary) if verify is not None else None
            if found:
                self._target.discard()
                header = self._assemble(replace(index, metadata={**metadata, **found}), frames)
            self._target.commit()
        finally:
            self.abort()
        return header.file_id

    def abort(self) -> None:
        """Drops everything that is not in its place; may be called at any time."""
        self._open = False
        self._spool.close()
        self._target.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("the writer is finished")

    def _put_pieces(self, first: int, data: bytes, size: int, choice: Choice | Candidate | None) -> None:
        for i in range(0, len(data), size):
            self._spool.put(first + i // size, data[i : i + size], choice)

    def _put_graphs(self) -> None:
        if self._graphs.data:
            self._spool.put(self._graphs.number, bytes(self._graphs.data), LEVEL_19)
            self._graphs = _Group(0, bytearray())

    def _make_pages(self) -> tuple[tuple[Page, ...], list[bytes]]:
        pages, frames = [], []
        for rows in self._spool.rows():
            raw = serialize_rows(rows)
            frame = compress_best(raw)
            data = int(rows.stored.sum(dtype="u8"))
            pages.append(Page(len(rows.stored), len(frame), len(raw), data, hashlib.sha256(frame).digest()))
            frames.append(frame)
        return tuple(pages), frames

    def _assemble(self, index: Index, pages: list[bytes]) -> Header:
        raw = serialize_index(index)
        parse_index(raw)
        frame = compress_best(raw)
        size = HEADER_SIZE + len(frame) + sum(page.stored + page.data for page in index.pages)
        header = Header(len(frame), len(raw), hashlib.sha256(frame).digest(), size)
        with self._target.create() as file:
            file.write(serialize_header(header))
            file.write(frame)
            file.writelines(pages)
            self._spool.copy_to(file)
            file.flush()
            os.fsync(file.fileno())
        return header


def _of_width(width: int, segments: Iterable[Sequence[bytes]]) -> Iterator[Sequence[bytes]]:
    for contents in segments:
        if len(contents) != width:
            raise ValueError(f"a segment of {len(contents)} streams: there are {width} names")
        yield contents


class _Group:
    """A chunk that several streams share, while it fills."""

    def __init__(self, number: int, data: bytearray) -> None:
        self.number = number
        self.data = data

    def add(self, data: bytes) -> Stream:
        stream = Stream(self.number, len(self.data), len(data))
        self.data += data
        return stream

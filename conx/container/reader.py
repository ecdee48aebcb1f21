"""Reading a file: header and index at once, everything else when it is asked for.

Nothing is believed before it was checked: sizes against the file's before they are read, hashes before what they cover
is parsed, ranges against the chunk table before they are decoded.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from typing import Self

from conx.container.frames import check_frame, decompress
from conx.container.header import HEADER_SIZE, parse_header
from conx.container.index import content_id, parse_index
from conx.container.limits import MAX_SHARED_RAW, MIN_RUN_RAW, decoded_limit
from conx.container.ranges import check_ranges
from conx.container.records import Graph, Stream, Tensor
from conx.container.source import ByteSource, Readable, open_source
from conx.container.table import Chunk, ChunkTable
from conx.errors import ConxError, FormatError, IntegrityError

__all__ = ["Reader", "Verify"]

_CHEAP = 2**16
"""Stored bytes up to which SHA-256 is always checked."""

_KEPT_RAW = 2**22
"""Raw bytes of shared chunks that are kept decoded."""


class Verify(Enum):
    """What is checked of a chunk before it is used: zstd's checksum, or the SHA-256 of its frame as well."""

    CHECKSUM = "checksum"
    FULL = "full"


class Reader:
    """A .conx file opened for reading. Thread-safe, and a context manager that closes.

    Args:
        source: A path, bytes, a seekable binary file object, or a ByteSource.
        verify: What is checked of each chunk.
        max_decoded: Bytes that the file may decode to; None for the format's own limit.

    Attributes:
        name: The file, for people.
        header: The header.
        index: The index.
        file_id: What a detached signature signs: it covers every byte of the file.

    Raises:
        FormatError: the file is damaged or hostile.
        UnsupportedError: it needs a newer conx.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        source: Readable | ByteSource,
        *,
        verify: Verify = Verify.CHECKSUM,
        max_decoded: int | None = None,
    ) -> None:
        self.verify = verify
        self._source = open_source(source)
        self.name = self._source.name
        try:
            with self._naming():
                self._open(max_decoded)
        except BaseException:
            self._source.close()
            raise

    def _open(self, max_decoded: int | None) -> None:
        source = self._source
        self.header = header = parse_header(source.read_at(0, min(HEADER_SIZE, source.size)))
        self.file_id = header.file_id
        if source.size != header.file_size:
            kind = "cut short" if source.size < header.file_size else "has bytes after its end"
            raise FormatError(f"header: file_size is {header.file_size}, the file has {source.size} bytes: {kind}")
        frame = source.read_at(HEADER_SIZE, header.index_stored)
        _check_hash(frame, header.index_sha256, "index")
        self.max_decoded = decoded_limit(source.size) if max_decoded is None else max_decoded
        self.index = parse_index(decompress(frame, header.index_raw, "index"), self.max_decoded)
        pages = self.index.pages
        page = HEADER_SIZE + header.index_stored
        self._page_offsets = []
        for each in pages:
            self._page_offsets.append(page)
            page += each.stored
        end = page + sum(each.data for each in pages)
        if end != source.size:
            raise FormatError(f"index: pages and chunks end at byte {end}, the file at {source.size}")
        self._table = ChunkTable(pages, page, self._load_page)
        self._cache = _ChunkCache()

    @cached_property
    def content_id(self) -> bytes:
        """Names what the file holds, whoever packed it."""
        return content_id(self.index)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._table)

    def chunk(self, number: int) -> bytes:
        """The raw content of a chunk, checked. Raises IndexError where there is no such chunk."""
        with self._naming():
            return self._decode(self._table[number], self.verify is Verify.FULL)

    def row(self, number: int) -> Chunk:
        """A chunk's row of the chunk table: its place, sizes and hash."""
        with self._naming():
            return self._table[number]

    def frame(self, number: int) -> tuple[Chunk, bytes]:
        """A chunk as stored, with its row. SHA-256 is always checked, as decoders on a GPU may crash."""
        with self._naming():
            row = self._table[number]
            frame = self._read(row, hashed=True)
            check_frame(frame, row.raw, f"chunk {number}")
            return row, frame

    def stream(self, stream: Stream) -> bytes:
        """The raw bytes of a stream."""
        with self._naming():
            parts = [self._part(*span) for span in self._spans(stream)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def segment(self, tensor: Tensor, i: int) -> list[bytes]:
        """The main streams of segment `i`."""
        tensor.segment_range(i)
        if tensor.segments == 1:
            return [self.stream(stream) for stream in tensor.streams]
        width = len(tensor.streams)
        return [self.chunk(stream.chunk + i * width) for stream in tensor.streams]

    def side(self, tensor: Tensor) -> list[bytes]:
        """The streams that every segment needs."""
        return [self.stream(stream) for stream in tensor.side]

    def graph(self, graph: Graph) -> bytes:
        """A graph's message without the bytes of its holes.

        Raises:
            IntegrityError: it does not have the SHA-256 that the index says.
        """
        data = self.stream(graph.stream)
        with self._naming():
            _check_hash(data, graph.sha256, f"graph {graph.role} {' '.join(graph.precisions)}".rstrip())
        return data

    def check(self) -> None:
        """Checks what can be checked without decoding chunks: every page, and every stream against the chunk table."""
        with self._naming():
            check_ranges(self.index, self._table.raw_sizes(), self.max_decoded)

    def check_deep(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Checks every byte of the file: `check`, and the hash, frame and checksum of every chunk and graph.

        Args:
            progress: Called with the chunks done and all chunks.
        """
        self.check()
        for number in range(self.chunks):
            with self._naming():
                self._decode(self._table[number], hashed=True)
            if progress is not None:
                progress(number + 1, self.chunks)
        for graph in self.index.graphs:
            self.graph(graph)

    def close(self) -> None:
        """Lets go of the file."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Puts the file's name before the message of an error that has none."""
        try:
            yield
        except ConxError as error:
            text = str(error)
            raise (error if text.startswith(f"{self.name}: ") else type(error)(f"{self.name}: {text}")) from None

    def _load_page(self, number: int) -> bytes:
        page = self.index.pages[number]
        frame = self._source.read_at(self._page_offsets[number], page.stored)
        _check_hash(frame, page.sha256, f"page {number}")
        return decompress(frame, page.raw, f"page {number}")

    def _read(self, row: Chunk, hashed: bool) -> bytes:
        frame = self._source.read_at(row.offset, row.stored)
        if hashed or row.stored <= _CHEAP:
            _check_hash(frame, row.sha256, f"chunk {row.number}")
        return frame

    def _decode(self, row: Chunk, hashed: bool) -> bytes:
        return decompress(self._read(row, hashed), row.raw, f"chunk {row.number}")

    def _spans(self, stream: Stream) -> Iterator[tuple[Chunk, int, int]]:
        """The parts of chunks that a stream is made of, as (row, begin, end)."""
        number, begin, missing = stream.chunk, stream.offset, stream.size
        while missing:
            if number >= len(self._table):
                raise _refuse(stream, f"runs beyond the last of {len(self._table)} chunks")
            row = self._table[number]
            if begin and begin >= row.raw:
                raise _refuse(stream, f"begins beyond chunk {number}, which has {row.raw} bytes")
            end = min(row.raw, begin + missing)
            if end - begin < row.raw and row.raw > MAX_SHARED_RAW:
                raise _refuse(stream, f"uses a part of chunk {number}: {row.raw} bytes are more than {MAX_SHARED_RAW}")
            missing -= end - begin
            if missing and row.raw < MIN_RUN_RAW:
                raise _refuse(stream, f"runs on from chunk {number}: {row.raw} bytes are less than {MIN_RUN_RAW}")
            yield row, begin, end
            number, begin = number + 1, 0

    def _part(self, row: Chunk, begin: int, end: int) -> bytes:
        if end - begin == row.raw:
            return self._decode(row, self.verify is Verify.FULL)
        raw = self._cache.get(row.number)
        if raw is None:
            raw = self._decode(row, self.verify is Verify.FULL)
            self._cache.put(row.number, raw)
        return raw[begin:end]


class _ChunkCache:
    """The shared chunks used last, decoded. Two threads may decode the same one: that is rare and harmless."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._size = 0

    def get(self, number: int) -> bytes | None:
        with self._lock:
            raw = self._kept.get(number)
            if raw is not None:
                self._kept.move_to_end(number)
            return raw

    def put(self, number: int, raw: bytes) -> None:
        with self._lock:
            if number not in self._kept:
                self._kept[number] = raw
                self._size += len(raw)
            while self._size > _KEPT_RAW:
                self._size -= len(self._kept.popitem(last=False)[1])


def _check_hash(data: bytes, sha256: bytes, what: str) -> None:
    found = hashlib.sha256(data).digest()
    if found != sha256:
        raise IntegrityError(f"{what}: SHA-256 is {found.hex()[:16]}…, recorded is {sha256.hex()[:16]}…: damaged")


def _refuse(stream: Stream, rule: str) -> FormatError:
    return FormatError(f"stream {[stream.chunk, stream.offset, stream.size]}: {rule}")

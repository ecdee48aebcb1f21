"""The chunk table: where each chunk lies, how big it is, what it hashes to.

A 140 GB model has half a million rows, so they are packed arrays in pages, loaded when they are first needed, of which
a few are kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from conx.container.limits import MAX_CHUNK_RAW, MAX_CHUNK_STORED, PAGE_ROWS
from conx.container.records import Page
from conx.container.schema import MIN_FRAME
from conx.errors import FormatError

__all__ = ["Chunk", "ChunkTable", "Rows", "parse_rows", "serialize_rows"]

_KEPT_PAGES = 8
_U32 = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row: a chunk's place in the file, its sizes, and the SHA-256 of its frame as stored."""

    number: int
    offset: int
    stored: int
    raw: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a page, column by column: u32 [rows], u32 [rows], 32 bytes for each row."""

    stored: npt.NDArray[np.uint32]
    raw: npt.NDArray[np.uint32]
    sha256: bytes


def serialize_rows(rows: Rows) -> bytes:
    """The raw bytes of a page."""
    return rows.stored.astype(_U32).tobytes() + rows.raw.astype(_U32).tobytes() + rows.sha256


def parse_rows(data: bytes, page: Page, path: str) -> Rows:
    """The rows from the raw bytes of a page.

    Raises:
        FormatError: a size is beyond its limit, or the stored sizes do not add up to what the index says.
    """
    if len(data) != page.raw:
        raise FormatError(f"{path}: {len(data)} bytes for {page.rows} rows: must be {page.raw}")
    stored = np.frombuffer(data, _U32, page.rows)
    raw = np.frombuffer(data, _U32, page.rows, 4 * page.rows)
    _check_column(stored, f"{path}: stored size", MIN_FRAME, MAX_CHUNK_STORED)
    _check_column(raw, f"{path}: raw size", 0, MAX_CHUNK_RAW)
    total = int(stored.sum(dtype=np.uint64))
    if total != page.data:
        raise FormatError(f"{path}: the stored sizes add up to {total}: the index says {page.data}")
    return Rows(stored, raw, data[8 * page.rows :])


def _check_column(column: npt.NDArray[np.uint32], what: str, low: int, high: int) -> None:
    if int(column.min()) < low or int(column.max()) > high:
        row = int(np.argmax((column < low) | (column > high)))
        raise FormatError(f"{what} of row {row} is {column[row]}: must be {low} to {high}")


class ChunkTable:
    """The chunk table of a file, page by page. Thread-safe.

    Args:
        pages: As the index has them.
        data_offset: Where chunk 0 begins.
        load: Gives the raw bytes of a page by its number, hash checked.
    """

    def __init__(self, pages: Sequence[Page], data_offset: int, load: Callable[[int], bytes]) -> None:
        self._pages = pages
        self._offsets = list(accumulate((page.data for page in pages), initial=data_offset))
        self._load = load
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[Rows, npt.NDArray[np.uint64]]] = OrderedDict()
        self._count = sum(page.rows for page in pages)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Chunk:
        """The row of chunk `number`.

        Raises:
            IndexError: there is no such chunk.
            FormatError: its page is damaged.
        """
        if not 0 <= number < self._count:
            raise IndexError(f"chunk {number}: there are {self._count}")
        page, row = divmod(number, PAGE_ROWS)
        rows, ends = self._page(page)
        stored = int(rows.stored[row])
        offset = self._offsets[page] + int(ends[row]) - stored
        return Chunk(number, offset, stored, int(rows.raw[row]), rows.sha256[32 * row : 32 * row + 32])

    def rows(self) -> Iterator[Rows]:
        """All pages in turn, each checked; they are not kept."""
        for number in range(len(self._pages)):
            yield self._parse(number)

    def raw_sizes(self) -> npt.NDArray[np.uint32]:
        """Raw sizes of all chunks; checks every page."""
        columns = [rows.raw.copy() for rows in self.rows()]
        return np.concatenate(columns) if columns else np.empty(0, np.uint32)

    def _page(self, number: int) -> tuple[Rows, npt.NDArray[np.uint64]]:
        """The rows of a page, and where each chunk ends, counted from the page's first."""
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
            rows = self._parse(number)
            entry = rows, np.cumsum(rows.stored, dtype=np.uint64)
            self._kept[number] = entry
            if len(self._kept) > _KEPT_PAGES:
                self._kept.popitem(last=False)
            return entry

    def _parse(self, number: int) -> Rows:
        return parse_rows(self._load(number), self._pages[number], f"page {number}")

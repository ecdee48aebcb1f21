"""One file for each rule of the header that it can break, with the error that it must give."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from conx.container import Reader
from conx.container.limits import MAX_INDEX_RAW, MAX_INDEX_STORED
from conx.errors import ConxError, FormatError, IntegrityError, UnsupportedError
from tests.container.parts import MAGIC, Parts

Mutate = Callable[[Parts], bytes]


def field(**fields: object) -> Mutate:
    def mutate(parts: Parts) -> bytes:
        parts.header = dict(fields)
        return parts.seal()

    return mutate


def sealed(change: Callable[[bytes], bytes]) -> Mutate:
    return lambda parts: change(parts.seal())


HEADERS: dict[str, tuple[Mutate, type[ConxError], str]] = {
    "empty file": (sealed(lambda data: data[:0]), FormatError, "header: magic is : the file is empty"),
    "other magic": (
        field(magic=b"PK\3\4\0\0\0\0"),
        FormatError,
        "header: magic is 50 4b 03 04 00 00 00 00: not a .conx file",
    ),
    "lines ends changed": (
        sealed(lambda data: data.replace(b"\r\n", b"\n")),
        FormatError,
        "by a transfer in text mode",
    ),
    "high bit cleared": (field(magic=b"\tCNX\r\n\x1a\n"), FormatError, "by a transfer in text mode"),
    "Git LFS pointer": (
        sealed(lambda _: b"version https://git-lfs.github.com/spec/v1\n"),
        FormatError,
        "run `git lfs pull`",
    ),
    "cut short in the header": (
        sealed(lambda data: data[:95]),
        FormatError,
        "header: cut short after 95 bytes: it has 96",
    ),
    "only the magic": (sealed(lambda _: MAGIC), FormatError, "header: cut short after 8 bytes: it has 96"),
    "major 0": (field(major=0), UnsupportedError, "header: major is 0: this conx reads version 1"),
    "major 2": (field(major=2, flags=7), UnsupportedError, "header: major is 2: this conx reads version 1, a newer"),
    "reserved at 10": (field(reserved=1), FormatError, "header: reserved is 0x1: must be 0"),
    "reserved at 80": (field(tail=bytes(15) + b"\x80"), FormatError, "header: reserved is 0x80000000000000"),
    "a flag": (field(flags=0x80000000), FormatError, "header: flags is 0x80000000: must be 0"),
    "index offset": (field(index_offset=97), FormatError, "header: index_offset is 97: must be 96"),
    "index stored 0": (
        field(index_stored=0),
        FormatError,
        f"header: index_stored is 0: must be 1 to {MAX_INDEX_STORED}",
    ),
    "index stored too big": (
        field(index_stored=MAX_INDEX_STORED + 1, file_size=2**40),
        FormatError,
        f"header: index_stored is {MAX_INDEX_STORED + 1}: must be 1 to {MAX_INDEX_STORED}",
    ),
    "index beyond the file": (field(index_stored=2**20), FormatError, "header and index have 1048672"),
    "index raw 0": (field(index_raw=0), FormatError, f"header: index_raw is 0: must be 1 to {MAX_INDEX_RAW}"),
    "index raw too big": (
        field(index_raw=MAX_INDEX_RAW + 1),
        FormatError,
        f"header: index_raw is {MAX_INDEX_RAW + 1}: must be 1 to {MAX_INDEX_RAW}",
    ),
    "index raw against stored": (field(index_raw=2**21), FormatError, "at most 1048576 + 64 · index_stored"),
    "index raw another": (field(index_raw=5), FormatError, "index: the frame states"),
    "index hash": (field(index_sha256=bytes(32)), IntegrityError, "index: SHA-256 is"),
    "file longer": (sealed(lambda data: data + b"\0"), FormatError, "has bytes after its end"),
    "file shorter": (sealed(lambda data: data[:-1]), FormatError, "cut short"),
    "bytes after the last chunk": (
        lambda parts: replace(parts, tail=b"tail").seal(),
        FormatError,
        "index: pages and chunks end at byte",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_malformed_header(parts: Parts, name: str) -> None:
    mutate, kind, text = HEADERS[name]
    data = mutate(parts)
    with pytest.raises(kind, match=re.escape(text)) as caught:
        Reader(data)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("<bytes>: ")
    assert "\n" not in str(caught.value)

"""The fixed header: 96 bytes, from which everything else is found and through whose hash everything is covered."""

import hashlib
import struct
from dataclasses import dataclass

from conx.container.limits import INDEX_EXPANSION, INDEX_FREE_RAW, MAX_INDEX_RAW, MAX_INDEX_STORED
from conx.errors import FormatError, UnsupportedError

__all__ = ["HEADER_SIZE", "MAGIC", "MAJOR", "Header", "begins_like_conx", "parse_header", "serialize_header"]

MAGIC = b"\x89CNX\r\n\x1a\n"
MAJOR = 1
HEADER_SIZE = 96

_DAMAGED = 2  # bytes of the magic that may be wrong

_LAYOUT = struct.Struct("<8sHHIQQQ32sQ16s")


@dataclass(frozen=True, slots=True)
class Header:
    """Where the index lies, what it hashes to, and how long the file is.

    Attributes:
        index_stored: Bytes of the index's frame, which begins right after the header.
        index_raw: Bytes of the index once decompressed.
        index_sha256: SHA-256 of the index's frame as stored.
        file_size: Bytes of the whole file.
    """

    index_stored: int
    index_raw: int
    index_sha256: bytes
    file_size: int

    @property
    def file_id(self) -> bytes:
        """SHA-256 of the header. Through the hashes in header, index and pages it covers every byte of the file."""
        return hashlib.sha256(serialize_header(self)).digest()


def begins_like_conx(head: bytes) -> bool:
    """Whether a file's first bytes are the magic, perhaps damaged or cut short: rather a broken .conx than an .onnx."""
    equal = sum(a == b for a, b in zip(head, MAGIC, strict=False))
    return equal >= len(MAGIC) - _DAMAGED or equal == len(head) > 0


def serialize_header(header: Header) -> bytes:
    """The 96 bytes."""
    return _LAYOUT.pack(
        MAGIC,
        MAJOR,
        0,
        0,
        HEADER_SIZE,
        header.index_stored,
        header.index_raw,
        header.index_sha256,
        header.file_size,
        bytes(16),
    )


def parse_header(data: bytes) -> Header:
    """The header from the first 96 bytes of a file (fewer where the file has no more).

    Raises:
        FormatError: the bytes break a rule of the format.
        UnsupportedError: they belong to another major version.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError(f"header: magic is {data[: len(MAGIC)].hex(' ')}: {_diagnosis(data)}")
    if len(data) < HEADER_SIZE:
        raise FormatError(f"header: cut short after {len(data)} bytes: it has {HEADER_SIZE}")
    _, major, reserved, flags, offset, stored, raw, sha256, size, tail = _LAYOUT.unpack(data)
    if major != MAJOR:
        raise UnsupportedError(f"header: major is {major}: this conx reads version {MAJOR}, a newer one is needed")
    for field, value in (("reserved", reserved), ("flags", flags), ("reserved", int.from_bytes(tail, "little"))):
        if value:
            raise FormatError(f"header: {field} is {value:#x}: must be 0")
    if offset != HEADER_SIZE:
        raise FormatError(f"header: index_offset is {offset}: must be {HEADER_SIZE}")
    if not 1 <= stored <= MAX_INDEX_STORED:
        raise FormatError(f"header: index_stored is {stored}: must be 1 to {MAX_INDEX_STORED}")
    if not 1 <= raw <= min(MAX_INDEX_RAW, INDEX_FREE_RAW + INDEX_EXPANSION * stored):
        raise FormatError(
            f"header: index_raw is {raw}: must be 1 to {MAX_INDEX_RAW} and at most "
            f"{INDEX_FREE_RAW} + {INDEX_EXPANSION} · index_stored"
        )
    if size < HEADER_SIZE + stored:
        raise FormatError(f"header: file_size is {size}: header and index have {HEADER_SIZE + stored}")
    return Header(stored, raw, sha256, size)


def _diagnosis(data: bytes) -> str:
    """What a file that is not ours probably is."""
    if data.startswith((b"\x89CNX", b"\tCNX")):
        return "damaged, as by a transfer in text mode; transfer the file as binary"
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; run `git lfs pull`"
    if not data:
        return "the file is empty"
    return "not a .conx file"

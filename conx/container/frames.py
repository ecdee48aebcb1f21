"""Frames: one standard zstd frame each, of which nothing is left open.

The frame header is determined by the raw size alone (one segment, content size in its shortest field, checksum, no
dictionary), so it is compared, not interpreted, and a decoder needs no more memory than the content has. The size is
compared *before* decoding because python-zstandard allocates whatever a frame states.
"""

import threading

import zstandard

from conx.container.schema import MIN_FRAME
from conx.errors import FormatError, IntegrityError

__all__ = ["EMPTY_FRAME", "check_frame", "decompress", "frame_header"]

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = b"\x2a\x4d\x18"

_SINGLE_SEGMENT = 0x20
_UNUSED = 0x10
_RESERVED = 0x08
_CHECKSUM = 0x04
_DICTIONARY = 0x03

EMPTY_FRAME = bytes.fromhex("28b52ffd 24 00 010000 99e9d851")
"""The one frame for no bytes: a raw block of size 0. python-zstandard does not look at such frames at all."""

_local = threading.local()


def frame_header(raw_size: int) -> bytes:
    """The magic number and frame header of a frame for `raw_size` bytes (RFC 8878, 3.1.1)."""
    if raw_size < 256:
        code, field = 0, raw_size.to_bytes(1, "little")
    elif raw_size < 65536 + 256:
        code, field = 1, (raw_size - 256).to_bytes(2, "little")
    else:
        code, field = 2, raw_size.to_bytes(4, "little")
    return _MAGIC + bytes([code << 6 | _SINGLE_SEGMENT | _CHECKSUM]) + field


def check_frame(frame: bytes, raw_size: int, what: str) -> None:
    """Refuses a frame whose header is not the one for `raw_size` bytes.

    Raises:
        FormatError: with `what` and the reason.
    """
    if len(frame) < MIN_FRAME:
        raise FormatError(f"{what}: {len(frame)} bytes are no frame: the smallest has {MIN_FRAME}")
    if not frame.startswith(frame_header(raw_size)):
        raise FormatError(f"{what}: {_diagnosis(frame, raw_size)}")
    if not raw_size and frame != EMPTY_FRAME:
        raise FormatError(f"{what}: a frame without content must be {EMPTY_FRAME.hex()}")


def decompress(frame: bytes, raw_size: int, what: str) -> bytes:
    """The content of a frame.

    Args:
        frame: The frame and nothing more.
        raw_size: Bytes that the content must have; the caller has checked it against a limit.
        what: Names the frame in errors.

    Raises:
        IntegrityError: the content does not have the frame's checksum.
        FormatError: the frame breaks a rule, or states another size.
    """
    check_frame(frame, raw_size, what)
    if not raw_size:
        return b""
    try:
        raw = _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        kind = IntegrityError if "checksum" in str(error) else FormatError
        raise kind(f"{what}: zstd: {error}") from None
    if len(raw) != raw_size:
        raise FormatError(f"{what}: decompresses to {len(raw)} bytes, not {raw_size}")
    return raw


def _decompressor() -> zstandard.ZstdDecompressor:
    """A decompressor of this thread's own: they are not to be shared, and making one costs as much as a small frame."""
    try:
        decompressor: zstandard.ZstdDecompressor = _local.decompressor
    except AttributeError:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    return decompressor


def _diagnosis(frame: bytes, raw_size: int) -> str:
    """Which rule a frame header breaks first."""
    if frame[1:4] == _SKIPPABLE and frame[0] >> 4 == 5:
        return "a skippable frame: must be a zstd frame"
    if not frame.startswith(_MAGIC):
        return f"magic number is {frame[:4].hex(' ')}: must be {_MAGIC.hex(' ')}"
    descriptor = frame[4]
    if descriptor & _DICTIONARY:
        return "the frame has a dictionary id: must have none"
    if descriptor & (_RESERVED | _UNUSED):
        return f"frame header descriptor is {descriptor:#04x}: the unused and the reserved bit must be zero"
    if not descriptor & _CHECKSUM:
        return "the frame has no content checksum: must have one"
    if not descriptor & _SINGLE_SEGMENT:
        return "the frame is not of a single segment: must be"
    width = 1 << (descriptor >> 6)
    size = int.from_bytes(frame[5 : 5 + width], "little") + (256 if width == 2 else 0)
    if size != raw_size:
        return f"the frame states {size} bytes of content: must be {raw_size}"
    return f"content size {size} is written in {width} bytes: must be the shortest field"

"""Chunk table, frames and streams: one file for each rule that they can break, with the error that it must give."""

import re
import struct
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from conx.container import Reader, Tensor, Verify
from conx.container.frames import EMPTY_FRAME, check_frame, decompress, frame_header
from conx.container.limits import MAX_CHUNK_RAW, MAX_CHUNK_STORED, MAX_SHARED_RAW, MIN_RUN_RAW
from conx.errors import ConxError, FormatError, IntegrityError
from tests.container.parts import SOURCE, Parts, compress, minimal, sha256

RAW = b"abc" * 1000
CHECKSUM = 4


def options(data: bytes = RAW, **changes: int) -> bytes:
    """A frame of `data` that differs in how it is written."""
    fields = {"write_content_size": 1, "write_checksum": 1, "write_dict_id": 0, "window_log": 25} | changes
    return zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**fields)).compress(data)


def patched(at: int, value: int, frame: bytes | None = None) -> bytes:
    frame = compress(RAW) if frame is None else frame
    return frame[:at] + bytes([value]) + frame[at + 1 :]


def several_blocks(data: bytes) -> bytes:
    """A frame of raw blocks of one byte, as a hostile or poor compressor may write it."""
    body = b"".join((1 << 3 | (i + 1 == len(data))).to_bytes(3, "little") + data[i : i + 1] for i in range(len(data)))
    return frame_header(len(data)) + body + compress(data)[-CHECKSUM:]


DICTIONARY = zstandard.ZstdCompressionDict(b"abc" * 1000, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
FULL_DICTIONARY = zstandard.train_dictionary(2**12, [bytes([i % 7, i % 5, i % 3] * 50) for i in range(2000)])
WITH_DICTIONARY_ID = zstandard.ZstdCompressor(
    dict_data=FULL_DICTIONARY, write_checksum=True, write_content_size=True, write_dict_id=True
).compress(RAW)
WIDE_SIZE = frame_header(256)[:4] + bytes([0xA4]) + (3000).to_bytes(4, "little") + compress(RAW)[7:]
BLOCKS = 300 * 2**20 // 2**17
BOMB = frame_header(300 * 2**20) + b"".join(
    (2**17 << 3 | 1 << 1 | (i + 1 == BLOCKS)).to_bytes(3, "little") + b"\0" for i in range(BLOCKS)
) + bytes(CHECKSUM)  # fmt: skip
"""9.6 KB that python-zstandard makes 300 MB of, whatever `max_output_size` says."""

FRAMES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "c: 0 bytes are no frame: the smallest has 13"),
    "12 bytes": (compress(RAW)[:12], "c: 12 bytes are no frame"),
    "cut short": (compress(RAW)[:-1], "c: zstd: decompression error: "),
    "trailing byte": (compress(RAW) + b"\0", "c: zstd: compressed input contains 1 bytes of unused data"),
    "two frames": (compress(RAW) * 2, "bytes of unused data"),
    "an empty frame after it": (compress(RAW) + EMPTY_FRAME, "c: zstd: compressed input contains 13 bytes"),
    "a skippable frame after it": (
        compress(RAW) + b"\x50\x2a\x4d\x18\0\0\0\0",
        "c: zstd: compressed input contains 8 bytes",
    ),
    "a skippable frame before it": (
        b"\x5f\x2a\x4d\x18\0\0\0\0" + compress(RAW),
        "c: a skippable frame: must be a zstd",
    ),
    "another magic": (b"PK\3\4" + bytes(20), "c: magic number is 50 4b 03 04: must be 28 b5 2f fd"),
    "magic of version 0.7": (patched(0, 0x27), "c: magic number is 27 b5 2f fd: must be 28 b5 2f fd"),
    "dictionary id": (WITH_DICTIONARY_ID, "c: the frame has a dictionary id: must have none"),
    "reserved bit": (
        patched(4, 0x6C),
        "c: frame header descriptor is 0x6c: the unused and the reserved bit must be zero",
    ),
    "unused bit": (
        patched(4, 0x74),
        "c: frame header descriptor is 0x74: the unused and the reserved bit must be zero",
    ),
    "no checksum": (options(write_checksum=0), "c: the frame has no content checksum: must have one"),
    "no content size": (options(write_content_size=0), "c: the frame is not of a single segment: must be"),
    "several segments": (options(window_log=10), "c: the frame is not of a single segment: must be"),
    "content size in a long field": (
        WIDE_SIZE,
        "c: content size 3000 is written in 4 bytes: must be the shortest field",
    ),
    "another size": (compress(RAW + b"x"), "c: the frame states 3001 bytes of content: must be 3000"),
    "300 MB": (BOMB, "c: the frame states 314572800 bytes of content: must be 3000"),
    "a reserved block type": (patched(7, 0x07), "c: zstd: decompression error: "),
    "size in the header only": (frame_header(3000) + EMPTY_FRAME[6:], "c: zstd: decompression error: "),
    "more than the header says": (frame_header(3000) + compress(RAW + b"x")[7:], "c: zstd: decompression error: "),
}


@pytest.mark.parametrize("name", FRAMES)
def test_malformed_frame(name: str) -> None:
    frame, text = FRAMES[name]
    with pytest.raises(FormatError, match=re.escape(text)) as caught:
        decompress(frame, len(RAW), "c")
    assert "\n" not in str(caught.value)


def test_the_bomb_is_one() -> None:
    assert len(BOMB) < 10_000
    assert zstandard.get_frame_parameters(BOMB).content_size == 300 * 2**20
    with pytest.raises(zstandard.ZstdError, match="checksum"):  # after it has decompressed everything
        zstandard.ZstdDecompressor().decompress(BOMB, max_output_size=3000)


def test_a_dictionary_without_id_gives_another_content() -> None:
    frame = zstandard.ZstdCompressor(dict_data=DICTIONARY, write_checksum=True).compress(RAW)
    with pytest.raises(FormatError):
        decompress(frame, len(RAW), "c")


@pytest.mark.parametrize("at", range(1, CHECKSUM + 1))
def test_a_wrong_checksum_is_an_integrity_error(at: int) -> None:
    frame = compress(RAW)
    with pytest.raises(IntegrityError, match="checksum"):
        decompress(patched(len(frame) - at, frame[-at] ^ 1), len(RAW), "c")


@pytest.mark.parametrize(
    "frame", [EMPTY_FRAME + b"\0", EMPTY_FRAME[:-1] + b"\0", EMPTY_FRAME[:6] + b"\3\0\0" + EMPTY_FRAME[9:]]
)
def test_the_frame_without_content_is_fixed(frame: bytes) -> None:
    assert decompress(EMPTY_FRAME, 0, "c") == b""
    with pytest.raises(FormatError, match="c: a frame without content must be 28b52ffd240001000099e9d8"):
        decompress(frame, 0, "c")


def test_frames_of_any_standard_compressor_are_read() -> None:
    assert decompress(several_blocks(RAW), len(RAW), "c") == RAW
    assert decompress(several_blocks(b"a"), 1, "c") == b"a"


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65791, 65792, 2**20, 2**24])
def test_the_header_follows_from_the_size(size: int) -> None:
    frame = compress(bytes(size))
    assert frame.startswith(frame_header(size))
    check_frame(frame, size, "c")
    assert decompress(frame, size, "c") == bytes(size)


# What breaks in a whole file. The first page covers all chunks.


def stored_size(row: int, value: int) -> Callable[[Parts], None]:
    def mutate(parts: Parts) -> None:
        page = bytearray(parts.page_content(0))
        struct.pack_into("<I", page, 4 * row, value)
        parts.raw_pages[0] = bytes(page)

    return mutate


def raw_size(row: int, value: int) -> Callable[[Parts], None]:
    def mutate(parts: Parts) -> None:
        parts.raws[row] = value

    return mutate


def short_page(parts: Parts) -> None:
    content = parts.page_content(0)[:-1]
    frame = compress(content)
    parts.raw_pages[0] = content
    parts.pages = [[len(parts.frames), len(frame), len(content) + 1, sum(map(len, parts.frames)), sha256(frame)]]


def page_hash(parts: Parts) -> None:
    frame = compress(parts.page_content(0))
    parts.pages = [[len(parts.frames), len(frame), 40 * len(parts.frames), sum(map(len, parts.frames)), bytes(32)]]


TABLES: dict[str, tuple[Callable[[Parts], None], type[ConxError], str]] = {
    "page hash": (page_hash, IntegrityError, "page 0: SHA-256 is "),
    "page too short": (short_page, FormatError, "page 0: the frame states 399 bytes of content: must be 400"),
    "stored too small": (stored_size(3, 12), FormatError, "page 0: stored size of row 3 is 12: must be 13 to"),
    "stored too big": (
        stored_size(4, MAX_CHUNK_STORED + 1),
        FormatError,
        f"page 0: stored size of row 4 is {MAX_CHUNK_STORED + 1}: must be 13 to {MAX_CHUNK_STORED}",
    ),
    "raw too big": (
        raw_size(5, MAX_CHUNK_RAW + 1),
        FormatError,
        f"page 0: raw size of row 5 is {MAX_CHUNK_RAW + 1}: must be 0 to {MAX_CHUNK_RAW}",
    ),
    "stored sizes add up to less": (stored_size(0, 13), FormatError, "page 0: the stored sizes add up to "),
}


@pytest.mark.parametrize("name", TABLES)
def test_malformed_table(parts: Parts, name: str) -> None:
    mutate, kind, text = TABLES[name]
    mutate(parts)
    with Reader(parts.seal()) as reader:
        for call in (reader.check, reader.check_deep, lambda: reader.chunk(0)):
            with pytest.raises(kind, match=re.escape(f"<bytes>: {text}")) as caught:
                call()
            assert type(caught.value) is kind


def set_frame(number: int, frame: bytes) -> Callable[[Parts], None]:
    def mutate(parts: Parts) -> None:
        parts.frames[number] = frame

    return mutate


CHUNKS: dict[str, tuple[Callable[[Parts], None], type[ConxError], str]] = {
    "chunk hash": (lambda parts: parts.hashes.update({8: bytes(32)}), IntegrityError, "chunk 8: SHA-256 is "),
    "raw size": (raw_size(8, 5), FormatError, "chunk 8: the frame states 4 bytes of content: must be 5"),
    "300 MB": (set_frame(8, BOMB), FormatError, "chunk 8: the frame states 314572800 bytes of content: must be 4"),
    "trailing data": (
        set_frame(8, compress(b"\0\0\x80\x3f") + b"\0"),
        FormatError,
        "chunk 8: zstd: compressed input contains",
    ),
    "a skippable frame": (set_frame(8, b"\x50\x2a\x4d\x18" + bytes(20)), FormatError, "chunk 8: a skippable frame"),
    "checksum": (set_frame(8, compress(b"\0\0\x80\x3f")[:-1] + b"\0"), IntegrityError, "chunk 8: zstd: "),
}


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("name", CHUNKS)
def test_malformed_chunk(parts: Parts, name: str, verify: Verify) -> None:
    mutate, kind, text = CHUNKS[name]
    mutate(parts)
    with Reader(parts.seal(), verify=verify) as reader:
        fill = reader.index.tensors[2]
        assert fill.side[0].chunk == 8
        for call in (reader.check_deep, lambda: reader.chunk(8), lambda: reader.side(fill)):
            with pytest.raises(kind, match=re.escape(f"<bytes>: {text}")) as caught:
                call()
            assert type(caught.value) is kind
        if name not in {"checksum", "trailing data"}:  # which only a decoder sees
            with pytest.raises(kind, match="chunk 8: "):
                reader.frame(8)


def test_big_chunks_are_hashed_when_all_is_verified() -> None:
    data = np.random.default_rng(0).integers(0, 256, 2**17, np.uint8).tobytes()
    parts = minimal(contents=[SOURCE, data])
    parts.hashes[1] = bytes(32)
    assert Reader(parts.seal()).chunk(1) == data
    for call in (Reader(parts.seal(), verify=Verify.FULL).chunk, Reader(parts.seal()).frame):
        with pytest.raises(IntegrityError, match="chunk 1: SHA-256"):
            call(1)
    with pytest.raises(IntegrityError, match="chunk 1: SHA-256"):
        Reader(parts.seal()).check_deep()


def one_stream(stream: list[int], contents: list[bytes]) -> Parts:
    """A file with a tensor of one stream, and these chunks after the graph's."""
    tensor = {
        "codec": "raw",
        "dtype": "uint8",
        "name": "t",
        "params": {},
        "sha256": bytes(32),
        "shape": [4],
        "streams": [stream],
    }
    return minimal({"features": ["codec:raw", "draft-2"], "tensors": [tensor]}, [SOURCE, *contents])


SMALL = bytes(MIN_RUN_RAW - 1)
BIG = bytes(MAX_SHARED_RAW + 1)

STREAMS: dict[str, tuple[Parts, str]] = {
    "begins beyond its chunk": (one_stream([1, 4, 4], [b"abcd", b"efgh"]), "begins beyond chunk 1, which has 4 bytes"),
    "begins in an empty chunk": (one_stream([1, 0, 4], [b"", b"efgh"]), ""),
    "runs beyond the last": (one_stream([1, 1, 4], [b"abcd"]), ""),
    "runs beyond the last of 2": (
        one_stream([1, 0, 2**17 + 1], [bytes(2**16), bytes(2**16)]),
        "runs beyond the last of 3 chunks",
    ),
    "runs on from a small chunk": (
        one_stream([1, 1, 2**16], [SMALL, b"abcd"]),
        "runs on from chunk 1: 65535 bytes are less than 65536",
    ),
    "runs on from a small chunk in the middle": (
        one_stream([1, 0, 2**17 + 1], [bytes(2**16), SMALL, bytes(10)]),
        "runs on from chunk 2: 65535 bytes are less than 65536",
    ),
    "a part of a big chunk": (
        one_stream([1, 0, 2**20], [BIG]),
        "uses a part of chunk 1: 1048577 bytes are more than 1048576",
    ),
    "the end of a big chunk": (one_stream([1, 1, 2**20], [BIG]), "uses a part of chunk 1: 1048577 bytes are more than"),
    "a part of a big chunk after another": (
        one_stream([1, 0, 2**20 + 2], [BIG, BIG]),
        "uses a part of chunk 2: 1048577 bytes are more than 1048576",
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_malformed_stream(name: str) -> None:
    parts, text = STREAMS[name]
    with Reader(parts.seal()) as reader:
        tensor: Tensor = reader.index.tensors[0]
        stream = tensor.streams[0]
        shown = str([stream.chunk, stream.offset, stream.size])
        for call in (reader.check, reader.check_deep):
            with pytest.raises(FormatError, match=re.escape(f"tensors[0].streams[0] is {shown}: {text}")):
                call()
        with pytest.raises(FormatError, match=re.escape(f"<bytes>: stream {shown}: {text}")):
            reader.segment(tensor, 0)


@pytest.mark.parametrize(
    ("stream", "contents"),
    [
        ([1, 0, 2**16 + 4], [bytes(2**16), b"abcd"]),
        ([1, 9, 2**16 - 5], [bytes(2**16), b"abcdef"]),
        ([1, 2**20 - 1, 1], [bytes(2**20)]),
        ([1, 0, 2**21 + 2], [BIG, BIG]),
        ([1, 0, 2**20 + 1], [BIG]),
        ([1, 0, 1], [b"a", b"b"]),
    ],
)
def test_streams_at_the_limits(stream: list[int], contents: list[bytes]) -> None:
    with Reader(one_stream(stream, contents).seal()) as reader:
        reader.check_deep()
        expected = b"".join(contents)[stream[1] : stream[1] + stream[2]]
        assert reader.segment(reader.index.tensors[0], 0) == [expected]


def test_sizes_of_several_segments(parts: Parts) -> None:
    parts.index["tensors"][0]["streams"][1][2] = 16
    with (
        Reader(parts.seal()) as reader,
        pytest.raises(FormatError, match=re.escape("tensors[0].streams[1] is [2, 0, 16]: its chunks have 15 bytes")),
    ):
        reader.check()


def test_streams_of_graph_and_side_are_checked(parts: Parts) -> None:
    parts.index["graphs"][1]["stream"] = [9, 104, 8]
    with (
        Reader(parts.seal()) as reader,
        pytest.raises(FormatError, match=re.escape("graphs[1].stream is [9, 104, 8]: runs beyond")),
    ):
        reader.check()
    parts.index["graphs"][1]["stream"] = [9, 54, 51]
    parts.index["tensors"][0]["side"] = [[0, 16, 1]]
    with (
        Reader(parts.seal()) as reader,
        pytest.raises(FormatError, match=re.escape("tensors[0].side[0] is [0, 16, 1]: begins beyond chunk 0")),
    ):
        reader.check()


def test_the_hash_of_a_graph(parts: Parts) -> None:
    parts.index["graphs"][1]["sha256"] = bytes(32)
    with Reader(parts.seal()) as reader:
        for call in (reader.check_deep, lambda: reader.graph(reader.index.graphs[1])):
            with pytest.raises(IntegrityError, match="<bytes>: graph run fp32 original: SHA-256 is "):
                call()
        assert reader.graph(reader.index.source) == SOURCE


def test_all_chunks_together_are_bounded() -> None:
    frame = compress(bytes(2**24))
    parts = minimal()
    parts.frames += [frame] * 70
    parts.raws += [2**24] * 70
    with (
        Reader(parts.seal()) as reader,
        pytest.raises(FormatError, match="chunks decompress to 1174405174 bytes: at most 1073741824, unless the limit"),
    ):
        reader.check_deep()


def test_there_is_no_such_chunk(small: bytes) -> None:
    with Reader(small) as reader:
        for number in (-1, reader.chunks):
            with pytest.raises(IndexError, match=f"chunk {number}: there are 10"):
                reader.chunk(number)

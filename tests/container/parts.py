"""A small file, and a file taken apart so that tests can break one thing and seal the rest again.

Written from `spec/conx.md` with zstandard and msgpack alone, so it also checks the reader and the writer from outside.
"""

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zstandard

from conx.container import External, Graph, Hole, Tensor, Writer
from conx.dtypes import DType

PAGE_ROWS = 4096
HEADER = struct.Struct("<8sHHIQQQ32sQ16s")
MAGIC = b"\x89CNX\r\n\x1a\n"
FEATURES = ["codec:fill", "codec:linear", "codec:raw", "draft-2"]


def compress(data: bytes) -> bytes:
    """A frame as the format wants it."""
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=3, window_log=25, write_content_size=1, write_checksum=1, write_dict_id=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(data)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass
class Parts:
    """A file in pieces. Whatever is None follows from the others when the file is sealed."""

    index: dict[str, Any]
    frames: list[bytes]
    raws: list[int]
    header: dict[str, Any] = field(default_factory=dict)
    raw_pages: dict[int, bytes] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    pages: list[Any] | None = None
    raw_index: bytes | None = None
    index_frame: bytes | None = None
    tail: bytes = b""

    def put(self, number: int, content: bytes) -> None:
        """Gives a chunk another content."""
        self.frames[number], self.raws[number] = compress(content), len(content)

    def page_content(self, first: int) -> bytes:
        """The raw bytes of the page that begins with chunk `first`."""
        frames, raws = self.frames[first : first + PAGE_ROWS], self.raws[first : first + PAGE_ROWS]
        hashes = [self.hashes.get(first + i, sha256(frame)) for i, frame in enumerate(frames)]
        stored = struct.pack(f"<{len(frames)}I", *map(len, frames))
        return stored + struct.pack(f"<{len(raws)}I", *raws) + b"".join(hashes)

    def seal(self) -> bytes:
        """The file."""
        pages, page_frames = [], []
        for i, first in enumerate(range(0, len(self.frames), PAGE_ROWS)):
            rows = self.frames[first : first + PAGE_ROWS]
            raw = self.raw_pages.get(i, self.page_content(first))
            frame = compress(raw)
            pages.append([len(rows), len(frame), len(raw), sum(map(len, rows)), sha256(frame)])
            page_frames.append(frame)
        index = dict(sorted((self.index | {"pages": pages if self.pages is None else self.pages}).items()))
        raw_index = msgpack.packb(index) if self.raw_index is None else self.raw_index
        index_frame = compress(raw_index) if self.index_frame is None else self.index_frame
        body = index_frame + b"".join(page_frames) + b"".join(self.frames) + self.tail
        fields = {
            "magic": MAGIC,
            "major": 1,
            "reserved": 0,
            "flags": 0,
            "index_offset": 96,
            "index_stored": len(index_frame),
            "index_raw": len(raw_index),
            "index_sha256": sha256(index_frame),
            "file_size": 96 + len(body),
            "tail": bytes(16),
        }
        return HEADER.pack(*(fields | self.header).values()) + body


def take_apart(data: bytes) -> Parts:
    """The pieces of a file, without any check."""
    _, _, _, _, offset, stored, _, _, _, _ = HEADER.unpack(data[:96])
    decompress = zstandard.ZstdDecompressor().decompress
    index = msgpack.unpackb(decompress(data[offset : offset + stored]))
    at = offset + stored
    sizes: list[int] = []
    raws: list[int] = []
    for rows, page_stored, _, _, _ in index["pages"]:
        page = decompress(data[at : at + page_stored])
        sizes += struct.unpack_from(f"<{rows}I", page)
        raws += struct.unpack_from(f"<{rows}I", page, 4 * rows)
        at += page_stored
    frames = []
    for size in sizes:
        frames.append(data[at : at + size])
        at += size
    del index["pages"]
    return Parts(index, frames, raws)


SEGMENTS = [(bytes([i]) * 1024, b"e" * (5 * i)) for i in range(3)]
"""Main streams of three segments, the second one empty in the first segment."""

SOURCE = b"\x08\x0asource graph" + b"node" * 10
RUN = b"\x08\x0arun graph" + b"node" * 10
SCALES = np.arange(4, dtype="<f4").tobytes()
VALUES = np.arange(6, dtype="<f4").tobytes()


def write(path: Path, executor: Executor | None = None, metadata: dict[str, Any] | None = None) -> bytes:
    """Writes the small file, which has one of everything; gives its file_id."""
    with Writer(path, executor) as writer:
        graphs, tensors = add_content(writer)
        return writer.finish(FEATURES, graphs, tensors, metadata or {"producer": "test"})


def add_content(writer: Writer) -> tuple[list[Graph], list[Tensor]]:
    """Adds what the small file has."""
    big = Tensor(
        name="big",
        shape=(3, 1000),
        dtype=DType.FLOAT32,
        codec="linear",
        params={"code": "int8", "pack": 2},
        side=(writer.add_stream(SCALES, "scales"),),
        streams=writer.add_segments(["nibbles", "escapes"], SEGMENTS),
        sha256=sha256(b"big"),
        order=(1, 0),
        segment=1024,
    )
    small = Tensor("small", (2, 3), DType.FLOAT32, "raw", {}, (), (writer.add_stream(VALUES, "raw"),), sha256(VALUES))
    value = writer.add_stream(b"\0\0\x80\x3f", "value")
    fill = Tensor("fill", (70000, 7), DType.FLOAT32, "fill", {}, (value,), (), sha256(b"fill"))
    empty = Tensor("empty", (0, 4), DType.INT4, "raw", {}, (), writer.add_segments(["raw"], []), sha256(b""))
    graphs = [
        Graph(
            "source",
            (),
            writer.add_graph(SOURCE),
            sha256(SOURCE),
            holes=(Hole(4, tensor=0), Hole(9, tensor=1, perm=(1, 0)), Hole(9, tensor=3)),
        ),
        Graph(
            "run",
            ("fp32", "original"),
            writer.add_graph(RUN),
            sha256(RUN),
            externals=(
                External("w0", "layer.0/weight", True, tensor=0, dtype=DType.FLOAT16),
                External("w1", "layer.1/weight", tensor=1, perm=(1, 0), shape=(6,)),
            ),
        ),
    ]
    return graphs, [big, small, fill, empty]


def minimal(index: dict[str, Any] | None = None, contents: Sequence[bytes] = (SOURCE,)) -> Parts:
    """The pieces of a file with a source graph, which is chunk 0, and no tensors."""
    source = {"precisions": [], "role": "source", "sha256": sha256(SOURCE), "stream": [0, 0, len(SOURCE)]}
    base = {"features": ["draft-2"], "graphs": [source], "metadata": {}, "tensors": []}
    return Parts(base | (index or {}), [compress(each) for each in contents], [len(each) for each in contents])

"""A 140 GB model is opened in little memory: half a million chunks, ten thousand tensors, three graphs."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conx.container import External, Graph, Hole, Index, Page, Stream, Tensor
from conx.container.candidates import HUFFMAN, compress
from conx.container.header import HEADER_SIZE, Header, serialize_header
from conx.container.index import serialize_index
from conx.container.limits import PAGE_ROWS
from conx.container.table import Rows, serialize_rows
from conx.dtypes import DType
from tests.container.parts import sha256

ROOT = Path(__file__).resolve().parents[2]
TENSORS, SEGMENTS, SEGMENT = 10_000, 50, 2**18
STORED = 280_000

MEASURE = """
import re, resource, sys, time
from pathlib import Path
from conx.container import Reader
begin = time.perf_counter()
with Reader(sys.argv[1]) as reader:
    opened = time.perf_counter() - begin
    tensors = reader.index.tensors
    for tensor in tensors[::500]:
        stream = tensor.streams[0]
        row = reader.row(stream.chunk + tensor.segments - 1)
        assert row.raw == 2**18
    reader.check()
    assert reader.chunks > 500_000 and len(reader.index.graphs) == 3
    assert reader.header.file_size > 140e9
    assert len(reader.content_id) == 32
status = Path("/proc/self/status")
if status.exists():  # on Linux, ru_maxrss counts the process that this one was forked from
    peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(peak, opened)
"""


def build(path: Path) -> None:
    """The file without its chunks: a hole of 140 GB where the file system has such."""
    rng = random.Random(0)
    tensors = tuple(
        Tensor(
            name=f"model.layers.{i // 9}.mlp.experts.{i % 9}.down_proj.weight",
            shape=(SEGMENTS * 64, 4096),
            dtype=DType.BFLOAT16,
            codec="linear",
            params={"axis": 0, "base": 0.0123, "code": "int8", "pack": 1, "scale": "log8"},
            side=(Stream(0, 0, SEGMENTS * 64),),
            streams=(Stream(1 + i * SEGMENTS, 0, SEGMENTS * SEGMENT),),
            sha256=rng.randbytes(32),
            order=(1, 0),
        )
        for i in range(TENSORS)
    )
    externals = tuple(
        External(f"w{i}", tensor.name, True, tensor=i, dtype=DType.FLOAT32) for i, tensor in enumerate(tensors)
    )
    graphs = (
        # The holes stay within what protobuf can hold.
        Graph("source", (), Stream(0, 0, 5000), rng.randbytes(32), holes=tuple(Hole(i, tensor=i) for i in range(80))),
        Graph("run", ("fp32",), Stream(0, 0, 5000), rng.randbytes(32), externals=externals),
        Graph("run", ("original",), Stream(0, 0, 5000), rng.randbytes(32), externals=externals),
    )
    rows = 1 + TENSORS * SEGMENTS
    pages, frames = [], []
    for first in range(0, rows, PAGE_ROWS):
        count = min(PAGE_ROWS, rows - first)
        raw = np.full(count, SEGMENT, np.uint32)
        raw[: 1 if first == 0 else 0] = 5000
        content = serialize_rows(Rows(np.full(count, STORED, np.uint32), raw, rng.randbytes(32 * count)))
        frames.append(compress(content, HUFFMAN))
        pages.append(Page(count, len(frames[-1]), len(content), STORED * count, sha256(frames[-1])))
    raw_index = serialize_index(Index(("codec:linear", "draft-2"), graphs, tensors, tuple(pages), {}))
    index = compress(raw_index, HUFFMAN)
    size = HEADER_SIZE + len(index) + sum(page.stored + page.data for page in pages)
    with path.open("wb") as file:
        file.write(serialize_header(Header(len(index), len(raw_index), sha256(index), size)))
        file.write(index)
        file.writelines(frames)
        file.truncate(size)


@pytest.mark.skipif(sys.platform == "win32", reason="sparse files and getrusage")
def test_a_huge_file_is_opened_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.conx"
    try:
        build(path)
    except OSError as error:
        pytest.skip(f"no sparse file of 140 GB here: {error}")
    command = [sys.executable, "-c", MEASURE, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False, timeout=120)
    path.unlink()
    assert done.returncode == 0, done.stderr
    peak, seconds = map(float, done.stdout.split())
    print(f"peak {peak / 1e6:.0f} MB, opened in {seconds:.2f} s")
    assert peak < 100e6

"""What is written is read back, and the file is what the specification says."""

import hashlib
import io
import os
import random
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import numpy as np
import pytest

from conx.container import Graph, Hole, Reader, Stream, Tensor, Verify, Writer, content_id
from conx.container.header import parse_header, serialize_header
from conx.container.index import parse_index, serialize_index
from conx.container.limits import PAGE_ROWS
from conx.container.writer import _GRAPHS, _GROUP, _OWN, _SMALL
from conx.dtypes import DType
from tests.container import parts as small_file
from tests.container.parts import RUN, SCALES, SEGMENTS, SOURCE, VALUES, Parts, sha256, take_apart


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 40, size, np.uint8).tobytes()


def graph_of(writer: Writer, data: bytes = SOURCE) -> Graph:
    return Graph("source", (), writer.add_graph(data), sha256(data))


def raw_tensor(name: str, streams: tuple[Stream, ...], count: int, segment: int = 2**18) -> Tensor:
    return Tensor(name, (count,), DType.UINT8, "raw", {}, (), streams, sha256(b""), segment=segment)


@pytest.mark.parametrize("verify", Verify)
def test_everything_comes_back(small: bytes, verify: Verify) -> None:
    with Reader(small, verify=verify) as reader:
        big, little, fill, empty = reader.index.tensors
        assert [reader.segment(big, i) for i in range(big.segments)] == [list(each) for each in SEGMENTS]
        assert reader.side(big) == [SCALES]
        assert reader.segment(little, 0) == [VALUES]
        assert fill.segments == 2
        assert reader.side(fill) == [b"\0\0\x80\x3f"]
        assert reader.segment(fill, 1) == []
        assert empty.segments == 0
        assert empty.streams == (Stream(0, 0, 0),)
        assert reader.graph(reader.index.source) == SOURCE
        run = reader.index.serving("fp32")
        assert run is not None
        assert run is reader.index.serving("original")
        assert reader.graph(run) == RUN
        assert reader.index.serving("fp64") is None
        assert reader.index.metadata == {"producer": "test"}
        reader.check()
        calls: list[tuple[int, int]] = []
        reader.check_deep(lambda done, total: calls.append((done, total)))
        assert calls[-1] == (reader.chunks, reader.chunks)


def test_the_independent_sealer_agrees(small: bytes) -> None:
    parts = take_apart(small)
    again = parts.seal()
    with Reader(small) as a, Reader(again) as b:
        assert a.index.tensors == b.index.tensors
        assert a.index.graphs == b.index.graphs
        assert a.content_id == b.content_id
        b.check_deep()


def test_header_round_trip(small: bytes) -> None:
    header = parse_header(small[:96])
    assert serialize_header(header) == small[:96]
    assert header.file_id == hashlib.sha256(small[:96]).digest()
    assert header.file_size == len(small)


def test_index_round_trip(small: bytes) -> None:
    with Reader(small) as reader:
        raw = serialize_index(reader.index)
        assert parse_index(raw) == reader.index
        assert len(raw) == reader.header.index_raw


def test_finish_gives_the_file_id(tmp_path: Path) -> None:
    file_id = small_file.write(tmp_path / "a.conx")
    with Reader(tmp_path / "a.conx") as reader:
        assert reader.file_id == file_id


def test_content_id_is_of_graphs_and_tensors_only(small: bytes, tmp_path: Path) -> None:
    small_file.write(tmp_path / "a.conx", metadata={"producer": "another", "settings": {"b": [1], "a": None}})
    with Reader(tmp_path / "a.conx") as other, Reader(small) as reader:
        assert other.file_id != reader.file_id
        assert other.content_id == reader.content_id
        graphs = take_apart(small).index["graphs"]
        for graph in graphs:
            del graph["stream"]
        tensors = [
            {"dtype": each["dtype"], "sha256": each["sha256"], "shape": each["shape"]}
            for each in take_apart(small).index["tensors"]
        ]
        assert reader.content_id == sha256(msgpack.packb({"graphs": graphs, "tensors": tensors}))
        assert reader.content_id == content_id(reader.index)


def test_content_id_ignores_unknown_keys_and_spelled_out_defaults(parts: Parts) -> None:
    with Reader(parts.seal()) as reader:
        before = reader.content_id
    run = parts.index["graphs"][1]
    run["x-unknown"] = 1
    run["holes"] = []
    run["externals"][1] |= {"dtype": "float32", "repacked": False}
    parts.index["graphs"][1] = dict(sorted(run.items()))
    run["externals"][1] = dict(sorted(run["externals"][1].items()))
    with Reader(parts.seal()) as reader:
        assert reader.content_id == before


def test_unknown_optional_keys_are_ignored_at_every_level(parts: Parts) -> None:
    parts.index["zz"] = {"deep": [1, {"er": b"x"}]}
    for box in (*parts.index["tensors"], *parts.index["graphs"], parts.index["graphs"][0]["holes"][0]):
        box["zz"] = 1.5
    parts.index["graphs"][1]["externals"][0]["zz"] = None
    for graph in parts.index["graphs"]:
        graph.update(dict(sorted(graph.items())))
    with Reader(parts.seal()) as reader:
        reader.check_deep()


def test_a_run_graph_of_unknown_precision_does_not_hinder(parts: Parts) -> None:
    parts.index["graphs"][1]["precisions"] = ["fp8-of-tomorrow"]
    with Reader(parts.seal()) as reader:
        assert reader.index.serving("fp32") is None


def test_small_streams_of_a_kind_share_chunks(tmp_path: Path) -> None:
    rng = random.Random(1)
    contents = [(noise(rng.randrange(1, _SMALL), i), rng.choice("abc")) for i in range(60)]
    with Writer(tmp_path / "f") as writer:
        streams = [writer.add_stream(data, kind) for data, kind in contents]
        writer.finish({"draft-2"}, [graph_of(writer)], [], {})
    by_chunk: dict[int, set[str]] = {}
    with Reader(tmp_path / "f") as reader:
        for stream, (data, kind) in zip(streams, contents, strict=True):
            assert reader.stream(stream) == data
            assert len(reader.chunk(stream.chunk)) <= _GROUP
            by_chunk.setdefault(stream.chunk, set()).add(kind)
        assert all(len(kinds) == 1 for kinds in by_chunk.values())
        assert len(by_chunk) < 12


@pytest.mark.parametrize("size", [_SMALL - 1, _SMALL, _OWN, _OWN + 1, 2 * _OWN + 5])
def test_streams_of_any_size(tmp_path: Path, size: int) -> None:
    data = noise(size)
    with Writer(tmp_path / "f") as writer:
        before = writer.add_stream(b"before", "a")
        stream = writer.add_stream(data, "a")
        after = writer.add_stream(b"after", "a")
        tensors = [raw_tensor("t", (stream,), 1)]
        writer.finish({"draft-2", "codec:raw"}, [graph_of(writer)], tensors, {})
    with Reader(tmp_path / "f") as reader:
        reader.check_deep()
        assert [reader.stream(each) for each in (before, stream, after)] == [b"before", data, b"after"]


@pytest.mark.parametrize(
    "sizes", [[10, 20], [_GRAPHS, 5], [_GRAPHS - 5, 5, 1], [3 * _GRAPHS + 7, 100, _GRAPHS], [0, 3]]
)
def test_graphs_of_any_size(tmp_path: Path, sizes: list[int]) -> None:
    contents = [noise(size, i) for i, size in enumerate(sizes)]
    with Writer(tmp_path / "f") as writer:
        streams = []
        for data in contents:
            streams.append(writer.add_graph(data))
            writer.add_stream(b"x" * _SMALL, "between")
        graphs = [
            Graph("run" if i else "source", (f"p{i}",) if i else (), stream, sha256(data))
            for i, (stream, data) in enumerate(zip(streams, contents, strict=True))
        ]
        writer.finish({"draft-2"}, graphs, [], {})
    with Reader(tmp_path / "f") as reader:
        reader.check_deep()
        assert [reader.graph(graph) for graph in reader.index.graphs] == contents


def test_nearly_equal_graphs_are_stored_nearly_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    one = rng.integers(0, 256, 100_000, np.uint8).tobytes()
    with Writer(tmp_path / "f") as writer:
        graphs = [Graph("source", (), writer.add_graph(one), sha256(one))]
        two = one[:50_000] + b"difference" + one[50_000:]
        graphs.append(Graph("run", ("fp32",), writer.add_graph(two), sha256(two)))
        writer.finish({"draft-2"}, graphs, [], {})
    assert (tmp_path / "f").stat().st_size < 101_500


def test_more_than_one_page(tmp_path: Path) -> None:
    count = PAGE_ROWS + 10
    segments = [(bytes([i % 251, i % 7]), b"z" * (i % 3)) for i in range(count)]
    with Writer(tmp_path / "f") as writer:
        streams = writer.add_segments(["a", "b"], segments)
        tensor = raw_tensor("t", streams, 1024 * count, segment=1024)
        writer.finish({"draft-2", "codec:raw"}, [graph_of(writer)], [tensor], {})
    with Reader(tmp_path / "f") as reader:
        assert len(reader.index.pages) == 3
        for i in (0, PAGE_ROWS // 2 - 1, PAGE_ROWS // 2, PAGE_ROWS, count - 1):
            assert reader.segment(reader.index.tensors[0], i) == list(segments[i])
        reader.check()


def test_frame_gives_stored_bytes(small: bytes) -> None:
    with Reader(small) as reader:
        for number in range(reader.chunks):
            row, frame = reader.frame(number)
            assert row == reader.row(number)
            assert frame == small[row.offset : row.offset + row.stored]
            assert sha256(frame) == row.sha256


def test_segments_may_be_made_while_they_are_consumed(tmp_path: Path) -> None:
    made = []

    def segments() -> Iterator[tuple[bytes]]:
        for i in range(100):
            made.append(i)
            yield (noise(2**20, i),)

    with ThreadPoolExecutor(2) as pool, Writer(tmp_path / "f", pool) as writer:
        streams = writer.add_segments(["raw"], segments())
        tensor = raw_tensor("t", streams, 100 * 2**20, segment=2**20)
        writer.finish({"draft-2", "codec:raw"}, [graph_of(writer)], [tensor], {})
    with Reader(tmp_path / "f") as reader:
        assert reader.segment(reader.index.tensors[0], 99) == [noise(2**20, 99)]


def test_the_same_bytes_whatever_the_threads(tmp_path: Path) -> None:
    def make(path: Path, threads: int) -> bytes:
        pool = ThreadPoolExecutor(threads) if threads else None
        with Writer(path, pool) as writer:
            graphs, tensors = small_file.add_content(writer)
            rng = np.random.default_rng(5)
            for i in range(30):
                data = np.clip(np.rint(rng.normal(size=2**16) * rng.choice([0.5, 2, 20])), -127, 127).astype(np.int8)
                pieces = np.split(data, 8)
                streams = writer.add_segments(["codes", "copy"], ((p.tobytes(), bytes(p[::3])) for p in pieces))
                tensors.append(raw_tensor(f"t{i}", streams, 2**16, segment=2**13))
                writer.add_stream(data[: rng.integers(1, 40_000)].tobytes(), "codes")
            writer.finish(small_file.FEATURES, graphs, tensors, {})
        if pool is not None:
            pool.shutdown()
        return path.read_bytes()

    first = make(tmp_path / "a", 0)
    for threads in (1, 2, 4, 4):
        assert make(tmp_path / "b", threads) == first


def test_reading_from_many_threads(tmp_path: Path) -> None:
    contents = [noise(5000 + i, i) for i in range(200)]
    with Writer(tmp_path / "f") as writer:
        streams = [writer.add_stream(data, "a") for data in contents]
        writer.finish({"draft-2"}, [graph_of(writer)], [], {})
    with ThreadPoolExecutor(8) as pool, Reader(tmp_path / "f") as reader:
        order = random.Random(0).choices(range(200), k=2000)
        for i, data in zip(order, pool.map(lambda i: reader.stream(streams[i]), order), strict=True):
            assert data == contents[i]


def test_shared_chunks_that_are_kept_are_bounded(tmp_path: Path) -> None:
    with Writer(tmp_path / "f") as writer:
        streams = [writer.add_stream(noise(_SMALL - 1, i), "a") for i in range(8 * 20)]
        writer.finish({"draft-2"}, [graph_of(writer)], [], {})
    with Reader(tmp_path / "f") as reader:
        for stream in streams:
            reader.stream(stream)
        assert sum(map(len, reader._cache._kept.values())) == reader._cache._size <= 2**22


def test_bindings_say_what_they_become(small: bytes) -> None:
    with Reader(small) as reader:
        tensors = reader.index.tensors
        first, second = reader.index.graphs[1].externals
        assert first.dtype_of(tensors[0]) is DType.FLOAT16
        assert first.shape_of(tensors[0]) == (3, 1000)
        assert first.nbytes_of(tensors[0]) == 6000
        assert first.repacked
        assert second.shape_of(tensors[1]) == (6,)
        assert not second.repacked
        hole = reader.index.source.holes[1]
        assert hole == Hole(9, tensor=1, perm=(1, 0))
        assert hole.shape_of(tensors[1]) == (3, 2)
        assert tensors[0].stored_shape == (1000, 3)
        assert tensors[0].segment_range(2) == (2048, 3000)
        with pytest.raises(ValueError, match="segment 3: the tensor has 3"):
            tensors[0].segment_range(3)


def test_a_closed_reader(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(small)
    for source in (small, tmp_path / "f"):
        reader = Reader(source)
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match=r"closed|released"):
            reader.chunk(0)


def test_file_object_and_memory(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(small)
    with path.open("rb") as file:
        file.read(7)
        for source in (str(path), path, small, bytearray(small), memoryview(small), io.BytesIO(small), file):
            with Reader(source) as reader:
                reader.check_deep()
        assert not file.closed


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_the_mode_is_that_of_a_new_file(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        small_file.write(tmp_path / "f")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640

"""The target appears whole or not at all, whatever happens, and nothing else stays."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conx.container import Graph, Reader, Stream, Tensor, Writer
from conx.container import target as target_module
from conx.container.limits import MAX_CHUNK_RAW
from conx.dtypes import DType
from conx.errors import FormatError
from tests.container import parts as small_file
from tests.container.parts import SOURCE, sha256

ROOT = Path(__file__).resolve().parents[2]


def finish(writer: Writer, verify: Callable[[Path], Any] | None = None) -> bytes:
    graph = Graph("source", (), writer.add_graph(SOURCE), sha256(SOURCE))
    return writer.finish({"draft-2"}, [graph], [], {}, verify)


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    seen = []

    def verify(path: Path) -> None:
        seen.append(path)
        assert path.parent == tmp_path
        assert path.name.startswith(".f.conx.")
        assert path.name.endswith(".tmp")
        with Reader(path) as reader:
            reader.check_deep()
        assert not (tmp_path / "f.conx").exists()

    with Writer(tmp_path / "f.conx") as writer:
        writer.add_stream(bytes(10**6), "a")
        if sys.platform != "win32":
            assert list(tmp_path.iterdir()) == []
        finish(writer, verify)
    assert len(seen) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "f.conx"]


class Stopped(BaseException):
    """Like KeyboardInterrupt."""


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, Stopped])
def test_nothing_stays_after_an_exception(tmp_path: Path, kind: type[BaseException]) -> None:
    def stop(writer: Writer) -> None:
        with writer:
            writer.add_stream(bytes(10**6), "a")
            raise kind

    with pytest.raises(kind):
        stop(Writer(tmp_path / "f"))
    assert list(tmp_path.iterdir()) == []

    def verify(_: Path) -> None:
        raise kind

    with pytest.raises(kind), Writer(tmp_path / "f") as writer:
        finish(writer, verify)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_where_segments_are_made(tmp_path: Path) -> None:
    def segments() -> Iterator[tuple[bytes]]:
        yield from [(bytes(100_000),)] * 20
        raise RuntimeError("made badly")

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(RuntimeError, match="made badly"), Writer(tmp_path / "f", pool) as writer:
            writer.add_segments(["raw"], segments())
        assert pool.submit(int).result() == 0
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_bytes(b"old")

    def verify(_: Path) -> None:
        assert target.read_bytes() == b"old"
        raise RuntimeError

    with pytest.raises(RuntimeError), Writer(target) as writer:
        finish(writer, verify)
    assert target.read_bytes() == b"old"
    with Writer(target) as writer:
        finish(writer)
    Reader(target).check_deep()
    assert list(tmp_path.iterdir()) == [target]


def test_abort(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "f")
    writer.add_stream(b"abc", "a")
    writer.abort()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    for call in (lambda: writer.add_stream(b"", "a"), lambda: writer.add_graph(b""), lambda: finish(writer)):
        with pytest.raises(ValueError, match="the writer is finished"):
            call()


def test_a_finished_writer_takes_no_more(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "f")
    finish(writer)
    with pytest.raises(ValueError, match="the writer is finished"):
        writer.add_segments(["raw"], [])
    writer.abort()
    assert (tmp_path / "f").exists()


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        Writer(tmp_path)
    with pytest.raises(FileNotFoundError):
        Writer(tmp_path / "missing" / "f")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_no_target(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        Writer(tmp_path / "pipe")


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "f")
    for _ in range(2):
        with Writer(tmp_path / "link") as writer:
            finish(writer)
        assert (tmp_path / "link").is_symlink()
        assert [each.name for each in (tmp_path / "real").iterdir()] == ["f"]


def test_a_long_name(tmp_path: Path) -> None:
    name = "ü" * 120 + ".conx"
    with Writer(tmp_path / name) as writer:
        finish(writer)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), Writer(tmp_path / "f") as writer:
        finish(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "is open elsewhere", str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError, match="is open elsewhere"), Writer(tmp_path / "f") as writer:
        finish(writer)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where there is no O_DIRECTORY either."""
    really = os.open

    def opens(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really(path, flags, mode)

    monkeypatch.setattr(target_module, "_DIRECTORY", 0)
    monkeypatch.setattr(os, "open", opens)
    with Writer(tmp_path / "f") as writer:
        finish(writer)
    Reader(tmp_path / "f").check_deep()


def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.fsync
    synced = []

    def sync(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        if synced[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        really(handle)

    monkeypatch.setattr(os, "fsync", sync)
    with Writer(tmp_path / "f") as writer:
        finish(writer)
    Reader(tmp_path / "f").check_deep()
    assert synced[0] is False


KILLED = """
import sys, time
from pathlib import Path
from conx.container import Graph, Writer
where = sys.argv[2]
def wait(path=None):
    print("ready", flush=True)
    time.sleep(60)
with Writer(sys.argv[1]) as writer:
    for i in range(40):
        writer.add_stream(bytes([i]) * 100_000 + bytes(range(256)) * 100, "a")
    if where == "spool":
        wait()
    stream = writer.add_graph(b"graph")
    writer.finish({"draft-2"}, [Graph("source", (), stream, bytes(32))], [], {}, wait)
"""


@pytest.mark.parametrize("where", ["spool", "finish"])
@pytest.mark.parametrize("how", ["KILL", "TERM", "INT"])
def test_a_killed_writer_leaves_no_target(tmp_path: Path, where: str, how: str) -> None:
    if os.name == "nt":
        pytest.skip("signals of POSIX")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "f.conx"
    command = [sys.executable, "-c", KILLED, str(target), where]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.Signals[f"SIG{how}"])
        assert process.wait(30) != 0
    left = [each.name for each in target.parent.iterdir()]
    assert target.name not in left
    if how == "INT" or where == "spool":
        assert left == []
    else:
        assert len(left) == 1
        assert left[0].startswith(".f.conx.")
        assert left[0].endswith(".tmp")


def tensor(streams: tuple[Stream, ...], count: int) -> Tensor:
    return Tensor("t", (count,), DType.UINT8, "raw", {}, (), streams, bytes(32))


def test_records_that_break_a_rule_are_not_written(tmp_path: Path) -> None:
    features = {"draft-2", "codec:raw"}
    with Writer(tmp_path / "f") as writer:
        graph = Graph("source", (), writer.add_stream(b"abc", "raw"), bytes(32))
        with pytest.raises(FormatError, match=re.escape("tensors[0].streams[0] is [7, 0, 3]: there are 1 chunks")):
            writer.finish(features, [graph], [tensor((Stream(7, 0, 3),), 3)], {})
    with (
        Writer(tmp_path / "f") as writer,
        pytest.raises(FormatError, match="codec is 'raw': is not among the features"),
    ):
        writer.finish({"draft-2"}, [], [tensor((), 3)], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"a": object()}, "of type object has no canonical form"),
        ({1: 2}, "map key 1: must be a string"),
        ({"a": 2**64}, "18446744073709551616 is not an integer of 64 bits"),
        ({"a": [[[[[[[[[[[[]]]]]]]]]]]]}, "nested deeper than 12"),
        ({"a": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_metadata_that_cannot_be_written(tmp_path: Path, metadata: dict[str, object], text: str) -> None:
    with Writer(tmp_path / "f") as writer:
        graph = Graph("source", (), writer.add_graph(SOURCE), sha256(SOURCE))
        with pytest.raises(ValueError, match=text):
            writer.finish({"draft-2"}, [graph], [], metadata)
    assert list(tmp_path.iterdir()) == []


def test_segments_that_do_not_fit_a_chunk(tmp_path: Path) -> None:
    segments = [(bytes(MAX_CHUNK_RAW + 1),)] * 2
    with (
        Writer(tmp_path / "f") as writer,
        pytest.raises(ValueError, match="a chunk of 16777217 bytes: at most 16777216"),
    ):
        writer.add_segments(["raw"], segments)


def test_segments_of_another_number_of_streams(tmp_path: Path) -> None:
    for segments in ([(b"a", b"b")], [(b"a", b"b"), (b"a", b"b")], [(b"a",), (b"a", b"b")], [(b"a",), ()]):
        with (
            Writer(tmp_path / "f") as writer,
            pytest.raises(ValueError, match=r"a segment of [02] streams: there are 1 names"),
        ):
            writer.add_segments(["raw"], segments)


def test_two_writers_of_one_target(tmp_path: Path) -> None:
    with Writer(tmp_path / "f") as one, Writer(tmp_path / "f") as two:
        one.add_stream(b"one", "a")
        two.add_stream(b"two", "a")
        finish(one)
        last = finish(two)
    with Reader(tmp_path / "f") as reader:
        assert reader.file_id == last
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]


def test_a_reader_keeps_the_file_that_it_opened(tmp_path: Path) -> None:
    if os.name == "nt":
        pytest.skip("Windows does not replace an open file")
    small_file.write(tmp_path / "f")
    with Reader(tmp_path / "f") as reader:
        with Writer(tmp_path / "f") as writer:
            finish(writer)
        reader.check_deep()
        assert len(reader.index.tensors) == 4

"""Faults of the world around while packing or unpacking: files that change, disks that are full, signals.

In each case the output is whole or not there, what was there before stays, and nothing else is left behind.
"""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

import conx
from conx.errors import ConxError, ModelError
from tests.builders import external, normal, save
from tests.packing.kit import matmul

BEFORE = b"what was there before"
ROOT = Path(__file__).resolve().parent.parent.parent


def outside(folder: Path, count: int = 6) -> Path:
    """A model whose weights lie in one file beside it."""
    made = matmul(normal(64, 64), **{f"v{i}": normal(64, 64, seed=1 + i) for i in range(count)})
    return save(made, folder / "m.onnx", "m.data")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file of other content in a folder of its own."""
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "m.conx"
    path.write_bytes(BEFORE)
    return path


def check_untouched(target: Path) -> None:
    assert names(target.parent) == [target.name]
    assert target.read_bytes() == BEFORE


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("call", [1, 4, 7])
@pytest.mark.parametrize("threads", [1, 3])
def test_data_that_shrinks_after_it_was_opened(threads: int, call: int, target: Path, tmp_path: Path) -> None:
    """Each weight is read twice: the second time, or the first, some are gone."""
    path = outside(tmp_path)
    calls: list[int] = []

    def shrink(done: int, _: int) -> None:
        calls.append(done)
        if len(calls) == call:
            os.truncate(tmp_path / "m.data", 20_000)

    with pytest.raises(ModelError, match=r"m\.data") as caught:
        conx.pack(path, target, threads=threads, progress=shrink)
    assert "\n" not in str(caught.value)
    check_untouched(target)


@pytest.mark.usefixtures("no_sync")
def test_data_that_changes_after_it_was_hashed(target: Path, tmp_path: Path) -> None:
    """The hashes of the first reading are those that the file is checked against."""
    path = outside(tmp_path, 0)

    def change(_done: int, _total: int) -> None:
        with open(tmp_path / "m.data", "r+b") as file:
            file.write(b"\1\2\3\4")

    with pytest.raises(ConxError, match="'w'"):
        conx.pack(path, target, lossless=True, progress=change)
    check_untouched(target)


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("place", [-1, -3000, 100, 20])
def test_a_disk_that_damages_what_was_written(
    place: int, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read again before it gets its name."""
    path = save(matmul(normal(64, 64)), tmp_path / "m.onnx")

    def damage(_: int) -> None:
        for temporary in target.parent.glob(".*.tmp"):
            content = bytearray(temporary.read_bytes())
            content[place] ^= 4
            temporary.write_bytes(content)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(ConxError):
        conx.pack(path, target)
    check_untouched(target)


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("count", [0, 1])
def test_a_full_disk(count: int, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, and unpacking into two files: the first or the second does not fit."""
    path = outside(tmp_path)
    packed = tmp_path / "packed.conx"
    conx.pack(path, packed, external_above=1000)
    calls: list[int] = []

    def sync(handle: int) -> None:
        calls.append(handle)
        if len(calls) > count:
            full(handle)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="No space left"):
        conx.unpack(packed, target, external_above=1000)
    check_untouched(target)
    assert len(calls) == count + 1
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        conx.pack(path, target)
    check_untouched(target)


@pytest.mark.usefixtures("no_sync")
def test_no_thread_outlives_an_error(target: Path, tmp_path: Path) -> None:
    path = outside(tmp_path)
    before = threading.active_count()
    with pytest.raises(ValueError, match="no weight"):
        conx.pack(path, target, threads=4, keep=["nothing"])
    os.truncate(tmp_path / "m.data", 7 * 64 * 64 * 4 - 1)
    with pytest.raises(ModelError):
        conx.pack(path, target, threads=4)
    assert threading.active_count() == before
    check_untouched(target)


# Which output is none


Link = Callable[[Path, Path], None]
LINKS: dict[str, Link] = {
    "symbolic": lambda old, new: new.symlink_to(old),
    "hard": lambda old, new: new.hardlink_to(old),
    "the folder's": lambda old, new: new.parent.symlink_to(old.parent, target_is_directory=True),
}


@pytest.mark.usefixtures("no_sync")
@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
@pytest.mark.parametrize("kind", LINKS)
def test_a_link_to_the_model_is_no_output(kind: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = save(matmul(normal(64, 64)), tmp_path / "real" / "m.onnx")
    content = path.read_bytes()
    output = tmp_path / "link" / "m.onnx" if kind == "the folder's" else tmp_path / "link.onnx"
    LINKS[kind](path, output)
    for model, other in ((path, output), (output, path)):
        with pytest.raises(ValueError, match="is the model itself"):
            conx.pack(model, other)
    assert path.read_bytes() == content
    assert names(tmp_path / "real") == ["m.onnx"]


@pytest.mark.usefixtures("no_sync")
def test_the_default_output_may_be_the_model(tmp_path: Path) -> None:
    path = save(matmul(normal(64, 64)), tmp_path / "m.conx")
    content = path.read_bytes()
    with pytest.raises(ValueError, match="is the model itself"):
        conx.pack(path)
    assert path.read_bytes() == content


@pytest.mark.usefixtures("no_sync")
def test_the_data_of_the_model_is_no_output(tmp_path: Path) -> None:
    path = outside(tmp_path)
    content = (tmp_path / "m.data").read_bytes()
    with pytest.raises(ValueError, match=r"m\.data"):
        conx.pack(path, tmp_path / "m.data")
    assert (tmp_path / "m.data").read_bytes() == content


@pytest.mark.usefixtures("no_sync")
@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_as_output_is_followed(tmp_path: Path) -> None:
    path = save(matmul(normal(64, 64)), tmp_path / "m.onnx")
    (tmp_path / "store").mkdir()
    (tmp_path / "link.conx").symlink_to(tmp_path / "store" / "real.conx")
    conx.pack(path, tmp_path / "link.conx")
    assert (tmp_path / "link.conx").is_symlink()
    assert names(tmp_path / "store") == ["real.conx"]
    assert conx.check(tmp_path / "link.conx", deep=True).tensors == 1


# Signals. The process stops itself where it would wait for the disk: all is written, and nothing has its name yet.

STOPPED = """
    import os, sys, time
    from conx.cli import main

    def sync(handle):
        print("writing", flush=True)
        sys.stdin.read()

    os.fsync = sync
    sys.exit(main(sys.argv[1:]))
"""


def stopped(number: int, *arguments: object) -> tuple[int, str]:
    """Runs a command until it syncs a file, sends it a signal; answers its status, and what it said of it."""
    command = [sys.executable, "-c", textwrap.dedent(STOPPED), *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == "writing\n"
        running.send_signal(number)
        status = running.wait(60)
        return status, running.stderr.read()


@pytest.mark.skipif(os.name == "nt", reason="no signals there")
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_killed_before_the_file_has_its_name(verb: str, kind: str, target: Path, tmp_path: Path) -> None:
    path = outside(tmp_path)
    if verb == "unpack":
        conx.pack(path, tmp_path / "m.conx")
        path = tmp_path / "m.conx"
    number = getattr(signal, kind)
    status, said = stopped(number, verb, path, "-o", target)
    assert target.read_bytes() == BEFORE
    others = [name for name in names(target.parent) if name != target.name]
    if kind == "SIGKILL":
        assert status == -number
        assert [name[:8] + name[-4:] for name in others] == [".m.conx..tmp"]
    else:
        assert status == 128 + number
        assert others == []
    assert said == ("conx: interrupted\n" if kind == "SIGINT" else "")
    conx.pack(tmp_path / "m.onnx", target)  # what was left does not stand in the way
    assert conx.check(target, deep=True).tensors == 7


@pytest.mark.usefixtures("no_sync")
def test_damage_is_found_before_anything_is_unpacked(target: Path, tmp_path: Path) -> None:
    conx.pack(outside(tmp_path), tmp_path / "m.conx", lossless=True)
    content = bytearray((tmp_path / "m.conx").read_bytes())
    for place in range(-len(content) + 1, 0, len(content) // 23):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "bad.conx").write_bytes(damaged)
        with pytest.raises(ConxError):
            conx.unpack(tmp_path / "bad.conx", target)
        check_untouched(target)
    assert onnx.load(conx.unpack(tmp_path / "m.conx", target)).graph.initializer[0].name == "w"


@pytest.mark.usefixtures("no_sync")
def test_weights_in_several_files(tmp_path: Path) -> None:
    """Two beside the model, one of them shared, and the model's own: each weight is read where it lies."""
    made = matmul(normal(64, 64), a=normal(64, 64, seed=1), b=normal(64, 64, seed=2), c=normal(64, 64, seed=3))
    contents = {"x": b"", "y": b""}
    for i, tensor in enumerate(made.graph.initializer):
        name = "xyx"[i] if i < 3 else ""
        if name:
            contents[name] += bytes(17) + external(tensor, name, len(contents[name]) + 17, len(tensor.raw_data))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    path = save(made, tmp_path / "m.onnx")
    report = conx.pack(path, lossless=True)
    assert report.source_bytes == sum((tmp_path / name).stat().st_size for name in ("m.onnx", "x", "y"))
    conx.unpack(tmp_path / "m.conx", tmp_path / "back.onnx")
    wanted = {t.name: t.raw_data for t in onnx.load(path).graph.initializer}
    assert {t.name: t.raw_data for t in onnx.load(tmp_path / "back.onnx").graph.initializer} == wanted

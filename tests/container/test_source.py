"""Sources read exactly, from any thread, and say which file is at fault. So they do on systems without `pread`."""

import io
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from conx.container import Reader, open_source
from conx.errors import FormatError

DATA = bytes(range(256)) * 40


@pytest.fixture(params=["pread", "handles"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "handles":
        monkeypatch.delattr(os, "pread", raising=False)
    elif not hasattr(os, "pread"):
        pytest.skip("no pread here")
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    return path


def read_all_ways(source: object) -> None:
    opened = open_source(cast(BinaryIO, source))
    assert opened.size == len(DATA)
    spans = [(i * 37 % 9000, i * 91 % 1000) for i in range(500)]
    with ThreadPoolExecutor(6) as pool:
        for (offset, size), part in zip(spans, pool.map(lambda span: opened.read_at(*span), spans), strict=True):
            assert part == DATA[offset : offset + size]
            assert type(part) is bytes
    assert opened.read_at(len(DATA), 0) == b""
    for offset, size in ((len(DATA) - 1, 2), (len(DATA) + 5, 1), (0, 10**6)):
        with pytest.raises(FormatError, match=f"cut short: {size} bytes are needed at offset {offset}, there are"):
            opened.read_at(offset, size)
    opened.close()
    opened.close()
    with pytest.raises(ValueError, match=r"closed|released"):
        opened.read_at(0, 1)


@pytest.mark.usefixtures("kind")
def test_path(path: Path) -> None:
    read_all_ways(path)
    read_all_ways(str(path))
    assert open_source(path).name == str(path)


def test_memory() -> None:
    for data in (DATA, bytearray(DATA), memoryview(DATA), memoryview(bytearray(DATA)).cast("I")):
        read_all_ways(data)


def test_file_objects(path: Path) -> None:
    with path.open("rb") as file:
        read_all_ways(file)
        assert open_source(file).name == str(path)
    with path.open("rb", buffering=0) as raw:
        read_all_ways(raw)
    read_all_ways(io.BytesIO(DATA))
    with tempfile.TemporaryFile() as temporary:
        temporary.write(DATA)
        read_all_ways(temporary)


def test_a_source_is_returned_as_it_is(path: Path) -> None:
    source = open_source(path)
    assert open_source(source) is source


def test_file_object_that_returns_little() -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 7))

    read_all_ways(Slow(DATA))


def test_file_object_that_returns_too_much() -> None:
    class Odd(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read((size or 0) + 1) if size else b""

    with pytest.raises(TypeError, match="<Odd>: its read\\(\\) returned more than was asked for"):
        open_source(Odd(DATA)).read_at(0, 5)


@pytest.mark.parametrize("given", [None, 5, object(), ["a"], io.StringIO("text")])
def test_what_is_no_source(given: object) -> None:
    with pytest.raises(TypeError, match="expected a"):
        open_source(cast(BinaryIO, given))


def test_a_text_file_is_no_source(path: Path) -> None:
    with path.open(encoding="latin-1") as file, pytest.raises(TypeError, match="expected a file opened in binary mode"):
        open_source(cast(BinaryIO, file))


def test_memory_that_is_not_contiguous() -> None:
    with pytest.raises(TypeError, match="a memoryview must be contiguous"):
        open_source(memoryview(DATA)[::2])


@pytest.mark.skipif(not hasattr(os, "pipe"), reason="no pipes")
def test_a_pipe_is_no_source() -> None:
    reading, writing = os.pipe()
    with (
        os.fdopen(reading, "rb") as file,
        os.fdopen(writing, "wb"),
        pytest.raises(TypeError, match="expected a seekable"),
    ):
        open_source(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        Reader(tmp_path / "pipe")


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Reader(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match="not a regular file"):
        Reader(tmp_path)


@pytest.mark.usefixtures("kind")
def test_a_file_that_shrinks(path: Path) -> None:
    source = open_source(path)
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(FormatError, match="data: cut short: 10 bytes are needed at offset 95, there are 5"):
        source.read_at(95, 10)
    source.close()


def test_a_file_that_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pread", raising=False)
    source = open_source(path)
    (path.parent / "other").write_bytes(DATA)
    (path.parent / "other").replace(path)
    assert source.read_at(0, 10) == DATA[:10]
    with ThreadPoolExecutor(1) as pool, pytest.raises(FormatError, match="data: was replaced while it was read"):
        pool.submit(source.read_at, 0, 10).result()
    source.close()


@pytest.mark.usefixtures("kind")
def test_errors_name_the_file(tmp_path: Path, small: bytes) -> None:
    path = tmp_path / "model.conx"
    path.write_bytes(small[:-1])
    with pytest.raises(FormatError) as caught:
        Reader(path)
    assert str(caught.value).startswith(
        f"{path}: header: file_size is {len(small)}, the file has {len(small) - 1} bytes"
    )
    path.write_bytes(small)
    with Reader(path) as reader:
        with path.open("r+b") as file:
            file.truncate(200)
        with pytest.raises(FormatError) as caught:
            reader.check()
    assert str(caught.value).startswith(f"{path}: cut short: ")


@pytest.mark.usefixtures("kind")
def test_handles_are_closed(path: Path, small: bytes) -> None:
    """Windows does not let a file be removed that is open; elsewhere the count of handles tells."""
    path.write_bytes(small)

    def handles() -> int:
        return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0

    before = handles()
    reader = Reader(path)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(reader.chunk, range(reader.chunks)))
    reader.close()
    assert handles() == before
    path.write_bytes(small[:50])
    with pytest.raises(FormatError):
        Reader(path)
    assert handles() == before
    path.unlink()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_process_may_go_on_reading(path: Path, small: bytes) -> None:
    path.write_bytes(small)
    with Reader(path) as reader:
        child = os.fork()
        if not child:
            try:
                reader.check_deep()
            except BaseException:  # noqa: BLE001 - the child must not go on with the tests
                os._exit(1)
            os._exit(0)
        reader.check_deep()
        assert os.waitpid(child, 0)[1] == 0

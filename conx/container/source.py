"""Where a file's bytes come from: a path, bytes in memory, or a file object.

Reads are exact and may come from any thread. There is no mmap: when a mapped file is cut short the process dies by
SIGBUS, and on Windows the file cannot be replaced.
"""

import errno
import io
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from conx.errors import FormatError

__all__ = ["ByteSource", "FileObjectSource", "MemorySource", "PathSource", "Readable", "open_source"]

Readable = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
"""What a .conx file may be given as."""

_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it


@runtime_checkable
class ByteSource(Protocol):
    """Bytes that can be read at any offset, from any thread."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def size(self) -> int:
        """Bytes that there are."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises:
            FormatError: there are not so many.
            ValueError: the source is closed.
        """
        ...

    def close(self) -> None:
        """Lets go of the file; may be called twice."""
        ...


def open_source(given: Readable | ByteSource) -> ByteSource:
    """A source for a path, bytes, or a seekable binary file object; a source is returned as it is.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        TypeError: it is nothing of the kind.
    """
    if isinstance(given, str | os.PathLike):
        return PathSource(Path(given))
    if isinstance(given, bytes | bytearray | memoryview):
        return MemorySource(given)
    if isinstance(given, ByteSource):
        return given
    if hasattr(given, "read") and hasattr(given, "seek"):
        return FileObjectSource(given)
    raise TypeError(f"expected a path, bytes or a seekable binary file, not {type(given).__name__}")


class PathSource:
    """A regular file. Where there is no `pread`, every thread that reads gets a handle of its own."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._lock = threading.Lock()
        self._handles: list[int] = []
        self._local = threading.local()
        self._closed = False
        self._pread: Callable[[int, int, int], bytes] | None = getattr(os, "pread", None)
        self._handle = self._local.handle = self._open()
        self._status = os.fstat(self._handle)
        self.size = self._status.st_size

    def read_at(self, offset: int, size: int) -> bytes:
        if self._closed:
            raise ValueError(f"{self.name}: is closed")
        parts = []
        missing = size
        while missing:
            part = self._read(missing, offset + size - missing)
            if not part:
                raise _cut_short(self.name, offset, size, size - missing)
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._handles:
                os.close(self._handles.pop())

    def __del__(self) -> None:
        if hasattr(self, "_handles"):
            self.close()

    def _open(self) -> int:
        # Opening a pipe would wait for a writer, so look first.
        if not stat.S_ISREG(self._path.stat().st_mode):
            code = errno.EISDIR if self._path.is_dir() else errno.EINVAL
            raise OSError(code, "not a regular file", self.name)
        handle = os.open(self._path, os.O_RDONLY | _BINARY)
        with self._lock:
            if self._closed:
                os.close(handle)
                raise ValueError(f"{self.name}: is closed")
            self._handles.append(handle)
        return handle

    def _read(self, size: int, offset: int) -> bytes:
        """Some of the `size` bytes at `offset`; none at the end of the file."""
        if self._pread is not None:
            return self._pread(self._handle, size, offset)
        handle = self._own_handle()
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, size)

    def _own_handle(self) -> int:
        """This thread's handle. Opening again may find another file, which must not be mixed with the first."""
        handle: int | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._open()
            now = os.fstat(handle)
            if (now.st_dev, now.st_ino, now.st_size) != (self._status.st_dev, self._status.st_ino, self.size):
                raise FormatError(f"{self.name}: was replaced while it was read; open it again")
            self._local.handle = handle
        return handle


class MemorySource:
    """Bytes in memory, which the caller must not change meanwhile. Reading copies."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.name = f"<{type(data).__name__}>"
        try:
            self._view = memoryview(data).cast("B")
        except TypeError:
            raise TypeError("a memoryview must be contiguous") from None
        self.size = len(self._view)

    def read_at(self, offset: int, size: int) -> bytes:
        part = bytes(self._view[offset : offset + size])  # raises ValueError once released
        if len(part) != size:
            raise _cut_short(self.name, offset, size, len(part))
        return part

    def close(self) -> None:
        self._view.release()


class FileObjectSource:
    """A seekable binary file object, from its byte 0 on. Reads take turns. It is the caller's, so never closed here."""

    def __init__(self, file: BinaryIO) -> None:
        name = getattr(file, "name", None)
        self.name = name if isinstance(name, str) else f"<{type(file).__name__}>"
        self._file: BinaryIO | None = file
        self._lock = threading.Lock()
        try:
            file.seek(0, io.SEEK_END)
            self.size = file.tell()
        except io.UnsupportedOperation:
            raise TypeError(f"{self.name}: expected a seekable file") from None
        if not isinstance(file.read(0), bytes):
            raise TypeError(f"{self.name}: expected a file opened in binary mode")

    def read_at(self, offset: int, size: int) -> bytes:
        parts = []
        missing = size
        with self._lock:
            if self._file is None:
                raise ValueError(f"{self.name}: is closed")
            self._file.seek(offset)
            while missing > 0:
                part = self._file.read(missing)
                if not part:
                    raise _cut_short(self.name, offset, size, size - missing)
                parts.append(part)
                missing -= len(part)
        if missing < 0:
            raise TypeError(f"{self.name}: its read() returned more than was asked for")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._file = None


def _cut_short(name: str, offset: int, size: int, got: int) -> FormatError:
    return FormatError(f"{name}: cut short: {size} bytes are needed at offset {offset}, there are {got}")

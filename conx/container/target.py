"""A file that appears whole or not at all: written under a hidden name beside its place, then renamed."""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["Target"]

_BINARY = getattr(os, "O_BINARY", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)


class Target:
    """Where the finished file goes. A link is followed, as by a program that opens the file for writing.

    Args:
        path: The file, which may exist.

    Raises:
        OSError: it is something else than a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.folder = self.path.parent
        self._temporary: Path | None = None
        if self.path.exists():
            _require_regular(self.path)
        elif not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder is not there", str(path))

    def create(self) -> BinaryIO:
        """The temporary file, opened for writing, with the mode that any new file gets."""
        while True:
            path = self.folder / f".{self.path.name[:40]}.{secrets.token_hex(4)}.tmp"
            try:
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            except FileExistsError:
                continue
            self._temporary = path
            return os.fdopen(handle, "wb")

    @property
    def temporary(self) -> Path:
        """The temporary file."""
        if self._temporary is None:
            raise ValueError("the temporary file is not there")
        return self._temporary

    def commit(self) -> None:
        """Renames the temporary file, which must be closed and synced, to its place."""
        self.temporary.replace(self.path)
        self._temporary = None
        _sync_folder(self.folder)

    def discard(self) -> None:
        """Removes the temporary file, if there is one."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


def _require_regular(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _sync_folder(folder: Path) -> None:
    """Makes the rename last through a power cut, where folders can be synced: not on Windows, nor on some networks."""
    try:
        handle = os.open(folder, os.O_RDONLY | _DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)

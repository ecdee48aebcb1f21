"""External data files of a model: which may be opened, and reading from them.

A location names a file at or below the model's folder. Links are followed only to places that belong to the model:
its own folder, the folder that the model file itself is a link into, or the blobs of the hub cache that it lies in.
"""

import os
import stat
import threading
from pathlib import Path

from conx.errors import ModelError

__all__ = ["DataFile", "locate"]


class DataFile:
    """A file opened for reading at any offset, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            raise ModelError(f"{path}: is a folder, not a model file")
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: is not a regular file")
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def read(self, offset: int, size: int) -> bytearray:
        """Exactly `size` bytes from `offset`. Raises ModelError where the file ends before."""
        out = bytearray(size)
        view = memoryview(out)
        done = 0
        with self._lock:
            self._file.seek(offset)
            while done < size:
                got = self._file.readinto(view[done:])
                if not got:
                    raise ModelError(f"{self.path}: ends at byte {offset + done}, {offset + size} are needed")
                done += got
        return out

    def close(self) -> None:
        self._file.close()


def locate(model: Path, location: str, label: str) -> Path:
    """The file that `location` names, seen from the model at path `model`.

    Raises:
        ModelError: the location is empty, absolute or leaves the model's folder, or the file is missing.
    """
    parts = location.replace("\\", "/").split("/")
    if not location or "\0" in location or "\n" in location:
        raise ModelError(f"{label}: external location {location!r} names no file")
    if parts[0] == "" or ".." in parts or (os.name == "nt" and ":" in location) or parts[0][1:2] == ":":
        raise ModelError(f"{label}: external location {location!r} leaves the model's folder; this is refused")
    path = model.parent / location
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise ModelError(f"{label}: external data file {location!r} is not there; put it beside the model") from None
    if not any(real.is_relative_to(home) for home in _homes(model)):
        raise ModelError(
            f"{label}: external location {location!r} is a link that leaves the model's folder; this is refused"
        )
    if not real.is_file():
        raise ModelError(f"{label}: external location {location!r} is a folder or a device, not a file")
    return path


def _homes(model: Path) -> list[Path]:
    """Folders in which the model's data may really lie."""
    folder = model.parent.resolve()
    homes = [folder]
    if model.is_symlink():
        homes.append(model.resolve().parent)
    # In a hub cache, models--x/snapshots/<revision>/... links into models--x/blobs.
    blobs = [above.parent / "blobs" for above in folder.parents if above.name == "snapshots"]
    return homes + [place for place in blobs if place.is_dir()]

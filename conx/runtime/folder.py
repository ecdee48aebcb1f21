"""A private temporary folder that is removed when it is told to, and at the latest with the process."""

import shutil
import tempfile
import weakref
from pathlib import Path

__all__ = ["PrivateFolder"]


class PrivateFolder:
    """A new folder that only this user can read.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="conx-"))
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove it with all that is in it. What is still in use (on Windows) goes later, when this object does."""
        shutil.rmtree(self.path, ignore_errors=True)
        if not self.path.exists():
            self._finalizer.detach()

"""A thread's temporaries, each for a block of elements, made once.

Allocated for each segment anew they cost as much as the work that is done in them.
"""

import threading

import numpy as np

from conx.codecs.base import Array
from conx.codecs.convert import BLOCK

__all__ = ["scratch"]


class _Scratch(threading.local):
    """Who uses one of them must be done with it when calling something that may use it, too."""

    def __init__(self) -> None:
        self.bytes, self.more = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
        self.top, self.field = np.empty(BLOCK, "<u2"), np.empty(BLOCK, "<u2")
        self._wide = np.empty(BLOCK, "<u8")

    def wide(self, like: Array) -> Array:
        """A temporary of the size and type of `like`, which is a block or less."""
        return self._wide.view(like.dtype)[: like.size]


scratch = _Scratch()

"""Running models while packing and verifying: quietly, on the CPU, and not for ever."""

import os
from collections.abc import Mapping, Sequence
from threading import Timer
from typing import Any

import onnxruntime

from conx.runtime.options import quiet_options
from conx.runtime.providers import CPU

__all__ = ["open_plain", "run_within"]


def open_plain(path: str | os.PathLike[str], seconds: float | None = None) -> "Plain":
    """A model file on one thread of the CPU, so that results do not depend on how many there are."""
    options = quiet_options()
    options.intra_op_num_threads = 1
    return Plain(onnxruntime.InferenceSession(os.fspath(path), options, providers=[CPU]), seconds)


class Plain:
    """A session that is called like a function from a feed to the outputs, in their order."""

    def __init__(self, session: Any, seconds: float | None) -> None:
        self.session, self.seconds = session, seconds
        self.inputs = session.get_inputs()
        self.names = [output.name for output in session.get_outputs()]

    def __call__(self, feed: Mapping[str, Any]) -> list[Any]:
        return run_within(self.session, self.names, feed, self.seconds)


def run_within(session: Any, names: Sequence[str], feed: Mapping[str, Any], seconds: float | None) -> list[Any]:
    """As `session.run(names, feed)`, but ended after so many seconds, if it looks at that: a loop may have no end.

    Raises:
        RuntimeError: as of onnxruntime; of a run that was ended too.
    """
    options = onnxruntime.RunOptions()
    timer = None if seconds is None else Timer(seconds, setattr, (options, "terminate", True))
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        found: list[Any] = session.run(names, feed, options)
        return found
    finally:
        if timer is not None:
            timer.cancel()

"""The float16 graph, tried on inputs: the user's, or random ones that fit the model."""

from collections.abc import Sequence
from typing import Any

from conx.feeds import Feed, fitting_feeds, read_feeds
from conx.graph.fp16 import Half, to_float16
from conx.graph.fp16_search import BOUND, GROSS, search_float16
from conx.graph.read import SourceModel
from conx.packing.settings import Settings
from conx.runtime.running import open_plain

__all__ = ["tried_float16"]

SAMPLES = 2
SECONDS = 20.0  # for a run


def tried_float16(model: SourceModel, settings: Settings) -> Half:
    """The float16 model, with what goes wrong in float16 kept float32.

    Args:
        model: the float model. Its path is the user's model, which has the same inputs.
        settings: whether models are run at all, and the user's inputs, if there are any.
    """
    if not settings.verify:
        return to_float16(model, io=settings.half_io)

    def feeds() -> Sequence[Feed]:
        plain = open_plain(model.path, SECONDS)
        if settings.calibration is not None:
            return read_feeds(settings.calibration, plain.inputs)
        return fitting_feeds(plain.inputs, plain, count=SAMPLES)

    def opened(path: Any) -> Any:
        return open_plain(path, SECONDS)

    bound = GROSS if settings.calibration is None else BOUND
    return search_float16(model, opened, feeds, io=settings.half_io, bound=bound)

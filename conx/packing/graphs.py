"""The graphs of a .conx file: the model as it was built, and one to run for each precision."""

import logging
from collections.abc import Sequence
from typing import Any

from conx.container.records import RUN, SOURCE, External, Graph, Hole, Stream
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.graph.facts import computes_in_floats
from conx.graph.fp16 import Half, to_float16
from conx.graph.read import SourceModel
from conx.graph.skeleton import Skeleton, run_skeleton, source_skeleton
from conx.graph.ties import Tie

__all__ = ["write_graphs"]

log = logging.getLogger("conx")


def write_graphs(
    writer: Writer, source: SourceModel, ties: Sequence[Tie], precisions: Sequence[str], external_above: int
) -> tuple[list[Graph], dict[str, int]]:
    """Make and write the graphs.

    Args:
        writer: takes the messages.
        source: the model.
        ties: which weight is stored for which; those that are stored are the file's tensors, in their order.
        precisions: which run graphs are wanted beside the model's own.
        external_above: bytes from which the source's message leaves its weights outside.

    Returns:
        The graphs, and why nodes of the float16 graph stayed float32: {reason: number of nodes}.
    """
    binding = _Binding(source, ties)
    built = source_skeleton(source, external_above)
    graphs = [_record(binding, SOURCE, (), built, writer.add_graph(built.message))]
    floats = computes_in_floats(source)
    wanted = [name for name in precisions if floats]
    plain = not any(weight.dtype.is_float for weight in source.weights)
    # Without weights there is one graph for all.
    own = tuple(sorted({"original"} | {name for name in wanted if name == "fp32" or plain}))
    variants = [(own, run_skeleton(source.proto, source.weights))]
    half = _half(source) if "fp16" in wanted and not plain else None
    if half is not None:
        variants.append((("fp16",), run_skeleton(half.model, source.weights)))
    streams = {built.message: graphs[0].stream}
    for served, skeleton in variants:
        if skeleton.message not in streams:
            streams[skeleton.message] = writer.add_graph(skeleton.message)
        graphs.append(_record(binding, RUN, served, skeleton, streams[skeleton.message]))
    return graphs, half.wide if half is not None else {}


def _half(source: SourceModel) -> Half | None:
    """The float16 model, or None with a warning: a fault in it must not cost the user his file."""
    try:
        return to_float16(source)
    except Exception as e:  # noqa: BLE001
        log.warning("%s: no float16 graph could be made (%s: %s)", source.path, type(e).__name__, e)
        return None


class _Binding:
    """How a graph's weight is had from the stored tensors."""

    def __init__(self, source: SourceModel, ties: Sequence[Tie]) -> None:
        self.weights, self.ties = source.weights, ties
        stored = [number for number, tie in enumerate(ties) if tie.stored == number]
        self.places = {number: place for place, number in enumerate(stored)}

    def __call__(self, number: int, dtype: DType) -> dict[str, Any]:
        tie, weight = self.ties[number], self.weights[number]
        stored = self.weights[tie.stored].shape
        seen = stored if tie.perm is None else tuple(stored[i] for i in tie.perm)
        return {
            "tensor": self.places[tie.stored],
            "dtype": None if dtype is weight.dtype else dtype,
            "perm": tie.perm,
            "shape": None if weight.shape == seen else weight.shape,
        }


def _record(binding: _Binding, role: str, precisions: tuple[str, ...], skeleton: Skeleton, stream: Stream) -> Graph:
    holes = tuple(Hole(at=at, **binding(number, dtype)) for at, number, dtype in skeleton.holes)
    externals = tuple(
        External(location=e.location, name=e.name, repacked=e.repacked, **binding(e.weight, e.dtype))
        for e in skeleton.externals
    )
    return Graph(role, precisions, stream, skeleton.sha256, holes, externals)

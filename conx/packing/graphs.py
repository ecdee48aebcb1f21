"""The graphs of a .conx file: the model as it was built, and one to run for each precision."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from conx.container.records import RUN, SOURCE, External, Graph, Hole, Stream
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.graph.coded_nodes import CodeGrid
from conx.graph.derived import Derived
from conx.graph.facts import computes_in_floats
from conx.graph.fp16 import to_float16
from conx.graph.int8 import Int8, coded_uses, to_int8, with_coded_rows
from conx.graph.merge import merge_equal
from conx.graph.read import SourceModel, weight_number
from conx.graph.skeleton import Skeleton, run_skeleton, source_skeleton
from conx.graph.uses import weight_uses
from conx.packing.bindings import Bindings
from conx.packing.codes import Codes
from conx.packing.settings import Settings

__all__ = ["coded_weights", "write_graphs"]

WORTH_CODES = 1 << 18  # elements of an embedding from which its codes are kept instead of its values

log = logging.getLogger("conx")


def write_graphs(
    writer: Writer, source: SourceModel, bindings: Bindings, codes: Codes, settings: Settings
) -> tuple[list[Graph], dict[str, int]]:
    """Make and write the graphs.

    Args:
        writer: takes the messages.
        source: the model.
        bindings: how weights are had from the file's tensors.
        codes: the int8 codes of weights.
        settings: which run graphs are wanted beside the model's own, and how its own one is kept.

    Returns:
        The graphs, and why nodes of the float16 graph stayed float32: {reason: number of nodes}.
    """
    weights = source.weights
    built = _Variant((), source_skeleton(source, settings.external_above))
    half = None
    if not computes_in_floats(source):
        served = {"int8"} & set(settings.precisions)  # as it is, it was made for integer execution
        variants = [_Variant(_serving(served), run_skeleton(source.proto, weights))]
    elif not any(weight.dtype.is_float for weight in weights):  # one graph for all
        variants = [_Variant(_serving(settings.precisions), run_skeleton(source.proto, weights))]
    else:
        half = small = None
        if "fp16" in settings.precisions:
            half = _attempt(source, "float16", lambda: to_float16(source))
        if "int8" in settings.precisions:
            small = _attempt(source, "int8", lambda: to_int8(source.proto, len(weights), codes))
        served = {"fp32"} & set(settings.precisions)
        if small is not None and not small.derived:
            served |= {"int8"}
        rows = _attempt(source, "float32", lambda: _with_coded_rows(source, codes)) if "fp32" in served else None
        if rows is not None and rows.derived:
            served.remove("fp32")
        variants = [_Variant(_serving(served), run_skeleton(source.proto, weights))]
        if rows is not None and rows.derived:
            variants.append(_Variant(("fp32",), run_skeleton(rows.model, [*weights, *rows.derived]), rows.derived))
        if half is not None:
            merge_equal(half.model, lambda tensor: _content(codes, weight_number(tensor)))
            variants.append(_Variant(("fp16",), run_skeleton(half.model, weights)))
        if small is not None and small.derived:
            skeleton = run_skeleton(small.model, [*weights, *small.derived])
            variants.append(_Variant(("int8",), skeleton, small.derived, small.level_places(skeleton.message)))
    streams: dict[bytes, Stream] = {}
    graphs = []
    for variant in (built, *variants):
        message = variant.skeleton.message
        if message not in streams:
            streams[message] = writer.add_graph(message)
        graphs.append(_record(bindings, variant, streams[message]))
    return graphs, half.wide if half is not None else {}


def _content(codes: Codes, number: int | None) -> Hashable | None:
    """What is equal for equal weights; None for what is none."""
    return None if number is None else (codes.ties[number].stored, codes.ties[number].perm)


def _with_coded_rows(source: SourceModel, codes: Codes) -> Int8:
    """The float32 model with its large embeddings as the codes that are stored, where nothing else uses them."""
    uses = weight_uses(source)

    def stored(number: int, axis: int) -> CodeGrid | None:
        gathered = all((use.op_type, use.slot) == ("Gather", 0) for use in uses[number])
        grid = codes(number, axis) if gathered and source.weights[number].count >= WORTH_CODES else None
        return None if grid is None or grid.made else grid

    return with_coded_rows(source.proto, len(source.weights), stored)


@dataclass(frozen=True)
class _Variant:
    """A graph: the precisions that it serves (none: the model as it was built), and its parts."""

    precisions: tuple[str, ...]
    skeleton: Skeleton
    derived: Sequence[Derived] = ()
    levels: tuple[int, ...] = ()


def _serving(precisions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({"original", *precisions}))


def coded_weights(source: SourceModel) -> list[tuple[int, int]]:
    """The (weight, axis of its channels) whose int8 codes a run graph could use."""
    return _attempt(source, None, lambda: coded_uses(source.proto)) or []


Made = TypeVar("Made")


def _attempt(source: SourceModel, what: str | None, make: Callable[[], Made]) -> Made | None:
    """What `make` makes, or None with a warning: a fault in a further graph must not cost the user his file."""
    try:
        return make()
    except Exception as e:  # noqa: BLE001
        if what is not None:
            log.warning("%s: no %s graph could be made (%s: %s)", source.path, what, type(e).__name__, e)
        return None


def _record(bindings: Bindings, variant: _Variant, stream: Stream) -> Graph:
    count = len(bindings.weights)

    def bound(number: int, dtype: DType) -> dict[str, Any]:
        if number < count:
            return bindings.of_weight(number, dtype)
        return bindings.of_derived(variant.derived[number - count])

    holes = tuple(Hole(at=at, **bound(number, dtype)) for at, number, dtype in variant.skeleton.holes)
    externals = tuple(
        External(location=e.location, name=e.name, repacked=e.repacked, **bound(e.weight, e.dtype))
        for e in variant.skeleton.externals
    )
    role = RUN if variant.precisions else SOURCE
    return Graph(role, variant.precisions, stream, variant.skeleton.sha256, holes, externals, variant.levels)

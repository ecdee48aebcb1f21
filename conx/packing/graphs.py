"""The graphs of a .conx file: the model as it was built, and one to run for each precision."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from conx.container.records import RUN, SOURCE, External, Graph, Hole, Stream
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.graph.coded_nodes import CodeGrid
from conx.graph.derived import Derived
from conx.graph.facts import computes_in_floats
from conx.graph.fp16 import Half
from conx.graph.fp32 import to_float32
from conx.graph.int8 import Int8, coded_uses, to_int8, with_coded_rows
from conx.graph.lift import repacked_beside_rows
from conx.graph.merge import merge_equal, merged
from conx.graph.read import SourceModel, weight_number
from conx.graph.skeleton import Skeleton, run_skeleton, source_skeleton
from conx.graph.transposed import share_transposed
from conx.graph.uses import weight_uses
from conx.packing.floats import FloatModel
from conx.packing.settings import Settings
from conx.packing.store import Store
from conx.packing.trying import tried_float16

__all__ = ["coded_weights", "write_graphs"]

WORTH_CODES = 1 << 18  # elements of an embedding from which its codes are kept instead of its values

Model = Any  # onnx.ModelProto, which is imported below conx.graph alone

log = logging.getLogger("conx")


def write_graphs(
    writer: Writer, source: SourceModel, floats: FloatModel, store: Store, settings: Settings
) -> tuple[list[Graph], Half | None]:
    """Make and write the graphs.

    Args:
        writer: takes the messages.
        source: the model.
        floats: the model that float graphs are made of.
        store: what is stored of the weights.
        settings: which run graphs are wanted beside the model's own, and how its own one is kept.

    Returns:
        The graphs, and the float16 model if there is one.
    """
    making = _Making(source, floats, store, settings)
    streams: dict[bytes, Stream] = {}
    graphs = []
    for variant in (_Variant((), source_skeleton(source, settings.external_above)), *making.variants()):
        message = variant.skeleton.message
        if message not in streams:
            streams[message] = writer.add_graph(message)
        graphs.append(_record(store, variant, streams[message]))
    return graphs, making.half


class _Making:
    """Makes the run graphs."""

    def __init__(self, source: SourceModel, floats: FloatModel, store: Store, settings: Settings) -> None:
        self.source, self.floats, self.store = source, floats, store
        self.settings, self.wanted = settings, set(settings.precisions)
        self.half: Half | None = None

    def variants(self) -> list["_Variant"]:
        """The model's own graph and what else is wanted."""
        own = run_skeleton(self.source.proto, self.source.weights)
        integers = not computes_in_floats(self.source)
        if not self.floats.quantized:
            if integers:  # as it is, it was made for integer execution
                return [_Variant(_serving({"int8"} & self.wanted), own)]
            if not any(weight.dtype.is_float for weight in self.source.weights):  # one graph for all
                return [_Variant(_serving(self.wanted), own)]
        made = [*self._plain(), *([] if integers else self._small()), *self._half()]
        served = {"int8"} & self.wanted  # by the model's own graph, where no other one computes with codes
        for variant in made:
            served -= set(variant.precisions)
        equal = [v for v in made if v.skeleton.message == own.message and not v.derived]
        served |= {precision for variant in equal for precision in variant.precisions}
        return [_Variant(_serving(served), own), *(v for v in made if v not in equal)]

    def _plain(self) -> list["_Variant"]:
        """The float32 graph: of 16-bit floats made float32; large embeddings stay codes."""
        if "fp32" not in self.wanted:
            return []
        model = self._float32()
        if model is None:
            return []
        rows = _attempt(self.source, "float32", lambda: self._coded_rows(model))
        if rows is not None and rows.derived:
            return [_Variant(("fp32",), self._skeleton(rows.model, rows.derived), rows.derived)]
        return [_Variant(("fp32",), self._skeleton(model))]

    def _float32(self) -> Model | None:
        """The float32 model, in which equal weights are one, transposed ones too."""

        def make() -> Model:
            return share_transposed(merged(to_float32(self.floats.model), self._content), self._content)

        return _attempt(self.source, "float32", make)

    def _small(self) -> list["_Variant"]:
        """The int8 graph."""
        if "int8" not in self.wanted:
            return []
        model = self._float32()
        if model is None:
            return []
        count = len(self.floats.model.weights)
        small = _attempt(self.source, "int8", lambda: to_int8(model, count, self.store))
        if small is None or not small.derived:
            return []
        skeleton = self._skeleton(small.model, small.derived)
        return [_Variant(("int8",), skeleton, small.derived, small.level_places(skeleton.message))]

    def _half(self) -> list["_Variant"]:
        """The float16 graph, in which equal weights are one, transposed ones too."""
        if "fp16" not in self.wanted:
            return []
        self.half = _attempt(self.source, "float16", lambda: tried_float16(self.floats.model, self.settings))
        if self.half is None:
            return []
        merge_equal(self.half.model, self._content)
        return [_Variant(("fp16",), self._skeleton(share_transposed(self.half.model, self._content)))]

    def _skeleton(self, model: Model, made: Sequence[Derived] = ()) -> Skeleton:
        return run_skeleton(model, [*self.floats.model.weights, *made])

    def _content(self, tensor: Any) -> tuple[int, tuple[int, ...] | None] | None:
        """What is equal for equal weights; None for what is none."""
        number = weight_number(tensor)
        if number is None or number >= len(self.store.ties):
            return None
        return self.store.ties[number].stored, self.store.ties[number].perm

    def _coded_rows(self, model: Model) -> Int8:
        """The float32 model with its large embeddings as the codes that are stored.

        That is where nothing else uses them, or only products, of which onnxruntime holds a repacked copy anyway.
        """
        weights = self.floats.model.weights
        uses = weight_uses(replace(self.floats.model, proto=model))
        repacked = repacked_beside_rows(model)

        def stored(number: int, axis: int) -> CodeGrid | None:
            fits = number in repacked or all((use.op_type, use.slot) == ("Gather", 0) for use in uses[number])
            grid = self.store(number, axis) if fits and weights[number].count >= WORTH_CODES else None
            return None if grid is None or grid.made else grid

        return with_coded_rows(model, len(weights), stored)


@dataclass(frozen=True)
class _Variant:
    """A graph: the precisions that it serves (none: the model as it was built), and its parts."""

    precisions: tuple[str, ...]
    skeleton: Skeleton
    derived: Sequence[Derived] = ()
    levels: tuple[int, ...] = ()


def _serving(precisions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({"original", *precisions}))


def coded_weights(floats: FloatModel) -> list[tuple[int, int]]:
    """The (weight, axis of its channels) whose int8 codes a run graph could use."""
    return _attempt(floats.model, None, lambda: coded_uses(to_float32(floats.model))) or []


Made = TypeVar("Made")


def _attempt(source: SourceModel, what: str | None, make: Callable[[], Made]) -> Made | None:
    """What `make` makes, or None with a warning: a fault in a further graph must not cost the user his file."""
    try:
        return make()
    except Exception as e:  # noqa: BLE001
        if what is not None:
            log.warning("%s: no %s graph could be made (%s: %s)", source.path, what, type(e).__name__, e)
        return None


def _record(store: Store, variant: _Variant, stream: Stream) -> Graph:
    count = len(store.weights)

    def bound(number: int, dtype: DType) -> dict[str, Any]:
        if number < count:
            return store.of_weight(number, dtype)
        return store.of_derived(variant.derived[number - count])

    holes = tuple(Hole(at=at, **bound(number, dtype)) for at, number, dtype in variant.skeleton.holes)
    externals = tuple(
        External(location=e.location, name=e.name, repacked=e.repacked, **bound(e.weight, e.dtype))
        for e in variant.skeleton.externals
    )
    role = RUN if variant.precisions else SOURCE
    return Graph(role, variant.precisions, stream, variant.skeleton.sha256, holes, externals, variant.levels)

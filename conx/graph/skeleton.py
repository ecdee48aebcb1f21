"""Graphs as the file stores them: messages without weights, and the places where these belong.

A weight is either a hole (its bytes are spliced into the message) or an external (an initializer that a runtime is
handed by location, or that unpacking writes into a data file).
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from conx.dtypes import DType
from conx.graph.derived import Derived
from conx.graph.lift import External, run_graph
from conx.graph.read import MARKER, SourceModel, Weight, weight_number
from conx.graph.tensor_fields import EXTERNAL_DATA, RAW
from conx.graph.wire import Hole, Piece, Whole, field_head, fields, punch

__all__ = ["LOCATION", "MESSAGE_MAX", "Skeleton", "externals_to_holes", "run_skeleton", "source_skeleton"]

MESSAGE_MAX = 2**31 - 1  # bytes; protobuf parses no larger message
LOCATION = "conx-"  # how locations of externals begin


@dataclass(frozen=True)
class Skeleton:
    """`message` without its holes' bytes; `holes` are (position, number of the weight, type wanted)."""

    message: bytes
    holes: list[tuple[int, int, DType]]
    externals: list[External]

    @property
    def sha256(self) -> bytes:
        return hashlib.sha256(self.message).digest()


def source_skeleton(source: SourceModel, external_above: int = MESSAGE_MAX) -> Skeleton:
    """The model as it was built.

    Its weights are holes where they stood, unless the whole would have more than `external_above` bytes: then those
    that lay in external files stay external.
    """
    total = len(source.skeleton) + sum(w.nbytes for w in source.weights)
    outside = total > external_above
    main = source.files[source.path.resolve()]
    externals: list[External] = []

    def leaf(content: bytes) -> list[Piece] | None:
        number = _number(content)
        if number is None:
            return None
        weight = source.weights[number]
        if outside and weight.file is not None and weight.file is not main:
            external = External(f"{LOCATION}{len(externals)}", weight.name, number, False, weight.dtype)
            externals.append(external)
            return [_external_stub(content, external.location)]
        return _hole(content, weight)

    return _punched(source.skeleton, leaf, externals)


def run_skeleton(proto: onnx.ModelProto, weights: Sequence[Weight | Derived]) -> Skeleton:
    """The graph that a session opens: `proto` with stubs, made ready to be handed its weights."""
    run = run_graph(proto, weights)

    def leaf(content: bytes) -> list[Piece] | None:
        number = _number(content)
        return None if number is None else _hole(content, weights[number])

    return _punched(run.proto.SerializeToString(deterministic=True), leaf, run.externals)


def _punched(message: bytes, leaf: Callable[[bytes], list[Piece] | None], externals: list[External]) -> Skeleton:
    skeleton, holes = punch(message, MARKER.encode(), leaf)
    found = []
    for at, hole in holes:
        dtype = DType.from_number(hole.dtype)
        assert dtype is not None  # a weight has a known type
        found.append((at, hole.weight, dtype))
    return Skeleton(skeleton, found, externals)


def externals_to_holes(
    message: bytes, sizes: dict[str, int], outside: Callable[[str], tuple[str, int] | None]
) -> tuple[bytes, list[tuple[int, str]]]:
    """A complete model from a graph with externals: their data spliced in, or in a data file.

    Args:
        message: the graph, its own holes filled.
        sizes: bytes of each external, by location.
        outside: for a location, the (file name, offset) where its bytes will lie, or None to splice them in.

    Returns:
        The message without the bytes to be spliced in, and [(position, location)] of these.
    """
    locations = {location: i for i, location in enumerate(sizes)}

    def leaf(content: bytes) -> list[Piece] | None:
        tensor = onnx.TensorProto.FromString(content)
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        if location not in locations:
            return None
        size = sizes[location]
        place = outside(location)
        if place is None:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            return [
                tensor.SerializeToString(deterministic=True),
                field_head(RAW, size),
                Hole(locations[location], size),
            ]
        del tensor.external_data[:]
        for key, value in zip(("location", "offset", "length"), (*place, size), strict=True):
            tensor.external_data.add(key=key, value=str(value))
        return [tensor.SerializeToString(deterministic=True)]

    skeleton, holes = punch(message, LOCATION.encode(), leaf)
    names = list(sizes)
    return skeleton, [(at, names[hole.weight]) for at, hole in holes]


def _number(content: bytes) -> int | None:
    """The weight that a tensor stands for, if it is a stub."""
    return weight_number(onnx.TensorProto.FromString(content)) if MARKER.encode() in content else None


def _hole(content: bytes, weight: Weight | Derived) -> list[Piece]:
    """The tensor with a hole at the place of its stub, under the field that held the data."""
    number = onnx.TensorProto.FromString(content).data_type
    dtype = DType.from_number(number)
    assert dtype is not None  # a weight has a known type
    size, tag = dtype.nbytes(weight.count), weight.tag if dtype is weight.dtype else RAW
    pieces: list[Piece] = []
    data = Whole(content)
    for f in fields(data, 0, len(content)):
        if f.number == EXTERNAL_DATA:
            pieces += [field_head(tag, size), Hole(weight.number, size, number)]
        else:
            pieces.append(content[f.start : f.end])
    return pieces


def _external_stub(content: bytes, location: str) -> bytes:
    tensor = onnx.TensorProto.FromString(content)
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=location)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    stub: bytes = tensor.SerializeToString(deterministic=True)
    return stub

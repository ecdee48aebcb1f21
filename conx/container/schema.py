"""Maps of the index <-> records, one pair of functions for each kind, with the rules that need nothing but the record.

Keys that are not known are ignored; rules that need other records or the whole file are in `index.py`.
"""

from typing import Any

from conx.container.bindings import parse_externals, parse_holes, serialize_external, serialize_hole
from conx.container.fields import as_array, as_bytes, as_int, as_ints, as_map, as_name, as_str, refuse, required
from conx.container.limits import (
    MAX_CHUNK_RAW,
    MAX_CHUNK_STORED,
    MAX_CHUNKS,
    MAX_ELEMENTS,
    MAX_GRAPH_RAW,
    MAX_LEVELS,
    MAX_SEGMENT,
    MIN_SEGMENT,
    PAGE_ROWS,
    SEGMENT,
)
from conx.container.records import RUN, SOURCE, Graph, Original, Page, Stream, Tensor
from conx.container.shapes import parse_dtype, parse_permutation, parse_shape

__all__ = [
    "MIN_FRAME",
    "ROW_SIZE",
    "parse_graph",
    "parse_original",
    "parse_page",
    "parse_strings",
    "parse_tensor",
    "serialize_graph",
    "serialize_original",
    "serialize_page",
    "serialize_tensor",
]

MIN_FRAME = 13
"""Bytes of the smallest frame, which holds nothing."""

ROW_SIZE = 40
"""Bytes of a row of the chunk table: stored and raw size, SHA-256."""


def parse_page(value: Any, path: str, last: bool) -> Page:
    """A page of the chunk table. Raises FormatError."""
    rows, stored, raw, data, sha256 = as_array(value, path, length=5)
    as_int(rows, f"{path}[0]", 1 if last else PAGE_ROWS, PAGE_ROWS)
    as_int(stored, f"{path}[1]", MIN_FRAME, MAX_CHUNK_STORED)
    as_int(raw, f"{path}[2]", ROW_SIZE * rows, ROW_SIZE * rows)
    as_int(data, f"{path}[3]", rows * MIN_FRAME, rows * MAX_CHUNK_STORED)
    return Page(rows, stored, raw, data, as_bytes(sha256, f"{path}[4]"))


def serialize_page(page: Page) -> list[Any]:
    """The page as an array."""
    return [page.rows, page.stored, page.raw, page.data, page.sha256]


def parse_tensor(value: Any, path: str) -> Tensor:
    """A tensor. Raises FormatError."""
    fields = as_map(value, path)
    shape = parse_shape(required(fields, "shape", path), f"{path}.shape")
    dtype = parse_dtype(required(fields, "dtype", path), f"{path}.dtype")
    segment = as_int(fields.get("segment", SEGMENT), f"{path}.segment", MIN_SEGMENT, MAX_SEGMENT)
    if dtype.bits < 8 and segment % 8:
        raise refuse(f"{path}.segment", segment, f"must be a multiple of 8 for {dtype.label}")
    return Tensor(
        name=as_name(required(fields, "name", path), f"{path}.name"),
        shape=shape,
        dtype=dtype,
        codec=as_name(required(fields, "codec", path), f"{path}.codec"),
        params=as_map(required(fields, "params", path), f"{path}.params"),
        side=_parse_streams(fields.get("side", []), f"{path}.side"),
        streams=_parse_streams(required(fields, "streams", path), f"{path}.streams"),
        sha256=as_bytes(required(fields, "sha256", path), f"{path}.sha256"),
        order=parse_permutation(fields, "order", path, len(shape)),
        segment=segment,
    )


def serialize_tensor(tensor: Tensor) -> dict[str, Any]:
    """The tensor as a map; keys at their default are left out."""
    fields: dict[str, Any] = {
        "codec": tensor.codec,
        "dtype": tensor.dtype.label,
        "name": tensor.name,
        "params": tensor.params,
        "sha256": tensor.sha256,
        "shape": tensor.shape,
        "streams": [_serialize_stream(stream) for stream in tensor.streams],
    }
    if tensor.order is not None and tensor.order != tuple(range(len(tensor.shape))):
        fields["order"] = tensor.order
    if tensor.segment != SEGMENT:
        fields["segment"] = tensor.segment
    if tensor.side:
        fields["side"] = [_serialize_stream(stream) for stream in tensor.side]
    return fields


def parse_graph(value: Any, path: str, tensors: tuple[Tensor, ...]) -> Graph:
    """A graph, whose bindings are of `tensors`. Raises FormatError."""
    fields = as_map(value, path)
    role = as_str(required(fields, "role", path), f"{path}.role")
    if role not in {SOURCE, RUN}:
        raise refuse(f"{path}.role", role, f"must be {SOURCE!r} or {RUN!r}")
    precisions = parse_strings(required(fields, "precisions", path), f"{path}.precisions")
    if bool(precisions) != (role == RUN):
        rule = f"a graph of role {role!r} has {'some' if role == RUN else 'none'}"
        raise refuse(f"{path}.precisions", precisions, rule)
    stream = _parse_stream(required(fields, "stream", path), f"{path}.stream", MAX_GRAPH_RAW)
    levels = as_ints(fields.get("accuracy_levels", []), f"{path}.accuracy_levels", 0, stream.size - 1, MAX_LEVELS)
    if list(levels) != sorted(set(levels)):
        raise refuse(f"{path}.accuracy_levels", levels, "must ascend, and none may be there twice")
    return Graph(
        role=role,
        precisions=precisions,
        stream=stream,
        sha256=as_bytes(required(fields, "sha256", path), f"{path}.sha256"),
        holes=parse_holes(fields.get("holes", []), f"{path}.holes", tensors, stream.size),
        externals=parse_externals(fields.get("externals", []), f"{path}.externals", tensors),
        accuracy_levels=levels,
    )


def serialize_graph(graph: Graph, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The graph as a map; keys at their default are left out."""
    fields: dict[str, Any] = {
        "precisions": graph.precisions,
        "role": graph.role,
        "sha256": graph.sha256,
        "stream": _serialize_stream(graph.stream),
    }
    if graph.accuracy_levels:
        fields["accuracy_levels"] = graph.accuracy_levels
    if graph.holes:
        fields["holes"] = [serialize_hole(hole, tensors) for hole in graph.holes]
    if graph.externals:
        fields["externals"] = [serialize_external(external, tensors) for external in graph.externals]
    return fields


def parse_original(value: Any, path: str, tensors: tuple[Tensor, ...]) -> Original:
    """A file of the model as it was. Raises FormatError."""
    fields = as_map(value, path)
    stream = _parse_stream(required(fields, "stream", path), f"{path}.stream")
    size = as_int(required(fields, "size", path), f"{path}.size", 0, MAX_ELEMENTS)
    holes = parse_holes(fields.get("holes", []), f"{path}.holes", tensors, stream.size, size)
    total = stream.size + sum(hole.nbytes_of(tensors[hole.tensor]) for hole in holes)
    if total != size:
        raise refuse(f"{path}.size", size, f"stream and holes have {total} bytes")
    name = as_name(required(fields, "name", path), f"{path}.name")
    return Original(name, size, as_bytes(required(fields, "sha256", path), f"{path}.sha256"), stream, holes)


def serialize_original(original: Original, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The file as a map; keys at their default are left out."""
    fields: dict[str, Any] = {
        "name": original.name,
        "sha256": original.sha256,
        "size": original.size,
        "stream": _serialize_stream(original.stream),
    }
    if original.holes:
        fields["holes"] = [serialize_hole(hole, tensors) for hole in original.holes]
    return fields


def parse_strings(value: Any, path: str) -> tuple[str, ...]:
    """An array of strings that ascend. Raises FormatError."""
    items = as_array(value, path)
    for i, item in enumerate(items):
        as_name(item, f"{path}[{i}]")
        if i and item <= items[i - 1]:
            raise refuse(f"{path}[{i}]", item, "must ascend, and none may be there twice")
    return tuple(items)


def _parse_streams(value: Any, path: str) -> tuple[Stream, ...]:
    return tuple([_parse_stream(item, f"{path}[{i}]") for i, item in enumerate(as_array(value, path))])


def _parse_stream(value: Any, path: str, most: int = MAX_CHUNKS * MAX_CHUNK_RAW) -> Stream:
    chunk, offset, size = as_array(value, path, length=3)
    as_int(chunk, f"{path}[0]", 0, MAX_CHUNKS - 1)
    as_int(offset, f"{path}[1]", 0, MAX_CHUNK_RAW - 1)
    as_int(size, f"{path}[2]", 0, most)
    return Stream(chunk, offset, size)


def _serialize_stream(stream: Stream) -> list[int]:
    return [stream.chunk, stream.offset, stream.size]

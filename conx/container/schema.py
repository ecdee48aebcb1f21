"""Maps of the index <-> records, one pair of functions for each kind, with the rules that need nothing but the record.

Keys that are not known are ignored; rules that need other records or the whole file are in `index.py`.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from conx.container.fields import as_array, as_bytes, as_int, as_ints, as_map, as_name, as_str, refuse, required
from conx.container.limits import (
    MAX_CHUNK_RAW,
    MAX_CHUNK_STORED,
    MAX_CHUNKS,
    MAX_ELEMENTS,
    MAX_GRAPH_RAW,
    MAX_LOCATION,
    MAX_RANK,
    MAX_SEGMENT,
    MAX_TENSORS,
    MIN_SEGMENT,
    PAGE_ROWS,
    SEGMENT,
)
from conx.container.records import RUN, SOURCE, External, Graph, Hole, Page, Stream, Tensor
from conx.dtypes import DType

__all__ = [
    "MIN_FRAME",
    "ROW_SIZE",
    "parse_graph",
    "parse_page",
    "parse_strings",
    "parse_tensor",
    "serialize_graph",
    "serialize_page",
    "serialize_tensor",
]

MIN_FRAME = 13
"""Bytes of the smallest frame, which holds nothing."""

ROW_SIZE = 40
"""Bytes of a row of the chunk table: stored and raw size, SHA-256."""

_LOCATION = re.compile(rf"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{{0,{MAX_LOCATION - 2}}}[A-Za-z0-9_-])?", re.ASCII)
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices, with any ending."""


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
    shape = _parse_shape(required(fields, "shape", path), f"{path}.shape")
    dtype = _parse_dtype(required(fields, "dtype", path), f"{path}.dtype")
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
        order=_parse_permutation(fields, "order", path, len(shape)),
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
    return Graph(
        role=role,
        precisions=precisions,
        stream=stream,
        sha256=as_bytes(required(fields, "sha256", path), f"{path}.sha256"),
        holes=_parse_holes(fields.get("holes", []), f"{path}.holes", tensors, stream.size),
        externals=_parse_externals(fields.get("externals", []), f"{path}.externals", tensors),
    )


def serialize_graph(graph: Graph, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The graph as a map; keys at their default are left out."""
    fields: dict[str, Any] = {
        "precisions": graph.precisions,
        "role": graph.role,
        "sha256": graph.sha256,
        "stream": _serialize_stream(graph.stream),
    }
    if graph.holes:
        fields["holes"] = [{"at": hole.at} | _serialize_binding(hole, tensors) for hole in graph.holes]
    if graph.externals:
        fields["externals"] = [
            {"location": external.location, "name": external.name}
            | ({"repacked": True} if external.repacked else {})
            | _serialize_binding(external, tensors)
            for external in graph.externals
        ]
    return fields


def parse_strings(value: Any, path: str) -> tuple[str, ...]:
    """An array of strings that ascend. Raises FormatError."""
    items = as_array(value, path)
    for i, item in enumerate(items):
        as_name(item, f"{path}[{i}]")
        if i and item <= items[i - 1]:
            raise refuse(f"{path}[{i}]", item, "must ascend, and none may be there twice")
    return tuple(items)


def _parse_holes(value: Any, path: str, tensors: tuple[Tensor, ...], size: int) -> tuple[Hole, ...]:
    holes: list[Hole] = []
    total, last = size, 0
    for i, item in enumerate(as_array(value, path)):
        here = f"{path}[{i}]"
        fields = as_map(item, here)
        at = as_int(required(fields, "at", here), f"{here}.at", 0, size)
        if at < last:
            raise refuse(f"{here}.at", at, f"positions must ascend, the one before is {last}")
        hole = Hole(at, **_parse_binding(fields, here, tensors))
        total += hole.nbytes_of(tensors[hole.tensor])
        if total > MAX_GRAPH_RAW:
            raise refuse(here, total, f"bytes of the graph up to this hole, at most {MAX_GRAPH_RAW}")
        holes.append(hole)
        last = at
    return tuple(holes)


def _parse_externals(value: Any, path: str, tensors: tuple[Tensor, ...]) -> tuple[External, ...]:
    externals: list[External] = []
    seen: set[str] = set()
    for i, item in enumerate(as_array(value, path)):
        here = f"{path}[{i}]"
        fields = as_map(item, here)
        location = _parse_location(required(fields, "location", here), f"{here}.location")
        if location.lower() in seen:
            raise refuse(f"{here}.location", location, "must differ from all before it, not only in case")
        seen.add(location.lower())
        name = as_name(required(fields, "name", here), f"{here}.name")
        repacked = fields.get("repacked", False)
        if type(repacked) is not bool:
            raise refuse(f"{here}.repacked", repacked, "must be true or false")
        externals.append(External(location, name, repacked, **_parse_binding(fields, here, tensors)))
    return tuple(externals)


def _parse_location(value: Any, path: str) -> str:
    """Locations become file names where a runtime takes nothing else."""
    location = as_str(value, path)
    if not _LOCATION.fullmatch(location):
        rule = f"must be 1 to {MAX_LOCATION} letters, digits or . _ - of ASCII, no dot at either end"
        raise refuse(path, location, rule)
    if _RESERVED.fullmatch(location):
        raise refuse(path, location, "is a device's name on Windows")
    return location


def _parse_binding(fields: Mapping[str, Any], path: str, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The fields that holes and externals share, defaults as None."""
    index = as_int(required(fields, "tensor", path), f"{path}.tensor", 0, MAX_TENSORS)
    if index >= len(tensors):
        raise refuse(f"{path}.tensor", index, f"there are {len(tensors)} tensors")
    tensor = tensors[index]
    result: dict[str, Any] = {"tensor": index}
    if "dtype" in fields:
        dtype = _parse_dtype(fields["dtype"], f"{path}.dtype")
        if dtype is not tensor.dtype:
            if not (tensor.dtype in _CONVERTED_FROM and dtype in _CONVERTED_TO):
                raise refuse(f"{path}.dtype", dtype.label, f"a tensor of {tensor.dtype.label} is not converted to it")
            result["dtype"] = dtype
    perm = _parse_permutation(fields, "perm", path, len(tensor.shape))
    if perm is not None:
        result["perm"] = perm
    if "shape" in fields:
        shape = _parse_shape(fields["shape"], f"{path}.shape")
        if prod(shape) != tensor.count:
            raise refuse(f"{path}.shape", shape, f"must have the tensor's {tensor.count} elements")
        if shape != (tensor.shape if perm is None else tuple(tensor.shape[axis] for axis in perm)):
            result["shape"] = shape
    return result


_CONVERTED_FROM = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_CONVERTED_TO = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def _serialize_binding(binding: Hole | External, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    tensor = tensors[binding.tensor]
    fields: dict[str, Any] = {"tensor": binding.tensor}
    if binding.dtype not in {None, tensor.dtype}:
        fields["dtype"] = binding.dtype_of(tensor).label
    permuted = tensor.shape
    if binding.perm is not None and binding.perm != tuple(range(len(tensor.shape))):
        fields["perm"] = binding.perm
        permuted = tuple(tensor.shape[axis] for axis in binding.perm)
    if binding.shape not in {None, permuted}:
        fields["shape"] = binding.shape
    return fields


def _parse_dtype(value: Any, path: str) -> DType:
    dtype = DType.from_label(as_str(value, path))
    if dtype is None:
        raise refuse(path, value, "is not an element type of the format")
    return dtype


def _parse_shape(value: Any, path: str) -> tuple[int, ...]:
    shape = as_ints(value, path, 0, MAX_ELEMENTS, MAX_RANK)
    if prod([dim for dim in shape if dim]) > MAX_ELEMENTS:
        raise refuse(path, shape, f"dims multiply to more than {MAX_ELEMENTS} elements")
    return shape


def _parse_permutation(fields: Mapping[str, Any], key: str, path: str, rank: int) -> tuple[int, ...] | None:
    """The axes under `key`; None where they are missing or the identity."""
    if key not in fields:
        return None
    axes = as_ints(fields[key], f"{path}.{key}", 0, MAX_RANK, MAX_RANK)
    if sorted(axes) != list(range(rank)):
        raise refuse(f"{path}.{key}", axes, f"must be a permutation of the {rank} axes")
    return None if axes == tuple(range(rank)) else axes


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

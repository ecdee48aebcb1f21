"""Holes and externals: maps of the index <-> records.

A binding is a tensor and the form in which a graph wants it. What a codec's parameters allow is seen when decoding.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from conx.container.fields import as_array, as_int, as_map, as_name, as_str, refuse, required
from conx.container.limits import MAX_ELEMENTS, MAX_GRAPH_RAW, MAX_LOCATION, MAX_TENSORS
from conx.container.names import RESERVED
from conx.container.records import CODES, SCALES, VALUES, ZERO_POINTS, External, Grid, Hole, Tensor
from conx.container.shapes import parse_dtype, parse_permutation, parse_shape
from conx.dtypes import DType

__all__ = ["parse_externals", "parse_holes", "serialize_external", "serialize_hole"]

_LOCATION = re.compile(rf"[A-Za-z0-9_-](?:[A-Za-z0-9._-]{{0,{MAX_LOCATION - 2}}}[A-Za-z0-9_-])?", re.ASCII)


def parse_holes(
    value: Any, path: str, tensors: tuple[Tensor, ...], size: int, most: int = MAX_GRAPH_RAW
) -> tuple[Hole, ...]:
    """The holes of what has `size` bytes without them, and at most `most` with them. Raises FormatError."""
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
        if total > most:
            raise refuse(here, total, f"bytes of the graph up to this hole, at most {most}")
        holes.append(hole)
        last = at
    return tuple(holes)


def parse_externals(value: Any, path: str, tensors: tuple[Tensor, ...]) -> tuple[External, ...]:
    """The externals of a graph. Raises FormatError."""
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
    if RESERVED.fullmatch(location):
        raise refuse(path, location, "is a device's name on Windows")
    return location


def serialize_hole(hole: Hole, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The hole as a map; keys at their default are left out."""
    return {"at": hole.at} | _serialize_binding(hole, tensors)


def serialize_external(external: External, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The external as a map; keys at their default are left out."""
    fields = {"location": external.location, "name": external.name} | _serialize_binding(external, tensors)
    return fields | ({"repacked": True} if external.repacked else {})


def _parse_binding(fields: Mapping[str, Any], path: str, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The fields that holes and externals share, defaults as None."""
    index = _parse_index(required(fields, "tensor", path), f"{path}.tensor", tensors)
    tensor = tensors[index]
    view = as_str(fields.get("view", VALUES), f"{path}.view")
    if view not in _VIEWS:
        raise refuse(f"{path}.view", view, f"must be one of {', '.join(_VIEWS)}")
    result: dict[str, Any] = {"tensor": index, "view": view}
    result["perm"] = perm = parse_permutation(fields, "perm", path, len(tensor.shape))
    result["repeat"] = repeat = as_int(fields.get("repeat", 1), f"{path}.repeat", 1, MAX_ELEMENTS)
    if view == VALUES:
        return result | _parse_values(fields, path, tensor, perm, repeat)
    result["dtype"] = dtype = parse_dtype(required(fields, "dtype", path), f"{path}.dtype")
    if dtype not in _VIEWS[view]:
        raise refuse(f"{path}.dtype", dtype.label, f"{view} are one of {', '.join(d.label for d in _VIEWS[view])}")
    result["shape"] = shape = parse_shape(required(fields, "shape", path), f"{path}.shape")
    if view == CODES:
        result |= _parse_codes(fields, path, tensor, perm, tensors)
        dims = [tensor.shape[axis] for axis in perm or range(len(tensor.shape))]
        if prod(shape) != prod([*dims[:-1], result.get("pad", dims[-1])] if dims else []):
            raise refuse(f"{path}.shape", shape, f"has not the elements of {dims}, padded")
    return result


def _parse_values(
    fields: Mapping[str, Any], path: str, tensor: Tensor, perm: tuple[int, ...] | None, repeat: int
) -> dict[str, Any]:
    """Type and dims of a tensor's values."""
    result: dict[str, Any] = {}
    if "dtype" in fields:
        dtype = parse_dtype(fields["dtype"], f"{path}.dtype")
        if dtype is not tensor.dtype:
            if not (tensor.dtype in _CONVERTED_FROM and dtype in _CONVERTED_TO):
                raise refuse(f"{path}.dtype", dtype.label, f"a tensor of {tensor.dtype.label} is not converted to it")
            result["dtype"] = dtype
    if repeat != 1:
        required(fields, "shape", path)
        if tensor.dtype.bits < 8:
            raise refuse(f"{path}.repeat", repeat, "elements smaller than a byte are not repeated")
    if "shape" in fields:
        shape = parse_shape(fields["shape"], f"{path}.shape")
        if prod(shape) != tensor.count * repeat:
            raise refuse(f"{path}.shape", shape, f"must have {tensor.count * repeat} elements")
        if repeat != 1 or shape != (tensor.shape if perm is None else tuple(tensor.shape[axis] for axis in perm)):
            result["shape"] = shape
    return result


def _parse_codes(
    fields: Mapping[str, Any],
    path: str,
    tensor: Tensor,
    perm: tuple[int, ...] | None,
    tensors: tuple[Tensor, ...],
) -> dict[str, Any]:
    """Grid and padding of a tensor's codes."""
    result: dict[str, Any] = {}
    if "grid" in fields:
        index, axis = as_array(fields["grid"], f"{path}.grid", length=2)
        if tensor.dtype not in _CONVERTED_FROM:
            raise refuse(f"{path}.grid", [index, axis], f"a tensor of {tensor.dtype.label} has no codes")
        axis = as_int(axis, f"{path}.grid[1]", 0, len(tensor.shape) - 1)
        scales = tensors[_parse_index(index, f"{path}.grid[0]", tensors)]
        if scales.dtype is not DType.FLOAT32 or scales.shape != (tensor.shape[axis],):
            raise refuse(f"{path}.grid[0]", index, f"must be a tensor of {tensor.shape[axis]} float32 scales")
        result["grid"] = Grid(index, axis)
    if "pad" in fields:
        if not tensor.shape:
            raise refuse(f"{path}.pad", fields["pad"], "a scalar has no last axis")
        last = tensor.shape[-1 if perm is None else perm[-1]]
        result["pad"] = as_int(fields["pad"], f"{path}.pad", last, MAX_ELEMENTS)
    if fields.get("repeat", 1) != 1:
        raise refuse(f"{path}.repeat", fields["repeat"], "codes are not repeated")
    return result


def _parse_index(value: Any, path: str, tensors: tuple[Tensor, ...]) -> int:
    index = as_int(value, path, 0, MAX_TENSORS)
    if index >= len(tensors):
        raise refuse(path, index, f"there are {len(tensors)} tensors")
    return index


_CONVERTED_FROM = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_CONVERTED_TO = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_INTEGERS = (DType.INT8, DType.UINT8, DType.INT4, DType.UINT4)
_VIEWS: dict[str, tuple[DType, ...]] = {
    VALUES: (),
    CODES: _INTEGERS,
    SCALES: _CONVERTED_TO,
    ZERO_POINTS: _INTEGERS,
}
"""What may be bound of a tensor, and the element types that it may have where it is not the values."""


def _serialize_binding(binding: Hole | External, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    tensor = tensors[binding.tensor]
    fields: dict[str, Any] = {"tensor": binding.tensor}
    if binding.view != VALUES:
        fields["view"] = binding.view
    if binding.view != VALUES or binding.dtype not in {None, tensor.dtype}:
        fields["dtype"] = binding.dtype_of(tensor).label
    permuted = tensor.shape
    if binding.perm is not None and binding.perm != tuple(range(len(tensor.shape))):
        fields["perm"] = binding.perm
        permuted = tuple(tensor.shape[axis] for axis in binding.perm)
    if binding.view != VALUES or binding.repeat != 1 or binding.shape not in {None, permuted}:
        fields["shape"] = binding.shape_of(tensor)
    if binding.grid is not None:
        fields["grid"] = [binding.grid.scales, binding.grid.axis]
    if binding.pad is not None:
        fields["pad"] = binding.pad
    if binding.repeat != 1:
        fields["repeat"] = binding.repeat
    return fields

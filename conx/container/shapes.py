"""Element types, dims and permutations of axes, as fields of the index."""

from collections.abc import Mapping
from math import prod
from typing import Any

from conx.container.fields import as_ints, as_str, refuse
from conx.container.limits import MAX_ELEMENTS, MAX_RANK
from conx.dtypes import DType

__all__ = ["parse_dtype", "parse_permutation", "parse_shape"]


def parse_dtype(value: Any, path: str) -> DType:
    """An element type. Raises FormatError."""
    dtype = DType.from_label(as_str(value, path))
    if dtype is None:
        raise refuse(path, value, "is not an element type of the format")
    return dtype


def parse_shape(value: Any, path: str) -> tuple[int, ...]:
    """Dims. Raises FormatError."""
    shape = as_ints(value, path, 0, MAX_ELEMENTS, MAX_RANK)
    if prod([dim for dim in shape if dim]) > MAX_ELEMENTS:
        raise refuse(path, shape, f"dims multiply to more than {MAX_ELEMENTS} elements")
    return shape


def parse_permutation(fields: Mapping[str, Any], key: str, path: str, rank: int) -> tuple[int, ...] | None:
    """The axes under `key`; None where they are missing or the identity."""
    if key not in fields:
        return None
    axes = as_ints(fields[key], f"{path}.{key}", 0, MAX_RANK, MAX_RANK)
    if sorted(axes) != list(range(rank)):
        raise refuse(f"{path}.{key}", axes, f"must be a permutation of the {rank} axes")
    return None if axes == tuple(range(rank)) else axes

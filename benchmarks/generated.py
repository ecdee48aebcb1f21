"""Random inputs that fit a model's own description, for models without inputs of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.feeds import Array, Feed, InputSpec

__all__ = ["generated_feeds"]

_BATCH, _LENGTH = 1, 16  # for free sizes: the first axis, and any other
_DTYPES = {
    "float": np.float32, "float16": np.float16, "double": np.float64, "int8": np.int8, "int16": np.int16,
    "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "uint64": np.uint64, "bool": np.bool_, "string": np.str_,
}  # fmt: skip
_FEW = 8  # integers are below this where nothing is known: most tables that they index are longer


def generated_feeds(
    session_inputs: Sequence[InputSpec], seed: int, count: int = 1, limits: Mapping[str, int] | None = None
) -> list[Feed]:
    """Makes random inputs: normal floats, small integers, masks of ones, lengths that agree with the other sizes.

    Every free first axis is 1 and every other free axis 16, whatever its name, so that sizes that the model relates
    without saying so agree.

    Args:
        session_inputs: ``session.get_inputs()``.
        seed: the same seed gives the same feeds.
        count: number of feeds.
        limits: for integer inputs by name, the number above the largest allowed.

    Returns:
        ``count`` feeds.

    Raises:
        ValueError: an input is no tensor, or of a type that numpy lacks.
    """
    draw = np.random.default_rng(seed)
    limits = limits or {}
    return [{spec.name: _values(spec, draw, limits.get(spec.name)) for spec in session_inputs} for _ in range(count)]


def _values(spec: InputSpec, draw: np.random.Generator, limit: int | None) -> Array:
    kind = spec.type.removeprefix("tensor(").removesuffix(")")
    if kind not in _DTYPES or not spec.type.startswith("tensor("):
        raise ValueError(f"input {spec.name!r} is a {spec.type}: no values can be made for it")
    dtype = np.dtype(_DTYPES[kind])
    shape = [size if isinstance(size, int) else (_LENGTH if axis else _BATCH) for axis, size in enumerate(spec.shape)]
    if dtype.kind == "f":
        return draw.standard_normal(shape).astype(dtype)
    if dtype.kind == "U":
        return np.full(shape, "text", dtype=object)
    if limit is None and "mask" in spec.name.lower():
        return np.ones(shape, dtype)
    if limit is None and "len" in spec.name.lower():
        return np.full(shape, _LENGTH, dtype)
    if limit is None and spec.name in ("sr", "sample_rate"):
        return np.full(shape, 16000, dtype)
    return draw.integers(0, 2 if dtype.kind == "b" else limit or _FEW, shape).astype(dtype)

"""Inputs to run a model with: the user's, from .npz files, or made to fit the model's own description."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conx.errors import UnsupportedError

__all__ = ["Feed", "InputSpec", "generated_feeds", "read_feeds"]

Feed = dict[str, npt.NDArray[Any]]

BATCH, LENGTH = 1, 16  # for free sizes: the first axis, and any other
FEW = 8  # integers are below this where nothing is known: most tables that they index are longer
DTYPES = {
    "float": np.float32, "float16": np.float16, "double": np.float64, "int8": np.int8, "int16": np.int16,
    "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32,
    "uint64": np.uint64, "bool": np.bool_, "string": np.str_,
}  # fmt: skip


class InputSpec(Protocol):
    """What `InferenceSession.get_inputs()` says of an input."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def shape(self) -> Sequence[int | str | None]: ...


def generated_feeds(
    inputs: Sequence[InputSpec],
    seed: int = 0,
    count: int = 1,
    limits: Mapping[str, int] | None = None,
    largest: int = FEW,
) -> list[Feed]:
    """Random inputs: normal floats, small integers, masks of ones, lengths that agree with the other sizes.

    Every free first axis is 1 and every other free axis 16, whatever its name, so that sizes that the model relates
    without saying so agree.

    Args:
        inputs: `session.get_inputs()`.
        seed: the same seed gives the same feeds.
        count: number of feeds.
        limits: for integer inputs by name, the number above the largest allowed.
        largest: what other integers are below.

    Raises:
        UnsupportedError: an input is no tensor, or of a type that NumPy lacks.
    """
    draw = np.random.default_rng(seed)
    known = limits or {}
    return [{spec.name: _values(spec, draw, known.get(spec.name), largest) for spec in inputs} for _ in range(count)]


def read_feeds(source: Any, inputs: Sequence[InputSpec]) -> list[Feed]:
    """The user's inputs.

    Args:
        source: path of an .npz file or of a folder of them, one mapping of arrays, or an iterable of such mappings.
            In a mapping whose arrays have one axis more than the model's inputs, the first axis counts samples.
        inputs: `session.get_inputs()`.

    Raises:
        ValueError: there are none, or arrays are missing or have unequal numbers of samples, by name.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        mappings: Iterable[Any] = [_load(file) for file in files]
    else:
        mappings = [source] if isinstance(source, Mapping) else source
    feeds = [feed for mapping in mappings for feed in _split(dict(mapping), inputs)]
    if not feeds:
        raise ValueError(f"{source}: holds no inputs; give an .npz with an array for each of the model's inputs")
    return feeds


def _load(path: Path) -> Feed:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, AttributeError) as e:
        if isinstance(e, FileNotFoundError):
            raise
        raise ValueError(f"{path}: not an .npz file ({e})") from None


def _split(arrays: Feed, inputs: Sequence[InputSpec]) -> list[Feed]:
    missing = [spec.name for spec in inputs if spec.name not in arrays]
    if missing:
        raise ValueError(f"inputs have no array named {missing[0]!r}, only {', '.join(map(repr, sorted(arrays)))}")
    mine = {spec.name: np.asarray(arrays[spec.name]) for spec in inputs}
    if not inputs or not all(mine[spec.name].ndim == len(spec.shape) + 1 for spec in inputs):
        return [mine]
    counts = {name: len(values) for name, values in mine.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"inputs have unequal numbers of samples: {counts}")
    return [{name: values[i] for name, values in mine.items()} for i in range(next(iter(counts.values())))]


def _values(spec: InputSpec, draw: np.random.Generator, limit: int | None, largest: int) -> npt.NDArray[Any]:
    kind = spec.type.removeprefix("tensor(").removesuffix(")")
    if kind not in DTYPES or not spec.type.startswith("tensor("):
        raise UnsupportedError(f"input {spec.name!r} is a {spec.type}: no values can be made for it; give inputs")
    dtype = np.dtype(DTYPES[kind])
    shape = [size if isinstance(size, int) else (LENGTH if axis else BATCH) for axis, size in enumerate(spec.shape)]
    if dtype.kind == "f":
        return draw.standard_normal(shape).astype(dtype)
    if dtype.kind == "U":
        return np.full(shape, "text", dtype=object)
    if limit is None and "mask" in spec.name.lower():
        return np.ones(shape, dtype)
    if limit is None and "len" in spec.name.lower():
        return np.full(shape, LENGTH, dtype)
    if limit is None and spec.name in ("sr", "sample_rate"):
        return np.full(shape, 16000, dtype)
    if limit is None and any(word in spec.name.lower() for word in ("type", "segment")):
        largest = min(largest, 2)
    bound = 2 if dtype.kind == "b" else limit or largest
    if dtype.itemsize == 1:
        bound = min(bound, 127)
    return draw.integers(0, bound, shape).astype(dtype)

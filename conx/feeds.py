"""Inputs to run a model with: the user's, from .npz files, or made to fit the model's own description."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conx.errors import UnsupportedError

__all__ = ["Feed", "InputSpec", "fitting_feeds", "generated_feeds", "read_feeds"]

Feed = dict[str, npt.NDArray[Any]]

BATCH, LENGTH = 1, 16  # for free sizes: the first axis, and any other
# Lengths that are tried one after the other: nets that halve a picture want many, windows of sound many more.
LENGTHS = (LENGTH, 64, 224, 512, 576, 1024)
PICTURE_LENGTHS = (64, 224, LENGTH, 512)
LARGEST = (1000, 8, 2, 1)  # what random integers are below, likewise: some index a table
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
    length: int = LENGTH,
) -> list[Feed]:
    """Random inputs: normal floats, small integers, masks of ones, lengths that agree with the other sizes.

    Every free first axis is 1, and so is what has its name, or stands alone behind a first axis that counts layers or
    directions. Every other free axis has one length, whatever its name, so that sizes that the model relates without
    saying so agree.

    Args:
        inputs: `session.get_inputs()`.
        seed: the same seed gives the same feeds.
        count: number of feeds.
        limits: for integer inputs by name, the number above the largest allowed.
        largest: what other integers are below.
        length: of free axes.

    Raises:
        UnsupportedError: an input is no tensor, or of a type that NumPy lacks.
    """
    draw = np.random.default_rng(seed)
    known = limits or {}
    batches = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], str)}
    shapes = {spec.name: _shape(spec.shape, batches, length) for spec in inputs}
    return [
        {spec.name: _values(spec, shapes[spec.name], draw, known.get(spec.name), largest, length) for spec in inputs}
        for _ in range(count)
    ]


def fitting_feeds(
    inputs: Sequence[InputSpec], run: Callable[[Feed], object], seed: int = 0, count: int = 1
) -> list[Feed]:
    """Random inputs that a model takes: with sizes and bounds of integers tried until it runs.

    Args:
        inputs: `session.get_inputs()`.
        run: runs the model on a feed, and raises an exception where it cannot.
        seed: the same seed gives the same feeds.
        count: number of feeds; the model is run on the first alone.

    Raises:
        UnsupportedError: as `generated_feeds`, or the model runs on none of what was tried.
    """
    free = any(not isinstance(size, int) for spec in inputs for size in spec.shape)
    whole = any("int" in spec.type for spec in inputs)
    reason = ""
    pictures = any(len(spec.shape) == 4 and "float" in spec.type for spec in inputs)
    lengths = PICTURE_LENGTHS if pictures else LENGTHS
    for length in lengths if free else lengths[:1]:
        for largest in LARGEST if whole else LARGEST[:1]:
            feeds = generated_feeds(inputs, seed, count, largest=largest, length=length)
            try:
                run(feeds[0])
            except Exception as e:  # noqa: BLE001 - whatever a runtime raises
                reason = reason or str(e)
            else:
                return feeds
    raise UnsupportedError(f"the model runs on none of the inputs that were made for it; give inputs ({reason})")


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


def _shape(described: Sequence[int | str | None], batches: Collection[int | str | None], length: int) -> list[int]:
    free = [axis for axis, size in enumerate(described) if not isinstance(size, int)]
    state = len(free) == 1 and free[0] == 1 and isinstance(described[0], int) and described[0] > 1
    return [
        size if isinstance(size, int) else BATCH if axis == 0 or state or size in batches else length
        for axis, size in enumerate(described)
    ]


def _values(
    spec: InputSpec, shape: list[int], draw: np.random.Generator, limit: int | None, largest: int, length: int
) -> npt.NDArray[Any]:
    kind = spec.type.removeprefix("tensor(").removesuffix(")")
    if kind not in DTYPES or not spec.type.startswith("tensor("):
        raise UnsupportedError(f"input {spec.name!r} is a {spec.type}: no values can be made for it; give inputs")
    dtype = np.dtype(DTYPES[kind])
    if dtype.kind == "f":
        return draw.standard_normal(shape).astype(dtype)
    if dtype.kind == "U":
        return np.full(shape, "text", dtype=object)
    if limit is None and "mask" in spec.name.lower():
        return np.ones(shape, dtype)
    if limit is None and "len" in spec.name.lower():
        return np.full(shape, length, dtype)
    if limit is None and spec.name in ("sr", "sample_rate"):
        return np.full(shape, 16000, dtype)
    if limit is None and any(word in spec.name.lower() for word in ("type", "segment")):
        largest = min(largest, 2)
    if limit is None and len(shape) < 2:  # of these some are shapes, and sizes multiply
        largest = min(largest, FEW)
    bound = 2 if dtype.kind == "b" else limit or largest
    if dtype.itemsize == 1:
        bound = min(bound, 127)
    return draw.integers(0, bound, shape).astype(dtype)

"""Reading a codec's parameters, and checking the sizes of what it is given.

What a file says wrongly is a FormatError (or an UnsupportedError for a parameter that this version does not know);
what the caller does wrongly is a ValueError.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conx.codecs.base import Array, Buffer, TensorMeta, as_array
from conx.dtypes import DType
from conx.errors import FormatError, UnsupportedError

__all__ = ["Params", "byte_streams", "check_out", "check_side", "refuse_packed"]


class Params:
    """A codec's parameter map, read key by key; `finish` refuses what nobody asked for."""

    def __init__(self, codec: str, params: Mapping[str, Any]) -> None:
        if not isinstance(params, Mapping):
            raise FormatError(f"{codec}: the parameters are not a map")
        self._codec = codec
        self._left = dict(params)

    def refuse(self, name: str, value: object, wanted: str) -> FormatError:
        """The error to raise for a parameter."""
        return FormatError(f"{self._codec}: parameter '{name}' is {reprlib.repr(value)}, but must be {wanted}")

    def optional_int(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer in low … high (no upper bound if None), or None where the key is absent."""
        if name not in self._left:
            return None
        value = self._left.pop(name)
        if type(value) is not int or value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"in {low} … {high}"
            raise self.refuse(name, value, f"an integer {bounds}")
        return value

    def required_int(self, name: str, low: int, high: int) -> int:
        """An integer in low … high."""
        value = self.optional_int(name, low, high)
        if value is None:
            raise self._missing(name)
        return value

    def axis(self, meta: TensorMeta, name: str = "axis") -> int | None:
        """A stored axis of the tensor, or None where the key is absent."""
        if name in self._left and not meta.shape:
            raise self.refuse(name, self._left[name], "absent, as the tensor is a scalar")
        return self.optional_int(name, 0, len(meta.shape) - 1)

    def pack(self, choices: Sequence[int]) -> int:
        """How many codes lie in a byte."""
        value = self.required_int("pack", 1, 8)
        if value not in choices:
            raise self.refuse("pack", value, "one of " + ", ".join(map(str, choices)))
        return value

    def optional_text(self, name: str, choices: Sequence[str]) -> str | None:
        """One of the strings, or None where the key is absent."""
        if name not in self._left:
            return None
        value = self._left.pop(name)
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(name, value, "one of " + ", ".join(choices) if choices else "absent for this tensor")
        return value

    def required_text(self, name: str, choices: Sequence[str]) -> str:
        """One of the strings."""
        value = self.optional_text(name, choices)
        if value is None:
            raise self._missing(name)
        return value

    def flag(self, name: str) -> bool:
        """Whether the key is present; its only value is true."""
        if name not in self._left:
            return False
        value = self._left.pop(name)
        if value is not True:
            raise self.refuse(name, value, "true or absent")
        return True

    def positive_float32(self, name: str) -> float:
        """A finite float above 0 that float32 holds exactly."""
        if name not in self._left:
            raise self._missing(name)
        value = self._left.pop(name)
        if type(value) is not float or not math.isfinite(value) or value <= 0 or not _is_float32(value):
            raise self.refuse(name, value, "a finite float32 above 0")
        return value

    def finish(self) -> None:
        """Raises UnsupportedError where keys are left."""
        if self._left:
            names = ", ".join(sorted(reprlib.repr(name) for name in self._left))
            raise UnsupportedError(f"{self._codec}: parameter {names} is unknown to this version of conx")

    def _missing(self, name: str) -> FormatError:
        return FormatError(f"{self._codec}: parameter '{name}' is missing")


def byte_streams(
    codec: str, names: Sequence[str], streams: Sequence[Buffer], sizes: Sequence[int | None]
) -> list[Array]:
    """A segment's streams as arrays of bytes.

    Args:
        codec: id of the codec, for messages.
        names: what the streams are called, for messages.
        streams: raw bytes of each.
        sizes: bytes that each must have; None for any number.

    Raises:
        FormatError: number or size of the streams is wrong.
    """
    if len(streams) != len(sizes):
        raise FormatError(f"{codec}: {len(streams)} streams, but needs {len(sizes)}")
    arrays = [as_array(stream, "u1") for stream in streams]
    for name, array, size in zip(names, arrays, sizes, strict=True):
        if size is not None and array.size != size:
            raise FormatError(f"{codec}: stream '{name}' has {array.size} bytes, but needs {size}")
    return arrays


def check_side(codec: str, side: Sequence[Buffer], sizes: Sequence[int]) -> None:
    """Raises FormatError unless the side streams have these sizes."""
    byte_streams(codec, [f"side {i}" for i in range(len(sizes))], side, sizes)


def check_out(out: Array, count: int, target: DType) -> None:
    """Raises ValueError unless `out` is a flat buffer for exactly `count` elements of `target`."""
    size = count if target.bits >= 8 else target.nbytes(count)
    if out.ndim != 1 or out.size != size or out.dtype != target.storage or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be a contiguous 1-D array of {size} {target.storage} for {count} {target.label}, "
            f"not {out.dtype} {out.shape}"
        )


def refuse_packed(codec: str, meta: TensorMeta) -> None:
    """Raises FormatError for element types smaller than a byte."""
    if meta.dtype.bits < 8:
        raise FormatError(f"{codec}: element type {meta.dtype.label} is smaller than a byte")


def _is_float32(value: float) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value)) == value

"""TensorProto on the wire: what it says of itself, where its data lies, and its data in any form.

Field numbers: onnx/onnx.proto.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx

from conx.dtypes import DType
from conx.errors import ModelError
from conx.graph.wire import VARINT, Data, fields, read_varint, varints

__all__ = [
    "DATA_FIELDS",
    "DATA_LOCATION",
    "EXTERNAL_DATA",
    "IS_EXTERNAL",
    "LIKE_RAW",
    "MARKER",
    "RAW",
    "STRING_DATA",
    "Head",
    "checked_shape",
    "entry_number",
    "may_hold",
    "typed_data",
    "without",
]

MARKER = "conx:weight"  # key of the entry of external_data that makes a tensor a stub

DIMS, DATA_TYPE, NAME, RAW, EXTERNAL_DATA, DATA_LOCATION = 1, 2, 8, 9, 13, 14
FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, DOUBLE_DATA, UINT64_DATA = 4, 5, 6, 7, 10, 11
IS_EXTERNAL = bytes([DATA_LOCATION << 3 | VARINT, onnx.TensorProto.EXTERNAL])
DATA_FIELDS = (FLOAT_DATA, INT32_DATA, STRING_DATA, INT64_DATA, RAW, DOUBLE_DATA, UINT64_DATA)
LIKE_RAW = (RAW, FLOAT_DATA, DOUBLE_DATA)  # packed fields whose content is what raw_data would hold
# The element types of each typed field (onnx.proto); int32_data has all others of up to 32 bits.
TYPED = {
    FLOAT_DATA: (DType.FLOAT32, DType.COMPLEX64),
    DOUBLE_DATA: (DType.FLOAT64, DType.COMPLEX128),
    INT64_DATA: (DType.INT64,),
    UINT64_DATA: (DType.UINT64, DType.UINT32),
}


@dataclass
class Head:
    """What a TensorProto says of itself, and where its data lies."""

    dims: list[int]
    data_type: int
    name: str
    payloads: list[tuple[int, int, int]]  # field number, start, end
    external: bool
    entries: dict[str, str]

    @classmethod
    def parse(cls, data: Data, start: int, end: int) -> "Head":
        head = cls([], 0, "", [], False, {})
        for f in fields(data, start, end):
            if f.number == DIMS:
                raw = data.get(f.value, f.end)
                head.dims += [d - (1 << 64) if d >> 63 else d for d in varints(raw)]
            elif f.number == DATA_TYPE and f.wire == VARINT:
                head.data_type = read_varint(data, f.value, f.end)
            elif f.number == NAME:
                head.name = data.get(f.value, f.end).decode("utf-8", "replace")
            elif f.number in DATA_FIELDS:
                head.payloads.append((f.number, f.value, f.end))
            elif f.number == EXTERNAL_DATA:
                pair = {
                    g.number: data.get(g.value, g.end).decode("utf-8", "replace") for g in fields(data, f.value, f.end)
                }
                head.entries[pair.get(1, "")] = pair.get(2, "")
            elif f.number == DATA_LOCATION:
                head.external = read_varint(data, f.value, f.end) == onnx.TensorProto.EXTERNAL
        if MARKER in head.entries:
            raise ModelError(f"tensor {head.name!r} is marked {MARKER!r}, which conx reserves for itself")
        return head


def without(data: Data, start: int, end: int, drop: tuple[int, ...], instead: bytes | None) -> Iterator[bytes]:
    """The tensor's fields but those in `drop`; `instead` stands where the first of them stood."""
    for f in fields(data, start, end):
        if f.number not in drop:
            yield bytes(data.get(f.start, f.end))
        elif instead is not None:
            yield instead
            instead = None
    if instead is not None:
        yield instead


def checked_shape(dims: list[int], label: str) -> tuple[int, ...]:
    """The dims as a shape. Raises ModelError where they cannot be."""
    if any(d < 0 for d in dims) or math.prod(dims) > 1 << 40:
        raise ModelError(f"{label}: shape {dims} is not possible")
    return tuple(dims)


def entry_number(entries: dict[str, str], key: str, default: int, label: str) -> int:
    """A number of bytes from the entries of external_data. Raises ModelError where it is none."""
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.strip().isdigit()) or len(text) > 20:
        raise ModelError(f"{label}: external {key} is {text!r}, not a number of bytes")
    return int(text)


def may_hold(number: int, dtype: DType) -> bool:
    """Whether values of this type may lie in the TensorProto field of this number."""
    if number == INT32_DATA:
        return dtype.bits <= 32 and not any(dtype in types for types in TYPED.values())
    return number == RAW or dtype in TYPED.get(number, ())


def typed_data(content: bytes, dtype: DType) -> bytes:
    """The data of a TensorProto's typed fields, which may hold `dtype`, as raw_data would have it."""
    tensor = onnx.TensorProto.FromString(content)
    if tensor.raw_data:
        return bytes(tensor.raw_data)
    if tensor.float_data:
        return np.asarray(tensor.float_data, "<f4").tobytes()
    if tensor.double_data:
        return np.asarray(tensor.double_data, "<f8").tobytes()
    if tensor.int64_data:
        return np.asarray(tensor.int64_data, "<i8").tobytes()
    if tensor.uint64_data:
        return np.asarray(tensor.uint64_data, np.uint64).astype(dtype.storage).tobytes()
    width = np.dtype(f"<u{max(dtype.bits, 8) // 8}")
    return np.asarray(tensor.int32_data, np.int32).astype(np.uint32).astype(width).tobytes()

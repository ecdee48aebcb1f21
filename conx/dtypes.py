"""Element types: ONNX's, with the NumPy type that stores them and their conversions.

Types that NumPy lacks are stored as bits: bfloat16 as uint16, the 8-bit floats as uint8, 4- and 2-bit types as packed
bytes. So neither ml_dtypes nor onnx is needed to load a file.
"""

from enum import Enum

import numpy as np
import numpy.typing as npt

__all__ = ["DType"]


class DType(Enum):
    """An ONNX element type. The value is (name, number in TensorProto.DataType, bits, NumPy storage type)."""

    FLOAT32 = ("float32", 1, 32, "<f4")
    UINT8 = ("uint8", 2, 8, "u1")
    INT8 = ("int8", 3, 8, "i1")
    UINT16 = ("uint16", 4, 16, "<u2")
    INT16 = ("int16", 5, 16, "<i2")
    INT32 = ("int32", 6, 32, "<i4")
    INT64 = ("int64", 7, 64, "<i8")
    BOOL = ("bool", 9, 8, "u1")
    FLOAT16 = ("float16", 10, 16, "<f2")
    FLOAT64 = ("float64", 11, 64, "<f8")
    UINT32 = ("uint32", 12, 32, "<u4")
    UINT64 = ("uint64", 13, 64, "<u8")
    COMPLEX64 = ("complex64", 14, 64, "<c8")
    COMPLEX128 = ("complex128", 15, 128, "<c16")
    BFLOAT16 = ("bfloat16", 16, 16, "<u2")
    FLOAT8E4M3FN = ("float8e4m3fn", 17, 8, "u1")
    FLOAT8E4M3FNUZ = ("float8e4m3fnuz", 18, 8, "u1")
    FLOAT8E5M2 = ("float8e5m2", 19, 8, "u1")
    FLOAT8E5M2FNUZ = ("float8e5m2fnuz", 20, 8, "u1")
    UINT4 = ("uint4", 21, 4, "u1")
    INT4 = ("int4", 22, 4, "u1")
    FLOAT4E2M1 = ("float4e2m1", 23, 4, "u1")
    FLOAT8E8M0 = ("float8e8m0", 24, 8, "u1")
    UINT2 = ("uint2", 25, 2, "u1")
    INT2 = ("int2", 26, 2, "u1")

    def __init__(self, label: str, number: int, bits: int, storage: str) -> None:
        self.label = label
        self.number = number
        self.bits = bits
        self.storage: np.dtype[np.generic] = np.dtype(storage)

    @classmethod
    def from_label(cls, label: str) -> "DType | None":
        """The type of that name in the file format, or None."""
        return _BY_LABEL.get(label)

    @classmethod
    def from_number(cls, number: int) -> "DType | None":
        """The type of that TensorProto.DataType number, or None (strings, undefined, types to come)."""
        return _BY_NUMBER.get(number)

    def nbytes(self, count: int) -> int:
        """Bytes of `count` elements as TensorProto.raw_data holds them."""
        return (count * self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        return self.label.startswith(("float", "bfloat"))

    @property
    def codable(self) -> bool:
        """Whether a grid or palette may replace its values when a lossy pack is asked for."""
        return self in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)

    def view(self, data: bytes | bytearray | memoryview) -> npt.NDArray[np.generic]:
        """`data` as a 1-D array of the storage type, without a copy."""
        return np.frombuffer(data, dtype=self.storage)


_BY_LABEL = {t.label: t for t in DType}
_BY_NUMBER = {t.number: t for t in DType}

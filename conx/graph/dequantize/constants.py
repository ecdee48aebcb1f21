"""Constants of a graph: what initializers and Constant nodes hold, seen through operators that only move or cast it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from conx.codecs.convert import SOURCES, convert
from conx.codecs.float8 import FLOAT8
from conx.dtypes import DType
from conx.graph.read import Weight, weight_number

__all__ = ["CODE_KINDS", "Array", "Constant", "Move", "moved", "moved_shape", "unpacked"]

Array = npt.NDArray[Any]
Move = tuple[str, tuple[int, ...]]  # ("perm", axes) as of Transpose, or ("shape", dims) as of Reshape

_T = onnx.TensorProto
# Element types that weights are quantized to.
CODE_KINDS = {_T.INT8, _T.UINT8, _T.INT16, _T.UINT16, _T.INT4, _T.UINT4, _T.INT2, _T.UINT2}
_SIGNED = {DType.INT4, DType.INT2}


@dataclass(frozen=True)
class Constant:
    """A tensor of a graph, or what operators made of it that only move its elements or cast them.

    Attributes:
        tensor: as it stands in the model; its data may be a weight.
        weights: what stubs stand for.
        moves: what was done to it, first to last.
        cast: the type that its elements were cast to, if they were.
    """

    tensor: onnx.TensorProto
    weights: Sequence[Weight] = field(repr=False)
    moves: tuple[Move, ...] = ()
    cast: DType | None = None

    @classmethod
    def of(cls, values: Array, name: str = "") -> "Constant":
        """A constant that is at hand."""
        return cls(numpy_helper.from_array(np.asarray(values), name), ())

    @property
    def number(self) -> int | None:
        """The weight that holds the data, if one does."""
        return weight_number(self.tensor)

    @property
    def dtype(self) -> DType:
        """The type of the elements, cast or not."""
        dtype = self.cast or DType.from_number(self.tensor.data_type)
        assert dtype is not None  # only known types become constants
        return dtype

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return moved_shape(self.stored_shape, self.moves)

    @property
    def size(self) -> int:
        return math.prod(self.stored_shape)

    def moved(self, move: Move) -> "Constant":
        """After one more move."""
        return replace(self, moves=(*self.moves, move))

    def raw(self) -> Array:
        """The stored data, flat, in the storage type of the tensor's element type."""
        dtype = DType.from_number(self.tensor.data_type)
        assert dtype is not None
        if self.number is not None:
            return self.weights[self.number].read()
        if self.tensor.HasField("raw_data"):
            return dtype.view(self.tensor.raw_data)
        return dtype.view(_packed(self.tensor, dtype))

    def stored(self) -> Array:
        """The elements before all moves: integers as they are, floats of 16 bits and less as float32."""
        dtype = DType.from_number(self.tensor.data_type)
        assert dtype is not None
        data = self.raw()
        if dtype.bits < 8 and not dtype.is_float:
            data = unpacked(data, dtype.bits, self.size, signed=dtype in _SIGNED)
        elif dtype in (DType.FLOAT16, DType.BFLOAT16) or dtype in FLOAT8:
            single = np.empty(data.size, np.float32)
            convert(data, dtype, DType.FLOAT32, single)
            data = single
        if self.cast is not None and self.cast is not dtype and self.cast.storage.kind in "iu":
            data = data.astype(self.cast.storage)
        return data.reshape(self.stored_shape)

    def values(self) -> Array:
        """The elements, of its shape."""
        return moved(self.stored(), self.moves)

    def readable(self) -> bool:
        """Whether `stored` knows the type."""
        dtype = DType.from_number(self.tensor.data_type)
        if dtype is None:
            return False
        return dtype in SOURCES if dtype.is_float else dtype.storage.kind in "iu"


def moved(values: Array, moves: Sequence[Move]) -> Array:
    """An array after moves."""
    for how, what in moves:
        values = values.transpose(what) if how == "perm" else values.reshape(what)
    return values


def moved_shape(shape: tuple[int, ...], moves: Sequence[Move]) -> tuple[int, ...]:
    """The shape after moves."""
    for how, what in moves:
        shape = tuple(shape[i] for i in what) if how == "perm" else what
    return shape


def unpacked(data: Array, bits: int, count: int, *, signed: bool = False) -> Array:
    """Integers of 2, 3, 4 or 8 bits out of bytes, the lowest bits first; each row of `data` has `count` of them.

    Args:
        data: bytes; the last axis is unpacked.
        bits: of an integer.
        count: integers to take along the last axis; what is left over is padding.
        signed: whether the highest bit counts negative.
    """
    content = data.view(np.uint8)
    if bits == 8:
        codes = content
    elif 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        mask = np.uint8((1 << bits) - 1)
        codes = ((content[..., None] >> shifts) & mask).reshape(*content.shape[:-1], -1)
    else:
        planes = np.unpackbits(content, axis=-1, bitorder="little")
        planes = planes[..., : planes.shape[-1] // bits * bits].reshape(*content.shape[:-1], -1, bits)
        codes = (planes << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    codes = codes[..., :count]
    if not signed:
        return codes
    sign = np.uint8(1 << (bits - 1))
    return ((codes ^ sign).astype(np.int16) - np.int16(sign)).astype(np.int8)


def _packed(tensor: onnx.TensorProto, dtype: DType) -> bytes:
    """What raw_data would hold."""
    if tensor.int32_data:
        width = np.dtype(f"<u{max(dtype.bits, 8) // 8}")
        return np.asarray(tensor.int32_data, np.int32).astype(np.uint32).astype(width).tobytes()
    for values in (tensor.float_data, tensor.double_data, tensor.int64_data, tensor.uint64_data):
        if values:
            return np.asarray(values).astype(dtype.storage).tobytes()
    return b""

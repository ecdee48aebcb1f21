"""Weights whose values are computed of codes, scales and zero points when they are read."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx

from conx.codecs.convert import convert
from conx.dtypes import DType
from conx.graph.dequantize.constants import Array, Constant, Move, moved, moved_shape, unpacked
from conx.graph.dequantize.grids import Grid
from conx.graph.tensor_fields import MARKER, RAW

__all__ = ["Codes", "FloatWeight", "Operand", "shape_after"]

CHUNK = 1 << 20  # elements worked on at once


@dataclass(frozen=True)
class Codes:
    """Integers as a quantized model stores them.

    Attributes:
        constant: the tensor, without moves.
        shape: dims of the codes, once they are taken out of their bytes.
        bits: of a code where several lie in a byte of the tensor's last axis, or it is padded; 0: as its type says.
        row: codes in a row as it is stored, with the padding at its end.
        table: float32 value of each code, where they stand for these; None: for themselves.
        high_first: whether the first of two codes lies in the upper half of a byte.
    """

    constant: Constant
    shape: tuple[int, ...]
    bits: int = 0
    row: int = 0
    table: Array | None = field(default=None, repr=False)
    high_first: bool = False

    @property
    def dtype(self) -> DType:
        """The type of one code."""
        return {2: DType.UINT2, 4: DType.UINT4, 8: DType.UINT8}.get(self.bits, self.constant.dtype)

    def read(self) -> Array:
        """The codes, of their shape."""
        if self.table is not None and not self.bits:
            return self.constant.raw().reshape(self.shape)
        if not self.bits:
            return self.constant.stored().reshape(self.shape)
        data = self.constant.raw()
        if self.high_first:
            data = (data >> 4 | data << 4).astype(np.uint8)
        if not self.row:
            return unpacked(data, self.bits, math.prod(self.shape)).reshape(self.shape)
        rows = data.reshape(math.prod(self.shape[:-1]), self.row * self.bits // 8)
        return unpacked(rows, self.bits, self.shape[-1]).reshape(self.shape)


@dataclass(frozen=True)
class Operand:
    """Scales or zero points: how to read them, flat, one for each group; `weight` is the source's that holds just them.

    Attributes:
        parts: constants whose product they are, each with the dims that broadcast against the grid's.
        grid: over the codes as they are stored.
        values: them, where they are not made of constants of the model.
    """

    parts: tuple[tuple[Constant, tuple[int, ...]], ...]
    grid: Grid
    values: Array | None = field(default=None, repr=False)

    @property
    def weight(self) -> int | None:
        if len(self.parts) != 1 or not self.grid.as_stored or self.parts[0][0].moves:
            return None
        return self.parts[0][0].number if math.prod(self.grid.full) == self.parts[0][0].size else None

    def read(self) -> Array:
        if self.values is not None:
            return self.grid.flat(self.values)
        found = [constant.values().reshape(dims) for constant, dims in self.parts]
        product = found[0]
        for values in found[1:]:
            product = product.astype(np.float32) * values.astype(np.float32)
        return self.grid.flat(product)


@dataclass(frozen=True)
class FloatWeight:
    """A float weight: `(code - zero_point) * scale`, the difference exact, the product rounded once to float32.

    Where `dtype` is float16 or bfloat16, that is rounded once more. `moves` then lead from the codes' shape to `shape`.

    Attributes:
        number: its place among the weights of the dequantized model.
        name, dtype, shape: as of a weight of the source.
        stored: the codes.
        grid: which scale belongs to which code.
        scales, zeros: scales, and integers or (then it is not exact) floats to subtract first.
        before: what is done to the codes before scales fit them; nothing where it is exact.
        moves: what is done to the values.
    """

    number: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    stored: Codes
    grid: Grid
    scales: Operand
    zeros: Operand | None
    before: tuple[Move, ...] = ()
    moves: tuple[Move, ...] = ()
    integral: bool = True

    tag: ClassVar[int] = RAW
    file: ClassVar[None] = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.count)

    @property
    def exact(self) -> bool:
        """Whether it is what the class says of integers: else only its values are of use."""
        return not self.before and self.stored.table is None and self.integral

    @property
    def codes(self) -> int | Array | None:
        """The weight of the source that holds the codes, or the tensor's raw data, flat; None if it is not exact."""
        if not self.exact:
            return None
        number = self.stored.constant.number
        return self.stored.constant.raw() if number is None else number

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Dims of the codes: what `axis` counts in. The tensor that holds them may have others, in the same order."""
        return self.stored.shape

    @property
    def codes_dtype(self) -> DType:
        return self.stored.dtype

    @property
    def axis(self) -> int | None:
        """The axis of the codes along which scales lie; None: one for the tensor."""
        return self.grid.axis

    @property
    def block(self) -> int:
        """Positions along `axis` that have one scale."""
        return self.grid.block

    @property
    def shared(self) -> bool:
        """Whether scales differ along `axis` alone."""
        return self.grid.shared

    @property
    def float_axis(self) -> int | None:
        """The axis of the float weight that `axis` became, if it is one."""
        axis, shape = self.axis, self.codes_shape
        for how, what in self.moves:
            if axis is None:
                return None
            if how == "perm":
                axis, shape = what.index(axis), tuple(shape[i] for i in what)
                continue
            length, inner = shape[axis], math.prod(shape[axis + 1 :])
            fits = (i for i, d in enumerate(what) if d == length and math.prod(what[i + 1 :]) == inner)
            axis, shape = next(fits, None), what
        return axis

    @property
    def scale(self) -> Array:
        """Float32, flat, in the order of `grid.layout(codes_shape)`."""
        return self.scales.read().astype(np.float32)

    @property
    def zero_point(self) -> Array | None:
        """Integers, flat, as many as scales; None: 0."""
        return None if self.zeros is None else self.zeros.read()

    def read_codes(self) -> Array:
        """The codes, of `codes_shape` (of the shape that scales fit, where it is not exact)."""
        return moved(self.stored.read(), self.before)

    def read(self) -> Array:
        """The values, flat in row-major order, in the storage type of `dtype`."""
        stored = self.read_codes()
        codes = np.ascontiguousarray(stored).reshape(stored.shape)  # which makes no axis of none
        out = np.empty(self.shape, self.dtype.storage)
        if len(self.moves) == 1 and self.moves[0][0] == "perm":
            perm = self.moves[0][1]
            self._fill(codes, out.transpose([perm.index(i) for i in range(len(perm))]))
            return out.reshape(-1)
        if not self.moves:
            self._fill(codes, out)
            return out.reshape(-1)
        values = np.empty(codes.shape, self.dtype.storage)
        self._fill(codes, values)
        return np.ascontiguousarray(moved(values, self.moves)).reshape(-1)

    def blocks(self, size: int) -> Iterator[Array]:
        """The values in order, in arrays of about `size` bytes (a multiple of 16)."""
        values = self.read()
        step = max(1, size // values.itemsize)
        for at in range(0, values.size, step):
            yield values[at : at + step]

    def stub(self) -> onnx.TensorProto:
        """The initializer without its data."""
        tensor = onnx.TensorProto(name=self.name, data_type=self.dtype.number, dims=self.shape)
        tensor.external_data.add(key=MARKER, value=str(self.number))
        return tensor

    def tensor(self) -> onnx.TensorProto:
        """The initializer with its data."""
        data = self.read().tobytes()
        return onnx.TensorProto(name=self.name, data_type=self.dtype.number, dims=self.shape, raw_data=data)

    def _fill(self, codes: Array, out: Array) -> None:
        """The values of contiguous codes, into an array of their shape."""
        layout = self.grid.layout(codes.shape)
        scaling = layout.spread(self.scale)
        zeros = self.zero_point
        shifting = None if zeros is None else layout.spread(zeros)
        flat = codes.reshape(-1)
        row = math.prod(codes.shape[1:]) if codes.ndim else 1
        step = max(1, CHUNK // max(1, row))
        for first in range(0, codes.shape[0] if codes.ndim else 1, step):
            at, part = first * row, flat[first * row : (first + step) * row]
            values = self._units(part)
            if shifting is not None:
                for piece in shifting.pieces(at, part.size):
                    np.subtract(piece.of(values), piece.params, out=piece.of(values))
            single = values.astype(np.float32)
            with np.errstate(all="ignore"):
                for piece in scaling.pieces(at, part.size):
                    np.multiply(piece.of(single), piece.params, out=piece.of(single))
            rounded = single
            if self.dtype is not DType.FLOAT32:
                rounded = np.empty(single.size, self.dtype.storage)
                convert(single, DType.FLOAT32, self.dtype, rounded)
            place = out[first : first + step] if codes.ndim else out
            place[...] = rounded.reshape(place.shape)

    def _units(self, codes: Array) -> Array:
        """Codes wide enough for the subtraction."""
        if self.stored.table is not None:
            return self.stored.table[codes]
        if not self.integral:
            return codes.astype(np.float32)
        return codes.astype(np.int32 if codes.itemsize < 4 else np.int64)


def shape_after(codes: Codes, before: tuple[Move, ...], moves: tuple[Move, ...]) -> tuple[int, ...]:
    """The shape of the float weight."""
    return moved_shape(codes.shape, (*before, *moves))

"""Weights of a quantized model: one stored tensor that is codes for its own graph and values for the float ones.

The tensor is of float32 with the codec `linear`: its codes are the model's, its scales and zero points too. Nothing is
lost: codes come back bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Array, Encoded, TensorMeta
from conx.codecs.linear import Linear
from conx.dtypes import DType
from conx.graph.dequantize import FloatWeight
from conx.graph.read import SourceModel, Weight
from conx.packing.choose import smallest_of

__all__ = ["CodedForm", "Coding", "axes_and_shape", "coded_forms", "is_codable", "same_grid"]

CODE_TYPES = (DType.INT8, DType.UINT8, DType.INT4, DType.UINT4)
PACKS = ((1, 0), (1, 128), (2, 0), (2, 7), (2, 8), (2, 128), (4, 0), (4, 8), (4, 128))
"""Codes in a byte, and what is taken from each before: 8 and 128 are the middle of unsigned ones."""


@dataclass(frozen=True)
class CodedForm:
    """Codes of a source weight that are stored as a float tensor.

    Attributes:
        number: the source weight.
        weight: one of the float weights made of it.
        dtype: type in which its own graph wants the codes: int8, uint8, int4 or uint4, two of these in a byte.
        operands: source weights that are exactly the scales or the zero points, which are not stored again.
    """

    number: int
    weight: FloatWeight
    dtype: DType
    operands: dict[int, str] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims of the stored tensor."""
        return self.weight.codes_shape


def coded_forms(source: SourceModel, floats: Sequence[Weight | FloatWeight]) -> dict[int, CodedForm]:
    """The forms that float weights of a dequantized model suggest, by the number of the source weight with the codes.

    Only those of which the format has all: integers of at most 8 bits, finite scales, integer zero points; and whose
    bytes come out right again.
    """
    found: dict[int, CodedForm] = {}
    for made in floats:
        if not isinstance(made, FloatWeight) or not isinstance(made.codes, int) or made.codes in found:
            continue
        dtype = made.codes_dtype
        weight = source.weights[made.codes]
        if not is_codable(made) or weight.nbytes != dtype.nbytes(math.prod(made.codes_shape)):
            continue
        if _bytes(made.read_codes(), dtype) == weight.read().tobytes():
            found[made.codes] = CodedForm(made.codes, made, dtype, _operands(source, made))
    return found


@dataclass(frozen=True)
class Coding:
    """Codes with what they stand for.

    Attributes:
        codes: of any integer type, with their dims.
        signed: whether they count from below 0.
        axis, block: where scales lie, as in the codec `linear`.
        scales: float32, with the dims of the codes: along each axis as many as there are scales, or 1.
        zeros: zero points likewise; None: 0.
    """

    codes: Array
    signed: bool
    axis: int | None
    block: int | None
    scales: npt.NDArray[np.float32]
    zeros: Array | None

    @classmethod
    def of(cls, made: FloatWeight) -> "Coding":
        """Those that a float weight is made of, as they are stored."""
        axis, block = made.axis, None if made.axis is None or made.shared else made.block
        dims = [1] * len(made.codes_shape) if block is None else list(made.codes_shape)
        if axis is not None:
            dims[axis] = -(-made.codes_shape[axis] // (block or 1))
        zeros = made.zero_point
        scales = np.ascontiguousarray(made.scale, "<f4").reshape(dims)
        signed = made.codes_dtype in (DType.INT8, DType.INT4)
        return cls(made.read_codes(), signed, axis, block, scales, None if zeros is None else zeros.reshape(dims))

    def transposed(self, perm: tuple[int, ...]) -> "Coding":
        """With the axes in another order."""
        return Coding(
            self.codes.transpose(perm),
            self.signed,
            None if self.axis is None else perm.index(self.axis),
            self.block,
            self.scales.transpose(perm),
            None if self.zeros is None else self.zeros.transpose(perm),
        )

    def encoded(self) -> Encoded:
        """Packed in the way that is smallest."""
        code = DType.INT8 if self.signed else DType.UINT8
        data = np.ascontiguousarray(self.codes).astype(code.storage, copy=False).reshape(-1)
        zero, zeros = self._zero_points(code)
        scales = np.ascontiguousarray(self.scales)
        low, high = (int(data.min()), int(data.max())) if data.size else (0, 0)
        candidates = []
        for pack, center in PACKS:
            if center and not low <= center <= high:
                continue
            codec = Linear(code, self.axis, self.block, None, zero, zeros is not None, center, pack)
            candidates.append(Encoded(codec, codec.make_side(scales, zeros), data))
        return smallest_of(candidates, TensorMeta(self.codes.shape, DType.FLOAT32))[0]

    def _zero_points(self, code: DType) -> tuple[int, Array | None]:
        """(the zero point of all, or 0; those of each scale, if they differ)."""
        if self.zeros is None or not self.zeros.size:
            return 0, None
        first = self.zeros.reshape(-1)[0]
        if (self.zeros == first).all():
            return int(first), None
        return 0, np.ascontiguousarray(self.zeros.astype(code.storage))


def axes_and_shape(made: FloatWeight) -> tuple[int, ...] | None:
    """The permutation of the codes' axes that leads to the float weight, but for a reshape at the end.

    None where moves cannot be told so.
    """
    perm = tuple(range(len(made.codes_shape)))
    reshaped = False
    for how, what in made.moves:
        if how == "perm" and not reshaped:
            perm = tuple(perm[i] for i in what)
        elif how == "perm":
            return None
        else:
            reshaped = True
    return perm


def same_grid(one: FloatWeight, other: FloatWeight) -> bool:
    """Whether two weights have the same scales and zero points over the same codes."""
    first, second = one.zero_point, other.zero_point
    zeros = np.array_equal(first, second) if first is not None and second is not None else first is second
    laid = (one.codes_shape, one.axis, one.block, one.shared) == (
        other.codes_shape,
        other.axis,
        other.block,
        other.shared,
    )
    return bool(laid and zeros and one.scale.tobytes() == other.scale.tobytes())


def is_codable(made: FloatWeight) -> bool:
    """Whether the format has such codes, scales and zero points."""
    if not made.exact or made.codes_dtype not in CODE_TYPES:
        return False
    code = np.int8 if made.codes_dtype in (DType.INT8, DType.INT4) else np.uint8
    scale, zeros = made.scale, made.zero_point
    if not np.isfinite(scale).all() or (made.shared and made.axis is not None and made.block != 1):
        return False
    if zeros is None:
        return True
    bounds = np.iinfo(code)
    return bool(zeros.size == scale.size and (zeros >= bounds.min).all() and (zeros <= bounds.max).all())


def _operands(source: SourceModel, made: FloatWeight) -> dict[int, str]:
    """Source weights that are the scales (float32) or the zero points (of the codes' own type), bit for bit."""
    found: dict[int, str] = {}
    number = made.scales.weight
    scales = None if number is None else source.weights[number]
    if number is not None and scales is not None and scales.dtype is DType.FLOAT32:
        found |= {number: "scales"} if scales.read().tobytes() == made.scale.tobytes() else {}
    zeros = made.zeros
    if zeros is not None and zeros.weight is not None and made.zero_point is not None:
        weight = source.weights[zeros.weight]
        same = weight.dtype is made.codes_dtype and weight.dtype.bits == 8
        if same and weight.read().tobytes() == made.zero_point.astype(weight.dtype.storage).tobytes():
            found[zeros.weight] = "zero_points"
    return found


def _bytes(codes: Array, dtype: DType) -> bytes:
    """Codes as a tensor of that type has them."""
    if dtype.bits == 8:
        return np.ascontiguousarray(codes).astype(dtype.storage, copy=False).tobytes()
    flat = codes.reshape(-1).astype(np.int16) & 0x0F
    packed = flat[0::2].astype(np.uint8)
    packed[: flat.size // 2] |= (flat[1::2] << 4).astype(np.uint8)
    return packed.tobytes()

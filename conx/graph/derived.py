"""What a run graph may hold instead of a weight's values: its codes or scales, to be made of the stored tensor."""

import math
from dataclasses import dataclass
from typing import ClassVar

import onnx

from conx.dtypes import DType
from conx.graph.tensor_fields import MARKER, RAW

__all__ = ["CODES", "SCALES", "Derived"]

CODES = "codes"
SCALES = "scales"


@dataclass(frozen=True)
class Derived:
    """An initializer made of a weight. Its stub is like a weight's, with a number beyond those of all weights.

    Attributes:
        number: names it in its stub.
        name: the initializer's.
        dtype, shape: element type and dims.
        weight: number of the weight that it is made of.
        view: CODES or SCALES.
        perm: axes of the weight in the order wanted.
        pad: of codes: length that the last axis is padded to; None: as it is.
        axis: axis of the weight along which the scales of a grid of its own lie; None: the codes as they are stored.
    """

    number: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    weight: int
    view: str
    perm: tuple[int, ...]
    pad: int | None = None
    axis: int | None = None

    tag: ClassVar[int] = RAW

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.count)

    def stub(self) -> onnx.TensorProto:
        """The initializer without its data."""
        tensor = onnx.TensorProto(name=self.name, data_type=self.dtype.number, dims=self.shape)
        tensor.external_data.add(key=MARKER, value=str(self.number))
        return tensor

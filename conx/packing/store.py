"""What is stored of a model's weights, and how what graphs hold is had from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Codec, TensorMeta
from conx.codecs.linear import Linear
from conx.container.records import CODES, SCALES, Grid
from conx.dtypes import DType
from conx.graph import derived
from conx.graph.coded_nodes import CodeGrid
from conx.graph.dequantize import FloatWeight
from conx.graph.derived import Derived
from conx.graph.read import Weight
from conx.graph.ties import Tie
from conx.packing.quantized import CodedForm, axes_and_shape, same_grid

__all__ = ["Store", "Stored", "serves", "stored_axis"]

_VIEWS = {derived.CODES: CODES, derived.SCALES: SCALES}


@dataclass(frozen=True)
class Stored:
    """A stored tensor.

    Attributes:
        place: among the file's tensors.
        shape, dtype: dims and type.
        codec: how it is coded; its axes are those of `shape`, in whatever order they are stored.
        form: of codes of a quantized model.
        grids: scales on which int8 codes are made of its values, by the axis along which they lie.
        scales: places of the tensors that hold these.
    """

    place: int
    shape: tuple[int, ...]
    dtype: DType
    codec: Codec
    form: CodedForm | None = None
    grids: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    scales: dict[int, int] = field(default_factory=dict)


class Store:
    """The weights of a model and its dequantized one, and the tensors that stand for them.

    Args:
        weights: the source's, then those of its float model that are made of codes.
        ties: of the source's weights: which is stored for which.

    Attributes:
        tensors: by the number of the stored weight; filled while packing.
    """

    def __init__(self, weights: Sequence[Weight | FloatWeight], ties: Sequence[Tie]) -> None:
        self.weights, self.ties = weights, ties
        self.tensors: dict[int, Stored] = {}
        self.operands: dict[int, tuple[int, str]] = {}

    def add(self, number: int, stored: Stored) -> None:
        """Note what a weight is stored as."""
        self.tensors[number] = stored
        if stored.form is not None:
            for operand, view in stored.form.operands.items():
                self.operands[operand] = (number, view)

    def __call__(self, number: int, axis: int) -> CodeGrid | None:
        """The int8 codes of a weight whose channels lie along `axis` (a `CodeSource`)."""
        found = self._source(number)
        if found is None:
            return None
        stored, perm = found
        shape = tuple(stored.shape[i] for i in perm)
        if shape != self.weights[number].shape:
            return None
        place = perm[axis]
        if serves(stored.codec, stored.shape, place):
            assert isinstance(stored.codec, Linear)  # nothing else serves
            block = stored.codec.block
            return CodeGrid(block=None if block is None or block >= stored.shape[1 - place] else block)
        return CodeGrid(made=True) if place in stored.scales else None

    def holds(self, number: int) -> bool:
        """Whether a weight's values can be had."""
        if not isinstance(self.weights[number], FloatWeight):
            return True
        return self._source(number) is not None

    def of_weight(self, number: int, dtype: DType) -> dict[str, Any]:
        """A weight of a graph, as `dtype`: fields of a binding."""
        weight = self.weights[number]
        if not isinstance(weight, FloatWeight):
            tie = self.ties[number]
            if tie.stored in self.operands:
                owner, view = self.operands[tie.stored]
                fields = {"tensor": self.tensors[owner].place, "view": view, "dtype": weight.dtype}
                return fields | {"shape": weight.shape}
            form = self.tensors[tie.stored].form
            if form is not None:
                shape = weight.shape if weight.dtype is form.dtype else form.shape
                place = self.tensors[tie.stored].place
                return {"tensor": place, "view": CODES, "dtype": form.dtype, "shape": shape, "perm": tie.perm}
        found = self._source(number)
        assert found is not None  # asked for only where `holds`
        stored, perm = found
        identity = perm == tuple(range(len(perm)))
        return {
            "tensor": stored.place,
            "dtype": None if dtype is stored.dtype else dtype,
            "perm": None if identity else perm,
            "shape": None if weight.shape == tuple(stored.shape[i] for i in perm) else weight.shape,
        }

    def of_derived(self, made: Derived) -> dict[str, Any]:
        """Codes or scales of a weight: fields of a binding."""
        found = self._source(made.weight)
        assert found is not None  # it has codes
        stored, order = found
        perm = tuple(order[axis] for axis in made.perm)
        axis = None if made.axis is None else order[made.axis]
        fields: dict[str, Any] = {"dtype": made.dtype, "shape": made.shape}
        if made.view == derived.SCALES and axis is not None:
            return fields | {"tensor": stored.scales[axis], "dtype": None, "repeat": made.count // stored.shape[axis]}
        fields |= {"tensor": stored.place, "view": _VIEWS[made.view], "pad": made.pad}
        fields["perm"] = None if perm == tuple(range(len(perm))) else perm
        if made.view == derived.CODES:
            return fields | {"grid": None if axis is None else Grid(stored.scales[axis], axis)}
        assert isinstance(stored.codec, Linear)  # it has scales
        count = stored.codec.layout(TensorMeta(stored.shape, stored.dtype)).count
        return fields | {"repeat": made.count // max(1, count)}

    def _source(self, number: int) -> tuple[Stored, tuple[int, ...]] | None:
        """The tensor of a weight's values, and its axes in the order that the weight has them, but for a reshape."""
        weight = self.weights[number]
        if not isinstance(weight, FloatWeight):
            tie = self.ties[number]
            stored = self.tensors[tie.stored]
            return stored, tie.perm or tuple(range(len(stored.shape)))
        if not weight.exact:
            own = self.tensors.get(number)
            return None if own is None else (own, tuple(range(len(own.shape))))
        return self._of_codes(weight)

    def _of_codes(self, weight: FloatWeight) -> tuple[Stored, tuple[int, ...]] | None:
        own = self.tensors.get(weight.number)
        if own is not None:
            return own, tuple(range(len(own.shape)))
        if not isinstance(weight.codes, int):
            return None
        tie = self.ties[weight.codes]
        stored = self.tensors.get(tie.stored)
        perm = axes_and_shape(weight)
        if stored is None or stored.form is None or perm is None or tie.perm is not None:
            return None
        other = stored.form.weight
        if other is not weight and not same_grid(other, weight):
            return None
        return stored, perm


def stored_axis(weights: Sequence[Weight], ties: Sequence[Tie], number: int, axis: int) -> int | None:
    """The axis of the stored weight that is `axis` of a weight tied to it; None where they differ by a reshape."""
    tie = ties[number]
    stored = weights[tie.stored].shape
    perm = tie.perm or tuple(range(len(stored)))
    return perm[axis] if tuple(stored[i] for i in perm) == weights[number].shape else None


def serves(codec: Codec, shape: tuple[int, ...], axis: int) -> bool:
    """Whether the codes of a codec are symmetric ones with scales for each position of `axis`, or for blocks of these.

    Such blocks run along the other axis of a matrix.
    """
    if not isinstance(codec, Linear) or codec.zero_points or codec.zero_point or codec.code.label != "int8":
        return False
    if codec.axis is None or (codec.axis == axis and codec.block is None):
        return True
    return len(shape) == 2 and codec.axis == 1 - axis and codec.block is not None

"""The int8 codes of each weight: those that are stored, or a grid of its own on which they are made while loading."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Codec, TensorMeta
from conx.codecs.linear import Linear
from conx.graph.coded_nodes import CodeGrid
from conx.graph.read import Weight
from conx.graph.ties import Tie

__all__ = ["Coded", "CodedUses", "Codes", "serves"]


@dataclass(frozen=True)
class Coded:
    """How a stored weight is coded, and the scales of further grids by the axis along which they lie."""

    codec: Codec
    grids: dict[int, npt.NDArray[np.float32]]


class CodedUses:
    """Along which axes of the stored weights int8 codes are wanted."""

    def __init__(self, weights: Sequence[Weight], ties: Sequence[Tie], uses: Sequence[tuple[int, int]]) -> None:
        self.axes: dict[int, set[int]] = {}
        for number, axis in uses:
            place = stored_axis(weights, ties, number, axis)
            if place is not None:
                self.axes.setdefault(ties[number].stored, set()).add(place)

    def of(self, number: int) -> list[int]:
        """The axes of a stored weight, ascending."""
        return sorted(self.axes.get(number, ()))


class Codes:
    """Answers which codes a weight has, for `conx.graph.coded_nodes`.

    Args:
        weights: the model's.
        ties: which is stored for which.
        coded: of each stored weight, by its number.
    """

    def __init__(self, weights: Sequence[Weight], ties: Sequence[Tie], coded: dict[int, Coded]) -> None:
        self.weights, self.ties, self.coded = weights, ties, coded

    def __call__(self, number: int, axis: int) -> CodeGrid | None:
        place = stored_axis(self.weights, self.ties, number, axis)
        if place is None:
            return None
        stored = self.ties[number].stored
        coded, shape = self.coded[stored], self.weights[stored].shape
        if serves(coded.codec, shape, place):
            assert isinstance(coded.codec, Linear)  # nothing else serves
            block = coded.codec.block
            return CodeGrid(block=None if block is None or block >= shape[1 - place] else block)
        return CodeGrid(made=True) if place in coded.grids else None

    def scale_count(self, number: int) -> int:
        """The scales of a stored weight whose codes are its codec's."""
        codec, weight = self.coded[number].codec, self.weights[number]
        return codec.layout(TensorMeta(weight.shape, weight.dtype)).count if isinstance(codec, Linear) else 0


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

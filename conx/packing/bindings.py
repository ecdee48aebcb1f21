"""How what a graph holds is had from the stored tensors."""

from typing import Any

from conx.container.records import CODES, SCALES, Grid
from conx.dtypes import DType
from conx.graph import derived
from conx.graph.derived import Derived
from conx.packing.codes import Codes

__all__ = ["Bindings"]

_VIEWS = {derived.CODES: CODES, derived.SCALES: SCALES}


class Bindings:
    """Makes the fields of bindings.

    Args:
        codes: the model's weights, and which is stored for which; those that are stored are the file's first tensors,
            in their order.
        scales: places of the tensors that are scales of a grid, by the number of the stored weight and the axis.
    """

    def __init__(self, codes: Codes, scales: dict[tuple[int, int], int]) -> None:
        self.codes, self.scales = codes, scales
        self.weights, self.ties = codes.weights, codes.ties
        stored = [number for number, tie in enumerate(self.ties) if tie.stored == number]
        self.places = {number: place for place, number in enumerate(stored)}

    def of_weight(self, number: int, dtype: DType) -> dict[str, Any]:
        """The values of a weight, as `dtype`."""
        tie, weight = self.ties[number], self.weights[number]
        stored = self.weights[tie.stored].shape
        seen = stored if tie.perm is None else tuple(stored[i] for i in tie.perm)
        return {
            "tensor": self.places[tie.stored],
            "dtype": None if dtype is weight.dtype else dtype,
            "perm": tie.perm,
            "shape": None if weight.shape == seen else weight.shape,
        }

    def of_derived(self, made: Derived) -> dict[str, Any]:
        """Codes or scales of a weight, which has the dims of the stored one, perhaps in another order."""
        tie = self.ties[made.weight]
        stored = self.weights[tie.stored].shape
        order = tie.perm or tuple(range(len(stored)))
        perm = tuple(order[axis] for axis in made.perm)
        axis = None if made.axis is None else order[made.axis]
        fields: dict[str, Any] = {"dtype": made.dtype, "shape": made.shape}
        if made.view == derived.SCALES and axis is not None:
            place = self.scales[tie.stored, axis]
            return fields | {"tensor": place, "dtype": None, "repeat": made.count // stored[axis]}
        fields |= {"tensor": self.places[tie.stored], "view": _VIEWS[made.view], "pad": made.pad}
        fields["perm"] = None if perm == tuple(range(len(perm))) else perm
        if made.view == derived.CODES:
            return fields | {"grid": None if axis is None else Grid(self.scales[tie.stored, axis], axis)}
        return fields | {"repeat": made.count // max(1, self.codes.scale_count(tie.stored))}

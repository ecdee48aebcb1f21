"""The float model behind a quantized one, and how its weights are had from what is stored."""

import logging
from dataclasses import dataclass, field, replace
from typing import cast

from conx.graph.dequantize import Dequantized, FloatWeight
from conx.graph.facts import computes_in_floats
from conx.graph.parameters import undone
from conx.graph.read import SourceModel, Weight
from conx.graph.ties import Tie
from conx.packing.quantized import CodedForm, axes_and_shape, coded_forms, same_grid

__all__ = ["FREE_EXTRA", "MOST_EXTRA", "FloatModel", "float_model", "wanted_axes"]

log = logging.getLogger("conx")

MOST_EXTRA = (
    0.05  # of the weights' bytes: values that are stored beside codes, since the format cannot have them of these
)
FREE_EXTRA = 1 << 22


@dataclass(frozen=True)
class FloatModel:
    """What the float graphs of a file are made of.

    Attributes:
        model: the source itself, or with the graph and the weights of its dequantized form.
        quantized: whether it is the latter.
        forms: codes that are stored as float tensors, by the number of the stored weight.
        source: the quantized one, if it is.
        made: the dequantized model, also where it is not used.
        ties: which weight is stored for which; codes of other scales than those that they equal stand alone.
    """

    model: SourceModel
    quantized: bool
    ties: list[Tie]
    forms: dict[int, CodedForm] = field(default_factory=dict)
    source: SourceModel | None = None
    made: Dequantized | None = None

    def without(self) -> "FloatModel":
        """The source alone, although its codes may be stored as floats."""
        return self if self.source is None else replace(self, model=self.source, quantized=False)

    @property
    def operands(self) -> set[int]:
        """Stored weights that are scales or zero points of forms, and not stored again."""
        return {number for form in self.forms.values() for number in form.operands}


def float_model(source: SourceModel, ties: list[Tie]) -> FloatModel:
    """Undo a model's quantization, if it has any; with a warning where that cannot be done in whole."""
    made = undone(source)
    plain = FloatModel(source, False, ties, made=made)
    if made is None:
        return plain
    if made.report.left:
        left = made.report.left[0]
        log.warning("%s: no float graphs: %s stays quantized (%s)", source.path, left.node, left.reason)
        return plain
    large = any(isinstance(weight, FloatWeight) and isinstance(weight.codes, int) for weight in made.weights)
    if not large and computes_in_floats(source):
        return plain
    ties = list(ties)
    forms: dict[int, CodedForm] = {}
    for number, form in coded_forms(source, made.weights).items():
        stored = ties[number].stored
        if stored in forms and ties[number].perm is None and same_grid(forms[stored].weight, form.weight):
            continue
        if stored != number and (stored in forms or ties[number].perm is not None):
            ties[number] = Tie(number, None, ties[number].sha256)
            stored = number
        forms[stored] = replace(form, number=stored, operands=_operands(form, ties))
    weights = cast("list[Weight]", made.weights)  # FloatWeight offers what is used of a Weight
    model = replace(source, proto=made.model, weights=weights)
    return FloatModel(model, True, ties, forms, source, made)


def _operands(form: CodedForm, ties: list[Tie]) -> dict[int, str]:
    """The operands as they are stored."""
    return {ties[number].stored: view for number, view in form.operands.items() if ties[number].perm is None}


def wanted_axes(floats: FloatModel, uses: list[tuple[int, int]]) -> dict[int, set[int]]:
    """Along which axes of stored weights int8 codes are wanted.

    Args:
        floats: the model.
        uses: (weight, axis of its channels) of its graph.
    """
    found: dict[int, set[int]] = {}
    weights = floats.model.weights
    for number, axis in uses:
        weight = weights[number]
        if isinstance(weight, FloatWeight):
            if not isinstance(weight.codes, int):
                continue
            stored, perm = floats.ties[weight.codes].stored, axes_and_shape(weight)
            form = floats.forms.get(stored)
            shape = None if form is None else form.shape
        else:
            tie = floats.ties[number]
            stored, shape = tie.stored, weights[tie.stored].shape
            perm = tie.perm or tuple(range(len(shape)))
        if perm is not None and shape is not None and tuple(shape[i] for i in perm) == weight.shape:
            found.setdefault(stored, set()).add(perm[axis])
    return found

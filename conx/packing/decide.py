"""What becomes of one stored weight: its coding, its error, and scales of int8 codes to be made while loading."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Array, Encoded, TensorMeta
from conx.dtypes import DType
from conx.errors import ConxError, ModelError
from conx.graph.read import SourceModel, Weight
from conx.graph.ties import Tie
from conx.packing.axes import Axes
from conx.packing.choose import Choice, as_float32, choose
from conx.packing.measure import WeightError, decoded, measure
from conx.packing.pairs import Pair
from conx.packing.quantized import CodedForm, Coding
from conx.packing.settings import Settings
from conx.packing.store import serves
from conx.packing.turning import Turned, smaller_order
from conx.quantize.grid import peak_scales

__all__ = ["Decided", "Decider"]


@dataclass(frozen=True)
class Decided:
    """What became of a stored weight, before its streams are written.

    Attributes:
        weight: the source's.
        shape, dtype: of the stored tensor.
        choice: how it is coded, its axes in their own order.
        sha256: of the bytes that it decodes to.
        error: of coding; None where there is none.
        grids: scales of int8 codes, by the axis along which they lie.
        form: of codes of a quantized model.
        turned: the same with its axes in the order in which they are stored, if that is another.
    """

    weight: Weight
    shape: tuple[int, ...]
    dtype: DType
    choice: Choice
    sha256: bytes
    error: WeightError | None
    grids: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    form: CodedForm | None = None
    turned: Turned | None = None

    @property
    def encoded(self) -> Encoded:
        """What is stored."""
        return self.choice.encoded if self.turned is None else self.turned.encoded

    @property
    def order(self) -> tuple[int, ...] | None:
        """The axes of `shape` in stored order; None: as they are."""
        return None if self.turned is None else self.turned.order


class Decider:
    """Decides for one weight after the other, on any thread.

    Args:
        source: the model.
        ties: which weight is stored for which.
        settings: what the user wants.
        axes: along which the channels of each weight lie.
        uses: of stored weights, the axes along which int8 codes are wanted.
        forms: codes of a quantized model, by the number of the stored weight.
        pairs: codes of the quantized twin of a float model, likewise.
    """

    def __init__(
        self,
        source: SourceModel,
        ties: Sequence[Tie],
        settings: Settings,
        axes: Sequence[Axes],
        uses: dict[int, set[int]],
        forms: dict[int, CodedForm],
        pairs: dict[int, Pair],
    ) -> None:
        self.source, self.ties, self.settings = source, ties, settings
        self.axes, self.uses, self.forms, self.pairs = axes, uses, forms, pairs
        self.names: dict[int, list[str]] = {}
        for weight, tie in zip(source.weights, ties, strict=True):
            self.names.setdefault(tie.stored, []).append(weight.name)

    def __call__(self, weight: Weight) -> Decided:
        """Code one stored weight.

        Raises:
            ModelError: it cannot be read; the message names it.
        """
        try:
            form = self.forms.get(weight.number)
            return self._values(weight) if form is None else self._codes(weight, form)
        except ConxError as e:
            raise ModelError(f"{self.source.path}: tensor {weight.name!r}: {e}") from None

    def _values(self, weight: Weight) -> Decided:
        rule = self.settings.rules.of(self.names[weight.number])
        axes = self.axes[weight.number]
        if axes.exact and self.settings.rules.asked(self.names[weight.number]):
            axes = Axes.of_any(weight.shape)
        data = weight.read()
        pair = self.pairs.get(weight.number)
        if pair is None:
            choice = choose(data, weight.shape, weight.dtype, rule, axes)
        else:
            choice = Choice(pair.coding().encoded(), False)
        digest, error = self.ties[weight.number].sha256, None
        if not choice.lossless:
            found, error = measure(choice.encoded, TensorMeta(weight.shape, weight.dtype), data)
            error = None if found == digest else error
            digest = found
        grids = {}
        if self.settings.lossless or not rule.lossless:
            grids = self._grids(weight.number, weight.shape, weight.dtype, choice, data)
        order = smaller_order(choice.encoded, weight.shape, weight.dtype, smallest=rule.smallest)
        return Decided(weight, weight.shape, weight.dtype, choice, digest, error, grids, turned=order)

    def _codes(self, weight: Weight, form: CodedForm) -> Decided:
        encoded = Coding.of(form.weight).encoded()
        values = decoded(encoded, form.shape, DType.FLOAT32)
        choice = Choice(encoded, True)
        grids = self._grids(weight.number, form.shape, DType.FLOAT32, choice, values)
        digest = hashlib.sha256(values.tobytes()).digest()
        order = smaller_order(encoded, form.shape, DType.FLOAT32)
        return Decided(weight, form.shape, DType.FLOAT32, choice, digest, None, grids, form, order)

    def _grids(
        self, number: int, shape: tuple[int, ...], dtype: DType, choice: Choice, data: Array
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Scales along the axes for which int8 codes are wanted and not stored."""
        axes = [axis for axis in sorted(self.uses.get(number, ())) if not serves(choice.encoded.codec, shape, axis)]
        if not axes:
            return {}
        kept = as_float32(data, dtype) if choice.lossless else decoded(choice.encoded, shape, dtype)
        found = {axis: peak_scales(kept.reshape(shape), axis) for axis in axes}
        return {axis: scales for axis, scales in found.items() if scales is not None}

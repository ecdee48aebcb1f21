"""The axes that a stored weight may have scales along, from the uses of all weights that it stands for."""

from dataclasses import dataclass

from conx.graph.channels import ChannelAxis, channel_axis, keeps_exact
from conx.graph.read import SourceModel
from conx.graph.ties import Tie
from conx.graph.uses import Use, weight_uses

__all__ = ["Axes", "stored_axes"]


@dataclass(frozen=True)
class Axes:
    """Candidates for the axis of the scales.

    Attributes:
        axes: one for each kind of use; empty: the weight must not be coded.
        known: whether they come from operators that tell their output channels. Otherwise the weight may be anything,
            and its values are kept where a palette can hold them.
    """

    axes: tuple[ChannelAxis, ...]
    known: bool

    @property
    def exact(self) -> bool:
        """Whether the weight must not be coded."""
        return not self.axes

    @classmethod
    def of_any(cls, shape: tuple[int, ...]) -> "Axes":
        """All axes of a weight that nothing is known of; none for what is not a matrix."""
        wide = [i for i, d in enumerate(shape) if d > 1]
        return cls(tuple(map(ChannelAxis, wide)) if len(wide) > 1 else (), False)


def stored_axes(source: SourceModel, ties: list[Tie]) -> list[Axes]:
    """The axes of each weight, by its number; those of a tied weight are with the stored one."""
    told: list[dict[ChannelAxis, None]] = [{} for _ in source.weights]
    exact = [False] * len(source.weights)
    for weight, tie, uses in zip(source.weights, ties, weight_uses(source), strict=True):
        if tie.stored != weight.number and sum(d > 1 for d in weight.shape) < 2:
            exact[tie.stored] = True  # a vector with the same values
        for use in uses:
            place = _stored_place(use, weight.shape, tie.perm, source.weights[tie.stored].shape)
            if place is not None:
                told[tie.stored][place] = None
            elif keeps_exact(use):
                exact[tie.stored] = True
    return [_axes(tuple(places), no, w.shape) for places, no, w in zip(told, exact, source.weights, strict=True)]


def _axes(places: tuple[ChannelAxis, ...], exact: bool, shape: tuple[int, ...]) -> Axes:
    if exact:
        return Axes((), False)
    return Axes(places, True) if places else Axes.of_any(shape)


def _stored_place(
    use: Use, shape: tuple[int, ...], perm: tuple[int, ...] | None, stored: tuple[int, ...]
) -> ChannelAxis | None:
    """The use's channel axis as an axis of the stored weight. Dims of 1 may come and go between tied weights."""
    place = channel_axis(use, shape)
    if place is None or (perm is None and shape == stored):
        return place
    order = [i for i in perm or range(len(stored)) if stored[i] != 1]
    mine = [i for i, d in enumerate(shape) if d != 1]
    if [stored[i] for i in order] != [shape[i] for i in mine] or place.axis not in mine:
        return None
    return ChannelAxis(order[mine.index(place.axis)], place.rows, place.block)

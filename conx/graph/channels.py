"""Along which axis of a weight the output channels lie.

A matrix, kernel or embedding is coded with a scale for each output channel, since the errors of one channel must not
spread to another.
"""

from dataclasses import dataclass

from conx.graph.facts import is_quantized_operator
from conx.graph.uses import Use

__all__ = ["ChannelAxis", "channel_axis", "keeps_exact"]


@dataclass(frozen=True)
class ChannelAxis:
    """A scale for each position of `axis`.

    With `rows`, one for each position of all axes but `axis` instead; with `block`, one for each run of so many
    positions along `axis` at each position of the other axes.
    """

    axis: int
    rows: bool = False
    block: int | None = None


def channel_axis(use: Use, shape: tuple[int, ...]) -> ChannelAxis | None:
    """Where the output channels of this use lie in the weight (dims `shape`), or None if the operator does not tell."""
    if use.op_type == "Einsum":
        return _einsum_axis(use)
    rank = len(use.perm)
    place = _PLACES.get((use.domain if use.domain != "ai.onnx" else "", use.op_type, use.slot))
    if place is None or len(shape) < 2:
        return None
    if use.op_type == "ConvTranspose":
        return _transposed_kernel(use, shape)
    axis, rows = place.axis, place.rows
    if rank > 2 and place.stacked is not None:
        axis, rows = place.stacked, True
    elif place.axis_attribute:
        axis = use.attribute(place.axis_attribute, axis)
    elif place.turned_by and use.attribute(place.turned_by, 0):
        axis = place.turned
    found = use.perm[axis] if -rank <= axis < rank else None
    if found is None and rank == 2 and -rank <= axis < rank:  # channels of several axes, merged by a Reshape
        summed = use.perm[1 - axis % rank]
        return None if summed is None else ChannelAxis(summed, rows=True)
    return None if found is None else ChannelAxis(found, rows)


def keeps_exact(use: Use) -> bool:
    """Whether what the operator takes here are coordinates, thresholds or scales, where a small error is none."""
    if use.domain.startswith("ai.onnx.ml"):
        return True
    return use.op_type in _EXACT or is_quantized_operator(use.op_type)


_EXACT = {
    "Equal", "Greater", "GreaterOrEqual", "GridSample", "Less", "LessOrEqual", "NonMaxSuppression", "Pow", "QGemm",
    "Range", "Resize", "RoiAlign", "TopK", "Upsample", "Where",
}  # fmt: skip


def _transposed_kernel(use: Use, shape: tuple[int, ...]) -> ChannelAxis | None:
    """Kernels [inputs, outputs of a group, ...]: an output channel's inputs are those of its group."""
    groups = use.attribute("group", 1)
    if use.perm != tuple(range(len(shape))) or groups < 1 or shape[0] % groups:
        return None
    if groups == 1:
        return ChannelAxis(1)
    return ChannelAxis(0) if shape[1] == 1 else ChannelAxis(0, block=shape[0] // groups)


def _einsum_axis(use: Use) -> ChannelAxis | None:
    """A scale for each position of the axes that are not summed over, where a single one is."""
    given = dict(use.attributes).get("equation")
    equation = given.decode("ascii", "replace").replace(" ", "") if isinstance(given, bytes) else ""
    inputs, arrow, output = equation.partition("->")
    operands = inputs.split(",")
    if not arrow or "." in equation or use.slot >= len(operands) or len(operands[use.slot]) != len(use.perm):
        return None
    summed = [axis for label, axis in zip(operands[use.slot], use.perm, strict=True) if label not in output]
    return ChannelAxis(summed[0], rows=True) if len(summed) == 1 and summed[0] is not None else None


@dataclass(frozen=True)
class _Place:
    """The output channels' axis as an operator sees its input, negative from the end.

    `turned` instead where attribute `turned_by` is set; attribute `axis_attribute` says it where there is one. With
    `rows`, each position of all axes but `axis` is a channel of its own; so it is of a stack of matrices, where
    `stacked` is the axis that is summed over.
    """

    axis: int
    turned_by: str = ""
    turned: int = 0
    axis_attribute: str = ""
    rows: bool = False
    stacked: int | None = None


_MS = "com.microsoft"
_PLACES: dict[tuple[str, str, int], _Place] = {
    ("", "MatMul", 0): _Place(-2, stacked=-1),
    ("", "MatMul", 1): _Place(-1, stacked=-2),
    ("", "Gemm", 0): _Place(0, "transA", 1),
    ("", "Gemm", 1): _Place(1, "transB", 0),
    (_MS, "FusedMatMul", 0): _Place(-2, "transA", -1),
    (_MS, "FusedMatMul", 1): _Place(-1, "transB", -2),
    (_MS, "FusedGemm", 1): _Place(1, "transB", 0),
    ("", "Conv", 1): _Place(0),
    ("", "DeformConv", 1): _Place(0),
    (_MS, "FusedConv", 1): _Place(0),
    ("", "ConvTranspose", 1): _Place(1),
    ("", "Gather", 0): _Place(0, axis_attribute="axis"),
    **{("", op, slot): _Place(-1, rows=True) for op in ("LSTM", "GRU", "RNN") for slot in (1, 2)},
    **{(_MS, op, 1): _Place(-1) for op in ("Attention", "PackedAttention")},
    **{(_MS, "EmbedLayerNormalization", slot): _Place(0) for slot in (2, 3, 4)},
    **{(_MS, "MoE", slot): _Place(-1, rows=True) for slot in (2, 4, 6)},
}

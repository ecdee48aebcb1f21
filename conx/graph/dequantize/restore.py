"""From integers to the floats that they stand for: as a weight, as the value that was quantized, or by operators."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from conx.codecs.float8 import FLOAT8, float8_values
from conx.dtypes import DType
from conx.graph.dequantize.constants import CODE_KINDS, Array, Constant, Move
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.grids import Grid, grid_of, pulled
from conx.graph.dequantize.values import UNKNOWN, Params, Value, is_zero
from conx.graph.dequantize.weights import Codes, FloatWeight, Operand, shape_after
from conx.graph.read import INLINE_MAX

__all__ = ["add_weight", "alias", "as_floats", "dequantized", "merged", "plain", "weight"]

FLOATS: dict[int, DType] = {
    TensorProto.FLOAT: DType.FLOAT32,
    TensorProto.FLOAT16: DType.FLOAT16,
    TensorProto.BFLOAT16: DType.BFLOAT16,
}
# What quantizers append to the name of a weight.
SUFFIX = re.compile(r"(_quantized|_quant|_q|_Q\d(G\d+)?|_Bnb4|_[iu]?int[248]|_qweight)$")
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def dequantized(frame: Frame, value: Value, params: Params, want: str = "", like: str = "") -> Value | None:
    """The floats of integers, if need be computed by ordinary operators; None where that cannot be written down."""
    return as_floats(frame, value, params, want) or plain(frame, value, params, want, like)


def as_floats(frame: Frame, value: Value, params: Params, want: str = "") -> Value | None:
    """The floats that integers stand for, if that is known."""
    if value.integer is not None:
        found = value.integer.floats(frame, params, want)
        if found is not None:
            return found
    return weight(frame, value, params, want)


def plain(frame: Frame, value: Value, params: Params, want: str = "", like: str = "") -> Value | None:
    """Dequantize as the model runs."""
    key = ("plain", value.name, *params.key())
    found = frame.cached(key)
    if found is not None:
        return found
    run = frame.run
    like = like or value.name
    if run.keep and len(params.scale) == 1 and run.opset >= (10 if params.single() else 13):
        attributes: dict[str, Any] = {} if params.axis is None or params.single() else {"axis": params.axis}
        if params.block:
            attributes["block_size"] = params.block
        inputs = [value, params.scale[0], params.zero]
        made = frame.emit("DequantizeLinear", inputs, want, like=like, kind=params.kind, rank=value.rank, **attributes)
    else:
        operands = [_spread(frame, v, value, params) for v in (*params.scale, *([params.zero] if params.zero else []))]
        if any(v is None for v in operands):
            return None
        steps: list[tuple[str, Value]] = []
        if not is_zero(params.zero) and operands[-1] is not None:
            zero = operands[-1]
            if zero.kind != params.kind:
                zero = frame.emit("Cast", [zero], like=zero.name, to=params.kind)
            steps.append(("Sub", zero))
        steps += [("Mul", v) for v in operands[: len(params.scale)] if v is not None]
        last = len(steps)
        made = frame.emit("Cast", [value], "" if last else want, like=like, kind=params.kind, to=params.kind)
        for i, (op_type, operand) in enumerate(steps, 1):
            made = frame.emit(op_type, [made, operand], want if i == last else "", like=like, kind=params.kind)
        made.rank = value.rank
    frame.cache[key] = made
    return made


def _spread(frame: Frame, operand: Value, value: Value, params: Params) -> Value | None:
    """A scale or zero point in a shape that broadcasts against the integers; constant zero points as floats."""
    constant = operand.constant
    if params.block:
        return None
    if constant is None:
        if params.axis is None or operand.scalar or operand.rank == 0:
            return operand
        return None if operand.rank != 1 or not _is_last(params.axis, value.rank) else operand
    integers = constant.dtype.storage.kind in "iu" and not constant.dtype.is_float
    shape = list(constant.shape)
    if constant.size == 1:
        shape = []
    elif params.axis is not None and not _is_last(params.axis, value.rank):
        if value.rank is None or len(shape) != 1:
            return None
        shape += [1] * (value.rank - 1 - params.axis % value.rank)
    if not integers and shape == list(constant.shape):
        return operand
    return frame.constant(constant.values().reshape(shape), operand.name, params.kind)


def _is_last(axis: int, rank: int | None) -> bool:
    return axis == -1 or (rank is not None and axis == rank - 1)


def weight(
    frame: Frame, value: Value, params: Params, want: str = "", after: tuple[Move, ...] = (), name: str = ""
) -> Value | None:
    """The float weight of constant codes, if the scales are constant and fit. `after` is done to it then."""
    if value.constant is None or not params.scale or params.kind not in FLOATS:
        return None
    constant = value.constant
    if constant.tensor.data_type not in CODE_KINDS | {TensorProto.INT32} and not _is_small_float(constant):
        return None
    constant = replace(constant, cast=None)
    key = ("weight", id(constant.tensor), constant.moves, *params.key(), after)
    found = frame.run.known.get(key)
    if found is None:
        operands = _operands(constant.shape, params)
        if operands is None:
            return None
        grid, scales, zero = operands
        shape, steps = constant.stored_shape, merged(constant.moves)
        while steps and steps[0][0] == "shape":  # which leaves the codes where they are
            shape, steps = steps[0][1], steps[1:]
        codes = Codes(replace(constant, moves=()), shape, **_lookup(constant))
        inside = pulled(grid, shape, steps)
        before, moves = ((), (*steps, *after)) if inside else (steps, after)
        original = name or SUFFIX.sub("", constant.tensor.name or value.name)
        found = add_weight(
            frame, value, codes, inside or grid, scales, zero, before, moves, params.kind, original, want
        )
        frame.run.known[key] = found
    return found


def _is_small_float(constant: Constant) -> bool:
    return constant.dtype in FLOAT8 or constant.dtype is DType.FLOAT4E2M1


def _lookup(constant: Constant) -> dict[str, Any]:
    if constant.dtype in FLOAT8:
        return {"table": float8_values(constant.dtype)}
    if constant.dtype is DType.FLOAT4E2M1:
        return {"table": np.concatenate([FP4, -FP4]), "bits": 4}
    return {}


def _operands(
    shape: tuple[int, ...], params: Params
) -> tuple[Grid, list[tuple[Constant, tuple[int, ...]]], tuple[Constant, tuple[int, ...]] | None] | None:
    """The grid, and what the scales and zero points are made of, each with dims that broadcast against the grid's."""
    values = [*params.scale, *([] if is_zero(params.zero) or params.zero is None else [params.zero])]
    parts = []
    for value in values:
        dims = None if value.constant is None else _placed(value.constant.shape, len(shape), params)
        if value.constant is None or dims is None or not value.constant.readable():
            return None
        parts.append((value.constant, dims))
    dims = np.broadcast_shapes(*(dims for _, dims in parts))
    axis = params.axis % len(shape) if params.axis is not None and shape else 0
    grid = grid_of(shape, dims, axis, params.block)
    if grid is None:
        return None
    scales = parts[: len(params.scale)]
    return grid, scales, parts[-1] if len(parts) > len(scales) else None


def _placed(dims: tuple[int, ...], rank: int, params: Params) -> tuple[int, ...] | None:
    """The dims of scales with as many axes as what they scale."""
    if all(d == 1 for d in dims):
        return (1,) * rank
    if params.block:
        return dims if len(dims) == rank else None
    if params.axis is not None and len(dims) == 1:
        axis = params.axis % rank
        return tuple(dims[0] if i == axis else 1 for i in range(rank))
    return (1,) * (rank - len(dims)) + dims if len(dims) <= rank else None


def add_weight(
    frame: Frame,
    value: Value,
    codes: Codes,
    grid: Grid,
    scales: Sequence[tuple[Constant, tuple[int, ...]]],
    zeros: tuple[Constant, tuple[int, ...]] | Array | None,
    before: tuple[Move, ...],
    moves: tuple[Move, ...],
    kind: int,
    original: str,
    want: str = "",
) -> Value:
    """Add a float weight beside the constant `value`.

    Args:
        frame: where it is wanted.
        value: the codes in the graph.
        codes: what they are.
        grid: which scale belongs to which code.
        scales: see `Operand.parts`.
        zeros: likewise, or an array that broadcasts against the grid's `full`.
        before: see `FloatWeight`.
        moves: likewise.
        kind: element type.
        original: name that the weight probably had.
        want: name of a value that it replaces.
    """
    run = frame.run
    home: Frame = value.home or frame
    integral = True
    operand = None
    if zeros is not None:
        array = zeros if isinstance(zeros, np.ndarray) else None
        parts = () if isinstance(zeros, np.ndarray) else (zeros,)
        if not isinstance(zeros, np.ndarray) and zeros[0].dtype.is_float:
            array, parts = zeros[0].values().reshape(zeros[1]), ()
        if array is not None and array.dtype.kind == "f":
            integral = bool((array == np.rint(array)).all() and (np.abs(array) < 1 << 24).all())
            array = array.astype(np.int32) if integral else array.astype(np.float32)
        operand = Operand(parts, grid, array)
    shape = shape_after(codes, before, moves)
    name = _weight_name(frame, home, original, want)
    made = FloatWeight(
        len(run.weights),
        name,
        FLOATS[kind],
        shape,
        codes,
        grid,
        Operand(tuple(scales), grid),
        operand,
        merged(before),
        merged(moves),
        integral,
    )
    if made.nbytes > INLINE_MAX:
        run.weights.append(made)
        home.add_tensor(made.stub())
        result = Value(name, kind, len(shape), home=home)
    else:
        tensor = made.tensor()
        home.add_tensor(tensor)
        result = Value(name, kind, len(shape), Constant(tensor, run.source), home)
    return home.define(result)


def _weight_name(frame: Frame, home: Frame, original: str, want: str) -> str:
    """The name that the weight had, if that can be told and is free, or one like it."""
    run = frame.run
    if want and want == original and frame is home and want not in home.outputs:
        return want
    if original and original not in run.taken:
        run.taken.add(original)
        return original
    return run.fresh(original or "weight")


def merged(moves: Sequence[Move]) -> tuple[Move, ...]:
    """The same moves, transpositions in a row as one and those that do nothing left out."""
    out: list[Move] = []
    for how, what in moves:
        now = what
        if out and out[-1][0] == how:
            last = out.pop()[1]
            now = tuple(last[i] for i in what) if how == "perm" else what
        if how == "shape" or now != tuple(range(len(now))):
            out.append((how, now))
    return tuple(out)


def alias(frame: Frame, name: str, value: Value) -> None:
    """From now on `name` of the source is had as `value`."""
    if value.kind == UNKNOWN:
        value.kind = TensorProto.FLOAT
    frame.define(value, name)

"""Weights in blocks: MatMulNBits, GatherBlockQuantized, MatMulBnb4."""

import math
from typing import Any

import numpy as np
import onnx
from onnx import helper

from conx.dtypes import DType
from conx.graph.dequantize.constants import Array, Constant, unpacked
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.grids import Grid
from conx.graph.dequantize.restore import FLOATS, SUFFIX, add_weight, alias, weight
from conx.graph.dequantize.values import FLOAT, Params, Value
from conx.graph.dequantize.weights import Codes

__all__ = ["block_codes", "gather_block_quantized", "matmul_bnb4", "matmul_nbits"]

# The values of bitsandbytes' types, as onnxruntime has them (blockwise_quant_block_bnb4.h); QLoRA, arXiv 2305.14314.
FP4 = [0, 5.208333333e-03, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25]
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def matmul_nbits(node: onnx.NodeProto, frame: Frame) -> None:
    """MatMulNBits: a matrix [N, K] of 2, 4 or 8 bits, in blocks along K that are padded to bytes."""
    first, codes, scales, zeros, groups, bias = (frame.get(name) for name in [*node.input, *[""] * 4][:6])
    attributes = _attributes(node)
    reason = _unusable(first, codes, scales, zeros, groups)
    if attributes.get("weight_prepacked"):
        reason = "its weight is packed for one device"
    if reason or codes is None or codes.constant is None or scales is None:
        frame.stays(node, reason)
        return
    rows, length = attributes["N"], attributes["K"]
    bits, block = attributes.get("bits", 4), attributes.get("block_size", 32)
    of = groups.constant.values() if groups is not None and groups.constant is not None else None
    key = ("nbits", id(codes.constant.tensor), scales.name, zeros and zeros.name, groups and groups.name)
    matrix = frame.run.known.get(key)
    if matrix is None:
        matrix = block_codes(frame, codes, scales, zeros, (rows, length), bits, block, of)
        if matrix is None:
            frame.stays(node, "its weight, scales and zero points do not fit together")
            return
        frame.run.known[key] = matrix
    name, kind = node.output[0], matrix.kind
    rank = first.rank if first else None
    made = frame.emit("MatMul", [first, matrix], "" if bias else name, like=name, kind=kind, rank=rank)
    if bias is not None:
        made = frame.emit("Add", [made, bias], name, kind=kind, rank=rank)
    alias(frame, name, made)


def block_codes(
    frame: Frame,
    codes: Value,
    scales: Value,
    zeros: Value | None,
    shape: tuple[int, ...],
    bits: int,
    block: int,
    groups: Array | None = None,
    *,
    turned: bool = True,
) -> Value | None:
    """The float matrices [..., K, N] of codes [..., N, K] in blocks along K, whose rows are padded to whole blocks.

    Args:
        frame: where they are wanted.
        codes: the bytes.
        scales: [..., N, blocks], in any shape.
        zeros: likewise, floats or packed like the codes with padded rows; None: half of the range.
        shape: of the codes.
        bits: of a code.
        block: positions of K.
        groups: for each position of K its block, where they don't follow each other.
        turned: False: [..., N, K], as the codes.
    """
    if codes.constant is None or scales.constant is None:
        return None
    rows, length = math.prod(shape[:-1]), shape[-1]
    blocks = -(-length // block)
    dims = (*shape[:-1], blocks)
    if scales.constant.size != rows * blocks or codes.constant.size * 8 != rows * blocks * block * bits:
        return None
    stored = Codes(Constant(codes.constant.tensor, codes.constant.weights), shape, bits, blocks * block)
    minus = _zero_points(zeros, rows, blocks, bits)
    if minus is None:
        return None
    minus = minus.reshape(dims)
    grid = Grid(len(shape) - 1, block, False, dims, dims)
    parts = [(scales.constant, dims)]
    if groups is not None and not np.array_equal(groups, np.arange(length) // block):
        if groups.size != length or groups.min() < 0 or groups.max() >= blocks:
            return None
        grid = Grid(len(shape) - 1, 1, False, shape, shape)
        picked = scales.constant.values().reshape(dims)[..., groups]
        parts = [(Constant.of(picked.astype(np.float32)), shape)]
        minus = minus[..., groups]
    axes = tuple(range(len(shape)))
    turn = (*axes[:-2], axes[-1], axes[-2])
    name = SUFFIX.sub("", codes.constant.tensor.name or codes.name)
    kind = scales.kind if scales.kind in FLOATS else FLOAT
    moves = (("perm", turn),) if turned else ()
    return add_weight(frame, codes, stored, grid, parts, minus, (), moves, kind, name)


def _zero_points(zeros: Value | None, rows: int, blocks: int, bits: int) -> Array | None:
    """Zero points, flat; None if they do not fit."""
    if zeros is None:
        return np.full(rows * blocks, 1 << (bits - 1), np.int32)
    if zeros.constant is None:
        return None
    if zeros.constant.dtype.is_float:
        values = zeros.constant.values().reshape(-1)
        return values if values.size == rows * blocks else None
    width = -(-blocks * bits // 8)
    if zeros.constant.size != rows * width:
        return None
    return unpacked(zeros.constant.raw().reshape(rows, width), bits, blocks).astype(np.int32).reshape(-1)


def gather_block_quantized(node: onnx.NodeProto, frame: Frame) -> None:
    """GatherBlockQuantized: rows of a quantized table."""
    codes, indices, scales, zeros = (frame.get(name) for name in [*node.input, ""][:4])
    attributes = _attributes(node)
    reason = _unusable(indices, codes, scales, zeros)
    if reason or codes is None or codes.constant is None or scales is None or scales.constant is None:
        frame.stays(node, reason)
        return
    axis, along = attributes.get("gather_axis", 0), attributes.get("quantize_axis", 1)
    table = _table(frame, codes, scales, zeros, along, attributes)
    if table is None:
        frame.stays(node, "its table, scales and zero points do not fit together")
        return
    name = node.output[0]
    made = frame.emit("Gather", [table, indices], name, kind=table.kind, axis=axis)
    alias(frame, name, made)


def _table(
    frame: Frame, codes: Value, scales: Value, zeros: Value | None, axis: int, attributes: dict[str, Any]
) -> Value | None:
    constant, factors = codes.constant, scales.constant
    if constant is None or factors is None:
        return None
    block = attributes.get("block_size", 128)
    kind = scales.kind if scales.kind in FLOATS else FLOAT
    if constant.dtype is not DType.UINT8:  # int4 and uint4, or small floats: as of DequantizeLinear
        length = constant.shape[axis]
        return weight(frame, codes, Params((scales,), zeros, axis, block or length, kind))
    bits = attributes.get("bits", 4)
    shape = (*constant.shape[:-1], constant.shape[-1] * 8 // bits)
    axis %= len(shape)
    dims = tuple(-(-d // block) if i == axis else d for i, d in enumerate(shape))
    if factors.shape != dims:
        return None
    if zeros is not None and zeros.constant is not None:
        packed = zeros.constant.values()
        minus = unpacked(packed, bits, dims[-1]).astype(np.int32)
        if minus.shape != dims:
            return None
    else:
        minus = np.full(dims, 1 << (bits - 1), np.int32)
    stored = Codes(Constant(constant.tensor, constant.weights), shape, bits)
    grid = Grid(axis, block, False, dims, dims)
    name = SUFFIX.sub("", constant.tensor.name or codes.name)
    key = ("table", id(constant.tensor), scales.name, zeros and zeros.name)
    found = frame.run.known.get(key)
    if found is None:
        found = add_weight(frame, codes, stored, grid, [(factors, dims)], minus, (), (), kind, name)
        frame.run.known[key] = found
    return found


def matmul_bnb4(node: onnx.NodeProto, frame: Frame) -> None:
    """MatMulBnb4: a matrix [N, K], flat, of indices into 16 values, in blocks."""
    first, codes, scales = (frame.get(name) for name in node.input)
    attributes = _attributes(node)
    reason = _unusable(first, codes, scales, None)
    if reason or codes is None or codes.constant is None or scales is None or scales.constant is None:
        frame.stays(node, reason)
        return
    rows, length, block = attributes["N"], attributes["K"], attributes["block_size"]
    table = np.array(NF4, np.float32) if attributes["quant_type"] == 1 else np.array([*FP4, *(-v for v in FP4)], "<f4")
    size = rows * length
    if codes.constant.size != -(-size // 2) or scales.constant.size != -(-size // block):
        frame.stays(node, "its weight and scales do not fit together")
        return
    stored = Codes(codes.constant, (size,), 4, table=table, high_first=True)
    dims = scales.constant.shape
    grid = Grid(0, block, False, dims, dims)
    moves: tuple[tuple[str, tuple[int, ...]], ...] = (("shape", (rows, length)),)
    if attributes.get("transB", 1):
        moves = (*moves, ("perm", (1, 0)))
    name = SUFFIX.sub("", codes.constant.tensor.name or codes.name)
    kind = scales.kind if scales.kind in FLOATS else FLOAT
    matrix = add_weight(frame, codes, stored, grid, [(scales.constant, dims)], None, (), moves, kind, name)
    out = node.output[0]
    rank = first.rank if first else None
    alias(frame, out, frame.emit("MatMul", [first, matrix], out, kind=kind, rank=rank))


def _unusable(
    first: Value | None, codes: Value | None, scales: Value | None, zeros: Value | None, groups: Value | None = None
) -> str:
    """Why a node cannot be undone, or ""."""
    if first is None or codes is None or scales is None:
        return "an input is left out"
    fixed = (codes, scales, *(v for v in (zeros, groups) if v is not None))
    return "" if all(v.constant is not None for v in fixed) else "its weight, scales or zero points are not constant"


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}

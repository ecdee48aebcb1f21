"""Nodes that compute with a weight's int8 codes: MatMulNBits for products, gathered codes for embeddings."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from conx.dtypes import DType
from conx.graph.derived import CODES, SCALES, Derived
from conx.graph.fp16_graph import constants_to_initializers, used_names
from conx.graph.lift import subgraphs
from conx.graph.names import Names
from conx.graph.read import weight_number

__all__ = [
    "ACCURACY",
    "GATHER",
    "MICROSOFT",
    "REWRITES",
    "CodeGrid",
    "CodeSource",
    "CodedNodes",
    "Rewrites",
    "block_size",
]

FLOAT = TensorProto.FLOAT
MICROSOFT = "com.microsoft"
SMALLEST = 4096  # elements; smaller matrices are not worth it
ACCURACY = 4  # accuracy_level: activations become int8 too, block by block; a loader may replace it
BLOCKS = (256, 128, 64, 32, 16)  # what MatMulNBits takes
SCALE_BYTES = 4
CHEAP = 0.07  # bytes of padding and scales over those of the codes


@dataclass(frozen=True)
class CodeGrid:
    """The int8 codes that a weight has along its channels.

    Attributes:
        block: positions of the summed axis that share a scale; None: all of them.
        made: whether codes are made of the values while loading, on a grid that is stored for it.
    """

    block: int | None = None
    made: bool = False


CodeSource = Callable[[int, int], CodeGrid | None]
"""`codes(weight, axis)`: the codes of a weight whose channels lie along `axis`; None where it has none."""


def block_size(length: int, block: int | None) -> int | None:
    """The block size of MatMulNBits: the smallest whose padding and scales cost little, else the one that costs least.

    Activations are quantized block by block: small blocks are more accurate (64 against 256: errors of .031 against
    .055 on MiniLM, for a tenth more time; benchmarks/latency.py), and cost more bytes of scales.

    Args:
        length: positions of the axis that is summed over.
        block: positions that share a scale as they are stored; None: all. Blocks must not straddle these.
    """
    fits = [b for b in BLOCKS if block is None or b == block or (block % b == 0 and length % block == 0)]
    costs = {b: -(-length // b) * (b + SCALE_BYTES) / max(1, length) - 1 for b in fits}
    cheap = [b for b in fits if costs[b] <= CHEAP]
    return min(cheap) if cheap else min(fits, key=lambda b: costs[b], default=None)


@dataclass(frozen=True)
class _Weight:
    """A value that is a weight with its axes moved.

    `home` is the graph that holds the weight, the `place`-th that was walked, under the name `name`.
    """

    number: int
    dims: tuple[int, ...]
    perm: tuple[int, ...]
    home: onnx.GraphProto
    place: int
    name: str

    def turned(self, perm: tuple[int, ...]) -> "_Weight":
        """With its axes in another order."""
        return replace(self, perm=perm)


_Scope = dict[str, _Weight | None]


class CodedNodes:
    """One walk through a model, which is changed.

    Args:
        model: its local functions are inlined.
        weights: how many weights there are.
        codes: what is known of them.
        rewrites: which operators are rewritten, and how.

    Attributes:
        derived: what was made of weights, numbered from `weights`.
    """

    def __init__(self, model: onnx.ModelProto, weights: int, codes: CodeSource, rewrites: "Rewrites") -> None:
        self.weights, self.codes, self.rewrites = weights, codes, rewrites
        self.names = Names(model.graph)
        self.derived: list[Derived] = []
        self.known: dict[tuple[object, ...], str] = {}
        self.graphs = 0
        self.moved: set[str] = set()

    def graph(self, graph: onnx.GraphProto, outer: _Scope) -> None:
        place = self.graphs
        self.graphs += 1
        scope = dict(outer)
        scope.update(dict.fromkeys((v.name for v in graph.input), None))
        fixed = {v.name for v in (*graph.input, *graph.output)}
        constants_to_initializers(graph, fixed)
        for tensor in list(graph.initializer):
            number = weight_number(tensor)
            usable = number is not None and tensor.data_type == FLOAT and tensor.name not in fixed
            scope[tensor.name] = None
            if usable and number is not None:
                dims = tuple(tensor.dims)
                scope[tensor.name] = _Weight(number, dims, tuple(range(len(dims))), graph, place, tensor.name)
        nodes: list[onnx.NodeProto] = []
        for node in list(graph.node):
            for sub in subgraphs(node):
                self.graph(sub, scope)
            made = self.node(node, [scope.get(name) for name in node.input])
            moved = _moved(node, scope)
            scope.update(dict.fromkeys(node.output, None))
            if moved is not None:
                scope[node.output[0]] = moved
                self.moved.add(node.output[0])
            nodes += [node] if made is None else made
        del graph.node[:]
        graph.node.extend(nodes)

    def drop_moves(self, graph: onnx.GraphProto) -> None:
        """Drop nodes that move the axes of a weight for nobody any more."""
        for node in graph.node:
            for sub in subgraphs(node):
                self.drop_moves(sub)
        used = used_names(graph)
        for i in reversed(range(len(graph.node))):
            node = graph.node[i]
            if len(node.output) == 1 and node.output[0] in self.moved and node.output[0] not in used:
                del graph.node[i]
                used = used_names(graph)

    def node(self, node: onnx.NodeProto, inputs: Sequence[_Weight | None]) -> list[onnx.NodeProto] | None:
        """What takes the place of a node; None: it stays."""
        rewrite = self.rewrites.get((node.domain if node.domain != "ai.onnx" else "", node.op_type))
        return None if rewrite is None else rewrite(self, node, inputs)

    def matmul(self, node: onnx.NodeProto, inputs: Sequence[_Weight | None]) -> list[onnx.NodeProto] | None:
        """MatMul(A, weight)."""
        return self.product(node.input[0], inputs[1], False, node.output[0]) if len(inputs) == 2 else None

    def fused_matmul(self, node: onnx.NodeProto, inputs: Sequence[_Weight | None]) -> list[onnx.NodeProto] | None:
        """FusedMatMul(A, weight), unless A is transposed."""
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if len(inputs) != 2 or any(given.get(k) for k in ("transA", "transBatchA", "transBatchB")):
            return None
        alpha = given.get("alpha", 1.0)
        last = node.output[0] if alpha == 1 else self.names.fresh(node.output[0], "product")
        nodes = self.product(node.input[0], inputs[1], bool(given.get("transB")), last)
        if nodes is not None and alpha != 1:
            nodes += self.scaled(last, alpha, node.output[0])
        return nodes

    def gemm(self, node: onnx.NodeProto, inputs: Sequence[_Weight | None]) -> list[onnx.NodeProto] | None:
        """Alpha * A * weight + beta * C."""
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        first, output = node.input[0], node.output[0]
        added = node.input[2] if len(node.input) > 2 else ""
        alpha, beta = given.get("alpha", 1.0), given.get("beta", 1.0)
        before: list[onnx.NodeProto] = []
        if given.get("transA"):
            first = self.names.fresh(output, "transposed")
            before.append(helper.make_node("Transpose", [node.input[0]], [first], perm=[1, 0]))
        product = self.names.fresh(output, "product") if added or alpha != 1 else output
        nodes = self.product(first, inputs[1], bool(given.get("transB")), product)
        if nodes is None:
            return None
        nodes = before + nodes
        if alpha != 1:
            scaled = self.names.fresh(output, "scaled") if added else output
            nodes += self.scaled(product, alpha, scaled)
            product = scaled
        if added and beta != 1:
            term = self.names.fresh(output, "term")
            nodes += self.scaled(added, beta, term)
            added = term
        if added:
            nodes.append(helper.make_node("Add", [product, added], [output]))
        return nodes

    def gather(self, node: onnx.NodeProto, inputs: Sequence[_Weight | None]) -> list[onnx.NodeProto] | None:
        """Gather of rows: of their codes and of their scales."""
        weight = inputs[0]
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        if weight is None or len(weight.dims) < 2 or weight.perm != tuple(range(len(weight.dims))):
            return None
        if axis not in (0, -len(weight.dims)) or math.prod(weight.dims) < SMALLEST:
            return None
        grid = self.codes(weight.number, 0)
        if grid is None or grid.block is not None:
            return None
        output, rows = node.output[0], weight.dims[0]
        codes = self.initializer(weight, grid, CODES, DType.INT8, weight.dims)
        scales = self.initializer(weight, grid, SCALES, DType.FLOAT32, (rows,) + (1,) * (len(weight.dims) - 1))
        picked, floats, factors = (self.names.fresh(output, part) for part in ("codes", "floats", "scales"))
        return [
            helper.make_node("Gather", [codes, node.input[1]], [picked], axis=0),
            helper.make_node("Cast", [picked], [floats], to=FLOAT),
            helper.make_node("Gather", [scales, node.input[1]], [factors], axis=0),
            helper.make_node("Mul", [floats, factors], [output]),
        ]

    def product(self, first: str, weight: _Weight | None, transposed: bool, output: str) -> list[onnx.NodeProto] | None:
        """`output` = `first` times the weight, or its transpose; None where it has no codes."""
        if weight is None or len(weight.dims) != 2 or math.prod(weight.dims) < SMALLEST:
            return None
        summed, channels = weight.perm[::-1] if transposed else weight.perm
        grid = self.codes(weight.number, channels)
        length, width = weight.dims[summed], weight.dims[channels]
        size = None if grid is None else block_size(length, grid.block)
        if grid is None or size is None:
            return None
        blocks = -(-length // size)
        turned = weight.turned((channels, summed))
        codes = self.initializer(turned, grid, CODES, DType.UINT8, (width, blocks, size), blocks * size)
        scales = self.initializer(turned, grid, SCALES, DType.FLOAT32, (width, blocks))
        made = helper.make_node("MatMulNBits", [first, codes, scales], [output], domain=MICROSOFT)
        values = {"K": length, "N": width, "bits": 8, "block_size": size, "accuracy_level": ACCURACY}
        made.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())
        return [made]

    def scaled(self, value: str, factor: float, output: str) -> list[onnx.NodeProto]:
        """`output` = `value` times a number."""
        constant = self.names.fresh(output, "factor")
        tensor = numpy_helper.from_array(np.array(factor, np.float32), constant)
        return [
            helper.make_node("Constant", [], [constant], value=tensor),
            helper.make_node("Mul", [value, constant], [output]),
        ]

    def initializer(
        self, weight: _Weight, grid: CodeGrid, view: str, dtype: DType, shape: tuple[int, ...], pad: int | None = None
    ) -> str:
        """The name of the weight's codes or scales, beside the weight itself; each form is there once."""
        key = (weight.place, weight.name, view, dtype, shape, weight.perm)
        name = self.known.get(key)
        if name is None:
            name = self.known[key] = self.names.fresh(weight.name, view)
            axis = weight.perm[0] if grid.made else None
            number = self.weights + len(self.derived)
            made = Derived(number, name, dtype, shape, weight.number, view, weight.perm, pad, axis)
            self.derived.append(made)
            weight.home.initializer.append(made.stub())
        return name


GATHER = ("", "Gather")
Rewrites = dict[
    tuple[str, str], Callable[[CodedNodes, onnx.NodeProto, Sequence[_Weight | None]], list[onnx.NodeProto] | None]
]
REWRITES: Rewrites = {
    ("", "MatMul"): CodedNodes.matmul,
    ("", "Gemm"): CodedNodes.gemm,
    GATHER: CodedNodes.gather,
    (MICROSOFT, "FusedMatMul"): CodedNodes.fused_matmul,
}


def _moved(node: onnx.NodeProto, scope: _Scope) -> _Weight | None:
    """The weight that a node's output is, where it only moves axes."""
    weight = scope.get(node.input[0]) if node.input else None
    if weight is None or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Identity":
        return weight
    if node.op_type != "Transpose":
        return None
    turn = next((list(a.ints) for a in node.attribute if a.name == "perm"), [*reversed(range(len(weight.perm)))])
    if sorted(turn) != list(range(len(weight.perm))):
        return None
    return weight.turned(tuple(weight.perm[i] for i in turn))

"""A weight and its transpose become one initializer.

A tied embedding is gathered from, and its transpose is multiplied by: exporters leave Transpose(W) in the graph, which
onnxruntime folds into a second copy, or fold it themselves into an initializer of its own. A product that says
transB takes the embedding as it is: Gemm where its first input is known to be a matrix, FusedMatMul elsewhere.

What it saves: half of the memory where the runtime does not repack weights, and the peak while opening where it does;
what it costs: nothing that shows (benchmarks/tied.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from conx.dtypes import DType
from conx.graph.fp16_graph import constants_to_initializers, forget_defaults, used_names
from conx.graph.lift import nested_graphs, subgraphs

__all__ = ["SMALLEST", "Content", "share_transposed"]

SMALLEST = 1 << 20  # bytes of a weight; below, there is nothing to save
TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
MICROSOFT = "com.microsoft"
STANDARD = ("", "ai.onnx")
TURN = (1, 0)
BARE_GEMM = 11  # the opset from which Gemm needs no third input

Content = Callable[[TensorProto], tuple[int, tuple[int, ...] | None] | None]
"""The stored weight that an initializer is, and the permutation of its axes; None for what is no weight."""


def share_transposed(model: onnx.ModelProto, content: Content) -> onnx.ModelProto:
    """Let products take a large weight transposed where it is there untransposed, in the same graph, for another use.

    Outputs are equal within float rounding.

    Args:
        model: with stubs, of equal initializers merged; is not changed.
        content: tells which initializers are transposes of each other.

    Returns:
        The model itself where there is nothing to share.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    if made.ir_version < 4:  # there, every initializer is an input too, and as constant as any
        forget_defaults(made.graph)
    turned: list[onnx.NodeProto] = []
    for graph in (made.graph, *nested_graphs(made.graph)):
        constants_to_initializers(graph, {v.name for v in (*graph.input, *graph.output)})
        turned += _Sharing(graph, content).run()
    if not turned:
        return model
    _spell_products(made, turned)
    return made


@dataclass
class _Uses:
    """Who uses a value: inputs of nodes of the same graph, and whether anything else does."""

    inputs: list[tuple[onnx.NodeProto, int]] = field(default_factory=list)
    elsewhere: bool = False


class _Sharing:
    """One graph, which is changed. Products that take another weight now are marked in `transB` as Gemm has it."""

    def __init__(self, graph: onnx.GraphProto, content: Content) -> None:
        self.graph, self.content = graph, content
        self.uses: dict[str, _Uses] = defaultdict(_Uses)
        for node in graph.node:
            for slot, name in enumerate(node.input):
                self.uses[name].inputs.append((node, slot))
        for name in _seen_elsewhere(graph):
            self.uses[name].elsewhere = True
        self.turned: list[onnx.NodeProto] = []

    def run(self) -> list[onnx.NodeProto]:
        """The products that were turned."""
        fixed = {v.name for v in (*self.graph.input, *self.graph.output)}
        large = [t for t in self.graph.initializer if t.name not in fixed and _is_large(t)]
        held = {t.name: content for t in large if (content := self.content(t)) is not None}
        shapes = {t.name: tuple(t.dims) for t in large}
        self._twins([t for t in large if t.name in held], held, shapes)
        self._transposes(held.keys() & {t.name for t in self.graph.initializer})
        return self.turned

    def _twins(
        self,
        large: list[TensorProto],
        held: dict[str, tuple[int, tuple[int, ...] | None]],
        shapes: dict[str, tuple[int, ...]],
    ) -> None:
        """Initializers that are the transpose of another: the stored one stays, if it is a matrix itself."""
        first = {(held[t.name], t.data_type, shapes[t.name]): t.name for t in large}
        for tensor in sorted(large, key=lambda t: held[t.name][1] is None):
            number, perm = held[tensor.name]
            if perm not in (None, TURN):
                continue
            content = (number, TURN if perm is None else None)
            twin = first.get((content, tensor.data_type, shapes[tensor.name][::-1]))
            if twin is not None and self._turn(tensor.name, twin):
                del first[held[tensor.name], tensor.data_type, shapes[tensor.name]]
                self.graph.initializer.remove(tensor)

    def _transposes(self, names: set[str]) -> None:
        """Transpose nodes of a weight that something else uses too."""
        for node in list(self.graph.node):
            if not _is_transpose(node) or node.input[0] not in names:
                continue
            uses = self.uses[node.input[0]]
            alone = not uses.elsewhere and all(user is node for user, _ in uses.inputs)
            if not alone and self._turn(node.output[0], node.input[0]):
                self.graph.node.remove(node)
                uses.inputs = [(user, slot) for user, slot in uses.inputs if user is not node]

    def _turn(self, name: str, other: str) -> bool:
        """Let all users of a value take its transpose instead, if they can."""
        uses = self.uses[name]
        if uses.elsewhere or not uses.inputs or not all(slot == 1 and _can_turn(user) for user, slot in uses.inputs):
            return False
        for user, slot in uses.inputs:
            user.input[slot] = other
            _set_transposed(user, not _attribute(user, "transB"))
            self.turned.append(user)
        self.uses[other].inputs += uses.inputs
        del self.uses[name]
        return True


def _is_large(tensor: TensorProto) -> bool:
    dtype = DType.from_number(tensor.data_type)
    if dtype is None or tensor.data_type not in TYPES or len(tensor.dims) != 2:
        return False
    return min(tensor.dims) > 1 and dtype.nbytes(tensor.dims[0] * tensor.dims[1]) >= SMALLEST


def _seen_elsewhere(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (v.name for v in graph.output)
    for node in graph.node:
        for sub in subgraphs(node):
            yield from used_names(sub)


def _is_transpose(node: onnx.NodeProto) -> bool:
    """Of a matrix, whichever it is."""
    if node.op_type != "Transpose" or node.domain not in STANDARD:
        return False
    return all(list(a.ints) == [1, 0] for a in node.attribute if a.name == "perm")


def _can_turn(node: onnx.NodeProto) -> bool:
    if (node.op_type, node.domain) == ("FusedMatMul", MICROSOFT):
        return not any(_attribute(node, name) for name in ("transBatchA", "transBatchB"))
    return node.op_type in ("MatMul", "Gemm") and node.domain in STANDARD


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((a.i for a in node.attribute if a.name == name), 0)


def _set_transposed(node: onnx.NodeProto, transposed: bool) -> None:
    for i in reversed(range(len(node.attribute))):
        if node.attribute[i].name == "transB":
            del node.attribute[i]
    if transposed:
        node.attribute.append(helper.make_attribute("transB", 1))


def _spell_products(model: onnx.ModelProto, turned: list[onnx.NodeProto]) -> None:
    """MatMul has no transB: it becomes an operator that does."""
    opsets = {"" if o.domain == "ai.onnx" else o.domain: o.version for o in model.opset_import}
    matrices = _matrices(model) if opsets.get("", 1) >= BARE_GEMM else set()
    for node in turned:
        if node.op_type != "MatMul" or not _attribute(node, "transB"):
            continue
        if node.input[0] in matrices:
            node.op_type = "Gemm"
        else:
            node.op_type, node.domain = "FusedMatMul", MICROSOFT
    if MICROSOFT not in opsets and any(node.domain == MICROSOFT for node in turned):
        model.opset_import.add(domain=MICROSOFT, version=1)


def _matrices(model: onnx.ModelProto) -> set[str]:
    """Values of the main graph that surely have two dims, whatever the model says of its own values."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.graph.value_info[:]
    for value in bare.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(bare).graph
    except Exception:  # noqa: BLE001 - it is a help only; types of its own for each fault of a model
        return set()
    values = [v for v in (*found.input, *found.value_info) if v.type.tensor_type.HasField("shape")]
    return {v.name for v in values if len(v.type.tensor_type.shape.dim) == 2}

"""What is done to a graph after its quantization was undone: what nobody uses any more goes, names fall into place."""

from collections import Counter
from collections.abc import Iterable, Sequence

import onnx
from onnx import numpy_helper

from conx.graph.lift import subgraphs

__all__ = ["drop_unneeded", "fold_bias", "forget_stale", "names_used", "needed", "rename_ends"]


def names_used(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The values that nodes, and graphs within them, take from around them or each other."""
    used: set[str] = set()
    for node in nodes:
        used.update(node.input)
        for graph in subgraphs(node):
            used.update(v.name for v in graph.output)
            used |= names_used(graph.node)
    used.discard("")
    return used


def needed(nodes: Sequence[onnx.NodeProto], results: set[str]) -> list[int]:
    """Positions of the nodes, which are sorted, that something needs; `results` are needed."""
    names = set(results)
    kept = []
    for i in reversed(range(len(nodes))):
        if names.intersection(nodes[i].output) or not nodes[i].output:
            kept.append(i)
            names |= names_used([nodes[i]])
    return kept[::-1]


def drop_unneeded(graph: onnx.GraphProto) -> None:
    """Drop the nodes of a graph, which are sorted, that nothing needs."""
    kept = set(needed(graph.node, {v.name for v in graph.output}))
    for i in reversed(range(len(graph.node))):
        if i not in kept:
            del graph.node[i]


def rename_ends(graph: onnx.GraphProto, made: set[str]) -> None:
    """Where a node of the pass only gives a value the name of an output, let its maker give it that name.

    Args:
        graph: its nodes are sorted.
        made: names of outputs that such Identity nodes have.
    """
    fixed = {v.name for v in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    maker = {name: (node, slot) for node in graph.node for slot, name in enumerate(node.output) if name}
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type != "Identity" or node.output[0] not in made or node.input[0] not in maker:
            continue
        old, new = node.input[0], node.output[0]
        if old in fixed or _is_result(graph.node, old):
            continue
        source, slot = maker[old]
        del graph.node[i]
        source.output[slot] = new
        rename_inputs(graph.node, old, new)
        for info in graph.value_info:
            if info.name == old:
                info.name = new


def _is_result(nodes: Iterable[onnx.NodeProto], name: str) -> bool:
    """Whether a graph within returns it."""
    graphs = [graph for node in nodes for graph in subgraphs(node)]
    return any(v.name == name for g in graphs for v in g.output) or any(_is_result(g.node, name) for g in graphs)


def rename_inputs(nodes: Iterable[onnx.NodeProto], old: str, new: str) -> None:
    """Let nodes, and those within them, take a value under another name."""
    for node in nodes:
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new
        for graph in subgraphs(node):
            rename_inputs(graph.node, old, new)


def fold_bias(graph: onnx.GraphProto, made: set[str]) -> None:
    """Give convolutions and Gemms that the pass made the bias that the quantizer split off them.

    Args:
        graph: its nodes are sorted.
        made: outputs of the operators that the pass made.
    """
    uses = Counter(name for node in graph.node for name in node.input)
    inner = {
        n for node in graph.node for g in subgraphs(node) for n in (*names_used(g.node), *(v.name for v in g.output))
    }
    results = {v.name for v in graph.output}
    maker = {node.output[0]: node for node in graph.node if node.output}
    constants = {t.name: tuple(t.dims) for t in graph.initializer}
    shapes = {t.name: t for t in graph.initializer if t.data_type == onnx.TensorProto.INT64 and len(t.dims) == 1}
    gone: list[int] = []
    for i, node in enumerate(graph.node):
        if node.op_type != "Add" or len(node.input) != 2:
            continue
        for product, bias in (tuple(node.input), tuple(node.input)[::-1]):
            source = maker.get(product)
            if source is None or product not in made or product in results or product in inner or uses[product] != 1:
                continue
            name = _bias(source, bias, maker, constants, shapes)
            if name is None:
                continue
            source.input.append(name)
            source.output[0] = node.output[0]
            gone.append(i)
            break
    for i in reversed(gone):
        del graph.node[i]


def _bias(
    source: onnx.NodeProto,
    bias: str,
    maker: dict[str, onnx.NodeProto],
    constants: dict[str, tuple[int, ...]],
    shapes: dict[str, onnx.TensorProto],
) -> str | None:
    """The one-dimensional constant that an Add after a Conv or Gemm adds to its channels."""
    if source.op_type == "Gemm" and len(source.input) == 2:
        weight = constants.get(source.input[1])
        width = None if weight is None else weight[0]
        return bias if constants.get(bias) == (width,) else None
    if source.op_type != "Conv" or len(source.input) != 2:
        return None
    weight = constants.get(source.input[1])
    reshape = maker.get(bias)
    if weight is None or reshape is None or reshape.op_type != "Reshape" or reshape.domain:
        return None
    shape = shapes.get(reshape.input[1])
    if constants.get(reshape.input[0]) != (weight[0],) or shape is None or len(weight) != shape.dims[0]:
        return None
    numbers = numpy_helper.to_array(shape).tolist()
    along = len(numbers) > 1 and numbers[0] == 1 and all(v == 1 for v in numbers[2:])
    return reshape.input[0] if along else None


def forget_stale(graph: onnx.GraphProto) -> None:
    """Drop descriptions of values that are gone."""
    there = {n for node in graph.node for n in node.output} | {t.name for t in graph.initializer}
    for i in reversed(range(len(graph.value_info))):
        if graph.value_info[i].name not in there:
            del graph.value_info[i]
    there |= {v.name for v in graph.input}
    for i in reversed(range(len(graph.quantization_annotation))):
        if graph.quantization_annotation[i].tensor_name not in there:
            del graph.quantization_annotation[i]

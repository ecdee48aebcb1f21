"""The graph that a session opens: weights where a runtime lets them be handed over.

Only initializers of the main graph can be given to onnxruntime from outside. So Constant nodes of the main graph become
initializers. What cannot be given stays where it is, as a hole that the loader fills: weights in local functions, in
sparse tensors and in attributes of other operators, and Constants that the graph itself returns.

Weights of subgraphs (If, Loop, Scan bodies) stay too, although they could move to the main graph, from where outer
scope reaches them: onnxruntime fuses operators only with weights of their own graph and repacks only those, so the
outputs would differ in their last bits. They move only where one message cannot hold them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from conx.dtypes import DType
from conx.graph.derived import Derived
from conx.graph.read import Weight, weight_number

__all__ = ["External", "RunGraph", "nested_graphs", "repacked_beside_rows", "run_graph", "subgraphs"]

# Operators whose constant weight onnxruntime on a CPU always copies into a layout of its own: its input slot, type
# and rank. Others (Conv, recurrent operators) do so only for some shapes, and use the buffer itself for the rest.
REPACKING = {
    ("", "MatMul"): (1, onnx.TensorProto.FLOAT, 2),
    ("", "Gemm"): (1, onnx.TensorProto.FLOAT, 2),
    ("com.microsoft", "FusedMatMul"): (1, onnx.TensorProto.FLOAT, 2),
    ("com.microsoft", "MatMulNBits"): (1, onnx.TensorProto.UINT8, 3),
}
LIFT_ABOVE = 1 << 30  # bytes of weights in subgraphs, from which they move to the main graph


@dataclass(frozen=True)
class External:
    """An initializer of the main graph whose bytes the loader hands over, as `dtype`."""

    location: str
    name: str
    weight: int
    repacked: bool
    dtype: DType


@dataclass(frozen=True)
class RunGraph:
    """`proto` has external stubs for `externals`; every other weight is still a stub as `read` makes them."""

    proto: onnx.ModelProto
    externals: list[External]


def run_graph(proto: onnx.ModelProto, weights: Sequence[Weight | Derived]) -> RunGraph:
    """Make the run graph of a model with stubs, which is not changed."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    model.ClearField("training_info")
    main = model.graph
    graphs = list(nested_graphs(main))
    if sum(weights[number].nbytes for graph in graphs for number in _own_weights(graph)) > LIFT_ABOVE:
        taken = set(_all_names(main))
        for graph in graphs:
            _lift(graph, main, taken)
    _constants_to_initializers(main)
    if model.ir_version < 4:  # there, every initializer is an input too
        known = {v.name for v in main.input}
        new = [t for t in main.initializer if t.name not in known]
        main.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in new)
    return RunGraph(model, _externalize(model))


def repacked_beside_rows(model: onnx.ModelProto) -> set[int]:
    """Numbers of weights that Gather takes rows of and that else only nodes use which repack them.

    They must be initializers of the main graph, each once.
    """
    main = model.graph
    repacked = _only_repacked(main, rows=True)
    times = Counter(weight_number(t) for t in main.initializer)
    fits = (weight_number(t) for t in main.initializer if (t.name, t.data_type, len(t.dims)) in repacked)
    found = {number for number in fits if number is not None and times[number] == 1}
    return found.difference(*(_own_weights(graph) for graph in nested_graphs(main)))


def nested_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graphs within `graph`'s nodes, at any depth, outer before inner."""
    for node in graph.node:
        for sub in subgraphs(node):
            yield sub
            yield from nested_graphs(sub)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _all_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from _defined(graph)
    for node in graph.node:
        yield from node.input
        for sub in subgraphs(node):
            yield from _all_names(sub)


def _defined(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (v.name for v in graph.input)
    yield from (t.name for t in graph.initializer)
    yield from (t.values.name for t in graph.sparse_initializer)
    for node in graph.node:
        yield from node.output


def _own_weights(graph: onnx.GraphProto) -> Iterator[int]:
    """Numbers of the weights that could be lifted from a subgraph."""
    for tensor in (*graph.initializer, *map(_constant_weight, graph.node)):
        number = None if tensor is None else weight_number(tensor)
        if number is not None:
            yield number


def _constant_weight(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The large tensor of a Constant node, if it is one."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    tensors: list[onnx.TensorProto] = [a.t for a in node.attribute if a.name == "value"]
    return next((t for t in tensors if weight_number(t) is not None), None)


def _lift(graph: onnx.GraphProto, main: onnx.GraphProto, taken: set[str]) -> None:
    """Move the weights of a subgraph to the main graph, under names that nothing else has."""
    fixed = {v.name for v in graph.output} | {v.name for v in graph.input}
    for tensor in _taken_initializers(graph, fixed):
        _move(graph, tensor, tensor.name, main, taken)
    for name, tensor in _taken_constants(graph, fixed):
        _move(graph, tensor, name, main, taken)


def _taken_initializers(graph: onnx.GraphProto, fixed: set[str]) -> list[onnx.TensorProto]:
    """Take the weights out of the graph's initializers, but those named in `fixed`."""
    places = [i for i, t in enumerate(graph.initializer) if weight_number(t) is not None and t.name not in fixed]
    found = [_copy(graph.initializer[i]) for i in places]
    for i in reversed(places):
        del graph.initializer[i]
    return found


def _taken_constants(graph: onnx.GraphProto, fixed: set[str]) -> list[tuple[str, onnx.TensorProto]]:
    """Take the graph's large Constant nodes out, but those whose output is named in `fixed`."""
    found = []
    places = []
    for i, node in enumerate(graph.node):
        constant = _constant_weight(node)
        if constant is not None and node.output[0] not in fixed:
            found.append((node.output[0], _copy(constant)))
            places.append(i)
    for i in reversed(places):
        del graph.node[i]
    return found


def _copy(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copied = onnx.TensorProto()
    copied.CopyFrom(tensor)
    return copied


def _move(graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str, main: onnx.GraphProto, taken: set[str]) -> None:
    new = name
    number = 0
    while not new or (new in taken and (new != name or _is_elsewhere(graph, main, name))):
        number += 1
        new = f"{name}/{number}"
    taken.add(new)
    moved = main.initializer.add()
    moved.CopyFrom(tensor)
    moved.name = new
    if new != name:
        _rename(graph, name, new)
    for info in [v for v in graph.value_info if v.name == name]:
        graph.value_info.remove(info)


def _is_elsewhere(graph: onnx.GraphProto, main: onnx.GraphProto, name: str) -> bool:
    """Whether a graph other than `graph` defines `name`, so that it must not be lifted under it."""
    return any(name in _defined(g) for g in [main, *nested_graphs(main)] if g is not graph)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new
        for sub in subgraphs(node):
            if old not in _defined(sub):
                _rename(sub, old, new)


def _constants_to_initializers(main: onnx.GraphProto) -> None:
    for name, tensor in _taken_constants(main, {v.name for v in main.output}):
        tensor.name = name
        main.initializer.append(tensor)


def _externalize(model: onnx.ModelProto) -> list[External]:
    main = model.graph
    repacked = _only_repacked(main)
    found: list[External] = []
    for tensor in main.initializer:
        number = weight_number(tensor)
        if number is None:
            continue
        location = f"conx-{len(found)}"
        fits = (tensor.name, tensor.data_type, len(tensor.dims)) in repacked
        dtype = DType.from_number(tensor.data_type)
        assert dtype is not None  # a weight has a known type
        found.append(External(location, tensor.name, number, fits, dtype))
        del tensor.external_data[:]
        tensor.external_data.add(key="location", value=location)
        tensor.data_location = onnx.TensorProto.EXTERNAL
    return found


def _only_repacked(main: onnx.GraphProto, *, rows: bool = False) -> set[tuple[str, int, int]]:
    """(name, type, rank) of what only nodes of the main graph use, and only as a weight that is repacked.

    With `rows`, also what Gather takes rows of beside that.
    """
    yes: set[tuple[str, int, int]] = set()
    no = {v.name for v in (*main.input, *main.output)}
    for graph in nested_graphs(main):
        no.update(name for node in graph.node for name in node.input)
    for node in main.node:
        slot, kind, rank = REPACKING.get((node.domain.replace("ai.onnx", ""), node.op_type), (None, 0, 0))
        if node.op_type == "MatMulNBits" and not _is_plain_nbits(node):
            slot = None
        if node.op_type == "FusedMatMul" and any(a.i for a in node.attribute if a.name.startswith("transBatch")):
            slot = None
        for i, name in enumerate(node.input):
            if i == slot:
                yes.add((name, kind, rank))
            elif not (rows and i == 0 and _takes_rows(node)):
                no.add(name)
    return {(name, kind, rank) for name, kind, rank in yes if name not in no}


def _takes_rows(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gather" and node.domain in ("", "ai.onnx") and not any(a.i for a in node.attribute)


def _is_plain_nbits(node: onnx.NodeProto) -> bool:
    """Whether it is a MatMulNBits of those that the loader tries: 8 bits, integer activations, nothing but scales."""
    given = {a.name: a.i for a in node.attribute}
    return (given.get("bits", 4), given.get("accuracy_level", 0)) == (8, 4) and not any(node.input[3:])

"""What is done to a graph before and after its conversion to float16.

Functions are inlined, constants of nodes made initializers, and those that are no longer used dropped.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from conx.graph.lift import subgraphs

__all__ = [
    "all_names",
    "constants_to_initializers",
    "drop_unused",
    "forget_defaults",
    "inlined",
    "narrow_edges",
    "prepared",
]

FLOAT = onnx.TensorProto.FLOAT


def all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of all values of a graph and of those within it."""
    yield from (v.name for v in (*graph.input, *graph.initializer, *(t.values for t in graph.sparse_initializer)))
    for node in graph.node:
        yield from node.output
        for sub in subgraphs(node):
            yield from all_names(sub)


def used_names(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph returns, or that nodes use in it or within."""
    used = {v.name for v in graph.output}
    for node in graph.node:
        used.update(node.input)
        for sub in subgraphs(node):
            used |= used_names(sub)
    return used


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without its local functions, unless one is of other opsets: its operators mean something else here."""
    opsets = {o.domain: o.version for o in model.opset_import}
    if any(opsets.get(o.domain) != o.version for f in model.functions for o in f.opset_import):
        return model
    _give_defaults(model)
    return inliner.inline_local_functions(model)


def _give_defaults(model: onnx.ModelProto) -> None:
    """Give calls of local functions the attributes that they leave out: inlining knows of no defaults."""
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        for node in _all_nodes(nodes):
            function = functions.get((node.domain, node.op_type, node.overload))
            if function is not None:
                given = {a.name for a in node.attribute}
                node.attribute.extend(a for a in function.attribute_proto if a.name not in given)


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for sub in subgraphs(node):
            yield from _all_nodes(sub.node)


def prepared(source: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model, in the form that passes over values want.

    Local functions are inlined, nodes sorted, and below IR version 4, where every initializer is an input too and as
    constant as any, these inputs are gone.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source)
    model.ClearField("training_info")
    if model.functions:
        model = inlined(model)
    _sort_nodes(model.graph)
    if model.ir_version < 4:
        forget_defaults(model.graph)
    return model


def _sort_nodes(graph: onnx.GraphProto) -> None:
    """Put nodes after those whose outputs they or their subgraphs use, else in the order that they had.

    onnxruntime takes models in any order. What is in a circle is left at the end.
    """
    for node in graph.node:
        for sub in subgraphs(node):
            _sort_nodes(sub)
    nodes = list(graph.node)
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{maker[n] for n in _used_by(node) if n in maker} - {i} for i, node in enumerate(nodes)]
    if all(max(of, default=-1) < i for i, of in enumerate(needs)):
        return
    followers: list[list[int]] = [[] for _ in nodes]
    for i, of in enumerate(needs):
        for j in of:
            followers[j].append(i)
    ready = [i for i, of in enumerate(needs) if not of]  # a list in order is a heap
    order = []
    while ready:
        first = heapq.heappop(ready)
        order.append(first)
        for i in followers[first]:
            needs[i].discard(first)
            if not needs[i]:
                heapq.heappush(ready, i)
    order += sorted(set(range(len(nodes))).difference(order))
    copies = [onnx.NodeProto.FromString(nodes[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(copies)


def _used_by(node: onnx.NodeProto) -> set[str]:
    used = set(node.input)
    for sub in subgraphs(node):
        used |= used_names(sub)
    return used


def forget_defaults(graph: onnx.GraphProto) -> None:
    """Leave only those inputs that are not initializers."""
    constant = {t.name for t in graph.initializer}
    kept = [v for v in graph.input if v.name not in constant]
    del graph.input[:]
    graph.input.extend(kept)


def narrow_edges(graph: onnx.GraphProto) -> set[str]:
    """Make a graph's float32 inputs and outputs float16; gives their names."""
    edges = [v for v in (*graph.input, *graph.output) if v.type.tensor_type.elem_type == FLOAT]
    for value in edges:
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return {v.name for v in edges}


def drop_unused(graph: onnx.GraphProto, copies: dict[str, str]) -> None:
    """Drop float32 constants that are only used as float16 now; those take their names."""
    used = used_names(graph) | {v.name for v in graph.input}
    gone = {t.name for t in graph.initializer if t.name not in used}
    inner = {name for node in graph.node for sub in subgraphs(node) for name in all_names(sub)}
    renamed = {t.name: copies[t.name] for t in graph.initializer if copies.get(t.name, "") in gone - inner}
    for i in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[i]
        if tensor.name in gone:
            del graph.initializer[i]
        else:
            tensor.name = renamed.get(tensor.name, tensor.name)
    _rename_uses(graph, renamed.get)
    for node in graph.node:
        for sub in subgraphs(node):
            drop_unused(sub, copies)


def _rename_uses(graph: onnx.GraphProto, new: Callable[[str, str], str]) -> None:
    for node in graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = new(name, name)
        for sub in subgraphs(node):
            _rename_uses(sub, new)


def constants_to_initializers(graph: onnx.GraphProto, fixed: set[str]) -> None:
    """Float constants of nodes become initializers, which have another type more cheaply than by a cast."""
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.output[0] not in fixed:
            attribute = node.attribute[0]
            if attribute.name in ("value_float", "value_floats"):
                values = np.asarray(helper.get_attribute_value(attribute), np.float32)
                graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
            elif attribute.name == "value" and attribute.t.data_type == FLOAT:
                graph.initializer.append(attribute.t)
                graph.initializer[-1].name = node.output[0]
            else:
                continue
            del graph.node[i]

"""What is done to a graph before and after its conversion to float16.

Functions are inlined, constants of nodes made initializers, and those that are no longer used dropped.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper

from conx.graph.lift import subgraphs

__all__ = ["all_names", "constants_to_initializers", "drop_unused", "forget_defaults", "inlined"]

FLOAT = onnx.TensorProto.FLOAT


def all_names(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of all values of a graph and of those within it."""
    yield from (v.name for v in (*graph.input, *graph.initializer, *(t.values for t in graph.sparse_initializer)))
    for node in graph.node:
        yield from node.output
        for sub in subgraphs(node):
            yield from all_names(sub)


def _used(graph: onnx.GraphProto) -> set[str]:
    used = {v.name for v in graph.output}
    for node in graph.node:
        used.update(node.input)
        for sub in subgraphs(node):
            used |= _used(sub)
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


def forget_defaults(graph: onnx.GraphProto) -> None:
    """Leave only those inputs that are not initializers."""
    constant = {t.name for t in graph.initializer}
    kept = [v for v in graph.input if v.name not in constant]
    del graph.input[:]
    graph.input.extend(kept)


def drop_unused(graph: onnx.GraphProto, copies: dict[str, str]) -> None:
    """Drop float32 constants that are only used as float16 now; those take their names."""
    used = _used(graph) | {v.name for v in graph.input}
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

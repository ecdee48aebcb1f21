"""A model made ready to be walked through: functions inlined that have to do with quantization, names unique."""

from collections.abc import Iterable, Iterator

import onnx
from onnx import inliner

from conx.graph.dequantize.operators import is_quantized_type
from conx.graph.fp16_graph import all_names, prepared
from conx.graph.lift import nested_graphs, subgraphs
from conx.graph.read import weight_number

__all__ = ["is_quantized", "ready", "taken_names"]

INTEGERS = {
    onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT16, onnx.TensorProto.UINT16,
    onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.INT2, onnx.TensorProto.UINT2,
}  # fmt: skip


STANDARD = ("", "ai.onnx")
OPSETS = {3: 8, 4: 9, 5: 10, 6: 11, 7: 14}  # newest of an IR version, for models of onnxruntime's operators alone


def ready(source: onnx.ModelProto) -> onnx.ModelProto:
    """A copy: nodes sorted, no name hides one of an outer graph, and functions inlined that deal with quantization.

    Functions of other opsets than the model's are not inlined.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source)
    model.ClearField("training_info")
    concerned = _concerned(model)
    if concerned:
        opsets = {o.domain: o.version for o in model.opset_import}
        functions = {(f.domain, f.name): f for f in model.functions}
        names = [
            name
            for name in concerned
            if all(opsets.get(o.domain, o.version) == o.version for o in functions[name].opset_import)
        ]
        if names:
            model = _inlined(model, names)
    bodies = [onnx.FunctionProto.FromString(f.SerializeToString()) for f in model.functions]
    inputs = list(model.graph.input)
    del model.functions[:]
    model = prepared(model)
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.functions.extend(bodies)
    _uncover(model.graph, set())
    version = next((o.version for o in model.opset_import if o.domain in STANDARD), 0)
    if not version:  # the float operators need one
        version = OPSETS.get(model.ir_version, 17)
        model.opset_import.add(domain="", version=version)
    for function in model.functions:
        if all(o.domain not in STANDARD for o in function.opset_import):
            function.opset_import.add(domain="", version=version)
    return model


def _concerned(model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Functions with quantized operators or codes in them, or fed integers of few bits, and those that call them."""
    functions = {(f.domain, f.name): f for f in model.functions}
    codes = {t.name for g in (model.graph, *nested_graphs(model.graph)) for t in g.initializer if _is_code(t)}
    found = {key for key, f in functions.items() if any(_is_quantized(node) for node in _all_nodes(f.node))}
    for node in _all_nodes(model.graph.node):
        if (node.domain, node.op_type) in functions and codes.intersection(node.input):
            found.add((node.domain, node.op_type))
    while True:
        calling = {
            key
            for key, f in functions.items()
            if any((node.domain, node.op_type) in found for node in _all_nodes(f.node))
        }
        if calling <= found:
            return sorted(found)
        found |= calling


def is_quantized(model: onnx.ModelProto) -> bool:
    """Whether there is anything to undo: quantized operators, or codes that a graph may dequantize by plain ones."""
    graphs = [model.graph, *nested_graphs(model.graph)]
    if any(_is_code(t) for g in graphs for t in g.initializer):
        return True
    nodes = (*model.graph.node, *(node for f in model.functions for node in f.node))
    return any(_is_quantized(node) for node in _all_nodes(nodes))


def _is_quantized(node: onnx.NodeProto) -> bool:
    return is_quantized_type(node.op_type) or any(a.name == "value" and _is_code(a.t) for a in node.attribute)


def _is_code(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in INTEGERS and (weight_number(tensor) is not None or bool(tensor.dims))


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def _inlined(model: onnx.ModelProto, names: list[tuple[str, str]]) -> onnx.ModelProto:
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        for node in _all_nodes(nodes):  # inlining knows of no defaults
            function = functions.get((node.domain, node.op_type, node.overload))
            if function is not None:
                given = {a.name for a in node.attribute}
                node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
    return inliner.inline_selected_functions(model, names)


def _uncover(graph: onnx.GraphProto, outer: set[str]) -> None:
    """Rename what hides a value of an outer graph: afterwards any value can be named from within."""
    own = set(all_names(graph)) - {n for node in graph.node for sub in subgraphs(node) for n in all_names(sub)}
    own |= (
        {v.name for v in graph.input} | {t.name for t in graph.initializer} | {n for x in graph.node for n in x.output}
    )
    for name in sorted(own & outer - {""}):
        number, new = 0, f"{name}/inner"
        while new in outer or new in own:
            number += 1
            new = f"{name}/inner_{number}"
        own.add(new)
        _rename(graph, name, new)
    for node in graph.node:
        for sub in subgraphs(node):
            _uncover(sub, outer | own)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Rename a value that `graph` itself defines."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        if value.name == old:
            value.name = new
    for sparse in graph.sparse_initializer:
        if sparse.values.name == old:
            sparse.values.name = new
    for node in graph.node:
        for slot, name in enumerate(node.output):
            if name == old:
                node.output[slot] = new
    _rename_uses(graph, old, new)


def _rename_uses(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for slot, name in enumerate(node.input):
            if name == old:
                node.input[slot] = new
        for sub in subgraphs(node):
            if not _defines(sub, old):
                for value in sub.output:
                    if value.name == old:
                        value.name = new
                _rename_uses(sub, old, new)


def _defines(graph: onnx.GraphProto, name: str) -> bool:
    tensors = (*graph.input, *graph.initializer, *(s.values for s in graph.sparse_initializer))
    return any(v.name == name for v in tensors) or any(name in node.output for node in graph.node)


def taken_names(model: onnx.ModelProto) -> set[str]:
    """All names of values."""
    names = set(all_names(model.graph)) | {v.name for g in _graphs(model) for v in (*g.input, *g.output)}
    for function in model.functions:
        names.update(function.input, function.output)
        for node in _all_nodes(function.node):
            names.update(node.output, node.input)
    return names


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield model.graph
    yield from nested_graphs(model.graph)

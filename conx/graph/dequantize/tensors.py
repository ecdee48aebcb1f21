"""All tensors of a model, wherever they are."""

from collections.abc import Iterable, Iterator

import onnx

__all__ = ["all_tensors"]


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """The tensors of graphs, subgraphs and functions: initializers, sparse ones' parts, and those in attributes."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            own = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for sparse in (*own, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _of_graph(graph)

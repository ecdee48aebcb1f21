"""Complete models on disk, to be run while packing: small messages beside files of weights, each written once."""

from pathlib import Path

import numpy as np
import onnx

from conx.codecs.convert import convert
from conx.dtypes import DType
from conx.graph.lift import nested_graphs, run_graph, subgraphs
from conx.graph.read import Weight, weight_number

__all__ = ["Trial"]

BLOCK = 1 << 22  # bytes of a weight in memory at once


class Trial:
    """Writes models with stubs as ones that a runtime opens.

    Args:
        weights: what the stubs stand for.
        folder: takes the files. Of each weight and type there is one, however many models use it.
    """

    def __init__(self, weights: list[Weight], folder: Path) -> None:
        self.weights, self.folder = weights, folder
        self.count = 0

    def write(self, model: onnx.ModelProto) -> Path:
        """Write a model; gives its path."""
        run = run_graph(model, self.weights)
        places = {e.location: self._file(e.weight, e.dtype) for e in run.externals}
        for tensor in run.proto.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = places[entry.value]
        for tensor in _tensors(run.proto):
            number = weight_number(tensor)
            if number is not None:
                dtype = DType.from_number(tensor.data_type)
                assert dtype is not None  # a weight has a known type
                content = (self.folder / self._file(number, dtype)).read_bytes()
                del tensor.external_data[:]
                tensor.raw_data = content
        path = self.folder / f"{self.count}.onnx"
        self.count += 1
        path.write_bytes(run.proto.SerializeToString())
        return path

    def _file(self, number: int, dtype: DType) -> str:
        """The name of a file with the values of a weight as a type, written when it is first asked for."""
        path = self.folder / f"{number}-{dtype.label}"
        if not path.exists():
            weight = self.weights[number]
            with open(path, "wb") as file:
                for block in weight.blocks(BLOCK):
                    values = block if dtype is weight.dtype else np.empty(block.size, dtype.storage)
                    if dtype is not weight.dtype:
                        convert(block, weight.dtype, dtype, values)
                    file.write(values.tobytes())
        return path.name


def _tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """All tensors, wherever they are."""
    graphs = [model.graph, *nested_graphs(model.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    for function in model.functions:
        nodes += function.node
        inner = [sub for node in function.node for sub in subgraphs(node)]
        graphs += inner
        nodes += [node for graph in inner for node in graph.node]
    found = [t for graph in graphs for t in graph.initializer]
    found += [t for graph in graphs for s in graph.sparse_initializer for t in (s.values, s.indices)]
    for attribute in (a for node in nodes for a in node.attribute):
        found += [attribute.t, *attribute.tensors]
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            found += [sparse.values, sparse.indices]
    return found

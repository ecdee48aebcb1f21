"""Packing of small models, and a look at what came of each weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

import conx
from conx.container.reader import Reader
from conx.container.records import Tensor
from conx.packing.report import PackReport
from tests.builders import as_tensor, model, save, tensors

__all__ = ["Packed", "matmul", "pack", "pack_weights", "raw_tensors"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A model, the .conx made of it, what `conx.pack` said, and the stored tensors by name."""

    model: Path
    path: Path
    report: PackReport
    stored: dict[str, Tensor]

    def unpack(self, **settings: Any) -> onnx.ModelProto:
        """The model that comes back, external data loaded."""
        return onnx.load(conx.unpack(self.path, self.path.with_name("back.onnx"), **settings))

    def values(self, name: str) -> Array:
        """An initializer's values as they come back."""
        found = next(t for t in self.unpack().graph.initializer if t.name == name)
        return onnx.numpy_helper.to_array(found)

    def error(self, name: str) -> float:
        """The error that the report tells of a tensor."""
        return next(t.error for t in self.report.tensors if t.name == name)


def pack(made: onnx.ModelProto, folder: Path, name: str = "m", **settings: Any) -> Packed:
    """Save a model and pack it."""
    return pack_file(save(made, folder / f"{name}.onnx"), **settings)


def pack_file(path: Path, **settings: Any) -> Packed:
    """Pack a model that is there."""
    target = path.with_suffix(".conx")
    report = conx.pack(path, target, **{"verify": False, **settings})
    with Reader(target) as reader:
        stored = {tensor.name: tensor for tensor in reader.index.tensors}
    return Packed(path, target, report, stored)


def pack_weights(weights: Mapping[str, Array | TensorProto], folder: Path, **settings: Any) -> Packed:
    """Pack a model that does nothing with its weights."""
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights)
    return pack(made, folder, **settings)


def matmul(weight: Array, **others: Array) -> onnx.ModelProto:
    """A model of one MatMul with the weight `w`; nothing uses the others."""
    kind = "float16" if weight.dtype == np.float16 else "float"
    text = f"g ({kind}[n, {weight.shape[0]}] x) => ({kind}[n, {weight.shape[1]}] y) {{ y = MatMul(x, w) }}"
    return model(text, {"w": weight, **others})


def raw_tensors(made: onnx.ModelProto) -> list[tuple[str, int, tuple[int, ...], bytes]]:
    """All dense tensors of a model, bit for bit: name, type, dims, bytes."""
    found = [*tensors(made.graph)]
    for function in made.functions:
        for node in function.node:
            found += [a.t for a in node.attribute if a.type == onnx.AttributeProto.TENSOR]
    return [(t.name, t.data_type, tuple(t.dims), _content(t)) for t in found]


def _content(tensor: TensorProto) -> bytes:
    if tensor.data_type == TensorProto.STRING:
        return b"\0".join(tensor.string_data)
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(as_tensor("", onnx.numpy_helper.to_array(tensor)).raw_data)

"""Dequantized models with their data: in memory, or as files."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError

from conx.container.target import Target
from conx.errors import ModelError, UnsupportedError
from conx.graph.dequantize.result import Dequantized
from conx.graph.dequantize.tensors import all_tensors
from conx.graph.read import MARKER, SourceModel, read_model, weight_number
from conx.graph.skeleton import MESSAGE_MAX
from conx.graph.tensor_fields import RAW
from conx.graph.validate import check_inline_tensors
from conx.graph.wire import Hole, Piece, field_head, punch

__all__ = ["complete", "opened", "write"]

ALIGNMENT = 4096  # of tensors in a data file, so that they can be mapped


@contextmanager
def opened(model: onnx.ModelProto | str | os.PathLike[str]) -> Iterator[SourceModel]:
    """A model as it is read from a file, also if it is in memory.

    Raises:
        ModelError: it cannot be read, or its external data is not loaded.
    """
    if not isinstance(model, onnx.ModelProto):
        with read_model(model) as source:
            check_inline_tensors(source)
            yield source
        return
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelError(f"tensor {tensor.name!r}: its external data is not loaded; give the path of the model")
    with tempfile.TemporaryDirectory(prefix="conx-") as folder:
        path = Path(folder, "model.onnx")
        try:
            path.write_bytes(model.SerializeToString())
        except (EncodeError, ValueError):
            raise ModelError("the model has more than 2 GB; give its path") from None
        with opened(path) as source:
            yield source


def complete(made: Dequantized) -> onnx.ModelProto:
    """The model with the data of its weights.

    Raises:
        UnsupportedError: it has more than protobuf's 2 GB.
    """
    size = sum(made.weights[number].nbytes for number in _numbers(made.model)) + made.model.ByteSize()
    if size > MESSAGE_MAX:
        raise UnsupportedError(
            f"the float model has {size} bytes, a ModelProto holds {MESSAGE_MAX}:"
            " conx dequantize IN.onnx -o OUT.onnx writes it with external data"
        )
    model = onnx.ModelProto()
    model.CopyFrom(made.model)
    for tensor in all_tensors(model):
        number = weight_number(tensor)
        if number is not None:
            del tensor.external_data[:]
            tensor.raw_data = made.weights[number].read().tobytes()
    return model


def write(made: Dequantized, path: str | os.PathLike[str], external_above: int = MESSAGE_MAX) -> None:
    """Write the model, and above so many bytes its weights into a file of the same name with `.data` appended.

    The files appear under their names when they are whole.
    """
    targets = [Target(path)]
    places: dict[int, int] = {}
    numbers = _numbers(made.model)
    total = sum(made.weights[number].nbytes for number in numbers) + made.model.ByteSize()
    data_name = targets[0].path.name + ".data"
    if total > external_above:
        at = 0
        for number in numbers:
            places[number] = at
            at += -(-made.weights[number].nbytes // ALIGNMENT) * ALIGNMENT

    def leaf(content: bytes) -> list[Piece] | None:
        tensor = onnx.TensorProto.FromString(content)
        number = weight_number(tensor)
        if number is None:
            return None
        size = made.weights[number].nbytes
        del tensor.external_data[:]
        if number not in places:
            return [tensor.SerializeToString(deterministic=True), field_head(RAW, size), Hole(number, size)]
        for key, value in (("location", data_name), ("offset", places[number]), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        tensor.data_location = onnx.TensorProto.EXTERNAL
        return [tensor.SerializeToString(deterministic=True)]

    message, holes = punch(made.model.SerializeToString(deterministic=True), MARKER.encode(), leaf)
    try:
        with targets[0].create() as file:
            at = 0
            for position, hole in holes:
                file.write(memoryview(message)[at:position])
                file.write(made.weights[hole.weight].read().data.cast("B"))
                at = position
            file.write(memoryview(message)[at:])
            file.flush()
            os.fsync(file.fileno())
        if places:
            targets.insert(0, Target(targets[0].path.with_name(data_name)))
            with targets[0].create() as data:
                for number, offset in places.items():
                    data.write(bytes(offset - data.tell()))
                    data.write(made.weights[number].read().data.cast("B"))
                data.flush()
                os.fsync(data.fileno())
        for target in targets:
            target.commit()
    finally:
        for target in targets:
            target.discard()


def _numbers(model: onnx.ModelProto) -> list[int]:
    """The weights that the model's stubs name, each once."""
    found = (weight_number(tensor) for tensor in all_tensors(model))
    return list(dict.fromkeys(number for number in found if number is not None))

"""Read a .onnx file without its weights: a skeleton in which every large tensor is a numbered stub.

The stub is an entry of `external_data` with the key `MARKER`; it stands where the tensor's data stood, so that
`wire.punch` can put a hole at the very same place. Data in any form (raw_data, typed fields, external files) becomes a
`Weight`, read from disk when it is needed.
"""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from conx.dtypes import DType
from conx.errors import ModelError
from conx.graph.external import DataFile, locate
from conx.graph.tensor_fields import (
    DATA_FIELDS,
    DATA_LOCATION,
    EXTERNAL_DATA,
    IS_EXTERNAL,
    LIKE_RAW,
    MARKER,
    RAW,
    STRING_DATA,
    Head,
    checked_shape,
    entry_number,
    may_hold,
    typed_data,
    without,
)
from conx.graph.wire import Data, Hole, Piece, Window, WireError, field_bytes, rewrite

__all__ = ["INLINE_MAX", "MARKER", "SourceModel", "Weight", "read_model", "weight_number"]

INLINE_MAX = 1024  # bytes; smaller tensors stay in the graph: onnxruntime wants to see shapes and scalars
MAX_SKELETON = 2**31 - 1  # bytes; protobuf parses no larger message


@dataclass(frozen=True)
class Weight:
    """A large tensor of the model.

    Attributes:
        number: its place in `SourceModel.weights`, which its stub names.
        name: the tensor's name, or for one without, as in most Constant nodes, that of the node's output.
        dtype, shape: element type and dims.
        tag: number of the TensorProto field that held the data (raw_data for external ones).
        file, offset: where `nbytes` bytes lie, or
        data: the bytes themselves, where they had to be converted.
    """

    number: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    tag: int
    file: DataFile | None
    offset: int = 0
    data: bytes = field(default=b"", repr=False)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(self.count)

    def read(self) -> npt.NDArray[Any]:
        """The values, flat in row-major order, in the storage type of `dtype`."""
        if self.file is None:
            return self.dtype.view(self.data)
        return self.dtype.view(self.file.read(self.offset, self.nbytes))

    def blocks(self, size: int) -> Iterator[npt.NDArray[Any]]:
        """The values in order, in arrays of about `size` bytes (a multiple of 16)."""
        for start in range(0, self.nbytes, size):
            stop = min(start + size, self.nbytes)
            yield self.dtype.view(
                self.data[start:stop] if self.file is None else self.file.read(self.offset + start, stop - start)
            )


@dataclass
class SourceModel:
    """A .onnx file, opened.

    Attributes:
        path: of the file.
        skeleton: its ModelProto with stubs, serialized.
        proto: the same, parsed.
        weights: what the stubs stand for.
        files: all files that were opened, by their resolved paths.
        locations: those of external data, by their names relative to the model's folder, parts joined by `/`.
    """

    path: Path
    skeleton: bytes
    proto: onnx.ModelProto
    weights: list[Weight]
    files: dict[Path, DataFile]
    locations: dict[str, DataFile] = field(default_factory=dict)

    def named_files(self) -> list[tuple[str, DataFile]]:
        """The model's files by their names relative to its folder, the .onnx first."""
        return [(self.path.name, self.files[self.path.resolve()]), *sorted(self.locations.items())]

    @property
    def size(self) -> int:
        """Bytes of the model's files, each once."""
        return sum(f.size for f in self.files.values())

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_model(path: str | os.PathLike[str]) -> SourceModel:
    """Open a .onnx file and find its weights; their data stays on disk.

    Raises:
        ModelError: not an ONNX model, cut short, or external data that is missing, too short or out of bounds.
        FileNotFoundError, PermissionError: the model itself cannot be opened.
    """
    return _Reading(Path(path)).run()


def weight_number(tensor: onnx.TensorProto) -> int | None:
    """The number of the weight that a tensor of a skeleton stands for, or None if it holds its own data."""
    for entry in tensor.external_data:
        if entry.key == MARKER:
            return int(entry.value)
    return None


class _Reading:
    """One run of `read_model`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: list[Weight] = []
        self.files: dict[Path, DataFile] = {}
        self.locations: dict[str, DataFile] = {}

    def run(self) -> SourceModel:
        try:
            main = self._open(self.path)
            skeleton = self._skeleton(main)
            if len(skeleton) > MAX_SKELETON:
                raise ModelError(
                    f"{self.path}: the graph alone has {len(skeleton)} bytes, protobuf's limit is {MAX_SKELETON}"
                )
            proto = onnx.ModelProto.FromString(skeleton)
            _require_text(proto)
            self._name_constants(proto.graph.node)
            for function in proto.functions:
                self._name_constants(function.node)
        except (WireError, DecodeError, UnicodeDecodeError) as e:
            self._close()
            raise ModelError(f"{self.path}: not an ONNX model, or cut short ({e})") from None
        except BaseException:
            self._close()
            raise
        missing = "graph" if not proto.HasField("graph") else "opset_import" if not proto.opset_import else None
        if missing and (missing == "graph" or proto.ir_version >= 3):
            self._close()
            raise ModelError(f"{self.path}: not an ONNX model, or cut short (it has no {missing})")
        return SourceModel(self.path, skeleton, proto, self.weights, self.files, self.locations)

    def _open(self, path: Path) -> DataFile:
        real = path.resolve()
        if real not in self.files:
            self.files[real] = DataFile(path)
        return self.files[real]

    def _close(self) -> None:
        for file in self.files.values():
            file.close()

    def _skeleton(self, main: DataFile) -> bytes:
        def skip(data: Data, start: int, end: int) -> bool:
            if end - start > INLINE_MAX:
                return False
            if data.find(MARKER.encode(), start, end) >= 0:
                raise ModelError(f"{self.path}: has tensors marked {MARKER!r}, which conx reserves for itself")
            return data.find(b"location", start, end) < 0 and data.find(IS_EXTERNAL, start, end) < 0

        self._main = main
        window = Window(main.read, main.size)
        pieces = rewrite(window, 0, main.size, "model", skip, self._tensor)
        if pieces is None:
            return bytes(main.read(0, main.size))
        return b"".join(p for p in pieces if not isinstance(p, Hole))

    def _tensor(self, data: Data, start: int, end: int) -> list[Piece] | None:
        """Replace a large or external tensor by a stub; make a small external one inline."""
        head = Head.parse(data, start, end)
        if head.external:
            return self._external(data, start, end, head)
        size = sum(end - begin for number, begin, end in head.payloads if number != STRING_DATA)
        dtype = DType.from_number(head.data_type)
        if size <= INLINE_MAX or dtype is None:
            return None
        label = f"{self.path}: tensor {head.name!r}"
        if any(end > begin and not may_hold(number, dtype) for number, begin, end in head.payloads):
            raise ModelError(f"{label}: data of element type {dtype.label} in a field that is not for it")
        shape = checked_shape(head.dims, label)
        nbytes = dtype.nbytes(math.prod(shape))
        if len(head.payloads) == 1 and head.payloads[0][0] in LIKE_RAW:
            tag, begin, stop = head.payloads[0]
            if stop - begin != nbytes:
                raise ModelError(
                    f"{label} has {stop - begin} bytes of data, its shape {list(shape)} of {dtype.label} needs {nbytes}"
                )
            if nbytes <= INLINE_MAX:
                return None
            weight = self._add(head, dtype, shape, tag, self._main, begin)
            return self._stub(data, start, end, weight, drop=(tag,))
        content = typed_data(bytes(data.get(start, end)), dtype)
        if len(content) != nbytes:
            raise ModelError(
                f"{label} has {len(content)} bytes of data, its shape {list(shape)} of {dtype.label} needs {nbytes}"
            )
        if nbytes <= INLINE_MAX:
            return None
        weight = self._add(head, dtype, shape, RAW, None, 0, content)
        return self._stub(data, start, end, weight, drop=DATA_FIELDS)

    def _external(self, data: Data, start: int, end: int, head: "Head") -> list[Piece]:
        label = f"{self.path}: tensor {head.name!r}"
        dtype = DType.from_number(head.data_type)
        if dtype is None:
            raise ModelError(f"{label}: external data of element type {head.data_type}, which conx does not know")
        shape = checked_shape(head.dims, label)
        nbytes = dtype.nbytes(math.prod(shape))
        location = head.entries.get("location", "")
        offset = entry_number(head.entries, "offset", 0, label)
        given = entry_number(head.entries, "length", nbytes, label)
        if given != nbytes:
            raise ModelError(
                f"{label}: external length is {given}, its shape {list(shape)} of {dtype.label} needs {nbytes}"
            )
        file = self._open(locate(self.path, location, label))
        if file is not self._main:
            parts = [part for part in location.replace(os.sep, "/").split("/") if part not in ("", ".")]
            self.locations["/".join(parts)] = file
        if offset + nbytes > file.size:
            raise ModelError(
                f"{label}: bytes {offset} to {offset + nbytes} are outside of {location!r}, which has {file.size};"
                " is the file complete?"
            )
        dropped = (*DATA_FIELDS, EXTERNAL_DATA, DATA_LOCATION)
        if nbytes <= INLINE_MAX:
            content = bytes(file.read(offset, nbytes))
            return [*without(data, start, end, dropped, None), field_bytes(RAW, content)]
        return self._stub(data, start, end, self._add(head, dtype, shape, RAW, file, offset), dropped)

    def _name_constants(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Give the weights of Constant nodes a name that people can use."""
        for node in nodes:
            for attribute in node.attribute:
                number = weight_number(attribute.t) if node.op_type == "Constant" and node.output else None
                if number is not None and not self.weights[number].name:
                    self.weights[number] = replace(self.weights[number], name=node.output[0])
                for graph in (attribute.g, *attribute.graphs):
                    self._name_constants(graph.node)

    def _add(
        self,
        head: "Head",
        dtype: DType,
        shape: tuple[int, ...],
        tag: int,
        file: DataFile | None,
        offset: int,
        data: bytes = b"",
    ) -> Weight:
        weight = Weight(len(self.weights), head.name, dtype, shape, tag, file, offset, data)
        self.weights.append(weight)
        return weight

    def _stub(self, data: Data, start: int, end: int, weight: Weight, drop: tuple[int, ...]) -> list[Piece]:
        entry = field_bytes(1, MARKER.encode()) + field_bytes(2, str(weight.number).encode())
        return list(without(data, start, end, drop, field_bytes(EXTERNAL_DATA, entry)))


def _require_text(message: Message) -> None:
    """Protobuf itself takes any bytes for text. Raises WireError for what is not UTF-8, names above all."""
    for known, value in message.ListFields():
        if known.type == FieldDescriptor.TYPE_STRING:
            if any(isinstance(text, bytes) for text in ([value] if isinstance(value, str | bytes) else value)):
                raise WireError(f"{message.DESCRIPTOR.name}.{known.name} is not UTF-8")
        elif known.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                _require_text(inner)

"""The little that the loader reads in a graph's message and adds to it, without protobuf.

A weight that lies on a device already is handed over as the value of an overridable initializer: one that is also
listed among the graph's inputs. Messages of protobuf are merged when they are concatenated, lists by appending, so a
few bytes after a ModelProto add inputs to its graph.

Wire format: https://protobuf.dev/programming-guides/encoding/ ; field numbers: onnx/onnx.proto.
"""

from collections.abc import Iterable, Iterator, Sequence

from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["PRODUCTS", "as_inputs", "only_read_by"]

# The operator (of another domain than ONNX's with that before it), and its input that may be a matrix of weights.
PRODUCTS = frozenset({("MatMul", 1), ("Gemm", 1), ("com.microsoft.FusedMatMul", 1), ("Gather", 0)})

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SKIPPED = {_FIXED64: 8, _FIXED32: 4}

# Field numbers.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 11, 12
_NODE_INPUT, _NODE_OP_TYPE, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_GRAPHS = (6, 11)
_VALUE_NAME = 1


def only_read_by(model: bytes, uses: frozenset[tuple[str, int]], names: Iterable[str]) -> set[str]:
    """Those names that nodes of the main graph read, all in one of these ways, and nothing else knows.

    A name that subgraphs mention, in whatever meaning, is left out.

    Args:
        model: a ModelProto.
        uses: operators, those of other domains than ONNX's as `domain.operator`, and the number of the input.
        names: names of initializers.

    Raises:
        FormatError: it is no such message.
    """
    wanted = set(names)
    read: set[str] = set()
    for number, graph in _messages(memoryview(model)):
        if number != _MODEL_GRAPH:
            continue
        for kind, content in _messages(graph):
            if kind == _GRAPH_NODE:
                _read_node(content, uses, wanted, read)
            elif kind in (_GRAPH_INPUT, _GRAPH_OUTPUT):
                wanted -= {_text(field) for number, field in _messages(content) if number == _VALUE_NAME}
    return wanted & read


def _read_node(node: memoryview, uses: frozenset[tuple[str, int]], wanted: set[str], read: set[str]) -> None:
    """Take from `wanted` what the node forbids, and note what it reads."""
    inputs: list[str] = []
    op_type = domain = ""
    for number, content in _messages(node):
        if number == _NODE_INPUT:
            inputs.append(_text(content))
        elif number == _NODE_OP_TYPE:
            op_type = _text(content)
        elif number == _NODE_DOMAIN:
            domain = _text(content)
        elif number == _NODE_ATTRIBUTE:
            for kind, graph in _messages(content):
                if kind in _ATTRIBUTE_GRAPHS:
                    inside = bytes(graph)
                    wanted -= {name for name in wanted if name.encode() in inside}
    if domain not in ("", "ai.onnx"):
        op_type = f"{domain}.{op_type}"
    for slot, name in enumerate(inputs):
        if (op_type, slot) in uses:
            read.add(name)
        else:
            wanted.discard(name)


def as_inputs(values: Iterable[tuple[str, DType, Sequence[int]]]) -> bytes:
    """What to append to a ModelProto so that these initializers are among its graph's inputs."""
    inputs = b"".join(
        _field(_GRAPH_INPUT, _field(1, name.encode()) + _field(2, _tensor_type(dtype, shape)))
        for name, dtype, shape in values
    )
    return _field(_MODEL_GRAPH, inputs) if inputs else b""


def _tensor_type(dtype: DType, shape: Sequence[int]) -> bytes:
    dims = b"".join(_field(1, b"\x08" + _varint(dim)) for dim in shape)
    return _field(1, b"\x08" + _varint(dtype.number) + _field(2, dims))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of each length-delimited field."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            _, at = _read_varint(data, at)
            continue
        if wire in _SKIPPED:
            at += _SKIPPED[wire]
            continue
        if wire != _BYTES:
            raise FormatError(f"graph: wire type {wire} at byte {at}")
        size, at = _read_varint(data, at)
        if size > len(data) - at:
            raise FormatError(f"graph: a field at byte {at} has {size} bytes, but {len(data) - at} are there")
        yield tag >> 3, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise FormatError("graph: cut short in the middle of a number")


def _text(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")

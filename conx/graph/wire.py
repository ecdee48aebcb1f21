"""ONNX files as protobuf wire data: take the weights out, or make room for them, without parsing them.

A model of gigabytes is mostly a few fields of TensorProto. The walk below goes through the nested messages that can
hold tensors (the table `CHILDREN`), copies everything else as it is, and hands each TensorProto to a function that
answers with other bytes. So reading a model costs the memory of its graph, not of its weights, and a model from which
nothing was changed comes back byte for byte.

Wire format: https://protobuf.dev/programming-guides/encoding/ ; field numbers: onnx/onnx.proto.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Field", "Hole", "Piece", "Window", "WireError", "field_bytes", "fields", "punch", "rewrite"]

# Message kinds that can hold a tensor somewhere, and the fields through which.
CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node", 11: "attribute"},
}
# An attribute holds one kind of value; after one of these it holds no tensor (trees keep millions of numbers there).
PLAIN_VALUES = {"attribute": (2, 3, 4, 7, 8, 9)}
MAX_DEPTH = 200  # nested messages; protobuf's own parsers stop at 100
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(Exception):
    """The data is not a protobuf message of the expected kind; the text says why."""


class Data(Protocol):
    """Random access to the bytes of a message."""

    def get(self, start: int, end: int) -> bytes | bytearray:
        """The bytes start … end-1."""
        ...

    def find(self, text: bytes, start: int, end: int) -> int:
        """Where `text` first lies within start … end-1, or -1."""
        ...


class Window:
    """A large file seen through a buffer of about a megabyte."""

    def __init__(self, read: Callable[[int, int], bytearray], size: int, width: int = 1 << 20) -> None:
        self._read, self._size, self._width = read, size, width
        self._start, self._buffer = 0, bytearray()

    def get(self, start: int, end: int) -> bytearray:
        if end - start > self._width:
            return self._read(start, end - start)
        if start < self._start or end > self._start + len(self._buffer):
            self._start = start
            self._buffer = self._read(start, min(self._width, self._size - start))
        return self._buffer[start - self._start : end - self._start]

    def find(self, text: bytes, start: int, end: int) -> int:
        at = self.get(start, end).find(text)
        return at if at < 0 else start + at


class Whole:
    """A message that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get(self, start: int, end: int) -> bytes:
        return self._data[start:end]

    def find(self, text: bytes, start: int, end: int) -> int:
        return self._data.find(text, start, end)


@dataclass(frozen=True)
class Field:
    """One field of a message: its tag's place, and the range of its value (of its content for length-delimited)."""

    number: int
    wire: int
    start: int
    value: int
    end: int


@dataclass(frozen=True)
class Hole:
    """`size` bytes of weight `weight` belong here, as element type number `dtype` (0: its own)."""

    weight: int
    size: int
    dtype: int = 0


Piece = bytes | bytearray | Hole
Leaf = Callable[[Data, int, int], list[Piece] | None]


def fields(data: Data, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in start … end-1, in order. Raises WireError where it is not one."""
    at = start
    while at < end:
        head = data.get(at, min(at + 20, end))
        tag, used = _varint(head, 0)
        number, wire = tag >> 3, tag & 7
        value = at + used
        if wire == BYTES:
            size, used = _varint(head, used)
            value, stop = at + used, at + used + size
        elif wire == VARINT:
            _, used = _varint(head, used)
            stop = at + used
        elif wire in (FIXED64, FIXED32):
            stop = value + (8 if wire == FIXED64 else 4)
        else:
            raise WireError(f"wire type {wire} at byte {at}")
        if number == 0:
            raise WireError(f"field number 0 at byte {at}")
        if stop > end:
            raise WireError(f"the field at byte {at} ends at byte {stop}, but only {end} are there")
        yield Field(number, wire, at, value, stop)
        at = stop


def rewrite(
    data: Data, start: int, end: int, kind: str, skip: Callable[[Data, int, int], bool], leaf: Leaf
) -> list[Piece] | None:
    """The message in start … end-1 with each tensor replaced by what `leaf` answers; None if nothing changed.

    `skip` says of a nested message that no tensor in it can be of interest. `leaf` answers None to keep a tensor.
    """
    return _rewrite(data, start, end, kind, skip, leaf, 0)


def _rewrite(
    data: Data, start: int, end: int, kind: str, skip: Callable[[Data, int, int], bool], leaf: Leaf, depth: int
) -> list[Piece] | None:
    if kind == "tensor":
        return leaf(data, start, end)
    if depth > MAX_DEPTH:
        raise WireError(f"messages nested more than {MAX_DEPTH} deep")
    children, plain = CHILDREN[kind], PLAIN_VALUES.get(kind, ())
    pieces: list[Piece] = []
    copied = start
    for f in fields(data, start, end):
        if f.number in plain:
            break
        child = children.get(f.number)
        if child is None or f.wire != BYTES or skip(data, f.value, f.end):
            continue
        inner = _rewrite(data, f.value, f.end, child, skip, leaf, depth + 1)
        if inner is None:
            continue
        pieces.append(data.get(copied, f.start))
        pieces.append(_tag(f.number) + _to_varint(length(inner)))
        pieces += inner
        copied = f.end
    if not pieces:
        return None
    pieces.append(data.get(copied, end))
    return pieces


def punch(
    message: bytes, marker: bytes, leaf: Callable[[bytes], list[Piece] | None]
) -> tuple[bytes, list[tuple[int, Hole]]]:
    """A ModelProto in memory with holes where `leaf` asks for them: (bytes without them, [(position, hole)]).

    Only tensors that contain `marker` are looked at. Every length field counts the holes' bytes.
    """

    def skip(data: Data, start: int, end: int) -> bool:
        return data.find(marker, start, end) < 0

    whole = Whole(message)
    pieces = rewrite(whole, 0, len(message), "model", skip, lambda d, a, b: leaf(bytes(d.get(a, b)))) or [message]
    holes: list[tuple[int, Hole]] = []
    rest: list[bytes | bytearray] = []
    at = 0
    for piece in pieces:
        if isinstance(piece, Hole):
            holes.append((at, piece))
        else:
            rest.append(piece)
            at += len(piece)
    return b"".join(rest), holes


def length(pieces: list[Piece]) -> int:
    """Bytes of the pieces, holes filled."""
    return sum(p.size if isinstance(p, Hole) else len(p) for p in pieces)


def field_bytes(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return field_head(number, len(content)) + content


def field_head(number: int, size: int) -> bytes:
    """Tag and length of a length-delimited field of `size` bytes."""
    return _tag(number) + _to_varint(size)


def read_varint(data: Data, start: int, end: int) -> int:
    """The integer that lies in start … end-1."""
    return _varint(data.get(start, end), 0)[0]


def varints(content: bytes | bytearray) -> Iterator[int]:
    """The integers of a packed field."""
    at = 0
    while at < len(content):
        value, at = _varint(content, at)
        yield value


def _tag(number: int) -> bytes:
    return _to_varint(number << 3 | BYTES)


def _varint(data: bytes | bytearray, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise WireError("cut short in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise WireError("a number of more than ten bytes")


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)

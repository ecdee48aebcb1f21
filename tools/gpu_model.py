"""A synthetic model of any size, as .conx and as .onnx, made in seconds and without the package onnx.

y = x W1 W2 … in float16, each W a square matrix of codes with a scale for each row, about 3 bits a weight once packed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs import Linear, TensorMeta, pack_params
from conx.container.index import FEATURES
from conx.container.limits import SEGMENT
from conx.container.reader import Reader
from conx.container.records import RUN, SOURCE, External, Graph, Tensor
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.runtime.decode import decode_all

__all__ = ["write_conx", "write_onnx"]

DRAWN = 1 << 22  # codes; every segment is a window of them


def write_conx(path: Path, matrices: int, side: int, threads: int) -> None:
    """A .conx of so many matrices of side x side."""
    with ThreadPoolExecutor(threads) as pool, Writer(path, pool) as writer:
        tensors = [_write_matrix(writer, f"w{i}", side, i) for i in range(matrices)]
        message = _model([(name, _external(name)) for name in _names(matrices)], side)
        digest = hashlib.sha256(message).digest()
        stream = writer.add_graph(message)
        externals = tuple(
            External(tensor=i, location=name, name=name, dtype=DType.FLOAT16) for i, name in enumerate(_names(matrices))
        )
        graphs = [
            Graph(SOURCE, (), stream, digest, externals=externals),
            Graph(RUN, ("fp16", "original"), stream, digest, externals=externals),
        ]
        writer.finish(FEATURES, graphs, tensors, {"producer": "gpu_check"})


def write_onnx(packed: Path, path: Path, threads: int) -> None:
    """The same model as an .onnx with its float16 weights in a file beside it."""
    with Reader(packed) as reader:
        graph = reader.index.serving("fp16")
        assert graph is not None
        arrays = decode_all(reader, graph.externals, threads)
        data, at, stubs = path.with_suffix(".data"), 0, []
        with data.open("wb") as file:
            for external, array in zip(graph.externals, arrays, strict=True):
                file.write(array.data.cast("B"))
                stubs.append((external.name, _external(data.name, at, array.nbytes)))
                at += array.nbytes
        side = reader.index.tensors[0].shape[0]
    path.write_bytes(_model(stubs, side))


def _names(matrices: int) -> list[str]:
    return [f"w{i}" for i in range(matrices)]


def _write_matrix(writer: Writer, name: str, side: int, seed: int) -> Tensor:
    meta = TensorMeta((side, side), DType.FLOAT32)
    codec = Linear(axis=0)
    scales = (np.random.default_rng(seed).random(side, np.float32) + 0.5) / np.float32(4 * side**0.5)
    codec_id, params = pack_params(codec, meta)
    streams = writer.add_segments(["linear.codes"], ([codes.tobytes()] for codes in _segments(meta.count, seed)))
    side_streams = (writer.add_stream(codec.make_side(scales)[0], "linear.side0"),)
    # Nobody decodes this file with `check --deep`, which alone looks at the hash of the values.
    return Tensor(name, meta.shape, meta.dtype, codec_id, params, side_streams, streams, bytes(32))


def _segments(count: int, seed: int) -> Iterator[npt.NDArray[Any]]:
    drawn = np.clip(np.rint(np.random.default_rng(0).laplace(0, 1.5, DRAWN + SEGMENT)), -127, 127).astype(np.int8)
    places = np.random.default_rng(seed + 1)
    for start in range(0, count, SEGMENT):
        at = int(places.integers(DRAWN))
        yield drawn[at : at + min(SEGMENT, count - start)]


# ModelProto, field by field; numbers as in onnx/onnx.proto.


def _model(weights: Sequence[tuple[str, bytes]], side: int) -> bytes:
    graph = b""
    for i, (name, _) in enumerate(weights):
        last = i == len(weights) - 1
        texts = [(1, f"h{i}" if i else "x"), (1, name), (2, "y" if last else f"h{i + 1}"), (4, "MatMul")]
        graph += _field(1, b"".join(_field(number, text.encode()) for number, text in texts))
    graph += _field(2, b"g")
    for name, stored in weights:
        tensor = b"".join(b"\x08" + _varint(side) for _ in range(2)) + b"\x10" + _varint(DType.FLOAT16.number)
        graph += _field(5, tensor + _field(8, name.encode()) + stored + b"\x70\x01")
    shape = _field(1, _field(2, b"n")) + _field(1, b"\x08" + _varint(side))
    kind = _field(1, b"\x08" + _varint(DType.FLOAT16.number) + _field(2, shape))
    graph += b"".join(_field(number, _field(1, name) + _field(2, kind)) for number, name in ((11, b"x"), (12, b"y")))
    return b"\x08\x08" + _field(7, graph) + _field(8, _field(1, b"") + b"\x10\x0d")


def _external(location: str, offset: int = 0, length: int = 0) -> bytes:
    entries = {"location": location} | ({"offset": str(offset), "length": str(length)} if length else {})
    return b"".join(_field(13, _field(1, k.encode()) + _field(2, v.encode())) for k, v in entries.items())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])

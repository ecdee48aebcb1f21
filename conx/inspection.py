"""`conx.inspect`: what a model holds, be it a .conx or an .onnx."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from conx.container.header import MAGIC, begins_like_conx
from conx.container.reader import Reader
from conx.container.records import Graph, Stream, Tensor
from conx.errors import UnsupportedError

__all__ = ["ModelInfo", "TensorInfo", "inspect"]

COUNTS = ("parameters", "unique_parameters", "constants", "quantization_parameters", "bytes")


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor.

    Attributes:
        name, dtype, shape: as in the model.
        codec: how it is stored; "" for an .onnx.
        bytes: bytes of its values.
        stored: bytes that it takes in the file (of shared chunks its part).
        uses: how many weights of the source model it stands for.
        error: root mean square error over that of the weight; 0 where nothing was lost.
        shared: names of the other weights that it stands for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    bytes: int
    stored: int
    uses: int
    error: float
    shared: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model.

    Attributes:
        path: the file.
        format: "conx" or "onnx".
        file_bytes: bytes of the file (.onnx: with its external data).
        source_bytes: bytes of the model's files before packing.
        parameters: elements of all weights that the float model has, however it is quantized; equal weights as often as
            the model has them.
        unique_parameters: the same with equal weights counted once.
        constants: float numbers without dims.
        quantization_parameters: scales and zero points of weights.
        lossless: whether every weight is bit for bit the original.
        precisions: what it can be opened as; an .onnx only as it is.
        memory: bytes of the weights in memory, by precision.
        by_dtype: bytes of the stored tensors' values by element type.
        by_codec: bytes in the file by codec.
        graph: opsets, inputs, outputs, operators and counts.
        tensors: the stored tensors.
        saved: bytes that shared weights would take if each were there.
        originals: names of the model's own files that a .conx brings back byte for byte.
        producer, content_id, file_id: of a .conx.
    """

    path: str
    format: str
    file_bytes: int
    source_bytes: int
    parameters: int
    unique_parameters: int
    constants: int
    quantization_parameters: int
    lossless: bool
    precisions: tuple[str, ...]
    memory: dict[str, int]
    by_dtype: dict[str, int]
    by_codec: dict[str, int]
    graph: dict[str, Any]
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    originals: tuple[str, ...] = ()
    producer: str = ""
    content_id: str = ""
    file_id: str = ""

    @property
    def saved(self) -> int:
        return sum(t.bytes * (t.uses - 1) for t in self.tensors if t.uses > 1)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"saved": self.saved}


def inspect(path: str | os.PathLike[str]) -> ModelInfo:
    """Facts about a .conx or .onnx file; weights are not decoded.

    Raises:
        FormatError, ModelError: the file is damaged.
        UnsupportedError: an .onnx, and the package onnx is not installed.
    """
    with open(path, "rb") as file:
        head = file.read(len(MAGIC))
    if begins_like_conx(head) or os.fspath(path).lower().endswith(".conx"):
        return _inspect_conx(path)
    try:
        from conx.graph.inspect_onnx import onnx_facts
    except ImportError as e:
        raise UnsupportedError(
            f'{os.fspath(path)}: reading .onnx files needs {e.name}: pip install "conx-onnx[pack]"'
        ) from None
    facts = onnx_facts(path)
    facts["tensors"] = tuple(TensorInfo(**t) for t in facts["tensors"])
    return ModelInfo(**facts)


def _inspect_conx(path: str | os.PathLike[str]) -> ModelInfo:
    with Reader(path) as reader:
        index = reader.index
        stored = _stored_sizes(reader)
        errors = _map(index.metadata.get("errors"))
        model = _map(index.metadata.get("model"))
        shared = _map(index.metadata.get("shared"))
        uses = Counter(b.tensor for b in (*index.source.holes, *index.source.externals))
        tensors = tuple(
            TensorInfo(
                name=t.name,
                dtype=t.dtype.label,
                shape=t.shape,
                codec=_codec_label(t),
                bytes=t.nbytes,
                stored=size,
                uses=uses[i],
                error=_number(_map(errors.get(str(i))).get("rms")),
                shared=_names(shared.get(str(i))),
            )
            for i, (t, size) in enumerate(zip(index.tensors, stored, strict=True))
        )
        by_codec = _sums((t.codec, t.stored) for t in tensors)
        by_codec["graphs"] = sum(_part(reader, stream) for stream in {g.stream for g in index.graphs})
        by_codec["index"] = reader.header.file_size - sum(page.data for page in index.pages)
        return ModelInfo(
            path=os.fspath(path),
            format="conx",
            file_bytes=reader.header.file_size,
            source_bytes=int(_number(model.get("bytes"))),
            parameters=int(_number(model.get("parameters"))),
            unique_parameters=int(_number(model.get("unique_parameters"))),
            constants=int(_number(model.get("constants"))),
            quantization_parameters=int(_number(model.get("quantization_parameters"))),
            lossless=index.metadata.get("lossless") is True,
            precisions=tuple(sorted(p for g in index.graphs for p in g.precisions)),
            memory={p: _memory(g, index.tensors) for g in index.graphs for p in g.precisions},
            by_dtype=_sums((t.dtype, t.bytes) for t in tensors),
            by_codec=by_codec,
            graph={k: v for k, v in model.items() if k not in COUNTS},
            tensors=tensors,
            originals=tuple(original.name for original in index.originals),
            producer=str(index.metadata.get("producer", "")),
            content_id=reader.content_id.hex(),
            file_id=reader.file_id.hex(),
        )


def _memory(graph: Graph, tensors: Sequence[Tensor]) -> int:
    """Bytes of the weights that a graph is handed, each form of each tensor once."""
    bound = (*graph.holes, *graph.externals)
    forms = {
        (b.tensor, b.perm, b.dtype, b.view, b.grid, b.pad, b.repeat): b.nbytes_of(tensors[b.tensor]) for b in bound
    }
    return sum(forms.values())


def _stored_sizes(reader: Reader) -> list[int]:
    """Bytes that each tensor takes in the file: its chunks, and its part of those it shares."""
    return [round(sum(_tensor_parts(reader, tensor))) for tensor in reader.index.tensors]


def _tensor_parts(reader: Reader, tensor: Tensor) -> list[float]:
    parts: list[float] = [_part(reader, stream) for stream in tensor.side]
    if tensor.segments <= 1:
        return parts + [_part(reader, stream) for stream in tensor.streams]
    width = len(tensor.streams)
    if width:
        first = tensor.streams[0].chunk
        parts += [reader.row(c).stored for c in range(first, first + width * tensor.segments)]
    return parts


def _part(reader: Reader, stream: Stream) -> int:
    """Stored bytes of a stream: whole chunks, and of a shared one the part that it uses."""
    total = 0.0
    chunk, begin, missing = stream.chunk, stream.offset, stream.size
    while missing:
        row = reader.row(chunk)
        used = min(row.raw - begin, missing)
        total += row.stored * used / row.raw
        chunk, begin, missing = chunk + 1, 0, missing - used
    return round(total)


def _codec_label(tensor: Tensor) -> str:
    """The codec with what tells most about it: `linear int8`, `planes as bfloat16`."""
    params = tensor.params
    if tensor.codec == "linear":
        return f"linear {params.get('code')}"
    if "stored" in params:
        return f"{tensor.codec} as {params['stored']}"
    return tensor.codec


def _sums(pairs: Any) -> dict[str, int]:
    found: Counter[str] = Counter()
    for key, value in pairs:
        found[key] += value
    return dict(sorted(found.items()))


def _map(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _names(value: object) -> tuple[str, ...]:
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0

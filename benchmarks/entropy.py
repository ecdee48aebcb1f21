"""How close the stored codes come to their order-0 entropy: ``python -m benchmarks.entropy``.

Coded weights are integers on a grid, and zstd is their entropy coder. A coder that knows nothing but how often each
code occurs in a tensor spends the order-0 entropy, ``-sum(p log2 p)`` bits a weight; what conx spends more is loss of
the coder: Huffman's whole bits, tables, frames. This packs models at 8 to 2 bits, reads the codes back out of the
files, and compares the two. Seeded noise of two distributions goes the same way, as a model of one MatMul.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import zstandard
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import conx
from benchmarks.corpus import MODELS, fetch
from benchmarks.measure import table
from conx.codecs import TensorMeta, codec_from
from conx.codecs.linear import Linear
from conx.container.reader import Reader
from conx.container.records import Stream, Tensor

__all__ = ["Tally", "entropy_bits", "tallies"]

_MODELS = ("minilm", "ppocr4_rec")
_NOISE = {"gaussian": "standard_normal", "laplacian": "laplace"}  # names, and NumPy's
_NOISE_SHAPE = (1536, 2048)
_BITS = range(8, 1, -1)
_TARGET = 2.0  # %
_RESULT = Path(__file__).with_name("results") / "entropy.md"


@dataclass(frozen=True)
class Tally:
    """What the codes of one tensor, or of several, need and take.

    Attributes:
        weights: number of codes.
        entropy: bits of order-0 entropy, with the statistics of each tensor.
        stored: bits of the main streams in the file: zstd frames with their headers and checksums, of a shared chunk
            the part in proportion.
        side: bits of the scales in the file, likewise.
        shared: whether the codes share a chunk with those of other tensors, as those of small ones do.
    """

    weights: int
    entropy: float
    stored: float
    side: float
    shared: bool

    @property
    def excess(self) -> float:
        """Per cent that the main streams take above the entropy."""
        return 100 * (self.stored / self.entropy - 1) if self.entropy else 0.0


def tallies(path: Path) -> dict[str, Tally]:
    """Reads the codes of each tensor of a .conx file that lies on a grid.

    Args:
        path: the file.

    Returns:
        By the tensor's name, with its number where names repeat.
    """
    found: dict[str, Tally] = {}
    with Reader(path) as reader:
        for number, tensor in enumerate(reader.index.tensors):
            if tensor.codec == Linear.id:
                name = tensor.name if tensor.name not in found else f"{tensor.name} #{number}"
                entropy = entropy_bits(_codes(reader, tensor))
                side = sum(_stream_bits(reader, stream) for stream in tensor.side)
                stored = _main_bits(reader, tensor)
                found[name] = Tally(tensor.count, entropy, stored, side, _is_shared(reader, tensor))
    return found


def entropy_bits(codes: NDArray[np.int8]) -> float:
    """Order-0 entropy of all codes together, in bits.

    >>> entropy_bits(np.array([0, 0, 1, 2], np.int8))
    6.0
    """
    counts = np.bincount(codes.view(np.uint8))
    counts = counts[counts > 0]
    return float(np.sum(counts * np.log2(codes.size / counts)))


def _codes(reader: Reader, tensor: Tensor) -> NDArray[np.int8]:
    codec = codec_from(tensor.codec, tensor.params, TensorMeta(tensor.stored_shape, tensor.dtype))
    assert isinstance(codec, Linear)
    codes = np.empty(tensor.count, codec.code.storage)
    for i in range(tensor.segments):
        start, stop = tensor.segment_range(i)
        codec.decode_codes(start, stop - start, reader.segment(tensor, i), codes[start:stop])
    return codes


def _main_bits(reader: Reader, tensor: Tensor) -> float:
    if tensor.segments == 1:
        return sum(_stream_bits(reader, stream) for stream in tensor.streams)
    first, width = tensor.streams[0].chunk, len(tensor.streams)  # a chunk for each stream of each segment
    return 8.0 * sum(reader.row(first + i).stored for i in range(width * tensor.segments))


def _is_shared(reader: Reader, tensor: Tensor) -> bool:
    codes = tensor.streams[0]
    return tensor.segments == 1 and reader.row(codes.chunk).raw > codes.size


def _stream_bits(reader: Reader, stream: Stream) -> float:
    """Bits of a stream in the file: of a chunk that it shares, the part that it has of the raw content."""
    bits, number, begin, missing = 0.0, stream.chunk, stream.offset, stream.size
    while missing:
        row = reader.row(number)
        used = min(row.raw - begin, missing)
        bits += 8 * row.stored * used / row.raw
        number, begin, missing = number + 1, 0, missing - used
    return bits


def _sum(parts: Iterable[Tally]) -> Tally:
    listed = list(parts)
    return Tally(
        sum(part.weights for part in listed),
        sum(part.entropy for part in listed),
        sum(part.stored for part in listed),
        sum(part.side for part in listed),
        any(part.shared for part in listed),
    )


def _noise_model(path: Path, distribution: str) -> Path:
    """A model of one MatMul with a weight of noise."""
    weight = getattr(np.random.default_rng(0), distribution)(size=_NOISE_SHAPE).astype(np.float32)
    rows, columns = _NOISE_SHAPE
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "noise",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, columns])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph), path)
    return path


def _row(model: str, bits: int, found: dict[str, Tally]) -> dict[str, object]:
    whole, shared = _sum(found.values()), _sum(each for each in found.values() if each.shared)
    own = _sum(each for each in found.values() if not each.shared)
    return {
        "codes of": model,
        "bits": bits,
        "entropy, bits/weight": f"{whole.entropy / whole.weights:.3f}",
        "stored, bits/weight": f"{whole.stored / whole.weights:.3f}",
        "excess %": f"{whole.excess:.2f}",
        "in own chunks, excess %": f"{own.excess:.2f}",
        "in shared chunks, excess %": f"{shared.excess:.2f}" if shared.weights else "",
        "in shared chunks, weights %": f"{100 * shared.weights / whole.weights:.1f}",
        "scales, bits/weight": f"{whole.side / whole.weights:.3f}",
    }


def _print_losses(found: dict[str, Tally], count: int = 10) -> None:
    """The tensors that lose most, by bytes; in a shared chunk, what one loses another may gain."""
    for name, each in sorted(found.items(), key=lambda item: item[1].entropy - item[1].stored)[:count]:
        lost, place = (each.stored - each.entropy) / 8, "shared" if each.shared else "own"
        rate = each.entropy / each.weights
        print(
            f"    {lost:9.0f} bytes, {each.excess:6.2f} % of {rate:.2f} bits, {place}: {each.weights} weights, {name}"
        )


def _report(rows: list[dict[str, object]], worst: str) -> str:
    versions = f"conx {conx.__version__}, numpy {np.__version__}, zstandard {zstandard.__version__}"
    height, width = _NOISE_SHAPE
    about = (
        f"By `python -m benchmarks.entropy`, with {versions}. Stored are the main streams as they lie in the file, with"
        " frame headers and checksums; the scales stand in a column of their own. The entropy has the statistics of"
        " each tensor as a whole: a coder that adapts to its parts can be below it. The noise is a seeded matrix of"
        f" {height} × {width} for a MatMul."
    )
    parts = ["# Code streams against their order-0 entropy", about, table(rows), worst]
    return "\n\n".join(parts) + "\n"


def main(wanted: list[str]) -> int:
    """Measures all, prints and writes the results file; of named models or noises, prints what loses most as well.

    Args:
        wanted: keys of ``corpus.MODELS``, ``gaussian`` or ``laplacian``; none for the table.
    """
    unknown = [name for name in wanted if name not in MODELS and name not in _NOISE]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are: {', '.join([*_NOISE, *MODELS])}", file=sys.stderr)
        return 2
    rows: list[dict[str, object]] = []
    excesses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "packed.conx")
        for name in wanted or [*_MODELS, *_NOISE]:
            model = _noise_model(Path(folder, "noise.onnx"), _NOISE[name]) if name in _NOISE else fetch(name)
            for bits in _BITS:
                conx.pack(model, packed, bits=bits)
                found = tallies(packed)
                excesses[f"{name} at {bits} bits"] = _sum(found.values()).excess
                rows.append(_row(name, bits, found))
                print("; ".join(f"{key}: {value}" for key, value in rows[-1].items()), flush=True)
                if wanted:
                    _print_losses(found)
    over = [f"{name} ({value:.2f})" for name, value in excesses.items() if value > _TARGET]
    text = _report(rows, f"Above the target of {_TARGET:g} %: {', '.join(over) or 'none'}.")
    print(text)
    if not wanted:
        _RESULT.parent.mkdir(exist_ok=True)
        _RESULT.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Lossless coding of float weights beside its peers, sizes and speed: ``python -m benchmarks.lossless [NAME ...]``.

The peers get the weights alone, one after another or, where that is better for them, each tensor for itself; none of
them can read a model. Decoding is timed on one thread, in memory, peers and conx in turn, and conx checks as it always
does. Needs ``pip install zipnn pcodec`` besides, and prints their versions.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pcodec
import pcodec.standalone
import zstandard
from onnx import helper
from zipnn import ZipNN

import conx
from benchmarks.corpus import MODELS, fetch
from benchmarks.feeds import Array
from benchmarks.measure import table
from conx.container.reader import Reader
from conx.container.records import External
from conx.dtypes import DType
from conx.graph.read import SourceModel, read_model
from conx.graph.ties import find_ties
from conx.runtime.decode import decode_all

__all__ = ["NAMES", "Measured", "measure"]

NAMES = (
    "ppocr4_rec", "ppocr4_det", "magika", "silero_16k", "ppocr6_rec", "minilm", "vit_s", "minilm bfloat16",
    "imgly_medium",
)  # fmt: skip
_SETTINGS: dict[str, bool | str] = {"conx": True, "conx smallest": "smallest"}
_ROUNDS = 9
_FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_RESULT = Path(__file__).with_name("results") / "lossless.md"


@dataclass
class Measured:
    """What was found for one model.

    Attributes:
        name: the model.
        kind: element type of most of its float weights; only those are looked at.
        raw: bytes of these weights.
        once: the same, equal ones counted once.
        sizes: bytes of them by candidate.
        files: bytes of the whole .conx, by setting.
        onnx: bytes of the .onnx with its external data.
        speeds: GB/s of decoding, by candidate.
        pack_s: seconds to pack, by setting.
        exact: whether every candidate gave the same bits.
    """

    name: str
    kind: str = ""
    raw: int = 0
    once: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    onnx: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    pack_s: dict[str, float] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True)
class _Work:
    """Something to time, and the bytes of weights that it makes."""

    run: Callable[[], object]
    nbytes: int


def measure(name: str, folder: Path, rounds: int = _ROUNDS) -> Measured:
    """Codes one model's weights in every way, decodes and compares them.

    Args:
        name: a key of ``corpus.MODELS``, or one followed by " bfloat16": its weights rounded to that type.
        folder: for the files made on the way.
        rounds: of the timing; 0 for none.
    """
    key, _, rounded = name.partition(" ")
    source = _rounded(fetch(key), folder) if rounded else fetch(key)
    with read_model(source) as model:
        found = Measured(name, onnx=model.size)
        kind = max(_FLOATS, key=lambda dtype: sum(w.nbytes for w in model.weights if w.dtype is dtype))
        arrays = [np.array(weight.read()) for weight in model.weights if weight.dtype is kind]
        ties = find_ties(model.weights, lambda _: None)
        once = [w for w in model.weights if w.dtype is kind and ties[w.number].stored == w.number]
        found.kind, found.raw = kind.label, sum(array.nbytes for array in arrays)
        found.once = sum(weight.nbytes for weight in once)
        works = _peers(found, arrays, kind)
        for setting, lossless in _SETTINGS.items():
            begun = time.perf_counter()
            path = folder / f"{name}-{setting}.conx"
            conx.pack(source, path, lossless=lossless)
            found.pack_s[setting] = time.perf_counter() - begun
            works[setting] = _conx(found, setting, path, kind, model)
    _time(found, works, rounds)
    return found


def _rounded(source: Path, folder: Path) -> Path:
    """A model of the same float32 weights rounded to bfloat16, in nobody's graph."""
    made = []
    with read_model(source) as model:
        for weight in model.weights:
            if weight.dtype is DType.FLOAT32:
                bits = weight.read().view("<u4").astype("<u8")
                halves = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
                made.append(
                    helper.make_tensor(weight.name, onnx.TensorProto.BFLOAT16, weight.shape, halves.tobytes(), raw=True)
                )
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "weights", [x], [y], made)
    path = folder / f"{source.stem}-bfloat16.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def _peers(found: Measured, arrays: Sequence[Array], kind: DType) -> dict[str, _Work]:
    raw = b"".join(array.tobytes() for array in arrays)
    works = {}
    for level in (3, 19):
        found.sizes[f"zstd {level}"] = len(zstandard.compress(raw, level))
    zipper = ZipNN(bytearray_dtype=kind.label, threads=1)
    zipped = zipper.compress(bytearray(raw))
    found.sizes["zipnn"] = len(zipped)
    found.exact &= bytes(zipper.decompress(zipped)) == raw
    works["zipnn"] = _Work(lambda: zipper.decompress(zipped), len(raw))
    for level in (8, 12):
        config = pcodec.ChunkConfig(compression_level=level)
        coded = [pcodec.standalone.simple_compress(array, config) for array in arrays]
        label = "pcodec" if level == 8 else f"pcodec {level}"
        found.sizes[label] = sum(map(len, coded))
        back = [pcodec.standalone.simple_decompress(one) for one in coded]
        found.exact &= all(one.tobytes() == array.tobytes() for one, array in zip(back, arrays, strict=True))
        works[label] = _Work(partial(_decompress_all, coded), len(raw))
    return works


def _conx(found: Measured, setting: str, path: Path, kind: DType, model: SourceModel) -> _Work:
    """Adds the sizes of a file, and compares every weight of the model, of whatever type, with the original."""
    found.files[setting] = path.stat().st_size
    facts = conx.inspect(path)
    reader = Reader(path)
    ties = find_ties(model.weights, lambda _: None)
    stored = [weight for weight in model.weights if ties[weight.number].stored == weight.number]
    numbers = [i for i, weight in enumerate(stored) if weight.dtype is kind]
    found.sizes[setting] = sum(facts.tensors[i].stored for i in numbers)
    for number, weight in enumerate(stored):
        (array,) = decode_all(reader, [_whole(reader, number)])
        found.exact &= array.tobytes() == weight.read().tobytes()
    wanted = [_whole(reader, i) for i in numbers]
    return _Work(lambda: decode_all(reader, wanted, 1), sum(facts.tensors[i].bytes for i in numbers))


def _whole(reader: Reader, number: int) -> External:
    return External(location=f"t{number}", name="", tensor=number, dtype=reader.index.tensors[number].dtype)


def _time(found: Measured, works: dict[str, _Work], rounds: int) -> None:
    """All in turn, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1 if rounds else 0):
        for name, work in works.items():
            begun = time.perf_counter()
            work.run()
            times[name].append(time.perf_counter() - begun)
    if rounds:
        found.speeds = {name: works[name].nbytes / statistics.median(t[1:]) / 1e9 for name, t in times.items()}


_COLUMNS = ("zstd 3", "zstd 19", "zipnn", "pcodec", "pcodec 12", "conx", "conx smallest")


def _decompress_all(coded: Sequence[bytes]) -> list[Array]:
    return [pcodec.standalone.simple_decompress(one) for one in coded]


def _size_row(found: Measured) -> dict[str, object]:
    row: dict[str, object] = {"model": found.name, "type": found.kind, "raw MB": f"{found.raw / 1e6:.2f}"}
    row |= {"equal ones once": f"{found.once / found.raw:.4f}"}
    return row | {name: f"{found.sizes[name] / found.raw:.4f}" for name in _COLUMNS}


def _file_row(found: Measured) -> dict[str, object]:
    row: dict[str, object] = {"model": found.name, ".onnx, MB": f"{found.onnx / 1e6:.2f}"}
    row |= {f"{name}, of the .onnx": f"{size / found.onnx:.4f}" for name, size in found.files.items()}
    return row | {f"{name}, packed in s": f"{seconds:.1f}" for name, seconds in found.pack_s.items()}


def _speed_row(found: Measured) -> dict[str, object]:
    row: dict[str, object] = {"model": found.name}
    return row | {name: f"{found.speeds[name]:.2f}" for name in _COLUMNS if name in found.speeds}


def _report(results: Sequence[Measured], seconds: float) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("zstandard", "zipnn", "pcodec", "numpy"))
    sizes = (
        "Peers code the weights alone, as the model has them: zstd and zipnn all together, pcodec (its default level, "
        "8, and its highest) each tensor for itself. Of conx it is what the tensors take in the .conx file, which has "
        "equal tensors once; index, hashes and graphs are in the next table. `conx` is `lossless=True`, "
        '`conx smallest` is `lossless="smallest"`.'
    )
    speeds = (
        f"Medians of {_ROUNDS} rounds in turn. conx reads its file from the page cache and checks zstd's checksums; "
        "the peers work in memory and check nothing."
    )
    parts = [
        "# Lossless coding",
        f"`python -m benchmarks.lossless`, {seconds / 60:.0f} minutes; {platform.machine()}; {versions}.",
        "## Sizes of the float weights, as fractions of their raw bytes",
        sizes,
        table([_size_row(found) for found in results]),
        "## Whole files, with all graphs",
        table([_file_row(found) for found in results]),
        "## Decoding, GB/s of weights on one thread",
        speeds,
        table([_speed_row(found) for found in results]),
        "Every candidate gave every bit back." if all(found.exact for found in results) else "NOT EVERY BIT CAME BACK.",
    ]
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> int:
    """Measures all of `NAMES`, prints and writes the results file; named models are measured and printed only."""
    unknown = [name for name in names if name.partition(" ")[0] not in MODELS]
    if unknown:
        print(f"unknown model: {', '.join(unknown)}; there are: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NAMES:
            results.append(measure(name, Path(folder)))
            print(f"{name}: {_size_row(results[-1])}, after {time.perf_counter() - begun:.0f} s", flush=True)
    text = _report(results, time.perf_counter() - begun)
    print(text)
    if not names:
        _RESULT.parent.mkdir(exist_ok=True)
        _RESULT.write_text(text, "utf-8")
    return 0 if all(found.exact for found in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

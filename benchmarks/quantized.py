"""Quantized models in: ``python -m benchmarks.quantized [NAME ...]``.

The quantized models of the corpus, and two float ones in the ways of onnxruntime's quantizers, packed at conx's
default, which stores their codes as they are. Each file has three graphs at least: the quantized one (`original`), and
the float ones fp32 and fp16. Weights are quantized per channel to int8, static quantization is calibrated on 16 real
inputs (opennsfw brought to opset 13 before, as DequantizeLinear has no axis below); MatMulNBits has blocks of 32
without zero points, and reaches one small matrix of opennsfw and not MiniLM's embeddings: their rest is float32, and
stored bit for bit.

**Sizes.** `.conx / zip` is the size of the .conx, all graphs included, over that of the quantized .onnx in `zip -9`;
at most 0.95 is wanted (none of these .onnx has external data). It is the sum of the three columns that follow: codes
with their scales, other weights bit for bit, graphs with the index. `entropy` is what an ideal order-0 coder would
need for the codes alone, also over the zip: the sum over the tensors of int8, uint8 and int4 (two of these in a byte)
of the count of codes times the entropy of their frequencies. Below the table is, for each model that missed 0.95,
whether such a coder would get there.

**Parameters** are counted in the float model, where there is one, in the quantized .onnx and in the .conx, by
`conx.inspect`; `scales, zeros` are counted apart.

**Outputs**, on real inputs of another draw than the calibration's (smart_turn and tashkeel get generated ones).
`equal` tells whether `original` gives every output of the quantized .onnx in onnxruntime bit for bit, both on one
thread. `rms` is the root mean square of the error over that of the output, of the worst output; `1 - cos` is the mean
over inputs and outputs. They are against the float model; where there is none, those of fp32 and fp16 are against the
quantized model, and show how much its rounding of activations matters: float graphs have its weights and round no
activations. That is also why they can be closer to the float model than `original`. The waveforms that kokoro
synthesizes cannot be compared: for it there is the distance of log spectra. tashkeel gives class numbers. imgly_medium
is the float16 form of imgly_small.

**Pairs**: the float model packed with its form by quantize_dynamic, per channel, as `quantized=`. Of the *renamed*
twin all initializers have names that tell nothing. Errors are against the float model; `beside dequantized` is the rms
of fp32 against the graph that `conx.dequantize` makes of the twin.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

import conx
from benchmarks.corpus import fetch
from benchmarks.feeds import COMPARISON, Array, Feed, Run, runner
from benchmarks.inputs import agreement, feeds
from benchmarks.measure import output_error, table
from benchmarks.quantizers import WAYS, messages, quietly, renamed

__all__ = ["CASES", "PAIRS", "Case", "Measured", "measure", "measure_pair"]

WANTED = 0.95  # of the zip
_SOUNDS = {"kokoro"}
_INPUTS = {"imgly_small": 1, "kokoro": 2}  # of the others:
_MANY = 16
_CPU = ["CPUExecutionProvider"]
_RESULT = Path(__file__).with_name("results") / "quantized.md"


@dataclass(frozen=True)
class Case:
    """One quantized model.

    Attributes:
        key: which of the corpus; its inputs are used.
        plain: key of the float model, or "".
        way: how it is quantized here; "" if the model of the corpus is quantized.
    """

    key: str
    plain: str = ""
    way: str = ""

    @property
    def name(self) -> str:
        """For the tables."""
        return f"{self.key}, {self.way}" if self.way else self.key


@dataclass
class Measured:
    """Rows of the tables, the failures, and whether a check failed."""

    rows: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, name: str, row: dict[str, object]) -> None:
        """A row of the table of that name."""
        self.rows.setdefault(name, []).append(row)


CASES = (
    Case("minilm_int8", "minilm"),
    *(Case(key) for key in ("ddddocr_old", "smart_turn", "tashkeel", "kokoro")),
    Case("imgly_small", "imgly_medium"),
    *(Case(key, key, way) for key in ("minilm", "opennsfw") for way in WAYS),
)
PAIRS = (("minilm", False), ("ppocr6_rec", False), ("ppocr6_rec", True))


def measure(case: Case, folder: Path, found: Measured) -> None:
    """Packs a quantized model and adds its rows; what its quantizer refuses becomes a note.

    Args:
        case: which.
        folder: for the files made on the way.
        found: gets the rows, notes and faults.
    """
    source = fetch(case.key) if not case.way else folder / "quantized.onnx"
    try:
        if case.way:
            quietly(partial(WAYS[case.way], case.key, source))
        before = _opened(source, threads=1)
    except Exception as error:  # noqa: BLE001 - whatever the quantizer raises is its result
        refusal = f"refused: {type(error).__name__}: {error}".splitlines()[0]
        found.add("Sizes", {"model": case.name, "quantized .onnx": refusal})
        return
    packed = folder / "m.conx"
    conx.pack(source, packed, verify=False)
    _sizes(case, source, packed, found)
    _parameters(case, source, packed, found)
    _outputs(case, before, packed, found)


def measure_pair(key: str, rename: bool, folder: Path, found: Measured) -> None:
    """Packs a float model with the codes of its dynamically quantized form and adds a row.

    Args:
        key: a key of ``corpus.MODELS``.
        rename: whether the twin's initializers get other names.
        folder: for the files made on the way.
        found: gets the row and faults.
    """
    twin, packed, undone = folder / "twin.onnx", folder / "m.conx", folder / "undone.onnx"
    quietly(partial(WAYS["dynamic"], key, twin))
    if rename:
        onnx.save(renamed(onnx.load(twin)), twin)
    pairs = conx.pack(fetch(key), packed, quantized=twin, verify=False).pairs
    assert pairs is not None
    onnx.save(conx.dequantize(twin), undone)
    inputs = feeds(key, _MANY, COMPARISON)
    runs = {"twin": _opened(twin)} | {name: _opened(packed, name) for name in ("original", "fp32", "fp16")}
    row: dict[str, object] = {
        "float model": key,
        "twin": "renamed" if rename else "as it is",
        "matched": len(pairs.matched),
        "doubtful": len(pairs.doubtful),
        "unmatched": len(pairs.unmatched),
        "float .onnx": conx.inspect(fetch(key)).file_bytes,
        "twin .onnx": twin.stat().st_size,
        "zip": _zipped(twin),
        ".conx": packed.stat().st_size,
    }
    row[".conx / zip"] = f"{packed.stat().st_size / _zipped(twin):.3f}"
    plain = _opened(fetch(key))
    row |= {f"{name} rms": f"{_error(plain, run, inputs)['rel_rms']:.2e}" for name, run in runs.items()}
    row["beside dequantized"] = f"{_error(_opened(undone), runs['fp32'], inputs)['rel_rms']:.1e}"
    found.add("Pairs", row)
    if pairs.unmatched:
        found.notes.append(f"{key}, {row['twin']}: unmatched are {', '.join(pairs.unmatched)}")


def _sizes(case: Case, source: Path, packed: Path, found: Measured) -> None:
    zipped, info = _zipped(source), conx.inspect(packed)
    coded = sum(size for codec, size in info.by_codec.items() if codec.startswith("linear"))
    graphs = info.by_codec["graphs"] + info.by_codec["index"]
    others = info.file_bytes - coded - graphs
    entropy = _entropy(onnx.load(source))
    shares = {
        ".conx / zip": info.file_bytes,
        "codes, scales": coded,
        "other weights": others,
        "graphs": graphs,
        "entropy": entropy,
    }
    row: dict[str, object] = {"model": case.name, "quantized .onnx": source.stat().st_size, "zip": zipped}
    row[".conx"] = info.file_bytes
    found.add("Sizes", row | {name: f"{size / zipped:.3f}" for name, size in shares.items()})
    if info.file_bytes > WANTED * zipped:
        least = (entropy + others + graphs) / zipped
        even = "even " if least > WANTED else ""
        found.notes.append(
            f"{case.name}: {even}with codes at their entropy the file would be {least:.3f} "
            f"of the zip; its codes with their scales take {coded / entropy:.3f} of the entropy."
        )


def _parameters(case: Case, source: Path, packed: Path, found: Measured) -> None:
    here, there = conx.inspect(source), conx.inspect(packed)
    plain = conx.inspect(fetch(case.plain)).parameters if case.plain else None
    found.add(
        "Parameters",
        {
            "model": case.name,
            "float": plain if plain is not None else "–",
            "quantized": here.parameters,
            "packed": there.parameters,
            "scales, zeros": there.quantization_parameters,
            "precisions": ", ".join(there.precisions),
        },
    )
    if here.parameters != there.parameters:
        found.faults.append(f"{case.name}: {here.parameters} parameters, {there.parameters} packed")


def _outputs(case: Case, before: Run, packed: Path, found: Measured) -> None:
    inputs = feeds(case.key, _INPUTS.get(case.key, _MANY), COMPARISON)
    want = [before(feed) for feed in inputs]
    original = _opened(packed, "original", threads=1)
    equal = all(_same(one, original(feed)) for one, feed in zip(want, inputs, strict=True))
    if not equal:
        found.faults.append(f"{case.name}: the outputs of the original are not those of the .onnx")
    row: dict[str, object] = {"model": case.name, "equal": "yes" if equal else "NO"}
    row["against"] = case.plain or "quantized"
    reference = _remembered(_opened(fetch(case.plain)) if case.plain else before)
    runs = {"original": before} | {name: _opened(packed, name) for name in ("fp32", "fp16")}
    for name, run in runs.items():
        if run is before and not case.plain:
            row |= {f"{name} rms": "–", f"{name} 1 - cos": "–"}
            continue
        if case.key in _SOUNDS:
            row[f"{name} rms"] = f"{agreement(case.key, reference, run, len(inputs))['log_spectrum_db']:.2f} dB"
            continue
        figures = _error(reference, run, inputs)
        if "equal" in figures:
            row[f"{name} rms"] = f"{figures['equal']:.2%} of integers equal"
            continue
        row[f"{name} rms"] = f"{figures['rel_rms']:.2e}"
        row[f"{name} 1 - cos"] = f"{max(0.0, 1 - figures['cosine']):.1e}"
    found.add("Outputs", row)


def _opened(path: Path, precision: str = "", threads: int = 0) -> Run:
    """A model in onnxruntime, or packed in conx; noise in it is drawn from the same seed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    onnxruntime.set_seed(0)
    if precision:
        return runner(conx.InferenceSession(path, options, _CPU, precision=precision))
    return runner(onnxruntime.InferenceSession(path, options, providers=_CPU))


def _remembered(run: Run) -> Run:
    """The same function, which computes nothing twice for equal feeds."""
    known: dict[tuple[bytes, ...], dict[str, Array]] = {}

    def again(feed: Feed) -> dict[str, Array]:
        key = tuple(value.tobytes() for value in feed.values())
        if key not in known:
            known[key] = run(feed)
        return known[key]

    return again


def _error(reference: Run, run: Run, inputs: Sequence[Feed]) -> dict[str, float]:
    return output_error([reference(feed) for feed in inputs], [run(feed) for feed in inputs])


def _same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].tobytes() == other[name].tobytes()
        for name in one
    )


def _zipped(path: Path) -> int:
    """Bytes of a file in a zip of level 9, which is zlib's."""
    return len(zlib.compress(path.read_bytes(), 9))


def _entropy(model: onnx.ModelProto) -> float:
    """Bytes that the model's codes need at least, each tensor coded with its own frequencies."""
    nibbles = {
        node.input[1]
        for node in messages(model, onnx.NodeProto)
        if node.op_type == "MatMulNBits" and any(a.name == "bits" and a.i == 4 for a in node.attribute)
    }
    kinds = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT4}
    total = 0.0
    for tensor in messages(model, onnx.TensorProto):
        if tensor.data_type in kinds:
            codes = numpy_helper.to_array(tensor).astype(np.int16).reshape(-1)
            if tensor.name in nibbles:
                codes = np.concatenate([codes & 15, codes >> 4])
            share = np.unique(codes, return_counts=True)[1] / max(1, codes.size)
            total -= codes.size * float((share * np.log2(share)).sum()) / 8
    return total


def _report(found: Measured, seconds: float) -> str:
    machine = f"{os.cpu_count()} cores, {platform.machine().replace('_', '-')}"
    versions = f"conx {conx.__version__}, onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
    parts = [
        "# Quantized models",
        (__doc__ or "").partition("\n")[2].strip(),
        f"One run of {seconds / 60:.0f} minutes; {machine}; {versions}.",
    ]
    for name, rows in found.rows.items():
        parts += [f"## {name}", table(rows)]
        if name == "Sizes" and found.notes:
            parts.append("\n".join(f"- {note}" for note in found.notes))
    if found.faults:
        parts += ["## Faults", "\n".join(f"- {fault}" for fault in found.faults)]
    return "\n\n".join(parts) + "\n"


def main(names: list[str]) -> int:
    """Measures all, prints and writes the results file; named cases (or `pairs`) are measured and printed only."""
    onnxruntime.set_default_logger_severity(4)
    logging.getLogger().setLevel(logging.WARNING)  # the quantizers lower it
    begun, found = time.perf_counter(), Measured()
    for case in CASES:
        if not names or case.name in names:
            with tempfile.TemporaryDirectory() as folder:
                measure(case, Path(folder), found)
            print(f"{case.name}, after {time.perf_counter() - begun:.0f} s", flush=True)
    for key, rename in PAIRS if not names or "pairs" in names else ():
        with tempfile.TemporaryDirectory() as folder:
            measure_pair(key, rename, Path(folder), found)
        print(f"pair of {key}, after {time.perf_counter() - begun:.0f} s", flush=True)
    text = _report(found, time.perf_counter() - begun)
    print(text)
    if not names:
        _RESULT.parent.mkdir(exist_ok=True)
        _RESULT.write_text(text, "utf-8")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

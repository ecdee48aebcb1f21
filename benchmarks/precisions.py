"""What each precision costs in outputs: ``python -m benchmarks.precisions [KEY ...]``.

Each model is packed losslessly, so that nothing but the precision counts, and opened at every precision that the file
has; outputs on real inputs are compared with those of the original (of imgly_medium, which is float16 on disk, with
those at fp32). ``cosine`` is the mean over inputs and outputs, ``least`` that of the worst input; ``max`` the largest
error over the largest magnitude of an output, of the worst input. Waveforms of a synthesizer cannot be compared: for
piper there is the distance of log spectra instead.

On a CPU, onnxruntime computes a float16 graph in float32 and removes the casts between, so that only weights are
rounded: that is column *fp16, CPU*. Column *fp16* is what a device computes that has float16, emulated: every float16
value of the graph is rounded. ``share`` is that of the bytes of float initializers above 1 KB which are float16.

Where a reader is in doubt between two letters, its probabilities swing with the least rounding, of weights alone too,
and in whatever layer; the least cosines of ppocr4_rec and ppocr6_rec are of such lines.
"""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import conx
from benchmarks.corpus import fetch
from benchmarks.feeds import COMPARISON, Run, runner
from benchmarks.inputs import agreement, feeds, score
from benchmarks.measure import output_error, table
from conx.graph.fp16_emulated import Emulation
from conx.graph.lift import nested_graphs

__all__ = ["KEYS", "compare", "float16_share"]

KEYS = (
    "minilm", "ppocr4_rec", "ppocr4_det", "ppocr6_rec", "silero", "magika", "ddddocr", "opennsfw", "vit_s", "piper",
    "vgg16", "rxnmap", "imgly_medium",
)  # fmt: skip
_LIMITS = {"imgly_medium": 2, "ppocr4_det": 8, "vgg16": 8}  # inputs; of the others:
_INPUTS = 32
_SCORED = "ppocr6_rec"
_SHORT = {"imgly_medium"}
_SMALL = 1024  # bytes
_RESULT = Path(__file__).with_name("results") / "precisions.md"


def compare(key: str, folder: Path) -> tuple[dict[str, object], dict[str, float]]:
    """Packs a model and compares its precisions with the original.

    Args:
        key: a key of ``corpus.MODELS``.
        folder: for the files made on the way.

    Returns:
        A row of the table; and the character error rates by precision, of the model that reads.
    """
    source, packed = fetch(key), folder / f"{key}.conx"
    conx.pack(source, packed, lossless=True)
    available = conx.inspect(packed).precisions
    half = folder / f"{key}-fp16.onnx"
    runs: dict[str, Callable[[], Run]] = {
        "fp32": lambda: _open(packed, "fp32"),
        "fp16": lambda: _emulated(half),
        "fp16, CPU": lambda: _open(packed, "fp16"),
        "int8": lambda: _open(packed, "int8"),
    }
    row: dict[str, object] = {"model": key}
    if "fp16" in available:
        row["share"] = float16_share(onnx.load(conx.unpack(packed, half, precision="fp16")))
    rates: dict[str, float] = {}
    reference = _open(packed, "fp32") if key in _SHORT else _plain(source)
    for name, opened in runs.items():
        if name.partition(",")[0] not in available:
            row[f"{name} cosine"] = "skipped"
            continue
        run = opened()
        row |= {f"{name} {figure}": value for figure, value in _figures(key, reference, run).items()}
        if key == _SCORED:
            rates[name] = score(key, run)["cer"]
    if key == _SCORED:
        rates["original"] = score(key, reference)["cer"]
    return row, rates


def float16_share(model: onnx.ModelProto) -> float:
    """Share of the bytes of float initializers and constants above 1 KB that are float16, in a model with its data."""
    sizes: dict[int, int] = {onnx.TensorProto.FLOAT: 0, onnx.TensorProto.FLOAT16: 0}
    for tensor in _tensors(model.graph):
        if tensor.data_type in sizes:
            size = int(np.prod(tensor.dims)) * (4 if tensor.data_type == onnx.TensorProto.FLOAT else 2)
            sizes[tensor.data_type] += size if size > _SMALL else 0
    return sizes[onnx.TensorProto.FLOAT16] / max(1, sum(sizes.values()))


def _tensors(main: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for graph in (main, *nested_graphs(main)):
        yield from graph.initializer
        for node in graph.node:
            if node.op_type == "Constant":
                yield from (attribute.t for attribute in node.attribute if attribute.name == "value")


def _figures(key: str, reference: Run, run: Run) -> dict[str, object]:
    limit = _LIMITS.get(key, _INPUTS)
    if key == "piper":
        return {"cosine": f"{agreement(key, reference, run, limit)['log_spectrum_db']:.2f} dB"}
    inputs = feeds(key, limit, COMPARISON)
    pairs = [(reference(feed), run(feed)) for feed in inputs]
    error = output_error([want for want, _ in pairs], [got for _, got in pairs])
    least = min(output_error([want], [got])["cosine"] for want, got in pairs)
    return {"cosine": error["cosine"], "least": least, "max": error["max_rel"]}


def _open(packed: Path, precision: str) -> Run:
    return runner(conx.InferenceSession(packed, precision=precision, providers=["CPUExecutionProvider"]))


def _plain(source: Path) -> Run:
    return runner(onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"]))


def _emulated(half: Path) -> Run:
    emulated = half.with_name(half.stem + "-emulated.onnx")
    onnx.save(Emulation(onnx.load(half)).run(), emulated)
    return _plain(emulated)


def _text(rows: list[dict[str, object]], rates: dict[str, float]) -> str:
    shown = [{name: _cell(name, value) for name, value in row.items()} for row in rows]
    lines = [table(shown)]
    if rates:
        lines += [
            "",
            f"Edits per character of {_SCORED} on 300 lines of text: "
            + ", ".join(f"{name} {rate:.5f}" for name, rate in rates.items())
            + ".",
        ]
    return "\n".join(lines)


def _cell(name: str, value: object) -> object:
    """A cosine has too many nines for four digits."""
    return f"{value:.7f}" if name.endswith(("cosine", "least")) and isinstance(value, float) else value


def main(keys: list[str]) -> int:
    """Measures the named models, or all, prints the table, and for all writes it down."""
    onnxruntime.set_default_logger_severity(4)
    rows, rates = [], dict[str, float]()
    for key in keys or KEYS:
        with tempfile.TemporaryDirectory() as folder:
            row, found = compare(key, Path(folder))
        rows.append(row)
        rates |= found
        print(_text(rows[-1:], found), flush=True)
    text = _text(rows, rates)
    print(text)
    if not keys:
        _RESULT.parent.mkdir(exist_ok=True)
        doc = (__doc__ or "").partition("\n")[2].strip()
        made = f"onnxruntime {onnxruntime.__version__}, {platform.machine()}"
        _RESULT.write_text(f"# What each precision costs\n\n{doc}\n\nMeasured with {made}.\n\n{text}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""File sizes, and what the smaller file costs in outputs: ``python -m benchmarks.sizes [KEY ...]``.

Each model is packed losslessly and at conx's default, and stands beside what people do today: zip, zstd, and
onnxruntime's dynamic quantization. A lossless file has to give back every weight and every output bit for bit; for
the others, outputs on real inputs are compared with the original's, and scores on labelled tasks stand beside that.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import zstandard
from google.protobuf.message import Message
from onnx import external_data_helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

import conx
from benchmarks.corpus import MODELS, fetch
from benchmarks.feeds import COMPARISON, Run, runner
from benchmarks.inputs import SCORED, agreement, feeds, minilm_embed, score
from benchmarks.measure import table
from benchmarks.texts import entries

__all__ = ["KEYS", "Measured", "measure"]

KEYS = (
    "minilm", "ppocr4_rec", "ppocr4_det", "ppocr6_rec", "silero", "magika", "ddddocr", "opennsfw", "vit_s", "piper",
)  # fmt: skip
_DEFAULT, _DYNAMIC = "conx default", "quantize_dynamic"
_SCORED = {"minilm": 300, "ppocr4_rec": 100, "ppocr6_rec": 100, "ddddocr": 200}  # samples; magika: all its files
_EXACT_FEEDS = 4
_GLOSSES = 1000
_ZSTD_LEVEL = 19
_PERFECT = 1e-15  # below this, 1 - cosine is rounding of float64
_RESULT = Path(__file__).with_name("results") / "sizes.md"


@dataclass
class Measured:
    """What was found for one model.

    Attributes:
        key: the model.
        onnx: bytes of the .onnx with its external data.
        float_weights: bytes of its floating weights, raw.
        sizes: bytes by candidate.
        tensors: number of tensors in the model, wherever they are.
        weights_equal: whether the losslessly packed file gives all of them back bit for bit.
        outputs_equal: whether it computes every output bit for bit, over `_EXACT_FEEDS` real inputs.
        coded_floats: bytes that its floating weights take in the losslessly packed file.
        scores: on the labelled task, by file.
        errors: agreement with the original, by file.
        glosses: mean cosine of embeddings of WordNet's glosses, by file; only of MiniLM.
        dynamic: what came of dynamic quantization, where it was not measured.
    """

    key: str
    onnx: int = 0
    float_weights: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    weights_equal: bool = False
    outputs_equal: bool = False
    coded_floats: int = 0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    glosses: dict[str, float] = field(default_factory=dict)
    dynamic: str = ""


def measure(key: str, folder: Path) -> Measured:
    """Packs one model both ways, and measures sizes and errors.

    Args:
        key: a key of ``corpus.MODELS`` whose model has float weights.
        folder: for the files made on the way.
    """
    source, found = fetch(key), Measured(key)
    model = onnx.load(source, load_external_data=False)
    contents = [path.read_bytes() for path in _files(source, model)]
    found.onnx = sum(map(len, contents))
    found.sizes["zip"] = sum(len(zlib.compress(content, 9)) for content in contents)
    found.sizes["zstd 19"] = sum(len(zstandard.compress(content, _ZSTD_LEVEL)) for content in contents)
    original = _open(source)
    exact, small = folder / f"{key}-lossless.conx", folder / f"{key}.conx"
    found.sizes["conx lossless"] = conx.pack(source, exact, lossless=True).bytes
    found.sizes[_DEFAULT] = conx.pack(source, small).bytes
    external_data_helper.load_external_data_for_model(model, str(source.parent))
    _check_exact(found, model, exact, original)
    _compare(found, _DEFAULT, _open(small), original)
    _measure_dynamic(found, source, folder / f"{key}-int8.onnx", original)
    if key in SCORED:
        found.scores["original"] = score(key, original, _SCORED.get(key))
    return found


def _files(source: Path, model: onnx.ModelProto) -> list[Path]:
    """The model's file, and those that its tensors lie in."""
    places = (entry.value for tensor in _tensors(model) for entry in tensor.external_data if entry.key == "location")
    return [source, *(source.with_name(name) for name in dict.fromkeys(places))]


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """All tensors of a model wherever they are: initializers, attributes, subgraphs, functions."""
    for _, value in message.ListFields():
        for each in [value] if isinstance(value, Message | bytes | str | int | float) else value:
            if isinstance(each, onnx.TensorProto):
                yield each
            elif isinstance(each, Message):
                yield from _tensors(each)


def _open(path: Path) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # models warn of shapes that they declare wrongly, conx or not
    return runner(conx.InferenceSession(path, options, providers=["CPUExecutionProvider"]))


def _check_exact(found: Measured, model: onnx.ModelProto, packed: Path, original: Run) -> None:
    restored = onnx.load(conx.unpack(packed, packed.with_suffix(".onnx")))
    before, after = ([_content(tensor) for tensor in _tensors(each)] for each in (model, restored))
    found.tensors, found.weights_equal = len(before), before == after
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    found.float_weights = sum(len(content) for _, _, kind, content in before if kind in floats)
    found.coded_floats = sum(t.stored for t in conx.inspect(packed).tensors if "float" in t.dtype)
    run = _open(packed)
    pairs = [(original(feed), run(feed)) for feed in feeds(found.key, _EXACT_FEEDS)]
    found.outputs_equal = all(
        one.keys() == other.keys()
        and all(one[name].dtype == other[name].dtype and one[name].shape == other[name].shape for name in one)
        and all(one[name].tobytes() == other[name].tobytes() for name in one)
        for one, other in pairs
    )


def _content(tensor: onnx.TensorProto) -> tuple[str, tuple[int, ...], int, bytes]:
    if tensor.data_type == onnx.TensorProto.STRING:
        content = repr(list(tensor.string_data)).encode()
    else:
        content = numpy_helper.to_array(tensor).tobytes()
    return tensor.name, tuple(tensor.dims), tensor.data_type, content


def _compare(found: Measured, name: str, run: Run, original: Run) -> None:
    """Errors, and where there is a task the score, of the file called ``name``."""
    found.errors[name] = agreement(found.key, original, run)
    if found.key == "minilm":
        drawn = random.Random(COMPARISON).sample(entries(), _GLOSSES)
        glosses = ["; ".join((entry.definition, *entry.examples)) for entry in drawn]
        cosines = (minilm_embed(original, glosses) * minilm_embed(run, glosses)).sum(axis=1)
        found.glosses[name] = float(cosines.mean())
    if found.key in SCORED:
        found.scores[name] = score(found.key, run, _SCORED.get(found.key))


def _measure_dynamic(found: Measured, source: Path, target: Path, original: Run) -> None:
    """The peer: weights as int8 per channel, activations quantized while it runs. It may fail, and say why."""
    try:
        _quietly(lambda: quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8))
        content = target.read_bytes()
        run = _open(target)
        _compare(found, _DYNAMIC, run, original)
    except Exception as error:  # noqa: BLE001 - whatever the peer raises is its result
        found.dynamic = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    found.sizes |= {_DYNAMIC: len(content), "…, zipped": len(zlib.compress(content, 9))}


def _quietly(work: Callable[[], object]) -> None:
    """Without the quantizer's advice and its prints of shapes."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            work()
    finally:
        logging.disable(logging.NOTSET)


def _size_row(found: Measured) -> dict[str, object]:
    names = ("zip", "zstd 19", _DYNAMIC, "…, zipped", "conx lossless", _DEFAULT)
    row: dict[str, object] = {"model": found.key, "MB": f"{found.onnx / 1e6:.2f}"}
    row |= {name: f"{found.sizes[name] / found.onnx:.3f}" if name in found.sizes else "fails" for name in names}
    return row | {"MB, default": f"{found.sizes[_DEFAULT] / 1e6:.2f}"}


def _exact_row(found: Measured) -> dict[str, object]:
    return {
        "model": found.key,
        "tensors": found.tensors,
        "all bit for bit": "yes" if found.weights_equal else "NO",
        f"outputs of {_EXACT_FEEDS} inputs": "equal" if found.outputs_equal else "DIFFER",
        "file / raw float weights": f"{found.sizes['conx lossless'] / found.float_weights:.4f}",
        "float weights / raw": f"{found.coded_floats / found.float_weights:.4f}",
    }


def _error_rows(found: Measured) -> Iterator[dict[str, object]]:
    for name, figures in found.errors.items():
        rest = dict(figures)
        cosine = rest.pop("cosine", None) or rest.pop("mean_cosine", None)
        if "min_cosine" in rest:
            rest["worst 1 - cosine"] = 1 - rest.pop("min_cosine")
        yield {
            "model": found.key,
            "file": name,
            "1 - cosine": "" if cosine is None else _small(1 - cosine),
            "rel. rms": _small(rest.pop("rel_rms")) if "rel_rms" in rest else "",
            "max. rel.": _small(rest.pop("max_rel")) if "max_rel" in rest else "",
            "other agreement": _figures(rest),
            "score": _figures(found.scores.get(name, {})),
            "original's score": _figures(found.scores.get("original", {})),
        }
    if found.dynamic:
        yield {"model": found.key, "file": _DYNAMIC, "other agreement": f"fails: {found.dynamic}"}


def _small(error: float) -> str:
    return f"{error:.1e}" if abs(error) > _PERFECT else "0"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())


def _targets(found: Measured) -> Iterator[str]:
    """MiniLM's, as the project has set them."""
    exact = found.sizes["conx lossless"] / found.float_weights
    figures = [
        ("MB at the default", found.sizes[_DEFAULT] / 1e6, 20.5, False),
        (f"mean cosine of {_GLOSSES:,} glosses at the default", found.glosses[_DEFAULT], 0.9993, True),
        ("lossless file over raw float weights", exact, 0.83, False),
    ]
    for name, value, bound, at_least in figures:
        met = value >= bound if at_least else value <= bound
        yield f"- {name}: {value:.5g} (target {'≥' if at_least else '≤'} {bound:g}): {'met' if met else 'MISSED'}"
    if _DYNAMIC in found.glosses:
        yield f"- the same cosine of {_DYNAMIC}: {found.glosses[_DYNAMIC]:.5g}"


def _report(results: Sequence[Measured], seconds: float) -> str:
    machine = f"{os.cpu_count()} cores, {platform.machine().replace('_', '-')}"
    versions = f"conx {conx.__version__}, onnxruntime {onnxruntime.__version__}, numpy {np.__version__}"
    parts = [
        "# Sizes and errors",
        f"By `python -m benchmarks.sizes` in one run of {seconds / 60:.0f} minutes; {machine}; {versions}.",
        "## Sizes, as fractions of the .onnx",
        f"`{_DYNAMIC}` is onnxruntime's, with int8 weights per channel; the .onnx includes its external data.",
        table([_size_row(found) for found in results]),
        "## Lossless",
        table([_exact_row(found) for found in results]),
        "## Outputs against the original's, on real inputs",
        table([row for found in results for row in _error_rows(found)]),
    ]
    for found in results:
        if found.key == "minilm":
            parts += ["## MiniLM", "\n".join(_targets(found))]
    return "\n\n".join(parts) + "\n"


def main(keys: list[str]) -> int:
    """Measures all of `KEYS`, prints and writes the results file; named models are measured and printed only."""
    unknown = [key for key in keys if key not in MODELS]
    if unknown:
        print(f"unknown model: {', '.join(unknown)}; there are: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    results: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for key in keys or KEYS:
            results.append(measure(key, Path(folder)))
            print(f"{key}: {_size_row(results[-1])}, after {time.perf_counter() - begun:.0f} s", flush=True)
    text = _report(results, time.perf_counter() - begun)
    print(text)
    if not keys:
        _RESULT.parent.mkdir(exist_ok=True)
        _RESULT.write_text(text, "utf-8")
    return 0 if all(found.weights_equal and found.outputs_equal for found in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Time to open a session and memory while and after, of .conx against .onnx: `python -m benchmarks.loading [KEY ...]`.

Peers, in the same run: onnxruntime opening the .onnx as it is shipped, and the same model as one file (where it is
shipped with external data, which onnxruntime maps into memory without reading all of it). Files are warm. Each time is
the median of paired rounds in fresh processes, imports not counted; memory is what opening adds to a process that has
imported onnxruntime or conx.
"""

import os
import sys
import tempfile
from pathlib import Path

import onnx

import conx
from benchmarks.corpus import fetch
from benchmarks.measure import paired_times, peak_and_final_rss, table

KEYS = ("minilm", "vit_s", "opennsfw", "ppocr6_rec", "ddddocr", "piper", "magika", "silero")
RESULT = Path(__file__).with_name("results") / "loading.md"
ORT = ["import onnxruntime", "onnxruntime.set_default_logger_severity(3)"]
CONX = ["import conx", "conx.InferenceSession"]


def opening(path: Path) -> tuple[list[str], list[str]]:
    """(lines that import, lines that open) a session of a .conx or .onnx file on the CPU provider."""
    module = "conx" if path.suffix == ".conx" else "onnxruntime"
    line = f"session = {module}.InferenceSession({os.fspath(path)!r}, providers=['CPUExecutionProvider'])"
    return (ORT + CONX if module == "conx" else ORT), [line]


def compare(name: str, packed: Path, model: Path, rounds: int) -> dict[str, object]:
    """A row: time and memory of `packed` over those of `model`."""
    (setup, ours), (plain_setup, theirs) = opening(packed), opening(model)
    both = [*dict.fromkeys([*setup, *plain_setup])]
    times = paired_times(theirs, ours, rounds, both)
    base, _ = peak_and_final_rss([], both)
    peak, final = peak_and_final_rss(ours, both)
    plain_peak, plain_final = peak_and_final_rss(theirs, both)
    return {
        "model": name,
        ".onnx MB": total_bytes(model) / 1e6,
        ".conx MB": packed.stat().st_size / 1e6,
        "onnx ms": times.first_s * 1e3,
        "conx ms": times.second_s * 1e3,
        "time ratio": times.ratio,
        "onnx peak MB": plain_peak - base,
        "conx peak MB": peak - base,
        "peak ratio": peak / plain_peak,
        "onnx after MB": plain_final - base,
        "conx after MB": final - base,
        "after ratio": final / plain_final,
    }


def total_bytes(model: Path) -> int:
    """Bytes of a model with the external data beside it."""
    return conx.inspect(model).file_bytes


def rows(key: str, folder: Path, rounds: int) -> list[dict[str, object]]:
    """The comparisons of one model."""
    model = fetch(key)
    forms = {"": model}
    if total_bytes(model) > model.stat().st_size:
        forms = {" (external data)": model, " (one file)": folder / "one.onnx"}
        onnx.save(onnx.load(model), folder / "one.onnx")
    found = []
    for label in ("default", "lossless"):
        packed = folder / f"{label}.conx"
        conx.pack(model, packed, lossless=label == "lossless")
        found += [compare(f"{key}{form}, {label}", packed, path, rounds) for form, path in forms.items()]
    return found


def main(keys: list[str]) -> None:
    """Measure, print and write the table."""
    lines: list[dict[str, object]] = []
    for key in keys or KEYS:
        with tempfile.TemporaryDirectory() as folder:
            lines += rows(key, Path(folder), rounds=5)
        print(table(lines[-2:]), flush=True)
    text = table(lines)
    print(text)
    if not keys:
        RESULT.parent.mkdir(exist_ok=True)
        doc = (__doc__ or "").partition("\n")[2].strip()
        RESULT.write_text(f"# Opening a session\n\n{doc}\n\nRatios of memory are of whole processes.\n\n{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

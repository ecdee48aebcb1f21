"""Time of a run at float32 and in the ways of int8, with the error of each: `python -m benchmarks.latency [KEY ...]`.

Peers, in the same run and on the same weights: the float32 model in onnxruntime; the .conx made of it at precision int8
with accuracy_level 4 (activations int8 too, block by block) and 0 (activations float32); the int8 codes through
DequantizeLinear in the graph (which onnxruntime turns into MatMulNBits, with accuracy_level 4 by default); and
onnxruntime's own quantize_dynamic, per channel. Ways take turns within a round; a ratio is the median over the rounds
of a way's time over float32's. The error is the root mean square of the difference of all outputs over that of
float32's; of the ways of conx also that of the difference to the same .conx at fp32, which has the same weights.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

import conx
from benchmarks.corpus import fetch
from benchmarks.feeds import Feed
from benchmarks.inputs import feeds
from benchmarks.measure import output_error, table

RESULT = Path(__file__).with_name("results") / "latency.md"
SIDE = 1536
BATCHES = {"matmul": (1, 8, 64, 256), "minilm": (1, 32), "vit_s": (1, 32)}
ROUND_S = 2.0  # about how long all ways of one row are timed
CPU = ["CPUExecutionProvider"]
Run = Callable[[Feed], dict[str, Any]]


def matmul(folder: Path) -> Path:
    """A model of one MatMul by a matrix of normally distributed weights."""
    weight = np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32) / np.float32(SIDE**0.5)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [info("x", onnx.TensorProto.FLOAT, ["n", SIDE])],
        [info("y", onnx.TensorProto.FLOAT, ["n", SIDE])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), folder / "m.onnx")
    return folder / "m.onnx"


def with_dequantize_linear(model: Path, path: Path) -> Path:
    """The model with int8 codes for each matrix of a MatMul, one scale for each of its columns."""
    made = onnx.load(model)
    matrices = {node.input[1] for node in made.graph.node if node.op_type == "MatMul"}
    for tensor in [t for t in made.graph.initializer if t.name in matrices and len(t.dims) == 2]:
        weight = numpy_helper.to_array(tensor)
        scale = np.maximum(np.abs(weight).max(axis=0), 1e-30).astype(np.float32) / np.float32(127)
        name = tensor.name
        made.graph.initializer.remove(tensor)
        codes = np.rint(weight / scale).astype(np.int8)
        made.graph.initializer.extend(
            [numpy_helper.from_array(codes, f"{name}.q"), numpy_helper.from_array(scale, f"{name}.s")]
        )
        made.graph.node.insert(0, helper.make_node("DequantizeLinear", [f"{name}.q", f"{name}.s"], [name], axis=1))
    onnx.save(made, path)
    return path


def ways(model: Path, folder: Path, threads: int) -> dict[str, Run]:
    """What is compared, float32 first."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    packed, mapped, dynamic = folder / "m.conx", folder / "dq.onnx", folder / "dynamic.onnx"
    if not packed.exists():
        conx.pack(model, packed)
        with_dequantize_linear(model, mapped)
        quantize_dynamic(model, dynamic, weight_type=QuantType.QInt8, per_channel=True)
    sessions = {
        "float32": onnxruntime.InferenceSession(model, options, providers=CPU),
        "int8": conx.InferenceSession(packed, options, CPU, precision="int8"),
        "conx fp32": conx.InferenceSession(packed, options, CPU, precision="fp32"),
        "int8, level 0": conx.InferenceSession(packed, options, CPU, precision="int8", accuracy_level=0),
        "DequantizeLinear": onnxruntime.InferenceSession(mapped, options, providers=CPU),
        "quantize_dynamic": onnxruntime.InferenceSession(dynamic, options, providers=CPU),
    }
    return {name: partial(_run, session) for name, session in sessions.items()}


def _run(session: Any, feed: Feed) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def inputs(key: str, batch: int) -> Feed:
    """Inputs of so many samples; real ones where there are some."""
    if key == "matmul":
        return {"x": np.random.default_rng(1).standard_normal((batch, SIDE)).astype(np.float32)}
    found = feeds(key, 1)[0]
    return {name: np.concatenate([value[:1]] * batch) for name, value in found.items()}


def row(key: str, batch: int, threads: int, compared: dict[str, Run]) -> list[dict[str, object]]:
    """Times and errors of one model at one batch."""
    feed = inputs(key, batch)
    want = compared["float32"](feed)
    same = compared["conx fp32"](feed)
    beside = {name: output_error([same], [compared[name](feed)])["rel_rms"] for name in compared if "int8" in name}
    errors = {name: output_error([want], [run(feed)])["rel_rms"] for name, run in compared.items()}
    times: dict[str, list[float]] = {name: [] for name in compared}
    begun = time.perf_counter()
    while len(times["float32"]) < 5 or (time.perf_counter() - begun < ROUND_S and len(times["float32"]) < 200):
        for name, run in compared.items():
            start = time.perf_counter()
            run(feed)
            times[name].append(time.perf_counter() - start)
    return [
        {
            "model": key,
            "batch": batch,
            "threads": threads,
            "way": name,
            "ms": statistics.median(took) * 1e3,
            "over float32": statistics.median(a / b for a, b in zip(took, times["float32"], strict=True)),
            "error": errors[name],
            "beside fp32 of the .conx": beside.get(name),
        }
        for name, took in times.items()
    ]


def main(keys: list[str]) -> None:
    """Measure, print and write the table."""
    onnxruntime.set_default_logger_severity(3)
    lines: list[dict[str, object]] = []
    for key in keys or BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            model = matmul(Path(folder)) if key == "matmul" else fetch(key)
            for threads in (1, 2):
                compared = ways(model, Path(folder), threads)
                for batch in BATCHES[key]:
                    lines += row(key, batch, threads, compared)
                    print(table(lines[-len(compared) :]), flush=True)
    text = table(lines)
    if not keys:
        doc = (__doc__ or "").partition("\n")[2].strip()
        RESULT.write_text(f"# Time of a run\n\nMatMul by {SIDE}×{SIDE}. {doc}\n\n{text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A tied embedding as exporters write it, held once and twice: `python -m benchmarks.tied`.

The model is made here: rows of an embedding are gathered, and its transpose is multiplied by, which is a Transpose node
in one form of the model and an initializer of its own in the other. Peers, in the same run: the `original` graph of a
lossless .conx, which is the model's own, and its `fp32` graph, in which the embedding is one initializer. Memory is
what opening adds to a process; times of runs are medians of pairs that take turns, on one thread.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import conx
from benchmarks.measure import paired_times, peak_and_final_rss, table

RESULT = Path(__file__).with_name("results") / "tied.md"
ROWS, WIDTH = 30000, 1536
BATCHES = (1, 8, 64, 256)
FORMS = ("Transpose", "initializer")
CPU = ["CPUExecutionProvider"]


def make(form: str, path: Path) -> Path:
    """Write the model in one of its forms."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((ROWS, WIDTH), dtype=np.float32) * np.float32(WIDTH**-0.5)
    nodes = [helper.make_node("Gather", ["w", "i"], ["e"]), helper.make_node("MatMul", ["e", "v"], ["y"])]
    tensors = [numpy_helper.from_array(weight, "w")]
    if form == "Transpose":
        nodes.insert(1, helper.make_node("Transpose", ["w"], ["v"]))
    else:
        tensors.append(numpy_helper.from_array(np.ascontiguousarray(weight.T), "v"))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "tied",
        [info("i", onnx.TensorProto.INT64, [1, "n"])],
        [info("y", onnx.TensorProto.FLOAT, [1, "n", ROWS])],
        tensors,
    )
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def opening(packed: Path, precision: str, memory: str) -> list[str]:
    """Lines that open a session."""
    settings = f"precision={precision!r}, memory={memory!r}, providers={CPU}"
    return [f"session = conx.InferenceSession({str(packed)!r}, {settings})"]


def opened(form: str, packed: Path, memory: str) -> dict[str, object]:
    """A row: time and memory of opening."""
    setup = ["import conx", "conx.InferenceSession"]
    base, _ = peak_and_final_rss([], setup)
    original, shared = (opening(packed, precision, memory) for precision in ("original", "fp32"))
    times = paired_times(original, shared, rounds=5, setup=setup)
    peak, after = peak_and_final_rss(original, setup)
    our_peak, our_after = peak_and_final_rss(shared, setup)
    return {
        "the transpose is": form,
        "memory=": memory,
        "original, opened in s": times.first_s,
        "fp32": times.second_s,
        "original, peak MB": peak - base,
        "fp32, peak": our_peak - base,
        "original, MB afterwards": after - base,
        "fp32, afterwards": our_after - base,
    }


def ran(packed: Path, memory: str) -> list[dict[str, object]]:
    """Rows: time of a run, for each batch."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    original, shared = (
        conx.InferenceSession(packed, options, CPU, precision=precision, memory=memory)
        for precision in ("original", "fp32")
    )
    rows: list[dict[str, object]] = []
    for batch in BATCHES:
        feed = {"i": np.random.default_rng(1).integers(0, ROWS, (1, batch))}
        want, have = (session.run(None, feed)[0] for session in (original, shared))
        times = paired_times(partial(original.run, None, feed), partial(shared.run, None, feed), rounds=15)
        rows.append(
            {
                "memory=": memory,
                "batch": batch,
                "original, ms": times.first_s * 1e3,
                "fp32, ms": times.second_s * 1e3,
                "ratio": times.ratio,
                "largest difference": float(np.abs(have - want).max() / np.abs(want).max()),
            }
        )
    return rows


def main() -> None:
    """Measure, print and write the tables."""
    memory: list[dict[str, object]] = []
    runs: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            model = make(form, Path(folder) / "m.onnx")
            packed = conx.pack(model, lossless=True, precisions=["fp32"], verify=False).path
            memory += [opened(form, packed, setting) for setting in ("auto", "low")]
            if form == FORMS[-1]:
                runs = [row for setting in ("auto", "low") for row in ran(packed, setting)]
    doc = (__doc__ or "").partition("\n")[2].strip()
    text = f"# A tied embedding\n\n{doc}\n\n{table(memory)}\n\n{table(runs)}\n"
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()

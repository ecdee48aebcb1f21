"""A model of several gigabytes, packed, looked at and opened: `python -m benchmarks.large [GB]`.

The model is made here: shaped like a transformer, float16 with external data, its weights normally distributed, all
distinct and seeded. Memory is the peak of a process of its own, imports included. Opened is the int8 graph: at float32
such a model would not fit into a small machine.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from benchmarks.measure import table

RESULT = Path(__file__).with_name("results") / "large.md"
WIDTH = 2048
WIDER = 4 * WIDTH
MATRICES = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
MATRICES |= {"up": (WIDTH, WIDER), "down": (WIDER, WIDTH)}
LAYER_BYTES = 2 * sum(a * b for a, b in MATRICES.values())
ALIGNMENT = 4096

MEASURED = """
import time
start = time.perf_counter()
{code}
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(time.perf_counter() - start, int(peak.split()[1]) * 1024 / 1e6)
"""


def make(path: Path, layers: int) -> None:
    """Write the model: residual layers of products, an embedding before them."""
    draw = np.random.default_rng(0)
    nodes = [helper.make_node("Gather", ["embedding", "ids"], ["h0"])]
    tensors = []
    with open(path.with_suffix(".data"), "wb") as data:

        def add(name: str, shape: tuple[int, ...]) -> None:
            data.write(bytes(-data.tell() % ALIGNMENT))
            place, count = data.tell(), int(np.prod(shape))
            step = 1 << 24
            for at in range(0, count, step):
                part = draw.standard_normal(min(step, count - at), dtype=np.float32) * np.float32(shape[0] ** -0.5)
                data.write(part.astype(np.float16).tobytes())
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", path.with_suffix(".data").name), ("offset", place), ("length", 2 * count)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)

        add("embedding", (32000, WIDTH))
        for i in range(layers):
            for name, shape in MATRICES.items():
                add(f"layer{i}.{name}", shape)
            a, names = f"h{i}", [f"layer{i}.{name}" for name in MATRICES]
            nodes += [helper.make_node("MatMul", [a, n], [f"{n}.out"]) for n in names[:3]]
            nodes.append(helper.make_node("Mul", [f"{names[0]}.out", f"{names[1]}.out"], [f"s{i}"]))
            nodes.append(helper.make_node("Sigmoid", [f"s{i}"], [f"g{i}"]))
            nodes.append(helper.make_node("Mul", [f"g{i}", f"{names[2]}.out"], [f"m{i}"]))
            nodes.append(helper.make_node("MatMul", [f"m{i}", names[3]], [f"{names[3]}.out"]))
            nodes.append(helper.make_node("MatMul", [f"{names[3]}.out", names[4]], [f"u{i}"]))
            nodes.append(helper.make_node("Relu", [f"u{i}"], [f"r{i}"]))
            nodes.append(helper.make_node("MatMul", [f"r{i}", names[5]], [f"d{i}"]))
            nodes.append(helper.make_node("Add", [a, f"d{i}"], [f"h{i + 1}"]))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "large",
        [info("ids", TensorProto.INT64, ["batch", "length"])],
        [info(f"h{layers}", TensorProto.FLOAT16, ["batch", "length", WIDTH])],
        tensors,
    )
    made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    path.write_bytes(made.SerializeToString())


def measured(code: str) -> tuple[float, float]:
    """(seconds, peak MB) of some Python in a process of its own."""
    command = [sys.executable, "-c", MEASURED.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1:])
    seconds, peak = map(float, done.stdout.split()[-2:])
    return seconds, peak


def main(size: float) -> None:
    """Measure, print and write the table."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "large.onnx"
        make(model, max(1, round(size * 1e9 / LAYER_BYTES)))
        source = model.with_suffix(".data").stat().st_size / 1e6
        for label, settings in (("lossless", "lossless=True"), ("default", "")):
            packed = Path(folder) / f"{label}.conx"
            steps = {
                "pack": f"import conx; conx.pack({str(model)!r}, {str(packed)!r}, {settings})",
                "info": f"import conx; conx.inspect({str(packed)!r})",
                "open int8": "import conx; s = conx.InferenceSession("
                f"{str(packed)!r}, precision='int8', providers=['CPUExecutionProvider'])",
                "run int8": "import conx, numpy; s = conx.InferenceSession("
                f"{str(packed)!r}, precision='int8', providers=['CPUExecutionProvider']);"
                " s.run(None, {'ids': numpy.zeros((1, 4), 'int64')})",
            }
            for step, code in steps.items():
                start = time.perf_counter()
                seconds, peak = measured(code)
                row = {"file": label, "model MB": source, ".conx MB": packed.stat().st_size / 1e6}
                rows.append(row | {"step": step, "s": seconds, "peak MB": peak})
                print(table(rows[-1:]), f"{time.perf_counter() - start:.0f} s", flush=True)
            packed.unlink()
    text = table(rows)
    doc = (__doc__ or "").partition("\n")[2].strip()
    RESULT.write_text(f"# A large model\n\n{doc}\n\n{text}\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 6.0)

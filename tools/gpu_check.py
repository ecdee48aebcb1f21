"""Check decoding on a GPU: right, fast, without copies. One table at the end, and JSON. tools/gpu_check.md tells how.

    python tools/gpu_check.py [--json FILE] [--model FILE.conx] [--gigabytes 4] [--seconds 280]

Takes what is installed and says what it skipped. Exit status 1 where something is wrong or there is no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the bare machine has a copy of the tree, no package

import conx
from conx.codecs import Fill, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.base import Encoded
from conx.container.reader import Reader
from conx.dtypes import DType
from conx.feeds import generated_feeds
from conx.report import table
from conx.runtime.cuda.batches import Addresses, Batch, Recipe
from conx.runtime.cuda.device import Device, Launch
from conx.runtime.cuda.pipeline import Wanted, decode_on_device, recipe_of
from conx.runtime.cuda.recipes import Transposed, recipe_for
from conx.runtime.decode import decode_all, thread_count
from conx.runtime.diagnosis import device_facts, runtime_facts
from conx.runtime.providers import CUDA
from conx.runtime.ways import find_device
from tests.runtime.cuda.generated import KINDS, TARGETS, Coded, check, generated
from tools.gpu_model import write_conx, write_onnx

__all__ = ["main"]

AIM = 0.85  # of a device-to-device copy
USED = "Using user supplied initializer"


@dataclass(frozen=True)
class Row:
    """A line of the table; `state` is ok, FAILED, slow, skipped or empty."""

    what: str
    value: str
    state: str = ""


class Check:
    """What is measured, as far as time allows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given = arguments
        self.end = time.monotonic() + arguments.seconds
        self.rows: list[Row] = []
        self.device: Any = None
        self.threads = thread_count(None)

    def say(self, what: str, value: object, state: str = "") -> None:
        self.rows.append(Row(what, str(value), state))
        print(f"{time.monotonic() - self.end + self.given.seconds:6.1f} s  {what}: {value} {state}", flush=True)

    def step(self, name: str, work: Callable[[], None], needs: float) -> None:
        """Do one step, if there is time for it; a failure does not end the others."""
        if time.monotonic() + needs > self.end:
            self.say(name, f"no time left ({needs:.0f} s wanted)", "skipped")
            return
        try:
            work()
        except Exception as e:  # noqa: BLE001 - the other steps are worth having
            self.say(name, " ".join(f"{type(e).__name__}: {e}".split())[:300], "FAILED")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; answers 0, or 1 where one failed or there is no GPU."""
    parser = argparse.ArgumentParser(description="Check decoding on a GPU.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows there, too")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="FILE.conx", help="open it as well")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the synthetic model's float16 weights")
    parser.add_argument("--seconds", type=float, default=280, help="steps that would take longer are left out")
    parser.add_argument("--side", type=int, default=8192, help="rows of each of its matrices")
    parser.add_argument("--rows", type=int, default=8192, help="of 4096 elements, for the bandwidth of kernels")
    parser.add_argument("--tries", type=int, default=250, help="generated tensors of each kind")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return _open_loudly(given.child)
    run = Check(given)
    _load_libraries()
    for name, value in [*runtime_facts(), *device_facts()]:
        run.say(name, value)
    try:
        run.device = find_device(CUDA, {})
    except conx.UnsupportedError as e:
        run.say("GPU", e, "FAILED")
    else:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            _steps(run, Path(folder))
    print("\n" + table(["what", "value", "state"], [[r.what, r.value, r.state] for r in run.rows]))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in run.rows], indent=1) + "\n")
    return int(any(row.state == "FAILED" for row in run.rows))


def _load_libraries() -> None:
    """Let onnxruntime find the CUDA libraries of packages, PyTorch's among them."""
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        onnxruntime.preload_dlls()


def _steps(run: Check, folder: Path) -> None:
    run.step("kernels against NumPy", lambda: _correctness(run), 20)
    run.step("dequantize_array", lambda: _arrays(run), 10)
    run.step("bandwidth", lambda: _bandwidth(run), 30)
    small, large = folder / "small.conx", folder / "large.conx"
    write_conx(small, 4, 1024, run.threads)
    run.step("zero-copy", lambda: _zero_copy(run, small), 30)
    run.step("outputs", lambda: _outputs(run, small), 10)
    count = max(1, round(run.given.gigabytes * 1e9 / 2 / run.given.side**2))
    run.step("synthetic model", lambda: _synthetic(run, large, count, run.given.side), 100)
    for path in run.given.model:
        run.step(path.name, partial(_model, run, path), 20)


def _correctness(run: Check) -> None:
    """Generated tensors of all kinds, and conversions of many floats, bit for bit."""
    done = 0
    for seed in range(run.given.tries):
        for kind in KINDS:
            coded, target, how = generated(kind, seed, 3000)
            check(run.device, coded, target, **how)
            done += 1
    for seed in range(6):
        coded, target, how = generated("linear", 10_000 + seed, 128 * run.given.rows)
        check(run.device, coded, target, **how)
        done += 1
    count = 1024 * run.given.rows
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32).view("<f4")
    near = (np.random.default_rng(1).standard_normal(count) * 2.0 ** np.linspace(-27, 17, count)).astype("<f4")
    for values in (bits, near):
        for target in TARGETS:
            check(
                run.device,
                Coded(Encoded(Raw(), (), values), TensorMeta((values.size,), DType.FLOAT32), 1 << 21),
                target,
            )
            done += 1
    run.say("kernels against NumPy", f"{done} tensors, bit for bit", "ok")


def _arrays(run: Check) -> None:
    """`conx.dequantize_array` of CuPy's arrays against NumPy's."""
    import cupy

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (300, 500), dtype=np.uint8)
    zeros = rng.integers(0, 256, 500, dtype=np.uint8)
    scales = rng.random(500, np.float32)
    blocks = rng.random((300, 16), np.float32)
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (0.1, 7, {}),
        (scales, zeros, {"axis": 1}),
        (blocks, None, {"axis": 1, "block_size": 32}),
    ]
    for scale, zero, how in cases:
        for dtype in ("float16", "bfloat16", "float32"):
            wanted = conx.dequantize_array(codes, scale, zero, dtype=dtype, **how)
            for given in (scale, cupy.asarray(scale)):
                got = conx.dequantize_array(cupy.asarray(codes), given, zero, dtype=dtype, **how)
                if not np.array_equal(cupy.asnumpy(got), wanted):
                    raise AssertionError(f"{how}, {dtype}: other values than on the host")
    run.say("dequantize_array", f"{len(cases) * 6} CuPy arrays, equal", "ok")


# Bandwidth


def _bandwidth(run: Check) -> None:
    rows, columns = run.given.rows, 1 << 12  # by default 2^25 elements: 64 MiB of float16
    shape = (rows, columns)
    rng = np.random.default_rng(0)
    count = rows * columns
    codes = np.clip(np.rint(rng.laplace(0, 2, count)), -128, 127).astype(np.int8)
    floats = rng.standard_normal(count, dtype=np.float32)
    half = DType.FLOAT16
    copied = _copy_speed(run.device, 2 * count)
    run.say(f"device-to-device copy, {count >> 19} MiB", f"{copied / 1e9:.0f} GB/s read and written")
    linear = {
        "one scale": Linear(),
        "scales of rows": Linear(axis=0),
        "scales of columns": Linear(axis=1),
        "blocks of 32": Linear(axis=1, block=32),
        "zero points of columns": Linear(axis=1, zero_points=True),
        "two codes to a byte": Linear(axis=0, pack=2),
        "four codes to a byte": Linear(axis=0, pack=4),
    }
    for name, codec in linear.items():
        meta = TensorMeta(shape, DType.FLOAT32)
        number = codec.layout(meta).count
        zeros = np.full(number, 3, np.int8) if codec.zero_points else None
        encoded = Encoded(codec, codec.make_side(np.full(number, 0.01, "<f4"), zeros), codes)
        _speed(run, f"linear, {name}", encoded, meta, half, copied)
    whole = Encoded(Linear(axis=0), Linear().make_side(np.full(rows, 0.01, "<f4")), codes)
    for target in (DType.BFLOAT16, DType.FLOAT32):
        _speed(run, f"linear, scales of rows, {target.label}", whole, TensorMeta(shape, DType.FLOAT32), target, copied)
    _speed(run, "linear, transposed", whole, TensorMeta(shape, DType.FLOAT32), half, copied, transposed=True)
    palette = Palette(16, 2)
    side = palette.make_side(np.arange(16, dtype="<f4"))
    _speed(
        run,
        "palette",
        Encoded(palette, side, codes.view(np.uint8) & 15),
        TensorMeta(shape, DType.FLOAT32),
        half,
        copied,
    )
    halves = floats.astype("<f2")
    for name, codec_, values, dtype in (
        ("planes, float16", Planes(), halves, half),
        ("planes, float32 to float16", Planes(), floats, DType.FLOAT32),
        ("float32 to float16", Raw(), floats, DType.FLOAT32),
    ):
        _speed(run, name, Encoded(codec_, (), values), TensorMeta(shape, dtype), half, copied)
    fill = Encoded(Fill(), Fill().make_side(np.ones(1, "<f4")), np.empty(count, np.uint8))
    _speed(run, "fill", fill, TensorMeta(shape, DType.FLOAT32), half, copied)


def _copy_speed(device: Device, nbytes: int) -> float:
    from cupy.cuda import runtime

    a, b = device.alloc(nbytes), device.alloc(nbytes)
    return 2 * nbytes / _timed(lambda stream: runtime.memcpyAsync(b.address, a.address, nbytes, 3, stream.ptr), device)


def _timed(work: Callable[[Any], Any], device: Device, repeats: int = 20) -> float:
    """Seconds on the device, the median."""
    import cupy

    stream = device.stream()
    work(stream)
    found = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        work(stream)
        end.record(stream)
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(np.median(found))


def _speed(
    run: Check, name: str, encoded: Encoded, meta: TensorMeta, target: DType, copied: float, transposed: bool = False
) -> None:
    """The share of a copy's bandwidth that each kernel of a recipe reaches, all elements in one launch."""
    device: Device = run.device
    recipe: Recipe | None = recipe_for(encoded.codec, meta, encoded.side, target)
    assert recipe is not None
    if transposed:
        rows, columns = meta.shape
        recipe = Transposed(recipe, rows, columns, target.storage.itemsize)
    streams = encoded.segment(meta, 0, meta.count)
    batch = Batch(0, meta.count, (tuple(map(len, streams)),), meta.count)
    stage_bytes, scratch_bytes = recipe.room(batch)
    host = device.pinned(max(1, stage_bytes))
    recipe.write(batch, [streams], host)
    stage, scratch = device.alloc(max(1, stage_bytes)), device.alloc(max(1, scratch_bytes))
    out, flags = device.alloc(target.nbytes(meta.count)), device.alloc(4)
    stream = device.stream()
    device.upload(stage.address, host, stream)
    kept = [np.ascontiguousarray(t).reshape(-1).view(np.uint8) for t in recipe.tables if not isinstance(t, int)]
    tables = [device.alloc(each.nbytes) for each in kept]
    for memory, data in zip(tables, kept, strict=True):
        device.upload(memory.address, data, stream)
    device.synchronize()
    at = Addresses(stage.address, scratch.address, out.address, flags.address, tuple(t.address for t in tables))
    side = sum(map(len, encoded.side))
    for launch in recipe.launches(batch, at):
        seconds = _timed(partial(device.launch, [launch]), device)
        moved = _moved(launch, meta, target, streams, side)
        share = moved / seconds / copied
        kernel = launch.kernel.partition("_")[0]
        run.say(
            f"{name}: {kernel}",
            f"{share:.2f} of a copy ({moved / seconds / 1e9:.0f} GB/s)",
            "ok" if share >= AIM else "slow",
        )


def _moved(launch: Launch, meta: TensorMeta, target: DType, streams: Sequence[bytes], side: int) -> int:
    """Bytes that a kernel reads and writes."""
    values, packed = target.nbytes(meta.count), sum(map(len, streams))
    return {
        "linear": meta.count + values + side,
        "count": max(map(len, streams), default=0),
        "unpack": packed + meta.count,
        "palette": packed + values,
        "fill": values,
        "transpose": 2 * values,
    }.get(launch.kernel.partition("_")[0], meta.dtype.nbytes(meta.count) + values)


# The pipeline


def _synthetic(run: Check, path: Path, matrices: int, side: int) -> None:
    begun = time.perf_counter()
    write_conx(path, matrices, side, run.threads)
    total = matrices * side**2 * 2
    run.say("synthetic model", f"{total / 1e9:.2f} GB in float16, {path.stat().st_size / 1e9:.2f} GB packed, "
            f"made in {time.perf_counter() - begun:.0f} s, {run.threads} threads")  # fmt: skip
    _split(run, path, "synthetic")
    _sessions(run, path, "synthetic", {"x": np.ones((4, side), np.float16)}, onnx=True)


def _split(run: Check, path: Path, name: str, precision: str = "fp16") -> None:
    """Seconds from the file to float16 on the device, and of its parts."""
    device: Device = run.device
    with Reader(path) as reader:
        graph = reader.index.serving(precision)
        if graph is None:
            return run.say(f"{name}: file to device", f"no precision {precision}", "skipped")
        externals = [e for e in graph.externals if e.dtype_of(reader.index.tensors[e.tensor]) in TARGETS]
        wants = {Wanted(e.tensor, e.dtype_of(reader.index.tensors[e.tensor]), e.perm) for e in externals if not e.grid}
        pairs = [(w, recipe) for w in wants for recipe in [recipe_of(reader, w)] if recipe is not None]
        nbytes = sum(w.dtype.nbytes(reader.index.tensors[w.tensor].count) for w, _ in pairs)
        tensors = [reader.index.tensors[w.tensor] for w, _ in pairs]
        for turn in ("first", "again"):
            begun = time.perf_counter()
            found = decode_on_device(reader, pairs, device, run.threads)
            seconds = time.perf_counter() - begun
            run.say(
                f"{name}: file to device, {turn}", f"{seconds:.3f} s ({nbytes / seconds / 1e9:.2f} GB/s of float16)"
            )
            del found
        jobs = [(tensor, i) for tensor in tensors for i in range(tensor.segments)]
        begun = time.perf_counter()
        with ThreadPoolExecutor(run.threads) as pool:
            raw = sum(pool.map(lambda job: sum(map(len, reader.segment(*job))), jobs))
        seconds = time.perf_counter() - begun
        run.say(f"{name}: zstd alone", f"{seconds:.3f} s ({raw / seconds / 1e9:.2f} GB/s of codes)")
        pinned, memory = device.pinned(1 << 26), device.alloc(1 << 26)
        bus = (1 << 26) / _timed(lambda stream: device.upload(memory.address, pinned, stream), device)
        run.say(f"{name}: bus alone", f"{raw / bus:.3f} s ({bus / 1e9:.1f} GB/s from pinned memory)")
        begun = time.perf_counter()
        arrays = decode_all(reader, graph.externals, run.threads)
        run.say(f"{name}: file to host, float16", f"{time.perf_counter() - begun:.3f} s")
        del arrays
    return None


def _has_cuda(run: Check, what: str) -> bool:
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        return True
    run.say(what, f"this onnxruntime has no {CUDA}", "skipped")
    return False


def _free(run: Check) -> int:
    from cupy.cuda import runtime

    run.device.synchronize()
    return int(runtime.memGetInfo()[0])


def _sessions(run: Check, path: Path, name: str, feed: dict[str, Any], onnx: bool = False) -> None:
    """Opening on the device, on the host, and the .onnx: seconds, memory of the GPU, and the outputs."""
    if not _has_cuda(run, f"{name}: sessions"):
        return
    import onnxruntime

    plain = path.with_suffix(".onnx")
    if onnx:
        write_onnx(path, plain, run.threads)
    makers: dict[str, Callable[[], Any]] = {
        "device": lambda: conx.InferenceSession(path, providers=[CUDA], precision="fp16", device_decode=True),
        "host": lambda: conx.InferenceSession(path, providers=[CUDA], precision="fp16", device_decode=False),
    }
    if onnx:
        makers[".onnx"] = lambda: onnxruntime.InferenceSession(str(plain), providers=[CUDA])
    outputs = {}
    for way, make in makers.items():
        before, begun = _free(run), time.perf_counter()
        session = make()
        seconds = time.perf_counter() - begun
        run.say(f"{name}: session, {way}", f"{seconds:.3f} s, {(before - _free(run)) / 1e9:.2f} GB of the GPU")
        outputs[way] = session.run(None, feed)[0].astype(np.float64)
        del session
    for way, output in outputs.items():
        same = np.array_equal(output, outputs["host"], equal_nan=True)
        run.say(f"{name}: output, {way} against host", "equal" if same else _difference(output, outputs["host"]))


def _difference(got: Any, wanted: Any) -> str:
    return f"rms error {float(np.sqrt(np.mean((got - wanted) ** 2) / max(1e-300, np.mean(wanted**2)))):.1e}"


def _zero_copy(run: Check, path: Path) -> None:
    """The log says that the weights are used where they lie, one line for each."""
    if not _has_cuda(run, "zero-copy"):
        return
    command = [sys.executable, __file__, "--child", os.fspath(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=120)
    lines = sum(USED in line for line in (done.stdout + done.stderr).splitlines())
    run.say("zero-copy", f"{lines} of 4 weights used where they lie", "ok" if lines == 4 else "FAILED")


def _open_loudly(path: str) -> int:
    import onnxruntime

    _load_libraries()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 1
    conx.InferenceSession(path, options, providers=[CUDA], precision="fp16", device_decode=True)
    return 0


def _outputs(run: Check, path: Path) -> None:
    if not _has_cuda(run, "outputs against the CPU"):
        return
    feed = {"x": np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float16)}
    answers = [
        conx.InferenceSession(path, providers=[provider], precision="fp16").run(None, feed)[0].astype(np.float64)
        for provider in (CUDA, "CPUExecutionProvider")
    ]
    error = float(np.abs(answers[0] - answers[1]).max() / np.abs(answers[1]).max())
    run.say(
        "outputs against the CPU",
        f"largest difference {error:.1e} of the largest value",
        "ok" if error < 1e-2 else "FAILED",
    )


def _model(run: Check, path: Path) -> None:
    """A packed model: the parts of its loading, and memory and latency of its precisions."""
    _split(run, path, path.name)
    if not _has_cuda(run, f"{path.name}: precisions"):
        return
    with Reader(path) as reader:
        there = sorted({p for graph in reader.index.graphs for p in graph.precisions})
    reference: Any = None
    for precision in [p for p in ("fp32", "fp16", "int8") if p in there]:
        before, begun = _free(run), time.perf_counter()
        session = conx.InferenceSession(path, providers=[CUDA], precision=precision)
        opened, used = time.perf_counter() - begun, before - _free(run)
        feed = generated_feeds(session.get_inputs())[0]
        answer = session.run(None, feed)[0].astype(np.float64)
        reference = answer if reference is None else reference
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            session.run(None, feed)
            times.append(time.perf_counter() - begun)
        run.say(
            f"{path.name}: {precision} ({session.opened_by})",
            f"opened in {opened:.3f} s, {used / 1e6:.0f} MB of the GPU, {np.median(times) * 1e3:.2f} ms a run, "
            f"{_difference(answer, reference)}",
        )
        del session


if __name__ == "__main__":
    sys.exit(main())

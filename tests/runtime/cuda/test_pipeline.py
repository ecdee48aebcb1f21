"""From a file to a device's memory: order of operations, reuse of buffers, errors in any place."""

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conx
from conx.container.reader import Reader
from conx.container.records import External
from conx.dtypes import DType
from conx.errors import FormatError, IntegrityError
from conx.runtime.cuda import pipeline
from conx.runtime.cuda.pipeline import Wanted, decode_on_device, recipe_of
from conx.runtime.decode import decode_all
from tests.builders import model, normal, save
from tests.runtime.cuda.host import COMPILER, HostDevice, Kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


RULES = ("lossless", "bits:8", "bits:5", "bits:3", "bits:2", "palette:3", "bits:8,block:32")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of tensors coded in every way, of more segments than one."""
    folder = tmp_path_factory.mktemp("packed")
    given: dict[str, Any] = {f"w{i}": normal(700, 500, seed=i) for i in range(len(RULES))}
    given["few"] = np.random.default_rng(4).choice([-1.0, 0.5, 2.0], (600, 500)).astype(np.float32)
    given["same"] = np.full((500, 600), 0.1, np.float32)
    given["half"] = normal(600, 500, seed=50).astype(np.float16)
    given["exact"] = normal(600, 500, seed=51).astype(np.float16).astype(np.float32)
    given["small"] = normal(40, 40, seed=60)
    path = save(model("g (float[1] x) => (float[1] y) { y = Identity(x) }", given), folder / "m.onnx")
    rules = [(f"w{i}", rule) for i, rule in enumerate(RULES)] + [("exact", "lossless"), ("half", "lossless")]
    conx.pack(path, threads=1, precisions=(), overrides=rules)
    with Reader(path.with_suffix(".conx")) as reader:
        used = {tensor.codec for tensor in reader.index.tensors}
        assert used >= {"linear", "palette", "fill"}
        assert {t.params["pack"] for t in reader.index.tensors if t.codec == "linear"} >= {1, 2}
    return path.with_suffix(".conx")


def every_want(reader: Reader) -> list[Wanted]:
    """Every tensor in every type, and matrices with their axes exchanged too."""
    return [
        Wanted(number, dtype, perm)
        for number, tensor in enumerate(reader.index.tensors)
        if tensor.dtype.is_float
        for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
        for perm in (None, (1, 0))
    ]


def on_host(reader: Reader, wants: list[Wanted]) -> list[bytes]:
    bindings = [External(tensor=w.tensor, dtype=w.dtype, perm=w.perm, location="x", name="x") for w in wants]
    return [array.tobytes() for array in decode_all(reader, bindings)]


def on_device(reader: Reader, wants: list[Wanted], device: HostDevice, threads: int, **more: Any) -> list[bytes]:
    recipes = [recipe_of(reader, want) for want in wants]
    pairs = [(want, recipe) for want, recipe in zip(wants, recipes, strict=True) if recipe is not None]
    assert len(pairs) == len(wants)
    found = decode_on_device(reader, pairs, device, threads, **more)
    sizes = [want.dtype.nbytes(reader.index.tensors[want.tensor].count) for want in wants]
    return [memory.content()[:size].tobytes() for memory, size in zip(found, sizes, strict=True)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("threads", "elements"), [(1, 1 << 21), (3, 1)])
def test_the_values_are_those_of_the_host(
    threads: int, elements: int, packed: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "BATCH_ELEMENTS", elements)
    with Reader(packed) as reader:
        wants = every_want(reader)
        wanted = on_host(reader, wants)
        for seed in range(2):
            assert on_device(reader, wants, HostDevice(kernels, seed), threads) == wanted


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of one tensor in many segments, with escapes."""
    folder = tmp_path_factory.mktemp("one")
    weight = normal(2000, 1500) ** 3
    path = save(model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": weight}), folder / "m.onnx")
    conx.pack(path, threads=1, precisions=(), bits=6)
    return path.with_suffix(".conx")


WANT = Wanted(0, DType.FLOAT16)


@pytest.fixture(autouse=True)
def small_batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "one" in request.fixturenames:
        monkeypatch.setattr(pipeline, "BATCH_ELEMENTS", 1)


def test_a_stage_filled_too_early_would_be_noticed(
    one: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device of these tests finds what they are to find: without waiting, stages are overwritten."""
    with Reader(one) as reader:
        wanted = on_host(reader, [WANT])
        assert on_device(reader, [WANT], HostDevice(kernels), 1) == wanted
        monkeypatch.setattr(HostDevice, "wait", lambda *_: None)
        assert on_device(reader, [WANT], HostDevice(kernels), 1) != wanted


def test_memory_dropped_too_early_would_be_noticed(
    one: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that nobody holds are spoilt before the kernels read them."""
    original = pipeline._Pipeline._plan

    def careless(self: Any, wants: Any) -> Any:
        planned = original(self, wants)
        self.tables.clear()
        return planned

    with Reader(one) as reader:
        wanted = on_host(reader, [WANT])
        monkeypatch.setattr(pipeline._Pipeline, "_plan", careless)
        assert on_device(reader, [WANT], HostDevice(kernels), 1) != wanted


def test_slots_are_few_and_given_back(one: Path, kernels: Kernels) -> None:
    calls: list[str] = []
    device = HostDevice(kernels, on=calls.append)
    with Reader(one) as reader:
        segments = reader.index.tensors[0].segments
        assert segments > 8
        on_device(reader, [WANT], device, 2)
    assert calls.count("pinned") == 2 + pipeline.SPARE_SLOTS
    assert calls.count("alloc") <= 2 * (2 + pipeline.SPARE_SLOTS) + 4  # the values, tables, the flags
    assert calls.count("record") == segments
    assert calls.count("wait") >= segments - 2 - pipeline.SPARE_SLOTS
    gc.collect()
    assert all((array[256:-512] == 0xA5).all() for array in device.kept if array.size > 10_000), "memory is still held"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("what", ["alloc", "pinned", "upload", "launch", "record", "wait", "active"])
def test_an_error_of_the_device_ends_it(what: str, threads: int, one: Path, kernels: Kernels) -> None:
    """On whichever thread: it reaches the caller, no thread is left, and everything asked for is done before."""
    for late in (1, 4):
        seen: list[str] = []
        lock = threading.Lock()

        def fail(name: str, late: int = late, seen: list[str] = seen, lock: threading.Lock = lock) -> None:
            with lock:
                seen.append(name)
                if name == what and seen.count(what) == late:
                    raise MemoryError(f"{what} failed")

        device = HostDevice(kernels, on=fail)
        before = threading.active_count()
        with Reader(one) as reader:
            if late > 1 and (what == "active" or (what == "pinned" and threads == 1)):
                continue  # there are not so many
            with pytest.raises(MemoryError, match=f"{what} failed"):
                on_device(reader, [WANT], device, threads)
        assert threading.active_count() == before
        assert not any(device.streams), "given up while work was under way"


@pytest.mark.parametrize("threads", [1, 3])
def test_cancelled_by_the_caller(threads: int, one: Path, kernels: Kernels) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 3:
            raise KeyboardInterrupt

    device, before = HostDevice(kernels), threading.active_count()
    with Reader(one) as reader, pytest.raises(KeyboardInterrupt):
        on_device(reader, [WANT], device, threads, progress=stop)
    assert not any(device.streams)
    assert threading.active_count() == before


def test_progress(one: Path, kernels: Kernels) -> None:
    calls: list[tuple[int, int]] = []
    with Reader(one) as reader:
        on_device(reader, [WANT], HostDevice(kernels), 2, progress=lambda *call: calls.append(call))
    assert calls[-1] == (2000 * 1500 * 2,) * 2
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_chunk_in_the_middle(threads: int, one: Path, kernels: Kernels, tmp_path: Path) -> None:
    content = bytearray(one.read_bytes())
    content[len(content) // 2] ^= 1
    bad = tmp_path / "bad.conx"
    bad.write_bytes(content)
    device = HostDevice(kernels)
    with Reader(bad) as reader, pytest.raises(IntegrityError, match=r"tensor 'w', segment \d: .*bad\.conx"):
        on_device(reader, [WANT], device, threads)
    assert not any(device.streams)


def test_what_kernels_refuse_is_named(one: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is whole and malformed: only the kernel can tell."""
    original = Reader.segment

    def cut(self: Reader, tensor: Any, i: int) -> list[bytes]:
        streams = original(self, tensor, i)
        first = bytes(16) + streams[0][16:]  # escapes turned into others
        return [first, *streams[1:]] if i == 3 else streams

    monkeypatch.setattr(Reader, "segment", cut)
    with Reader(one) as reader:
        assert len(reader.index.tensors[0].streams) > 1, "packed without escapes"
        with pytest.raises(FormatError, match=r"tensor 'w', segment 3: "):
            on_device(reader, [WANT], HostDevice(kernels), 1)


def test_streams_of_other_sizes_than_planned(one: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reader.segment
    monkeypatch.setattr(Reader, "segment", lambda *given: [*original(*given)[:-1], b""])
    with Reader(one) as reader, pytest.raises(FormatError, match=r"tensor 'w', segment 0: streams of \[.*\] bytes"):
        on_device(reader, [WANT], HostDevice(kernels), 1)


def test_nothing_wanted(one: Path, kernels: Kernels) -> None:
    with Reader(one) as reader:
        assert decode_on_device(reader, [], HostDevice(kernels), 3) == []


def test_what_has_no_kernels(tmp_path: Path) -> None:
    given: dict[str, Any] = {"cube": normal(20, 30, 40), "numbers": np.arange(4000).reshape(40, 100)}
    path = save(model("g (float[1] x) => (float[1] y) { y = Identity(x) }", given), tmp_path / "m.onnx")
    conx.pack(path, threads=1, precisions=())
    with Reader(path.with_suffix(".conx")) as reader:
        for number, tensor in enumerate(reader.index.tensors):
            if tensor.name == "cube":
                assert recipe_of(reader, Wanted(number, DType.FLOAT16)) is not None
                assert recipe_of(reader, Wanted(number, DType.FLOAT16, (1, 0, 2))) is None
            else:
                assert recipe_of(reader, Wanted(number, DType.INT64)) is None

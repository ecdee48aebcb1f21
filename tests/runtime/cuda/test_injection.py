"""Weights handed over where they lie, on the CPU provider with host memory through the code that serves CUDA."""

import gc
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

import conx
from conx.container.records import External, Tensor
from conx.dtypes import DType
from conx.errors import IntegrityError, UnsupportedError
from conx.runtime import session as session_module
from conx.runtime import ways as ways_module
from conx.runtime.dlpack import CPU_MEMORY, CUDA_MEMORY, ort_value_at
from conx.runtime.folder import PrivateFolder
from conx.runtime.injection import FOLDER, Injection, candidates, give_values
from tests.builders import CPU, external, model, normal, one_thread, run, run_plain, same_bits, save
from tests.runtime.cuda.host import COMPILER, HostDevice, Kernels

Array = npt.NDArray[Any]

# Injection by hand


def stubbed(text: str, weights: dict[str, Array]) -> tuple[bytes, list[External], list[Tensor]]:
    """A model with external weights, and the records that a file would have of them."""
    made = model(text, weights)
    externals, tensors = [], []
    for number, tensor in enumerate(made.graph.initializer):
        external(tensor, f"conx-{number}")
        dtype = DType.from_number(tensor.data_type)
        assert dtype is not None
        tensors.append(Tensor(tensor.name, tuple(tensor.dims), dtype, "raw", {}, (), (), b"", None))
        externals.append(External(tensor=number, location=f"conx-{number}", name=tensor.name))
    return made.SerializeToString(), externals, tensors


MATMUL = "g (float[n, 300] x) => (float[n, 400] y) { y = MatMul(x, w) }"


def injected(model: bytes, externals: list[External], arrays: list[Array], kind: int = CPU_MEMORY) -> Any:
    options = one_thread()
    folder = PrivateFolder()
    injections = [
        Injection(each, DType.FLOAT32, array.shape, array.ctypes.data, array)
        for each, array in zip(externals, arrays, strict=True)
    ]
    more, values = give_values(options, injections, folder, kind, 0)
    try:
        return onnxruntime.InferenceSession(model + more, options, providers=CPU)
    finally:
        del values
        folder.remove()


def test_a_weight_is_used_where_it_lies() -> None:
    weight = normal(300, 400)
    message, externals, tensors = stubbed(MATMUL, {"w": weight})
    assert candidates(message, externals, tensors) == externals
    session = injected(message, externals, [weight])
    x = normal(3, 300, seed=1)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight, rtol=1e-4, atol=1e-3)
    weight[:] = 0
    assert not session.run(None, {"x": x})[0].any()
    assert [value.name for value in session.get_inputs()] == ["x"]


def test_nothing_else_need_live() -> None:
    message, externals, _ = stubbed(MATMUL, {"w": normal(300, 400)})
    weights = [normal(300, 400, seed=seed) for seed in range(20)]
    sessions = [injected(message, externals, [weight]) for weight in weights]
    gc.collect()
    x = normal(1, 300)
    for session, weight in zip(sessions, weights, strict=True):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight, rtol=1e-4, atol=1e-3)


def test_a_value_on_another_device_fails_loudly() -> None:
    """Then onnxruntime turns to the model's own data, and finds an empty file: never zeros."""
    weight = normal(300, 400)
    message, externals, _ = stubbed(MATMUL, {"w": weight})
    with pytest.raises(Exception, match=r"External initializer: w .*file_length: 0"):
        injected(message, externals, [weight], kind=CUDA_MEMORY)


def test_a_value_that_is_not_given_fails_loudly() -> None:
    message, externals, _ = stubbed(MATMUL, {"w": normal(300, 400)})
    options, folder = one_thread(), PrivateFolder()
    more, _ = give_values(onnxruntime.SessionOptions(), [Injection(externals[0], DType.FLOAT32, (300, 400), 0, None)],
                          folder, CPU_MEMORY, 0)  # fmt: skip
    options.add_session_config_entry(FOLDER, str(folder.path))
    with pytest.raises(Exception, match="file_length: 0"):
        onnxruntime.InferenceSession(message + more, options, providers=CPU)
    folder.remove()


def test_folding_would_read_the_file() -> None:
    """Why the weight is listed among the inputs: what looks like a constant is folded, and read from the empty file."""
    text = "g (float[n, 300] x) => (float[n, 400] y) { t = Transpose(w) y = MatMul(x, t) }"
    weight = normal(400, 300)
    message, externals, _ = stubbed(text, {"w": weight})
    session = injected(message, externals, [weight])  # an overridable one is left alone
    x = normal(2, 300)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_values_of_each_type(dtype: DType) -> None:
    memory = np.arange(24, dtype="<u4").view(np.uint8)
    value = ort_value_at(memory.ctypes.data, dtype, (3, 4), CPU_MEMORY)
    assert (value.element_type(), value.shape(), value.device_name()) == (dtype.number, [3, 4], "cpu")
    assert value.data_ptr() == memory.ctypes.data


def test_descriptions_do_not_leak() -> None:
    code = """if True:
        import resource
        import numpy as np
        from conx.dtypes import DType
        from conx.runtime.dlpack import CPU_MEMORY, ort_value_at
        a = np.zeros(4, np.float32)
        def many(count):
            for _ in range(count):
                ort_value_at(a.ctypes.data, DType.FLOAT32, (1,) * 60, CPU_MEMORY)
        many(2000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        many(40000)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    if sys.platform != "linux":
        pytest.skip("measures as Linux does")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert int(done.stdout) < 40000 * 600 / 1024 / 4  # kilobytes; a description has 544 bytes


def test_small_and_other_weights_are_no_candidates() -> None:
    text = """g (float[n, 300] x, int64[k] i) => (float[n, 4] y, float16[k, 900] z, double[k, 400] u, float[1] v) {
        a = MatMul(x, big) b = MatMul(a, small) y = Identity(b) z = Gather(half, i) u = Gather(wide, i)
        k = Gather(list, i) v = ReduceSum(k)
    }"""
    given: dict[str, Array] = {
        "big": normal(300, 400),
        "small": normal(400, 4),
        "half": normal(300, 900).astype(np.float16),
        "wide": normal(400, 400).astype(np.float64),
        "list": normal(100_000),
    }
    message, externals, tensors = stubbed(text, given)
    assert [each.name for each in candidates(message, externals, tensors)] == ["big", "half"]


# The whole of it, with the host for a device


def network() -> onnx.ModelProto:
    return model(
        """g (int64[n] i, float[n, 16, 9] p, bool c) => (float[n, 300] y, float[n, 8, 7] v) {
            e = Gather(table, i)
            h = MatMul(e, first)
            r = Relu(h)
            b = Gemm <transB = 1> (r, second, bias)
            t = MatMul(b, tied)
            y = If (c) <
                then_branch = th () => (float[n, 300] yt) { yt = MatMul(t, inner) },
                else_branch = el () => (float[n, 300] ye) { ye = Identity(t) }
            >
            v = Conv(p, kernel)
        }""",
        {
            "table": normal(900, 300),
            "first": normal(300, 500, seed=1, scale=0.05),
            "second": normal(900, 500, seed=2, scale=0.05),
            "bias": normal(900, seed=3),
            "tied": normal(900, 300).copy(),
            "inner": normal(300, 300, seed=5, scale=0.05),
            "kernel": normal(8, 16, 3, seed=6),
        },
    )


def feeds() -> dict[str, Any]:
    return {"i": np.array([3, 0, 899]), "p": normal(3, 16, 9), "c": np.array(True)}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(network(), tmp_path_factory.mktemp("network") / "m.onnx")
    conx.pack(path, lossless=True, threads=1)
    return path.with_suffix(".conx")


@pytest.fixture
def host_device(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[HostDevice]:
    """From here on the host is the device, and the CPU provider the one that runs on it."""
    if COMPILER is None:
        pytest.skip("no C++ compiler here")
    made: list[HostDevice] = []

    def found(provider: str, options: Any) -> HostDevice:
        assert provider == CPU[0]
        made.append(HostDevice(kernels))
        made[-1].number = int(options.get("device_id", 0))
        return made[-1]

    monkeypatch.setattr(ways_module, "find_device", found)
    return made


def wanted(packed: Path, **settings: Any) -> list[Any]:
    return run(conx.InferenceSession(packed, one_thread(), CPU, device_decode=False, **settings), feeds())


def close(wanted: list[Any], got: list[Any], tolerance: float = 1e-4) -> bool:
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(wanted, got, strict=True))


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody else makes folders."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def folders() -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("conx-*")]


@pytest.mark.parametrize("precision", ["original", "fp16"])
@pytest.mark.parametrize("device_decode", [True, "auto"])
def test_a_session_with_weights_on_the_device(
    device_decode: Any, precision: str, packed: Path, host_device: list[HostDevice]
) -> None:
    before = folders()
    reference = wanted(packed, precision=precision)
    session = conx.InferenceSession(packed, one_thread(), CPU, device_decode=device_decode, precision=precision)
    assert session.opened_by == "device"
    assert len(session._keep) == 3, "table and tied are one"
    names = {value.name for value in session.get_overridable_initializers()}
    assert names - {"tied"} == {"table", "first", "second"}
    assert precision == "fp16" or "tied" in names  # there, equal weights are one
    assert [value.name for value in session.get_inputs()] == ["i", "p", "c"]
    del host_device[:]
    gc.collect()
    for _ in range(3):
        assert close(reference, run(session, feeds()), 2e-2 if precision == "fp16" else 1e-4)
    assert folders() == before


def test_no_host_copy_of_the_weights_is_kept(packed: Path, host_device: list[HostDevice]) -> None:
    session = conx.InferenceSession(packed, one_thread(), CPU)
    assert len(host_device) == 1
    assert not [item for item in session._keep if isinstance(item, np.ndarray)]


@pytest.mark.usefixtures("host_device")
def test_lossy_weights_on_the_device(tmp_path: Path) -> None:
    path = save(network(), tmp_path / "m.onnx")
    conx.pack(path, threads=1, bits=4)
    session = conx.InferenceSession(path.with_suffix(".conx"), one_thread(), CPU, threads=2)
    assert session.opened_by == "device"
    assert close(wanted(path.with_suffix(".conx")), run(session, feeds()))


def test_set_providers_opens_the_same_way(packed: Path, host_device: list[HostDevice]) -> None:
    session = conx.InferenceSession(packed, one_thread(), CPU)
    session.set_providers(CPU)
    assert session.opened_by == "device"
    assert len(host_device) == 2
    assert close(wanted(packed), run(session, feeds()))


def test_the_device_number_is_the_providers(packed: Path, host_device: list[HostDevice]) -> None:
    for providers, options in ((CPU, [{"device_id": "3"}]), ([(CPU[0], {"device_id": 3})], None)):
        conx.InferenceSession(packed, one_thread(), providers, options, device_decode=True)
        assert host_device[-1].number == 3


@pytest.mark.parametrize("what", ["alloc", "upload", "launch"])
def test_a_device_that_fails(
    what: str, packed: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        if name == what:
            raise MemoryError("too little memory on the device")

    monkeypatch.setattr(ways_module, "find_device", lambda *_: HostDevice(kernels, on=fail))
    with caplog.at_level(logging.WARNING, "conx"):
        session = conx.InferenceSession(packed, one_thread(), CPU)
    assert session.opened_by == "memory"
    assert [r.getMessage() for r in caplog.records] == [
        "decoding on the GPU failed (MemoryError: too little memory on the device); decoding on the host"
    ]
    assert same_bits(wanted(packed), run(session, feeds()))
    with pytest.raises(UnsupportedError, match=r"device_decode=True: .*too little memory"):
        conx.InferenceSession(packed, one_thread(), CPU, device_decode=True)


@pytest.mark.usefixtures("host_device")
def test_an_onnxruntime_that_refuses(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostDevice, "kind", CUDA_MEMORY)  # which this onnxruntime does not run on
    before = folders()
    with caplog.at_level(logging.WARNING, "conx"):
        session = conx.InferenceSession(packed, one_thread(), CPU)
    assert session.opened_by == "memory"
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().endswith("; decoding on the host")
    assert same_bits(wanted(packed), run(session, feeds()))
    with pytest.raises(Exception, match="file_length: 0"):
        conx.InferenceSession(packed, one_thread(), CPU, device_decode=True)
    assert folders() == before


@pytest.mark.usefixtures("host_device")
def test_damage_is_damage_in_every_way(packed: Path) -> None:
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    before = folders()
    for choice in (True, "auto"):
        with pytest.raises(IntegrityError):
            conx.InferenceSession(bytes(content), one_thread(), CPU, device_decode=choice)
    assert folders() == before


@pytest.mark.usefixtures("host_device")
def test_progress_is_told_as_one(packed: Path) -> None:
    calls: list[tuple[int, int]] = []
    conx.InferenceSession(packed, one_thread(), CPU, progress=lambda *call: calls.append(call))
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)


def test_without_a_device(packed: Path) -> None:
    session = conx.InferenceSession(packed, one_thread(), CPU)
    assert session.opened_by == "memory"
    with pytest.raises(
        UnsupportedError, match="device_decode=True: the first provider is CPUExecutionProvider, not CUDA"
    ):
        conx.InferenceSession(packed, one_thread(), CPU, device_decode=True)
    with pytest.raises(ValueError, match="device_decode='yes': choose True, False, 'auto'"):
        conx.InferenceSession(packed, one_thread(), CPU, device_decode="yes")


@pytest.mark.usefixtures("host_device")
def test_without_large_matrices(tmp_path: Path) -> None:
    path = save(
        model("g (float[n, 30] x) => (float[n, 40] y) { y = MatMul(x, w) }", {"w": normal(30, 40)}), tmp_path / "m.onnx"
    )
    conx.pack(path, threads=1)
    assert conx.InferenceSession(path.with_suffix(".conx"), one_thread(), CPU).opened_by == "memory"
    with pytest.raises(UnsupportedError, match="no large matrix"):
        conx.InferenceSession(path.with_suffix(".conx"), one_thread(), CPU, device_decode=True)


# Other providers: copies and files


def opened_as(provider: str, packed: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session that is opened as for another provider, but with the CPU's."""
    monkeypatch.setattr(session_module, "usable_providers", lambda *_: [(provider, {})])
    return conx.InferenceSession(packed, one_thread(), CPU)


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "DmlExecutionProvider", "NewExecutionProvider"])
def test_other_providers_get_copies(provider: str, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened_as(provider, packed, monkeypatch)
    assert session.opened_by == "memory"
    assert [*session._keep] == []
    gc.collect()
    monkeypatch.undo()
    assert same_bits(wanted(packed), run(session, feeds()))


def test_a_provider_that_takes_files_only(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = folders()
    with caplog.at_level(logging.INFO, "conx"):
        session = opened_as("OpenVINOExecutionProvider", packed, monkeypatch)
    assert session.opened_by == "files"
    assert any("written to" in record.getMessage() for record in caplog.records)
    monkeypatch.undo()
    assert same_bits(wanted(packed), run(session, feeds()))
    if os.name != "nt":
        assert folders() == before


def test_a_provider_that_turns_out_to_take_files_only(
    packed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unmade(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(ways_module, "give_copies", unmade)  # so that onnxruntime misses them, and refuses
    with caplog.at_level(logging.WARNING, "conx"):
        session = opened_as("NewExecutionProvider", packed, monkeypatch)
    assert session.opened_by == "files"
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == ["trying with real files"]


def test_files_do_not_outlive_a_failure(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folders()
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    monkeypatch.setattr(session_module, "usable_providers", lambda *_: [("OpenVINOExecutionProvider", {})])
    with pytest.raises(IntegrityError):
        conx.InferenceSession(bytes(content), one_thread(), CPU)
    assert folders() == before


def test_types_that_numpy_lacks_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = TensorProto(data_type=TensorProto.BFLOAT16, dims=[40, 50])
    weight.raw_data = np.arange(2000, dtype="<u2").tobytes()
    flags = np.arange(2000).reshape(40, 50) % 3 == 0
    text = "g (int64[1] i) => (bfloat16[1, 50] y, bool[1, 50] z) { y = Gather(w, i) z = Gather(f, i) }"
    path = save(model(text, {"w": weight, "f": flags}), tmp_path / "m.onnx")
    conx.pack(path, threads=1, lossless=True)
    feed = {"i": np.array([7])}
    session = opened_as("CUDAExecutionProvider", path.with_suffix(".conx"), monkeypatch)
    assert same_bits(run_plain(path, feed), run(session, feed))

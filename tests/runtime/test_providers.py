"""Which providers will run a model, on machines that have them, half of them, or none."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import conx
from conx.runtime import providers
from conx.runtime.providers import CPU, CUDA, only_cpu, usable_providers
from tests.builders import model, normal, save

TENSORRT, AZURE = "TensorrtExecutionProvider", providers.AZURE


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    providers._can_be_made.cache_clear()
    yield
    providers._can_be_made.cache_clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """An onnxruntime built for GPUs; in the set is what works."""
    works: set[str] = set()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, AZURE, CPU])
    monkeypatch.setattr(providers, "_can_be_made", lambda name, *_: name in works)
    return works


def names(*asked: Any, options: Any = None) -> list[str]:
    return [name for name, _ in usable_providers(None, list(asked) or None, options)]


def test_on_this_machine() -> None:
    assert names()[-1] == CPU
    assert names(CPU) == [CPU]
    assert only_cpu(usable_providers(None, [CPU], None))


def test_those_unseen_in_session_options() -> None:
    options = onnxruntime.SessionOptions()
    assert usable_providers(options, [CPU], None) == [(CPU, {})]
    options.add_provider(CPU, {})
    assert usable_providers(options, [CPU], None) == []
    assert not only_cpu([])


def test_options_in_both_places(gpu: set[str]) -> None:
    gpu.add(CUDA)
    wanted = [(CUDA, {"device_id": "2"}), (CPU, {})]
    assert usable_providers(None, [CUDA, CPU], [{"device_id": 2}, {}]) == wanted
    assert usable_providers(None, [(CUDA, {"device_id": 2}), CPU], None) == wanted
    assert usable_providers(None, [(CUDA,), CPU], None) == [(CUDA, {}), (CPU, {})]
    assert usable_providers(None, [AZURE, CUDA], [{"y": 1}, {"device_id": 2}]) == wanted[:1]


def test_what_does_not_work_is_left_out(gpu: set[str], caplog: pytest.LogCaptureFixture) -> None:
    assert names() == [CPU]
    gpu.add(CUDA)
    assert names() == [CUDA, CPU]
    assert caplog.records == []  # nobody asked for TensorRT
    assert names(TENSORRT, CUDA, CPU) == [CUDA, CPU]
    assert names("ROCMExecutionProvider") == [CPU]  # not built into it
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} cannot be used here, so another provider runs the model; see `conx doctor`"
        for name in (TENSORRT, "ROCMExecutionProvider")
    ]


@pytest.mark.parametrize("outcome", ["made", "left out", "error"])
def test_a_provider_is_tried_once(outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a session of its own, after CUDA's libraries have been loaded."""
    calls: list[str] = []

    class Session:
        def __init__(self, *_: Any, providers: Any, **__: Any) -> None:
            calls.append(providers[0][0])
            if outcome == "error":
                raise RuntimeError("device_id is no number")

        def get_providers(self) -> list[str]:
            return [CUDA, CPU] if outcome == "made" else [CPU]

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: calls.append("libraries"))
    providers._load_cuda_libraries.cache_clear()
    for _ in range(2):
        assert names(CUDA, CPU) == ([CPU] if outcome == "left out" else [CUDA, CPU])
    assert calls == ["libraries", CUDA]
    assert names() == ([CUDA, CPU] if outcome == "made" else [CPU])


def test_what_loading_libraries_prints_goes_to_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        print("Failed to load libcublas.so.13")
        raise RuntimeError("no such folder")

    monkeypatch.setattr(onnxruntime, "preload_dlls", fail)
    providers._load_cuda_libraries.cache_clear()
    with caplog.at_level(logging.DEBUG, "conx"):
        providers._load_cuda_libraries()
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA's libraries: Failed to load libcublas.so.13",
        "CUDA's libraries: no such folder",
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore:Specified provider")  # onnxruntime's own
def test_without_its_gpu_a_file_is_opened_for_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same program on a machine with a GPU and on one without: not float16, which is slow here."""
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("there may be a GPU")
    made = model("g (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": normal(64, 64)})
    packed = conx.pack(save(made, tmp_path / "m.onnx"), threads=1).path
    session = conx.InferenceSession(packed, providers=[CUDA, CPU])
    assert session.precision == "fp32"
    assert session.get_providers() == [CPU]
    assert [record.getMessage() for record in caplog.records] == [
        f"{CUDA} cannot be used here, so another provider runs the model; see `conx doctor`"
    ]

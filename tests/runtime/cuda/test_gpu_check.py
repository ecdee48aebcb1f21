"""tools/gpu_check.py runs to its end, on a host that pretends to be a GPU: what it measures there means nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conx
from conx.runtime import ways
from conx.runtime.cuda.device import Device
from conx.runtime.providers import CUDA
from tests.builders import CPU, model, normal, save
from tests.runtime.cuda.host import COMPILER, HostDevice, Kernels
from tools import gpu_check

LITTLE = ["--gigabytes", "0.0006", "--side", "384", "--rows", "4", "--tries", "5"]


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        ways.find_device(CUDA, {})
    except conx.UnsupportedError:
        assert gpu_check.main(["--json", str(tmp_path / "found.json")]) == 1
    else:
        pytest.skip("there is one")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("GPU")
    assert last.endswith("FAILED")
    assert json.loads((tmp_path / "found.json").read_text())[-1]["state"] == "FAILED"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_every_step(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(work: Callable[[Any], Any], device: Device) -> float:
        work(device.stream())
        device.synchronize()
        return 1e-3

    for module in (gpu_check, ways):
        monkeypatch.setattr(module, "find_device", lambda *_: HostDevice(kernels))
    monkeypatch.setattr(gpu_check, "CUDA", CPU[0])
    monkeypatch.setattr(gpu_check, "_timed", once)
    monkeypatch.setattr(gpu_check, "_copy_speed", lambda *_: 1e9)
    monkeypatch.setattr(gpu_check, "_free", lambda _: 0)
    for name in ("_zero_copy", "_arrays"):  # another process, which has no such device; and CuPy's arrays
        monkeypatch.setattr(gpu_check, name, lambda *_: None)
    given = {"w": normal(300, 500), "v": normal(500, 300)}
    path = save(
        model("g (float[n, 300] x) => (float[n, 300] y) { h = MatMul(x, w) y = MatMul(h, v) }", given),
        tmp_path / "m.onnx",
    )
    conx.pack(path, threads=1)
    found = tmp_path / "found.json"
    assert gpu_check.main([*LITTLE, "--json", str(found), "--model", str(path.with_suffix(".conx"))]) == 0
    rows = {row["what"]: row for row in json.loads(found.read_text())}
    assert not [row for row in rows.values() if row["state"] in ("FAILED", "skipped")]
    assert rows["kernels against NumPy"]["state"] == "ok"
    assert rows["outputs against the CPU"]["state"] == "ok"
    for way in ("device", "host", ".onnx"):
        assert f"synthetic: session, {way}" in rows
        assert rows[f"synthetic: output, {way} against host"]["value"].startswith(
            ("equal", "rms error 0", "rms error 1")
        )
    assert "m.conx: fp16 (device)" in rows
    assert capsys.readouterr().out.splitlines()[-1].split("  ")[0] == [*rows][-1]

"""`conx doctor`: a report in any state of the installation."""

import subprocess
import sys
from pathlib import Path

import pytest

import conx
from conx.cli import main
from conx.doctor import diagnose
from tests.builders import model, normal, save


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = "g (float[n, 400] x) => (float[n, 500] y) { y = MatMul(x, w) }"
    path = save(model(text, {"w": normal(400, 500)}), tmp_path_factory.mktemp("doctor") / "m.onnx")
    conx.pack(path, threads=1)
    return path.with_suffix(".conx")


def test_what_is_installed() -> None:
    report = diagnose()
    rows = {line.split()[0]: line for line in report.splitlines()}
    assert rows["conx"].split()[1] == conx.__version__
    assert "CPUExecutionProvider" in rows["providers"]
    assert rows["usable"].endswith("CPUExecutionProvider")
    assert rows.keys() >= {"Python", "numpy", "zstandard", "msgpack", "onnx", "onnxruntime", "cupy"}


def test_the_way_of_a_file(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(packed)]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    ways = dict(line.split()[:2] for line in lines[2:])
    assert ways.keys() >= {"fp16", "fp32", "original"}
    assert set(ways.values()) == {"memory"}
    assert all("the first provider is CPUExecutionProvider" in line for line in lines[2:])


def test_a_damaged_file(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.conx"
    bad.write_bytes(packed.read_bytes()[:-1])
    assert main(["doctor", str(bad)]) == 1
    assert "bad.conx" in capsys.readouterr().err


def test_without_onnxruntime() -> None:
    code = "import sys; sys.modules['onnxruntime'] = None; from conx.doctor import diagnose; print(diagnose())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert 'pip install "conx-onnx[cpu]"' in done.stdout

"""`conx.verify`: what it measures, what it takes as inputs, and what it says of bad ones."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import conx
from conx.cli import main
from conx.feeds import generated_feeds, read_feeds
from conx.verification import _compare
from tests.builders import model, save

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[N,64] x, int64[N] ids) => (float[N,32] y, int64[N] best) {
    h = MatMul(x, W) e = Gather(E, ids) y = Add(h, e) best = ArgMax <axis = -1, keepdims = 0> (y)
}"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    draw = np.random.default_rng(0)
    model = parser.parse_model(TEXT)
    for name, shape in (("W", (64, 32)), ("E", (40, 32))):
        model.graph.initializer.append(numpy_helper.from_array(draw.standard_normal(shape).astype(np.float32), name))
    onnx.save(model, tmp_path / "model.onnx")
    conx.pack(tmp_path / "model.onnx", tmp_path / "model.conx")
    return tmp_path / "model.conx", tmp_path / "model.onnx"


def feed(count: int) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {"x": draw.standard_normal((count, 64)).astype(np.float32), "ids": np.arange(count)}


def test_errors_are_those_of_the_outputs(files: tuple[Path, Path]) -> None:
    packed, model = files
    report = conx.verify(packed, model, inputs=feed(5), precisions=["fp32"])
    want = conx.InferenceSession(model).run(None, feed(5))[0].astype(np.float64)
    got = conx.InferenceSession(packed, precision="fp32").run(None, feed(5))[0].astype(np.float64)
    (error, integers) = report.errors
    assert report.runs == 1
    assert error.rms == pytest.approx(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)), rel=1e-9)
    assert error.peak == pytest.approx(np.abs(got - want).max() / np.abs(want).max(), rel=1e-9)
    assert error.top1 == np.mean(want.argmax(-1) == got.argmax(-1))
    assert (error.output, integers.output, integers.nonfinite) == ("y", "best", 0)
    assert 0 < error.rms < 0.02


def test_a_lossless_file_has_no_error(files: tuple[Path, Path], tmp_path: Path) -> None:
    conx.pack(files[1], tmp_path / "exact.conx", lossless=True)
    report = conx.verify(tmp_path / "exact.conx", files[1])
    assert {e.precision for e in report.errors} == {"original", "fp32", "fp16", "int8"}
    exact = [e for e in report.errors if e.precision in ("original", "fp32")]
    assert all(e.rms == e.peak == 0 and e.equal == 1 for e in exact)
    assert 0 < report.worst("fp16").rms < 2e-3


@pytest.mark.parametrize("stray", [np.nan, np.inf])
def test_stray_values_are_counted(stray: float) -> None:
    want = np.array([[1.0, 2.0, np.nan, np.inf]], np.float32)
    got = want.copy()
    assert _compare("fp16", "y", [want], [got]).nonfinite == 0
    got[0, 0] = stray
    assert _compare("fp16", "y", [want], [got]).nonfinite == 1


def test_inputs(files: tuple[Path, Path], tmp_path: Path) -> None:
    specs = conx.InferenceSession(files[1]).get_inputs()
    one = feed(5)
    np.savez(tmp_path / "one.npz", **one)
    three: dict[str, Any] = {name: np.stack([value] * 3) for name, value in one.items()}
    np.savez(tmp_path / "three.npz", **three)
    assert len(read_feeds(tmp_path / "one.npz", specs)) == 1
    assert len(read_feeds(tmp_path / "three.npz", specs)) == 3
    assert len(read_feeds(tmp_path, specs)) == 4
    assert len(read_feeds([one, one], specs)) == 2
    with pytest.raises(ValueError, match="no array named 'ids'"):
        read_feeds({"x": one["x"]}, specs)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad\.npz"):
        read_feeds(tmp_path / "bad.npz", specs)


def test_generated_inputs_are_the_same_for_the_same_seed(files: tuple[Path, Path]) -> None:
    specs = conx.InferenceSession(files[1]).get_inputs()
    first, second = generated_feeds(specs, 3, 2), generated_feeds(specs, 3, 2)
    assert len(first) == 2
    for a, b in zip(first, second, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_the_command(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", str(files[0]), "--against", str(files[1])]
    assert main([*command, "--max-error", "0.1"]) == 0
    assert "fp16" in capsys.readouterr().out
    assert main([*command, "--max-error", "1e-9"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["verify", str(files[0]), "--against", str(files[0].with_name("gone.onnx"))]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_loop_without_end_is_ended(tmp_path: Path) -> None:
    text = """
    g (float[n] x) => (float[n] y) {
        c = Constant<value_int=1>() t = Cast<to=9>(c)
        y = Loop(, t, x) < body = b (int64 i, bool go, float[n] a) => (bool on, float[n] z) {
            on = Identity(go) z = Add(a, a)
        } >
    }"""
    path = save(model(text), tmp_path / "m.onnx")
    conx.pack(path, tmp_path / "m.conx", verify=False)
    with pytest.raises(conx.ModelError, match="terminate"):
        conx.verify(tmp_path / "m.conx", path, seconds=0.3)

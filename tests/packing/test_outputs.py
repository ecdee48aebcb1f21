"""Packing ends with the outputs of what was packed, and what passed may be chosen by itself."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import conx
from conx.container.reader import Reader
from conx.packing import outputs
from conx.runtime.providers import GPU
from conx.runtime.session import _choose
from conx.verification import OutputError, VerifyReport
from tests.builders import CPU, model, normal, save
from tests.packing.kit import matmul, pack

pytestmark = pytest.mark.usefixtures("no_sync")


def metadata(path: Path) -> dict[str, Any]:
    with Reader(path) as reader:
        return dict(reader.index.metadata)


def test_errors_are_reported_and_recorded(tmp_path: Path) -> None:
    packed = pack(matmul(normal(64, 64)), tmp_path, verify=True)
    assert packed.report.outputs is not None
    worst = {p: packed.report.outputs.worst(p).rms for p in ("fp32", "fp16", "int8")}
    assert 0 < worst["fp32"] <= worst["int8"] < 0.05
    assert packed.report.unmeasured == ""
    recorded = metadata(packed.path)
    assert recorded["passed"] == ["fp16"]
    assert {p: recorded["output_errors"][p]["y"]["rms"] for p in worst} == pytest.approx(worst, rel=0.1)


def test_the_file_does_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    made = matmul(normal(200, 300))
    files = [pack(made, tmp_path, name=f"m{n}", verify=True, threads=n).path for n in (1, 3)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_not_asked_for(tmp_path: Path) -> None:
    packed = pack(matmul(normal(64, 64)), tmp_path, verify=False)
    assert packed.report.outputs is None
    assert packed.report.unmeasured == "not asked for"
    assert "passed" not in metadata(packed.path)


def test_large_models_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MEASURED_BELOW", 1 << 13)
    packed = pack(matmul(normal(64, 64)), tmp_path, verify=True)
    assert packed.report.unmeasured == "0 MiB of weights are not run while packing; use `conx verify`"


def test_a_model_that_cannot_be_run_is_packed_all_the_same(tmp_path: Path) -> None:
    made = model(
        "g (float[n, 64] x) => (float[n, 64] y) { h = MatMul(x, w) y = mine.Operator(h) }",
        {"w": normal(64, 64)},
        '<ir_version: 8, opset_import: ["": 17, "mine": 1]>',
    )
    packed = pack(made, tmp_path, verify=True)
    assert packed.report.outputs is None
    assert "onnxruntime cannot open it" in packed.report.unmeasured
    assert "\n" not in packed.report.unmeasured
    assert ".tmp" not in packed.report.unmeasured


def report(**errors: tuple[float, int]) -> VerifyReport:
    found = [OutputError(p, "y", 1.0, rms, rms, None, 0.0, stray) for p, (rms, stray) in errors.items()]
    return VerifyReport("a", "b", 1, tuple(found))


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ({"fp32": (0.0, 0), "fp16": (0.001, 0)}, ["fp16"]),
        ({"fp32": (0.05, 0), "fp16": (0.055, 0)}, ["fp16"]),
        ({"fp32": (0.0, 0), "fp16": (0.02, 0)}, []),
        ({"fp32": (0.0, 0), "fp16": (0.001, 1)}, []),
        ({"fp32": (0.0, 0), "fp16": (float("nan"), 0)}, []),
        ({"fp32": (0.0, 0)}, []),
    ],
)
def test_what_passes(errors: dict[str, tuple[float, int]], wanted: list[str]) -> None:
    assert outputs.passed(report(**errors), 0.001) == wanted
    assert outputs.passed(report(**errors), None) == []
    assert outputs.passed(report(**errors), 0.05) == []


def test_what_auto_chooses(tmp_path: Path) -> None:
    made = matmul(normal(64, 64))
    lossy = pack(made, tmp_path, name="lossy", verify=True).path
    unmeasured = pack(made, tmp_path, name="unmeasured").path
    exact = pack(made, tmp_path, name="exact", verify=True, lossless=True).path

    def chosen(path: Path, *providers: str) -> str:
        with Reader(path) as reader:
            return _choose(reader, "auto", providers)

    for gpu in GPU:
        assert chosen(lossy, gpu, *CPU) == "fp16"
        assert chosen(unmeasured, gpu, *CPU) == "fp32"
        assert chosen(exact, gpu, *CPU) == "original"
    for providers in (CPU, [*CPU, "CUDAExecutionProvider"], ["QNNExecutionProvider", *CPU], []):
        assert chosen(lossy, *providers) == "fp32"


def test_what_goes_wrong_in_a_session_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Inputs that no feed can be made for."""
    made = model("g (seq(float[n]) x) => (float[n] y) { z = Constant<value_int=0>() y = SequenceAt(x, z) }", {})
    onnx.checker.check_model(made)
    with caplog.at_level(logging.WARNING):
        packed = pack(made, tmp_path, verify=True)
    assert "no values can be made for it; give inputs" in packed.report.unmeasured
    np.testing.assert_equal(save(made, tmp_path / "m.onnx").exists(), True)


OVERFLOWING = """
g (float[2, 64] x) => (float[2, 64] y) {
    a = MatMul(x, big) b = MatMul(a, small) c = Relu(b) y = MatMul(c, plain)
}"""


def test_what_overflows_in_float16_stays_float32(tmp_path: Path) -> None:
    """Products far beyond 65504 between two matrices whose values fit: only running shows it."""
    weights = {"big": normal(64, 64, scale=3000), "small": normal(64, 64, scale=1e-4), "plain": normal(64, 64)}
    packed = pack(model(OVERFLOWING, weights), tmp_path, verify=True, lossless=True)
    found = metadata(packed.path)
    assert set(found["fp16_kept_nodes"]) & {"a", "b"}
    assert found["fp16_error"] < 0.01
    assert found["passed"] == ["fp16"]
    halves = {t.name for t in packed.unpack(precision="fp16").graph.initializer if t.data_type == 10}
    assert "plain" in halves
    untried = metadata(pack(model(OVERFLOWING, weights), tmp_path, verify=False).path)
    assert untried["fp16_kept_nodes"] == {}


def test_inputs_of_ones_own(tmp_path: Path) -> None:
    """The same model does not overflow on the inputs that it is for."""
    weights = {"big": normal(64, 64, scale=300), "small": normal(64, 64, scale=1e-3), "plain": normal(64, 64)}
    inputs = {"x": normal(5, 2, 64, scale=0.1)}
    packed = pack(model(OVERFLOWING, weights), tmp_path, verify=True, calibration=inputs)
    assert packed.report.outputs is not None
    assert packed.report.outputs.runs == 5
    assert metadata(packed.path)["fp16_kept_nodes"] == {}


def test_float16_inputs_and_outputs(tmp_path: Path) -> None:
    packed = pack(matmul(normal(64, 64)), tmp_path, verify=True, half_io=True)
    session = conx.InferenceSession(packed.path, precision="fp16", providers=CPU)
    assert [v.type for v in (*session.get_inputs(), *session.get_outputs())] == ["tensor(float16)"] * 2
    assert packed.report.outputs is not None
    assert packed.report.outputs.worst("fp16").rms < 0.02
    plain = conx.InferenceSession(packed.path, precision="fp32", providers=CPU)
    assert plain.get_inputs()[0].type == "tensor(float)"


def test_models_of_16_bit_floats_are_float32_too(tmp_path: Path) -> None:
    packed = pack(matmul(normal(128, 64).astype(np.float16)), tmp_path, verify=True, lossless=True)
    kinds = {t.data_type for t in packed.unpack(precision="fp32").graph.initializer}
    assert kinds == {onnx.TensorProto.FLOAT}
    assert {t.data_type for t in packed.unpack(precision="fp16").graph.initializer} == {onnx.TensorProto.FLOAT16}
    assert [n.op_type for n in packed.unpack(precision="int8").graph.node].count("MatMulNBits") == 1
    feed = {"x": normal(3, 128).astype(np.float16)}
    answers = [
        conx.InferenceSession(packed.path, precision=p, providers=CPU).run(None, feed)[0]
        for p in ("fp32", "fp16", "int8")
    ]
    assert all(answer.dtype == np.float16 for answer in answers)
    for answer in answers[1:]:
        assert np.abs(answer.astype(np.float32) - answers[0]).max() < 0.03 * np.abs(answers[0]).max()

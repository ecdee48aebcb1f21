"""A machine that only loads: conx with the extra `cpu`, as a wheel, in an environment without onnx."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import conx
from tools.dev import ROOT, new_venv

pytestmark = pytest.mark.slow_venv

RUN = """
import sys
import numpy as np
import conx
packed, inputs, outputs = sys.argv[1:]
session = conx.InferenceSession(packed, providers=["CPUExecutionProvider"])
with np.load(inputs) as arrays:
    np.savez(outputs, *session.run(None, dict(arrays)))
"""

PACK = """
import sys
import conx
try:
    conx.pack(sys.argv[1], sys.argv[2])
except (conx.ConxError, ImportError) as error:
    print(error)
else:
    sys.exit("packed without onnx")
"""

OPEN_WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None  # as if it were not installed
import conx
try:
    conx.InferenceSession(sys.argv[1])
except (conx.ConxError, ImportError) as error:
    print(error)
else:
    sys.exit("opened without onnxruntime")
"""


@dataclass(frozen=True)
class Loader:
    """Python of the environment without onnx, and an empty folder to run it in."""

    python: Path
    folder: Path

    def __call__(self, *arguments: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs it apart from this environment: without the current folder and PYTHON… variables (-I)."""
        command = [str(self.python), "-I", *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, encoding="utf-8", check=False, timeout=600)
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    folder = tmp_path_factory.mktemp("loader")
    here = Loader(new_venv(folder / "venv"), folder)
    # The same onnxruntime as here, so that equal outputs may be asked for.
    here("-m", "pip", "install", "--quiet", f"{ROOT}[cpu]", f"onnxruntime=={onnxruntime.__version__}")
    return here


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding, a MatMul and a Gemm, of random weights, large enough to be coded."""
    rng = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)

    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["rows"]),
            helper.make_node("MatMul", ["rows", "w1"], ["hidden"]),
            helper.make_node("Relu", ["hidden"], ["active"]),
            helper.make_node("Gemm", ["active", "w2", "bias"], ["y"]),
        ],
        "loader",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [weight("table", 100, 64), weight("w1", 64, 64), weight("w2", 64, 32), weight("bias", 32)],
    )
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("lossless", [True, False])
def test_a_session_gives_the_same_outputs(loader: Loader, model: Path, tmp_path: Path, lossless: bool) -> None:
    packed, inputs, outputs = tmp_path / "model.conx", tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    ids = np.arange(0, 100, 7)
    conx.pack(model, packed, lossless=lossless)
    expected = conx.InferenceSession(packed, providers=["CPUExecutionProvider"]).run(None, {"ids": ids})
    np.savez(inputs, ids=ids)
    loader("-c", RUN, packed, inputs, outputs)
    with np.load(outputs) as got:
        np.testing.assert_array_equal(got["arr_0"], expected[0])


def test_onnx_is_not_there(loader: Loader) -> None:
    listed = loader("-m", "pip", "list", "--format=freeze").stdout.lower()
    installed = {line.partition("==")[0].replace("_", "-") for line in listed.splitlines()}
    assert {"conx-onnx", "onnxruntime"} <= installed
    assert {"onnx", "rich"} & installed == set()


def test_pack_names_its_extra(loader: Loader, model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.conx"
    assert 'pip install "conx-onnx[pack]"' in loader("-c", PACK, model, packed).stdout
    told = loader("-m", "conx", "pack", model, "-o", packed, status=1).stderr
    assert 'pip install "conx-onnx[pack]"' in told
    assert len(told.splitlines()) == 1, told
    assert not packed.exists()


def test_a_session_without_onnxruntime_names_its_extra(loader: Loader, model: Path, tmp_path: Path) -> None:
    conx.pack(model, tmp_path / "model.conx")
    told = loader("-c", OPEN_WITHOUT_ONNXRUNTIME, tmp_path / "model.conx").stdout
    assert 'pip install "conx-onnx[cpu]"' in told


def test_info_and_check_need_no_extra(loader: Loader, model: Path, tmp_path: Path) -> None:
    conx.pack(model, tmp_path / "model.conx")
    # 100 * 64 + 64 * 64 + 64 * 32 + 32 parameters
    assert "12576" in loader("-m", "conx", "info", "--json", tmp_path / "model.conx").stdout
    assert loader("-m", "conx", "info", tmp_path / "model.conx").stdout
    loader("-m", "conx", "check", "--deep", tmp_path / "model.conx")


def test_the_wheel_holds_every_file_of_the_package(loader: Loader) -> None:
    def files(package: Path) -> set[str]:
        found = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
        return {path.as_posix() for path in found if "__pycache__" not in path.parts}

    installed = Path(loader("-c", "import conx; print(conx.__file__)").stdout.strip()).parent
    assert ROOT not in installed.parents
    assert files(installed) == files(ROOT / "conx")

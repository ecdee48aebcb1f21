"""Every model of onnx's backend tests that onnxruntime runs gives the same bits once it was packed without loss.

Most of these models have tiny weights, or none: their operands are inputs. So each is packed twice: as it is, and
*outside*, with operands made initializers and everything but shapes and scalars taken out of the graph, as happens to
large weights.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import DATA_DIR, load_model_tests

import conx
from conx.graph import read
from tests.builders import CPU, one_thread, run, same_bits, tensors

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
BATCHES = 40
LEAST = 36  # models of a batch that run, of 44 (onnx 1.20) to 51 (1.23); onnxruntime lacks the operators of the others
LIGHT = ("densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet")

# Operators whose answer is random: of these only the shapes are compared. None of them runs in onnxruntime 1.32 unless
# it has a seed or nothing to do; the list keeps the tests right when that changes.
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}

# What onnxruntime wants to see in the graph whatever its size: shapes and the like, which are integers, and scales.
SHAPE_TYPES = {TensorProto.INT32, TensorProto.INT64, TensorProto.STRING}
SCALES = {"Resize", "Upsample"}
SCALAR = 4  # bytes; Range, Clip and others read them while the graph is optimized

pytestmark = pytest.mark.usefixtures("no_sync")


@dataclass(frozen=True)
class Case:
    """A model with inputs; read from disk when it is needed."""

    name: str
    given: Any

    def load(self) -> tuple[onnx.ModelProto, dict[str, Any]]:
        if self.given.model is not None:
            values = self.given.data_sets[0][0]
            model = self.given.model
            return model, {v.name: _plain(x) for v, x in zip(model.graph.input, values, strict=False)}
        folder = Path(self.given.model_dir)
        model = onnx.load(folder / "model.onnx")
        files = [folder / "test_data_set_0" / f"input_{i}.pb" for i in range(len(model.graph.input))]
        return model, {v.name: _read(v, f) for v, f in zip(model.graph.input, files, strict=True) if f.exists()}


def _plain(value: Any) -> Any:
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def _read(value: onnx.ValueInfoProto, file: Path) -> Any:
    content = file.read_bytes()
    kind = value.type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if kind == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(TensorProto.FromString(content))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx makes its inputs with NumPy, overflows included
        found = [Case(f"{kind}/{case.name}", case) for kind in KINDS for case in load_model_tests(kind=kind)]
    return sorted(found, key=lambda case: case.name)


def batches() -> list[Any]:
    return [pytest.param(i, marks=[pytest.mark.floor] if i % 8 == 0 else []) for i in range(BATCHES)]


@pytest.mark.parametrize("batch", batches())
def test_packed_without_loss(cases: list[Case], batch: int, tmp_path: Path) -> None:
    ran, wrong = 0, []
    for number, case in enumerate(cases[batch::BATCHES]):
        model, feeds = case.load()
        found = _difference(model, feeds, tmp_path / f"{number}.onnx", "original")
        ran += found is not None
        wrong += [f"{case.name}: {found}"] if found else []
    assert wrong == []
    assert ran >= LEAST


@pytest.mark.parametrize("batch", batches())
def test_packed_with_weights_outside(
    cases: list[Case], batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = outside = 0
    wrong = []
    for number, case in enumerate(cases[batch::BATCHES]):
        model, feeds = _fixed(*case.load())
        path = tmp_path / f"{number}.onnx"
        monkeypatch.setattr(read, "INLINE_MAX", _inline_max(model))
        found = _difference(model, feeds, path, "auto")
        ran += found is not None
        wrong += [f"{case.name}: {found}"] if found else []
        if found == "":
            outside += len(conx.inspect(path.with_suffix(".conx")).tensors)
    assert wrong == []
    assert ran >= LEAST
    assert outside >= 45, "weights were meant to be taken out of the graph"


@pytest.mark.parametrize("name", LIGHT)
def test_architectures(name: str, tmp_path: Path) -> None:
    """Whole networks, whose weights onnx makes with ConstantOfShape."""
    model = onnx.load(Path(DATA_DIR) / "light" / f"light_{name}.onnx")
    given = {tensor.name for tensor in model.graph.initializer}
    feeds = {v.name: _picture(v) for v in model.graph.input if v.name not in given}
    assert _difference(model, feeds, tmp_path / "model.onnx", "fp32") == ""


def _picture(value: onnx.ValueInfoProto) -> Any:
    shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
    return np.random.default_rng(0).random(shape, dtype=np.float32)


def _difference(model: onnx.ModelProto, feeds: Mapping[str, Any], path: Path, precision: str) -> str | None:
    """What packing changes: "" if nothing, None where onnxruntime does not run the model anyway."""
    content = model.SerializeToString()
    try:
        wanted = run(onnxruntime.InferenceSession(content, one_thread(), providers=CPU), feeds)
    except Exception:  # noqa: BLE001 - onnxruntime's errors have no common base but this
        return None
    path.write_bytes(content)
    packed = path.with_suffix(".conx")
    conx.pack(path, packed, lossless=True, threads=1, precisions=["fp32"], verify=False)
    if conx.unpack(packed, path.with_suffix(".again")).read_bytes() != content:
        return "unpacked, it is another file"
    try:
        session = conx.InferenceSession(packed, one_thread(), CPU, precision=precision, threads=1)
        got = run(session, feeds)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{type(error).__name__}: {error}"
    if _random(model.graph):
        wanted, got = _shapes(wanted), _shapes(got)
    return "" if same_bits(wanted, got) else "other outputs"


def _random(graph: onnx.GraphProto) -> bool:
    return any(node.op_type in RANDOM for node in graph.node)


def _shapes(values: list[Any]) -> list[Any]:
    return [np.shape(value) for value in values]


def _fixed(model: onnx.ModelProto, feeds: dict[str, Any]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model with its operands as initializers, and the inputs that are left."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    scales = {name for node in model.graph.node if node.op_type in SCALES for name in node.input[1:]}
    left = dict(feeds)
    for value in list(changed.graph.input):
        number = value.type.tensor_type.elem_type
        array = feeds.get(value.name)
        if isinstance(array, np.ndarray) and number and number not in SHAPE_TYPES and value.name not in scales:
            tensor = numpy_helper.from_array(array, value.name)
            tensor.data_type = number
            changed.graph.initializer.append(tensor)
            changed.graph.input.remove(value)
            del left[value.name]
    return changed, left


def _inline_max(model: onnx.ModelProto) -> int:
    """The size that leaves shapes and scalars in the graph."""
    every = [*tensors(model.graph), *_function_tensors(model)]
    return max([SCALAR, *(int(t.ByteSize()) for t in every if t.data_type in SHAPE_TYPES)])


def _function_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    for function in model.functions:
        yield from tensors(onnx.GraphProto(node=function.node))


def test_models_are_found(cases: list[Case]) -> None:
    assert len(cases) >= 1700

"""Weights that are dropped when the session exists are no longer read: they are overwritten, and the outputs stay."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import conx
from conx.runtime import ways
from conx.runtime.handover import Handed, hand_over
from conx.runtime.trial import is_repacked

Shape = tuple[int, ...]


def weight(name: str, shape: Shape) -> onnx.TensorProto:
    draw = np.random.default_rng(sum(name.encode()) + sum(shape))
    return numpy_helper.from_array(draw.standard_normal(shape).astype(np.float32), name)


def model(nodes: list[onnx.NodeProto], weights: dict[str, Shape], x: Shape) -> onnx.ModelProto:
    info = helper.make_tensor_value_info
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [info("x", TensorProto.FLOAT, x)],
            [info("y", TensorProto.FLOAT, None)],
            [weight(name, shape) for name, shape in weights.items()],
        ),
        ir_version=8,
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )


node = helper.make_node
MODELS = {
    "matmul": model([node("MatMul", ["x", "w"], ["y"])], {"w": (64, 48)}, (3, 64)),
    "matmul of one column": model([node("MatMul", ["x", "w"], ["y"])], {"w": (700, 1)}, (3, 700)),
    "matmul of one row": model([node("MatMul", ["x", "w"], ["y"])], {"w": (1, 700)}, (3, 1)),
    "matmul of odd dims, one row at a time": model([node("MatMul", ["x", "w"], ["y"])], {"w": (67, 131)}, (1, 67)),
    "matmul in a batch": model([node("MatMul", ["x", "w"], ["y"])], {"w": (64, 48)}, (2, 5, 3, 64)),
    "stacked matmul": model([node("MatMul", ["x", "w"], ["y"])], {"w": (4, 32, 48)}, (4, 3, 32)),
    "weight on the left": model([node("MatMul", ["w", "x"], ["y"])], {"w": (48, 64)}, (64, 3)),
    "matmul and bias": model(
        [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "b"], ["y"])], {"w": (64, 480), "b": (480,)}, (3, 64)
    ),
    "gemm": model([node("Gemm", ["x", "w", "b"], ["y"])], {"w": (64, 480), "b": (480,)}, (3, 64)),
    "gemm, transposed": model([node("Gemm", ["x", "w"], ["y"], transB=1, alpha=0.5)], {"w": (480, 64)}, (3, 64)),
    "fused matmul, transposed": model(
        [node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transB=1)], {"w": (48, 64)}, (2, 5, 3, 64)
    ),
    "fused matmul, all transposed": model(
        [node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transA=1, transB=1, alpha=0.5)],
        {"w": (480, 64)},
        (5, 64, 1),
    ),
    "gemm and activation": model(
        [node("Gemm", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])], {"w": (64, 480)}, (3, 64)
    ),
    "transposed activations": model(
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("MatMul", ["t", "w"], ["y"])], {"w": (64, 48)}, (64, 3)
    ),
    "transposed weight": model(
        [node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["x", "t"], ["y"])], {"w": (48, 64)}, (3, 64)
    ),
    "one weight, two matmuls": model(
        [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "w"], ["y"])], {"w": (64, 64)}, (3, 64)
    ),
    "embedding and head": model(
        [node("Gather", ["w", "i"], ["h"]), node("MatMul", ["x", "w"], ["k"]), node("Add", ["h", "k"], ["y"])],
        {"w": (64, 64)},
        (3, 64),
    ),
    "conv": model([node("Conv", ["x", "w"], ["y"])], {"w": (16, 8, 3, 3)}, (1, 8, 9, 9)),
    "recurrent": model(
        [node("LSTM", ["x", "w", "r"], ["y"], hidden_size=32)], {"w": (1, 128, 24), "r": (1, 128, 32)}, (7, 2, 24)
    ),
    "scaled matmul": model(
        [node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "s"], ["y"])], {"w": (64, 48), "s": (1,)}, (3, 64)
    ),
    "layer that is split": model(
        [
            node("MatMul", ["x", "q"], ["a"]),
            node("MatMul", ["x", "k"], ["b"]),
            node("Add", ["a", "b"], ["y"]),
        ],
        {"q": (64, 64), "k": (64, 64)},
        (3, 64),
    ),
}  # fmt: skip
MODELS["embedding and head"].graph.initializer.append(numpy_helper.from_array(np.array([2, 0, 63]), "i"))


@pytest.mark.floor
def test_this_onnxruntime_repacks() -> None:
    assert is_repacked(np.dtype(np.float32), (64, 64), 4)
    assert all(is_repacked(np.dtype(np.uint8), (64, 1, size), 4) for size in (16, 32, 64, 128, 256))
    assert not is_repacked(np.dtype(np.uint8), (64, 1, 64), 0)
    assert not is_repacked(np.dtype(np.float16), (64, 64), 4)


@pytest.mark.floor
@pytest.mark.parametrize("name", ["matmul", "gemm, transposed", "matmul in a batch", "one weight, two matmuls"])
@pytest.mark.parametrize("settings", [{}, {"accuracy_level": 0}], ids=str)
def test_dropped_codes_are_not_read(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[np.ndarray[Any, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Handed:
        found = hand_over(*args, **kwargs)
        handed.extend(item for item in found.until_open if isinstance(item, np.ndarray))
        return found

    monkeypatch.setattr("conx.graph.coded_nodes.SMALLEST", 1)
    onnx.save(MODELS[name], tmp_path / "model.onnx")
    conx.pack(tmp_path / "model.onnx", tmp_path / "model.conx", lossless=True)
    feed = {"x": np.random.default_rng(0).standard_normal(input_shape(name)).astype(np.float32)}
    monkeypatch.setattr(ways, "hand_over", recorded)
    session = conx.InferenceSession(
        tmp_path / "model.conx", precision="int8", providers=["CPUExecutionProvider"], **settings
    )
    (want,) = session.run(None, feed)
    assert len(handed) == (0 if settings else 1)
    for array in handed:
        assert array.dtype == np.uint8
        array.fill(77)
    np.testing.assert_array_equal(session.run(None, feed)[0], want)


@pytest.mark.parametrize("level", [0, 1, 4])
@pytest.mark.parametrize("zeros", [False, True])
def test_codes_of_the_models_own_products(
    level: int, zeros: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that computes with codes by itself, at a level of accuracy at which onnxruntime may read them again."""
    draw = np.random.default_rng(0)
    held: dict[str, Any] = {
        "b": draw.integers(0, 256, (64, 2, 32)).astype(np.uint8),
        "s": draw.random((64, 2)).astype(np.float32),
        **({"z": np.full((64, 2), 120, np.uint8)} if zeros else {}),
    }
    nbits = node("MatMulNBits", ["x", *held], ["y"], "", "", "com.microsoft", K=64, N=64, bits=8, block_size=32)
    nbits.attribute.append(helper.make_attribute("accuracy_level", level))
    made = model([nbits], {}, (3, 64))
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in held.items())
    onnx.save(made, tmp_path / "model.onnx")
    conx.pack(tmp_path / "model.onnx", tmp_path / "model.conx", verify=False)
    handed: list[np.ndarray[Any, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Handed:
        found = hand_over(*args, **kwargs)
        handed.extend(item for item in found.until_open if isinstance(item, np.ndarray))
        return found

    monkeypatch.setattr(ways, "hand_over", recorded)
    session = conx.InferenceSession(tmp_path / "model.conx", precision="original", providers=["CPUExecutionProvider"])
    assert len(handed) == (level == 4 and not zeros)
    for array in handed:
        array.fill(0)
    feed = {"x": draw.standard_normal((3, 64)).astype(np.float32)}
    (want,) = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"]).run(None, feed)
    np.testing.assert_array_equal(session.run(None, feed)[0], want)


@pytest.mark.floor
@pytest.mark.parametrize("name", MODELS)
def test_dropped_weights_are_not_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[np.ndarray[Any, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Handed:
        found = hand_over(*args, **kwargs)
        handed.extend(item for item in found.until_open if isinstance(item, np.ndarray))
        return found

    onnx.save(MODELS[name], tmp_path / "model.onnx")
    conx.pack(tmp_path / "model.onnx", tmp_path / "model.conx", lossless=True)
    feed = {"x": np.random.default_rng(0).standard_normal(input_shape(name)).astype(np.float32)}
    (want,) = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"]).run(None, feed)[:1]
    monkeypatch.setattr(ways, "hand_over", recorded)
    session = conx.InferenceSession(tmp_path / "model.conx", providers=["CPUExecutionProvider"])
    for array in handed:
        array.fill(np.nan)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, feed)[0], want)


def test_some_weights_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would pass if nothing were ever dropped."""
    dropped = []

    def recorded(*args: Any, **kwargs: Any) -> Handed:
        found = hand_over(*args, **kwargs)
        dropped.append(sum(isinstance(item, np.ndarray) for item in found.until_open))
        return found

    monkeypatch.setattr(ways, "hand_over", recorded)
    for name in ("matmul", "gemm, transposed", "fused matmul, transposed", "embedding and head", "conv"):
        onnx.save(MODELS[name], tmp_path / "model.onnx")
        conx.pack(tmp_path / "model.onnx", tmp_path / "model.conx", verify=False)
        conx.InferenceSession(tmp_path / "model.conx", providers=["CPUExecutionProvider"])
    assert dropped == [1, 1, 1, 0, 0]


def input_shape(name: str) -> list[int]:
    return [d.dim_value for d in MODELS[name].graph.input[0].type.tensor_type.shape.dim]

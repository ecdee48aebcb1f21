"""Equal weights are found whatever their shape, and only equal ones."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

import conx
from conx.graph import ties
from conx.graph.read import read_model
from conx.graph.ties import Tie, find_ties
from tests.builders import external, model, normal, save

Array = npt.NDArray[Any]


def found(weights: dict[str, Array | TensorProto], folder: Path) -> list[Tie]:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights)
    with read_model(save(made, folder / "m.onnx")) as source:
        seen: list[int] = []
        result = find_ties(source.weights, seen.append)
        assert seen == [w.nbytes for w in source.weights]
        return result


def stored(weights: dict[str, Array | TensorProto], folder: Path) -> list[tuple[int, tuple[int, ...] | None]]:
    return [(tie.stored, tie.perm) for tie in found(weights, folder)]


A = normal(30, 20)
CUBE = normal(6, 10, 14)
PAIRS: dict[str, tuple[Array, Array, tuple[int, ...] | None]] = {
    "equal": (A, A.copy(), None),
    "another shape": (A, A.reshape(20, 30), None),
    "flat": (A, A.reshape(600), None),
    "with dims of 1": (A, A.reshape(1, 30, 1, 20), None),
    "transposed": (A, A.T.copy(), (1, 0)),
    "transposed, with dims of 1": (A, A.T.copy().reshape(20, 1, 30), (1, 0)),
    "a square": (normal(20, 20), normal(20, 20).T.copy(), (1, 0)),
    "rotated": (CUBE, CUBE.transpose(1, 2, 0).copy(), (1, 2, 0)),
    "rotated back": (CUBE, CUBE.transpose(2, 0, 1).copy(), (2, 0, 1)),
    "last axes exchanged": (CUBE, CUBE.transpose(0, 2, 1).copy(), (0, 2, 1)),
    "float16": (A.astype("f2"), A.T.copy().astype("f2"), (1, 0)),
    "int64": (np.arange(600).reshape(30, 20), np.arange(600).reshape(30, 20).T.copy(), (1, 0)),
    "bytes": (
        np.arange(1200, dtype="i1").reshape(40, 30),
        np.arange(1200, dtype="i1").reshape(40, 30).T.copy(),
        (1, 0),
    ),
    "complex": (A.astype("c16"), A.T.copy().astype("c16"), (1, 0)),
    "not a number": (np.full((30, 20), np.nan, "f4"), np.full((30, 20), np.nan, "f4"), None),
}


@pytest.mark.floor
@pytest.mark.parametrize("pair", PAIRS)
def test_equal_weights(pair: str, tmp_path: Path) -> None:
    first, second, perm = PAIRS[pair]
    assert stored({"a": first, "b": second}, tmp_path) == [(0, None), (0, perm)]


def nearly(values: Array) -> Array:
    """One bit of one value is another."""
    changed = values.copy()
    changed.view(np.uint8).reshape(-1)[17] ^= 1
    return changed


DIFFERENT: dict[str, tuple[Array, Array]] = {
    "one bit": (A, nearly(A)),
    "one bit, transposed": (A, nearly(A.T.copy())),
    "zeros of both signs": (np.zeros((30, 20), "f4"), np.where(np.eye(30, 20) == 1, np.float32(-0.0), np.float32(0))),
    "another type, same bytes": (A, A.view("i4")),
    "another type, same values": (np.ones((30, 20), "f4"), np.ones((30, 20), "f2")),
    "float16 and its bits": (A.astype("f2"), A.astype("f2").view("u2")),
    "longer": (A, np.concatenate([A, A])),
    "in another order": (A, A[::-1].copy()),
    "rows exchanged": (A, A[[1, 0, *range(2, 30)]]),
    "columns exchanged, transposed": (A, A[:, ::-1].T.copy()),
    "same values in other dims": (normal(12, 50), normal(12, 50).T.copy().reshape(25, 24)),
    "outer axes exchanged": (CUBE, CUBE.transpose(2, 1, 0).copy()),
}


@pytest.mark.parametrize("pair", DIFFERENT)
def test_different_weights(pair: str, tmp_path: Path) -> None:
    """The last one is equal but for a permutation that is not looked for."""
    first, second = DIFFERENT[pair]
    assert stored({"a": first, "b": second}, tmp_path) == [(0, None), (1, None)]


def test_bfloat16_is_no_float16(tmp_path: Path) -> None:
    content = normal(30, 20).astype("f2").tobytes()
    kinds = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.UINT16)
    weights = {f"w{i}": TensorProto(data_type=kind, dims=[30, 20], raw_data=content) for i, kind in enumerate(kinds)}
    assert stored(dict(weights), tmp_path) == [(0, None), (1, None), (2, None)]


def test_four_bits(tmp_path: Path) -> None:
    """Equal ones are found; transposed ones are not looked for, since elements share bytes."""
    content = np.random.default_rng(0).bytes(1200)
    dims = ([40, 60], [60, 40], [48, 50])
    weights = {
        f"w{i}": TensorProto(data_type=TensorProto.INT4, dims=shape, raw_data=content) for i, shape in enumerate(dims)
    }
    other = TensorProto(data_type=TensorProto.INT4, dims=[60, 40], raw_data=content[::-1])
    assert stored({**weights, "other": other}, tmp_path) == [(0, None), (0, None), (0, None), (3, None)]


def test_many_copies(tmp_path: Path) -> None:
    weights: dict[str, Array | TensorProto] = {}
    for i in range(5):
        weights[f"a{i}"] = A
        weights[f"t{i}"] = A.T.copy()
        weights[f"b{i}"] = normal(30, 20, seed=1)
    found = stored(weights, tmp_path)
    assert found[:3] == [(0, None), (0, (1, 0)), (2, None)]
    assert found[3:] == [(0, None), (0, (1, 0)), (2, None)] * 4


def test_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are compared in pieces."""
    monkeypatch.setattr(ties, "BLOCK", 1 << 8)
    wide = normal(700, 300)
    changed = wide.T.copy()
    changed[-1, -1] += 1
    weights: dict[str, Array | TensorProto] = {
        "a": wide,
        "b": wide.reshape(300, 700),
        "c": wide.T.copy(),
        "d": changed,
        "e": normal(1, 210_000, seed=2),
    }
    assert stored(weights, tmp_path) == [(0, None), (0, None), (0, (1, 0)), (3, None), (4, None)]


def test_across_files(tmp_path: Path) -> None:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"a": A, "b": A, "c": A.T.copy()})
    for i, tensor in enumerate(made.graph.initializer[:2]):
        (tmp_path / f"{i}.bin").write_bytes(bytes(i) + external(tensor, f"{i}.bin", i))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert [t.stored for t in find_ties(source.weights)] == [0, 0, 0]


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("pair", PAIRS)
def test_ties_come_back(pair: str, tmp_path: Path) -> None:
    """One tensor is stored, and both weights are unpacked from it."""
    first, second, _ = PAIRS[pair]
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"a": first, "b": second})
    path = save(made, tmp_path / "m.onnx")
    report = conx.pack(path, lossless=True, threads=1)
    assert [(t.name, t.uses) for t in report.tensors] == [("a", 2)]
    assert conx.unpack(tmp_path / "m.conx", tmp_path / "u.onnx").read_bytes() == path.read_bytes()

"""The files that a model was come back byte for byte."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import conx
from conx.container.reader import Reader
from conx.packing import originals
from tests.builders import model, normal, save
from tests.packing.kit import pack_file

pytestmark = pytest.mark.usefixtures("no_sync")

TEXT = "g (float[n, 60] x) => (float[n, 60] y) { h = MatMul(x, w) i = MatMul(h, v) y = Add(i, b) }"
WEIGHTS = {"w": normal(60, 60), "v": normal(60, 60, seed=1), "b": normal(60, seed=2)}


def outside(folder: Path, places: dict[str, tuple[str, int | None]], contents: dict[str, bytes]) -> Path:
    """A model whose weights lie at (location, offset) in files of these contents."""
    made = model(TEXT, WEIGHTS)
    for tensor in made.graph.initializer:
        if tensor.name in places:
            location, offset = places[tensor.name]
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=location)
            if offset is not None:
                tensor.external_data.add(key="offset", value=str(offset))
                tensor.external_data.add(key="length", value=str(WEIGHTS[tensor.name].nbytes))
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return save(made, folder / "model.onnx")


W, V, B = (WEIGHTS[name].tobytes() for name in "wvb")
LAYOUTS: dict[str, tuple[dict[str, tuple[str, int | None]], dict[str, bytes]]] = {
    "one after the other": ({"w": ("data", 0), "v": ("data", len(W))}, {"data": W + V}),
    "gaps, and in another order": (
        {"v": ("data", 4096), "w": ("data", 64 + 4096 + len(V))},
        {"data": bytes(4096) + V + b"gap" * 21 + b"!" + W + b"the end"},
    ),
    "two files, folders": (
        {"w": ("sub/folder/w.bin", None), "v": ("./v..é.bin", 8)},
        {"sub/folder/w.bin": W, "v..é.bin": b"12345678" + V},
    ),
    "one within the other": ({"w": ("data", 0), "v": ("data", 400)}, {"data": W[:400] + V + b"tail"}),
    "small ones too": ({"w": ("data", 0), "b": ("data", len(W))}, {"data": W + B}),
    "the same bytes twice": ({"w": ("data", 0), "v": ("data", 0)}, {"data": W}),
}


def same_files(first: Path, second: Path, packed: Path) -> None:
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file() and p != packed)
    assert sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file()) == names
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.floor
@pytest.mark.parametrize("name", LAYOUTS)
def test_external_data(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    places, contents = LAYOUTS[name]
    if name == "one within the other":
        contents = {"data": contents["data"][: 400 + len(V)].ljust(max(len(W), 400 + len(V)), b"t")}
    path = outside(tmp_path / "a", places, contents)
    packed = pack_file(path, lossless=True)
    assert conx.unpack(packed.path, tmp_path / "b", original=True) == tmp_path / "b" / "model.onnx"
    same_files(tmp_path / "a", tmp_path / "b", packed.path)


def odd_messages() -> dict[str, bytes]:
    plain = model(TEXT, WEIGHTS)
    typed = model(TEXT, WEIGHTS)
    for tensor in typed.graph.initializer:
        values = np.frombuffer(tensor.raw_data, np.float32)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values)
    halves = helper.make_tensor("w", TensorProto.FLOAT16, [60, 60], normal(60, 60).astype(np.float16).reshape(-1))
    integers = model("g (int64[n] i) => (int64[n] y) { y = Gather(w, i) }", {})
    integers.graph.initializer.append(helper.make_tensor("w", TensorProto.INT64, [1000], range(1000)))
    varints = model("g (float[n] x) => (float[n] y) { y = Identity(x) }", {})
    varints.graph.initializer.append(halves)
    message = plain.SerializeToString()
    return {
        "plain": message,
        "typed fields": typed.SerializeToString(),
        "varints of float16": varints.SerializeToString(),
        "varints of int64": integers.SerializeToString(),
        "unknown fields, and a length longer than needed": message + b"\xfa\x3f\x83\x80\x00abc",
    }


@pytest.mark.parametrize("name", odd_messages())
def test_one_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(odd_messages()[name])
    packed = pack_file(path, lossless=True)
    assert conx.unpack(packed.path, tmp_path / "again.onnx").read_bytes() == path.read_bytes()
    assert conx.unpack(packed.path, tmp_path / "b" / "c", original=True).read_bytes() == path.read_bytes()


def test_it_costs_little(tmp_path: Path) -> None:
    path = save(model(TEXT, {name: normal(*w.shape, seed=7) for name, w in WEIGHTS.items()}), tmp_path / "m.onnx")
    sizes = [pack_file(path, lossless=True, original=wanted).report.bytes for wanted in (True, False)]
    assert 0 < sizes[0] - sizes[1] < 200


@pytest.mark.parametrize("settings", [{}, {"lossless": True, "original": False}], ids=str)
def test_what_is_not_kept(settings: dict[str, Any], tmp_path: Path) -> None:
    packed = pack_file(save(model(TEXT, WEIGHTS), tmp_path / "m.onnx"), **settings)
    with Reader(packed.path) as reader:
        assert reader.index.originals == ()
    with pytest.raises(conx.UnsupportedError, match="does not hold the original files"):
        conx.unpack(packed.path, tmp_path / "b", original=True)
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="original and precision exclude each other"):
        conx.unpack(packed.path, tmp_path / "b", original=True, precision="fp32")


def test_a_name_that_not_every_system_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = outside(tmp_path, {"w": ("aa:b", 0)}, {"aa:b": W})
    with caplog.at_level(logging.WARNING):
        packed = pack_file(path, lossless=True)
    assert "cannot be brought back as they were: 'aa:b' has a character that not every system takes" in caplog.text
    onnx.checker.check_model(packed.unpack())


def test_too_much_between_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "MOST_BETWEEN", 1000)
    with caplog.at_level(logging.WARNING):
        pack_file(outside(tmp_path, {"w": ("data", 2000)}, {"data": bytes(2000) + W}), lossless=True)
    assert "too much lies between weights" in caplog.text


def test_nothing_stays_where_one_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    places, contents = LAYOUTS["two files, folders"]
    packed = pack_file(outside(tmp_path / "a", places, contents), lossless=True)
    (tmp_path / "b" / "v..é.bin").mkdir(parents=True)
    with pytest.raises(OSError, match="is a folder"):
        conx.unpack(packed.path, tmp_path / "b", original=True)
    assert [p.name for p in (tmp_path / "b").rglob("*")] == ["v..é.bin"]


def test_the_packed_file_is_not_overwritten(tmp_path: Path) -> None:
    path = save(model(TEXT, WEIGHTS), tmp_path / "m.onnx")
    conx.pack(path, tmp_path / "packed.conx", lossless=True, verify=False)
    path.unlink()
    (tmp_path / "packed.conx").rename(path)
    with pytest.raises(ValueError, match=r"is the \.conx file itself"):
        conx.unpack(path, tmp_path, original=True)

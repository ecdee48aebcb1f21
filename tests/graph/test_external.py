"""External data: found wherever onnxruntime finds it, and never outside of what belongs to the model."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import conx
from conx.errors import ModelError
from conx.graph.read import read_model
from tests.builders import external, model, normal, run_plain, same_bits, save

X = {"x": normal(1, 40)}
W = normal(40, 30, seed=1)


def linear(location: str = "w.bin", offset: int | None = None, length: int | None = None) -> onnx.ModelProto:
    """One matrix product and a bias; the matrix is external."""
    made = model(
        "g (float[1, 40] x) => (float[1, 30] y) { h = MatMul(x, w) y = Add(h, b) }", {"w": W, "b": normal(30, seed=2)}
    )
    external(made.graph.initializer[0], location, offset, length)
    return made


def check(path: Path) -> None:
    """The weight is read, and packing gives what onnxruntime does."""
    with read_model(path) as source:
        assert source.weights[0].read().tobytes() == W.tobytes()
    packed = path.parent / "packed.conx"
    conx.pack(path, packed, lossless=True, threads=1, verify=False)
    again = conx.unpack(packed, path.parent / "again.onnx")
    assert same_bits(run_plain(path, X), run_plain(again, X))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert reason in str(caught.value)
    assert "tensor 'w'" in str(caught.value)


NAMES = [
    "w.bin",
    "model..v2.bin",
    "..bin",
    "model.onnx.data",
    "weights with spaces & signs'.bin",
    "gewichte-größe-重み-🎛.bin",
    "sub/folder/w.bin",
    "./w.bin",
    "sub//w.bin",
    "-w",
]


@pytest.mark.floor
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_sync")
def test_names(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(W.tobytes())
    check(save(linear(name), tmp_path / "m.onnx"))


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("offset", [None, 0, 1, 7, 4097])
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("rest", [0, 13])
def test_ranges(offset: int | None, stated: bool, rest: int, tmp_path: Path) -> None:
    """Odd offsets, with and without a length, to the end of the file and short of it."""
    (tmp_path / "w.bin").write_bytes(b"\xff" * (offset or 0) + W.tobytes() + b"\xff" * rest)
    length = W.nbytes if stated or rest else None
    check(save(linear(offset=offset, length=length), tmp_path / "m.onnx"))


def test_without_a_length_the_dims_count(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes() + bytes(100))
    with read_model(save(linear(), tmp_path / "m.onnx")) as source:
        assert source.weights[0].read().tobytes() == W.tobytes()


def test_tensors_in_any_order_and_overlapping(tmp_path: Path) -> None:
    made = linear(offset=400)
    for offset in (4, 0, 1600, 2):
        tensor = numpy_helper.from_array(np.zeros(600, np.float32), f"at {offset}")
        external(tensor, "w.bin", offset)
        made.graph.initializer.append(tensor)
    content = np.random.default_rng(0).bytes(400) + W.tobytes()
    (tmp_path / "w.bin").write_bytes(content)
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        for weight, offset in zip(source.weights, (400, 4, 0, 1600, 2), strict=True):
            assert weight.read().tobytes() == content[offset : offset + weight.nbytes]
        assert source.size == len(content) + (tmp_path / "m.onnx").stat().st_size


def test_small_external_tensors_become_inline(tmp_path: Path) -> None:
    made = linear()
    data = external(made.graph.initializer[1], "b.bin", 0, 120)
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    (tmp_path / "b.bin").write_bytes(data)
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert [w.name for w in source.weights] == ["w"]
        bias = source.proto.graph.initializer[1]
        assert bias.raw_data == data
        assert bias.data_location == TensorProto.DEFAULT
        assert not bias.external_data


def test_external_data_in_the_model_file_itself(tmp_path: Path) -> None:
    content = linear("m.onnx", 0, W.nbytes).SerializeToString()
    made = linear("m.onnx", 10_000, W.nbytes)
    inside = made.SerializeToString()
    padding = b"\x32" + b"\xa8\x46" + b" " * 9000  # a doc string, so that the file is long enough
    (tmp_path / "m.onnx").write_bytes(inside + padding)
    refused(tmp_path / "m.onnx", "outside of 'm.onnx'")
    (tmp_path / "m.onnx").write_bytes(content + padding)
    with read_model(tmp_path / "m.onnx") as source:
        assert source.weights[0].read().tobytes() == (content + padding)[: W.nbytes]


HOSTILE = {
    "../w.bin": "leaves the model's folder",
    "sub/../../w.bin": "leaves the model's folder",
    "sub/../w.bin": "leaves the model's folder",
    "..": "leaves the model's folder",
    "..\\w.bin": "leaves the model's folder",
    "/etc/passwd": "leaves the model's folder",
    "\\server\\w.bin": "leaves the model's folder",
    "C:\\w.bin": "leaves the model's folder",
    "c:w.bin": "leaves the model's folder",
    "": "names no file",
    "w\0.bin": "names no file",
    "w.bin\n": "names no file",
    "none.bin": "is not there",
    "w.bin/w.bin": "is not there",
    "n" * 300: "is not there",
    "sub": "is a folder or a device",
    ".": "is a folder or a device",
}


@pytest.mark.parametrize("location", HOSTILE, ids=lambda name: repr(name[:20]))
def test_locations_that_are_refused(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder):
        (place / "w.bin").write_bytes(W.tobytes())
    refused(save(linear(location), folder / "m.onnx"), HOSTILE[location])


def test_no_location_at_all(tmp_path: Path) -> None:
    made = linear()
    del made.graph.initializer[0].external_data[:]
    refused(save(made, tmp_path / "m.onnx"), "names no file")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("offset", "-1", "external offset is '-1'"),
        ("offset", "1.5", "not a number of bytes"),
        ("offset", "", "not a number of bytes"),
        ("offset", "٣", "not a number of bytes"),
        ("offset", "0x10", "not a number of bytes"),
        ("offset", "9" * 30, "not a number of bytes"),
        ("offset", "1", "bytes 1 to 4801 are outside of 'w.bin', which has 4800"),
        ("offset", str(2**63), "are outside of"),
        ("length", "4799", "external length is 4799, its shape [40, 30] of float32 needs 4800"),
        ("length", "4801", "external length is 4801"),
        ("length", "-4800", "not a number of bytes"),
    ],
)
def test_ranges_that_are_refused(key: str, value: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    made = linear()
    made.graph.initializer[0].external_data.add(key=key, value=value)
    refused(save(made, tmp_path / "m.onnx"), reason)


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes()[:-1])
    refused(save(linear(), tmp_path / "m.onnx"), "outside of 'w.bin', which has 4799; is the file complete?")


def test_a_file_that_shrinks_while_packing(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    with read_model(save(linear(), tmp_path / "m.onnx")) as source:
        os.truncate(tmp_path / "w.bin", 100)
        with pytest.raises(ModelError, match=r"w\.bin: ends at byte 100, 4800 are needed"):
            source.weights[0].read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.bin")
    refused(save(linear(), tmp_path / "m.onnx"), "is a folder or a device")
    with pytest.raises(ModelError, match="not a regular file"):
        read_model(tmp_path / "w.bin")


def link(target: Path | str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.symlink_to(target)
    except OSError:
        pytest.skip("no symbolic links here")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(W.tobytes())
    folder = tmp_path / "model"
    link(tmp_path / "secret", folder / "w.bin")
    refused(save(linear(), folder / "m.onnx"), "a link that leaves the model's folder")
    (folder / "w.bin").unlink()
    link("../secret", folder / "w.bin")
    refused(folder / "m.onnx", "a link that leaves the model's folder")
    link(tmp_path, folder / "sub")
    refused(save(linear("sub/secret"), folder / "m.onnx"), "a link that leaves the model's folder")


def test_links_in_a_circle(tmp_path: Path) -> None:
    link("b", tmp_path / "w.bin")
    link("w.bin", tmp_path / "b")
    refused(save(linear(), tmp_path / "m.onnx"), "is not there")


@pytest.mark.usefixtures("no_sync")
def test_links_within_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "blob").write_bytes(W.tobytes())
    link("data/blob", tmp_path / "w.bin")
    check(save(linear(), tmp_path / "m.onnx"))


@pytest.mark.usefixtures("no_sync")
def test_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "w.bin").write_bytes(W.tobytes())
    save(linear(), tmp_path / "real" / "m.onnx")
    link("real", tmp_path / "folder")
    check(tmp_path / "folder" / "m.onnx")


@pytest.mark.usefixtures("no_sync")
def test_hard_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(W.tobytes())
    (tmp_path / "model").mkdir()
    try:
        os.link(tmp_path / "blob", tmp_path / "model" / "w.bin")
    except OSError:
        pytest.skip("no hard links here")
    check(save(linear(), tmp_path / "model" / "m.onnx"))


def hub_cache(root: Path, data: str = "w.bin", in_folder: str = "") -> Path:
    """A model in a cache of the Hugging Face hub: files are links to blobs named by their hashes."""
    home = root / "hub" / "models--someone--some-model"
    (home / "blobs").mkdir(parents=True)
    snapshot = home / "snapshots" / "0a1b2c" / in_folder
    up = "../" * (2 + bool(in_folder))
    save(linear(data), home / "blobs" / "aaaa")
    (home / "blobs" / "bbbb").write_bytes(W.tobytes())
    link(f"{up}blobs/aaaa", snapshot / "m.onnx")
    link(f"{up}blobs/bbbb", snapshot / data)
    return snapshot / "m.onnx"


@pytest.mark.floor
@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("folder", ["", "onnx"])
def test_a_hub_cache(folder: str, tmp_path: Path) -> None:
    path = hub_cache(tmp_path, in_folder=folder)
    with read_model(path) as source:
        assert source.weights[0].read().tobytes() == W.tobytes()
    conx.pack(path, tmp_path / "m.conx", lossless=True, threads=1, verify=False)
    copied = tmp_path / "copy"
    copied.mkdir()
    for name in ("m.onnx", "w.bin"):
        shutil.copy(path.parent / name, copied / name)
    again = conx.unpack(tmp_path / "m.conx", tmp_path / "again.onnx")
    assert same_bits(run_plain(copied / "m.onnx", X), run_plain(again, X))


def test_links_out_of_a_hub_cache_are_refused(tmp_path: Path) -> None:
    path = hub_cache(tmp_path)
    other = tmp_path / "hub" / "models--someone--other" / "blobs"
    other.mkdir(parents=True)
    (other / "cccc").write_bytes(W.tobytes())
    (path.parent / "w.bin").unlink()
    link(other / "cccc", path.parent / "w.bin")
    refused(path, "a link that leaves the model's folder")


CACHES: list[Callable[[Path], None]] = [
    lambda home: shutil.rmtree(home / "blobs"),
    lambda home: (home / "blobs" / "bbbb").unlink(),
]


@pytest.mark.parametrize("broken", CACHES)
def test_a_hub_cache_that_is_not_complete(broken: Callable[[Path], None], tmp_path: Path) -> None:
    path = hub_cache(tmp_path)
    broken(path.parents[2])
    with pytest.raises((ModelError, FileNotFoundError)):
        read_model(path)


@pytest.mark.usefixtures("no_sync")
def test_a_model_that_is_a_link_to_where_its_data_lies(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "w.bin").write_bytes(W.tobytes())
    save(linear(), tmp_path / "store" / "m.onnx")
    link(tmp_path / "store" / "m.onnx", tmp_path / "here" / "m.onnx")
    link(tmp_path / "store" / "w.bin", tmp_path / "here" / "w.bin")
    with read_model(tmp_path / "here" / "m.onnx") as source:
        assert source.weights[0].read().tobytes() == W.tobytes()

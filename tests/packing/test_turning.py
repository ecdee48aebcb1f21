"""A tensor is stored with its axes in another order where that is smaller, and comes back as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest

import conx
from conx.packing import turning
from conx.packing.turning import pieces
from tests.builders import CPU, model, normal, one_thread, run_plain, same_bits
from tests.packing.kit import Packed, pack, pack_weights, raw_tensors

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]


def equal_columns(rows: int, columns: int, different: int = 8) -> Array:
    """Most columns are the same."""
    values = normal(rows, columns)
    values[:, different:] = values[:, different : different + 1]
    return values


def uneven_columns(rows: int, columns: int) -> Array:
    """Columns of two sizes, the first half of them and the second."""
    values = normal(rows, columns)
    values[:, columns // 2 :] *= 2.0**-9
    return values


SMALLER = {
    "equal columns": equal_columns(60, 300),
    "uneven columns": uneven_columns(300, 2000),
    "with ones": equal_columns(60, 300).reshape(60, 1, 300),
    "ones first": equal_columns(60, 300).reshape(1, 60, 1, 300),
    "integers": (equal_columns(60, 300) * 1000).astype(np.int64),
    "float16": equal_columns(60, 300).astype(np.float16),
    "few values": np.rint(equal_columns(60, 300)),
    "kernel": uneven_columns(300, 2000).reshape(300, 500, 2, 2),
}
ORDERS = {2: (1, 0), 3: (1, 2, 0), 4: (1, 2, 3, 0)}


@pytest.mark.parametrize("lossless", [True, "smallest"])
@pytest.mark.parametrize("name", SMALLER)
def test_smaller(name: str, lossless: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = SMALLER[name]
    packed = pack_weights({"w": values}, tmp_path, lossless=lossless)
    if name in ("uneven columns", "kernel") and lossless == "smallest":  # a code for each column does as well
        assert packed.stored["w"].order is None
        return
    wanted = (0, 2, 3, 1) if name == "ones first" else ORDERS[values.ndim]
    assert packed.stored["w"].order == wanted
    assert packed.stored["w"].shape == values.shape
    assert raw_tensors(packed.unpack()) == raw_tensors(onnx.load(packed.model))
    monkeypatch.setattr(turning, "SMALLEST", values.size + 1)
    plain = pack_weights({"w": values}, tmp_path, lossless=lossless)
    assert plain.stored["w"].order is None
    assert packed.report.bytes < plain.report.bytes


def test_in_codes(tmp_path: Path) -> None:
    values = equal_columns(60, 300)
    text = "g (float[n, 60] x) => (float[n, 300] y) { y = MatMul(x, w) }"
    packed = pack(model(text, {"w": values}), tmp_path)
    assert packed.stored["w"].order == (1, 0)
    assert (packed.stored["w"].codec, packed.stored["w"].params["axis"]) == ("linear", 0)
    assert packed.error("w") < 0.01
    feed = {"x": normal(5, 60)}
    (want,) = run_plain(packed.model, feed)
    for precision in ("original", "fp32", "fp16", "int8"):
        session = conx.InferenceSession(packed.path, one_thread(), precision=precision, providers=CPU)
        assert np.abs(session.run(None, feed)[0] - want).max() < 0.03 * np.abs(want).max()


def test_tied(tmp_path: Path) -> None:
    """What is stored turned is had as it was, and transposed."""
    values = equal_columns(60, 300)
    weights = {"a": values, "b": np.ascontiguousarray(values.T), "c": values.reshape(30, 600)}
    for settings in ({"lossless": True}, {}):
        packed = pack_weights(weights, tmp_path, **settings)
        assert packed.stored["a"].order == (1, 0)
        a = packed.values("a")
        assert a.T.tobytes() == packed.values("b").tobytes()
        assert a.tobytes() == packed.values("c").tobytes()
        assert (a.tobytes() == values.tobytes()) is bool(settings)


PLAIN = {
    "normal": normal(300, 400),
    "equal rows": np.ascontiguousarray(equal_columns(60, 300).T),
    "one row": equal_columns(60, 300).reshape(1, -1),
    "one column": equal_columns(60, 300).reshape(-1, 1),
    "one dim": equal_columns(60, 300).reshape(-1),
    "small": equal_columns(60, 60),
    "all equal": np.full((60, 300), 0.5, np.float32),
}


@pytest.mark.parametrize("name", PLAIN)
def test_not_turned(name: str, tmp_path: Path) -> None:
    packed = pack_weights({"w": PLAIN[name]}, tmp_path, lossless=True)
    assert packed.stored["w"].order is None


FORCED: dict[str, tuple[Array, dict[str, Any]]] = {
    "heads with codes": (
        uneven_columns(80, 96) * np.geomspace(1, 99, 80, dtype="f4")[:, None],
        {"lossless": "smallest"},
    ),
    "heads": (normal(80, 96), {"lossless": True}),
    "narrow": (normal(80, 96).astype(np.float16).astype(np.float32), {"lossless": True}),
    "float64": (normal(80, 96).astype(np.float64) / 3, {"lossless": True}),
    "palette": (np.rint(normal(80, 96)), {"lossless": True}),
    "coded": (normal(80, 96), {}),
    "coded in blocks": (normal(80, 96), {"bits": 4, "block_size": 32}),
    "blocks that do not fit": (normal(80, 100), {"bits": 4, "block_size": 48}),
    "three dims": (normal(16, 20, 24), {"bits": 5}),
    "palettes": (normal(80, 96), {"palette": 4}),
    "palettes of groups": (normal(80, 96), {"overrides": {"w": "palette:4,group:16"}}),
}


@pytest.mark.parametrize("name", FORCED)
def test_every_codec_decodes_to_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, settings = FORCED[name]
    text = f"g (float[n, 80] x) => (float[n, {values.shape[-1]}] y) {{ y = MatMul(x, w) }}"

    def packed(folder: str) -> Packed:
        (tmp_path / folder).mkdir()
        if values.ndim > 2 or values.dtype != np.float32:
            return pack_weights({"w": values}, tmp_path / folder, **settings)
        return pack(model(text, {"w": values}), tmp_path / folder, **settings)

    plain = packed("plain")
    monkeypatch.setattr(turning, "GAIN", 9.0)
    monkeypatch.setattr(turning, "GAIN_SMALLEST", 9.0)
    other = packed("turned")
    assert (plain.stored["w"].order, other.stored["w"].order) == (None, ORDERS[values.ndim])
    assert plain.stored["w"].codec == other.stored["w"].codec
    assert plain.stored["w"].sha256 == other.stored["w"].sha256
    assert plain.values("w").tobytes() == other.values("w").tobytes()
    if values.ndim == 2 and values.dtype == np.float32:
        feed = {"x": normal(3, 80)}
        for precision in ("fp32", "fp16", "int8"):
            answers = [
                conx.InferenceSession(p.path, one_thread(), precision=precision, providers=CPU).run(None, feed)
                for p in (plain, other)
            ]
            assert same_bits(*answers)


@pytest.mark.parametrize("dims", [(1, 9), (9, 1), (40, 30), (300, 7), (7, 300), (1000, 1000), (3, 5000), (5000, 3)])
def test_pieces(dims: tuple[int, int]) -> None:
    """From corner to corner, and all of it where that is little enough."""
    seen = np.zeros(dims, int)
    found = pieces(dims, 100, 16)
    assert len(found) <= 16
    for place in found:
        part = seen[place]
        assert 0 < part.size <= 100
        assert part.shape[1] == dims[1] or part.shape[0] == 1
        part += 1
    assert seen[0, 0]
    assert seen[-1, -1]
    if seen.size <= 1200:
        assert (seen == 1).all()

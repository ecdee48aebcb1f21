"""`lossless="smallest"`: bit for bit, never larger than the default, and smaller where a place tells of the size."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest

import conx
from conx.codecs import TensorMeta
from conx.codecs.heads import Heads
from conx.container.reader import Reader
from conx.dtypes import DType
from conx.packing.expected import smallest_heads
from tests.builders import model, normal
from tests.packing.kit import Packed, pack, pack_weights, raw_tensors

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
ALL = "g (float[1] x) => (float[1] y) { y = Identity(x) }"


def uneven(*shape: int, spread: float = 2.0) -> Array:
    """Normal values, each axis with factors of its own, a few octaves apart."""
    values = normal(*shape).astype(np.float64)
    for axis, dim in enumerate(shape):
        octaves = np.random.default_rng(axis).normal(0, spread, dim)
        values *= np.exp2(octaves.reshape([-1 if i == axis else 1 for i in range(len(shape))]))
    return values


def stored(packed: Packed, name: str) -> int:
    return next(t.stored for t in conx.inspect(packed.path).tensors if t.name == name)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_of_their_own_size(kind: str, tmp_path: Path) -> None:
    values = uneven(400, 300, spread=0.7 if kind == "float16" else 2).astype(KINDS[kind])
    plain = stored(pack_weights({"w": values}, tmp_path, lossless=True), "w")
    small = pack_weights({"w": values}, tmp_path, lossless="smallest")
    assert small.stored["w"].codec == "heads"
    assert small.stored["w"].params["axes"] == 3
    assert stored(small, "w") < 0.98 * plain
    assert raw_tensors(small.unpack()) == raw_tensors(onnx.load(small.model))


def test_kernels_and_several_segments(tmp_path: Path) -> None:
    weights = {"kernel": uneven(64, 48, 3, 3).astype(np.float32), "long": uneven(900, 700).astype(np.float32)}
    small = pack_weights(weights, tmp_path, lossless="smallest")
    assert small.stored["kernel"].params["axes"] & 3 == 3
    assert small.stored["long"].segments == 3
    assert raw_tensors(small.unpack()) == raw_tensors(onnx.load(small.model))


def test_values_of_every_kind(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (200, 300), dtype=np.uint32).view(np.float32)
    sparse = normal(200, 300, seed=1) * (rng.random((200, 300)) < 0.1)
    broken = normal(200, 300, seed=2)
    broken[3] = 0
    broken[:, 7] = np.inf
    broken[5, 5] = np.nan
    weights = {
        "bits": bits,
        "sparse": sparse.astype(np.float32),
        "broken": broken,
        "subnormal": normal(200, 300, seed=3) * np.float32(1e-40),
        "huge": np.float32(1e38) * np.sign(normal(200, 300, seed=4)) * rng.random((200, 300), np.float32),
        "halves": normal(200, 300, seed=5).astype(np.float16).astype(np.float32),
        "vector": normal(5000, seed=6),
        "small": normal(20, 30, seed=7),
    }
    made = model(ALL, weights)
    small = pack(made, tmp_path, lossless="smallest")
    assert small.report.lossless
    assert raw_tensors(small.unpack()) == raw_tensors(onnx.load(small.model))
    assert small.stored["halves"].params.get("stored") == "float16"
    assert all(stored(small, name) < 1.1 * values.nbytes for name, values in weights.items())


def test_smallest_is_not_larger(tmp_path: Path) -> None:
    weights = {"even": normal(300, 500), "uneven": uneven(300, 500).astype(np.float32), "few": np.arange(4000.0)}
    plain = pack_weights(weights, tmp_path, lossless=True)
    sizes = {name: stored(plain, name) for name in weights}
    small = pack_weights(weights, tmp_path, lossless="smallest")
    assert all(stored(small, name) <= size for name, size in sizes.items())


def test_the_rule_for_some_weights(tmp_path: Path) -> None:
    weights = {"one": uneven(300, 200).astype(np.float32), "two": uneven(200, 300).astype(np.float32)}
    packed = pack_weights(weights, tmp_path, lossless=True, overrides={"one": "smallest"})
    assert packed.stored["one"].params["axes"] == 3
    assert packed.stored["two"].params == {"bits": 8}


def test_the_file_says_so(tmp_path: Path) -> None:
    packed = pack_weights({"w": normal(64, 64)}, tmp_path, lossless="smallest")
    with Reader(packed.path) as reader:
        assert reader.index.metadata["settings"]["lossless"] == "smallest"


@pytest.mark.parametrize("wrong", ["small", "", 1, None])
def test_other_words_are_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lossless=.*: True, False or 'smallest'"):
        pack_weights({"w": normal(64, 64)}, tmp_path, lossless=wrong)


@pytest.mark.parametrize("shape", [(1, 5000), (5000,), (3, 1, 2000), (2, 2), (1024, 1024, 1), (0, 5)])
def test_shapes_in_which_an_axis_says_little(shape: tuple[int, ...]) -> None:
    meta = TensorMeta(shape, DType.FLOAT32)
    values = normal(*shape).reshape(-1)
    encoded = smallest_heads(values, meta, None)
    assert isinstance(encoded.codec, Heads)
    out = np.empty_like(values)
    decoder = encoded.codec.decoder(meta, encoded.side, DType.FLOAT32)
    for start in range(0, values.size, 1 << 18):
        stop = min(start + (1 << 18), values.size)
        decoder(start, stop - start, encoded.segment(meta, start, stop), out[start:stop])
    assert out.tobytes() == values.tobytes()

"""Values that are not what one expects of weights: coded within bounds, or kept as they are."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto

import conx
from tests.builders import as_tensor, model, normal, run_plain, same_bits, save
from tests.packing.kit import Packed, matmul, pack, pack_weights

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
TINY = np.float32(2.0**-149)


def bits(values: Array) -> bytes:
    return values.tobytes()


def weights(**changes: Any) -> Array:
    """A matrix with some rows, columns or single values changed."""
    found = normal(60, 80)
    for place, value in changes.items():
        kind, _, number = place.partition("_")
        if kind == "row":
            found[int(number)] = value
        elif kind == "column":
            found[:, int(number)] = value
        else:
            found[3, int(number)] = value
    return found


NOT_FINITE = {
    "nan": weights(value_5=np.nan),
    "inf": weights(value_5=np.inf),
    "-inf": weights(value_5=-np.inf),
    "a row": weights(row_2=np.nan),
    "all": np.full((60, 80), np.nan, np.float32),
    "payloads": np.arange(0x7FC00000, 0x7FC00000 + 4800, dtype="<u4").view("<f4").reshape(60, 80),
}


@pytest.mark.floor
@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_stays_exact(name: str, tmp_path: Path) -> None:
    packed = pack(matmul(NOT_FINITE[name]), tmp_path, threads=1)
    assert bits(packed.values("w")) == bits(NOT_FINITE[name])
    assert packed.report.lossless


CODED = {
    "normal": weights(),
    "zero row": weights(row_0=0, row_59=0),
    "zero column": weights(column_0=0, column_79=0),
    "negative zeros": weights(column_3=-0.0),
    "constant column": weights(column_3=0.7),
    "constant row": weights(row_3=-5),
    "tiny column": weights(column_3=TINY),
    "denormal columns": weights() * np.float32(2.0**-130),
    "half of it denormal": weights() * np.where(np.arange(80) % 2, np.float32(2.0**-130), np.float32(1)),
    "huge": weights() * np.float32(2.0**120),
    "all scales": weights() * (np.float32(2.0) ** np.arange(-40, 40)).astype(np.float32),
    "outliers": weights(value_5=1000, value_6=-999),
    "positive": np.abs(weights()) + 1,
    "one value": np.where(np.eye(60, 80) == 1, np.float32(1), np.float32(0)),
}


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"block_size": 16}, {"palette": 6}, {"bits": 2}], ids=str)
def test_what_is_finite_is_coded_within_bounds(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """No value is off by more than the step of its column, nothing becomes infinite, and no warning is given."""
    wanted = CODED[name].astype(np.float32)
    packed = pack(matmul(wanted), tmp_path, threads=1, **settings)
    got = packed.values("w")
    assert np.isfinite(got).all()
    peak = np.abs(wanted.astype(np.float64)).max(axis=0)
    off = np.abs(got.astype(np.float64) - wanted).max(axis=0)
    half = {None: 1 / 60, 4: 1 / 6, 2: 1}[
        settings.get("bits")
    ]  # of a step, which is never below a 32nd of the root mean square
    if "palette" not in settings:
        assert (off <= peak * half + 1e-44).all()
    assert off.max() <= peak.max()


def test_zero_stays_zero(tmp_path: Path) -> None:
    """Pruned weights stay pruned."""
    pruned = np.where(np.random.default_rng(0).random((60, 80)) < 0.6, np.float32(0), normal(60, 80))
    for name, settings in {"a": {}, "b": {"bits": 3}, "c": {"block_size": 20}}.items():
        packed = pack(matmul(pruned), tmp_path, name, threads=1, **settings)
        assert (packed.values("w")[pruned == 0] == 0).all()
        assert packed.error("w") > 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("settings", [{}, {"bits": 4}, {"block_size": 16}], ids=str)
def test_largest_values_stay_finite(dtype: str, settings: dict[str, Any], tmp_path: Path) -> None:
    largest = np.finfo(dtype).max
    wide = normal(40, 50).astype(dtype)
    wide[0, 3], wide[1] = largest, -largest
    packed = pack(matmul(wide), tmp_path, threads=1, **settings)
    assert np.isfinite(packed.values("w")).all()
    assert packed.values("w").dtype == dtype


def test_bfloat16_is_coded(tmp_path: Path) -> None:
    words = (normal(40, 50).view("<u4") >> 16).astype("<u2")
    tensor = TensorProto(data_type=TensorProto.BFLOAT16, dims=[40, 50], raw_data=words.tobytes())
    made = model(
        "g (bfloat16[2, 40] x) => (bfloat16[2, 50] y) { y = MatMul(x, w) }",
        {"w": tensor},
        '<ir_version: 10, opset_import: ["": 21]>',
    )
    packed = pack(made, tmp_path, threads=1)
    assert 0 < packed.error("w") < 0.02
    (back,) = packed.unpack().graph.initializer
    got = (np.frombuffer(back.raw_data, "<u2").astype("<u4") << 16).view("<f4")
    wanted = (words.astype("<u4") << 16).view("<f4")
    assert np.abs(got - wanted.reshape(-1)).max() < 0.05


KEPT: dict[str, Array] = {
    "small": normal(31, 33),
    "a vector": normal(5000),
    "a scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 60), np.float32),
    "one row": normal(1, 5000),
    "float64": normal(50, 60).astype(np.float64),
    "int64": np.arange(3000).reshape(50, 60),
    "int8": np.arange(3000, dtype=np.int8).reshape(50, 60),
    "uint8": np.arange(3000, dtype=np.uint8).reshape(50, 60),
    "bool": np.random.default_rng(0).integers(0, 2, (50, 60)).astype(bool),
    "complex": normal(50, 60).astype(np.complex64),
    "equal values": np.full((50, 60), 0.1, np.float32),
    "few values": np.random.default_rng(0).choice(normal(20), (50, 60)),
}


@pytest.mark.floor
@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_worth_an_error_stays_exact(name: str, tmp_path: Path) -> None:
    packed = pack_weights({"w": KEPT[name]}, tmp_path, threads=1)
    assert bits(packed.values("w")) == bits(KEPT[name])
    assert packed.report.lossless


NARROW = {
    "float16": normal(400, 60).astype(np.float16).astype(np.float32),
    "bfloat16": (normal(400, 60).view("<u4") & np.uint32(0xFFFF0000)).view("<f4"),
    "float32": normal(400, 60).astype(np.float64),
    "16 values": np.random.default_rng(0).choice(normal(16), (400, 60)),
    "256 values": np.random.default_rng(0).choice(normal(256), (400, 60)),
    "one value": np.full((400, 60), -0.0, np.float32),
}


@pytest.mark.parametrize("name", NARROW)
def test_what_holds_less_than_its_type_is_stored_so(name: str, tmp_path: Path) -> None:
    """Float16 weights kept as float32, palettes of an earlier quantization: no loss, and small."""
    wanted = NARROW[name]
    packed = pack_weights({"w": wanted}, tmp_path, lossless=True, threads=1)
    assert bits(packed.values("w")) == bits(wanted)
    most = {"float16": 16, "bfloat16": 12, "float32": 31, "16 values": 4.2, "256 values": 8.4, "one value": 0.1}[name]
    assert stored(packed) * 8 < most * 24_000 + 8000
    codec = {"16 values": "palette", "256 values": "palette", "one value": "fill"}.get(name, "heads")
    assert packed.stored["w"].codec == codec


def stored(packed: Packed) -> int:
    return sum(t.stored for t in packed.report.tensors)


@pytest.mark.floor
def test_lossless_keeps_every_bit(tmp_path: Path) -> None:
    """Any bits of any type."""
    rng = np.random.default_rng(0)
    found: dict[str, Array | TensorProto] = {}
    for kind in ("f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16"):
        found[f"noise {kind}"] = rng.integers(0, 256, (70, 40 * np.dtype(kind).itemsize), np.uint8).view(kind)
        found[f"low {kind}"] = rng.integers(0, 3, (70, 40)).astype(kind)
    for number in (16, 17, 18, 19, 20, 21, 22):
        size = 2800 * 2 if number == 16 else 2800 if number < 21 else 1400
        found[f"type {number}"] = TensorProto(data_type=number, dims=[70, 40], raw_data=rng.bytes(size))
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", found)
    path = save(made, tmp_path / "m.onnx")
    for threads in (1, 3):
        conx.pack(path, lossless=True, threads=threads)
        assert conx.unpack(tmp_path / "m.conx", tmp_path / "u.onnx").read_bytes() == path.read_bytes()
    assert conx.inspect(tmp_path / "m.conx").lossless


def test_many_small_weights(tmp_path: Path) -> None:
    """They share chunks; each comes back."""
    found = {f"w{i}": normal(20, 15 + i % 7, seed=i) for i in range(300)}
    packed = pack_weights(found, tmp_path, threads=1)
    for tensor in packed.unpack().graph.initializer:
        assert tensor.raw_data == found[tensor.name].tobytes()
    conx.check(packed.path, deep=True)


def test_coded_models_answer_nearly_the_same(tmp_path: Path) -> None:
    """Through matrices, kernels and embeddings, whatever the axes."""
    made = model(
        """g (int64[5] i, float[1, 12, 10, 10] p) => (float[5, 50] y, float[1, 20, 8, 8] z) {
            e = Gather(table, i)
            h = MatMul(e, up)
            r = Relu(h)
            y = Gemm <transB = 1> (r, down, bias)
            z = Conv(p, kernel)
        }""",
        {
            "table": normal(300, 40),
            "up": normal(40, 80, seed=1, scale=0.1),
            "down": normal(50, 80, seed=2, scale=0.1),
            "bias": normal(50, seed=3),
            "kernel": normal(20, 12, 3, 3, seed=4),
        },
    )
    feeds = {"i": np.array([0, 7, 299, 20, 20]), "p": normal(1, 12, 10, 10, seed=9)}
    packed = pack(made, tmp_path, threads=1)
    assert [t.name for t in packed.report.tensors if t.error] == ["table", "up", "down", "kernel"]
    wanted = run_plain(packed.model, feeds)
    got = conx.InferenceSession(packed.path).run(None, feeds)
    for a, b in zip(wanted, got, strict=True):
        assert 0 < np.sqrt(np.square(a - b).mean() / np.square(a).mean()) < 0.02
    assert same_bits(got, run_plain(conx.unpack(packed.path, tmp_path / "u.onnx"), feeds))


def test_the_reported_error_is_the_real_one(tmp_path: Path) -> None:
    wanted = weights(value_5=30)
    for name, settings in {"a": {}, "b": {"bits": 5}, "c": {"palette": 5}}.items():
        packed = pack(matmul(wanted), tmp_path, name, threads=1, **settings)
        off = packed.values("w").astype(np.float64) - wanted
        real = np.sqrt(np.square(off).mean() / np.square(wanted.astype(np.float64)).mean())
        assert packed.error("w") == pytest.approx(real, rel=1e-4)
        assert conx.inspect(packed.path).tensors[0].error == packed.error("w")
    assert as_tensor("", wanted).raw_data == wanted.tobytes()

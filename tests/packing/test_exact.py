"""What must not change comes back bit for bit, whatever is asked for the rest."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from conx.dtypes import DType
from tests.builders import give, model, normal, run_plain, same_bits, save
from tests.packing.kit import matmul, pack, pack_weights, raw_tensors

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.onnx.ml": 3]>'


def bits_of(dtype: DType, *shape: int, seed: int = 0) -> TensorProto:
    """Any bits: NaNs of all payloads, infinities, subnormals; where a last byte is not full, its unused bits too."""
    size = dtype.nbytes(int(np.prod(shape)))
    content = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    if dtype is DType.BOOL:
        content &= 1
    return TensorProto(data_type=dtype.number, dims=shape, raw_data=content.tobytes())


def came_back(made: onnx.ModelProto, folder: Path, **settings: Any) -> dict[str, str]:
    """Packs and unpacks; sees that all tensors are the same. Answers the codec of each stored one."""
    packed = pack(made, folder, **settings)
    assert raw_tensors(packed.unpack()) == raw_tensors(onnx.load(packed.model))
    assert packed.report.lossless
    assert all(t.error == 0 for t in packed.report.tensors)
    return {name: tensor.codec for name, tensor in packed.stored.items()}


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.label)
def test_any_bits_of_each_type(dtype: DType, tmp_path: Path) -> None:
    weights: dict[str, Any] = {
        "matrix": bits_of(dtype, 101, 103),  # no whole number of bytes for the smallest types
        "vector": bits_of(dtype, 9001, seed=1),
        "kernel": bits_of(dtype, 20, 10, 5, 5, seed=2),
        "scalar": bits_of(dtype, seed=3),
        "small": bits_of(dtype, 3, 5, seed=4),
    }
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights)
    for settings in ({}, {"bits": 2}, {"lossless": True}):
        codecs = came_back(made, tmp_path, **settings)
        assert set(codecs) == {"matrix", "vector", "kernel"}


WHOLE = [d for d in DType if not d.codable and d.bits >= 8 and not d.label.startswith(("complex", "float"))]


@pytest.mark.parametrize("dtype", WHOLE, ids=lambda dtype: dtype.label)
def test_integers(dtype: DType, tmp_path: Path) -> None:
    """Numbers as models have them: near 0, few, in order."""
    kind = np.bool_ if dtype is DType.BOOL else dtype.storage
    rng = np.random.default_rng(0)
    weights = {
        "near 0": np.rint(rng.normal(0, 3, (64, 64))).astype(np.int64).astype(kind),
        "in order": np.arange(4096).astype(kind),
        "equal": np.ones((64, 64), kind),
    }
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights)
    assert came_back(made, tmp_path, bits=2)["equal"] == "fill"


def test_float64(tmp_path: Path) -> None:
    """A double is there because it has to be one."""
    made = model(
        "g (double[4,64] x) => (double[4,64] y) { y = MatMul(x, w) }",
        {"w": np.random.default_rng(0).normal(size=(64, 64)), "single": normal(64, 64, seed=1).astype(np.float64)},
    )
    assert came_back(made, tmp_path) == {"w": "planes", "single": "heads"}


def test_strings(tmp_path: Path) -> None:
    words = np.array([f"wörd {i}\0" for i in range(3000)], object).reshape(50, 60)
    made = model("g (float[1] x) => (string[50,60] y) { y = Identity(w) }", {"w": words})
    assert came_back(made, tmp_path) == {}


def test_vectors_and_small_tensors(tmp_path: Path) -> None:
    weights = {
        "vector": normal(5000),
        "33 x 31": normal(33, 31, seed=1),
        "1 x 1023": normal(1, 1023, seed=2),
        "1 x 5000": normal(1, 5000, seed=3),
        "1 x 5000 x 1": normal(1, 5001, 1, seed=4),
        "scalar": np.array(3, np.float32),
    }
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights)
    codecs = came_back(made, tmp_path)
    assert set(codecs.values()) == {"heads"}
    assert set(codecs) == set(weights) - {"scalar"}


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_1024_elements_are_coded(kind: Any, tmp_path: Path) -> None:
    packed = pack_weights({"w": normal(32, 32).astype(kind)}, tmp_path)
    assert packed.stored["w"].codec == "linear"
    assert not packed.report.lossless
    assert 0 < packed.error("w") < 0.02
    off = packed.values("w").astype(np.float64) - normal(32, 32).astype(kind).astype(np.float64)
    assert float(np.sqrt(np.square(off).mean())) == pytest.approx(packed.error("w"), rel=0.1)


@pytest.mark.parametrize("bad", [0x7FC00000, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("settings", [{}, {"bits": 3}, {"palette": 4}, {"overrides": {"w": "bits:4"}}], ids=str)
def test_one_value_that_is_no_number(bad: int, settings: dict[str, Any], tmp_path: Path) -> None:
    values = normal(64, 64)
    values.view(np.uint32)[3, 5] = bad
    assert came_back(matmul(values), tmp_path, **settings) == {"w": "heads"}


def test_no_number_far_behind(tmp_path: Path) -> None:
    values = normal(600, 600)  # of two segments
    values[-1, -1] = np.inf
    assert came_back(matmul(values), tmp_path) == {"w": "heads"}


# Operators that take coordinates, thresholds, exponents or scales, each with a matrix `w` at such a place.
EXACT = {
    "DequantizeLinear": "y = DequantizeLinear <axis = 1, block_size = 2> (q, w)",
    "DequantizeLinear, reshaped": "s = Reshape(w, shape) y = DequantizeLinear <axis = 1, block_size = 2> (q, s)",
    "DequantizeLinear, cast": "s = Cast <to = 1> (w) y = DequantizeLinear <axis = 1, block_size = 2> (q, s)",
    "QuantizeLinear": "y = QuantizeLinear <axis = 1, block_size = 2> (x, w)",
    "QuantizeLinear, transposed": "t = Transpose(w) y = QuantizeLinear <axis = 1, block_size = 2> (x, t)",
    "MatMulNBits": "y = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 16> (x, q, w)",
    "GatherBlockQuantized": "y = com.microsoft.GatherBlockQuantized(q, i, w)",
    "QMoE": "y = com.microsoft.QMoE(x, r, q, w)",
    "Pow": "y = Pow(x, w)",
    "Where": "y = Where(c, w, x)",
    "Less": "y = Less(x, w)",
    "LessOrEqual": "y = LessOrEqual(x, w)",
    "Greater": "y = Greater(x, w)",
    "GreaterOrEqual": "y = GreaterOrEqual(x, w)",
    "Equal": "y = Equal(w, x)",
    "GridSample": "g = Reshape(w, shape) y = GridSample(x, g)",
    "TopK": "y, z = TopK(w, i)",
    "NonMaxSuppression": "y = NonMaxSuppression(w, x)",
    "Resize": "y = Resize(w, e, e, shape)",
    "RoiAlign": "y = RoiAlign(x, w, i)",
    "ai.onnx.ml": "y = ai.onnx.ml.Scaler(w)",
    "function": """y = local.Cut(x, w) }
        <domain: "local", opset_import: ["": 21]> Cut (a, b) => (d) { d = Less(a, b)""",
    "branch": """y = If (c) <
        then_branch = p () => (float q) { q = Pow(x, w) }, else_branch = p () => (float q) { q = Abs(x) }
    >""",
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("settings", [{}, {"bits": 3}, {"palette": 4}], ids=str)
def test_what_is_no_weight(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    text = f"g (float x, int8 q, int64 i, bool c, float r, float e) => (float y) {{ {EXACT[name]} }}"
    head = HEAD.replace("]>", ', "local": 1]>')
    made = model(text, {"w": np.abs(normal(64, 64)), "shape": np.array([1, 64, 32, 2])}, head)
    assert came_back(made, tmp_path, **settings) == {"w": "heads"}


def test_what_is_no_weight_unless_it_is_asked_for(tmp_path: Path) -> None:
    made = model("g (float[64,64] x) => (float[64,64] y) { y = Pow(x, w) }", {"w": np.abs(normal(64, 64))})
    assert pack(made, tmp_path, overrides={"w": "bits:6"}).stored["w"].codec == "linear"


def test_a_mask_keeps_its_values(tmp_path: Path) -> None:
    """Few values of a matrix of unknown use mean something: they are kept, whatever the size."""
    few = np.random.default_rng(0).choice(np.array([0, -1e9, -0.0, 1, 0.1], np.float32), (64, 64))
    made = model("g (float[64,64] x) => (float[64,64] y) { y = Add(x, w) }", {"w": few})
    assert came_back(made, tmp_path) == {"w": "palette"}
    assert came_back(made, tmp_path, bits=2) == {"w": "palette"}


def test_a_mask_of_the_largest_float(tmp_path: Path) -> None:
    mask = np.triu(np.full((64, 64), np.finfo(np.float32).min), 1)
    made = model("g (float[64,64] x) => (float[64,64] y) { y = Add(x, w) }", {"w": mask.astype(np.float32)})
    assert came_back(made, tmp_path) == {"w": "palette"}


@pytest.mark.filterwarnings("ignore:overflow")
def test_finite_weights_stay_finite(tmp_path: Path) -> None:
    values = normal(64, 64)
    values[3, 4] = np.finfo(np.float32).max
    assert np.isfinite(pack(matmul(values), tmp_path).values("w")).all()


NARROW: dict[str, tuple[Any, str]] = {
    "float16": (np.float16, "heads as float16"),
    "bfloat16": (ml_dtypes.bfloat16, "heads as bfloat16"),
    "float32": (np.float32, "heads as float32"),
}


@pytest.mark.parametrize(
    ("name", "wide"),
    [(n, w) for n in NARROW for w in (np.float32, np.float64) if NARROW[n][0] is not w],
)
def test_values_of_a_narrower_type(name: str, wide: Any, tmp_path: Path) -> None:
    kind, label = NARROW[name]
    bits = np.dtype(f"u{np.dtype(kind).itemsize}")
    values = normal(70, 300).astype(kind)
    values[0, :4] = [-0.0, np.inf, -np.inf, np.nan]
    values[1, :3] = np.array([0, 1, 5], bits).view(kind)  # subnormals
    values = values.astype(wide)
    one_more = values.copy()
    one_more[-1, -1] = np.nextafter(wide(1), wide(2))
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": values, "almost": one_more})
    packed = pack(made, tmp_path, lossless=True)
    assert raw_tensors(packed.unpack()) == raw_tensors(onnx.load(packed.model))
    found = {t.name: t for t in packed.report.tensors}
    assert found["w"].codec == label
    assert found["almost"].codec != label
    assert found["w"].stored < min(found["almost"].stored, values.size * bits.itemsize)
    assert packed.report.lossless


def test_values_of_a_narrower_type_are_coded_all_the_same(tmp_path: Path) -> None:
    """At the default, codes of eight bits are smaller than sixteen."""
    packed = pack(matmul(normal(64, 64).astype(np.float16).astype(np.float32)), tmp_path)
    assert packed.stored["w"].codec == "linear"


@pytest.mark.parametrize("bits", [0, 0x80000000, 0x7FC00001, 0x3F800000, 1])
@pytest.mark.parametrize("settings", [{}, {"lossless": True}], ids=str)
def test_one_value_everywhere(bits: int, settings: dict[str, Any], tmp_path: Path) -> None:
    values = np.full((64, 64), bits, np.uint32).view(np.float32)
    packed = pack(matmul(values), tmp_path, **settings)
    assert packed.stored["w"].codec == "fill"
    assert packed.values("w").tobytes() == values.tobytes()
    assert packed.report.lossless


@pytest.mark.parametrize("count", [2, 16, 255, 256])
def test_few_values(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.choice(rng.normal(size=count).astype(np.float32), (128, 129))
    packed = pack(matmul(values), tmp_path, lossless=True)
    assert packed.stored["w"].codec == "palette"
    assert packed.stored["w"].params["entries"] == count
    assert packed.values("w").tobytes() == values.tobytes()
    assert packed.report.lossless


EVERYTHING = """g (float[2,48] x, int64[2] i, bool c) => (float[2,48] y, float[2,48] z) {
    e = Gather(table, i)
    a = MatMul(x, w) b = Gemm <transB = 1> (a, w2, bias) d = local.Layer(b)
    y = If (c) <
        then_branch = p () => (float[2,48] py) { py = Add(d, e) },
        else_branch = q () => (float[2,48] qy) { qy = MatMul(d, inner) }
    >
    h = Cast <to = 1> (half)
    z = MatMul(d, h)
}
<domain: "local", opset_import: ["": 21]> Layer (m) => (n) { n = MatMul(m, k) }"""


def everything() -> onnx.ModelProto:
    """Weights in all places."""
    made = model(
        EVERYTHING,
        {"w": normal(48, 48), "w2": normal(48, 48, seed=1), "bias": normal(48, seed=2), "table": normal(90, 48, seed=3)}
        | {"half": normal(48, 48, seed=4).astype(np.float16)},
        HEAD.replace("]>", ', "local": 1]>'),
    )
    branch = next(n for n in made.graph.node if n.op_type == "If").attribute[1].g
    branch.initializer.append(numpy_helper.from_array(normal(48, 48, seed=5), "inner"))
    constant = onnx.helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(normal(48, 48, seed=6)))
    made.functions[0].node.insert(0, constant)
    give(made.graph, "unused", normal(48, 48, seed=7))
    return made


def test_lossless_is_bit_for_bit(tmp_path: Path) -> None:
    packed = pack(everything(), tmp_path, lossless=True)
    back = packed.unpack()
    assert raw_tensors(back) == raw_tensors(everything())
    assert back == everything()
    for flag in (True, False):
        feeds = {"x": normal(2, 48, seed=9), "i": np.array([3, 89]), "c": np.array(flag)}
        wanted = run_plain(packed.model, feeds)
        for precision in (None, "original", "fp32"):
            again = save(packed.unpack(precision=precision), tmp_path / "again.onnx")
            assert same_bits(wanted, run_plain(again, feeds))


def test_default_keeps_all_but_the_weights(tmp_path: Path) -> None:
    """The graph, names, places and all that is no matrix."""
    packed = pack(everything(), tmp_path)
    before, after = raw_tensors(everything()), raw_tensors(packed.unpack())
    assert [t[:3] for t in before] == [t[:3] for t in after]
    same = [t[0] for t, u in zip(before, after, strict=True) if t == u]
    assert same == ["bias"]
    emptied, again = everything(), packed.unpack()
    for one in (emptied, again):
        for tensor in [*_all(one)]:
            tensor.ClearField("raw_data")
    assert emptied == again


def _all(made: onnx.ModelProto) -> list[TensorProto]:
    found = list(made.graph.initializer)
    for nodes in (made.graph.node, *(f.node for f in made.functions)):
        found += [a.t for n in nodes for a in n.attribute if a.type == onnx.AttributeProto.TENSOR]
        found += [t for n in nodes for a in n.attribute for t in a.g.initializer]
    return found

"""The int8 graph computes with the codes that are stored: at accuracy_level 0 it gives what float32 gives with them."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import conx
from conx.graph.coded_nodes import block_size
from conx.graph.lift import nested_graphs
from tests.builders import CPU, model, normal, save
from tests.packing.kit import Packed, pack

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
MICROSOFT = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
FUNCTIONS = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'

MODELS: dict[str, tuple[onnx.ModelProto, int]] = {
    # (model, number of MatMulNBits that it must become)
    "matmul": (model("g (float[n, 100] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": normal(100, 64)}), 1),
    "matmul in a batch": (
        model("g (float[2, n, 96] x) => (float[2, n, 64] y) { y = MatMul(x, w) }", {"w": normal(96, 64)}),
        1,
    ),
    "matmul of a vector": (model("g (float[96] x) => (float[64] y) { y = MatMul(x, w) }", {"w": normal(96, 64)}), 1),
    "gemm": (
        model(
            "g (float[n, 100] x) => (float[n, 64] y) { y = Gemm(x, w, b) }",
            {"w": normal(100, 64), "b": normal(64, seed=1)},
        ),
        1,
    ),
    "gemm, all of it": (
        model(
            "g (float[100, n] x) => (float[n, 64] y) { y = Gemm<transA=1, transB=1, alpha=0.5, beta=-2.0>(x, w, b) }",
            {"w": normal(64, 100), "b": normal(1, 64, seed=1)},
        ),
        1,
    ),
    "gemm without a bias": (
        model("g (float[n, 100] x) => (float[n, 64] y) { y = Gemm<alpha=3.0>(x, w) }", {"w": normal(100, 64)}),
        1,
    ),
    "fused": (
        model(
            "g (float[2, n, 100] x) => (float[2, n, 64] y)"
            " { y = com.microsoft.FusedMatMul<transB=1, alpha=0.25>(x, w) }",
            {"w": normal(64, 100)},
            MICROSOFT,
        ),
        1,
    ),
    "transposed before": (
        model(
            "g (float[n, 100] x) => (float[n, 64] y)"
            " { t = Transpose<perm=[1, 0]>(w) i = Identity(t) y = MatMul(x, i) }",
            {"w": normal(64, 100)},
        ),
        1,
    ),
    "one weight, two places": (
        model(
            "g (float[n, 64] x) => (float[n, 64] y) { h = MatMul(x, w) y = Gemm<transB=1>(h, w) }",
            {"w": normal(64, 64)},
        ),
        2,
    ),
    "embedding": (
        model(
            "g (int64[n, 2] i) => (float[n, 2, 64] y, float[n, 2, 4, 4] z) { y = Gather(w, i) z = Gather(v, i) }",
            {"w": normal(100, 64), "v": normal(300, 4, 4)},
        ),
        0,
    ),
    "embedding and head": (
        model(
            "g (int64[n] i) => (float[n, 100] y) { h = Gather<axis=-2>(w, i) y = MatMul(h, v) }",
            {"w": normal(100, 64), "v": np.ascontiguousarray(normal(100, 64).T)},
        ),
        1,
    ),
    "no matrices": (
        model(
            "g (float[1, 4, 9, 9] x) => (float[1, 40, 7, 7] y) { y = Conv(x, w) }",
            {"w": normal(40, 4, 3, 3)},
        ),
        0,
    ),
    "in a function": (
        onnx.parser.parse_model(
            FUNCTIONS
            + "g (float[n, 64] x) => (float[n, 64] y) { y = local.f(x) }"
            + '<domain: "local", opset_import: ["": 17]> f (x) => (y)'
            + " { w = Constant<value_floats=[1.0]>() y = MatMul(x, w) }"
        ),
        1,
    ),
}
constant = MODELS["in a function"][0].functions[0].node[0]
constant.CopyFrom(helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(normal(64, 64))))

BRANCHES = """
g (bool c, float[n, 64] x) => (float[n, 64] y) {
    y = If(c) <
        then_branch = t () => (float[n, 64] a) { a = MatMul(x, w) },
        else_branch = e () => (float[n, 64] b) { o = MatMul(x, v) b = Add(o, o) }
    >
}"""
MODELS["in branches"] = (model(BRANCHES, {"w": normal(64, 64), "v": normal(64, 64, seed=2)}), 2)
for name, inner in (("weights of branches", True), ("constants of branches", False)):
    made = onnx.ModelProto()
    made.CopyFrom(MODELS["in branches"][0])
    for weight, attribute in zip(list(made.graph.initializer), made.graph.node[0].attribute, strict=True):
        if inner:
            attribute.g.initializer.append(weight)
        else:
            attribute.g.node.insert(0, helper.make_node("Constant", [], [weight.name], value=weight))
    del made.graph.initializer[:]
    MODELS[name] = (made, 2)


def feeds(made: onnx.ModelProto) -> list[dict[str, Array]]:
    """Two feeds, of other batches and branches."""
    found = []
    for turn in (0, 1):
        feed: dict[str, Array] = {}
        for value in made.graph.input:
            dims = [d.dim_value or 3 + turn for d in value.type.tensor_type.shape.dim]
            kind = value.type.tensor_type.elem_type
            if kind == onnx.TensorProto.BOOL:
                feed[value.name] = np.array(bool(turn))
            elif kind == onnx.TensorProto.INT64:
                feed[value.name] = np.random.default_rng(turn).integers(-100, 100, dims)
            else:
                feed[value.name] = normal(*dims, seed=turn)
        found.append(feed)
    return found


def close(found: list[Array], wanted: list[Array], bound: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


def run(made: onnx.ModelProto, feed: dict[str, Array]) -> list[Array]:
    """What onnxruntime makes of the model as it was built."""
    found: list[Array] = ort.InferenceSession(made.SerializeToString(), providers=CPU).run(None, feed)
    return found


def operators(made: onnx.ModelProto) -> Counter[str]:
    graphs = [made.graph, *nested_graphs(made.graph)]
    return Counter(node.op_type for graph in graphs for node in graph.node)


def int8_model(packed: Packed) -> onnx.ModelProto:
    made = packed.unpack(precision="int8")
    onnx.checker.check_model(made)
    return made


@pytest.mark.floor
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"bits": 4, "block_size": 32}, {"palette": 5}], ids=str)
def test_int8_gives_what_float32_gives_with_the_same_codes(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    made, count = MODELS[name]
    packed = pack(made, tmp_path, **settings)
    counted = operators(int8_model(packed))["MatMulNBits"]
    assert counted == count
    exact = conx.InferenceSession(packed.path, precision="int8", providers=CPU, **level(counted))
    fast = conx.InferenceSession(packed.path, precision="int8", providers=CPU)
    floats = conx.InferenceSession(packed.path, precision="fp32", providers=CPU)
    assert (exact.precision, fast.precision) == ("int8", "int8")
    made_while_loading = "palette" in settings or name == "one weight, two places"
    made_while_loading |= "block_size" in settings and name == "embedding"
    for feed in feeds(made):
        wanted = floats.run(None, feed)
        close(exact.run(None, feed), wanted, 0.02 if made_while_loading else 1e-5)
        close(fast.run(None, feed), wanted, 0.03)


def level(count: int) -> dict[str, Any]:
    return {"accuracy_level": 0} if count else {}


@pytest.mark.parametrize("name", MODELS)
def test_int8_from_a_lossless_file(name: str, tmp_path: Path) -> None:
    made, count = MODELS[name]
    packed = pack(made, tmp_path, lossless=True)
    counted = operators(int8_model(packed))["MatMulNBits"]
    assert counted == count
    session = conx.InferenceSession(packed.path, precision="int8", providers=CPU, **level(counted))
    for feed in feeds(made):
        close(session.run(None, feed), run(made, feed), 0.02)


def test_embeddings_stay_codes_at_float32_too(tmp_path: Path) -> None:
    """The rows that are gathered are dequantized: the same bits as when the embedding was decoded."""
    text = """
    g (int64[n] i) => (float[n, 512] y) {
        a = Gather(w, i) b = Gather(v, i) c = Gather(shared, i) d = MatMul(a, shared) e = Add(b, c) y = Add(d, e)
    }"""
    weights = {"w": normal(700, 512), "v": normal(9, 512, seed=1), "shared": normal(512, 512, seed=2)}
    packed = pack(model(text, weights), tmp_path)
    made = packed.unpack(precision="fp32")
    onnx.checker.check_model(made)
    held = {t.name: tuple(t.dims) for t in made.graph.initializer if t.data_type == onnx.TensorProto.INT8}
    assert held == {"w/codes": (700, 512), "shared/codes": (512, 512)}
    floats = {t.name for t in made.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and t.dims[-1] == 512}
    assert floats == {"v", "shared"}  # a product takes `shared` too, of which onnxruntime has a repacked copy
    session = conx.InferenceSession(packed.path, providers=CPU)
    plain = conx.InferenceSession(packed.path, precision="original", providers=CPU)
    assert session.precision == "fp32"
    feed = {"i": np.array([0, 8, -1, 3, 3])}
    np.testing.assert_array_equal(session.run(None, feed)[0], plain.run(None, feed)[0])
    exact = pack(model(text, weights), tmp_path, name="exact", lossless=True).unpack(precision="fp32")
    assert operators(exact) == operators(model(text, weights))


def test_codes_made_while_loading_are_those_of_quantize_linear(tmp_path: Path) -> None:
    weight = normal(128, 48)
    weight[:, 3] = 0
    packed = pack(
        model("g (float[n, 128] x) => (float[n, 48] y) { y = MatMul(x, w) }", {"w": weight}), tmp_path, lossless=True
    )
    held = {t.name: onnx.numpy_helper.to_array(t) for t in int8_model(packed).graph.initializer}
    codes = held["w/codes"].reshape(48, 128).astype(np.float32) - 128
    scales = held["w/scales"].reshape(48, 2)[:, :1]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(codes, np.nan_to_num(np.rint(weight.T / scales)))
    peaks = np.abs(weight).max(axis=0)
    assert (scales[:, 0] <= peaks / 127 * 1.01).all()
    assert (scales[:, 0] * 127.5 >= peaks).all()


def test_what_is_not_coded_stays_float(tmp_path: Path) -> None:
    """Small matrices, weights to keep, not finite or returned by the graph, inputs with a default."""
    given = {name: normal(64, 64, seed=i) for i, name in enumerate(("kept", "infinite", "overridable", "returned"))}
    given["small"] = normal(64, 8)
    given["infinite"][3, 4] = np.inf
    names = ("kept", "infinite", "overridable", "returned", "small")
    places = ("x", "a", "b", "c", "d", "y")
    text = " ".join(f"{b} = MatMul({a}, {w})" for a, b, w in zip(places, places[1:], names, strict=False))
    made = model(f"g (float[n, 64] x) => (float[n, 8] y, float[64, 64] returned) {{ {text} }}", given)
    made.graph.input.append(helper.make_tensor_value_info("overridable", 1, [64, 64]))
    packed = pack(made, tmp_path, keep=["kept"])
    assert operators(int8_model(packed))["MatMul"] == 5
    assert conx.inspect(packed.path).precisions == ("fp16", "fp32", "int8", "original")


def test_a_name_that_stands_for_something_else_within(tmp_path: Path) -> None:
    """A branch has a `w` of its own."""
    text = """
    g (bool c, float[n, 64] x) => (float[n, 64] y) {
        y = If(c) <
            then_branch = t () => (float[n, 64] a) { a = MatMul(x, w) },
            else_branch = e () => (float[n, 64] b) { b = MatMul(x, w) }
        >
    }"""
    made = model(text, {"w": normal(64, 64)})
    made.graph.node[0].attribute[0].g.initializer.append(onnx.numpy_helper.from_array(normal(64, 64, seed=3), "w"))
    small = pack(made, tmp_path).unpack(precision="int8")
    assert operators(small) == {"If": 1, "MatMulNBits": 2}
    inner = small.graph.node[0].attribute[0].g
    codes = [next(t for t in g.initializer if t.name.startswith("w/codes")) for g in (small.graph, inner)]
    weights = [made.graph.initializer[0], made.graph.node[0].attribute[0].g.initializer[0]]
    for held, weight in zip(codes, weights, strict=True):
        signed = onnx.numpy_helper.to_array(held).reshape(64, 64).astype(np.float32) - 128
        assert np.corrcoef(signed.reshape(-1), onnx.numpy_helper.to_array(weight).T.reshape(-1))[0, 1] > 0.99


def test_accuracy_level_goes_with_int8_alone(tmp_path: Path) -> None:
    packed = pack(MODELS["matmul"][0], tmp_path)
    with pytest.raises(
        conx.UnsupportedError, match="accuracy_level=0: the graph for fp32 and original has no such level"
    ):
        conx.InferenceSession(packed.path, precision="fp32", accuracy_level=0)
    with pytest.raises(ValueError, match="accuracy_level=5: choose 0, 1, 2, 3, 4"):
        conx.InferenceSession(packed.path, precision="int8", accuracy_level=5)


def test_doc_strings_that_look_like_a_level(tmp_path: Path) -> None:
    """Their bytes are never changed: where they cannot be told from the attribute, there is no level to set."""
    made = onnx.ModelProto()
    made.CopyFrom(MODELS["matmul"][0])
    made.doc_string = "\n\x0eaccuracy_level\x18\x04"
    packed = pack(made, tmp_path)
    with pytest.raises(conx.UnsupportedError, match="has no such level"):
        conx.InferenceSession(packed.path, precision="int8", accuracy_level=0, providers=CPU)
    conx.InferenceSession(packed.path, precision="int8", providers=CPU)


def test_auto_is_never_int8(tmp_path: Path) -> None:
    path = save(MODELS["matmul"][0], tmp_path / "m.onnx")
    for precisions in (["int8"], ["fp32", "int8"]):
        for lossless in (True, False):
            conx.pack(path, tmp_path / "m.conx", lossless=lossless, precisions=precisions)
            assert conx.InferenceSession(tmp_path / "m.conx", providers=CPU).precision in ("original", "fp32")


def test_a_model_made_for_integers_is_its_own_int8(tmp_path: Path) -> None:
    text = """
    g (float[n, 64] x) => (float[n, 64] y) {
        q, s, z = DynamicQuantizeLinear(x)
        i = MatMulInteger(q, w, z)
        f = Cast<to=1>(i)
        y = Mul(f, s)
    }"""
    made = model(text, {"w": np.random.default_rng(0).integers(-100, 100, (64, 64)).astype(np.int8)})
    packed = pack(made, tmp_path)
    session = conx.InferenceSession(packed.path, precision="int8", providers=CPU)
    for feed in feeds(made):
        np.testing.assert_array_equal(session.run(None, feed)[0], run(made, feed)[0])


BLOCK_SIZES = {
    (384, None): 64,
    (1536, None): 64,
    (100, None): 128,
    (48, None): 16,
    (64, None): 64,
    (1000, None): 128,
    (384, 64): 64,
    (384, 96): 32,
    (384, 48): 16,
    (384, 40): None,
    (400, 96): None,
    (400, 32): 32,
    (1024, 1024): 64,
}


@pytest.mark.parametrize(("length", "block"), BLOCK_SIZES)
def test_block_sizes(length: int, block: int | None) -> None:
    assert block_size(length, block) == BLOCK_SIZES[length, block]


def test_weights_that_only_lost_moves_used_are_gone(tmp_path: Path) -> None:
    made, _ = MODELS["transposed before"]
    small = int8_model(pack(made, tmp_path))
    assert operators(small) == {"MatMulNBits": 1}
    assert sorted(t.name for t in small.graph.initializer) == ["w/codes", "w/scales"]

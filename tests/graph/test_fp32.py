"""The float32 graph of models that compute in float16 or bfloat16, wholly or in part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conx.errors import UnsupportedError
from conx.graph.fp32 import to_float32
from conx.graph.fp32_fields import SHORT
from conx.graph.lift import nested_graphs
from conx.graph.read import read_model
from conx.graph.trial import Trial
from tests.builders import as_tensor, give, model, normal, run_plain, save

FLOAT, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'


def half(*shape: int, seed: int = 0, scale: float = 0.2) -> npt.NDArray[np.float16]:
    return normal(*shape, seed=seed, scale=scale).astype(np.float16)


X = half(2, 20, seed=9, scale=1)
W = half(20, 40)
V = half(40, 20, seed=1)


def brain(values: npt.NDArray[np.float32]) -> TensorProto:
    """As bfloat16, cut off."""
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return TensorProto(data_type=BFLOAT, dims=values.shape, raw_data=words.tobytes())


def widen(made: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The float32 model, complete."""
    with read_model(save(made, folder / "m.onnx")) as source:
        before = source.proto.SerializeToString()
        wide = to_float32(source)
        assert source.proto.SerializeToString() == before
        return onnx.load(Trial(source.weights, folder).write(wide))


def check(
    made: onnx.ModelProto, feeds: Mapping[str, Any], folder: Path, *more: Mapping[str, Any], atol: float = 4e-3
) -> onnx.ModelProto:
    """Widen, look the graph over and compare its outputs with the model's; gives it."""
    wide = widen(made, folder)
    look_over(wide, made)
    for given in (feeds, *more):
        close(run_plain(folder / "m.onnx", given), run_plain(wide.SerializeToString(), given), atol)
    return wide


def close(wanted: Any, got: Any, atol: float) -> None:
    if isinstance(wanted, list):
        assert len(wanted) == len(got)
        for one, other in zip(wanted, got, strict=True):
            close(one, other, atol)
    elif isinstance(wanted, np.ndarray) and wanted.dtype.kind == "f":
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        peak = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
        np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=4e-3, atol=atol * peak)
    else:
        assert np.array_equal(wanted, got)


def look_over(wide: onnx.ModelProto, made: onnx.ModelProto, casts: int | None = None) -> None:
    """Valid and well-typed, with the interface of the source and no 16-bit weights."""
    onnx.checker.check_model(wide)
    onnx.shape_inference.infer_shapes(wide, check_type=True, strict_mode=True, data_prop=True)
    assert list(wide.graph.input) == list(made.graph.input)
    assert list(wide.graph.output) == list(made.graph.output)
    fixed = {v.name for v in (*wide.graph.input, *wide.graph.output)}
    for graph in (wide.graph, *nested_graphs(wide.graph)):
        assert not [t.name for t in graph.initializer if t.data_type in SHORT and t.name not in fixed]
    if casts is not None:
        assert count(wide, "Cast") == casts


def count(made: onnx.ModelProto, op_type: str) -> int:
    return sum(n.op_type == op_type for g in (made.graph, *nested_graphs(made.graph)) for n in g.node)


def test_a_model_of_float16(tmp_path: Path) -> None:
    """One cast in, one out, and descriptions follow."""
    made = model(
        "g (float16[2, 20] x) => (float16[2, 20] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }",
        {"w": W, "v": V},
    )
    made.graph.value_info.append(helper.make_tensor_value_info("a", HALF, [2, 40]))
    wide = check(made, {"x": X}, tmp_path)
    assert [n.op_type for n in wide.graph.node] == ["Cast", "MatMul", "Relu", "MatMul", "Cast"]
    assert [v.type.tensor_type.elem_type for v in wide.graph.value_info] == [FLOAT]
    assert numpy_helper.to_array(wide.graph.initializer[0]).tobytes() == W.astype(np.float32).tobytes()


@pytest.mark.parametrize("small", [True, False])
def test_a_model_of_bfloat16(small: bool, tmp_path: Path) -> None:
    """On a CPU, onnxruntime has no such MatMul; as float32 it runs, with the very weights."""
    weight = normal(*((4, 4) if small else (20, 40)))
    size = len(weight)
    made = model(
        f"g (bfloat16[2, {size}] x) => (bfloat16[2, {weight.shape[1]}] y) {{ a = MatMul(x, w) y = Relu(a) }}",
        {"w": brain(weight)},
    )
    wide = widen(made, tmp_path)
    look_over(wide, made, casts=2)
    kept = (weight.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert numpy_helper.to_array(wide.graph.initializer[0]).tobytes() == kept.tobytes()


def test_a_float32_model_is_the_same(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 40] y) { y = MatMul(x, w) }", {"w": normal(20, 40)})
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert to_float32(source) is source.proto


def test_a_float32_model_with_an_island(tmp_path: Path) -> None:
    """Its casts have become identities, and go."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = Cast <to = 10> (x) b = MatMul(a, w) c = Cast <to = 1> (b) d = Exp(c) e = MatMul(d, v)
            f = Cast <to = 10> (e) h = MatMul(f, w) i = Cast <to = 1> (h) y = MatMul(i, v)
        }""",
        {"w": W, "v": V.astype(np.float32)},
    )
    wide = check(made, {"x": X.astype(np.float32) * np.float32(0.3)}, tmp_path)
    assert [n.op_type for n in wide.graph.node] == ["MatMul", "Exp", "MatMul", "MatMul", "MatMul"]


def test_casts_that_are_returned(tmp_path: Path) -> None:
    made = model(
        """g (float16[2, 20] x) => (float[2, 40] y, float16[2, 40] z, float16[2, 40] u) {
            a = MatMul(x, w) y = Cast <to = 1> (a) z = Cast <to = 10> (y) b = Cast <to = 1> (a) c = Relu(b)
            u = Cast <to = 10> (c)
        }""",
        {"w": W},
    )
    wide = check(made, {"x": X}, tmp_path)
    assert count(wide, "Cast") == 3


def test_what_is_used_and_returned(tmp_path: Path) -> None:
    """An output that other nodes use, an input that is an output, and a weight that is one."""
    made = model(
        """g (float16[2, 20] x) => (float16[2, 20] y, float16[2, 40] a, float16[20, 40] w) {
            a = MatMul(x, w) y = MatMul(a, v)
        }""",
        {"w": W, "v": V},
    )
    wide = check(made, {"x": X}, tmp_path)
    assert {t.name: t.data_type for t in wide.graph.initializer} == {"w": HALF, "v": FLOAT}


def test_a_weight_that_can_be_fed(tmp_path: Path) -> None:
    made = model("g (float16[2, 20] x, float16[20, 40] w) => (float16[2, 40] y) { y = MatMul(x, w) }", {"w": W})
    check(made, {"x": X}, tmp_path, {"x": X, "w": half(20, 40, seed=7)})


def test_inputs_of_old_versions_are_no_defaults(tmp_path: Path) -> None:
    text = "g (float16[2, 20] x, float16[20, 40] w) => (float16[2, 40] y) { y = MatMul(x, w) }"
    made = model(text, {"w": W}, '<ir_version: 3, opset_import: ["": 8]>')
    wide = widen(made, tmp_path)
    onnx.checker.check_model(wide)
    assert {v.name: v.type.tensor_type.elem_type for v in wide.graph.input} == {"x": HALF, "w": FLOAT}
    close(run_plain(tmp_path / "m.onnx", {"x": X}), run_plain(wide.SerializeToString(), {"x": X}), 4e-3)


def test_what_makes_values(tmp_path: Path) -> None:
    """Constants of every form, casts from other types, and what draws or fills."""
    made = model(
        """g (float16[2, 20] x, int64[2] ids, bool[2, 20] m) => (float16[2, 20] y, double[2, 20] u, float16[2, 20] r) {
            shape = Shape(x)
            ones = ConstantOfShape <value = float16[1] {1}> (shape)
            f = Cast <to = 10> (m) like = CastLike(m, x)
            hot = OneHot(ids, depth, offon)
            eye = EyeLike <dtype = 10> (x)
            two = Constant <value = float16 {2}> ()
            a = MatMul(x, w) c = Add(a, f) d = Add(c, like) e = Add(d, hot) h = Add(e, eye) i = Mul(h, two)
            j = Add(i, ones) y = MatMul(j, large) u = Cast <to = 11> (j)
            n = RandomNormalLike <dtype = 10> (x) r = Sub(n, n)
        }""",
        {"w": half(20, 20), "depth": np.array(20), "offon": np.array([0, 1], np.float16)},
    )
    give(made.graph, "large", half(20, 20, seed=3))
    check(made, {"x": X, "ids": np.array([3, 19]), "m": X > 0}, tmp_path, atol=8e-3)


@pytest.mark.parametrize("opset", [13, 19, 23])
def test_quantized_weights(opset: int, tmp_path: Path) -> None:
    """With scales of float16 where the opset has them."""
    scale = half(40, scale=0.01) + np.float16(0.02)
    kind = np.float32 if opset < 19 else np.float16
    cast = "f = Cast <to = 10> (d)" if opset < 19 else "f = Identity(d)"
    if opset >= 23:
        cast = "f = Identity(d)"
    said = ", output_dtype = 10" if opset >= 23 else ""
    made = model(
        f"""g (float16[2, 20] x) => (float16[2, 40] y) {{
            d = DequantizeLinear <axis = 1{said}> (q, s) {cast} y = MatMul(x, f)
        }}""",
        {"q": np.random.default_rng(0).integers(-99, 99, (20, 40), np.int8), "s": np.abs(scale).astype(kind)},
        f'<ir_version: 10, opset_import: ["": {opset}]>',
    )
    check(made, {"x": X}, tmp_path, atol=8e-3)


def test_layer_normalization(tmp_path: Path) -> None:
    """`stash_type` names a type to compute in."""
    made = model(
        """g (float16[2, 20] x) => (float16[2, 20] y) {
            y = LayerNormalization <axis = -1, stash_type = 1> (x, g, b)
        }""",
        {"g": half(20) + np.float16(1), "b": half(20, seed=1)},
    )
    check(made, {"x": X}, tmp_path)


BRANCHES = """g (float16[2, 20] x, bool c) => (float16[2, 40] y, float[2, 40] z) {
    h = MatMul(x, w)
    y, z = If (c) <
        then_branch = p () => (float16[2, 40] yp, float[2, 40] zp) { yp = Relu(h) zp = Cast <to = 1> (h) },
        else_branch = q () => (float16[2, 40] yq, float[2, 40] zq) {
            a = MatMul(x, inner) yq = Add(a, h) b = Cast <to = 1> (a) zq = Exp(b)
        }
    >
}"""


def test_branches(tmp_path: Path) -> None:
    made = model(BRANCHES, {"w": W})
    branch = made.graph.node[1].attribute[1].g
    branch.initializer.append(as_tensor("inner", half(20, 40, seed=3)))
    branch.value_info.append(helper.make_tensor_value_info("a", HALF, [2, 40]))
    wide = check(made, {"x": X, "c": np.array(True)}, tmp_path, {"x": X, "c": np.array(False)})
    for graph in nested_graphs(wide.graph):
        assert {v.type.tensor_type.elem_type for v in (*graph.output, *graph.value_info)} == {FLOAT}


def test_loops_and_scans(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float16[2, 20] x, float16[5, 2, 20] seq)
            => (float16[2, 20] y, float16[k, 2, 20] all, float16[2, 20] z) {
            yes = Constant <value = bool {1}> ()
            y, all = Loop (n, yes, x) <
                body = b (int64 i, bool c, float16[2, 20] s) => (bool d, float16[2, 20] r, float16[2, 20] t) {
                    d = Identity(c) a = MatMul(s, w) r = Tanh(a) t = Relu(r)
                }
            >
            z, parts = Scan <num_scan_inputs = 1, body = e (float16[2, 20] f, float16[2, 20] p)
                => (float16[2, 20] o, float16[2, 20] q) { u = Add(f, p) o = Tanh(u) q = Relu(o) }> (x, seq)
        }""",
        {"w": half(20, 20)},
    )  # fmt: skip
    check(made, {"n": np.array(3), "x": X, "seq": half(5, 2, 20, scale=1)}, tmp_path, atol=8e-3)


def test_functions(tmp_path: Path) -> None:
    """Inlined, with the types that their attributes say."""
    made = model(
        """g (float16[2, 20] x) => (float16[2, 40] y) { y = local.F <kind: int = 10> (x, w) }
        <domain: "local", opset_import: ["": 17]>
        F <kind> (a, m) => (r) { b = Cast <to: int = @kind> (a) c = MatMul(b, m) r = Relu(c) }""",
        {"w": W},
        LOCAL,
    )
    wide = check(made, {"x": X}, tmp_path)
    assert not wide.functions


def test_sequences_and_optionals(tmp_path: Path) -> None:
    made = model(
        """g (float16[2, 20] x) => (float16[4, 20] y, float16[2, 20] z, seq(float16[2, 20]) s) {
            a = MatMul(x, w) s = SequenceConstruct(a, x)
            none = SequenceEmpty <dtype = 10> () more = SequenceInsert(none, a)
            m = SequenceMap <body = b (float16[2, 20] e) => (float16[2, 20] r) { r = Abs(e) }> (s)
            y = ConcatFromSequence <axis = 0> (m)
            zero = Constant <value = int64 {0}> () f = SequenceAt(more, zero)
            o = Optional(f) g = OptionalGetElement(o) z = Add(g, x)
        }""",
        {"w": half(20, 20)},
        '<ir_version: 8, opset_import: ["": 18]>',
    )
    check(made, {"x": X}, tmp_path)


def test_sequences_that_no_operator_casts(tmp_path: Path) -> None:
    text = "g (float16[2, 20] x) => (seq(float16[2, 20]) s) { s = SequenceConstruct(x, x) }"
    made = model(text, head='<ir_version: 8, opset_import: ["": 15]>')
    with read_model(save(made, tmp_path / "m.onnx")) as source, pytest.raises(UnsupportedError, match="opset 15"):
        to_float32(source)


def test_optionals_at_the_edge(tmp_path: Path) -> None:
    text = "g (float16[2, 20] x) => (optional(float16[2, 20]) o) { o = Optional(x) }"
    made = model(text, head='<ir_version: 8, opset_import: ["": 18]>')
    with read_model(save(made, tmp_path / "m.onnx")) as source, pytest.raises(UnsupportedError, match="is optional"):
        to_float32(source)


def test_a_branch_that_gives_a_sequence(tmp_path: Path) -> None:
    made = model(
        """g (float16[2, 20] x, bool c, seq(float16[2, 20]) s) => (seq(float16[2, 20]) y, float16[2, 20] z) {
            y, z = If (c) <
                then_branch = p () => (seq(float16[2, 20]) yp, float16[2, 20] zp) { yp = Identity(s) zp = Relu(x) },
                else_branch = q () => (seq(float16[2, 20]) yq, float16[2, 20] zq) {
                    yq = SequenceConstruct(x, x) zq = Abs(x)
                }
            >
        }"""
    )
    wide = widen(made, tmp_path)
    look_over(wide, made)
    assert count(wide, "SequenceMap") == 2


def test_sparse_weights(tmp_path: Path) -> None:
    made = model("g (float16[2, 100] x) => (float16[2, 20] y) { y = MatMul(x, s) }")
    indices = as_tensor("i", np.arange(0, 2000, 2))
    sparse = helper.make_sparse_tensor(as_tensor("s", half(1000)), indices, [100, 20])
    made.graph.sparse_initializer.append(sparse)
    wide = widen(made, tmp_path)
    onnx.checker.check_model(wide)
    assert [t.values.data_type for t in wide.graph.sparse_initializer] == [FLOAT]


def test_operators_that_nobody_knows(tmp_path: Path) -> None:
    """They are fed what they were fed; what they give has the described type, or that of what it meets."""
    made = model(
        """g (float16[2, 20] x) => (float16[2, 20] y, float16[2, 20] z) {
            a = MatMul(x, w) b = other.Thing(a, w) c = Relu(b) d = other.Thing(c) y = Add(d, a) z = other.Thing(y)
        }""",
        {"w": half(20, 20)},
        '<ir_version: 8, opset_import: ["": 17, "other": 1]>',
    )
    made.graph.value_info.append(helper.make_tensor_value_info("b", HALF, [2, 20]))
    wide = widen(made, tmp_path)
    onnx.checker.check_model(wide)
    makers = {name: node for node in wide.graph.node for name in node.output}
    things = [node for node in wide.graph.node if node.op_type == "Thing"]
    for thing in things:
        for name in thing.input:
            assert helper.get_node_attr_value(makers[name], "to") == HALF
    for op_type in ("Relu", "Add"):
        node = next(n for n in wide.graph.node if n.op_type == op_type)
        assert helper.get_node_attr_value(makers[node.input[0]], "to") == FLOAT
    assert things[-1].output[0] == "z"
    assert [v.type.tensor_type.elem_type for v in wide.graph.value_info] == [HALF]


def test_nodes_in_no_order(tmp_path: Path) -> None:
    """As onnxruntime takes them."""
    made = model("g (float16[2, 20] x) => (float16[2, 20] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }",
                 {"w": W, "v": V})  # fmt: skip
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(made.graph.node)]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    check(made, {"x": X}, tmp_path)


def test_a_normalization_that_only_onnxruntime_knows(tmp_path: Path) -> None:
    """In onnx's own domain, as exporters of language models write it."""
    text = "g (float16[2, 20] x) => (float16[2, 40] y) { n = SimplifiedLayerNormalization(x, g) y = MatMul(n, w) }"
    made = model(text, {"g": half(20) + np.float16(1), "w": W})
    wide = widen(made, tmp_path)
    assert [n.op_type for n in wide.graph.node] == ["Cast", "SimplifiedLayerNormalization", "MatMul", "Cast"]
    close(run_plain(tmp_path / "m.onnx", {"x": X}), run_plain(wide.SerializeToString(), {"x": X}), 4e-3)

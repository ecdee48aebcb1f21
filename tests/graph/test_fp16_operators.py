"""Operators that make float32, that take it whatever comes, and of which onnx knows nothing."""

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from tests.builders import model, normal, run_plain, save
from tests.graph.test_fp16 import FLOAT, HALF, V, W, X, check, float16, look_over, number, types

pytestmark = pytest.mark.usefixtures("no_sync")

CONTRIB = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'


@pytest.mark.parametrize("op_type", ["Bernoulli", "RandomNormalLike", "RandomUniformLike", "EyeLike"])
@pytest.mark.parametrize("typed", [True, False])
def test_operators_that_take_the_type_of_their_input(op_type: str, typed: bool, tmp_path: Path) -> None:
    """What is random is only looked at for its shape."""
    made = model(
        f"""g (float[2, 20] x) => (int64[2] y, float[2, 20] z) {{
            a = MatMul(x, w) p = Sigmoid(a)
            r = {op_type} {"<dtype = 1>" if typed else ""} (p)
            s = Add(r, a) z = MatMul(s, w)
            y = Shape(z)
        }}""",
        {"w": W},
    )
    if op_type != "EyeLike":
        made.graph.output.pop()
    assert types(check(made, {"x": X}, tmp_path, atol=4e-3)) == {"w": HALF}


def test_operators_whose_type_is_said(tmp_path: Path) -> None:
    """Casts of the model, and values that are made of shapes and numbers, meet float16 values."""
    made = model(
        """g (float[2, 20] x, int64[2] ids, bool[2, 20] m) => (float[2, 20] y, float[2, 20] z, double[2, 20] u) {
            a = MatMul(x, w)
            shape = Shape(a)
            ones = ConstantOfShape <value = float[1] {1}> (shape)
            zeros = ConstantOfShape(shape)
            f = Cast <to = 1> (m)
            like = CastLike(m, a)
            hot = OneHot(ids, depth, offon)
            ramp = Range(zero, twenty, one)
            b = Add(a, ones) c = Add(b, zeros) d = Mul(c, f) e = Add(d, like) g = Add(e, hot) h = Add(g, ramp)
            y = MatMul(h, w)
            again = Cast <to = 1> (a)
            z = MatMul(again, w)
            u = Cast <to = 11> (a)
        }""",
        {
            "w": W,
            "depth": np.array(20),
            "offon": np.array([0, 1], np.float32),
            "zero": number(0),
            "twenty": number(20),
            "one": number(1),
        },
    )
    feeds = {"x": X, "ids": np.array([3, 19]), "m": X > 0}
    assert types(check(made, feeds, tmp_path, atol=4e-3))["w"] == HALF


@pytest.mark.parametrize(("opset", "ir"), [(11, 6), (13, 7), (17, 8), (19, 9)])
def test_resize_with_scales(opset: int, ir: int, tmp_path: Path) -> None:
    """Scales are float32 by the schema, whatever the picture is; the region of interest is not."""
    made = model(
        """g (float[1, 8, 6, 6] x) => (float[1, 8, 9, 9] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k)
            b = Resize <mode = "linear"> (a, roi, scales)
            c = Resize <mode = "nearest", coordinate_transformation_mode = "tf_crop_and_resize"> (b, crop, same)
            y = Conv <pads = [1, 1, 1, 1]> (c, k)
        }""",
        {
            "k": normal(8, 8, 3, 3, scale=0.1),
            "roi": np.zeros(0, np.float32),
            "scales": np.array([1, 1, 1.5, 1.5], np.float32),
            "same": np.array([1, 1, 1, 1], np.float32),
            "crop": np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32),
        },
        f'<ir_version: {ir}, opset_import: ["": {opset}]>',
    )
    half = check(made, {"x": normal(1, 8, 6, 6)}, tmp_path)
    assert types(half)["k"] == HALF
    assert types(half)["scales"] == FLOAT
    assert "Cast" not in [node.op_type for node in half.graph.node[1:-1]]


def test_resize_with_computed_scales(tmp_path: Path) -> None:
    made = model(
        """g (float[1, 8, 6, 6] x) => (float[1, 8, 12, 12] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k)
            shape = Shape(a) sizes = Cast <to = 1> (shape)
            ratio = Div(target, sizes)
            b = Resize <mode = "nearest"> (a, , ratio)
            y = Conv <pads = [1, 1, 1, 1]> (b, k)
        }""",
        {"k": normal(8, 8, 3, 3, scale=0.1), "target": np.array([1, 8, 12, 12], np.float32)},
    )
    assert types(check(made, {"x": normal(1, 8, 6, 6)}, tmp_path))["k"] == HALF


def test_indices_of_the_largest(tmp_path: Path) -> None:
    """Well apart, they are the same."""
    made = model(
        """g (float[2, 20] x) => (float[2, 5] v, int64[2, 5] i, int64[2] a) {
            h = MatMul(x, w) five = Constant <value = int64[1] {5}> ()
            v, i = TopK(h, five)
            a = ArgMax <axis = 1, keepdims = 0> (h)
        }""",
        {"w": np.eye(20, dtype=np.float32)[np.random.default_rng(0).permutation(20)]},
    )
    x = np.random.default_rng(1).permuted(np.tile(np.arange(20, dtype=np.float32), (2, 1)), axis=1)
    assert types(check(made, {"x": x}, tmp_path)) == {"w": HALF}


def test_boxes_that_overlap(tmp_path: Path) -> None:
    made = model(
        """g (float[1, 30, 20] x, float[1, 30, 4] corners) => (int64[n, 3] chosen, float[1, 30, 20] h) {
            h = MatMul(x, w)
            s = Softmax(h) scores = Transpose <perm = [0, 2, 1]> (s)
            chosen = NonMaxSuppression(corners, scores, ten, third, none)
        }""",
        {"w": W, "ten": np.array([10]), "third": np.array([0.3], np.float32), "none": np.array([0.04], np.float32)},
    )
    corners = np.random.default_rng(0).random((1, 30, 4), np.float32)
    corners[..., 2:] += corners[..., :2]
    assert types(check(made, {"x": normal(1, 30, 20) * 3, "corners": corners}, tmp_path))["w"] == HALF


def test_recurrent_layers_with_gates_put_in_order(tmp_path: Path) -> None:
    """As exporters do it: gates of the weights sliced and concatenated, an initial state of zeros."""
    made = model(
        """g (float[6, 2, 16] x) => (float[6, 1, 2, 40] y, float[1, 2, 40] s) {
            wa = Slice(w, zero, rows) wb = Slice(w, rows, end)
            wo = Concat <axis = 0> (wb, wa) wu = Unsqueeze(wo, zero)
            ru = Unsqueeze(r, zero) bu = Unsqueeze(b, zero)
            shape = Constant <value = int64[3] {1, 2, 40}> ()
            h0 = ConstantOfShape <value = float[1] {0}> (shape)
            y, h, c = LSTM <hidden_size = 40> (x, wu, ru, bu, , h0, h0)
            sq = Squeeze(y, one)
            gy, s = GRU <hidden_size = 40> (sq, gw, gr)
        }""",
        {
            "w": normal(160, 16, scale=0.2),
            "r": normal(160, 40, seed=1, scale=0.2),
            "b": normal(320, seed=2, scale=0.2),
            "gw": normal(1, 120, 40, seed=3, scale=0.2),
            "gr": normal(1, 120, 40, seed=4, scale=0.2),
            "zero": np.array([0]),
            "one": np.array([1]),
            "rows": np.array([80]),
            "end": np.array([160]),
        },
    )
    half = check(made, {"x": normal(6, 2, 16)}, tmp_path)
    assert {types(half)[name] for name in ("w", "r", "b", "gw", "gr")} == {HALF}


@pytest.mark.parametrize("opset", [13, 19, 21])
def test_weights_that_are_dequantized(opset: int, tmp_path: Path) -> None:
    """Before opset 19 the operator gives float32 alone."""
    made = model(
        """g (float[2, 40] x) => (float[2, 20] y) {
            a = MatMul(x, v) m = DequantizeLinear <axis = 1> (q, scales) b = MatMul(a, m) y = MatMul(b, w)
        }""",
        {
            "q": np.random.default_rng(0).integers(-127, 128, (40, 20), np.int8),
            "scales": np.abs(normal(20, scale=1e-3)),
            "v": normal(40, 40, scale=0.2),
            "w": W,
        },
        f'<ir_version: 8, opset_import: ["": {opset}]>',
    )
    half = check(made, {"x": normal(2, 40)}, tmp_path, atol=4e-3)
    assert types(half)["v"] == types(half)["w"] == HALF


def test_operators_of_onnxruntime(tmp_path: Path) -> None:
    made = model(
        """g (float[1, 6, 264] x, int32[1, 6] m) => (float[1, 6, 264] y) {
            a = com.microsoft.Attention <num_heads = 4> (x, qkv, qkvb, m)
            b = com.microsoft.SkipLayerNormalization <epsilon = 1e-5> (x, a, gamma, beta, skipb)
            c = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (b, w)
            d = com.microsoft.BiasGelu(c, bias)
            e = com.microsoft.FastGelu(d)
            f = com.microsoft.QuickGelu(e)
            y = MatMul(f, w)
        }""",
        {
            "qkv": normal(264, 792, scale=0.05),
            "qkvb": normal(792, seed=1, scale=0.2),
            "gamma": normal(264, seed=2) + 1,
            "beta": normal(264, seed=3),
            "skipb": normal(264, seed=4),
            "w": normal(264, 264, seed=5, scale=0.05),
            "bias": normal(264, seed=6),
        },
        CONTRIB,
    )
    half = check(made, {"x": normal(1, 6, 264), "m": np.array([[1, 1, 1, 1, 0, 0]], np.int32)}, tmp_path)
    assert set(types(half).values()) == {HALF}
    assert [node.op_type for node in half.graph.node].count("Cast") == 2


def test_a_normalization_that_only_onnxruntime_knows(tmp_path: Path) -> None:
    """In onnx's own domain, as exporters of language models write it."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = MatMul(x, w) n = SimplifiedLayerNormalization(a, g) y = MatMul(n, v)
        }""",
        {"w": W, "v": V, "g": normal(20) + 1},
    )
    path = save(made, tmp_path / "m.onnx")
    half = float16(made, tmp_path)
    assert set(types(half).values()) == {HALF}
    np.testing.assert_allclose(
        run_plain(half.SerializeToString(), {"x": X})[0], run_plain(path, {"x": X})[0], 0.01, 0.01
    )


def test_operators_that_nobody_knows(tmp_path: Path) -> None:
    """What they are fed and what they give stay as they were. Only the graph: nothing here can run it."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[2, 20] z) {
            a = MatMul(x, w) b = other.Thing(a, w) c = Relu(b) z = Add(c, a) y = MatMul(a, v)
        }""",
        {"w": W, "v": V},
        '<ir_version: 8, opset_import: ["": 17, "other": 1]>',
    )
    half = float16(made, tmp_path)
    look_over(half, made)
    assert types(half) == {"w": FLOAT, "w/fp16": HALF, "v": HALF}
    makers = {name: node for node in half.graph.node for name in node.output}
    thing = next(node for node in half.graph.node if node.op_type == "Thing")
    assert helper.get_node_attr_value(makers[thing.input[0]], "to") == FLOAT
    assert thing.input[1] == "w"
    add = next(node for node in half.graph.node if node.op_type == "Add")
    assert helper.get_node_attr_value(makers[add.input[1]], "to") == FLOAT

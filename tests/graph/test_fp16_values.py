"""Values that float16 cannot hold: bounds and masks, epsilons, sums and squares, statistics."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.builders import as_tensor, model, normal
from tests.graph.test_fp16 import FLOAT, HALF, V, W, X, check, number, types

pytestmark = pytest.mark.usefixtures("no_sync")

LOWEST = float(np.finfo(np.float32).min)
KEPT = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)  # the second row is masked throughout


def computed_in(half: onnx.ModelProto, op_type: str) -> set[int]:
    """The element types of the outputs of the operators of this type."""
    inferred = onnx.shape_inference.infer_shapes(half, strict_mode=True, data_prop=True).graph
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
    return {kinds[node.output[0]] for node in inferred.node if node.op_type == op_type}


def scores(mask: str, weights: dict[str, Any], inputs: str = "") -> onnx.ModelProto:
    """Attention whose scores `s` become `t` by `mask`."""
    return model(
        f"""g (float[2, 20] x, float[5, 20] memory{inputs}) => (float[2, 20] y, float[2, 5] p) {{
            q = MatMul(x, w) k = MatMul(memory, w) turned = Transpose <perm = [1, 0]> (k) s = MatMul(q, turned)
            {mask}
            p = Softmax <axis = 1> (t)
            a = MatMul(p, k) y = MatMul(a, v)
        }}""",
        {"w": W * np.float32(3), "v": V, **weights},
    )


FEEDS = {"x": X * np.float32(2), "memory": normal(5, 20, seed=4)}


@pytest.mark.parametrize("lowest", [LOWEST, -np.inf, -1e9, -1e4])
def test_a_mask_that_is_chosen(lowest: float, tmp_path: Path) -> None:
    made = scores("t = Where(m, s, lowest)", {"lowest": number(lowest)}, ", bool[2, 5] m")
    kept = KEPT | ([[False], [True]] if np.isinf(lowest) else False)
    half = check(made, FEEDS | {"m": kept}, tmp_path, atol=6e-3)
    assert types(half) == {"w": HALF, "v": HALF, "lowest": HALF}


@pytest.mark.parametrize("lowest", [LOWEST, -1e9, -1e4])
def test_a_mask_that_is_added(lowest: float, tmp_path: Path) -> None:
    """Constant, as for what is to come in a text. Of a row that is masked throughout as much is left as in float32."""
    made = scores("t = Add(s, mask)", {"mask": np.where(KEPT, 0, np.float32(lowest))})
    half = check(made, FEEDS, tmp_path, atol=6e-3)
    assert types(half)["w"] == types(half)["v"] == HALF


def test_a_large_mask_that_is_added(tmp_path: Path) -> None:
    """A weight by its size, sliced to what is needed."""
    mask = np.triu(np.full((40, 40), np.float32(LOWEST)), 1)
    made = scores("b = Slice(mask, zero, five) c = Slice(b, two, four) t = Add(s, c)", {
        "mask": mask, "zero": np.array([0, 0]), "five": np.array([5, 5]), "two": np.array([2]), "four": np.array([4]),
    })  # fmt: skip
    check(made, FEEDS, tmp_path, atol=6e-3)


def test_a_mask_that_is_computed(tmp_path: Path) -> None:
    """As BERT's: ones and zeros become zero and the least float32."""
    text = "f = Cast <to = 1> (m) i = Sub(one, f) n = Mul(i, lowest) t = Add(s, n)"
    made = scores(text, {"one": number(1), "lowest": number(LOWEST)}, ", bool[2, 5] m")
    half = check(made, FEEDS | {"m": KEPT}, tmp_path, atol=6e-3)
    assert types(half)["lowest"] == FLOAT


def test_a_weight_that_is_clipped_here_and_not_there(tmp_path: Path) -> None:
    """That it may be clipped where it is a bound says nothing of where it is a factor."""
    large = np.full((20, 20), np.float32(1e5))
    made = model(
        "g (float[2, 20] x) => (float[2, 20] y, float[20, 20] z) { h = MatMul(w, w) z = Min(h, b) y = MatMul(x, b) }",
        {"w": W, "b": large},
    )
    half = check(made, {"x": X}, tmp_path)
    assert types(half)["b"] == FLOAT
    assert computed_in(half, "MatMul") == {FLOAT, HALF}


NORM = """g (float[2, 400] x) => (float[2, 300] y) {
    h = MatMul(x, w)
    mean = ReduceMean <axes = [-1]> (h) d = Sub(h, mean) square = Pow(d, two) var = ReduceMean <axes = [-1]> (square)
    safe = Add(var, eps) root = Sqrt(safe) n = Div(d, root) s = Mul(n, gamma) t = Add(s, beta)
    y = MatMul(t, v)
}"""


@pytest.mark.parametrize("scale", [1.0, 300.0, 1e-3])
@pytest.mark.parametrize("square", ["Pow(d, two)", "Mul(d, d)"])
def test_a_normalization_in_parts(scale: float, square: str, tmp_path: Path) -> None:
    """Squares of what is about 300 leave float16's range, a variance of 1e-6 and its epsilon vanish in it."""
    made = model(
        NORM.replace("Pow(d, two)", square),
        {
            "w": np.eye(400, dtype=np.float32),
            "v": normal(400, 300, scale=0.05),
            "gamma": normal(400) + 1,
            "beta": normal(400, seed=1),
            "two": number(2),
            "eps": number(1e-12),
        },
    )
    half = check(made, {"x": normal(2, 400, scale=scale) + np.float32(scale)}, tmp_path, atol=4e-3)
    assert types(half)["w"] == types(half)["v"] == HALF
    assert types(half)["eps"] == FLOAT
    assert computed_in(half, "Sqrt") == computed_in(half, "ReduceMean") == {FLOAT}


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("first", ["h = Exp(x)", "h = MatMul(x, w)"])
def test_what_onnxruntime_makes_one_of(first: str, opset: int, tmp_path: Path) -> None:
    """It fuses a normalization of float32 or of float16 values, but not one whose factors are of the other type."""
    reduced = "ReduceMean(h, axis)" if opset >= 18 else "ReduceMean <axes = [-1]> (h)"
    text = NORM.replace("h = MatMul(x, w)", first).replace("ReduceMean <axes = [-1]> (h)", reduced)
    text = text.replace("ReduceMean <axes = [-1]> (square)", reduced.replace("h", "square"))
    made = model(
        text,
        {
            "w": np.eye(400, dtype=np.float32),
            "v": normal(400, 300, scale=0.05),
            "gamma": normal(400) + 1,
            "beta": normal(400, seed=1),
            "two": number(2),
            "eps": number(1e-5),
            "axis": np.array([-1]),
        },
        f'<ir_version: 8, opset_import: ["": {opset}]>',
    )
    half = check(made, {"x": normal(2, 400)}, tmp_path, atol=4e-3)
    assert types(half)["gamma"] == types(half)["beta"] == (FLOAT if "Exp" in first else HALF)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize(
    "scaled", ["i = Reciprocal(root) n = Mul(h, i)", "i = Div(one, root) n = Mul(h, i)", "n = Div(h, root)"]
)
def test_a_normalization_without_a_mean(scaled: str, opset: int, tmp_path: Path) -> None:
    """By the root of the mean square alone."""
    made = model(
        f"""g (float[2, 400] x) => (float[2, 300] y) {{
            h = MatMul(x, w) square = Pow(h, two) var = ReduceMean <axes = [-1]> (square)
            safe = Add(var, eps) root = Sqrt(safe) {scaled} s = Mul(n, gamma) y = MatMul(s, v)
        }}""",
        {
            "w": np.eye(400, dtype=np.float32),
            "v": normal(400, 300, scale=0.05),
            "gamma": normal(400) + 1,
            "one": number(1),
            "two": number(2),
            "eps": number(1e-6),
        },
        f'<ir_version: 8, opset_import: ["": {opset}]>',
    )
    half = check(made, {"x": normal(2, 400, scale=300)}, tmp_path, atol=4e-3)
    assert types(half)["gamma"] == HALF


def test_a_sum_of_squares(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 400] x) => (float[2, 400] y, float[2, 1] z) {
            h = MatMul(x, w) q = ReduceSumSquare <axes = [-1]> (h) safe = Add(q, eps) root = Sqrt(safe) n = Div(h, root)
            y = MatMul(n, w) z = ReduceL2 <axes = [-1]> (h)
        }""",
        {"w": np.eye(400, dtype=np.float32), "eps": number(1e-12)},
    )
    check(made, {"x": normal(2, 400, scale=300)}, tmp_path)


@pytest.mark.parametrize("variance", [1e5, 1e-7, 1.0])
def test_batch_normalization_of_extreme_variances(variance: float, tmp_path: Path) -> None:
    """One is beyond float16's range, the other below what it tells apart."""
    spread = np.float32(variance) * (normal(8, seed=3) ** 2 + 1)
    made = model(
        """g (float[1, 8, 6, 6] x) => (float[1, 8, 6, 6] y) {
            c = Conv <pads = [1, 1, 1, 1]> (x, k) b = BatchNormalization <epsilon = 1e-9> (c, gamma, beta, mean, var)
            y = Conv <pads = [1, 1, 1, 1]> (b, k)
        }""",
        {
            "k": normal(8, 8, 3, 3, scale=0.1),
            "gamma": normal(8) + 2,
            "beta": normal(8, seed=1),
            "mean": normal(8, seed=2) * np.sqrt(spread),
            "var": spread,
        },
    )
    half = check(made, {"x": normal(1, 8, 6, 6) * np.float32(np.sqrt(variance))}, tmp_path, atol=6e-3)
    assert types(half)["k"] == HALF
    assert types(half)["var"] == (HALF if variance == 1 else FLOAT)


@pytest.mark.parametrize("value", [1e5, 1e-9, -3e38])
@pytest.mark.parametrize("op_type", ["Mul", "Div"])
def test_factors_that_float16_does_not_hold(value: float, op_type: str, tmp_path: Path) -> None:
    """By which something is divided later on: what comes between stays float32."""
    made = model(
        f"g (float[2, 20] x) => (float[2, 20] y) {{ a = MatMul(x, w) b = {op_type}(a, c) y = Mul(b, d) }}",
        {"w": W, "c": number(value), "d": number(1 / value if op_type == "Mul" else value)},
    )
    half = check(made, {"x": X}, tmp_path)
    assert types(half)["w"] == HALF
    assert types(half)["c"] == FLOAT


def test_bounds_beyond_the_range(tmp_path: Path) -> None:
    """They bound nothing in float16, and become its largest values; infinite ones stay."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = MatMul(x, w) b = Clip(a, zero, large) c = Min(b, largest) d = Max(c, least) y = MatMul(d, v)
        }""",
        {
            "w": W,
            "v": V,
            "zero": number(0),
            "large": number(1e6),
            "largest": number(np.inf),
            "least": number(LOWEST),
        },
    )
    half = check(made, {"x": X}, tmp_path)
    assert set(types(half).values()) == {HALF}
    values = {t.name: onnx.numpy_helper.to_array(t) for t in half.graph.initializer}
    assert [float(values[name]) for name in ("large", "least")] == [65504, -65504]
    assert np.isposinf(values["largest"])


def test_what_is_padded_with(tmp_path: Path) -> None:
    made = model(
        """g (float[1, 8, 6, 6] x) => (float[1, 8, 6, 6] y) {
            a = Conv <pads = [1, 1, 1, 1]> (x, k) b = Pad(a, pads, least) c = MaxPool <kernel_shape = [3, 3]> (b)
            y = Conv <pads = [1, 1, 1, 1]> (c, k)
        }""",
        {"k": normal(8, 8, 3, 3, scale=0.1), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "least": number(LOWEST)},
    )
    assert types(check(made, {"x": normal(1, 8, 6, 6)}, tmp_path)) == {"k": HALF, "pads": 7, "least": HALF}


@pytest.mark.parametrize("value", [7e4, np.inf, np.nan])
def test_weights_with_a_value_beyond_the_range(value: float, tmp_path: Path) -> None:
    """A finite one keeps the product in float32; Inf and NaN are the same in both types."""
    weight = W.copy()
    weight[3, 4] = value
    made = model("g (float[2, 20] x) => (float[2, 20] y) { a = MatMul(x, w) y = MatMul(a, v) }", {"w": weight, "v": V})
    one = np.zeros((20, 20), np.float32)
    one[:4, :4] = V[:4, :4]
    made.graph.initializer[1].CopyFrom(as_tensor("v", one))
    half = check(made, {"x": X}, tmp_path)
    assert types(half)["w"] == (FLOAT if np.isfinite(value) else HALF)


def test_weights_that_become_denormal(tmp_path: Path) -> None:
    """A few small ones among larger do no harm."""
    weight = W.copy()
    weight[::3] *= np.float32(1e-6)
    made = model("g (float[2, 20] x) => (float[2, 20] y) { y = MatMul(x, w) }", {"w": weight})
    assert types(check(made, {"x": X}, tmp_path)) == {"w": HALF}


@pytest.mark.parametrize("op_type", ["Exp", "Softplus", "Reciprocal", "Sqrt", "Log", "Sin"])
def test_functions_that_leave_the_range(op_type: str, tmp_path: Path) -> None:
    """What they are fed is float16, what they give is not."""
    made = model(
        f"""g (float[2, 20] x) => (float[2, 20] y) {{
            a = MatMul(x, w) b = Abs(a) c = {op_type}(b) d = {"Log" if op_type == "Exp" else "Tanh"}(c) y = MatMul(d, w)
        }}""",
        {"w": np.eye(20, dtype=np.float32)},
    )
    x = np.linspace(1, 60, 40, dtype=np.float16).astype(np.float32).reshape(2, 20)
    half = check(made, {"x": x}, tmp_path)
    assert types(half) == {"w": HALF}
    assert computed_in(half, op_type) == {FLOAT}

"""A large weight and its transpose become one initializer, and the outputs stay what they were."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conx.graph.read import read_model, weight_number
from conx.graph.ties import find_ties
from conx.graph.transposed import SMALLEST, share_transposed
from tests.builders import give, model, normal, run_plain, save

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
ROWS, WIDTH = 1100, 256  # 1.1 MB in float32
W = normal(ROWS, WIDTH, scale=0.05)
TURNED = np.ascontiguousarray(W.T)
HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
FEED = {"i": np.array([3, 0, 1099]), "x": normal(3, WIDTH, seed=1)}
IN = f"g (int64[n] i, float[n, {WIDTH}] x) =>"


def shared(made: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The model after the pass, its weights put back. Where it shares nothing, it is the very model."""
    path = save(made, folder / "m.onnx")
    with read_model(path) as source:
        ties = find_ties(source.weights)

        def content(tensor: TensorProto) -> tuple[int, tuple[int, ...] | None] | None:
            number = weight_number(tensor)
            return None if number is None else (ties[number].stored, ties[number].perm)

        before = source.proto.SerializeToString()
        found = share_transposed(source.proto, content)
        assert source.proto.SerializeToString() == before
        values = {w.number: w.read().reshape(w.shape) for w in source.weights}
    if found is source.proto:
        return made
    assert found.SerializeToString() != before
    for graph in (found.graph, *(a.g for node in found.graph.node for a in node.attribute if a.HasField("g"))):
        for tensor in graph.initializer:
            number = weight_number(tensor)
            if number is not None:
                tensor.CopyFrom(numpy_helper.from_array(values[number], tensor.name))
    if found.ir_version >= 4:
        onnx.checker.check_model(found)
    return found


def operators(made: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in made.graph.node)


def close(made: onnx.ModelProto, other: onnx.ModelProto, feed: dict[str, Array] | None = None) -> None:
    feed = {k: v for k, v in (feed or FEED).items() if k in {value.name for value in made.graph.input}}
    for a, b in zip(run_plain(made.SerializeToString(), feed), run_plain(other.SerializeToString(), feed), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


E2 = f"(float[n, {ROWS}] y)"
E3 = f"(float[1, n, {ROWS}] y)"
SHARED: dict[str, tuple[str, dict[str, Array], dict[str, int], list[str]]] = {
    "initializer": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) y = MatMul(a, v) }}",
        {"w": W, "v": TURNED},
        {"Gemm": 1},
        ["w"],
    ),
    "initializer, the stored one last": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) y = MatMul(a, v) }}",
        {"v": TURNED, "w": W},
        {"Gemm": 1},
        ["w"],
    ),
    "Transpose": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) v = Transpose <perm = [1, 0]> (w) y = MatMul(a, v) }}",
        {"w": W},
        {"Gemm": 1, "Transpose": 0},
        ["w"],
    ),
    "Transpose as it is by default": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) v = Transpose(w) y = MatMul(a, v) }}",
        {"w": W},
        {"Gemm": 1, "Transpose": 0},
        ["w"],
    ),
    "three dims": (
        f"{IN} {E3} {{ e = Gather(w, i) a = Add(e, x) b = Unsqueeze(a, axis) y = MatMul(b, v) }}",
        {"w": W, "v": TURNED, "axis": np.array([0])},
        {"FusedMatMul": 1},
        ["w", "axis"],
    ),
    "Gemm": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) y = Gemm <alpha = 0.5> (a, v, bias) }}",
        {"w": W, "v": TURNED, "bias": normal(ROWS)},
        {"Gemm": 1},
        ["w", "bias"],
    ),
    "Gemm that was transposed": (
        (
            f"{IN} (float[n, {ROWS}] y) {{ e = Gather <axis = 1> (v, i) f = MatMul(x, e) g = Gemm <transB = 1> (x, w)"
            f" m = ReduceMean <axes = [1]> (f) y = Add(g, m) }}"
        ),
        {"v": TURNED, "w": W},
        {"Gemm": 1, "MatMul": 1},
        ["v"],
    ),
    "both ways": (
        f"{IN} (float[n, {WIDTH}] y) {{ a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }}",
        {"v": TURNED, "w": W},
        {"MatMul": 1, "Gemm": 1},
        ["v"],
    ),
    "several products": (
        f"{IN} {E2} {{ e = Gather(w, i) a = MatMul(e, v) b = MatMul(x, v) y = Add(a, b) }}",
        {"w": W, "v": TURNED},
        {"Gemm": 2},
        ["w"],
    ),
    "FusedMatMul": (
        f"{IN} {E2} {{ e = Gather(w, i) y = com.microsoft.FusedMatMul <alpha = 2.0> (e, v) }}",
        {"w": W, "v": TURNED},
        {"FusedMatMul": 1},
        ["w"],
    ),
    "FusedMatMul that was transposed": (
        (
            f"{IN} {E2} {{ e = MatMul(x, v) f = com.microsoft.FusedMatMul <transB = 1, alpha = 2.0> (x, w)"
            " y = Add(e, f) z = Gather <axis = 1> (v, i) }"
        ),
        {"v": TURNED, "w": W},
        {"FusedMatMul": 1, "MatMul": 1},
        ["v"],
    ),
    "square": (
        "g (int64[n] i, float[n, 600] s) => (float[n, 600] y) { e = Gather(w, i) a = Add(e, s) y = MatMul(a, v) }",
        {"w": normal(600, 600), "v": np.ascontiguousarray(normal(600, 600).T)},
        {"Gemm": 1},
        ["w"],
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared(name: str, tmp_path: Path) -> None:
    text, weights, counted, left = SHARED[name]
    made = model(text, weights, HEAD)
    found = shared(made, tmp_path)
    assert [t.name for t in found.graph.initializer] == left
    assert {kind: operators(found)[kind] for kind in counted} == counted
    close(made, found, {**FEED, "i": np.array([3, 0, 5]), "s": normal(3, 600, seed=2)})


def test_the_stored_one_stays_where_either_could(tmp_path: Path) -> None:
    """Both are only multiplied by. What is stored needs no transposing when it is decoded."""
    text = f"{IN} (float[n, {WIDTH}] y) {{ a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }}"
    for weights in ({"v": TURNED, "w": W}, {"w": W, "v": TURNED}):
        assert [t.name for t in shared(model(text, weights), tmp_path).graph.initializer] == [next(iter(weights))]


TIED = "{ e = Gather(w, i) a = Add(e, x) y = MatMul(a, v) }"
ALONE: dict[str, tuple[str, dict[str, Array]]] = {
    "small": (
        "g (int64[n] i, float[n, 64] s) => (float[n, 70] y) { e = Gather(w, i) y = MatMul(s, v) }",
        {"w": normal(70, 64), "v": np.ascontiguousarray(normal(70, 64).T)},
    ),
    "float64": (
        (
            f"g (int64[n] i, double[n, {WIDTH}] d) => (double[n, {ROWS}] y) {{ e = Gather(w, i) a = Add(e, d)"
            " y = MatMul(a, v) }"
        ),
        {"w": W.astype("f8"), "v": TURNED.astype("f8")},
    ),
    "other values": (f"{IN} {E2} {TIED}", {"w": W, "v": np.ascontiguousarray(W[::-1].T)}),
    "reshaped": (f"{IN} {E2} {TIED}", {"w": W, "v": W.reshape(WIDTH, ROWS)}),
    "read by something else": (
        f"{IN} {E2} {{ e = Gather(w, i) a = Add(e, x) b = MatMul(a, v) c = ReduceSum(v) y = Add(b, c) }}",
        {"w": W, "v": TURNED},
    ),
    "on the left": (
        f"g (int64[n] i, float[{ROWS}, n] s) => (float[{WIDTH}, n] y) {{ e = Gather(w, i) y = MatMul(v, s) }}",
        {"w": W, "v": TURNED},
    ),
    "returned": (f"{IN} (float[n, {ROWS}] y, float[{WIDTH}, {ROWS}] v) {TIED}", {"w": W, "v": TURNED}),
    "its transpose returned": (
        f"{IN} (float[n, {ROWS}] y, float[{WIDTH}, {ROWS}] v) {{ e = Gather(w, i) v = Transpose(w) y = MatMul(e, v) }}",
        {"w": W},
    ),
    "batches exchanged": (
        f"{IN} {E2} {{ e = Gather(w, i) y = com.microsoft.FusedMatMul <transBatchA = 1> (e, v) }}",
        {"w": W, "v": TURNED},
    ),
    "transposed only": (f"{IN} {E2} {{ v = Transpose(w) y = MatMul(x, v) }}", {"w": W}),
    "not a transposition": (
        (
            f"{IN} {E2} {{ e = Gather(w, i) u = Transpose <perm = [0, 1]> (w) c = ReduceSum(e)"
            " d = Gemm <transB = 1> (x, u) y = Add(c, d) }"
        ),
        {"w": W},
    ),
    "read in a branch": (
        f"""g (int64[n] i, float[n, {WIDTH}] x, bool c) => (float[n, {ROWS}] y) {{
            e = Gather(w, i)
            y = If (c) <
                then_branch = p () => (float[n, {ROWS}] py) {{ py = MatMul(e, v) }},
                else_branch = q () => (float[n, {ROWS}] qy) {{ qy = MatMul(x, v) }}
            >
        }}""",
        {"w": W, "v": TURNED},
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_not_shared(name: str, tmp_path: Path) -> None:
    text, weights = ALONE[name]
    made = model(text, weights, HEAD)
    assert shared(made, tmp_path) is made


def test_an_input_with_a_default_is_not_shared(tmp_path: Path) -> None:
    made = model(f"{IN} {E2} {TIED}", {"w": W, "v": TURNED})
    made.graph.input.append(helper.make_tensor_value_info("v", 1, [WIDTH, ROWS]))
    assert shared(made, tmp_path) is made


def test_where_every_initializer_is_an_input(tmp_path: Path) -> None:
    """Below IR version 4, where opset 9 has a Gemm that needs a third input."""
    made = model(f"{IN} {E2} {TIED}", {"w": W, "v": TURNED}, '<ir_version: 3, opset_import: ["": 9]>')
    for tensor in made.graph.initializer:
        made.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    found = shared(made, tmp_path)
    assert operators(found) == {"Gather": 1, "Add": 1, "FusedMatMul": 1}
    assert [v.name for v in found.graph.input] == ["i", "x"]
    close(made, found)


def test_constant_nodes_and_a_branch(tmp_path: Path) -> None:
    """Each graph for itself: a weight of a branch is not taken from outside, where no one repacks it."""
    made = model(
        f"""g (int64[n] i, float[n, {WIDTH}] x, bool c) => (float[n, {ROWS}] y) {{
            e = Gather(w, i) h = MatMul(x, v)
            y = If (c) <
                then_branch = p () => (float[n, {ROWS}] py) {{ f = Gather(pw, i) a = MatMul(f, pv) py = Add(a, h) }},
                else_branch = q () => (float[n, {ROWS}] qy) {{ b = MatMul(e, qv) qy = Add(b, h) }}
            >
        }}""",
        {"w": W},
    )
    give(made.graph, "v", TURNED)
    then, other = (a.g for a in made.graph.node[-1].attribute)
    give(then, "pw", W)
    then.initializer.append(numpy_helper.from_array(TURNED, "pv"))
    give(other, "qv", TURNED)
    found = shared(made, tmp_path)
    then, other = (a.g for a in found.graph.node[-1].attribute)
    assert [t.name for t in found.graph.initializer] == ["w"]
    assert [t.name for t in then.initializer] == ["pw"]
    assert [t.name for t in other.initializer] == ["qv"]
    assert operators(found)["Gemm"] == 1
    assert [node.op_type for node in then.node] == ["Gather", "FusedMatMul", "Add"]
    for flag in (True, False):
        close(made, found, {**FEED, "c": np.array(flag)})


def test_float16(tmp_path: Path) -> None:
    values = normal(ROWS, 2 * WIDTH, scale=0.05).astype(np.float16)
    text = f"g (int64[n] i) => (float16[1, n, {ROWS}] y) {{ e = Gather(w, i) b = Unsqueeze(e, axis) y = MatMul(b, v) }}"
    made = model(text, {"w": values, "v": np.ascontiguousarray(values.T), "axis": np.array([0])})
    found = shared(made, tmp_path)
    assert operators(found)["FusedMatMul"] == 1
    feed = {"i": np.array([5, 1])}
    (want,), (have,) = (run_plain(m.SerializeToString(), feed) for m in (made, found))
    np.testing.assert_allclose(have.astype("f4"), want.astype("f4"), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dims", "kind"), [(["n", WIDTH], "Gemm"), (["b", "n", WIDTH], "FusedMatMul"), ([], "")])
def test_what_the_model_says_of_its_values_is_not_believed(dims: list[Any], kind: str, tmp_path: Path) -> None:
    """Gemm is taken only where the first input follows to be a matrix, and a vector may be given too."""
    shape = dims or [WIDTH]
    made = model(
        "g (int64[n] i, float[n] x) => (float y) { e = Gather(w, i) a = Relu(x) y = MatMul(a, v) }",
        {"w": W, "v": TURNED},
    )
    made.graph.input[1].CopyFrom(helper.make_tensor_value_info("x", 1, shape))
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 1, [*shape[:-1], ROWS]))
    made.graph.value_info.append(helper.make_tensor_value_info("a", 1, ["n", WIDTH] if kind != "Gemm" else None))
    found = shared(made, tmp_path)
    assert operators(found)[kind or "FusedMatMul"] == 1
    feed = {"i": np.array([1]), "x": normal(*(2 if isinstance(d, str) else d for d in shape))}
    del found.graph.value_info[:], made.graph.value_info[:]
    close(made, found, feed)


def test_at_which_size(tmp_path: Path) -> None:
    for rows, count in ((SMALLEST // 4 // WIDTH, 1), (SMALLEST // 4 // WIDTH - 1, 2)):
        values = normal(rows, WIDTH)
        text = f"{IN} (float[n, {rows}] y) {TIED}"
        made = model(text, {"w": values, "v": np.ascontiguousarray(values.T)})
        assert len(shared(made, tmp_path).graph.initializer) == count

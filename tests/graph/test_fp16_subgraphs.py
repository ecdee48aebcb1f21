"""The float16 graph of models with local functions, branches, loops, sequences and optional values."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import conx
from tests.builders import as_tensor, model, normal, save
from tests.graph.test_fp16 import FLOAT, HALF, LOCAL, V, W, X, body, branches, check, float16, number, operators, types

pytestmark = pytest.mark.usefixtures("no_sync")


# Functions


def test_nested_functions_with_attributes(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) { a = local.Layer <slope: float = 0.3> (x, w) y = local.Layer(a, v) }
        <domain: "local", opset_import: ["": 17, "local": 1]>
        Layer <slope: float = 0.1> (x, m) => (r) { a = MatMul(x, m) r = local.Leak <alpha: float = @slope> (a) }
        <domain: "local", opset_import: ["": 17]>
        Leak <alpha> (x) => (r) {
            n = LeakyRelu <alpha: float = @alpha> (x) r = Max(x, n)
        }""",
        {"w": W, "v": V},
        LOCAL,
    )
    half = check(made, {"x": X}, tmp_path)
    assert types(half)["w"] == types(half)["v"] == HALF
    assert operators(half.graph) == ["MatMul", "LeakyRelu", "Max"] * 2
    assert [helper.get_node_attr_value(n, "alpha") for n in half.graph.node if n.op_type == "LeakyRelu"] == [
        pytest.approx(0.3), pytest.approx(0.1),
    ]  # fmt: skip


def test_weights_in_functions(tmp_path: Path) -> None:
    """Used twice, inlined twice; equal initializers are one."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) { a = local.F(x) b = Tanh(a) y = local.F(b) }
        <domain: "local", opset_import: ["": 17]> F (x) => (r) { r = MatMul(x, w) }""",
        head=LOCAL,
    )
    function = made.functions[0]
    nodes = [helper.make_node("Constant", [], ["w"], value=as_tensor("", W)), *function.node]
    del function.node[:]
    function.node.extend(nodes)
    half = check(made, {"x": X}, tmp_path)
    assert set(types(half).values()) == {HALF}
    assert len(types(half)) == 1


def test_a_function_with_a_branch(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) { y = local.F(x, c, w) }
        <domain: "local", opset_import: ["": 17]> F (a, c, m) => (r) {
            r = If (c) <
                then_branch = p () => (float[2, 20] yp) { yp = MatMul(a, m) },
                else_branch = q () => (float[2, 20] yq) { b = MatMul(a, m) yq = Tanh(b) }
            >
        }""",
        {"w": W},
        LOCAL,
    )
    half = check(made, {"x": X, "c": np.array(True)}, tmp_path, {"x": X, "c": np.array(False)})
    assert types(half) == {"w": HALF}


def test_a_function_of_another_opset(tmp_path: Path) -> None:
    """Its operators mean something else here, so it stays. Neither onnx nor onnxruntime want such models."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) { a = MatMul(x, w) b = local.F(a) y = MatMul(b, w) }
        <domain: "local", opset_import: ["": 11]>
        F (x) => (r) { u = Unsqueeze <axes = [0]> (x) t = Tanh(u) r = Squeeze <axes = [0]> (t) }""",
        {"w": W},
        LOCAL,
    )
    half = float16(made, tmp_path)
    assert types(half) == {"w": FLOAT, "w/fp16": HALF}
    assert list(half.functions) == list(made.functions)


# Subgraphs

BRANCHES = """g (float[2, 20] x, bool c) => (float[2, 20] y) {
    y = If (c) <
        then_branch = p () => (float[2, 20] yp) { yp = MatMul(x, w) },
        else_branch = q () => (float[2, 20] yq) { a = Exp(x) b = MatMul(a, w) yq = Tanh(b) }
    >
}"""
YES, NO = {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}


def test_the_same_name_in_both_branches(tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i, scale=0.1)))
    half = check(made, YES, tmp_path, NO)
    assert [types(branch) for branch in branches(half)] == [{"w": HALF}, {"w": HALF}]


def test_the_same_name_as_both_types(tmp_path: Path) -> None:
    """In one branch float32 too, in the other float16 alone."""
    made = model("""g (float[2, 20] x, bool c) => (float[2, 20] y) {
        y = If (c) <
            then_branch = p () => (float[2, 20] yp) { a = Exp(w) b = MatMul(x, w) yp = MatMul(b, a) },
            else_branch = q () => (float[2, 20] yq) { yq = MatMul(x, w) }
        >
    }""")
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i, scale=0.1)))
    half = check(made, YES, tmp_path, NO)
    assert [types(branch)["w"] for branch in branches(half)] == [FLOAT, HALF]


def test_operators_without_float16_in_branches(tmp_path: Path) -> None:
    """Of an old opset (CumSum before 14, NonMaxSuppression) and of none (an operator for strings)."""
    made = model(
        """g (float[2, 20] x, bool c, int64 axis) => (float[2, 20] y) {
            h = MatMul(x, w)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { a = CumSum(h, axis) yp = MatMul(a, w) },
                else_branch = q () => (float[2, 20] yq) { a = MatMul(h, w) b = Det(w) yq = Add(a, b) }
            >
        }""",
        {"w": W},
        '<ir_version: 7, opset_import: ["": 13]>',
    )
    given = {"x": X, "axis": np.array(1)}
    half = check(made, given | {"c": np.array(True)}, tmp_path, given | {"c": np.array(False)})
    assert types(half)["w/fp16"] == HALF


def test_outer_values_of_both_types(tmp_path: Path) -> None:
    """A float16 value of the outer graph used as float32 in a branch, and the other way round."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y, float[2, 20] z) {
            h = MatMul(x, w) f = Exp(x)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { a = Exp(h) yp = MatMul(f, v) },
                else_branch = q () => (float[2, 20] yq) { a = Sinh(h) b = MatMul(h, v) d = MatMul(f, v) e = Add(a, b)
                    yq = Add(d, e) }
            >
            z = MatMul(h, v)
        }""",
        {"w": W, "v": V},
    )
    half = check(made, YES, tmp_path, NO)
    assert types(half) == {"w": HALF, "v": HALF}


def test_branches_in_branches(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool c, bool d) => (float[2, 20] y) {
            h = MatMul(x, w)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) {
                    k = MatMul(h, v)
                    yp = If (d) <
                        then_branch = r () => (float[2, 20] yr) { a = Exp(k) b = MatMul(h, w) yr = Add(a, b) },
                        else_branch = s () => (float[2, 20] ys) { ys = Add(h, k) }
                    >
                },
                else_branch = q () => (float[2, 20] yq) { yq = Softmax(h) }
            >
        }""",
        {"w": W, "v": V},
    )
    yes, no = np.array(True), np.array(False)
    cases = [{"x": X, "c": c, "d": d} for c in (yes, no) for d in (yes, no)]
    half = check(made, cases[0], tmp_path, *cases[1:])
    assert types(half) == {"w": HALF, "v": HALF}


def test_branches_without_nodes(tmp_path: Path) -> None:
    """They return their own weights, whose types stay."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            m = If (c) < then_branch = p () => (float[20, 20] a) { }, else_branch = q () => (float[20, 20] b) { } >
            h = MatMul(x, m) y = MatMul(h, w)
        }""",
        {"w": W},
    )
    for graph, name, seed in zip(branches(made), "ab", (3, 4), strict=True):
        graph.initializer.append(as_tensor(name, normal(20, 20, seed=seed)))
    half = check(made, YES, tmp_path, NO)
    assert [types(graph) for graph in branches(half)] == [{"a": FLOAT}, {"b": FLOAT}]


def test_branches_that_return_outer_values(tmp_path: Path) -> None:
    """By Identity, as onnxruntime wants it."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            h = MatMul(x, w) f = Exp(x)
            s = If (c) <
                then_branch = p () => (float[2, 20] yp) { yp = Identity(h) },
                else_branch = q () => (float[2, 20] yq) { yq = Identity(f) }
            >
            y = MatMul(s, w)
        }""",
        {"w": W},
    )
    assert types(check(made, YES, tmp_path, NO)) == {"w": HALF}


def test_a_loop_with_an_operator_without_float16(tmp_path: Path) -> None:
    """The carried value stays float32, what is computed of it between need not."""
    made = model(
        """g (int64 n, float[2, 20] x, int64 axis) => (float[2, 20] y, float[k, 2, 20] all) {
            yes = Constant <value = bool {1}> ()
            h = MatMul(x, v)
            y, all = Loop (n, yes, h) <
                body = b (int64 i, bool c, float[2, 20] s) => (bool d, float[2, 20] r, float[2, 20] t) {
                    d = Identity(c)
                    a = MatMul(s, w) e = CumSum(a, axis) f = Mul(e, tenth) r = Add(f, h)
                    t = MatMul(r, v)
                }
            >
        }""",
        {"w": W, "v": V, "tenth": number(0.1)},
        '<ir_version: 7, opset_import: ["": 13]>',
    )
    half = check(made, {"x": X, "n": np.array(3), "axis": np.array(1)}, tmp_path, atol=4e-3)
    assert types(half)["w"] == types(half)["v"] == HALF
    assert [v.type.tensor_type.elem_type for v in body(half).output] == [TensorProto.BOOL, FLOAT, FLOAT]


def test_a_loop_that_passes_its_values_on(tmp_path: Path) -> None:
    """A carried value that the body returns as it came, and one that is swapped for a weight."""
    made = model(
        """g (int64 n, float[2, 20] x) => (float[2, 20] y, float[2, 20] z) {
            yes = Constant <value = bool {1}> ()
            h = MatMul(x, w)
            y, z = Loop (n, yes, h, x) <
                body = b (int64 i, bool c, float[2, 20] s, float[2, 20] t) => (bool d, float[2, 20] r, float[2, 20] u) {
                    d = Identity(c)
                    r = Identity(s)
                    a = Add(h, t) u = MatMul(a, w)
                }
            >
        }""",
        {"w": W},
    )
    assert types(check(made, {"x": X, "n": np.array(3)}, tmp_path, atol=4e-3)) == {"w": HALF}


def test_a_loop_with_inputs_without_types(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float[2, 20] x) => (float[2, 20] y) {
            yes = Constant <value = bool {1}> ()
            h = MatMul(x, w)
            y = Loop (n, yes, h) <
                body = b (int64 i, bool c, float[2, 20] s) => (bool d, float[2, 20] r) {
                    d = Identity(c) r = MatMul(s, w)
                }
            >
        }""",
        {"w": W},
    )
    body(made).input[2].ClearField("type")
    check(made, {"x": X, "n": np.array(3)}, tmp_path, atol=4e-3)


def test_a_scan(tmp_path: Path) -> None:
    """Carried and scanned values, one of them through operators without float16."""
    made = model(
        """g (float[2, 20] x, float[5, 2, 20] seq) => (float[2, 20] y, float[5, 2, 20] all) {
            h = MatMul(x, w)
            parts = MatMul(seq, v)
            y, all = Scan <num_scan_inputs = 1, body = b (float[2, 20] s, float[2, 20] p)
                => (float[2, 20] r, float[2, 20] t)
            {
                a = MatMul(s, w) e = Tan(p) f = Tanh(e) r = Add(a, f) t = MatMul(r, v)
            }> (h, parts)
        }""",
        {"w": W, "v": V},
    )
    half = check(made, {"x": X, "seq": normal(5, 2, 20, scale=0.1)}, tmp_path, atol=4e-3)
    assert types(half) == {"w": HALF, "v": HALF}


def test_sequences(tmp_path: Path) -> None:
    """What holds values is no tensor: its elements keep their type."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, seq(float[2, 20]) s, float[4, 20] z) {
            a = MatMul(x, w) b = MatMul(x, v)
            s = SequenceConstruct(a, b)
            zero = Constant <value = int64 {0}> ()
            c = SequenceAt(s, zero)
            more = SequenceInsert(s, c)
            d = SequenceAt(more, zero)
            y = MatMul(d, w)
            halves = SplitToSequence <axis = 0> (y)
            z = ConcatFromSequence <axis = 0> (s)
        }""",
        {"w": W, "v": V},
    )
    assert types(check(made, {"x": X}, tmp_path, atol=4e-3)) == {
        "w": FLOAT, "w/fp16": HALF, "v": HALF,
    }  # fmt: skip


def test_a_map_over_a_sequence(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = MatMul(x, w)
            s = SequenceConstruct(a, x)
            m = SequenceMap <body = b (float[2, 20] e) => (float[2, 20] r) { r = MatMul(e, w) }> (s)
            zero = Constant <value = int64 {0}> ()
            f = SequenceAt(m, zero)
            y = Relu(f)
        }""",
        {"w": W},
    )
    assert types(check(made, {"x": X}, tmp_path, atol=4e-3)) == {"w": HALF}


def test_a_sequence_in_a_loop(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float[2, 20] x) => (float[k, 20] y) {
            yes = Constant <value = bool {1}> ()
            none = SequenceEmpty <dtype = 1> ()
            all = Loop (n, yes, none) <
                body = b (int64 i, bool c, seq(float[2, 20]) s) => (bool d, seq(float[2, 20]) r) {
                    d = Identity(c) a = MatMul(x, w) r = SequenceInsert(s, a)
                }
            >
            y = ConcatFromSequence <axis = 0> (all)
        }""",
        {"w": W},
    )
    assert types(check(made, {"x": X, "n": np.array(3)}, tmp_path)) == {"w": HALF}


def test_optional_values(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, bool b) {
            a = MatMul(x, w)
            o = Optional(a)
            b = OptionalHasElement(o)
            c = OptionalGetElement(o)
            d = OptionalGetElement(a)
            e = Add(c, d)
            y = MatMul(e, w)
        }""",
        {"w": W},
        '<ir_version: 8, opset_import: ["": 18]>',
    )
    assert types(check(made, {"x": X}, tmp_path, atol=4e-3)) == {"w": FLOAT, "w/fp16": HALF}


def test_the_source_is_not_changed(tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i)))
    path = save(made, tmp_path / "m.onnx")
    conx.pack(path, tmp_path / "m.conx", lossless=True, threads=1, verify=False)
    assert conx.unpack(tmp_path / "m.conx", tmp_path / "again.onnx").read_bytes() == path.read_bytes()

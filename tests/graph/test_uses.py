"""A weight is followed to the operators that compute with it."""

from pathlib import Path

import onnx
import pytest
from onnx import helper

from conx.graph.channels import ChannelAxis, channel_axis, keeps_exact
from conx.graph.read import read_model
from conx.graph.uses import Use, weight_uses
from tests.builders import as_tensor, give, model, normal, save

LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1, "com.microsoft": 1]>'
W = {"w": normal(20, 30)}


def uses(made: onnx.ModelProto, folder: Path, name: str = "w") -> tuple[Use, ...]:
    """The uses of all weights of that name."""
    with read_model(save(made, folder / "m.onnx")) as source:
        found = weight_uses(source)
        return tuple(use for weight in source.weights if weight.name == name for use in found[weight.number])


def brief(found: tuple[Use, ...]) -> set[tuple[str, int, tuple[int | None, ...]]]:
    return {(use.op_type, use.slot, use.perm) for use in found}


CHAINS = {
    "y = MatMul(x, w)": ("MatMul", 1, (0, 1)),
    "y = MatMul(w, x)": ("MatMul", 0, (0, 1)),
    "t = Transpose(w) y = MatMul(x, t)": ("MatMul", 1, (1, 0)),
    "t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)": ("MatMul", 1, (1, 0)),
    "t = Transpose <perm = [0, 1]> (w) y = MatMul(x, t)": ("MatMul", 1, (0, 1)),
    "t = Transpose(w) u = Transpose(t) y = MatMul(x, u)": ("MatMul", 1, (0, 1)),
    "t = Cast <to = 10> (w) u = Transpose(t) v = Identity(u) y = MatMul(x, v)": ("MatMul", 1, (1, 0)),
    "y = Gemm <transB = 1> (x, w)": ("Gemm", 1, (0, 1)),
    "y = Gather(w, x)": ("Gather", 0, (0, 1)),
    "k = Constant <value = int64[1] {0}> () u = Unsqueeze(w, k) y = MatMul(x, u)": ("MatMul", 1, (None, 0, 1)),
    "k = Constant <value = int64[3] {5, 4, 30}> () u = Reshape(w, k) y = MatMul(x, u)": ("MatMul", 1, (None, None, 1)),
    "k = Constant <value = int64[2] {0, -1}> () u = Reshape(w, k) y = MatMul(x, u)": ("MatMul", 1, (0, 1)),
    "u, v = Split <num_outputs = 2> (w) y = MatMul(x, u) z = MatMul(x, v)": ("MatMul", 1, (0, 1)),
    "u = Concat <axis = 0> (w, w) y = MatMul(x, u)": ("MatMul", 1, (0, 1)),
}


@pytest.mark.parametrize("nodes", CHAINS)
def test_chains(nodes: str, tmp_path: Path) -> None:
    made = model(f"g (float[2, 20] x) => (float[2, 30] y) {{ {nodes} }}", W)
    assert brief(uses(made, tmp_path)) == {CHAINS[nodes]}


def test_several_uses(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, int64[3] i) => (float[2, 20] y, float[3, 30] e) {
            a = MatMul(x, w) e = Gather(w, i) y = Gemm <transB = 1> (a, w)
        }""",
        W,
    )
    found = uses(made, tmp_path)
    assert brief(found) == {("MatMul", 1, (0, 1)), ("Gather", 0, (0, 1)), ("Gemm", 1, (0, 1))}
    axes = {use.op_type: channel_axis(use, (20, 30)) for use in found}
    assert axes == {"MatMul": ChannelAxis(1), "Gather": ChannelAxis(0), "Gemm": ChannelAxis(0)}


def test_equal_uses_count_once(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 30] y) { a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b) }", W)
    assert len(uses(made, tmp_path)) == 1


def test_names_that_are_used_again(tmp_path: Path) -> None:
    """A name that a subgraph defines is no longer the weight there."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 30] y) {
            y = If (c) <
                then_branch = p () => (float[2, 30] yp) { yp = MatMul(x, w) },
                else_branch = q () => (float[2, 30] yq) { w = Identity(x) yq = Gemm(w, w) }
            >
        }""",
        W,
    )
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (0, 1))}


def test_bodies_see_the_outer_scope(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float[2, 20] x, float[20, 30] z) => (float[2, 20] y) {
            yes = Constant <value = bool {1}> ()
            t = Transpose(w)
            y = Loop (n, yes, x) <
                body = b (int64 i, bool c, float[2, 20] v) => (bool d, float[2, 20] r) {
                    d = Identity(c)
                    a = MatMul(v, w)
                    r = If (c) < then_branch = p () => (float[2, 20] yp) { yp = MatMul(a, t) },
                        else_branch = q () => (float[2, 20] yq) { yq = Identity(v) } >
                }
            >
        }""",
        W,
    )
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (0, 1)), ("MatMul", 1, (1, 0))}


def test_inputs_of_a_body_hide_the_outer_scope(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float[20, 20] x) => (float[20, 20] y) {
            yes = Constant <value = bool {1}> ()
            y = Loop (n, yes, x) <
                body = b (int64 i, bool c, float[20, 20] w) => (bool d, float[20, 20] r) {
                    d = Identity(c) r = MatMul(x, w)
                }
            >
        }""",
        W,
    )
    assert uses(made, tmp_path) == ()


FUNCTIONS = """
    <domain: "local", opset_import: ["": 17, "local": 1]> Outer (a, m) => (r) { t = Transpose(m) r = local.Inner(a, t) }
    <domain: "local", opset_import: ["": 17]> Inner (a, m) => (r) { r = MatMul(a, m) }
"""


def test_arguments_of_functions(tmp_path: Path) -> None:
    made = model(
        "g (float[2, 20] x) => (float[2, 30] y) { a = local.Inner(x, w) t = Transpose(w) y = local.Outer(a, t) }"
        + FUNCTIONS,
        W,
        LOCAL,
    )
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (0, 1))}
    made = model("g (float[2, 30] x) => (float[2, 20] y) { y = local.Outer(x, w) }" + FUNCTIONS, W, LOCAL)
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (1, 0))}


def test_constants_of_functions(tmp_path: Path) -> None:
    """Also of one that no weight is given to."""
    made = model("g (float[2, 20] x) => (float[2, 30] y) { y = local.Outer(x, x) }" + FUNCTIONS, head=LOCAL)
    body = made.functions[1]
    body.node[0].input[1] = "v"
    body.node.insert(0, helper.make_node("Constant", [], ["v"], value=as_tensor("w", normal(20, 30))))
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (0, 1))}


def test_functions_that_call_each_other(tmp_path: Path) -> None:
    """ONNX forbids it; we come to an end."""
    made = model(
        """g (float[2, 20] x) => (float[2, 30] y) { y = local.F(x, w) }
        <domain: "local", opset_import: ["": 17, "local": 1]> F (a, m) => (r) { t = Transpose(m) r = local.G(a, t) }
        <domain: "local", opset_import: ["": 17, "local": 1]> G (a, m) => (r) { t = Transpose(m) r = local.F(a, t) }
        """,
        W,
        LOCAL,
    )
    assert uses(made, tmp_path) == ()


def test_values_made_of_a_weight_many_times(tmp_path: Path) -> None:
    """Twice as often with each node, if one counted."""
    made = model("g (float[2, 20] x) => (float[2, 30] y) { y = MatMul(x, c60) }", W)
    for i in range(60):
        made.graph.node.insert(i, helper.make_node("Concat", [f"c{i}"] * 2, [f"c{i + 1}"], axis=0))
    made.graph.node.insert(0, helper.make_node("Identity", ["w"], ["c0"]))
    assert brief(uses(made, tmp_path)) == {("MatMul", 1, (0, 1))}


def test_constants(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 30] y) { y = MatMul(x, k) }")
    give(made.graph, "k", as_tensor("", normal(20, 30)))
    assert brief(uses(made, tmp_path, name="k")) == {("MatMul", 1, (0, 1))}


ODD = [
    ("Transpose", "perm", 1),
    ("Transpose", "perm", [1]),
    ("Transpose", "perm", [7, 9]),
    ("Transpose", "perm", [0.5]),
    ("Gather", "axis", 9),
    ("Gather", "axis", "x"),
    ("Gemm", "transB", [1]),
    ("Einsum", "equation", 1),
    ("Einsum", "equation", "ij,jk->ik,,"),
    ("Unsqueeze", "axes", 3),
    ("Squeeze", "axes", [5, 5]),
]


@pytest.mark.parametrize(("operator", "attribute", "value"), ODD, ids=str)
def test_attributes_that_make_no_sense(operator: str, attribute: str, value: object, tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 30] y) { t = Odd(w, x) y = MatMul(x, t) }", W)
    made.graph.node[0].op_type = operator
    made.graph.node[0].attribute.append(helper.make_attribute(attribute, value))
    for use in uses(made, tmp_path):
        channel_axis(use, (20, 30))


@pytest.mark.parametrize(
    "operator", ["QuantizeLinear", "DequantizeLinear", "MatMulNBits", "QLinearConv", "Resize", "Where"]
)
def test_operators_whose_operands_stay_exact(operator: str) -> None:
    assert keeps_exact(Use(operator, "", 1, (), (0, 1)))


@pytest.mark.parametrize("operator", ["MatMul", "Conv", "Gather", "Add", "Mul"])
def test_other_operators(operator: str) -> None:
    assert not keeps_exact(Use(operator, "", 1, (), (0, 1)))

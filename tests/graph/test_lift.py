"""The run graph computes what the source does, wherever its weights were."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import conx
from conx.graph import lift
from conx.graph.lift import nested_graphs, run_graph
from conx.graph.read import MARKER, read_model, weight_number
from tests.builders import CPU, as_tensor, give, model, normal, one_thread, run, run_plain, same_bits, save, tensors

pytestmark = pytest.mark.usefixtures("no_sync")

X = normal(2, 20)
LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'


@pytest.fixture(params=[False, True], ids=["kept", "lifted"])
def lifting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Weights of subgraphs stay there, or move as if they were too large to stay."""
    if request.param:
        monkeypatch.setattr(lift, "LIFT_ABOVE", -1)
    return bool(request.param)


def check(made: onnx.ModelProto, feeds: Mapping[str, Any], folder: Path, *more: Mapping[str, Any]) -> onnx.ModelProto:
    """The packed model answers as onnxruntime does; gives the run graph, weights as stubs.

    Without what onnxruntime repacks too: then it is told the same. Lifted weights of subgraphs are not fused and not
    repacked, so that the last bits may differ.
    """
    path = save(made, folder / "m.onnx")
    conx.pack(path, folder / "m.conx", lossless=True, threads=1, verify=False)
    exact = lift.LIFT_ABOVE >= 0
    for memory in ("auto", "low"):
        options = one_thread()
        if memory == "low":
            options.add_session_config_entry("session.disable_prepacking", "1")
        session = conx.InferenceSession(folder / "m.conx", one_thread(), CPU, memory=memory, threads=1)
        for given in (feeds, *more):
            wanted, got = run_plain(path, given, options), run(session, given)
            assert same_bits(wanted, got) if exact else np.allclose(wanted[0], got[0], 1e-4, 1e-4)
        del session
    unpacked = conx.unpack(folder / "m.conx", folder / "run.onnx", precision="original")
    onnx.checker.check_model(unpacked)
    wanted, got = run_plain(path, feeds), run_plain(unpacked, feeds)
    assert same_bits(wanted, got) if exact else np.allclose(wanted[0], got[0], 1e-4, 1e-4)
    with read_model(path) as source:
        return run_graph(source.proto, source.weights).proto


def names(run: onnx.ModelProto) -> list[str]:
    """The initializers that are handed over."""
    return [t.name for t in run.graph.initializer if t.data_location == TensorProto.EXTERNAL]


def holes(run: onnx.ModelProto) -> int:
    """How many weights stay where they were."""
    every = [*tensors(run.graph), *(t for f in run.functions for t in tensors(onnx.GraphProto(node=f.node)))]
    every += [t for s in run.graph.sparse_initializer for t in (s.values, s.indices)]
    return sum(weight_number(t) is not None for t in every)


def branches(made: onnx.ModelProto) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    node = next(node for node in made.graph.node if node.op_type == "If")
    return node.attribute[0].g, node.attribute[1].g


BRANCHES = """g (float[2, 20] x, bool c) => (float[2, 20] y) {
    y = If (c) <
        then_branch = p () => (float[2, 20] yp) { yp = MatMul(x, w) },
        else_branch = q () => (float[2, 20] yq) { yq = MatMul(x, w) }
    >
}"""
YES, NO = {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}


@pytest.mark.floor
def test_the_same_name_in_both_branches(lifting: bool, tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i)))
    run = check(made, YES, tmp_path, NO)
    assert len(names(run)) == len(set(names(run))) == (2 if lifting else 0)
    assert holes(run) == (0 if lifting else 2)
    assert [len(branch.initializer) for branch in branches(run)] == ([0, 0] if lifting else [1, 1])


def test_a_name_of_the_main_graph_in_one_branch(lifting: bool, tmp_path: Path) -> None:
    """ONNX forbids it and onnxruntime confuses the two; we at least keep them apart."""
    made = model(BRANCHES, {"w": normal(20, 20)})
    branches(made)[0].initializer.append(as_tensor("w", normal(20, 20, seed=1)))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        run = run_graph(source.proto, source.weights).proto
    assert names(run) == (["w", "w/1"] if lifting else ["w"])
    assert branches(run)[0].node[0].input[1] == ("w/1" if lifting else "w")
    assert branches(run)[1].node[0].input[1] == "w"


def test_constants_in_branches(lifting: bool, tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        give(branch, "w", normal(20, 20, seed=i))
        branch.value_info.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [20, 20]))
    run = check(made, YES, tmp_path, NO)
    assert len(names(run)) == (2 if lifting else 0)
    kept = [] if lifting else ["Constant"]
    assert [n.op_type for branch in branches(run) for n in branch.node] == [*kept, "MatMul"] * 2


def test_names_that_are_taken(lifting: bool, tmp_path: Path) -> None:
    """New names differ from all that there are, inputs and results included."""
    made = model(BRANCHES, {"w": normal(20, 20), "w/1": normal(20, 20, seed=3)})
    made.graph.node.insert(0, helper.make_node("MatMul", ["x", "w/1"], ["w/2"]))
    made.graph.output.append(helper.make_tensor_value_info("w/2", TensorProto.FLOAT, [2, 20]))
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i + 1)))
    run = check(made, YES, tmp_path, NO)
    assert len(set(names(run))) == (4 if lifting else 2)


DEEP = """g (float[2, 20] x, bool c) => (float[2, 20] y) {
    y = If (c) <
        then_branch = p () => (float[2, 20] yp) {
            a = MatMul(x, w)
            yp = If (c) <
                then_branch = r () => (float[2, 20] yr) { b = MatMul(a, w) yr = Add(b, v) },
                else_branch = s () => (float[2, 20] ys) { ys = MatMul(a, v) }
            >
        },
        else_branch = q () => (float[2, 20] yq) { yq = MatMul(x, w) }
    >
}"""


def test_branches_within_branches(lifting: bool, tmp_path: Path) -> None:
    """A name of the outer branch is seen in the inner one."""
    made = model(DEEP)
    outer, other = branches(made)
    inner, last = outer.node[1].attribute[0].g, outer.node[1].attribute[1].g
    for i, (graph, name, rows) in enumerate([(outer, "w", 20), (other, "w", 20), (inner, "v", 1), (last, "v", 20)]):
        graph.initializer.append(as_tensor(name, normal(20, 20, seed=i)[:rows]))
    run = check(made, YES, tmp_path, NO)
    assert len(set(names(run))) == (3 if lifting else 0)
    assert {n.input[1] for n in branches(run)[0].node if n.op_type == "MatMul"} == {"w/1" if lifting else "w"}


def test_an_inner_branch_with_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lifted, each graph still sees its own."""
    monkeypatch.setattr(lift, "LIFT_ABOVE", -1)
    made = model(DEEP)
    outer, other = branches(made)
    inner = outer.node[1].attribute[0].g
    for i, graph in enumerate((outer, other, inner)):
        graph.initializer.append(as_tensor("w", normal(20, 20, seed=i)))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        run = run_graph(source.proto, source.weights)
        values = {e.name: source.weights[e.weight].read() for e in run.externals}
    found = branches(run.proto)
    seen = [found[0].node[0], found[1].node[0], found[0].node[1].attribute[0].g.node[0]]
    for i, node in enumerate(seen):
        assert values[node.input[1]].tobytes() == normal(20, 20, seed=i).tobytes()


@pytest.mark.usefixtures("lifting")
def test_a_branch_that_returns_its_weight(tmp_path: Path) -> None:
    """Without a node, or with a Constant: neither can be lifted."""
    made = model("""g (bool c) => (float[20, 20] y) {
        y = If (c) < then_branch = p () => (float[20, 20] w) { }, else_branch = q () => (float[20, 20] v) { } >
    }""")
    then, other = branches(made)
    then.initializer.append(as_tensor("w", normal(20, 20)))
    give(other, "v", normal(20, 20, seed=1))
    run = check(made, {"c": np.array(True)}, tmp_path, {"c": np.array(False)})
    assert names(run) == []
    assert holes(run) == 2


def test_one_tensor_returned_and_used(lifting: bool, tmp_path: Path) -> None:
    made = model("""g (float[2, 20] x, bool c) => (float[2, 20] y, float[20, 20] z) {
        y, z = If (c) <
            then_branch = p () => (float[2, 20] yp, float[20, 20] w) { yp = MatMul(x, w) },
            else_branch = q () => (float[2, 20] yq, float[20, 20] zq) { yq = MatMul(x, w) zq = Identity(w) }
        >
    }""")
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i)))
    run = check(made, YES, tmp_path, NO)
    assert holes(run) == (1 if lifting else 2)
    assert len(names(run)) == (1 if lifting else 0)


def loop() -> onnx.ModelProto:
    return model("""g (int64 n, float[2, 20] x) => (float[2, 20] y, float[k, 2, 20] all) {
        yes = Constant <value = bool {1}> ()
        y, all = Loop (n, yes, x) <
            body = b (int64 i, bool c, float[2, 20] v) => (bool d, float[2, 20] r, float[2, 20] s) {
                d = Identity(c)
                a = MatMul(v, w)
                t = Add(a, bias)
                r = Tanh(t)
                s = MatMul(r, u)
            }
        >
    }""")


@pytest.mark.parametrize("constant", [False, True])
def test_a_loop(constant: bool, lifting: bool, tmp_path: Path) -> None:
    made = loop()
    body = made.graph.node[1].attribute[0].g
    for i, (name, shape) in enumerate({"w": (20, 20), "u": (20, 20), "bias": (20,)}.items()):
        if constant:
            give(body, name, normal(*shape, seed=i))
        else:
            body.initializer.append(as_tensor(name, normal(*shape, seed=i)))
    feeds = {"x": X, "n": np.array(3)}
    run = check(made, feeds, tmp_path, feeds | {"n": np.array(0)})
    assert sorted(names(run)) == (["u", "w"] if lifting else [])


def test_a_weight_that_is_carried_through_a_loop(tmp_path: Path) -> None:
    made = model(
        """g (int64 n, float[2, 20] x) => (float[2, 20] y, float[20, 20] z) {
            yes = Constant <value = bool {1}> ()
            y, z = Loop (n, yes, x, w) <
                body = b (int64 i, bool c, float[2, 20] v, float[20, 20] w) => (
                    bool d, float[2, 20] r, float[20, 20] q
                ) { d = Identity(c) r = MatMul(v, w) q = Add(w, w) }
            >
        }""",
        {"w": normal(20, 20, scale=0.1)},
    )
    run = check(made, {"x": X, "n": np.array(4)}, tmp_path)
    assert names(run) == ["w"]


def test_a_scan(lifting: bool, tmp_path: Path) -> None:
    made = model("""g (float[2, 20] start, float[5, 2, 20] xs) => (float[2, 20] y, float[5, 2, 20] ys) {
        y, ys = Scan <num_scan_inputs = 1, body = b (float[2, 20] s, float[2, 20] x) => (float[2, 20] r, float[2, 20] o)
            { a = MatMul(s, w) r = Add(a, x) o = Gemm(r, v) }
        > (start, xs)
    }""")
    body = next(a for a in made.graph.node[0].attribute if a.name == "body").g
    body.initializer.append(as_tensor("w", normal(20, 20)))
    give(body, "v", normal(20, 20, seed=1))
    run = check(made, {"start": X, "xs": normal(5, 2, 20, seed=9)}, tmp_path)
    assert sorted(names(run)) == (["v", "w"] if lifting else [])


def test_constants_of_the_main_graph(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y) { a = MatMul(x, w) y = Add(a, small) }")
    give(made.graph, "w", normal(20, 20))
    give(made.graph, "small", normal(20))
    run = check(made, {"x": X}, tmp_path)
    assert names(run) == ["w"]
    assert [n.op_type for n in run.graph.node] == ["Constant", "MatMul", "Add"]


def test_constants_in_a_model_of_ir_3(tmp_path: Path) -> None:
    """Where initializers are inputs too."""
    made = model("g (float[2, 20] x) => (float[2, 20] y) { a = MatMul(x, w) y = MatMul(a, v) }", {"v": normal(20, 20)})
    made.ir_version = 3
    made.opset_import[0].version = 9
    made.graph.input.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [20, 20]))
    give(made.graph, "w", normal(20, 20))
    run = check(made, {"x": X}, tmp_path)
    assert [v.name for v in run.graph.input] == ["x", "v", "w"]
    session = conx.InferenceSession(tmp_path / "m.conx", one_thread())
    assert [v.name for v in session.get_inputs()] == ["x"]


def test_outputs_that_are_weights(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[20, 20] w, float[20, 20] v) {
            a = MatMul(x, w) y = MatMul(a, v)
        }""",
        {"w": normal(20, 20)},
    )
    give(made.graph, "v", normal(20, 20, seed=1))
    run = check(made, {"x": X}, tmp_path)
    assert names(run) == ["w"]
    assert holes(run) == 1


def test_a_weight_that_may_be_given(tmp_path: Path) -> None:
    """An initializer that is an input is a default, from IR version 4 on."""
    made = model("g (float[2, 20] x, float[20, 20] w) => (float[2, 20] y) { y = MatMul(x, w) }", {"w": normal(20, 20)})
    check(made, {"x": X}, tmp_path, {"x": X, "w": normal(20, 20, seed=5)})
    session = conx.InferenceSession(tmp_path / "m.conx", one_thread())
    assert [v.name for v in session.get_inputs()] == ["x"]
    assert [v.name for v in session.get_overridable_initializers()] == ["w"]


FUNCTIONS = """g (float[2, 20] x) => (float[2, 20] y) { y = local.Outer(x) }
    <domain: "local", opset_import: ["": 17, "local": 1]> Outer (a) => (r) { b = local.Inner(a, w) r = MatMul(b, w) }
    <domain: "local", opset_import: ["": 17]> Inner (a, m) => (r) { s = MatMul(a, m) r = MatMul(s, w) }
"""


def test_functions(tmp_path: Path) -> None:
    """Weights in functions stay: nothing can be handed over there."""
    made = model(FUNCTIONS, head=LOCAL)
    for i, function in enumerate(made.functions):
        nodes = [helper.make_node("Constant", [], ["w"], value=as_tensor("", normal(20, 20, seed=i))), *function.node]
        del function.node[:]
        function.node.extend(nodes)
    run = check(made, {"x": X}, tmp_path)
    assert names(run) == []
    assert holes(run) == 2


@pytest.mark.usefixtures("lifting")
def test_a_function_with_a_branch(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) { y = local.F(x, c, w) }
        <domain: "local", opset_import: ["": 17]> F (a, c, m) => (r) {
            r = If (c) <
                then_branch = p () => (float[2, 20] yp) { yp = MatMul(a, w) },
                else_branch = q () => (float[2, 20] yq) { yq = MatMul(a, m) }
            >
        }""",
        {"w": normal(20, 20)},
        LOCAL,
    )
    branch = made.functions[0].node[0].attribute[0].g
    branch.initializer.append(as_tensor("w", normal(20, 20, seed=1)))
    run = check(made, YES, tmp_path, NO)
    assert names(run) == ["w"]
    assert holes(run) == 1


def test_sparse_initializers(tmp_path: Path) -> None:
    made = model("g (float[2, 100] x) => (float[2, 20] y, float[2, 20] z) { y = MatMul(x, w) z = MatMul(x, v) }")
    indices = as_tensor("i", np.arange(0, 2000, 5))
    sparse = helper.make_sparse_tensor(as_tensor("w", normal(400)), indices, [100, 20])
    made.graph.sparse_initializer.append(sparse)
    pairs = as_tensor("j", np.stack([np.arange(0, 100), np.arange(0, 100) % 20], axis=1))
    constant = helper.make_sparse_tensor(as_tensor("", normal(100, seed=1)), pairs, [100, 20])
    node = helper.make_node("Constant", [], ["v"], sparse_value=constant)
    made.graph.node.insert(0, node)
    run = check(made, {"x": normal(2, 100)}, tmp_path)
    assert names(run) == []
    assert holes(run) >= 2


def test_tensors_of_other_operators(tmp_path: Path) -> None:
    made = model("g (int64[3] x) => (float[3] y) { y = ai.onnx.ml.LabelEncoder(x) }", head="")
    made.ir_version = 8
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    keys, values = as_tensor("keys", np.arange(400)), as_tensor("values", normal(400))
    made.graph.node[0].attribute.append(helper.make_attribute("keys_tensor", keys))
    made.graph.node[0].attribute.append(helper.make_attribute("values_tensor", values))
    run = check(made, {"x": np.array([0, 7, 399])}, tmp_path)
    assert names(run) == []
    assert holes(run) == 2


TYPES = ["float16", "float64", "int8", "uint8", "int32", "int64", "uint64", "bool", "int16", "uint16", "uint32"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inside", [False, True])
def test_types(dtype: str, inside: bool, tmp_path: Path) -> None:
    """Weights of each type that NumPy has, in the main graph and in a branch."""
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, (40, 40)).astype(dtype)
    number = helper.np_dtype_to_tensor_dtype(values.dtype)
    made = model("""g (int64[3] x, bool c) => (double[3, 40] y) {
        y = If (c) <
            then_branch = p () => (double[3, 40] yp) { a = Gather(w, x) yp = Cast <to = 11> (a) },
            else_branch = q () => (double[3, 40] yq) {
                e = Concat <axis = 0> (w, w)
                a = Gather(e, x)
                yq = Cast <to = 11> (a)
            }
        >
    }""")
    for graph in branches(made) if inside else [made.graph]:
        graph.initializer.append(as_tensor("w", values))
        assert graph.initializer[0].data_type == number
    feeds = {"x": np.array([0, 39, 5]), "c": np.array(True)}
    check(made, feeds, tmp_path, feeds | {"c": np.array(False)})


def test_bfloat16_and_small_floats(tmp_path: Path) -> None:
    kinds = (TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2FNUZ)
    outputs = ", ".join(f"float[60, 40] y{i}" for i in range(len(kinds)))
    nodes = " ".join(f"y{i} = Cast <to = 1> (w{i})" for i in range(len(kinds)))
    rng = np.random.default_rng(0)
    weights = {
        f"w{i}": TensorProto(data_type=kind, dims=[60, 40], raw_data=rng.bytes(2400 * (2 if i == 0 else 1)))
        for i, kind in enumerate(kinds)
    }
    made = model(f"g () => ({outputs}) {{ {nodes} }}", weights, '<ir_version: 9, opset_import: ["": 19]>')
    check(made, {}, tmp_path)


def test_four_bits(tmp_path: Path) -> None:
    kinds = (TensorProto.INT4, TensorProto.UINT4)
    weights = {
        f"w{i}": TensorProto(data_type=kind, dims=[61, 41], raw_data=np.random.default_rng(i).bytes(1251))
        for i, kind in enumerate(kinds)
    }
    made = model(
        "g () => (float[61, 41] y0, float[61, 41] y1) { y0 = Cast <to = 1> (w0) y1 = Cast <to = 1> (w1) }",
        weights,
        '<ir_version: 10, opset_import: ["": 21]>',
    )
    check(made, {}, tmp_path)


def convolution(branch: onnx.GraphProto) -> None:
    """What onnxruntime fuses, with weights in the branch itself."""
    branch.initializer.extend(
        as_tensor(name, values)
        for name, values in {
            "k": normal(32, 16, 3, 3),
            "scale": normal(32, seed=1) ** 2,
            "shift": normal(32, seed=2),
            "mean": normal(32, seed=3),
            "variance": normal(32, seed=4) ** 2 + 1,
            "m": normal(64, 48, seed=5),
            "bias": normal(48, seed=6),
        }.items()
    )


def test_what_onnxruntime_fuses_in_a_branch(lifting: bool, tmp_path: Path) -> None:
    """Convolution and normalization, product and bias: fused or not, the bits are the same."""
    made = model("""g (float[1, 16, 8, 8] x, bool c) => (float[1, 32, 48] y) {
        y = If (c) <
            then_branch = p () => (float[1, 32, 48] yp) {
                a = Conv <pads = [1, 1, 1, 1]> (x, k)
                b = BatchNormalization(a, scale, shift, mean, variance)
                r = Relu(b)
                shape = Constant <value = int64[3] {1, 32, 64}> ()
                f = Reshape(r, shape)
                p = MatMul(f, m)
                q = Add(p, bias)
                yp = Relu(q)
            },
            else_branch = q () => (float[1, 32, 48] yq) {
                a = Conv <pads = [1, 1, 1, 1]> (x, k)
                s = Sigmoid(a)
                l = Mul(a, s)
                shape = Constant <value = int64[2] {32, 64}> ()
                f = Reshape(l, shape)
                p = Gemm(f, m, bias)
                up = Constant <value = int64[1] {0}> ()
                yq = Unsqueeze(p, up)
            }
        >
    }""")
    for branch in branches(made):
        convolution(branch)
    feeds = {"x": normal(1, 16, 8, 8, seed=9), "c": np.array(True)}
    run = check(made, feeds, tmp_path, feeds | {"c": np.array(False)})
    assert len(names(run)) == (4 if lifting else 0)


@pytest.mark.usefixtures("lifting")
def test_recurrent_layers_in_a_loop(tmp_path: Path) -> None:
    made = model("""g (int64 n, float[4, 1, 12] x) => (float[4, 1, 12] y) {
        yes = Constant <value = bool {1}> ()
        y = Loop (n, yes, x) <
            body = b (int64 i, bool c, float[4, 1, 12] v) => (bool d, float[4, 1, 12] r) {
                d = Identity(c)
                o, h, e = LSTM <hidden_size = 12> (v, w, q)
                axis = Constant <value = int64[1] {1}> ()
                r = Squeeze(o, axis)
            }
        >
    }""")
    body = made.graph.node[1].attribute[0].g
    body.initializer.append(as_tensor("w", normal(1, 48, 12)))
    body.initializer.append(as_tensor("q", normal(1, 48, 12, seed=1)))
    check(made, {"x": normal(4, 1, 12, seed=2), "n": np.array(2)}, tmp_path)


def test_training_information_is_left_out(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y) { y = MatMul(x, w) }", {"w": normal(20, 20)})
    made.training_info.add().initialization.initializer.append(as_tensor("t", normal(400)))
    path = save(made, tmp_path / "m.onnx")
    with read_model(path) as source:
        run = run_graph(source.proto, source.weights)
        assert not run.proto.training_info
        assert [e.name for e in run.externals] == ["w"]
    conx.pack(path, tmp_path / "m.conx", lossless=True, threads=1, verify=False)
    again = conx.unpack(tmp_path / "m.conx", tmp_path / "again.onnx").read_bytes()
    assert again == path.read_bytes()


def test_everything_else_stays(tmp_path: Path) -> None:
    """Names, metadata, versions, doc strings, value infos of the run graph are the source's."""
    made = model(BRANCHES, {"v": normal(20, 20)}, '<ir_version: 8, opset_import: ["": 17], producer_name: "someone">')
    made.metadata_props.add(key="stride", value="32")
    made.doc_string, made.model_version, made.domain = "words", 7, "org"
    made.graph.doc_string = "more words"
    made.graph.initializer[0].doc_string = "a weight"
    made.graph.value_info.append(helper.make_tensor_value_info("v", TensorProto.FLOAT, [20, 20]))
    made.graph.node[0].name = "the branch"
    for i, branch in enumerate(branches(made)):
        branch.initializer.append(as_tensor("w", normal(20, 20, seed=i)))
    check(made, YES, tmp_path, NO)
    unpacked = onnx.load(conx.unpack(tmp_path / "m.conx", tmp_path / "u.onnx", precision="original"))
    for name in (
        "metadata_props",
        "doc_string",
        "model_version",
        "domain",
        "opset_import",
        "producer_name",
        "ir_version",
    ):
        assert getattr(unpacked, name) == getattr(made, name)
    for name in ("name", "doc_string", "input", "output", "value_info"):
        assert getattr(unpacked.graph, name) == getattr(made.graph, name)
    assert unpacked.graph.initializer[0] == made.graph.initializer[0]
    session = conx.InferenceSession(tmp_path / "m.conx", one_thread())
    assert session.get_modelmeta().custom_metadata_map == {"stride": "32"}


def test_the_model_is_not_changed(tmp_path: Path) -> None:
    made = model(BRANCHES)
    for i, branch in enumerate(branches(made)):
        give(branch, "w", normal(20, 20, seed=i))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        before = source.proto.SerializeToString()
        run_graph(source.proto, source.weights)
        assert source.proto.SerializeToString() == before


REPACKED: dict[str, tuple[Callable[[], onnx.ModelProto], bool]] = {
    "MatMul": (lambda: model("g (float[2, 20] x) => (float[2, 20] y) { y = MatMul(x, w) }"), True),
    "Gemm": (lambda: model("g (float[2, 20] x) => (float[2, 20] y) { y = Gemm(x, w) }"), True),
    "FusedMatMul": (
        lambda: model("g (float[2, 20] x) => (float[2, 20] y) { y = com.microsoft.FusedMatMul <transB = 1> (x, w) }"),
        True,
    ),
    "FusedMatMul of batches": (
        lambda: model(
            "g (float[2, 20] x) => (float[2, 20] y) { y = com.microsoft.FusedMatMul <transBatchB = 1> (x, w) }"
        ),
        False,
    ),
    "left": (lambda: model("g (float[20, 2] x) => (float[20, 2] y) { y = MatMul(w, x) }"), False),
    "bias": (lambda: model("g (float[2, 20] x) => (float[20, 20] y) { a = Transpose(x) y = Gemm(a, x, w) }"), False),
    "added too": (
        lambda: model("g (float[20, 20] x) => (float[20, 20] y) { a = MatMul(x, w) y = Add(a, w) }"),
        False,
    ),
    "twice": (lambda: model("g (float[2, 20] x) => (float[2, 20] y) { a = MatMul(x, w) y = MatMul(a, w) }"), True),
    "returned": (
        lambda: model("g (float[2, 20] x) => (float[2, 20] y, float[20, 20] w) { y = MatMul(x, w) }"),
        False,
    ),
    "default": (
        lambda: model("g (float[2, 20] x, float[20, 20] w) => (float[2, 20] y) { y = MatMul(x, w) }"),
        False,
    ),
    "in a branch": (lambda: model(BRANCHES), False),
    "other domain": (
        lambda: model("g (float[2, 20] x) => (float[2, 20] y) { y = local.MatMul(x, w) }", head=LOCAL),
        False,
    ),
}


@pytest.mark.parametrize("case", REPACKED)
def test_what_is_marked_as_repacked(case: str, tmp_path: Path) -> None:
    """Only what nothing else than products of the main graph uses: anything else reads the buffer itself."""
    made, wanted = REPACKED[case][0](), REPACKED[case][1]
    made.graph.initializer.append(as_tensor("w", normal(20, 20)))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        (external,) = run_graph(source.proto, source.weights).externals
    assert external.repacked == wanted


@pytest.mark.parametrize("values", [normal(3, 20, 20), normal(40, 20).astype(np.float16), normal(20, 20).astype("f8")])
def test_only_float_matrices_are_repacked(values: np.ndarray[Any, Any], tmp_path: Path) -> None:
    made = model("g (float[2, n] x) => (float[2, 20] y) { y = MatMul(x, w) }", {"w": values})
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert [e.repacked for e in run_graph(source.proto, source.weights).externals] == [False]


def test_nested_graphs_are_found_in_order() -> None:
    graph = model(DEEP).graph
    assert [g.name for g in nested_graphs(graph)] == ["p", "r", "s", "q"]


def test_stubs_have_no_trace_of_the_marker(tmp_path: Path) -> None:
    made = model(FUNCTIONS, {"w": normal(20, 20)}, LOCAL)
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(as_tensor("s", normal(400)), as_tensor("i", np.arange(400)), [2000])
    )
    for function in made.functions:
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(20, 20)))
        nodes = [constant, *function.node]
        del function.node[:]
        function.node.extend(nodes)
    path = save(made, tmp_path / "m.onnx")
    conx.pack(path, tmp_path / "m.conx", lossless=True, threads=1, verify=False)
    for precision in (None, "original"):
        unpacked = conx.unpack(tmp_path / "m.conx", tmp_path / "u.onnx", precision=precision)
        assert MARKER.encode() not in unpacked.read_bytes()
        assert b"conx-" not in unpacked.read_bytes()

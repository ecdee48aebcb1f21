"""The float16 graph computes what the source does, whatever its weights and values are and wherever they lie."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, defs, helper

import conx
from conx.container.reader import Reader
from conx.graph.lift import nested_graphs
from tests.builders import CPU, as_tensor, give, model, normal, one_thread, run, run_plain, same_bits, save

pytestmark = pytest.mark.usefixtures("no_sync")

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
STANDARD = {"", "ai.onnx", "ai.onnx.ml", "local"}
X = normal(2, 20, seed=9)
W = normal(20, 20, scale=0.2)
V = normal(20, 20, seed=1, scale=0.2)
LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1]>'


def number(value: float) -> npt.NDArray[np.float32]:
    """A scalar."""
    return np.array(value, np.float32)


def check(
    made: onnx.ModelProto, feeds: Mapping[str, Any], folder: Path, *more: Mapping[str, Any], atol: float = 2e-3
) -> onnx.ModelProto:
    """Pack, compare the outputs of the float16 graph with the model's, look the graph over; gives it."""
    path = save(made, folder / "m.onnx")
    conx.pack(path, folder / "m.conx", lossless=True, threads=1, verify=False)
    session = conx.InferenceSession(folder / "m.conx", one_thread(), CPU, precision="fp16", threads=1)
    half = onnx.load(conx.unpack(folder / "m.conx", folder / "half.onnx", precision="fp16"))
    for given in (feeds, *more):
        wanted = run_plain(path, given)
        close(wanted, run(session, given), atol)
        close(wanted, run_plain(half.SerializeToString(), given), atol)
    look_over(half, made)
    return half


def float16(made: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The float16 graph of a model that onnxruntime cannot run."""
    conx.pack(save(made, folder / "m.onnx"), folder / "m.conx", lossless=True, threads=1, verify=False)
    return onnx.load(conx.unpack(folder / "m.conx", folder / "half.onnx", precision="fp16"))


def close(wanted: Any, got: Any, atol: float) -> None:
    """Floats differ by what float16 rounds, in proportion to the peak; everything else is equal."""
    if isinstance(wanted, np.ndarray) and wanted.dtype.kind == "f":
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        peak = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
        np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=atol * peak)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(wanted, got, strict=True):
            close(one, other, atol)
    else:
        assert same_bits(wanted, got)


def look_over(half: onnx.ModelProto, made: onnx.ModelProto) -> None:
    """Valid, sorted, well-typed, with the source's interface and names of weights, and with no needless casts."""
    onnx.checker.check_model(half)
    if is_inferable(made):
        onnx.shape_inference.infer_shapes(half, check_type=True, strict_mode=True, data_prop=True)
    if made.ir_version >= 4:
        assert list(half.graph.input) == list(made.graph.input)
    assert list(half.graph.output) == list(made.graph.output)
    assert list(half.opset_import) == list(made.opset_import)
    assert not half.functions
    casts_are_few(half.graph, {}, {})
    for graph in graphs(half):
        names = [t.name for t in graph.initializer]
        assert len(names) == len(set(names))
        assert {t.name for t in graph.initializer} <= used(graph) | {v.name for v in graph.input}


def is_inferable(made: onnx.ModelProto) -> bool:
    """Not with other domains' operators, nor with sparse weights, of which onnx takes no shape."""
    domains = {node.domain for graph in graphs(made) for node in graph.node}
    sparse = any(a.name == "sparse_value" for node in made.graph.node for a in node.attribute)
    return domains <= STANDARD and not sparse and not made.graph.sparse_initializer


def casts_are_few(graph: onnx.GraphProto, outer: Mapping[tuple[str, int], str], made_of: Mapping[str, str]) -> None:
    """No value is cast twice to the same type where both casts are seen, and no float comes back from float16."""
    done, sources = dict(outer), dict(made_of)
    for node in graph.node:
        if node.op_type == "Cast":
            to = int(helper.get_node_attr_value(node, "to"))
            assert (node.input[0], to) not in done
            done[node.input[0], to] = node.output[0]
            if to == HALF:
                sources[node.output[0]] = node.input[0]
            assert to != FLOAT or node.input[0] not in sources
        for inner in subgraphs(node):
            casts_are_few(inner, done, sources)


def graphs(made: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [made.graph, *nested_graphs(made.graph)]


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g


def used(graph: onnx.GraphProto) -> set[str]:
    """Names that a graph or one within it uses."""
    found = {v.name for v in graph.output} | {name for node in graph.node for name in node.input}
    for node in graph.node:
        for inner in subgraphs(node):
            found |= used(inner)
    return found


def types(half: onnx.ModelProto | onnx.GraphProto) -> dict[str, int]:
    """The element types of a graph's own initializers, by name."""
    graph = half.graph if isinstance(half, onnx.ModelProto) else half
    return {t.name: t.data_type for t in graph.initializer}


def operators(graph: onnx.GraphProto) -> list[str]:
    """The nodes but for the casts."""
    return [node.op_type for node in graph.node if node.op_type != "Cast"]


def branches(made: onnx.ModelProto) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    node = next(node for node in made.graph.node if node.op_type == "If")
    return node.attribute[0].g, node.attribute[1].g


def body(made: onnx.ModelProto) -> onnx.GraphProto:
    return next(nested_graphs(made.graph))


# Plain weights


@pytest.mark.floor
def test_a_region_is_float16_throughout(tmp_path: Path) -> None:
    """One cast in, one cast out."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y) {
            a = MatMul(x, w) b = Add(a, bias) c = Relu(b) d = Mul(c, two) y = Gemm(d, v, bias)
        }""",
        {"w": W, "v": V, "bias": normal(20, seed=2), "two": number(2)},
    )
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == dict.fromkeys(("w", "v", "bias", "two"), HALF)
    assert [node.op_type for node in half.graph.node] == ["Cast", "MatMul", "Add", "Relu", "Mul", "Gemm", "Cast"]


def test_a_value_that_is_used_and_returned(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[2, 20] z) {
            y = MatMul(x, w) z = MatMul(y, w)
        }""",
        {"w": W},
    )
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == {"w": HALF}
    assert [node.op_type for node in half.graph.node] == ["Cast", "MatMul", "Cast", "MatMul", "Cast"]


def test_a_value_that_both_types_use(tmp_path: Path) -> None:
    """Cast once for all that compute in float32."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[2, 20] z, float[2, 20] u) {
            a = MatMul(x, w) y = Exp(a) z = Sinh(a) u = MatMul(a, w)
        }""",
        {"w": W},
    )
    half = check(made, {"x": X}, tmp_path)
    assert [node.op_type for node in half.graph.node].count("Cast") == 3


def test_sparse_initializers_stay_float(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 100] x) => (float[2, 20] y, float[2, 20] z) {
            a = MatMul(x, s) y = MatMul(a, w) b = MatMul(x, c) z = MatMul(b, w)
        }""",
        {"w": W},
    )
    indices = as_tensor("i", np.arange(0, 2000, 5))
    sparse = helper.make_sparse_tensor(as_tensor("s", normal(400)), indices, [100, 20])
    made.graph.sparse_initializer.append(sparse)
    constant = helper.make_sparse_tensor(as_tensor("", normal(400, seed=1)), indices, [100, 20])
    made.graph.node.insert(0, helper.make_node("Constant", [], ["c"], sparse_value=constant))
    half = check(made, {"x": normal(2, 100)}, tmp_path)
    assert types(half) == {"w": HALF}
    assert [t.values.data_type for t in half.graph.sparse_initializer] == [FLOAT]


def test_a_weight_that_is_an_output(tmp_path: Path) -> None:
    """It stays what it was; who computes with it has it cast."""
    made = model("g (float[2, 20] x) => (float[2, 20] y, float[20, 20] w) { y = MatMul(x, w) }", {"w": W})
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == {"w": FLOAT}


@pytest.mark.parametrize("inside", [False, True])
def test_a_constant_that_is_an_output(inside: bool, tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y, float[20, 20] w) { y = MatMul(x, w) }")
    give(made.graph, "w", W)
    if inside:
        made = model(
            """g (float[2, 20] x, bool c) => (float[2, 20] y, float[20, 20] w) {
                y, w = If (c) <
                    then_branch = p () => (float[2, 20] yp, float[20, 20] wp) { yp = MatMul(x, wp) },
                    else_branch = q () => (float[2, 20] yq, float[20, 20] wq) { yq = MatMul(x, wq) }
                >
            }"""
        )
        for graph, name in zip(branches(made), ("wp", "wq"), strict=True):
            give(graph, name, W)
    check(made, {"x": X} | ({"c": np.array(True)} if inside else {}), tmp_path)


def test_a_weight_that_can_be_fed(tmp_path: Path) -> None:
    """A default value: it keeps its type, and another value works."""
    text = "g (float[2, 20] x, float[20, 20] w) => (float[2, 20] y) { a = MatMul(x, w) y = MatMul(a, v) }"
    made = model(text, {"w": W, "v": V})
    half = check(made, {"x": X}, tmp_path, {"x": X, "w": normal(20, 20, seed=7)})
    assert types(half) == {"w": FLOAT, "v": HALF}


def test_inputs_of_old_versions_are_no_defaults(tmp_path: Path) -> None:
    """Below IR version 4 every initializer is listed as an input, and is as constant as any."""
    text = "g (float[2, 20] x, float[20, 20] w) => (float[2, 20] y) { y = MatMul(x, w) }"
    made = model(text, {"w": W}, '<ir_version: 3, opset_import: ["": 8]>')
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == {"w": HALF}
    assert [(v.name, v.type.tensor_type.elem_type) for v in half.graph.input] == [("x", FLOAT), ("w", HALF)]


def test_a_weight_that_both_types_use(tmp_path: Path) -> None:
    made = model("g (float[2, 20] x) => (float[2, 20] y, float[20, 20] z) { y = MatMul(x, w) z = Exp(w) }", {"w": W})
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == {"w": FLOAT, "w/fp16": HALF}
    assert "Cast" not in operators(half.graph)


def test_a_weight_used_in_a_branch_and_outside(tmp_path: Path) -> None:
    """As float16 in both, and as float32 in one branch: two initializers at the most, no cast."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y, float[2, 20] z) {
            z = MatMul(x, w)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { e = Exp(w) yp = MatMul(x, e) },
                else_branch = q () => (float[2, 20] yq) { yq = MatMul(x, w) }
            >
        }""",
        {"w": W},
    )
    half = check(made, {"x": X, "c": np.array(True)}, tmp_path, {"x": X, "c": np.array(False)})
    assert types(half) == {"w": FLOAT, "w/fp16": HALF}


def test_names_that_look_like_ours(tmp_path: Path) -> None:
    """Weights whose names already end like those that the pass makes keep them, and their values."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[20, 20] z, float[20, 20] u) {
            a = MatMul(x, w) b = MatMul(a, w0) y = MatMul(b, w1) z = Exp(w0) u = Exp(v0)
        }""",
        {"w": W, "w0": V, "w1": normal(20, 20, seed=2, scale=0.2), "v": V, "v0": W},
    )
    names = {"w0": "w/fp16", "w1": "w/fp16_1", "v0": "v/fp16"}
    for node in made.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for tensor in made.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    half = check(made, {"x": X}, tmp_path)
    assert types(half) == {"w": HALF, "w/fp16": FLOAT, "w/fp16/fp16": HALF, "w/fp16_1": HALF, "v/fp16": FLOAT}


def test_constant_nodes_everywhere(tmp_path: Path) -> None:
    """Weights, vectors and scalars of every form a Constant has."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            two = Constant <value_float = 2.0> ()
            few = Constant <value_floats = [0.5, 0.25]> ()
            shape = Constant <value_ints = [2, 1]> ()
            column = Reshape(few, shape)
            a = MatMul(x, w)
            b = Mul(a, two)
            d = Mul(b, column)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { e = MatMul(d, v) yp = Add(e, bias) },
                else_branch = q () => (float[2, 20] yq) { e = MatMul(d, v) yq = Sub(e, two) }
            >
        }"""
    )
    give(made.graph, "w", W)
    for graph in branches(made):
        give(graph, "v", V)
    give(branches(made)[0], "bias", normal(20))
    half = check(made, {"x": X, "c": np.array(True)}, tmp_path, {"x": X, "c": np.array(False)})
    assert types(half)["w"] == HALF
    assert [types(graph)["v"] for graph in branches(half)] == [HALF, HALF]
    assert all("Exp" not in operators(graph) for graph in graphs(half))


def test_tied_and_transposed_weights(tmp_path: Path) -> None:
    """One table for the embedding and, transposed by the graph or by whoever made the model, for the head."""
    table = normal(60, 20, scale=0.3)
    made = model(
        """g (int64[2, 3] ids) => (float[2, 3, 60] y, float[2, 3, 60] z, float[2, 3, 60] u) {
            e = Gather(table, ids)
            t = Transpose <perm = [1, 0]> (table) y = MatMul(e, t)
            z = MatMul(e, turned) u = MatMul(e, again)
        }""",
        {"table": table, "turned": np.ascontiguousarray(table.T), "again": np.ascontiguousarray(table.T)},
    )
    half = check(made, {"ids": np.array([[0, 1, 2], [59, 58, 0]])}, tmp_path)
    assert set(types(half).values()) == {HALF}
    with Reader(tmp_path / "m.conx") as reader:
        assert len(reader.index.tensors) == 1


# Models as a whole


OPSETS = range(7, defs.onnx_opset_version() + 1)


@pytest.mark.parametrize("opset", OPSETS)
def test_opsets(opset: int, tmp_path: Path) -> None:
    """Where axes, ratios and bounds are attributes, and where they are inputs; graphs that onnxruntime runs run."""
    pairs = helper.OP_SET_ID_VERSION_MAP
    ir = min(pairs["ai.onnx", opset], 11)
    inputs = opset >= 13
    squeeze, extra = ("Squeeze(e, axis)", {"axis": np.array([0])}) if inputs else ("Squeeze <axes = [0]> (e)", {})
    clip = "Clip(d, low, high)" if opset >= 11 else "Clip <min = -1.0, max = 1.0> (d)"
    if opset >= 11:
        extra |= {"low": number(-1), "high": number(1)}
    norm = "BatchNormalization(c, scale, shift, mean, variance)"
    made = model(
        f"""g (float[1, 8, 6, 6] x) => (float[8, 36] y) {{
            c = Conv <pads = [1, 1, 1, 1]> (x, k)
            d = {norm}
            e = {clip}
            s = {squeeze}
            f = Reshape(s, shape)
            y = MatMul(f, w)
        }}""",
        {
            "k": normal(8, 8, 3, 3, scale=0.1),
            "w": normal(36, 36, scale=0.1),
            "shape": np.array([8, 36]),
            "scale": normal(8) + 1,
            "shift": normal(8, seed=1),
            "mean": normal(8, seed=2),
            "variance": normal(8, seed=3) ** 2 + 1,
            **extra,
        },
        f'<ir_version: {max(ir, 4)}, opset_import: ["": {opset}]>',
    )
    half = check(made, {"x": normal(1, 8, 6, 6)}, tmp_path)
    assert types(half)["k"] == types(half)["w"] == HALF
    assert [node.op_type for node in half.graph.node].count("Cast") == 2


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "float16"])
def test_models_without_float32_are_left_alone(dtype: str, tmp_path: Path) -> None:
    kind = {"float64": "double"}.get(dtype, dtype)
    weight = normal(30, 20, scale=10).astype(dtype)
    made = model(f"g ({kind}[2, 30] x) => ({kind}[2, 20] y) {{ a = MatMul(x, w) y = Add(a, a) }}", {"w": weight})
    half = check(made, {"x": normal(2, 30, scale=10).astype(dtype)}, tmp_path)
    assert half == onnx.load(conx.unpack(tmp_path / "m.conx", tmp_path / "o.onnx", precision="original"))


def test_a_bfloat16_model_becomes_float16(tmp_path: Path) -> None:
    """But for what float16 cannot hold of it."""
    large = normal(20, 10)
    large[0, 0] = 1e6
    text = """g (bfloat16[2, 30] x) => (float[2, 10] y) {
        b = MatMul(x, w) c = MatMul(b, v) y = Cast <to = 1> (c)
    }"""
    weights = {}
    for name, values in (("w", normal(30, 20)), ("v", large)):
        words = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
        weights[name] = TensorProto(data_type=TensorProto.BFLOAT16, dims=values.shape, raw_data=words.tobytes())
    weights["v"].dims[:] = [20, 10]
    made = model(text, weights)
    half = float16(made, tmp_path)
    look_over(half, made)
    assert types(half)["w"] == HALF
    assert types(half)["v"] == FLOAT


def test_a_mixed_model(tmp_path: Path) -> None:
    """Float16 already, but for an island and its input and output."""
    made = model(
        """g (float[2, 20] x) => (float[2, 40] y) {
            a = Cast <to = 10> (x) b = MatMul(a, w) c = Cast <to = 1> (b) d = Exp(c) e = MatMul(d, v)
            f = Cast <to = 10> (e) h = MatMul(f, w) y = Cast <to = 1> (h)
        }""",
        {"w": normal(20, 40, scale=0.2).astype(np.float16), "v": normal(40, 20, scale=0.2)},
    )
    assert types(check(made, {"x": X * np.float32(0.3)}, tmp_path, atol=4e-3)) == {"w": HALF, "v": HALF}


def test_a_cast_that_changes_nothing(tmp_path: Path) -> None:
    """To float32, as exporters write `.float()`: no longer needed, kept where it makes an output."""
    made = model(
        """g (float[2, 20] x) => (float[2, 20] y, float[2, 20] z) {
            a = MatMul(x, w) b = Cast <to = 1> (a) c = MatMul(b, w) y = Cast <to = 1> (c)
            d = Cast <to = 1> (y) z = MatMul(d, w)
        }""",
        {"w": W},
    )
    half = check(made, {"x": X}, tmp_path)
    assert [node.op_type for node in half.graph.node] == ["Cast", "MatMul", "MatMul", "Cast", "MatMul", "Cast"]


def test_weights_that_the_model_casts(tmp_path: Path) -> None:
    """Float16 on disk, computed with in float32: they are used as they are."""
    text = "g (float[2, 30] x) => (float[2, 20] y) { m = Cast <to = 1> (w) a = MatMul(x, m) y = Relu(a) }"
    made = model(text, {"w": normal(30, 20, scale=0.2).astype(np.float16)})
    half = check(made, {"x": normal(2, 30)}, tmp_path)
    assert [node.op_type for node in half.graph.node] == ["Cast", "MatMul", "Relu", "Cast"]


def test_nodes_in_no_order(tmp_path: Path) -> None:
    """As onnxruntime takes them, but in branches; then no node comes before what it or its branches use."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            a = MatMul(x, w)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { b = MatMul(a, w) yp = MatMul(b, v) },
                else_branch = q () => (float[2, 20] yq) { yq = MatMul(a, v) }
            >
        }""",
        {"w": W, "v": V},
    )
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(made.graph.node)]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    half = check(made, {"x": X, "c": np.array(True)}, tmp_path, {"x": X, "c": np.array(False)})
    assert types(half) == {"w": HALF, "v": HALF}


def assert_streams(path: Path, count: int) -> None:
    """The file holds so many different graphs: those that are equal are stored once."""
    with Reader(path) as reader:
        assert len({(g.stream.chunk, g.stream.offset, g.stream.size) for g in reader.index.graphs}) == count


@pytest.mark.parametrize("weights", [False, True])
def test_a_model_that_float16_does_not_change(weights: bool, tmp_path: Path) -> None:
    """Its graph is stored once, and the file grows by the record alone."""
    text = "g (float[2, 20] x) => (float[2, 20] y, float[20, 20] z) { a = Exp(x) y = Add(a, a) z = Exp(w) }"
    made = model(text, {"w": W}) if weights else model("g (float[2, 20] x) => (float[2, 20] y) { y = Exp(x) }")
    half = check(made, {"x": X}, tmp_path)
    assert half == onnx.load(conx.unpack(tmp_path / "m.conx", tmp_path / "o.onnx", precision="original"))
    assert_streams(tmp_path / "m.conx", 2 if weights else 1)

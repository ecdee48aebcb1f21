"""What is said of a model: counted from shapes, whatever the storage."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import conx
from conx.graph.facts import computes_in_floats, graph_facts
from conx.graph.parameters import parameter_facts, undone
from conx.graph.read import SourceModel, read_model
from conx.graph.ties import find_ties
from tests.builders import as_tensor, external, give, model, normal, save

LOCAL = '<ir_version: 8, opset_import: ["": 17, "local": 1], producer_name: "someone", producer_version: "1.2">'


def parameter_count(source: SourceModel) -> int:
    found: int = parameter_facts(source, find_ties(source.weights), undone(source))["parameters"]
    return found


def everywhere() -> onnx.ModelProto:
    """Parameters in all places: 3 · 400 large ones, 4 · 20 small ones."""
    made = model(
        """g (float[2, 20] x, bool c, seq(float[3]) s) => (float[2, 20] y, float[n, 20] z) {
            a = MatMul(x, w)
            b = Add(a, small)
            e = local.F(b)
            y = If (c) <
                then_branch = p () => (float[2, 20] yp) { yp = MatMul(e, inner) },
                else_branch = q () => (float[2, 20] yq) { f = Add(e, tiny) yq = Add(f, e) }
            >
            z = Identity(y)
        }
        <domain: "local", opset_import: ["": 17]> F (v) => (r) { r = Add(v, given) }
        """,
        {"w": normal(20, 20), "small": normal(20), "shape": np.arange(3), "indices": np.arange(500)},
        LOCAL,
    )
    give(made.graph, "constant", normal(20, 20, seed=1))
    give(made.graph, "small constant", normal(20, seed=1))
    branches = next(n for n in made.graph.node if n.op_type == "If").attribute
    branches[0].g.initializer.append(as_tensor("inner", normal(20, 20, seed=2)))
    give(branches[1].g, "tiny", normal(20, seed=3))
    made.functions[0].node.append(helper.make_node("Constant", [], ["given"], value=as_tensor("", normal(20, seed=4))))
    return made


@pytest.mark.parametrize("data", [None, "weights.bin"])
def test_parameters(data: str | None, tmp_path: Path) -> None:
    with read_model(save(everywhere(), tmp_path / "m.onnx", data)) as source:
        assert parameter_count(source) == 3 * 400 + 4 * 20


def test_facts(tmp_path: Path) -> None:
    with read_model(save(everywhere(), tmp_path / "m.onnx")) as source:
        assert graph_facts(source) == {
            "functions": 1,
            "inputs": [
                {"name": "x", "type": "float32", "shape": [2, 20]},
                {"name": "c", "type": "bool", "shape": []},
                {"name": "s", "type": "sequence_type"},
            ],
            "ir_version": 8,
            "nodes": 13,
            "operators": {"Add": 4, "Constant": 4, "Identity": 1, "If": 1, "MatMul": 2, "local.F": 1},
            "opsets": {"ai.onnx": 17, "local": 1},
            "outputs": [
                {"name": "y", "type": "float32", "shape": [2, 20]},
                {"name": "z", "type": "float32", "shape": ["n", 20]},
            ],
            "producer": "someone 1.2",
            "subgraphs": 2,
            "tensors": 4,
        }


def test_types_that_are_parameters(tmp_path: Path) -> None:
    kinds = {"f4": 400, "f2": 400, "f8": 400, "i1": 400, "u1": 400, "i4": 0, "i8": 0, "u2": 0, "u4": 0, "?": 0}
    for size in (20, 2000):
        for kind, parameters in kinds.items():
            values = np.ones((size // 20, 20), kind)
            made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": values})
            with read_model(save(made, tmp_path / "m.onnx")) as source:
                assert parameter_count(source) == (parameters and size)


def test_four_bits_count_as_one_each(tmp_path: Path) -> None:
    for size in (400, 4000):
        tensor = TensorProto(data_type=TensorProto.INT4, dims=[size + 1], raw_data=bytes(size // 2 + 1))
        made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": tensor})
        with read_model(save(made, tmp_path / "m.onnx")) as source:
            assert parameter_count(source) == size + 1


def test_external_parameters(tmp_path: Path) -> None:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": normal(40, 40), "v": normal(7)})
    for tensor in made.graph.initializer:
        (tmp_path / f"{tensor.name}.bin").write_bytes(external(tensor, f"{tensor.name}.bin"))
    info = conx.inspect(save(made, tmp_path / "m.onnx"))
    assert info.parameters == 1607
    assert info.file_bytes == info.source_bytes == sum(f.stat().st_size for f in tmp_path.iterdir())


QUANTIZED = {
    "QuantizeLinear": True,
    "DequantizeLinear": False,
    "DynamicQuantizeLinear": True,
    "MatMulInteger": True,
    "com.microsoft.MatMulNBits": True,
    "com.microsoft.QAttention": True,
    "com.microsoft.GatherBlockQuantized": True,
    "QLinearConv": True,
    "MatMul": False,
    "Conv": False,
    "com.microsoft.Attention": False,
}


@pytest.mark.parametrize("operator", QUANTIZED)
@pytest.mark.parametrize("place", ["main", "branch", "function"])
def test_quantized_models(operator: str, place: str, tmp_path: Path) -> None:
    domain, _, op_type = operator.rpartition(".")
    node = helper.make_node(op_type, ["x"], ["q"], domain=domain)
    made = model(
        """g (float[2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = p () => (float[2] yp) { yp = Identity(x) },
                else_branch = q () => (float[2] yq) { yq = Identity(x) }
            >
        }
        <domain: "local", opset_import: ["": 17]> F (x) => (r) { r = Identity(x) }
        """,
        head=LOCAL,
    )
    nodes = {
        "main": made.graph.node,
        "branch": made.graph.node[0].attribute[1].g.node,
        "function": made.functions[0].node,
    }
    nodes[place].append(node)
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        assert computes_in_floats(source) != QUANTIZED[operator]


@pytest.mark.usefixtures("no_sync")
def test_a_packed_file_says_the_same(tmp_path: Path) -> None:
    plain = conx.inspect(save(everywhere(), tmp_path / "m.onnx"))
    conx.pack(tmp_path / "m.onnx", tmp_path / "m.conx", lossless=True, threads=1, verify=False)
    packed = conx.inspect(tmp_path / "m.conx")
    for name in ("parameters", "unique_parameters", "source_bytes", "graph", "by_dtype", "lossless"):
        assert getattr(packed, name) == getattr(plain, name), name
    assert packed.memory["original"] == plain.memory["original"]
    assert [(t.name, t.dtype, t.shape, t.bytes, t.uses) for t in packed.tensors] == [
        (t.name, t.dtype, t.shape, t.bytes, t.uses) for t in plain.tensors
    ]

"""`conx.dequantize` and `conx dequantize`: models in memory and files of any size."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import conx
from conx.cli import main
from conx.dequantizing import dequantize_file
from conx.graph.dequantize import dequantized
from conx.graph.dequantize.files import opened, write
from tests.builders import external, model, normal, run_plain, save
from tests.graph.dequantize_kit import Array, near, outputs

TEXT = """g (float[n,32] x) => (float[n,40] y) {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    w = DequantizeLinear<axis = 1>(W_quantized, W_scale) y = MatMul(d, w) }"""


def quantized() -> onnx.ModelProto:
    codes = np.random.default_rng(0).integers(-128, 128, (32, 40)).astype(np.int8)
    weights: dict[str, Array] = {"W_quantized": codes, "W_scale": np.linspace(0.01, 0.1, 40, dtype=np.float32)}
    return model(TEXT, weights | {"s": np.array(0.02, np.float32), "z": np.array(128, np.uint8)})


def floats(proto: onnx.ModelProto) -> list[str]:
    return [t.name for t in proto.graph.initializer]


def test_in_memory_and_from_a_file(tmp_path: Path) -> None:
    source = quantized()
    before = source.SerializeToString()
    undone = conx.dequantize(source)
    assert source.SerializeToString() == before
    assert isinstance(undone, onnx.ModelProto)
    onnx.checker.check_model(undone, full_check=True)
    assert [node.op_type for node in undone.graph.node] == ["MatMul"]
    assert floats(undone) == ["W"]
    assert conx.dequantize(save(source, tmp_path / "m.onnx")) == undone
    assert conx.dequantize(str(tmp_path / "m.onnx")) == undone


def test_activations_may_stay() -> None:
    undone = conx.dequantize(quantized(), keep_activations=True)
    assert [node.op_type for node in undone.graph.node] == ["QuantizeLinear", "DequantizeLinear", "MatMul"]


def test_a_float_model_is_what_it_was() -> None:
    source = model("g (float[n,32] x) => (float[n,40] y) { m = MatMul(x, W) y = Relu(m) }", {"W": normal(32, 40)})
    undone = conx.dequantize(source)
    assert (undone.graph.node, undone.graph.initializer) == (source.graph.node, source.graph.initializer)


def test_external_data(tmp_path: Path) -> None:
    path = save(quantized(), tmp_path / "m.onnx", "m.bin")
    assert conx.dequantize(path) == conx.dequantize(quantized())
    unloaded = onnx.load(path, load_external_data=False)
    with pytest.raises(conx.ModelError, match=r"'W_quantized': its external data is not loaded; give the path"):
        conx.dequantize(unloaded)


def test_what_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"no model at all")
    with pytest.raises(conx.ModelError, match=r"m\.onnx: not an ONNX model"):
        conx.dequantize(path)
    with pytest.raises(FileNotFoundError):
        conx.dequantize(tmp_path / "none.onnx")


def test_operators_without_their_inputs_are_the_models_fault() -> None:
    source = quantized()
    del source.graph.node[0].input[1:]
    with pytest.raises(conx.ModelError, match="inputs or attributes"):
        conx.dequantize(source)


def test_files(tmp_path: Path) -> None:
    path, target = save(quantized(), tmp_path / "m.onnx"), tmp_path / "f.onnx"
    report = dequantize_file(path, target)
    assert (report.undone, report.left) == ({"DequantizeLinear": 2, "QuantizeLinear": 1}, [])
    undone = onnx.load(target)
    assert undone == conx.dequantize(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.onnx", "m.onnx"]
    with pytest.raises(ValueError, match="is the model itself"):
        dequantize_file(path, path)


def test_large_models_have_a_data_file(tmp_path: Path) -> None:
    target = tmp_path / "f.onnx"
    with opened(quantized()) as source:
        write(dequantized(source), target, external_above=1000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.onnx", "f.onnx.data"]
    assert target.stat().st_size < 1000
    feeds = {"x": normal(3, 32)}
    want = run_plain(conx.dequantize(quantized()).SerializeToString(), feeds)
    np.testing.assert_array_equal(run_plain(target, feeds)[0], want[0])


def test_nothing_partial_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(quantized()) as source:
        made = dequantized(source)
        monkeypatch.setattr(type(made.weights[-1]), "read", lambda _self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(made, tmp_path / "f.onnx", external_above=1000)
    assert list(tmp_path.iterdir()) == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = save(quantized(), tmp_path / "m.onnx"), tmp_path / "f.onnx"
    assert main(["dequantize", str(path), "-o", str(target)]) == 0
    assert "DequantizeLinear" in capsys.readouterr().out
    assert numpy_helper.to_array(onnx.load(target).graph.initializer[0]).dtype == np.float32
    assert main(["dequantize", str(path), "-o", str(target), "--keep-activations", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["undone"] == {"DequantizeLinear": 1}
    assert {left["op_type"] for left in report["left"]} == {"DequantizeLinear", "QuantizeLinear"}
    assert main(["dequantize", str(path), "-o", str(target), "--keep-activations"]) == 0
    assert "is to stay" in capsys.readouterr().out
    assert main(["dequantize", str(tmp_path / "none.onnx"), "-o", str(target)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_weights_of_functions_and_subgraphs(tmp_path: Path) -> None:
    """A function of another opset is not inlined; its weights are those of Constant nodes."""
    text = """<ir_version: 9, opset_import: ["": 17, "local": 1]>
        g (float[3,32] x, bool c) => (float[3,32] y) { h = local.dense (x) y = If (c) <
            then_branch = t () => (float[3,32] a) { a = Identity(h) },
            else_branch = e () => (float[3,32] b) { v = DequantizeLinear(V, s) b = MatMul(h, v) }> }
        <opset_import: ["": 16], domain: "local"> dense (x) => (y) { y = MatMul(x, w) }"""
    source = onnx.parser.parse_model(text)
    codes = np.random.default_rng(0).integers(-128, 128, (32, 32)).astype(np.int8)
    scale = numpy_helper.from_array(np.array(0.01, np.float32), "s")
    nodes = [
        onnx.helper.make_node("Constant", [], ["q"], value=numpy_helper.from_array(codes)),
        onnx.helper.make_node("Constant", [], ["s"], value=scale),
        onnx.helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
    ]
    for i, node in enumerate(nodes):
        source.functions[0].node.insert(i, node)
    branch = source.graph.node[1].attribute[1].g
    branch.initializer.extend([numpy_helper.from_array(codes, "V"), scale])
    undone = conx.dequantize(save(source, tmp_path / "m.onnx"))
    assert [node.op_type for node in undone.functions[0].node] == ["Constant", "MatMul"]
    inner = [g for node in undone.graph.node for a in node.attribute for g in [a.g] if g.initializer]
    assert [[t.name for t in g.initializer] for g in inner] == [["V/float"]]
    feeds = {"x": normal(3, 32), "c": np.array(False)}
    near(outputs(undone, feeds), outputs(source, feeds))


def test_external_data_that_is_not_there(tmp_path: Path) -> None:
    source = quantized()
    external(source.graph.initializer[0], "gone.bin", 0, 1280)
    with pytest.raises(conx.ModelError, match=r"gone\.bin"):
        conx.dequantize(save(source, tmp_path / "m.onnx"))

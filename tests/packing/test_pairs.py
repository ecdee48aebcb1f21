"""A float model with the codes of its quantized form, whatever the names."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import QuantType

import conx
from tests.builders import CPU, model, normal, save
from tests.graph.dequantize_kit import dynamic, near, outputs
from tests.packing.kit import pack
from tests.packing.test_quantized import NET, TEXT, WIDE, Quantizer, blocks, feed

pytestmark = pytest.mark.usefixtures("no_sync")

TWINS: dict[str, tuple[onnx.ModelProto, Quantizer]] = {
    "dynamic": (NET, lambda m, f: dynamic(m, f, weight_type=QuantType.QInt8)),
    "dynamic, per channel": (NET, lambda m, f: dynamic(m, f, weight_type=QuantType.QUInt8, per_channel=True)),
    "recurrent": (TEXT, lambda m, f: dynamic(m, f, weight_type=QuantType.QInt8)),
    "8-bit blocks": (WIDE, blocks(8, False)),
    "4-bit blocks": (WIDE, blocks(4, True)),
}


def renamed(made: onnx.ModelProto) -> onnx.ModelProto:
    """All initializers under names that tell nothing."""
    found = onnx.ModelProto()
    found.CopyFrom(made)
    new = {tensor.name: f"t{i}" for i, tensor in enumerate(found.graph.initializer)}
    for tensor in found.graph.initializer:
        tensor.name = new[tensor.name]
    for node in found.graph.node:
        for slot, name in enumerate(node.input):
            node.input[slot] = new.get(name, name)
    return found


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_codes_of_the_twin(name: str, rename: bool, tmp_path: Path) -> None:
    made, quantize = TWINS[name]
    twin = quantize(made, tmp_path)
    path = save(renamed(twin) if rename else twin, tmp_path / "twin.onnx")
    packed = pack(made, tmp_path, quantized=path)
    report = packed.report.pairs
    assert report is not None
    assert report.unmatched == report.doubtful == ()
    assert set(report.matched) == {t.name for t in made.graph.initializer if len(t.dims) > 1 and t.data_type == 1}
    given = feed(made)
    want = outputs(conx.dequantize(twin), given)
    session = conx.InferenceSession(packed.path, precision="fp32", providers=CPU)
    near(session.run(None, given), want)
    assert [o.name for o in packed.unpack().graph.output] == [o.name for o in made.graph.output]
    held = {t.name: numpy_helper.to_array(t) for t in packed.unpack().graph.initializer}
    for tensor in made.graph.initializer:
        if tensor.name not in report.matched:
            np.testing.assert_array_equal(held[tensor.name], numpy_helper.to_array(tensor))


def test_a_twin_of_another_model(tmp_path: Path) -> None:
    other = model("g (float[n, 128] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": normal(128, 64, seed=9)})
    twin = save(blocks(8, True)(other, tmp_path), tmp_path / "twin.onnx")
    with pytest.raises(
        conx.ModelError, match=r"twin\.onnx: is no quantized form of .*: of its 1 quantized weights 0 lie"
    ):
        pack(WIDE, tmp_path, quantized=twin)
    assert not (tmp_path / "m.conx").exists()


def test_a_twin_that_is_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(conx.ModelError, match=r"twin\.onnx: holds no quantized weights; name the quantized form of"):
        pack(WIDE, tmp_path, quantized=save(WIDE, tmp_path / "twin.onnx"))


def test_what_fits_nowhere_is_told(tmp_path: Path) -> None:
    """One weight of the twin was trained on: it stays the float model's own."""
    text = "g (float[n, 128] x) => (float[n, 64] y) { h = MatMul(x, u) i = MatMul(h, v) y = MatMul(i, w) }"
    weights = {"u": normal(128, 128, scale=0.1), "v": normal(128, 128, seed=1, scale=0.1), "w": normal(128, 64, seed=2)}
    trained = weights | {"v": weights["v"] + normal(128, 128, seed=5, scale=0.05)}
    twin = save(blocks(8, True)(model(text, trained), tmp_path), tmp_path / "twin.onnx")
    report = pack(model(text, weights), tmp_path, quantized=twin).report.pairs
    assert report is not None
    assert (report.matched, len(report.unmatched)) == (("u", "w"), 1)


def test_a_few_values_elsewhere_are_doubtful(tmp_path: Path) -> None:
    weight = normal(128, 64, scale=0.1)
    touched = weight.copy()
    touched[::16] += np.float32(0.02)
    twin = save(
        blocks(8, True)(
            model("g (float[n, 128] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": touched}), tmp_path
        ),
        tmp_path / "twin.onnx",
    )
    made = model("g (float[n, 128] x) => (float[n, 64] y) { y = MatMul(x, w) }", {"w": weight})
    report = pack(made, tmp_path, quantized=twin).report.pairs
    assert report is not None
    assert report.doubtful == report.matched == ("w",)

"""Equal initializers become one."""

from pathlib import Path

import onnx
import pytest

from conx.graph.merge import merge_equal
from conx.graph.read import read_model, weight_number
from conx.graph.ties import find_ties
from tests.builders import model, normal, save

TEXT = """
g (bool c, float[n, 40] x) => (float[n, 40] y, float[40, 40] kept) {
    a = MatMul(x, first) b = MatMul(a, second) d = MatMul(b, kept) e = MatMul(d, other) f = MatMul(e, default)
    y = If(c) <
        then_branch = t () => (float[n, 40] g) { g = MatMul(f, second) },
        else_branch = e () => (float[n, 40] h) { third = Add(f, f) h = Add(third, f) }
    >
}"""


@pytest.mark.usefixtures("no_sync")
def test_equal_initializers_become_one(tmp_path: Path) -> None:
    same, other = normal(40, 40), normal(40, 40, seed=1)
    names = ("first", "second", "third", "kept", "default")
    made = model(TEXT, {**dict.fromkeys(names, same), "other": other})
    made.graph.input.append(onnx.helper.make_tensor_value_info("default", 1, [40, 40]))
    with read_model(save(made, tmp_path / "m.onnx")) as source:
        ties = find_ties(source.weights)

        def content(tensor: onnx.TensorProto) -> tuple[int, tuple[int, ...] | None] | None:
            number = weight_number(tensor)
            return None if number is None else (ties[number].stored, ties[number].perm)

        merged = onnx.ModelProto()
        merged.CopyFrom(source.proto)
        assert merge_equal(merged, content) == 2
    assert [t.name for t in merged.graph.initializer] == ["first", "kept", "default", "other"]
    nodes = {node.output[0]: node for node in merged.graph.node}
    assert [nodes[name].input[1] for name in "abdef"] == ["first", "first", "kept", "other", "default"]
    branches = [a.g.node[0] for a in nodes["y"].attribute]
    assert list(branches[0].input) == ["f", "first"]
    assert list(branches[1].output) == ["third"]
    assert merge_equal(merged, content) == 0

"""What the loader reads in a graph's message, and appends to it."""

from typing import Any

import numpy.typing as npt
import onnx
import pytest

from conx.dtypes import DType
from conx.errors import FormatError
from conx.runtime.message import PRODUCTS, as_inputs, only_read_by
from tests.builders import model, normal

Array = npt.NDArray[Any]


def reads(text: str, *names: str, **weights: Array) -> set[str]:
    made = model(text, weights or dict.fromkeys(names, normal(2, 2)))
    return only_read_by(made.SerializeToString(), PRODUCTS, weights or names)


def test_what_only_products_read() -> None:
    text = """g (float[2, 2] x, int64[1] i) => (float[2, 2] y) {
        a = MatMul(x, b1) c = Gemm(a, b2, b3) d = Gather(b4, i) e = Add(c, b5) f = MatMul(b6, e)
        g = MatMul(b7, b7) h = Gather(x, b8) j = MatMul(f, b9) y = Mul(j, b9)
    }"""
    assert reads(text, *(f"b{n}" for n in range(1, 11))) == {"b1", "b2", "b4"}


def test_what_subgraphs_functions_inputs_and_outputs_know() -> None:
    branch = """g (float[2, 2] x, bool c) => (float[2, 2] y) {
        a = MatMul(x, w) b = MatMul(a, v)
        y = If (c) <then_branch = t () => (float[2, 2] p) { p = MatMul(b, w) },
                    else_branch = e () => (float[2, 2] q) { q = Identity(b) }>
    }"""
    assert reads(branch, "w", "v") == {"v"}
    assert reads("g (float[2, 2] x, float[2, 2] w) => (float[2, 2] y) { y = MatMul(x, w) }", "w") == set()
    assert reads("g (float[2, 2] x) => (float[2, 2] y, float[2, 2] w) { y = MatMul(x, w) }", "w") == set()
    assert reads("g (float[2, 2] x) => (float[2, 2] y) { y = custom.MatMul(x, w) }", "w") == set()
    assert reads("g (float[2, 2] x) => (float[2, 2] y) { y = ai.onnx.MatMul(x, w) }", "w") == {"w"}
    assert reads("g (float[2, 2] x) => (float[2, 2] y) { y = com.microsoft.FusedMatMul(x, w) }", "w") == {"w"}
    assert reads("g (float[2, 2] x) => (float[2, 2] y) { y = FusedMatMul(x, w) }", "w") == set()


def test_names_in_any_letters() -> None:
    assert reads("g (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, w) }", "w") == {"w"}
    made = model("g (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, w) }", {"w": normal(2, 2)})
    made.graph.initializer[0].name = made.graph.node[0].input[1] = "größe/權重:0"
    assert only_read_by(made.SerializeToString(), PRODUCTS, ["größe/權重:0"]) == {"größe/權重:0"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_messages_cut_short(cut: int) -> None:
    """Never another error than one of the file's."""
    message = model("g (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, w) }").SerializeToString()
    for bad in (message[:-cut], message[:cut] + b"\xff" * 12 + message[cut:]):
        try:
            only_read_by(bad, PRODUCTS, ["w"])
        except FormatError as error:
            assert "graph: " in str(error)  # noqa: PT017 - there may be none


def test_appended_inputs_are_what_onnx_reads() -> None:
    made = model("g (float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, w) }", {"w": normal(2, 2)})
    kinds = {"w": DType.FLOAT32, "größe": DType.FLOAT16, "c" * 300: DType.BFLOAT16}
    more = as_inputs((name, dtype, (2, 1 << 40)) for name, dtype in kinds.items())
    found = onnx.load_from_string(made.SerializeToString() + more)
    assert [value.name for value in found.graph.input] == ["x", *kinds]
    assert [value.type.tensor_type.elem_type for value in found.graph.input[1:]] == [d.number for d in kinds.values()]
    assert [d.dim_value for d in found.graph.input[1].type.tensor_type.shape.dim] == [2, 1 << 40]
    del found.graph.input[1:]
    assert found == made
    assert as_inputs([]) == b""

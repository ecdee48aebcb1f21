"""Output channels a thousand times smaller than others keep their precision, whatever operator a weight belongs to.

Every weight here also differs along another axis, in such a way that the axis with the smallest error overall would be
that one (`test_unknown_use_takes_the_other_axis`). So the small channels are lost unless conx knows where they lie.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

import conx
from conx.graph import channels
from conx.graph.read import read_model
from conx.graph.uses import weight_uses
from tests.builders import CPU, give, model, normal, one_thread, run, run_plain, save
from tests.packing.kit import pack

pytestmark = pytest.mark.usefixtures("no_sync")

Floats = npt.NDArray[np.float32]
HEAD = '<ir_version: 10, opset_import: ["": 19, "com.microsoft": 1, "local": 1]>'
WITHIN = 0.01
SMALL = np.float32(1e-3)


def weight(*shape: int, channel: int | tuple[int, ...], other: int, seed: int = 0) -> Floats:
    """Positive weights, each second channel a thousandth; along `other` a few large ones among smaller ones.

    Positions of several `channel` axes are channels of their own, numbered in row-major order.
    """
    rng = np.random.default_rng(seed)
    axes = (channel,) if isinstance(channel, int) else channel
    values = rng.uniform(0.8, 1.2, shape)
    number = np.indices(shape)
    index = np.zeros(shape, int)
    for axis in axes:
        index = index + number[axis]
    values *= np.where(index % 2, SMALL, 1)
    values *= np.where(number[other] % 8, 0.25, 1)
    return values.astype(np.float32)


def positive(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A graph with weights and inputs; `axes` are those of its output that number the channels."""

    text: str
    weights: Mapping[str, Any]
    feeds: Mapping[str, Any]
    axes: tuple[int, ...] = (-1,)

    def model(self) -> onnx.ModelProto:
        return model(self.text, self.weights, HEAD)


def worst_channel(wanted: npt.NDArray[Any], got: npt.NDArray[Any], axes: tuple[int, ...]) -> float:
    """The largest error of a channel, relative to the channel (2-norms)."""
    rest = tuple(i for i in range(wanted.ndim) if i not in {a % wanted.ndim for a in axes})
    off = np.sqrt(np.square(got.astype(np.float64) - wanted).sum(axis=rest))
    size = np.sqrt(np.square(wanted.astype(np.float64)).sum(axis=rest))
    assert size.min() > 0
    assert size.max() / size.min() > 300  # the channels do differ
    return float((off / size).max())


def check(case: Case, folder: Path, codec: str = "linear", **settings: Any) -> None:
    """Packs, compares, and sees that the weights were coded at all."""
    packed = pack(case.model(), folder, **settings)
    large = [t for t in packed.stored.values() if t.dtype.is_float and len(t.shape) > 1 and t.codec != "fill"]
    assert large
    assert {t.codec for t in large} == {codec}
    wanted = run_plain(packed.model, case.feeds)[-1]
    session = conx.InferenceSession(packed.path, one_thread(), providers=CPU)
    got = run(session, case.feeds)[-1]
    assert worst_channel(wanted, got, case.axes) < WITHIN


ONE = np.ones((40, 1), np.float32)  # sums over a row, so that its rounding errors average out
X = positive(6, 64)
XT = positive(64, 6)
IMAGE = positive(1, 32, 9, 9)
KERNEL = weight(24, 32, 3, 3, channel=0, other=1)

MOE = """g (float[4,32] x, float[4,4] r) => (float[4,32] y) {
    y = com.microsoft.MoE <activation_type = "relu", k = 1> (x, r, f1, b, w)
}"""  # one token for each expert

OPERATORS = {
    "MatMul 1": Case(
        "g (float[6,64] x) => (float[6,40] y) { y = MatMul(x, w) }",
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": X},
    ),
    "MatMul 0": Case(
        "g (float[64,6] x) => (float[40,6] y) { y = MatMul(w, x) }",
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": XT},
        (0,),
    ),
    "Gemm 1": Case(
        "g (float[6,64] x) => (float[6,40] y) { y = Gemm(x, w) }",
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": X},
    ),
    "Gemm 1, transB": Case(
        "g (float[6,64] x) => (float[6,40] y) { y = Gemm <transB = 1> (x, w) }",
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": X},
    ),
    "Gemm 0": Case(
        "g (float[64,6] x) => (float[40,6] y) { y = Gemm(w, x) }",
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": XT},
        (0,),
    ),
    "Gemm 0, transA": Case(
        "g (float[64,6] x) => (float[40,6] y) { y = Gemm <transA = 1> (w, x) }",
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": XT},
        (0,),
    ),
    "FusedMatMul 1": Case(
        "g (float[6,64] x) => (float[6,40] y) { y = com.microsoft.FusedMatMul <alpha = 2.0> (x, w) }",
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": X},
    ),
    "FusedMatMul 1, transB": Case(
        "g (float[6,64] x) => (float[6,40] y) { y = com.microsoft.FusedMatMul <transB = 1> (x, w) }",
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": X},
    ),
    "FusedMatMul 0": Case(
        "g (float[64,6] x) => (float[40,6] y) { y = com.microsoft.FusedMatMul(w, x) }",
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": XT},
        (0,),
    ),
    "FusedMatMul 0, transA": Case(
        "g (float[64,6] x) => (float[40,6] y) { y = com.microsoft.FusedMatMul <transA = 1> (w, x) }",
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": XT},
        (0,),
    ),
    "FusedGemm 1": Case(
        'g (float[6,64] x) => (float[6,40] y) { y = com.microsoft.FusedGemm <activation = "Relu"> (x, w) }',
        {"w": weight(64, 40, channel=1, other=0)},
        {"x": X},
    ),
    "FusedGemm 1, transB": Case(
        'g (float[6,64] x) => (float[6,40] y) { y = com.microsoft.FusedGemm <activation = "Relu", transB = 1> (x, w) }',
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": X},
    ),
    "Conv": Case("g (float[1,32,9,9] x) => (float[1,24,7,7] y) { y = Conv(x, w) }", {"w": KERNEL}, {"x": IMAGE}, (1,)),
    "Conv, 1-D": Case(
        "g (float[1,32,9] x) => (float[1,24,7] y) { y = Conv(x, w) }",
        {"w": KERNEL[:, :, 0]},
        {"x": IMAGE[:, :, 0]},
        (1,),
    ),
    "Conv, groups": Case(
        "g (float[1,64,9,9] x) => (float[1,24,7,7] y) { y = Conv <group = 2> (x, w) }",
        {"w": KERNEL},
        {"x": positive(1, 64, 9, 9)},
        (1,),
    ),
    "Conv, depthwise": Case(
        "g (float[1,120,9,9] x) => (float[1,120,7,7] y) { y = Conv <group = 120> (x, w) }",
        {"w": weight(120, 1, 3, 3, channel=0, other=2)},
        {"x": positive(1, 120, 9, 9)},
        (1,),
    ),
    "FusedConv": Case(
        'g (float[1,32,9,9] x) => (float[1,24,7,7] y) { y = com.microsoft.FusedConv <activation = "Relu"> (x, w) }',
        {"w": KERNEL},
        {"x": IMAGE},
        (1,),
    ),
    "DeformConv": Case(
        "g (float[1,32,9,9] x, float[1,18,7,7] o) => (float[1,24,7,7] y) { y = DeformConv(x, w, o) }",
        {"w": KERNEL},
        {"x": IMAGE, "o": np.full((1, 18, 7, 7), 0.25, np.float32)},
        (1,),
    ),
    "ConvTranspose": Case(
        "g (float[1,32,9,9] x) => (float[1,24,11,11] y) { y = ConvTranspose(x, w) }",
        {"w": weight(32, 24, 3, 3, channel=1, other=0)},
        {"x": IMAGE},
        (1,),
    ),
    "ConvTranspose, groups": Case(
        "g (float[1,32,9,9] x) => (float[1,48,11,11] y) { y = ConvTranspose <group = 2> (x, w) }",
        {"w": weight(32, 24, 3, 3, channel=1, other=0)},
        {"x": IMAGE},
        (1,),
    ),
    "Gather": Case(
        "g (int64[n] x) => (float[n,1] y) { r = Gather(w, x) y = MatMul(r, one) }",
        {"w": weight(64, 40, channel=0, other=1), "one": ONE},
        {"x": np.arange(64)},
        (0,),
    ),
    "Gather, axis": Case(
        "g (int64[n] x) => (float[1,n] y) { r = Gather <axis = -1> (w, x) y = MatMul(one, r) }",
        {"w": weight(40, 64, channel=1, other=0), "one": ONE.T},
        {"x": np.arange(64)},
    ),
    "EmbedLayerNormalization 2": Case(
        """g (int32[64,1] x, int32[64,1] s) => (float[64,1,40] n, int32[64] m, float[64,1,1] y) {
            n, m, r = com.microsoft.EmbedLayerNormalization(x, s, w, position, segment, gamma, gamma)
            y = MatMul(r, one)
        }""",
        {"w": weight(64, 40, channel=0, other=1)}
        | {"position": np.zeros((40, 40), np.float32), "segment": np.zeros((2, 40), np.float32)}
        | {"gamma": np.ones(40, np.float32), "one": ONE},
        {"x": np.arange(64, dtype=np.int32).reshape(64, 1), "s": np.zeros((64, 1), np.int32)},
        (0,),
    ),
    "EmbedLayerNormalization 3": Case(
        """g (int32[1,64] x, int32[1,64] s) => (float[1,64,40] n, int32[1] m, float[1,64,1] y) {
            n, m, r = com.microsoft.EmbedLayerNormalization(x, s, word, w, segment, gamma, gamma)
            y = MatMul(r, one)
        }""",
        {"w": weight(64, 40, channel=0, other=1)}
        | {"word": np.zeros((40, 40), np.float32), "segment": np.zeros((2, 40), np.float32)}
        | {"gamma": np.ones(40, np.float32), "one": ONE},
        {"x": np.zeros((1, 64), np.int32), "s": np.zeros((1, 64), np.int32)},
        (1,),
    ),
    "EmbedLayerNormalization 4": Case(
        """g (int32[64,1] x, int32[64,1] s) => (float[64,1,40] n, int32[64] m, float[64,1,1] y) {
            n, m, r = com.microsoft.EmbedLayerNormalization(x, s, word, position, w, gamma, gamma)
            y = MatMul(r, one)
        }""",
        {"w": weight(64, 40, channel=0, other=1)}
        | {"word": np.zeros((40, 40), np.float32), "position": np.zeros((40, 40), np.float32)}
        | {"gamma": np.ones(40, np.float32), "one": ONE},
        {"x": np.zeros((64, 1), np.int32), "s": np.arange(64, dtype=np.int32).reshape(64, 1)},
        (0,),
    ),
    "Attention": Case(
        """g (float[1,6,64] x) => (float[1,6,40] y) {
            y = com.microsoft.Attention <num_heads = 4> (x, w, b)
        }""",
        {"w": np.concatenate([positive(64, 80) / 64, weight(64, 40, channel=1, other=0)], axis=1)}
        | {"b": np.zeros(120, np.float32)},
        {"x": positive(1, 6, 64)},
    ),
    "Einsum, one axis summed": Case(
        'g (float[6,64] x) => (float[5,6,8] y) { y = Einsum <equation = "ik,akb->aib"> (x, w) }',
        {"w": weight(5, 64, 8, channel=(0, 2), other=1)},
        {"x": X},
        (0, 2),
    ),
    "Einsum, first": Case(
        'g (float[64,6] x) => (float[40,6] y) { y = Einsum <equation = "nk,ki->ni"> (w, x) }',
        {"w": weight(40, 64, channel=0, other=1)},
        {"x": XT},
        (0,),
    ),
    "MoE 4": Case(
        MOE,
        {
            "f1": positive(4, 20, 32),
            "b": np.zeros((4, 20), np.float32),
            "w": weight(4, 32, 20, channel=(0, 1), other=2),
        },
        {"x": positive(4, 32), "r": 9 * np.eye(4, dtype=np.float32)},
        (0, 1),
    ),
    "MoE 2": Case(
        MOE.replace("f1, b, w", "w, b, f2"),
        {"w": weight(4, 20, 32, channel=0, other=2), "b": np.zeros((4, 20), np.float32), "f2": positive(4, 32, 20)},
        {"x": positive(4, 32), "r": 9 * np.eye(4, dtype=np.float32)},
        (0,),
    ),
    **{
        f"{op}, {direction}": Case(
            f"""g (float[5,2,32] x) => (float[5,{directions},2,{hidden}] y) {{
                y = {op} <hidden_size = {hidden}, direction = "{direction}"> (x, w, r)
            }}""",
            {
                "w": weight(directions, gates * hidden, 32, channel=1, other=2),
                "r": weight(directions, gates * hidden, hidden, channel=1, other=2, seed=2) / np.float32(16),
            },
            {"x": positive(5, 2, 32) / 40},
            (1, 3),
        )
        for op, gates, hidden in (("LSTM", 4, 20), ("GRU", 3, 20), ("RNN", 1, 40))
        for direction, directions in (("forward", 1), ("bidirectional", 2))
    },
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str, tmp_path: Path) -> None:
    check(OPERATORS[name], tmp_path)


@pytest.mark.parametrize("name", ["MatMul 1", "MatMul 0", "Gemm 1, transB", "Conv", "ConvTranspose", "LSTM, forward"])
def test_blocks(name: str, tmp_path: Path) -> None:
    """Blocks run along an axis that is summed over, so that channels share no scale."""
    check(OPERATORS[name], tmp_path, bits=7, block_size=16)


@pytest.mark.parametrize("name", ["MatMul 1", "MatMul 0", "Gemm 1, transB", "Conv", "ConvTranspose"])
def test_palettes_of_channels(name: str, tmp_path: Path) -> None:
    check(OPERATORS[name], tmp_path, codec="palette", overrides={"w": "palette:4,group:1"})


def test_every_row_of_the_table_is_tried(tmp_path: Path) -> None:
    found = {("com.microsoft", operator.rpartition(".")[2], slot) for operator, slot in UNRUN}
    for case in OPERATORS.values():
        with read_model(save(case.model(), tmp_path / "m.onnx")) as source:
            found |= {(use.domain, use.op_type, use.slot) for uses in weight_uses(source) for use in uses}
    assert not set(channels._PLACES) - found


def coded_along(values: Floats, axis: int, top: int = 127) -> Floats:
    """What a grid with a scale for each position of `axis` makes of the values; `top` is the largest code."""
    rest = tuple(i for i in range(values.ndim) if i != axis)
    scales = np.abs(values).max(axis=rest, keepdims=True) / np.float32(top)
    coded: Floats = np.rint(values / scales).astype(np.float32) * scales
    return coded


@pytest.mark.parametrize("name", OPERATORS)
def test_the_comparison_sees_a_wrong_axis(name: str) -> None:
    """With weights coded along the axis of the smallest error overall, every case fails by far."""
    case = OPERATORS[name]
    wrong = {}
    for key, values in case.weights.items():
        if values.ndim < 2 or key not in ("w", "r"):
            continue
        tried = [coded_along(values, axis) for axis in range(values.ndim) if values.shape[axis] > 1]
        wrong[key] = min(tried, key=lambda coded: float(np.square(coded - values, dtype=np.float64).sum()))
    made = case.model()
    wanted = run_plain(made.SerializeToString(), case.feeds)[-1]
    for tensor in made.graph.initializer:
        if tensor.name in wrong:
            tensor.CopyFrom(numpy_helper.from_array(wrong[tensor.name], tensor.name))
    got = run_plain(made.SerializeToString(), case.feeds)[-1]
    assert worst_channel(wanted, got, case.axes) > 10 * WITHIN


MOVED: dict[str, tuple[str, dict[str, Any]]] = {
    "Transpose": ("t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t)", {"w": weight(40, 64, channel=0, other=1)}),
    "Transpose, default": ("t = Transpose(w) y = Gemm(x, t)", {"w": weight(40, 64, channel=0, other=1)}),
    "Identity and Cast": (
        "h = Identity(w) c = Cast <to = 1> (h) y = MatMul(x, c)",
        {"w": weight(64, 40, channel=1, other=0).astype(np.float16)},
    ),
    "Slice": (
        "t = Slice(w, begin, end, axes) y = MatMul(x, t)",
        {"w": weight(70, 40, channel=1, other=0)}
        | {"begin": np.array([6]), "end": np.array([70]), "axes": np.array([0])},
    ),
    "Split": (
        "a, b = Split <axis = 1, num_outputs = 2> (w) c = MatMul(x, a) d = MatMul(x, b) y = Concat <axis = 1> (c, d)",
        {"w": weight(64, 40, channel=1, other=0)},
    ),
    "Concat of channels": (
        "t = Concat <axis = 1> (w, v) y = MatMul(x, t)",
        {"w": weight(64, 40, channel=1, other=0), "v": weight(64, 40, channel=1, other=0, seed=3)},
    ),
    "Concat of what is summed": (
        "t = Concat <axis = 0> (w, v) y = MatMul(x, t)",
        {"w": weight(30, 40, channel=1, other=0), "v": weight(34, 40, channel=1, other=0, seed=3)},
    ),
    "Squeeze": (
        "t = Squeeze(w, axes) y = MatMul(x, t)",
        {"w": weight(1, 64, 1, 40, channel=3, other=1), "axes": np.array([0, -2])},
    ),
    "Unsqueeze and Conv": (
        """t = Unsqueeze(w, axes) u = Unsqueeze(x, places) c = Conv(u, t) y = Squeeze(c, places)""",
        {"w": weight(40, 64, channel=0, other=1), "axes": np.array([2, 3]), "places": np.array([2, 3])},
    ),
    "Reshape of an axis that is summed": (
        "t = Reshape(w, shape) y = MatMul(x, t)",
        {"w": weight(8, 8, 40, channel=2, other=1), "shape": np.array([-1, 40])},
    ),
    "Reshape with a 0": (
        "t = Reshape(w, shape) y = Gemm <transB = 1> (x, t)",
        {"w": weight(40, 8, 8, channel=0, other=1), "shape": np.array([0, -1])},
    ),
    "Reshape of the channels": (
        "t = Reshape(w, shape) y = Gemm <transB = 1> (x, t)",
        {"w": weight(5, 8, 64, channel=(0, 1), other=2), "shape": np.array([40, 64])},
    ),
    "Reshape and Transpose": (
        "a = Reshape(w, shape) t = Transpose(a) y = MatMul(x, t)",
        {"w": weight(40, 1, 1, 64, channel=0, other=3), "shape": np.array([40, 64])},
    ),
    "function": ("y = local.Layer(x, w)", {"w": weight(64, 40, channel=1, other=0)}),
    "function that transposes": ("y = local.Turned(x, w)", {"w": weight(40, 64, channel=0, other=1)}),
    "function in a function": ("y = local.Outer(x, w)", {"w": weight(40, 64, channel=0, other=1)}),
}
FUNCTIONS = """
<domain: "local", opset_import: ["": 19]> Layer (a, b) => (c) { c = MatMul(a, b) }
<domain: "local", opset_import: ["": 19]> Turned (a, b) => (c) { t = Transpose(b) c = MatMul(a, t) }
<domain: "local", opset_import: ["": 19, "local": 1]> Outer (a, b) => (c) { c = local.Turned(a, b) }
"""


@pytest.mark.parametrize("name", MOVED)
def test_moved(name: str, tmp_path: Path) -> None:
    body, weights = MOVED[name]
    width = 80 if name == "Concat of channels" else 40
    check(Case(f"g (float[6,64] x) => (float[6,{width}] y) {{ {body} }} {FUNCTIONS}", weights, {"x": X}), tmp_path)


def test_gates_that_an_exporter_reorders(tmp_path: Path) -> None:
    """PyTorch's order of gates is not ONNX's, so its exporter cuts and joins the weights of recurrent layers."""
    case = Case(
        """g (float[5,2,32] x) => (float[5,1,2,20] y) {
            a = Slice(w, n0, n20, axes) b = Slice(w, n60, n80, axes) c = Slice(w, n20, n60, axes)
            d = Concat <axis = 0> (a, b, c)
            e = Unsqueeze(d, axes)
            y = LSTM <hidden_size = 20> (x, e, r)
        }""",
        {"w": weight(80, 32, channel=0, other=1), "r": weight(1, 80, 20, channel=1, other=2) / np.float32(16)}
        | {f"n{i}": np.array([i]) for i in (0, 20, 60, 80)}
        | {"axes": np.array([0])},
        {"x": positive(5, 2, 32) / 40},
        (1, 3),
    )
    check(case, tmp_path)


PLACES: dict[str, Callable[[], onnx.ModelProto]] = {}


def place(make: Callable[[], onnx.ModelProto]) -> Callable[[], onnx.ModelProto]:
    PLACES[make.__name__] = make
    return make


W = weight(64, 40, channel=1, other=0)
BRANCHES = """g (float[6,64] x, bool c) => (float[6,40] y) {
    y = If (c) <
        then_branch = p () => (float[6,40] py) { py = MatMul(x, w) },
        else_branch = q () => (float[6,40] qy) { qy = Constant <value_float = 0.0> () }
    >
}"""


@place
def constant() -> onnx.ModelProto:
    made = model("g (float[6,64] x, bool c) => (float[6,40] y) { y = MatMul(x, w) }", head=HEAD)
    give(made.graph, "w", W)
    return made


@place
def branch_by_outer_scope() -> onnx.ModelProto:
    return model(BRANCHES, {"w": W}, HEAD)


@place
def initializer_of_a_branch() -> onnx.ModelProto:
    made = model(BRANCHES, head=HEAD)
    made.graph.node[0].attribute[0].g.initializer.append(numpy_helper.from_array(W, "w"))
    return made


@place
def constant_of_a_branch() -> onnx.ModelProto:
    made = model(BRANCHES, head=HEAD)
    give(made.graph.node[0].attribute[0].g, "w", W)
    return made


@place
def constant_of_a_function() -> onnx.ModelProto:
    made = model(
        """g (float[6,64] x, bool c) => (float[6,40] y) { y = local.Layer(x) }
        <domain: "local", opset_import: ["": 19]> Layer (a) => (b) { b = MatMul(a, w) }""",
        head=HEAD,
    )
    node = onnx.helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(W))
    made.functions[0].node.insert(0, node)
    return made


@place
def loop() -> onnx.ModelProto:
    return model(
        """g (float[6,64] x, bool c) => (float[6,40] y) {
            y = Loop (n, c, zero) <
                body = b (int64 i, bool go, float[6,40] s) => (bool went, float[6,40] t) {
                    went = Identity(go) p = MatMul(x, w) t = Add(s, p)
                }
            >
        }""",
        {"w": W, "n": np.array(3), "zero": np.zeros((6, 40), np.float32)},
        HEAD,
    )


@pytest.mark.parametrize("name", PLACES)
def test_wherever_the_weight_is(name: str, tmp_path: Path) -> None:
    packed = pack(PLACES[name](), tmp_path)
    (coded,) = (t for t in packed.stored.values() if t.codec == "linear")
    assert (coded.shape, coded.params["axis"]) == ((64, 40), 1)
    feeds = {"x": X, "c": np.array(True)}
    session = conx.InferenceSession(packed.path, one_thread(), providers=CPU)
    assert worst_channel(run_plain(packed.model, feeds)[0], run(session, feeds)[0], (1,)) < WITHIN


def test_tied_embedding_and_head(tmp_path: Path) -> None:
    """Rows of the table are the channels of both uses, whether the head has a copy of it or not."""
    table = weight(64, 40, channel=0, other=1)
    text = """g (int64[n] i, float[6,40] x) => (float[n,1] y, float[6,64] z) {{
        r = Gather(w, i) y = MatMul(r, one) {} z = MatMul(x, t)
    }}"""
    feeds = {"i": np.arange(64), "x": positive(6, 40)}
    for turn, copy in (("t = Transpose(w)", {}), ("", {"t": np.ascontiguousarray(table.T)})):
        packed = pack(model(text.format(turn), {"w": table, "one": ONE, **copy}, HEAD), tmp_path)
        assert [t.name for t in packed.stored.values()] == ["w"]
        session = conx.InferenceSession(packed.path, one_thread(), providers=CPU)
        (y, z), (got_y, got_z) = run_plain(packed.model, feeds), run(session, feeds)
        assert worst_channel(y, got_y, (0,)) < WITHIN
        assert worst_channel(z, got_z, (1,)) < WITHIN


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_unknown_use_takes_the_axis_with_the_smallest_error(axis: int, tmp_path: Path) -> None:
    values = normal(16, 17, 18)
    values *= np.where(np.indices(values.shape)[axis] % 2, np.float32(0.25), np.float32(1))
    text = "g (float[16,17,18] x) => (float[16,17,18] y) { y = Add(x, w) }"
    packed = pack(model(text, {"w": values}, HEAD), tmp_path, bits=5)
    errors = [float(np.square(coded_along(values, i, 15) - values, dtype=np.float64).sum()) for i in range(3)]
    assert min(errors) == errors[axis] < 0.7 * sorted(errors)[1]
    assert packed.stored["w"].codec == "linear"
    assert packed.stored["w"].params["axis"] == axis


# No kernel for the CPU, or inputs that are hard to make: what comes back is compared instead of outputs.
UNRUN = {
    ("com.microsoft.PackedAttention", 1): ((64, 120), (1,), 0),
    ("com.microsoft.MoE", 2): ((4, 20, 32), (0, 1), 2),
    ("com.microsoft.MoE", 4): ((4, 20, 32), (0, 1), 2),
    ("com.microsoft.MoE", 6): ((4, 20, 32), (0, 1), 2),
}


@pytest.mark.parametrize(("operator", "slot"), UNRUN)
def test_operator_that_is_not_run(operator: str, slot: int, tmp_path: Path) -> None:
    shape, axes, other = UNRUN[operator, slot]
    inputs = ", ".join(["x", *"abcde"[: slot - 1], "w"])
    values = weight(*shape, channel=axes, other=other)
    text = f"g (float x, float a, float b, float c, float d, float e) => (float y) {{ y = {operator}({inputs}) }}"
    packed = pack(model(text, {"w": values}, HEAD), tmp_path)
    assert packed.stored["w"].codec == "linear"
    sums = [v.sum(axis=tuple(i for i in range(v.ndim) if i not in axes)) for v in (values, packed.values("w"))]
    assert worst_channel(sums[0], sums[1], tuple(range(len(axes)))) < WITHIN


def test_stacked_matrices_that_differ(tmp_path: Path) -> None:
    """MatMul with a stack of matrices: each has output channels of its own (experts, heads)."""
    case = Case(
        "g (float[4,6,32] x) => (float[4,6,10] y) { y = MatMul(x, w) }",
        {"w": weight(4, 32, 10, channel=0, other=1)},
        {"x": positive(4, 6, 32)},
        (0, 2),
    )
    check(case, tmp_path)


@pytest.mark.parametrize(("count", "group"), [(40, 40), (32, 2)], ids=["depthwise", "two groups"])
def test_groups_of_a_transposed_convolution_that_differ(count: int, group: int, tmp_path: Path) -> None:
    """Output channel g · M/group + m belongs to axis 0's part g: a scale along axis 1 alone serves all groups."""
    values = weight(count, 1 if group == count else 16, 6, 6, channel=1, other=3)
    values *= np.where(np.arange(count) * group // count % 2, SMALL, 1)[:, None, None, None].astype(np.float32)
    width = values.shape[1] * group
    case = Case(
        f"g (float[1,{count},9,9] x) => (float[1,{width},14,14] y) {{ y = ConvTranspose <group = {group}> (x, w) }}",
        {"w": values},
        {"x": positive(1, count, 9, 9)},
        (1,),
    )
    check(case, tmp_path)

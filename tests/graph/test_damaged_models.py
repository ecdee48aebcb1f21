"""Whatever the bytes of an .onnx file: inspecting and packing it gives a result or a ModelError, nothing else.

`test_the_search_finds_a_planted_bug` shows that the search would find an exception of another kind.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import conx
from conx.errors import ConxError, ModelError
from conx.graph import facts
from conx.graph.read import read_model
from tests.builders import external, give, model, normal, varint

pytestmark = pytest.mark.usefixtures("no_sync")
PROPERTY = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def rich() -> bytes:
    """A model with one of everything, its weights just large enough to be taken out."""
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y, float[2, 20] z) {
            t = Transpose <perm = [1, 0]> (w)
            a = MatMul(x, t)
            h = Cast <to = 1> (half)
            b = Gemm <transB = 1> (a, h)
            e = MatMul(b, given)
            f = local.Double(e, w)
            z = If (c) <
                then_branch = p () => (float[2, 20] zp) { zp = MatMul(f, inner) },
                else_branch = q () => (float[2, 20] zq) { zq = Add(f, other) }
            >
            y = Identity(f)
        }
        <domain: "local", opset_import: ["": 17]> Double (v, m) => (r) { n = MatMul(v, m) r = Add(n, n) }
        """,
        {
            "w": normal(20, 20),
            "half": normal(20, 20, seed=1).astype(np.float16),
            "outside": normal(20, 20, seed=2),
            "shape": np.arange(300),
        },
        head='<ir_version: 8, opset_import: ["": 17, "local": 1], producer_name: "test">',
    )
    give(made.graph, "given", normal(20, 20, seed=3))
    branches = next(node for node in made.graph.node if node.op_type == "If").attribute
    branches[0].g.initializer.append(numpy_helper.from_array(normal(20, 20, seed=4), "inner"))
    give(branches[1].g, "other", normal(2, 200, seed=5)[:, :20])
    branches[1].g.initializer.append(numpy_helper.from_array(normal(20, 20, seed=6), "inner"))
    external(made.graph.initializer[2], "outside.bin", 16, 1600)
    indices = numpy_helper.from_array(np.arange(0, 600, 2), "sparse indices")
    made.graph.sparse_initializer.append(
        helper.make_sparse_tensor(numpy_helper.from_array(normal(300, seed=7), "sparse"), indices, [600])
    )
    return bytes(made.SerializeToString())


@pytest.fixture(scope="module")
def good() -> bytes:
    return rich()


class Place:
    """A folder in which models are tried one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        (folder / "outside.bin").write_bytes(bytes(16) + normal(20, 20, seed=2).tobytes())

    def attempt(self, content: bytes, deep: bool = True) -> bool:
        """The invariant; answers whether there was a result."""
        self.number += 1  # a new name each time: replacing files is slow on some systems
        path = self.folder / f"{self.number}.onnx"
        path.write_bytes(content)
        try:
            conx.inspect(path)
            for lossless in (True, False) if deep else ():
                conx.pack(path, path.with_suffix(".conx"), lossless=lossless, threads=1, verify=False)
        except ConxError as error:
            assert "\n" not in str(error)  # noqa: PT017 - there may be none
            return False
        finally:
            path.unlink()
        return True


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_model_itself_is_right(good: bytes, place: Place) -> None:
    assert place.attempt(good)
    onnx.ModelProto.FromString(good)


@pytest.mark.floor
def test_truncations(good: bytes, place: Place) -> None:
    results = [place.attempt(good[:size]) for size in range(0, len(good), 97)]
    assert not any(results[:-1])


def test_every_start_that_is_a_message(good: bytes, place: Place) -> None:
    """Where whole fields are missing at the end, the rest may still be a model."""
    whole = onnx.ModelProto.FromString(good)
    for name in ("opset_import", "functions", "ir_version", "graph"):
        part = onnx.ModelProto()
        part.CopyFrom(whole)
        part.ClearField(name)
        place.attempt(part.SerializeToString())


@pytest.mark.parametrize("seed", range(4))
def test_changed_bytes(good: bytes, place: Place, seed: int) -> None:
    """Bytes of the graph, not of the weights: there, nearly every change is a valid one."""
    rng = np.random.default_rng(seed)
    structure = np.flatnonzero(structural(good))
    for _ in range(50):
        bad = bytearray(good)
        for at in rng.choice(structure, rng.integers(1, 4)):
            bad[at] = rng.choice([bad[at] ^ (1 << rng.integers(8)), rng.integers(256), 0, 0x7F, 0x80, 0xFF])
        place.attempt(bytes(bad))


def structural(content: bytes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which bytes belong to the graph."""
    mask = np.ones(len(content), np.bool_)
    for tensor in (normal(20, 20, seed=i) for i in range(8)):
        for data in (tensor.tobytes(), tensor.astype(np.float16).tobytes()):
            at = content.find(data)
            if at >= 0:
                mask[at : at + len(data)] = False
    return mask


@pytest.mark.parametrize("seed", range(3))
def test_missing_repeated_and_exchanged_bytes(good: bytes, place: Place, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(60):
        first, second, third = sorted(rng.integers(0, len(good), 3))
        place.attempt(good[:first] + good[second:])
        place.attempt(good[:second] + good[first:])
        place.attempt(good[:first] + good[second:third] + good[first:second] + good[third:])


@PROPERTY
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x3a\x00")
@example(b"\x3a" * 5000)
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    Place(tmp_path_factory.mktemp("random")).attempt(content)


def test_deep_nesting(place: Place) -> None:
    """Protobuf refuses more than 100 messages in each other; so do we, without a RecursionError."""
    for depth in (20, 40, 120, 3000):
        content = b""
        for _ in range(depth):  # graph.node.attribute.g
            for tag in (b"\x32", b"\x2a", b"\x0a"):
                content = tag + varint(len(content)) + content
        opset = b"\x42\x04\x0a\x00\x10\x11"
        found = place.attempt(b"\x08\x08\x3a" + varint(len(content)) + content + opset)
        assert found == (depth == 20)


BAD_NAMES: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe",
    "half a character": b"\xe2\x82",
    "surrogate": b"\xed\xa0\x80",
    "NUL": b"\0\0",
    "line breaks": b"\n\r",
}


@pytest.mark.parametrize("bad", BAD_NAMES)
@pytest.mark.parametrize("where", ["weight", "input", "operator", "producer", "small"])
def test_names(bad: str, where: str, place: Place) -> None:
    marks = {"weight": "WWWW", "input": "XXXX", "operator": "OOOO", "producer": "PPPP", "small": "SSSS"}
    made = model(
        "g (float[2, 40] XXXX) => (float[2, 40] y) { h = MatMul(XXXX, WWWW) k = Add(h, SSSS) y = OOOO.Relu(k) }",
        {"WWWW": normal(40, 40), "SSSS": normal(40)},
        head='<ir_version: 8, opset_import: ["": 17], producer_name: "PPPP">',
    )
    mark = marks[where]
    text = BAD_NAMES[bad] * (2 if len(BAD_NAMES[bad]) < 4 else 1)
    pieces = made.SerializeToString().split(mark.encode())
    assert len(pieces) > 1
    place.attempt(text[:4].ljust(4, b"_").join(pieces))


@pytest.mark.parametrize("where", ["weight", "input", "operator", "producer"])
def test_long_names(where: str, place: Place) -> None:
    made = model("g (float[2, 40] x) => (float[2, 40] y) { y = MatMul(x, w) }", {"w": normal(40, 40)})
    long = "n" * 70_000
    if where == "weight":
        made.graph.node[0].input[1] = made.graph.initializer[0].name = long
    elif where == "input":
        made.graph.node[0].input[0] = made.graph.input[0].name = long
    elif where == "operator":
        made.graph.node[0].op_type = long
    else:
        made.producer_name = long
    place.attempt(made.SerializeToString())


def test_a_weight_of_too_many_dims(place: Place) -> None:
    tensor = TensorProto(data_type=1, dims=[1] * 70 + [300], raw_data=bytes(1200))
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": tensor})
    assert not place.attempt(made.SerializeToString())


def test_a_function_that_calls_itself(place: Place) -> None:
    made = model(
        """g (float[2, 20] x) => (float[20, 2] y) { y = local.F(w, x) }
        <domain: "local", opset_import: ["": 17, "local": 1]> F (a, b) => (r) { t = Transpose(a) r = local.F(t, b) }
        """,
        {"w": normal(20, 20)},
        head='<ir_version: 8, opset_import: ["": 17, "local": 1]>',
    )
    place.attempt(made.SerializeToString())


def test_an_attribute_of_another_type(place: Place) -> None:
    for name, value in (("perm", 1), ("perm", "10"), ("perm", [0.5, 1.5]), ("perm", [0, 0]), ("perm", [5, 9])):
        graph = "g (float[2, 20] x) => (float[2, 20] y) { t = Transpose(w) y = MatMul(x, t) }"
        made = model(graph, {"w": normal(20, 20)})
        made.graph.node[0].attribute.append(helper.make_attribute(name, value))
        place.attempt(made.SerializeToString())
        made.graph.node[0].op_type = "Gather"
        made.graph.node[0].attribute[0].name = "axis"
        place.attempt(made.SerializeToString())


def test_a_tensor_marked_as_one_of_ours(tmp_path: Path) -> None:
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {"w": normal(300)})
    made.graph.initializer[0].external_data.add(key="conx:weight", value="0")
    for content in (normal(300), normal(3)):
        made.graph.initializer[0].raw_data = content.tobytes()
        path = tmp_path / "m.onnx"
        path.write_bytes(made.SerializeToString())
        with pytest.raises(ModelError, match="conx:weight"):
            read_model(path)


def test_the_search_finds_a_planted_bug(good: bytes, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "QUANTIZED", (None,))
    with pytest.raises(TypeError):
        place.attempt(good)

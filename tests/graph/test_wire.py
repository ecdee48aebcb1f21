"""The walk through protobuf's wire data: nothing but the weights is touched, and every byte comes back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import conx
from conx.graph.read import SourceModel, read_model
from conx.graph.skeleton import Skeleton, externals_to_holes, run_skeleton, source_skeleton
from conx.graph.wire import Hole, Whole, Window, WireError, fields, punch, rewrite
from tests.builders import external, give, model, normal, run_plain, same_bits, save, tensors, varint

HEAD = '<ir_version: 8, opset_import: ["": 17, "local": 1], producer_name: "test", doc_string: "über alles">'


def filled(skeleton: Skeleton, source: SourceModel) -> bytes:
    """The message with the weights' bytes in its holes."""
    out, at = b"", 0
    for position, number, _ in skeleton.holes:
        out += skeleton.message[at:position] + source.weights[number].read().tobytes()
        at = position
    return out + skeleton.message[at:]


def nested_model() -> onnx.ModelProto:
    made = model(
        """g (float[2, 20] x, bool c) => (float[2, 20] y) {
            a = MatMul(x, w)
            b = local.F(a)
            y = If (c) <
                then_branch = p () => (float[2, 20] zp) { zp = MatMul(b, inner) },
                else_branch = q () => (float[2, 20] zq) { zq = Add(b, other) }
            >
        }
        <domain: "local", opset_import: ["": 17]> F (v) => (r) { r = Add(v, v) }
        """,
        {"w": normal(20, 20), "empty": np.zeros((0, 400), np.float32), "half": normal(600).astype(np.float16)},
        HEAD,
    )
    branches = made.graph.node[2].attribute
    branches[0].g.initializer.append(numpy_helper.from_array(normal(20, 20, seed=4), "inner"))
    give(branches[1].g, "other", normal(2, 20, 20, seed=5))
    function = helper.make_node("Constant", [], ["unused"], value=numpy_helper.from_array(normal(300, seed=6)))
    made.functions[0].node.append(function)
    indices = numpy_helper.from_array(np.arange(0, 600, 2), "i")
    values = numpy_helper.from_array(normal(300, seed=7), "sparse")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [600]))
    made.metadata_props.add(key="key", value="value " * 400)
    typed = made.graph.initializer.add(name="typed", data_type=TensorProto.DOUBLE, dims=[300])
    typed.double_data.extend(np.arange(300.0))
    return made


@pytest.mark.floor
def test_the_source_comes_back_byte_for_byte(tmp_path: Path) -> None:
    content = save(nested_model(), tmp_path / "m.onnx").read_bytes()
    with read_model(tmp_path / "m.onnx") as source:
        assert {w.name for w in source.weights} == {"w", "half", "inner", "other", "unused", "i", "sparse", "typed"}
        skeleton = source_skeleton(source)
        assert skeleton.externals == []
        assert len(skeleton.message) == len(content) - sum(w.nbytes for w in source.weights)
        assert filled(skeleton, source) == content


@pytest.mark.parametrize("name", ["simple", "pytorch-converted", "pytorch-operator"])
def test_models_of_onnx_come_back_byte_for_byte(name: str) -> None:
    from_onnx = sorted((Path(onnx.__file__).parent / "backend" / "test" / "data" / name).glob("*/model.onnx"))
    assert len(from_onnx) > 20
    for path in from_onnx:
        with read_model(path) as source:
            typed = any(w.file is None for w in source.weights)
            assert typed or filled(source_skeleton(source), source) == path.read_bytes()


def test_fields_in_another_order_and_unknown_ones(tmp_path: Path) -> None:
    """Protobuf leaves the order free, and a newer onnx may have fields that this one does not know."""
    content = nested_model().SerializeToString()
    unknown = b"\xa2\x06\x03new" + b"\xa8\x06\x05"
    whole = Whole(content)
    top = [content[f.start : f.end] for f in fields(whole, 0, len(content))]
    turned = unknown + b"".join(reversed(top)) + unknown
    assert onnx.ModelProto.FromString(turned).graph.name == "g"
    graph = onnx.ModelProto.FromString(content).graph.SerializeToString()
    parts = [graph[f.start : f.end] for f in fields(Whole(graph), 0, len(graph))]
    inner = b"".join(reversed([*parts, unknown]))
    mixed = b"".join(b"\x3a" + varint(len(inner)) + inner if part[:1] == b"\x3a" else part for part in top)
    for number, variant in enumerate((turned, mixed)):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(variant)
        with read_model(path) as source:
            assert len(source.weights) == 8
            assert filled(source_skeleton(source), source) == variant


def test_a_graph_in_two_pieces(tmp_path: Path) -> None:
    """Protobuf merges a message field that is there twice."""
    first, second = model("g (float[1, 20] x) => (float[1, 20] y) { y = MatMul(x, w) }"), onnx.ModelProto()
    second.graph.initializer.append(numpy_helper.from_array(normal(20, 20), "w"))
    content = first.SerializeToString() + second.SerializeToString()
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with read_model(path) as source:
        assert filled(source_skeleton(source), source) == content
        run = onnx.ModelProto.FromString(filled(run_skeleton(source.proto, source.weights), source))
        assert [t.name for t in run.graph.initializer] == ["w"]


BROKEN: dict[str, tuple[bytes, str]] = {
    "group": (b"\x0b\x0c", "wire type 3"),
    "end of a group": (b"\x0c", "wire type 4"),
    "wire type 6": (b"\x0e", "wire type 6"),
    "wire type 7": (b"\x0f", "wire type 7"),
    "field 0": (b"\x02\x00", "field number 0"),
    "tag cut short": (b"\x80", "cut short"),
    "size cut short": (b"\x0a\x80", "cut short"),
    "number cut short": (b"\x08\xff\xff", "cut short"),
    "eleven bytes": (b"\x08" + b"\x80" * 10 + b"\x01", "more than ten bytes"),
    "content cut short": (b"\x0a\x05abcd", "ends at byte 7, but only 6"),
    "size near 2^64": (b"\x0a" + b"\xff" * 9 + b"\x01", "but only"),
    "32 bits cut short": (b"\x0d\x00\x00\x00", "but only 4"),
    "64 bits cut short": (b"\x09\x00\x00\x00", "but only 4"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_no_message(broken: str) -> None:
    content, reason = BROKEN[broken]
    with pytest.raises(WireError, match=reason):
        list(fields(Whole(content), 0, len(content)))


def test_fields() -> None:
    content = b"\x08\x96\x01" + b"\x12\x03abc" + b"\x1d\x01\x02\x03\x04" + b"\x21" + bytes(8) + b"\xc2\x3e\x00"
    found = [(f.number, f.wire, content[f.value : f.end]) for f in fields(Whole(content), 0, len(content))]
    assert found == [(1, 0, b"\x96\x01"), (2, 2, b"abc"), (3, 5, b"\x01\x02\x03\x04"), (4, 1, bytes(8)), (1000, 2, b"")]


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(1, 50), st.data())
def test_a_window_shows_what_is_there(content: bytes, width: int, data: st.DataObject) -> None:
    def read(start: int, size: int) -> bytearray:
        assert start + size <= len(content)
        return bytearray(content[start : start + size])

    window = Window(read, len(content), width)
    for _ in range(8):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, len(content)))
        assert window.get(start, end) == content[start:end]
        text = data.draw(st.binary(min_size=1, max_size=2))
        found = content[start:end].find(text)
        assert window.find(text, start, end) == (found if found < 0 else start + found)


def test_rewriting_nothing_changes_nothing() -> None:
    content = nested_model().SerializeToString()
    seen: list[tuple[int, int]] = []

    def keep(_: object, start: int, end: int) -> None:
        seen.append((start, end))

    assert rewrite(Whole(content), 0, len(content), "model", lambda *_: False, keep) is None
    assert len(seen) == 9
    assert punch(content, b"no such marker", lambda _: None) == (content, [])


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 70_000])
def test_sizes_count_what_is_in_the_holes(size: int) -> None:
    """A hole's bytes are part of every length around it, also where the length then takes another byte."""
    made = onnx.ModelProto()
    made.graph.node.add().attribute.add().t.doc_string = "mark"
    message, holes = punch(made.SerializeToString(), b"mark", lambda _: [b"\x4a" + varint(size), Hole(0, size)])
    ((at, hole),) = holes
    complete = message[:at] + b"w" * hole.size + message[at:]
    found = onnx.ModelProto.FromString(complete)
    assert found.graph.node[0].attribute[0].t.raw_data == b"w" * size
    assert found.SerializeToString() == complete


CHOICES: dict[str, Callable[[str], tuple[str, int] | None]] = {
    "all inside": lambda _: None,
    "all outside": lambda location: ("m.onnx.data", 2000 * int(location[-1])),
    "some outside": lambda location: ("m.onnx.data", 0) if location.endswith("1") else None,
}


@pytest.mark.parametrize("choice", CHOICES)
def test_externals_to_holes(choice: str, tmp_path: Path) -> None:
    text = "g (float[1, 20] x) => (float[1, 20] y) { a = MatMul(x, w0) b = MatMul(a, w1) y = MatMul(b, w2) }"
    made = model(text, {f"w{i}": normal(20, 20, seed=i) for i in range(3)})
    wanted = run_plain(made.SerializeToString(), {"x": normal(1, 20)})
    data = {f"conx-{i}": external(t, f"conx-{i}") for i, t in enumerate(made.graph.initializer)}
    place = CHOICES[choice]
    message, holes = externals_to_holes(made.SerializeToString(), dict.fromkeys(data, 1600), place)
    out, at = b"", 0
    for position, location in holes:
        out += message[at:position] + data[location]
        at = position
    (tmp_path / "m.onnx").write_bytes(out + message[at:])
    outside = [name for name in data if place(name) is not None]
    content = bytearray(6000)
    for name in outside:
        offset = (place(name) or ("", 0))[1]
        content[offset : offset + 1600] = data[name]
    if outside:
        (tmp_path / "m.onnx.data").write_bytes(content)
    assert [location for _, location in holes] == [name for name in data if name not in outside]
    found = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert [len(t.external_data) for t in tensors(found.graph)] == [3 if name in outside else 0 for name in data]
    assert same_bits(run_plain(tmp_path / "m.onnx", {"x": normal(1, 20)}), wanted)


@pytest.mark.usefixtures("no_sync")
def test_unpacking_a_lossless_file_gives_the_source(tmp_path: Path) -> None:
    content = save(nested_model(), tmp_path / "m.onnx").read_bytes()
    conx.pack(tmp_path / "m.onnx", tmp_path / "m.conx", lossless=True, threads=1)
    assert conx.unpack(tmp_path / "m.conx", tmp_path / "again.onnx").read_bytes() == content

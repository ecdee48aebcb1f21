"""The file that packing makes: the same whatever the threads, whole or not there at all, and what is said of it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import conx
from conx.container.limits import SEGMENT
from conx.container.reader import Reader
from conx.graph.read import Weight
from conx.packing import decide, measure, pipeline
from tests.builders import as_tensor, external, give, model, normal, run_plain, same_bits, save
from tests.packing.kit import pack

X = {"x": normal(3, 40)}


def mixed() -> onnx.ModelProto:
    """Weights of all sorts: several segments, small ones that share chunks, ties, types, branches."""
    made = model(
        """g (float[n, 40] x, bool c) => (float[n, 40] y) {
            a = MatMul(x, w0)
            e = MatMul(a, wide)
            f = MatMul(e, narrow)
            y = If (c) <
                then_branch = p () => (float[n, 40] yp) { yp = MatMul(f, inner) },
                else_branch = q () => (float[n, 40] yq) { yq = MatMul(f, inner) }
            >
        }""",
        {
            "wide": normal(40, 9000, seed=1),
            "narrow": normal(9000, 40, seed=2),
            "tied": normal(40, 9000, seed=1).T.copy(),
            "half": normal(300, 200, seed=3).astype(np.float16),
            "numbers": np.arange(40_000),
            "few": np.random.default_rng(0).choice(normal(9), (300, 200)),
            "fill": np.full(4000, 0.25, np.float32),
            **{f"w{i}": normal(40, 40, seed=10 + i) for i in range(25)},
            **{f"b{i}": normal(400 + i, seed=50 + i) for i in range(25)},
        },
    )
    assert SEGMENT < 40 * 9000
    branches = next(n for n in made.graph.node if n.op_type == "If").attribute
    branches[0].g.initializer.append(as_tensor("inner", normal(40, 40, seed=90)))
    give(branches[1].g, "inner", normal(40, 40, seed=91))
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(mixed(), tmp_path_factory.mktemp("mixed") / "model.onnx")


def linear() -> onnx.ModelProto:
    return model("g (float[n, 40] x) => (float[n, 50] y) { y = MatMul(x, w) }", {"w": normal(40, 50)})


SETTINGS: list[dict[str, Any]] = [{"lossless": True}, {}, {"bits": 4, "block_size": 32}, {"palette": 3}]


@pytest.mark.floor
@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_file_does_not_depend_on_threads(settings: dict[str, Any], source: Path, tmp_path: Path) -> None:
    found: list[bytes] = []
    for threads in (1, 2, 4):
        path = tmp_path / f"{len(found)}.conx"
        conx.pack(source, path, threads=threads, **settings)
        found.append(path.read_bytes())
    assert found[1:] == found[:1] * 2


@pytest.mark.usefixtures("no_sync")
def test_the_file_does_not_depend_on_what_is_under_way_at_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conx.pack(source, tmp_path / "a.conx", threads=3)
    monkeypatch.setattr(pipeline, "IN_FLIGHT", 1)
    conx.pack(source, tmp_path / "b.conx", threads=3)
    assert (tmp_path / "a.conx").read_bytes() == (tmp_path / "b.conx").read_bytes()


@pytest.mark.usefixtures("no_sync")
def test_the_file_does_not_depend_on_names_of_files(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another name.onnx"
    copy.write_bytes(source.read_bytes())
    for path, output in ((source, "a.conx"), (copy, "b.conx")):
        conx.pack(path, tmp_path / output, threads=2)
    assert (tmp_path / "a.conx").read_bytes() == (tmp_path / "b.conx").read_bytes()


@pytest.mark.usefixtures("no_sync")
def test_the_content_id_is_about_the_content(source: Path, tmp_path: Path) -> None:
    """Data that lies outside or inside is the same; another weight is not."""
    outside = save(mixed(), tmp_path / "outside.onnx", "data")
    other = mixed()
    other.graph.initializer[0].CopyFrom(as_tensor("wide", normal(40, 9000, seed=77)))
    changed = save(other, tmp_path / "changed.onnx")
    ids = []
    for path in (source, outside, changed):
        conx.pack(path, tmp_path / "m.conx", lossless=True, threads=2)
        ids.append(conx.inspect(tmp_path / "m.conx").content_id)
    assert ids[0] == ids[1] != ids[2]


# Where it goes


@pytest.mark.usefixtures("no_sync")
def test_the_model_is_not_overwritten(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "m.onnx")
    content = path.read_bytes()
    (tmp_path / "other").symlink_to(path)
    for output in (path, tmp_path / "." / "m.onnx", tmp_path / "other", str(path)):
        with pytest.raises(ValueError, match=r"is the model itself; name another output"):
            conx.pack(path, output)
    assert path.read_bytes() == content


@pytest.mark.usefixtures("no_sync")
def test_the_output_by_default(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "some.model.onnx")
    report = conx.pack(str(path), threads=1)
    assert report.path == tmp_path / "some.model.conx"
    assert report.path.exists()


@pytest.mark.usefixtures("no_sync")
def test_an_output_that_is_there_is_replaced(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "m.onnx")
    (tmp_path / "m.conx").write_bytes(b"something else" * 9999)
    conx.pack(path, threads=1)
    conx.check(tmp_path / "m.conx", deep=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.conx", "m.onnx"]


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("place", ["none/m.conx", "m.onnx/m.conx", "folder"])
def test_an_output_that_cannot_be_written(place: str, tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "m.onnx")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"none|m\.onnx|folder"):
        conx.pack(path, tmp_path / place, threads=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "m.onnx"]


# What is said of it


@pytest.mark.floor
@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_numbers_add_up(settings: dict[str, Any], source: Path, tmp_path: Path) -> None:
    report = conx.pack(source, tmp_path / "m.conx", threads=2, **settings)
    size = (tmp_path / "m.conx").stat().st_size
    assert report.bytes == size
    assert report.source_bytes == source.stat().st_size
    assert report.ratio == size / report.source_bytes
    shares = 2 * len(report.tensors)  # of chunks that several streams share, each rounded
    assert abs(sum(row.after for row in report.by_kind) - size) <= shares
    assert all(row.after > 0 for row in report.by_kind)
    assert sum(row.tensors for row in report.by_kind) == len(report.tensors)
    weights = sum(t.bytes * t.uses for t in report.tensors)
    assert sum(row.before for row in report.by_kind) == weights
    assert weights == sum(len(t.raw_data) for t in every_weight(mixed()))
    for row in report.by_kind[:-2]:
        of_kind = [t for t in report.tensors if t.codec == row.kind]
        assert row.after == sum(t.stored for t in of_kind)
        assert row.worst_error == max(t.error for t in of_kind)
        assert row.mean_error == pytest.approx(sum(t.error for t in of_kind) / len(of_kind))
    info = conx.inspect(tmp_path / "m.conx")
    assert info.file_bytes == size
    assert sum(info.by_codec.values()) == sum(row.after for row in report.by_kind)
    assert info.tensors == report.tensors
    assert info.lossless == report.lossless == bool(settings.get("lossless"))
    assert sum(t.bytes for t in info.tensors) == sum(info.by_dtype.values())


def every_weight(made: onnx.ModelProto) -> list[onnx.TensorProto]:
    branches = next(n for n in made.graph.node if n.op_type == "If").attribute
    return [*made.graph.initializer, branches[0].g.initializer[0], branches[1].g.node[0].attribute[0].t]


@pytest.mark.usefixtures("no_sync")
def test_tied_weights_are_stored_once(source: Path, tmp_path: Path) -> None:
    report = conx.pack(source, tmp_path / "m.conx", lossless=True, threads=2)
    uses = {t.name: t.uses for t in report.tensors}
    assert uses["wide"] == 2
    assert "tied" not in uses
    info = conx.inspect(tmp_path / "m.conx")
    assert info.parameters - info.unique_parameters == 40 * 9000


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("threads", [1, 3])
def test_progress(threads: int, source: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    conx.pack(source, tmp_path / "m.conx", threads=threads, progress=lambda *call: calls.append(call))
    done = [d for d, _ in calls]
    assert len(calls) > 50
    assert len({total for _, total in calls}) == 1
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]


# Whole or not at all


class OddError(Exception):
    """Nobody catches it by name."""


@pytest.fixture(scope="module")
def steps(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How often progress is told; the last time, the file is complete but has not its name."""
    calls: list[int] = []
    target = tmp_path_factory.mktemp("steps") / "m.conx"

    def count(done: int, _: int) -> None:
        calls.append(done)
        assert not target.exists()

    conx.pack(source, target, threads=2, progress=count)
    return len(calls)


PARTS = [0.0, 0.5, 0.9, 1.0]


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_an_error_on_the_way(part: float, there: bool, steps: int, source: Path, tmp_path: Path) -> None:
    """Of the caller's own callback: nothing is left, and what was there before still is."""
    target = tmp_path / "m.conx"
    if there:
        target.write_bytes(b"what was there")
    calls: list[int] = []

    def fail(done: int, _: int) -> None:
        calls.append(done)
        if len(calls) >= part * steps:
            raise OddError

    with pytest.raises(OddError):
        conx.pack(source, target, threads=2, progress=fail)
    assert [p.name for p in tmp_path.iterdir()] == ([target.name] if there else [])
    assert not there or target.read_bytes() == b"what was there"


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("call", ["read", "measure", "choose", "write_tensor"])
def test_an_error_within(call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, say, in a worker thread."""
    count = 0
    home: Any = {"read": Weight, "write_tensor": pipeline}.get(call, decide)
    real = getattr(home, call)

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(home, call, fail)
    with pytest.raises(MemoryError):
        conx.pack(source, tmp_path / "m.conx", threads=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_sync")
def test_what_was_written_is_checked(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that does not decode to what was meant: no file."""
    real = measure.measure

    def wrong(*args: Any, **kwargs: Any) -> Any:
        _, error = real(*args, **kwargs)
        return bytes(32), error

    monkeypatch.setattr(decide, "measure", wrong)
    with pytest.raises(conx.IntegrityError, match="SHA-256"):
        conx.pack(source, tmp_path / "m.conx", threads=2)
    assert list(tmp_path.iterdir()) == []


KILLED = """
    import os, signal, sys
    import conx
    from conx import cli

    source, target, kind, step = sys.argv[1:]

    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) >= float(step):
            os.kill(os.getpid(), getattr(signal, kind))

    if kind == "SIGTERM":  # as the command line takes it
        signal.signal(signal.SIGTERM, cli._on_signal)
    conx.pack(source, target, threads=2, progress=progress)
    print("packed")
"""


@pytest.mark.skipif(os.name == "nt", reason="no signals here")
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("part", PARTS[1:])
def test_killed_on_the_way(kind: str, part: float, steps: int, source: Path, tmp_path: Path) -> None:
    """Nothing under the file's name but a whole file; and if there was time to tidy up, nothing at all."""
    target = tmp_path / "m.conx"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(source), str(target), kind, str(part * steps)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert done.returncode == (143 if kind == "SIGTERM" else -getattr(signal, kind))
    assert "packed" not in done.stdout
    left = [p.name for p in tmp_path.iterdir()]
    assert not target.exists()
    assert left == [] or (kind == "SIGKILL" and all(name.startswith(".m.conx.") for name in left))


# Data outside of the message


def deep(folder: Path, data: str | None = None) -> Path:
    """Two layers and a bias, in several files if asked for."""
    made = model(
        """g (float[n, 40] x) => (float[n, 40] y) {
            a = MatMul(x, w) t = Transpose(v) b = MatMul(a, t) y = Add(b, bias)
        }""",
        {"w": normal(40, 300), "v": normal(40, 300, seed=1), "bias": normal(40, seed=2)},
    )
    if data is None:
        return save(made, folder / "m.onnx")
    for i, tensor in enumerate(made.graph.initializer):
        name = f"{data}.{i}"
        (folder / name).write_bytes(bytes(i * 7) + external(tensor, name, i * 7))
    return save(made, folder / "m.onnx")


@pytest.mark.floor
@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("lossless", [True, False])
def test_a_model_whose_weights_stay_outside(lossless: bool, tmp_path: Path) -> None:
    """As those of a model that one message could not hold."""
    path = deep(tmp_path, "data")
    conx.pack(path, tmp_path / "big.conx", lossless=lossless, external_above=10_000, threads=1)
    conx.pack(path, tmp_path / "small.conx", lossless=lossless, threads=1)
    with Reader(tmp_path / "big.conx") as reader:
        assert [e.name for e in reader.index.source.externals] == ["w", "v"]
        assert reader.index.source.holes == ()
    conx.check(tmp_path / "big.conx", deep=True)
    wanted = run_plain(path, X)
    answers = [conx.InferenceSession(tmp_path / name).run(None, X) for name in ("big.conx", "small.conx")]
    assert same_bits(*answers)
    unpacked = conx.unpack(tmp_path / "big.conx", tmp_path / "again.onnx", external_above=10_000)
    assert sorted(p.name for p in tmp_path.glob("again*")) == ["again.onnx", "again.onnx.data"]
    assert same_bits(run_plain(unpacked, X), answers[0])
    assert not lossless or same_bits(wanted, answers[0])
    inline = conx.unpack(tmp_path / "big.conx", tmp_path / "inline.onnx")
    assert not (tmp_path / "inline.onnx.data").exists()
    assert same_bits(run_plain(inline, X), answers[0])


@pytest.mark.usefixtures("no_sync")
def test_unpacked_with_data_outside_it_packs_again(tmp_path: Path) -> None:
    path = deep(tmp_path)
    conx.pack(path, tmp_path / "a.conx", lossless=True, threads=1)
    unpacked = conx.unpack(tmp_path / "a.conx", tmp_path / "b.onnx", precision="original", external_above=10_000)
    data = tmp_path / "b.onnx.data"
    assert data.exists()
    loaded = onnx.load(unpacked, load_external_data=False)
    places = [{e.key: e.value for e in t.external_data} for t in loaded.graph.initializer if t.external_data]
    assert [p["location"] for p in places] == ["b.onnx.data"] * 2
    assert all(int(p["offset"]) % 4096 == 0 for p in places)
    assert {int(p["length"]) for p in places} == {48_000}
    onnx.checker.check_model(unpacked)
    assert same_bits(run_plain(unpacked, X), run_plain(path, X))
    conx.pack(unpacked, tmp_path / "c.conx", lossless=True, threads=1)
    again = conx.unpack(tmp_path / "c.conx", tmp_path / "d.onnx")
    wanted = {t.name: t.raw_data for t in onnx.load(path).graph.initializer}
    assert {t.name: t.raw_data for t in onnx.load(again).graph.initializer} == wanted
    assert conx.inspect(tmp_path / "a.conx").unique_parameters == conx.inspect(tmp_path / "c.conx").unique_parameters


@pytest.mark.usefixtures("no_sync")
def test_only_what_lay_outside_stays_outside(tmp_path: Path) -> None:
    """What was in the message has room in it."""
    made = onnx.load(deep(tmp_path))
    (tmp_path / "w.bin").write_bytes(external(made.graph.initializer[0], "w.bin"))
    path = save(made, tmp_path / "m.onnx")
    conx.pack(path, lossless=True, external_above=10_000, threads=1)
    with Reader(tmp_path / "m.conx") as reader:
        assert [e.name for e in reader.index.source.externals] == ["w"]
        assert len(reader.index.source.holes) == 1
    for limit in (10_000, 1 << 30):
        again = conx.unpack(tmp_path / "m.conx", tmp_path / f"{limit}.onnx", external_above=limit)
        assert same_bits(run_plain(again, X), run_plain(path, X))


@pytest.mark.usefixtures("no_sync")
def test_unpacking_fails_whole(tmp_path: Path) -> None:
    """Both files or none; what was there stays."""
    conx.pack(deep(tmp_path, "data"), tmp_path / "m.conx", lossless=True, external_above=10_000, threads=1)
    output = tmp_path / "out"
    output.mkdir()
    content = bytearray((tmp_path / "m.conx").read_bytes())
    content[-500] ^= 1
    (tmp_path / "bad.conx").write_bytes(content)
    for limit in (10_000, 1 << 30):
        with pytest.raises(conx.IntegrityError):
            conx.unpack(tmp_path / "bad.conx", output / "m.onnx", external_above=limit)
        assert list(output.iterdir()) == []
    (output / "m.onnx").write_bytes(b"before")
    with pytest.raises(conx.IntegrityError):
        conx.unpack(tmp_path / "bad.conx", output / "m.onnx", external_above=10_000)
    assert [p.read_bytes() for p in output.iterdir()] == [b"before"]


@pytest.mark.usefixtures("no_sync")
def test_unpacking_onto_itself_is_refused(tmp_path: Path) -> None:
    conx.pack(deep(tmp_path), tmp_path / "m.conx", threads=1)
    content = (tmp_path / "m.conx").read_bytes()
    with pytest.raises(ValueError, match=r"is the \.conx file itself"):
        conx.unpack(tmp_path / "m.conx", tmp_path / "m.conx")
    assert (tmp_path / "m.conx").read_bytes() == content
    assert conx.unpack(tmp_path / "m.conx") == tmp_path / "m.onnx"


@pytest.mark.usefixtures("no_sync")
def test_unpacking_a_precision_that_is_not_there(tmp_path: Path) -> None:
    conx.pack(deep(tmp_path), tmp_path / "m.conx", threads=1)
    for precision in ("fp17", ""):
        with pytest.raises(conx.UnsupportedError, match="fp32, int8, original"):
            conx.unpack(tmp_path / "m.conx", tmp_path / "u.onnx", precision=precision)
    assert not (tmp_path / "u.onnx").exists()


@pytest.mark.usefixtures("no_sync")
def test_a_model_without_weights(tmp_path: Path) -> None:
    made = model("g (float[n, 40] x) => (float[n, 40] y) { y = Relu(x) }")
    packed = pack(made, tmp_path, threads=1)
    assert packed.stored == {}
    assert packed.report.lossless
    assert same_bits(run_plain(packed.model, X), conx.InferenceSession(packed.path).run(None, X))
    made = model("g (float[n, 40] x) => (float[n, 40] y) { y = Relu(x) }", {"unused": normal(100, 100)})
    made.graph.node.append(helper.make_node("Constant", [], ["also unused"], value=as_tensor("", normal(100, 90))))
    packed = pack(made, tmp_path, "n", threads=1)
    assert set(packed.stored) == {"unused", "also unused"}
    assert same_bits(run_plain(packed.model, X), conx.InferenceSession(packed.path).run(None, X))

"""`conx.InferenceSession` from the outside: what it takes, what it answers, what it leaves behind."""

import gc
import io
import logging
import os
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import conx
from conx.container.limits import SEGMENT
from conx.errors import FormatError, UnsupportedError
from tests.builders import CPU, as_tensor, give, model, normal, one_thread, run, run_plain, same_bits, save


def varied() -> onnx.ModelProto:
    """Weights of several kinds: multiplied, looked up, convolved, added, in branches, tied, returned."""
    made = model(
        """g (int64[n] i, float[n, 16, 9] p, bool c) => (float[n, 40] y, float[n, 8, 7] v, float[400] w) {
            e = Gather(table, i)
            h = MatMul(e, square)
            r = Relu(h)
            t = Transpose(square)
            b = Gemm(r, t, bias)
            y = If (c) <
                then_branch = th () => (float[n, 40] yt) { yt = MatMul(b, inner) },
                else_branch = el () => (float[n, 40] ye) { ye = Add(b, inner) }
            >
            v = Conv(p, kernel)
            w = Identity(list)
        }""",
        {
            "table": normal(300, 40),
            "square": normal(40, 40, seed=1),
            "twin": normal(40, 40, seed=1).T.copy(),
            "bias": normal(40, seed=2),
            "kernel": normal(8, 16, 3, seed=3),
            "list": normal(400, seed=4),
            "half": normal(30, 30, seed=5).astype(np.float16),
            "numbers": np.arange(700),
        },
    )
    branches = next(n for n in made.graph.node if n.op_type == "If").attribute
    branches[0].g.initializer.append(as_tensor("inner", normal(40, 40, seed=6)))
    give(branches[1].g, "inner", normal(1, 40, seed=7))
    return made


def feeds(rows: int = 3, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "i": rng.integers(0, 300, rows),
        "p": normal(rows, 16, 9, seed=seed),
        "c": np.array(seed % 2 == 0),
    }


@dataclass(frozen=True)
class Case:
    """A model, packed, and what onnxruntime answers."""

    onnx: Path
    conx: Path
    wanted: list[Any]

    def check(self, session: Any) -> None:
        assert same_bits(self.wanted, run(session, feeds()))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("session")
    path = save(varied(), folder / "model.onnx", "model.bin")
    conx.pack(path, lossless=True, threads=1)
    return Case(path, folder / "model.conx", run_plain(path, feeds()))


def opened(source: Any, **settings: Any) -> Any:
    return conx.InferenceSession(source, one_thread(), CPU, **settings)


@pytest.mark.floor
def test_it_is_an_onnxruntime_session(case: Case) -> None:
    session = opened(case.conx)
    assert isinstance(session, onnxruntime.InferenceSession)
    plain = onnxruntime.InferenceSession(case.onnx, one_thread(), providers=CPU)
    for ask in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        described = [[(v.name, v.type, v.shape) for v in getattr(s, ask)()] for s in (plain, session)]
        assert described[0] == described[1]
    assert session.get_providers() == CPU
    case.check(session)


@pytest.mark.floor
@pytest.mark.parametrize("kind", ["str", "Path", "bytes", "bytearray", "memoryview", "file", "BytesIO", "unbuffered"])
def test_sources(kind: str, case: Case) -> None:
    content = case.conx.read_bytes()
    with case.conx.open("rb") as file, case.conx.open("rb", buffering=0) as unbuffered:
        file.seek(5)
        sources = {
            "str": str(case.conx),
            "Path": case.conx,
            "bytes": content,
            "bytearray": bytearray(content),
            "memoryview": memoryview(content),
            "file": file,
            "BytesIO": io.BytesIO(content),
            "unbuffered": unbuffered,
        }
        session = opened(sources[kind])
        if kind == "bytearray":
            sources[kind][:] = bytes(len(content))  # type: ignore[index, unused-ignore]  # the session must not look again
    case.check(session)
    assert session.precision == "original"


def test_a_file_stays_open_and_may_be_used_again(case: Case) -> None:
    with case.conx.open("rb") as file:
        for _ in range(2):
            case.check(opened(file))
            assert not file.closed


@pytest.mark.parametrize("source", [None, 3, ["model.conx"], "text".encode], ids=str)
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(TypeError, match="a model is a path, bytes or a binary file object"):
        conx.InferenceSession(source)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        conx.InferenceSession(tmp_path / "none.conx")
    (tmp_path / "folder.conx").mkdir()
    with pytest.raises((OSError, FormatError)):
        conx.InferenceSession(tmp_path / "folder.conx")


@pytest.mark.floor
@pytest.mark.parametrize("kind", ["path", "str", "bytes", "bytearray", "file"])
def test_a_plain_model_passes_through(kind: str, case: Case, tmp_path: Path) -> None:
    inline = conx.unpack(case.conx, tmp_path / "inline.onnx")
    content = inline.read_bytes()
    with inline.open("rb") as file:
        sources = {
            "path": case.onnx,
            "str": str(inline),
            "bytes": content,
            "bytearray": bytearray(content),
            "file": file,
        }
        session = opened(sources[kind])
    assert session.precision == "original"
    case.check(session)


def test_a_plain_model_has_no_other_precision(case: Case) -> None:
    with pytest.raises(
        UnsupportedError, match=r"model\.onnx is no \.conx file: it has no precision 'fp32'; pack it first"
    ):
        conx.InferenceSession(case.onnx, precision="fp32")


def test_a_packed_file_under_another_name(case: Case, tmp_path: Path) -> None:
    """What it is, its content tells."""
    copy = tmp_path / "weights.bin"
    copy.write_bytes(case.conx.read_bytes())
    case.check(opened(copy))


def test_a_plain_model_named_like_a_packed_one(case: Case, tmp_path: Path) -> None:
    conx.unpack(case.conx, tmp_path / "model.onnx").rename(tmp_path / "model.conx")
    with pytest.raises(FormatError, match=r"model\.conx: .*magic"):
        conx.InferenceSession(tmp_path / "model.conx")


@pytest.mark.parametrize(("name", "choices"), [("precision", "original"), ("memory", "low"), ("verify", "full")])
def test_unknown_settings(name: str, choices: str, case: Case) -> None:
    for wrong in ("fp17", "", None, 1):
        with pytest.raises(ValueError, match=rf"{name}={wrong!r}: choose 'auto'|'checksum'.*{choices}"):
            opened(case.conx, **{name: wrong})


def test_a_precision_that_the_file_has_not(tmp_path: Path) -> None:
    made = model(
        """g (float[2, 40] x) => (float[2, 40] y) {
            q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) f = Cast <to = 1> (i) y = Mul(f, s)
        }""",
        {"w": np.arange(1600, dtype=np.int8).reshape(40, 40)},
    )
    path = save(made, tmp_path / "m.onnx")
    conx.pack(path, threads=1)
    packed = tmp_path / "m.conx"
    with pytest.raises(UnsupportedError) as caught:
        conx.InferenceSession(packed, precision="fp32")
    assert "precision 'fp32' is not in this file, which has int8, original; open it with one of these, or pack" in str(
        caught.value
    )
    for precision in ("auto", "original"):
        session = opened(packed, precision=precision)
        assert session.precision == "original"
        assert same_bits(run_plain(path, {"x": normal(2, 40)}), run(session, {"x": normal(2, 40)}))


def test_the_precision_that_was_chosen(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "conx"):
        assert opened(case.conx).precision == "original"
    assert "at precision original" in caplog.text
    assert opened(case.conx, precision="fp32").precision == "fp32"
    case.check(opened(case.conx, precision="fp32"))
    conx.pack(case.onnx, tmp_path / "lossy.conx", threads=1)
    assert opened(tmp_path / "lossy.conx").precision == "fp32"


@pytest.mark.floor
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("verify", ["checksum", "full"])
@pytest.mark.parametrize("threads", [1, 4, None])
def test_settings_that_change_no_output(memory: str, verify: str, threads: int | None, case: Case) -> None:
    case.check(opened(case.conx, memory=memory, verify=verify, threads=threads))


def test_threads_decode_the_same(tmp_path: Path) -> None:
    """Weights of many segments, stored in another order than they are wanted in too."""
    wide = normal(900, 1000)
    made = model(
        "g (float[2, 900] x) => (float[2, 900] y) { a = MatMul(x, w) t = Transpose(v) y = MatMul(a, t) }",
        {"w": wide, "v": normal(900, 1000, seed=1)},
    )
    made.graph.initializer.append(as_tensor("u", wide.T.copy()))
    made.graph.node.append(helper.make_node("Gather", ["u", "k"], ["z"]))
    made.graph.initializer.append(as_tensor("k", np.array([5, 999])))
    made.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 900]))
    assert wide.size > 3 * SEGMENT
    path = save(made, tmp_path / "m.onnx")
    given = {"x": normal(2, 900)}
    for lossless in (True, False):
        conx.pack(path, lossless=lossless, threads=2)
        answers = [run(opened(tmp_path / "m.conx", threads=threads), given) for threads in (1, 2, 4, 7)]
        assert all(same_bits(answers[0], answer) for answer in answers)
        if lossless:
            assert same_bits(answers[0], run_plain(path, given))


# The caller's options


@pytest.mark.floor
def test_one_object_of_options_for_everything(case: Case, tmp_path: Path) -> None:
    """Nothing of a .conx is left in it, so that a model with external data on disk can be opened with it."""
    options = one_thread()
    made = model("g (float[2, 40] x) => (float[2, 40] y) { y = MatMul(x, w) }", {"w": normal(40, 40)})
    plain = save(made, tmp_path / "other.onnx", "conx-0")  # the location that our own externals have
    wanted = run_plain(plain, {"x": normal(2, 40)})
    conx.pack(plain, lossless=True, threads=1)
    for _ in range(2):
        session = conx.InferenceSession(case.conx, options, CPU)
        case.check(session)
        del session
        gc.collect()
        other = onnxruntime.InferenceSession(plain, options, providers=CPU)
        assert same_bits(wanted, run(other, {"x": normal(2, 40)}))
        again = conx.InferenceSession(tmp_path / "other.conx", options, CPU)
        assert same_bits(wanted, run(again, {"x": normal(2, 40)}))
    for key in ("session.use_external_initializer_file_buffers_directly", "session.disable_prepacking"):
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(key)


def test_low_memory_leaves_nothing_in_the_options(case: Case) -> None:
    options = one_thread()
    conx.InferenceSession(case.conx, options, CPU, memory="low")
    with pytest.raises(RuntimeError):
        options.get_session_config_entry("session.disable_prepacking")


def test_what_the_options_say_is_carried_over(case: Case) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    options.inter_op_num_threads = 3
    options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.logid = "mine"
    options.log_severity_level = 4
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_free_dimension_override_by_name("n", 5)
    session = conx.InferenceSession(case.conx, options, CPU)
    found = session.get_session_options()
    assert found is not options
    for name in (
        "intra_op_num_threads",
        "inter_op_num_threads",
        "execution_mode",
        "graph_optimization_level",
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "logid",
        "log_severity_level",
        "use_deterministic_compute",
        "optimized_model_filepath",
        "enable_profiling",
    ):
        assert getattr(found, name) == getattr(options, name), name
    assert found.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert session.get_inputs()[0].shape == [5]
    assert same_bits(run_plain(case.onnx, feeds(5), options), run(session, feeds(5)))


def test_weights_that_are_used_in_place_without_optimizations(case: Case) -> None:
    """Where onnxruntime makes no copies, our buffers are what it computes with."""
    for disabled in ("optimizations", "repacking"):
        options = one_thread()
        if disabled == "repacking":
            options.add_session_config_entry("session.disable_prepacking", "1")
        else:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = conx.InferenceSession(case.conx, options, CPU)
        fill_memory()
        assert same_bits(run_plain(case.onnx, feeds(), options), run(session, feeds()))


def test_profiling_is_of_the_session_alone(case: Case, tmp_path: Path) -> None:
    options = one_thread()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = conx.InferenceSession(case.conx, options, CPU)
    case.check(session)
    written = Path(session.end_profiling())
    assert options.enable_profiling
    assert list(tmp_path.iterdir()) == [written]
    assert b"Gather" in written.read_bytes()


def test_the_optimized_model_is_written(case: Case, tmp_path: Path) -> None:
    options = one_thread()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    case.check(conx.InferenceSession(case.conx, options, CPU))
    assert options.optimized_model_filepath == str(tmp_path / "optimized.onnx")
    assert onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node


def test_other_arguments_of_onnxruntime(case: Case) -> None:
    session = conx.InferenceSession(
        case.conx, one_thread(), [("CPUExecutionProvider", {})], disabled_optimizers=["GemmSumFusion"]
    )
    case.check(session)
    case.check(conx.InferenceSession(case.conx, providers=CPU, provider_options=[{}]))
    case.check(conx.InferenceSession(case.conx))


def test_setting_providers_opens_the_model_again(case: Case) -> None:
    session = opened(case.conx, precision="fp32", memory="low")
    session.set_providers(CPU)
    assert session.precision == "fp32"
    case.check(session)
    session = opened(case.conx.read_bytes())
    with pytest.raises(RuntimeError, match="not opened from a path"):
        session.set_providers(CPU)
    case.check(session)
    plain = opened(case.onnx)
    plain.set_providers(CPU)
    case.check(plain)


def test_setting_providers_in_vain_changes_nothing(case: Case, tmp_path: Path) -> None:
    copy = tmp_path / "model.conx"
    copy.write_bytes(case.conx.read_bytes())
    session = opened(copy)
    kept = len(session._keep)
    copy.unlink()
    with pytest.raises(FileNotFoundError):
        session.set_providers(CPU)
    assert len(session._keep) == kept > 0
    case.check(session)


# What lives how long


def fill_memory() -> None:
    """Let whatever was freed be used for something else."""
    gc.collect()
    sizes = [w.nbytes for w in (normal(300, 40), normal(40, 40), normal(8, 16, 3), normal(400))]
    for _ in range(3):
        junk = [np.full(size, 0xFF, np.uint8) for size in sizes for _ in range(40)]
        del junk
    gc.collect()


@pytest.mark.floor
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("kind", ["path", "bytes", "file"])
def test_a_session_outlives_everything_else(memory: str, kind: str, case: Case, tmp_path: Path) -> None:
    copy = tmp_path / "model.conx"
    copy.write_bytes(case.conx.read_bytes())
    options = one_thread()
    source: Any = copy if kind == "path" else copy.read_bytes() if kind == "bytes" else copy.open("rb")
    session = conx.InferenceSession(source, options, CPU, memory=memory)
    if kind == "file":
        source.close()
    del source, options
    copy.unlink()
    for _ in range(3):
        fill_memory()
        case.check(session)


def test_sessions_do_not_share_what_they_own(case: Case) -> None:
    sessions = [opened(case.conx) for _ in range(4)]
    while sessions:
        del sessions[0]
        fill_memory()
        for session in sessions:
            case.check(session)


def test_a_session_is_freed_with_its_weights(case: Case) -> None:
    """No circle of references keeps them until a collection."""
    session = opened(case.conx)
    seen = weakref.ref(session)
    weights = [array for array in session._keep if isinstance(array, np.ndarray)]
    assert weights
    gc.disable()
    try:
        del session
        assert seen() is None
        assert [len(gc.get_referrers(array)) for array in weights] == [1] * len(weights)
    finally:
        gc.enable()


def test_the_files_of_a_session_are_closed(case: Case, tmp_path: Path) -> None:
    """As Windows demands: it can be replaced while the session lives."""
    copy = tmp_path / "model.conx"
    copy.write_bytes(case.conx.read_bytes())
    session = opened(copy)
    (tmp_path / "new").write_bytes(b"other")
    (tmp_path / "new").replace(copy)
    case.check(session)


# Progress


@pytest.mark.parametrize("threads", [1, 3])
def test_progress(threads: int, case: Case) -> None:
    calls: list[tuple[int, int]] = []
    opened(case.conx, threads=threads, progress=lambda done, total: calls.append((done, total)))
    totals = {total for _, total in calls}
    assert len(totals) == 1
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == calls[-1][1] > 300 * 40 * 4


def test_an_error_of_the_progress_callback_reaches_the_caller(case: Case) -> None:
    class OddError(Exception):
        pass

    def fail(_: int, __: int) -> None:
        raise OddError

    for threads in (1, 3):
        with pytest.raises(OddError):
            opened(case.conx, threads=threads, progress=fail)


# Threads and processes


def test_opened_from_many_threads(case: Case) -> None:
    content = case.conx.read_bytes()
    shared = one_thread()

    def work(number: int) -> bool:
        source: Any = case.conx if number % 2 else content
        session = conx.InferenceSession(source, shared, CPU, threads=1 + number % 3)
        return same_bits(case.wanted, run(session, feeds()))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))


def test_one_file_object_in_many_threads(case: Case) -> None:
    session = opened(case.conx)
    wanted = {seed: run_plain(case.onnx, feeds(seed=seed)) for seed in range(6)}

    def work(number: int) -> bool:
        seed = number % 6
        return same_bits(wanted[seed], run(session, feeds(seed=seed)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(60)))


def python(script: str, *arguments: object) -> str:
    """What a script prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork(case: Case, tmp_path: Path) -> None:
    """The child opens sessions of its own, and runs a single-threaded one of its parent."""
    np.savez(tmp_path / "feeds.npz", **feeds())
    script = """
        import os, signal, sys
        import numpy as np, onnxruntime
        import conx

        feeds = dict(np.load(sys.argv[2]))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        parents = conx.InferenceSession(sys.argv[1], options)
        wanted = parents.run(None, feeds)
        child = os.fork()
        if child:
            status = os.waitpid(child, 0)[1]
        else:
            signal.alarm(60)  # a child that hangs would keep the pipe open, which no timeout here ends
            own = conx.InferenceSession(sys.argv[1], threads=3)
            equal = [a.tobytes() == b.tobytes() for s in (own, parents) for a, b in zip(wanted, s.run(None, feeds))]
            os._exit(0 if all(equal) else 3)
        equal = [a.tobytes() == b.tobytes() for a, b in zip(wanted, parents.run(None, feeds))]
        print(os.waitstatus_to_exitcode(status), all(equal))
    """
    assert python(script, case.conx, tmp_path / "feeds.npz") == "0 True\n"


@pytest.mark.floor
def test_a_float16_graph_that_crashes_onnxruntime(tmp_path: Path) -> None:
    """Transpose and MatMul, both of float16, with casts between them: a fusion of onnxruntime's ends the process."""
    nodes = "x = Gather(v, i) t = Transpose<perm=[1, 0, 2]>(x) y = MatMul(t, w)"
    made = model(f"g (int64[a, b] i) => (float[d, e, f] y) {{ {nodes} }}", {"v": normal(100, 64), "w": normal(64, 48)})
    conx.pack(save(made, tmp_path / "m.onnx"), tmp_path / "m.conx", verify=False)
    code = (
        "import conx, sys; s = conx.InferenceSession(sys.argv[1], precision='fp16', providers=['CPUExecutionProvider'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "m.conx"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

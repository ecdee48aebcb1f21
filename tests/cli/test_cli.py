"""The command line: what it prints and writes, and that an error is one line and a status, never a traceback."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

import conx
from conx.cli import main
from tests.builders import model, normal, run_plain, same_bits, save

X = {"x": normal(2, 40)}


@dataclass(frozen=True)
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of an error."""
        assert self.out == ""
        assert self.err.startswith("conx: ")
        assert self.err.count("\n") == 1
        assert self.err.endswith("\n")
        assert "Traceback" not in self.err
        return self.err[len("conx: ") : -1]


Conx = Callable[..., Answer]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Conx]:
    """Runs a command in this process."""

    def run(*arguments: object) -> Answer:
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else 1
        out, err = capsys.readouterr()
        return Answer(status, out, err)

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def process(*arguments: object, **settings: str) -> Answer:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "conx", *map(str, arguments)]
    environment = os.environ | {"PYTHONUTF8": "1"} | settings
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False, timeout=120, env=environment)
    return Answer(done.returncode, done.stdout, done.stderr)


def linear() -> onnx.ModelProto:
    return model(
        "g (float[n, 40] x) => (float[n, 50] y) { h = MatMul(x, weight) y = Add(h, bias) }",
        {"weight": normal(40, 50), "bias": normal(50, seed=1)},
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save(linear(), tmp_path / "model.onnx")


@pytest.fixture
def packed(source: Path) -> Path:
    conx.pack(source, lossless=True, threads=1)
    return source.with_suffix(".conx")


# What works


@pytest.mark.floor
def test_the_main_job(source: Path, tmp_path: Path) -> None:
    """Pack, look, check, unpack, each in a process of its own."""
    answer = process("pack", source, "--lossless")
    assert (answer.status, answer.err) == (0, "")
    assert "every weight bit for bit" in answer.out
    packed = tmp_path / "model.conx"
    assert process("info", packed).status == 0
    answer = process("check", "--deep", packed)
    assert answer.out.startswith(f"{packed}: every byte is right (1 tensors, ")
    assert answer.out.endswith(f" graphs, {packed.stat().st_size / 1000:.1f} kB)\n")
    answer = process("unpack", packed, "-o", tmp_path / "again.onnx")
    assert (answer.status, answer.out) == (0, f"{tmp_path / 'again.onnx'}\n")
    assert (tmp_path / "again.onnx").read_bytes() == source.read_bytes()


def test_pack(command: Conx, source: Path, tmp_path: Path) -> None:
    answer = command("pack", source, "-o", tmp_path / "out.conx", "--bits", 6, "--threads", 1)
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["linear", "graphs", "index"]
    assert str(tmp_path / "out.conx") in lines[5]
    assert [line.split()[0] for line in lines[10:]] == ["fp32", "fp16", "int8"]
    plain = command("pack", source, "-o", tmp_path / "out.conx", "--bits", 6, "--no-verify")
    assert plain.out.splitlines()[:4] == lines[:4]
    assert len(plain.out.splitlines()) == 6
    assert conx.inspect(tmp_path / "out.conx").tensors[0].codec == "linear int8"
    assert not conx.inspect(tmp_path / "out.conx").lossless


@pytest.mark.parametrize(
    ("settings", "codec", "lossless"),
    [
        (["--lossless"], "heads", True),
        (["--lossless=smallest"], "planes", True),
        (["--keep", "wei*"], "heads", True),
        (["--keep", "nothing", "--keep", "weight"], None, None),
        (["--palette", "4"], "palette", False),
        (["--block-size", "8", "--bits", "4"], "linear int8", False),
        (["--set", "weight=palette:3,group:10"], "palette", False),
        (["--set", "weight=lossless", "--set", "w*=bits:4"], "heads", True),
    ],
)
def test_settings(settings: list[str], codec: str | None, lossless: bool | None, command: Conx, source: Path) -> None:
    answer = command("pack", source, *settings, "--quiet")
    if codec is None:
        assert answer.status == 2
        assert "nothing" in answer.complaint
        return
    assert answer == Answer(0, "", "")
    info = conx.inspect(source.with_suffix(".conx"))
    assert info.tensors[0].codec == codec
    assert info.lossless == lossless


def test_pack_json(command: Conx, source: Path) -> None:
    answer = command("pack", source, "--json", "--threads", 1)
    found = json.loads(answer.out)
    assert answer.status == 0
    assert found["bytes"] == source.with_suffix(".conx").stat().st_size
    assert found["path"] == str(source.with_suffix(".conx"))
    assert [t["name"] for t in found["tensors"]] == ["weight"]


@pytest.mark.floor
@pytest.mark.parametrize("kind", ["onnx", "conx"])
def test_info_json(kind: str, command: Conx, source: Path, packed: Path) -> None:
    answer = command("info", source if kind == "onnx" else packed, "--json")
    assert (answer.status, answer.err) == (0, "")
    found = json.loads(answer.out)
    assert found["format"] == kind
    assert found["parameters"] == 2050
    assert found["lossless"] is True
    assert found["graph"]["inputs"] == [{"name": "x", "type": "float32", "shape": ["n", 40]}]
    assert [(t["name"], t["shape"], t["dtype"]) for t in found["tensors"]] == [("weight", [40, 50], "float32")]


@pytest.mark.parametrize("kind", ["onnx", "conx"])
def test_info(kind: str, command: Conx, source: Path, packed: Path) -> None:
    answer = command("info", source if kind == "onnx" else packed)
    assert (answer.status, answer.err) == (0, "")
    assert "2,050 (2,050 unique)" in answer.out
    assert "x: float32 nx40" in answer.out
    assert "weight" not in answer.out.replace("weights", "")
    longer = command("info", source if kind == "onnx" else packed, "--tensors")
    assert longer.out.startswith(answer.out.rstrip("\n"))
    assert "weight  float32  40x50" in longer.out


def test_info_of_values_that_are_no_json(command: Conx, tmp_path: Path) -> None:
    """Names with quotes, other scripts, line breaks: still valid."""
    name = 'weight "A"\n\\ 重み'
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {name: normal(40, 40)})
    path = save(made, tmp_path / "m.onnx")
    conx.pack(path, threads=1)
    for file in (path, path.with_suffix(".conx")):
        assert json.loads(command("info", file, "--json").out)["tensors"][0]["name"] == name


def test_check(command: Conx, packed: Path) -> None:
    answer = command("check", packed)
    assert (answer.status, answer.err) == (0, "")
    assert "--deep checks every byte" in answer.out
    answer = command("check", packed, "--deep", "--threads", 2)
    assert (answer.status, answer.err) == (0, "")
    assert "every byte is right" in answer.out
    assert command("check", packed, "--quiet") == Answer(0, "", "")


@pytest.mark.floor
@pytest.mark.parametrize("precision", [None, "original", "fp32"])
def test_unpack(precision: str | None, command: Conx, source: Path, packed: Path, tmp_path: Path) -> None:
    asked = [] if precision is None else ["--precision", precision]
    answer = command("unpack", packed, "-o", tmp_path / "out.onnx", *asked, "--threads", 1)
    assert answer == Answer(0, f"{tmp_path / 'out.onnx'}\n", "")
    assert same_bits(run_plain(tmp_path / "out.onnx", X), run_plain(source, X))


def test_version_and_help(command: Conx) -> None:
    assert command("--version") == Answer(0, f"conx {conx.__version__}\n", "")
    answer = command("--help")
    assert answer.status == 0
    for name in ("pack", "unpack", "info", "check", "demo"):
        assert f"    {name} " in answer.out
        assert command(name, "--help").status == 0


def test_odd_file_names(command: Conx, tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "ein modell – 模型 'x'.onnx")
    assert command("pack", path, "--quiet").status == 0
    packed = path.with_suffix(".conx")
    assert str(packed) in command("check", packed).out
    (tmp_path / "-o.onnx").write_bytes(path.read_bytes())
    assert command("pack", "--quiet", "--", tmp_path / "-o.onnx").status == 0


def test_output_that_nobody_reads(packed: Path) -> None:
    """`conx info … | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "conx", "info", "--json", str(packed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) in (0, 1)


# What does not


def files(folder: Path) -> dict[str, Path]:
    """Things that are no models."""
    found = {name: folder / name for name in ("none.onnx", "none.conx", "folder.onnx", "folder.conx")}
    for name in ("folder.onnx", "folder.conx"):
        (folder / name).mkdir()
    contents = {
        "random.onnx": np.random.default_rng(0).bytes(5000),
        "random.conx": np.random.default_rng(0).bytes(5000),
        "empty.onnx": b"",
        "empty.conx": b"",
        "text.onnx": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n",
        "text.conx": b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        found[name] = folder / name
    return found


BAD = ["none", "folder", "random", "empty", "text"]


@pytest.mark.floor
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("verb", ["pack", "unpack", "info", "check"])
@pytest.mark.parametrize("suffix", [".onnx", ".conx"])
def test_what_is_no_model(bad: str, verb: str, suffix: str, command: Conx, tmp_path: Path) -> None:
    path = files(tmp_path)[bad + suffix]
    output = ["-o", tmp_path / "output"] if verb in ("pack", "unpack") else []
    answer = command(verb, path, *output)
    assert answer.status == 1
    assert path.name in answer.complaint
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("verb", ["pack", "unpack", "check", "info"])
def test_one_kind_of_file_for_the_other(verb: str, command: Conx, source: Path, packed: Path, tmp_path: Path) -> None:
    """Under their own names, and each under the other's."""
    wrong_conx, wrong_onnx = tmp_path / "wrong.conx", tmp_path / "wrong.onnx"
    wrong_conx.write_bytes(source.read_bytes())
    wrong_onnx.write_bytes(packed.read_bytes())
    output = ["-o", tmp_path / "output"] if verb in ("pack", "unpack") else []
    paths = {"pack": [packed, wrong_onnx], "unpack": [source, wrong_conx], "check": [source, wrong_conx]}
    for path in paths.get(verb, [wrong_conx]):
        answer = command(verb, path, *output)
        assert answer.status == 1
        assert path.name in answer.complaint
    assert not (tmp_path / "output").exists()
    if verb == "info":  # it looks at the content
        assert command("info", wrong_onnx).status == 0


@pytest.mark.parametrize("place", ["none/out", "model.onnx/out", "folder"])
@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_outputs_that_cannot_be_written(verb: str, place: str, command: Conx, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    given = packed.with_suffix(".onnx") if verb == "pack" else packed
    before = sorted(tmp_path.iterdir())
    answer = command(verb, given, "-o", tmp_path / place)
    assert answer.status == 1
    assert place.split("/", maxsplit=1)[0] in answer.complaint
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_that_may_not_be_written_to(command: Conx, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    answer = command("pack", source, "-o", folder / "out.conx")
    assert answer.status == 1
    assert "locked" in answer.complaint


def test_an_output_that_is_the_input(command: Conx, source: Path, packed: Path) -> None:
    contents = [p.read_bytes() for p in (source, packed)]
    for verb, path in (("pack", source), ("unpack", packed)):
        answer = command(verb, path, "-o", path)
        assert answer.status == 2
        assert "name another output" in answer.complaint
    assert [p.read_bytes() for p in (source, packed)] == contents


WRONG_USE = {
    "nothing": [],
    "unknown command": ["squeeze", "MODEL"],
    "no model": ["pack"],
    "unknown option": ["pack", "MODEL", "--fast"],
    "bits": ["pack", "MODEL", "--bits", "9"],
    "no number": ["pack", "MODEL", "--bits", "many"],
    "palette": ["pack", "MODEL", "--palette", "0"],
    "two files": ["check", "MODEL", "MODEL"],
}


@pytest.mark.parametrize("use", WRONG_USE)
def test_wrong_usage(use: str, command: Conx, source: Path) -> None:
    """As argparse tells it: usage, and a line."""
    answer = command(*[source if word == "MODEL" else word for word in WRONG_USE[use]])
    assert answer.status == 2
    assert answer.out == ""
    assert answer.err.startswith("usage: conx")
    assert "Traceback" not in answer.err


WRONG_VALUES = {
    "lossless and bits exclude each other": ["--lossless", "--bits", "4"],
    "palette replaces the grid": ["--palette", "4", "--block-size", "32"],
    "block_size=3": ["--block-size", "3"],
    "no weight of": ["--keep", "no such name*"],
    "write PATTERN=RULE": ["--set", "weight"],
    "'fast' in 'fast'": ["--set", "weight=fast"],
    "bits=99": ["--set", "weight=bits:99"],
}


@pytest.mark.parametrize("message", WRONG_VALUES)
def test_settings_that_make_no_sense(message: str, command: Conx, source: Path, tmp_path: Path) -> None:
    answer = command("pack", source, *WRONG_VALUES[message])
    assert answer.status == 2
    assert message in answer.complaint
    assert sorted(tmp_path.iterdir()) == [source]


def test_precisions_that_are_not_there(command: Conx, packed: Path, tmp_path: Path) -> None:
    answer = command("unpack", packed, "-o", tmp_path / "out.onnx", "--precision", "fp17")
    assert answer.status == 1
    assert "has no precision 'fp17', only " in answer.complaint
    assert not (tmp_path / "out.onnx").exists()


def test_damage(command: Conx, packed: Path, tmp_path: Path) -> None:
    content = bytearray(packed.read_bytes())
    content[-300] ^= 16
    bad = tmp_path / "bad.conx"
    bad.write_bytes(content)
    assert command("check", bad).status == 0
    for verb in (["check", "--deep"], ["unpack"]):
        answer = command(*verb, bad)
        assert answer.status == 1
        assert "bad.conx" in answer.complaint
    bad.write_bytes(content[:-1])
    for verb in (["check"], ["check", "--deep"], ["unpack"], ["info"]):
        answer = command(*verb, bad)
        assert answer.status == 1
        assert "cut short" in answer.complaint
    assert not (tmp_path / "bad.onnx").exists()


def test_external_data_that_is_not_there(command: Conx, tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "m.onnx", "weights\nand more.bin")
    (tmp_path / "weights\nand more.bin").unlink()
    for verb in ("pack", "info"):
        answer = command(verb, path)
        assert answer.status == 1
        assert "tensor 'weight'" in answer.complaint


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (MemoryError(), 1, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("of two\nlines"), 1, "internal error (RuntimeError: of two lines); please report it"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (OSError(28, "No space left on device", "/some/file"), 1, "/some/file: No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_errors(
    error: BaseException, status: int, text: str, command: Conx, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(conx, "pack", fail)
    monkeypatch.delenv("CONX_TRACEBACK", raising=False)
    answer = command("pack", source)
    assert answer.status == status
    assert text in answer.complaint


def test_a_traceback_where_it_is_asked_for(command: Conx, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(conx, "pack", fail)
    monkeypatch.setenv("CONX_TRACEBACK", "1")
    with pytest.raises(LookupError, match="a fault of ours"):
        command("pack", source)


@pytest.mark.skipif(os.name == "nt", reason="no signals here")
def test_terminated(source: Path, monkeypatch: pytest.MonkeyPatch, command: Conx) -> None:
    """SIGTERM ends it as an exit, so that temporary files are removed."""

    def wait(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not reached")

    monkeypatch.setattr(conx, "pack", wait)
    assert command("pack", source).status == 128 + signal.SIGTERM


def test_without_the_packages_of_the_extra(packed: Path, source: Path) -> None:
    """A .conx is looked at and checked without onnx; what needs it says how to get it."""
    hidden = "import sys; sys.modules['onnx'] = None; from conx.cli import main; sys.exit(main())"
    for verb, path, status in (("info", packed, 0), ("check", packed, 0), ("pack", source, 1), ("info", source, 1)):
        done = subprocess.run(
            [sys.executable, "-c", hidden, verb, str(path)],
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        if status:
            assert Answer(1, done.stdout, done.stderr).complaint.endswith('pip install "conx-onnx[pack]"')


def test_the_original_files(command: Conx, source: Path, tmp_path: Path) -> None:
    packed = tmp_path / "out.conx"
    assert command("pack", source, "-o", packed, "--lossless").status == 0
    answer = command("unpack", packed, "--original", tmp_path / "back")
    assert (answer.status, answer.out) == (0, f"{tmp_path / 'back' / source.name}\n")
    assert (tmp_path / "back" / source.name).read_bytes() == source.read_bytes()
    answer = command("unpack", packed, "--original", tmp_path / "back", "-o", tmp_path / "other")
    assert (answer.status, answer.err) == (2, "conx: --original names a folder: it goes without --output\n")
    assert command("pack", source, "-o", packed, "--lossless", "--no-original").status == 0
    answer = command("unpack", packed, "--original", tmp_path / "again")
    assert answer.status == 1
    assert "does not hold the original files" in answer.err

"""The command's surroundings: pipes that close, streams that are not there, what a terminal cannot show.

Whatever happens to its output, a command says at most one line on stderr, and no traceback.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import conx
from conx.cli import _parser
from tests.builders import model, normal, save

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "層.é"  # of a weight


def conx_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "conx", *map(str, arguments)]


def run(command: Sequence[str], **settings: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONUTF8": "0"} | settings
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        encoding=settings.get("PYTHONIOENCODING", "utf-8").partition(":")[0],
        check=False,
        timeout=120,
        env=environment,
    )


def shell(command: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs a line of sh, in which "$@" is conx with these arguments."""
    return run(["sh", "-c", command, "sh", *conx_command(*arguments)])


posix = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a weight whose name is not ASCII."""
    made = model("g (float[1] x) => (float[1] y) { y = Identity(x) }", {NAME: normal(40, 40), "b": normal(40, seed=1)})
    return save(made, tmp_path_factory.mktemp("streams") / "m.onnx")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    conx.pack(source)
    return source.with_suffix(".conx")


@posix
@pytest.mark.parametrize("option", ["--tensors", "--json"])
def test_a_pipe_that_closes_early(option: str, tmp_path: Path) -> None:
    """More than a pipe holds, and a reader that takes one line."""
    weights = {f"weight{i}": normal(20, 20, seed=i) for i in range(1500)}
    path = save(model("g (float[1] x) => (float[1] y) { y = Identity(x) }", weights), tmp_path / "m.onnx")
    whole = run(conx_command("info", path, option))
    assert len(whole.stdout) > 1 << 16
    done = shell('"$@" | head -n 1', "info", path, option)
    assert done.stdout == whole.stdout.splitlines(keepends=True)[0]
    assert done.stderr == ""


@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
@pytest.mark.parametrize("option", ["--json", "--tensors"])
def test_output_that_does_not_fit(option: str, packed: Path) -> None:
    done = shell('PYTHONIOENCODING=utf-8 "$@" > /dev/full', "info", packed, option)
    assert done.returncode == 1
    assert done.stderr == "conx: [Errno 28] No space left on device\n"


@posix
@pytest.mark.parametrize(("closed", "verb"), [(">&-", "info"), ("2>&-", "check")])
def test_streams_that_are_not_there(closed: str, verb: str, packed: Path) -> None:
    done = shell(f'"$@" {closed}', verb, packed)
    assert done.returncode == 0
    assert "internal error" not in done.stdout + done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("arguments", [["info", "--tensors"], ["pack"]], ids=" ".join)
def test_names_that_the_terminal_cannot_show(
    arguments: list[str], encoding: str, source: Path, packed: Path, tmp_path: Path
) -> None:
    output = ["-o", tmp_path / "out.conx"] if arguments == ["pack"] else []
    path = packed if arguments[0] == "info" else source
    done = run(conx_command(*arguments, path, *output), PYTHONIOENCODING=encoding)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_is_ascii(encoding: str, packed: Path) -> None:
    done = run(conx_command("info", packed, "--json"), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@posix
@pytest.mark.parametrize("verb", ["pack", "unpack", "info", "check"])
def test_missing_files_whose_names_are_not_text(verb: str, tmp_path: Path) -> None:
    """One line, whatever stderr can encode."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n.conx")
    done = run(conx_command(verb, path), PYTHONIOENCODING="utf-8:strict")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("conx: ")
    assert done.stderr.endswith(".conx: No such file or directory\n")
    assert done.stderr.count("\n") == 1


@posix
def test_files_whose_names_are_not_text(packed: Path, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.conx")
    Path(path).write_bytes(packed.read_bytes())
    done = run(conx_command("info", path), PYTHONIOENCODING="utf-8:strict")
    assert (done.returncode, done.stderr) == (0, "")


def test_version() -> None:
    """The module run as a program, and the installed one."""
    done = run(conx_command("--version"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"conx {conx.__version__}\n", "")


def test_each_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (a.choices for a in _parser()._actions if isinstance(a.choices, dict))
    assert {"pack", "unpack", "info", "check", "demo"} <= set(commands)
    for name, command in commands.items():
        with pytest.raises(SystemExit) as end:
            _parser().parse_args([name, "--help"])
        assert end.value.code == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"usage: conx {name} ")
        assert command.description in " ".join(out.split())
        assert err == ""


def test_commands_do_not_wait_for_input(packed: Path) -> None:
    done = run(conx_command("check", "--deep", packed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{packed}: every byte is right (1 tensors, ")


@pytest.mark.parametrize("verb", ["pack", "unpack"])
def test_an_output_that_cannot_be_made_is_named(verb: str, source: Path, packed: Path, tmp_path: Path) -> None:
    done = run(conx_command(verb, source if verb == "pack" else packed, "-o", tmp_path / "none" / "out.file"))
    assert done.returncode == 1
    assert str(tmp_path / "none" / "out.file") in done.stderr


@pytest.mark.parametrize("arguments", [["pack"], ["unpack"], ["check", "--deep"]], ids=" ".join)
def test_threads_that_make_no_sense(arguments: list[str], source: Path, packed: Path, tmp_path: Path) -> None:
    path = source if arguments == ["pack"] else packed
    output = [] if arguments[0] == "check" else ["-o", tmp_path / "out.file"]
    done = run(conx_command(*arguments, path, *output, "--threads", -1))
    assert done.returncode == 2
    assert "threads" in done.stderr.splitlines()[-1]


def test_quiet_says_nothing(source: Path, packed: Path, tmp_path: Path) -> None:
    for arguments in (["pack", source, "-o", tmp_path / "q.conx"], ["check", "--deep", packed]):
        done = run(conx_command(*arguments, "--quiet"), PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert np.array_equal(np.fromfile(packed, np.uint8), np.fromfile(tmp_path / "q.conx", np.uint8))

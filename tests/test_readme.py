"""README's code blocks run as they stand, in their order, in one folder and one Python namespace.

Blocks of `python` are executed; of `console` and `bash` each `conx …` command. A block that cannot run here stands
after a comment `<!-- not run: reason -->`. The folder holds a model.onnx (input `x`, float32, [batch, 64]) and an
inputs.npz for it, since a reader would have a model.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"

PYTHON = {"python"}
SHELL = {"bash", "console"}
SHOWN = {"", "json", "text", "toml"}  # output and the like

# Commands that the gate has run before the tests start, or cannot run inside them.
TRUSTED = [
    ["pip", "install"],
    ["python", "-m", "pip", "install"],
    ["python", "-m", "pytest"],
    ["python", "tools/dev.py"],
    ["bash", ".ci/run"],
]


@dataclass(frozen=True)
class Block:
    """A fenced block: the word after the fence, the lines in it, and the line of README where they start."""

    language: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a Markdown text that are to be run or shown: all that are not marked `not run`."""
    inside: list[str] | None = None
    language, start, before = "", 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is not None and line.strip() == "```":
            if not re.fullmatch(r"<!-- not run: .+ -->", before):
                yield Block(language, "\n".join(inside) + "\n", start)
            inside, before = None, ""
        elif inside is not None:
            inside.append(line)
        elif line.startswith("```"):
            inside, language, start = [], line.removeprefix("```").strip(), number + 1
        elif line.strip():
            before = line.strip()
    assert inside is None, f"the block that starts in line {start} does not end"


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, split into words; where there are `$ ` prompts, other lines are output."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


def run_shell(block: Block) -> None:
    """Runs the block's `conx` commands in the current folder, as `python -m conx` from this tree."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in commands(block.code):
        said = f"README.md, line {block.line}: {shlex.join(words)}"
        if any(words[: len(start)] == start for start in TRUSTED):
            continue
        assert words[0] == "conx", f"{said}: not a command of conx; mark the block <!-- not run: reason -->"
        assert not {"|", ">", "<", ";"} & set(words), f"{said}: needs a shell"
        command = [sys.executable, "-m", "conx", *words[1:]]
        done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False, timeout=300)
        assert done.returncode == 0, f"{said}: status {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder that holds model.onnx and inputs.npz."""
    rng = np.random.default_rng(3)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["y"])],
        "readme",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 256])],
        [
            numpy_helper.from_array(rng.normal(size=n).astype(np.float32), name)
            for name, n in (("w", (64, 256)), ("b", 256))
        ],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "model.onnx"
    )
    np.savez(tmp_path / "inputs.npz", x=rng.normal(size=(8, 64)).astype(np.float32))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_blocks_run() -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in blocks(README.read_text(encoding="utf-8")):
        assert block.language in PYTHON | SHELL | SHOWN, f"README.md, line {block.line}: {block.language} is not known"
        if block.language in PYTHON:
            # Blank lines in front, so that a traceback names README's lines.
            exec(compile("\n" * (block.line - 1) + block.code, str(README), "exec"), namespace)
        elif block.language in SHELL:
            run_shell(block)


def test_first_commands_are_there() -> None:
    text = README.read_text(encoding="utf-8")
    shell = [words for block in blocks(text) if block.language in SHELL for words in commands(block.code)]
    assert ["conx", "demo"] in shell
    assert ["python", "-m", "pytest"] in shell, "the gate's test command"
    assert any(block.language in PYTHON for block in blocks(text))


def test_the_parser_skips_marked_blocks_only() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- not run: slow -->\n\n```bash\nconx a\n```\nb\n```text\nc\n```\n"
    assert list(blocks(text)) == [Block("python", "x = 1\n", 3), Block("text", "c\n", 12)]


def test_the_parser_takes_commands_apart() -> None:
    assert list(commands('pip install ".[all]" && conx demo  # now\n# not this\n')) == [
        ["pip", "install", ".[all]"],
        ["conx", "demo"],
    ]
    assert list(commands("$ conx pack a.onnx \\\n    -o b.conx\npacked\n")) == [
        ["conx", "pack", "a.onnx", "-o", "b.conx"]
    ]

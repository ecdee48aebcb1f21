"""The verbs of a developer, each under one name: `python tools/dev.py lint types test`, or `all`.

`.ci/run` and the workflows call the same ones, so that what is green here is green there. Tasks run in the order
given, with the Python that runs this file, and the first that fails ends the run with its status.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["TASKS", "floors", "main", "new_venv"]

ROOT = Path(__file__).resolve().parent.parent
FLOOR_VENV = ROOT / ".venv-floor"


class TaskFailedError(Exception):
    """A command of a task ended with a status other than 0."""

    def __init__(self, command: Sequence[str], status: int) -> None:
        super().__init__(f"status {status}: {' '.join(command)}")
        self.status = status


def run(*command: str) -> None:
    """Runs one command in the root of the repository, showing it first.

    Raises:
        TaskFailedError: it ended with a status other than 0. pytest's status 5, no test ran, is one.
    """
    print("$", *command, flush=True)
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        raise TaskFailedError(command, status)


def lint() -> None:
    """Ruff: rules and layout, nothing changed."""
    run(sys.executable, "-m", "ruff", "check", ".")
    run(sys.executable, "-m", "ruff", "format", "--check", ".")


def reformat() -> None:
    """Ruff: mends what it can."""
    run(sys.executable, "-m", "ruff", "check", "--fix", ".")
    run(sys.executable, "-m", "ruff", "format", ".")


def types() -> None:
    """Mypy, strict."""
    run(sys.executable, "-m", "mypy")


def all_tests() -> None:  # not named test: pytest, which runs the doctest below, would take it for one
    """All tests and doctests."""
    run(sys.executable, "-m", "pytest")


def floor() -> None:
    """The tests marked `floor`, in an environment with the oldest dependencies that pyproject.toml allows."""
    python = new_venv(FLOOR_VENV)
    with (ROOT / "pyproject.toml").open("rb") as file:
        oldest = floors(tomllib.load(file)["project"])
    run(str(python), "-m", "pip", "install", "--quiet", "--editable", ".[dev]", *oldest)
    run(str(python), "-m", "pytest", "-m", "floor")


def new_venv(folder: Path) -> Path:
    """Makes an empty virtual environment, over whatever is there; answers its Python."""
    run(sys.executable, "-m", "venv", "--clear", str(folder))
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def floors(project: dict[str, object]) -> list[str]:
    """The lower bounds of what conx needs to load and to pack, as requirements that hold each package there.

    >>> floors({"dependencies": ["numpy>=2.0"], "optional-dependencies": {"cpu": ["onnxruntime>=1.31"], "pack": []}})
    ['numpy==2.0.*', 'onnxruntime==1.31.*']
    """
    required = project["dependencies"]
    extras = project["optional-dependencies"]
    assert isinstance(required, list)
    assert isinstance(extras, dict)
    return [bound.replace(">=", "==") + ".*" for bound in [*required, *extras["cpu"], *extras["pack"]]]


TASKS: dict[str, Sequence[Callable[[], None]]] = {
    "lint": [lint],
    "format": [reformat],
    "types": [types],
    "test": [all_tests],
    "floor": [floor],
    "all": [lint, types, all_tests],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tasks named on the command line; answers the status of the first that failed, or 0."""
    told = "\n".join(f"  {name:<7} {' '.join((step.__doc__ or '').strip() for step in TASKS[name])}" for name in TASKS)
    parser = argparse.ArgumentParser(
        description="Developer tasks.", epilog=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK", help="one or more of the tasks below")
    names: list[str] = parser.parse_args(arguments).tasks
    try:
        for name in names:
            for step in TASKS[name]:
                step()
    except TaskFailedError as failed:
        print(failed, file=sys.stderr)
        return failed.status
    return 0


if __name__ == "__main__":
    sys.exit(main())

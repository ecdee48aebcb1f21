"""Compile the CUDA kernels for several GPUs, without one, and print the registers and the spilled bytes of each.

Needs NVRTC: from the package nvidia-cuda-nvrtc (the extra `dev` has it), or of an installed CUDA.

    python tools/gpu_kernels.py [ARCHITECTURE ...]
"""

import argparse
import ctypes
import ctypes.util
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from conx.report import table
from conx.runtime.cuda.sources import GROUPS, OPTIONS, kernel_source

__all__ = [
    "ARCHITECTURES",
    "Figures",
    "NvrtcError",
    "compiled",
    "figures_of",
    "find_nvrtc",
    "known_architectures",
    "main",
]

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)


class NvrtcError(Exception):
    """NVRTC is not there, or refuses the source; the text has its log."""


@dataclass(frozen=True)
class Figures:
    """What a kernel takes: registers of a thread, bytes that did not fit into them, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


@cache
def find_nvrtc() -> Any:
    """The NVRTC library, or None where there is none."""
    for path in _candidates():
        try:
            for own in Path(path).parent.glob("*nvrtc-builtins*"):  # which it looks for by name only
                ctypes.CDLL(str(own))
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for name in ("libnvrtc.so.*", "nvrtc64_*.dll"):
            found = Path(folder).rglob(name)
            yield from sorted(str(path) for path in found if ".alt." not in path.name)
    installed = ctypes.util.find_library("nvrtc")
    if installed:
        yield installed


def _call(function: str, *arguments: Any) -> None:
    library = find_nvrtc()
    if library is None:
        raise NvrtcError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    status = getattr(library, function)(*arguments)
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise NvrtcError(f"{function}: {library.nvrtcGetErrorString(status).decode()}")


def known_architectures() -> list[int]:
    """The compute capabilities that this NVRTC compiles for."""
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", numbers)
    return list(numbers)


def compiled(source: str, architecture: int, *more: str) -> tuple[bytes, str]:
    """The machine code for a compute capability (90 is 9.0), and the compiler's log; `more` are further options.

    Raises:
        NvrtcError: the source does not compile.
    """
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"conx.cu", 0, None, None)
    try:
        given = [*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=--verbose", *more]
        options = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        try:
            _call("nvrtcCompileProgram", program, len(given), options)
        except NvrtcError as error:
            raise NvrtcError(f"{error}\n{_text(program, 'nvrtcGetProgramLog')}") from None
        return _bytes(program, "nvrtcGetCUBIN"), _text(program, "nvrtcGetProgramLog")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _bytes(program: ctypes.c_void_p, function: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"{function}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(function, program, buffer)
    return buffer.raw


def _text(program: ctypes.c_void_p, function: str) -> str:
    return _bytes(program, function).rstrip(b"\0").decode(errors="replace")


def figures_of(log: str) -> dict[str, Figures]:
    """The figures of each kernel in a log."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        numbers = [re.search(rf"(\d+) {what}", part) for what in ("registers", "bytes spill stores", "bytes smem")]
        found[name] = Figures(*(int(number[1]) if number else 0 for number in numbers))
    return found


def _figures(architecture: int) -> dict[str, Figures]:
    """The figures of all kernels, compiled in the groups that they are compiled in for use."""
    logs = [compiled(kernel_source(group), architecture)[1] for group in GROUPS]
    return {name: figures for log in logs for name, figures in figures_of(log).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of kernels and architectures: registers, and spilled bytes where there are any."""
    parser = argparse.ArgumentParser(description="Registers and spilled bytes of the CUDA kernels.")
    parser.add_argument("architectures", nargs="*", type=int, metavar="ARCHITECTURE", help="like 90 for 9.0")
    wanted: list[int] = parser.parse_args(arguments).architectures
    try:
        wanted = wanted or [each for each in ARCHITECTURES if each in known_architectures()]
        columns = {each: _figures(each) for each in wanted}
    except NvrtcError as error:
        print(error, file=sys.stderr)
        return 1
    names = next(iter(columns.values()))
    rows = [[name, *(_cell(columns[each][name]) for each in wanted)] for name in names]
    print(table(["kernel", *(f"sm_{each}" for each in wanted)], rows))
    return 0


def _cell(figures: Figures) -> str:
    spilled = f" ({figures.spilled} B spilled)" if figures.spilled else ""
    return f"{figures.registers}{spilled}"


if __name__ == "__main__":
    sys.exit(main())

"""`conx doctor`: what is installed, what it can do, and which way a file would take."""

import importlib.metadata
import platform
import sys

from conx import __version__
from conx.report import bytes_text, table

__all__ = ["diagnose"]

# Distributions that matter, beside onnxruntime's, and what is missing without them; "": nothing that must be told.
PACKAGES = {
    "numpy": "conx cannot run",
    "zstandard": "conx cannot run",
    "msgpack": "conx cannot run",
    "onnx": 'models cannot be packed: pip install "conx-onnx[pack]"',
    "nvidia-nvcomp-cu13": "not used by this version",
}


def diagnose(path: str | None = None) -> str:
    """A report for people.

    Args:
        path: a .conx file, to tell which way it would take; None: none.

    Raises:
        FormatError, IntegrityError: the file is damaged.
    """
    rows = [["conx", __version__], ["Python", f"{sys.version.split()[0]} on {platform.platform()}"]]
    rows += [[name, _version(name, missing)] for name, missing in PACKAGES.items()]
    try:
        from conx.runtime import diagnosis
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == "conx":
            raise
        rows.append(["onnxruntime", f'missing ({e.name}), sessions cannot be opened: pip install "conx-onnx[cpu]"'])
        return table([], rows)
    rows += [[*fact] for fact in diagnosis.runtime_facts() + diagnosis.device_facts()]
    text = table([], rows)
    if path is None:
        return text
    ways = [
        [each.precision, each.way, bytes_text(each.device_bytes), bytes_text(each.host_bytes), each.why]
        for each in diagnosis.file_ways(path)
    ]
    return f"{text}\n\n" + table(["precision", "way", "decoded on the GPU", "on the host", "because"], ways)


def _version(name: str, missing: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"missing; {missing}" if missing else "missing"

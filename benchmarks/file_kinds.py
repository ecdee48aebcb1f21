"""Magika: installed files of many kinds, read as its published configuration says."""

from __future__ import annotations

import json
import os
import random
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.corpus import fetch
from benchmarks.feeds import CALIBRATION, Array, Feed, Run

__all__ = ["feeds", "score"]

_PER_KIND = 30
_RESERVED = 100  # files to calibrate with, which are not scored
_SHORTEST = 64  # bytes: nobody can tell the kind of less
_KINDS = {
    ".bat": "batch", ".bmp": "bmp", ".c": "c", ".cpp": "cpp", ".hpp": "cpp", ".css": "css", ".csv": "csv",
    ".gif": "gif", ".gz": "gzip", ".html": "html", ".ico": "ico", ".ini": "ini", ".jpg": "jpeg", ".js": "javascript",
    ".json": "json", ".md": "markdown", ".npy": "npy", ".npz": "npz", ".onnx": "onnx", ".pdf": "pdf", ".pl": "perl",
    ".png": "png", ".py": "python", ".pyc": "pythonbytecode", ".rst": "rst", ".sh": "shell", ".so": "elf",
    ".svg": "svg", ".tex": "latex", ".tif": "tiff", ".toml": "toml", ".ts": "typescript", ".ttf": "ttf",
    ".wav": "wav", ".xml": "xml", ".yaml": "yaml", ".zip": "zip",
}  # fmt: skip


def feeds(limit: int, seed: int) -> list[Feed]:
    """Gives files of different kinds, ``bytes`` [1, 2048] int32: the first and the last 1024 bytes, padded."""
    tokens, _ = _frozen()
    usable = tokens[-_RESERVED:] if seed == CALIBRATION else tokens[:-_RESERVED]
    order = random.Random(seed).sample(range(len(usable)), min(limit, len(usable)))
    return [{"bytes": usable[number][None].astype(np.int32)} for number in order]


def score(run: Run, limit: int | None) -> dict[str, float]:
    """Share of files whose most probable kind is the one their suffix names.

    Which files there are depends on the machine: compare only numbers from one and the same.
    """
    labels: list[str] = _config()["target_labels_space"]
    tokens, kinds = (array[:-_RESERVED][:limit] for array in _frozen())
    right = 0
    for row, kind in zip(tokens, kinds, strict=True):
        (output,) = run({"bytes": row[None].astype(np.int32)}).values()
        right += labels[int(output.argmax())] == kind
    return {"top1": right / len(tokens), "files": float(len(tokens))}


@cache
def _frozen() -> tuple[Array, Array]:
    """Samples [files, 2048] uint16 and their kinds, kept beside the model: what is installed later changes nothing."""
    kept = fetch("magika").with_name("installed-files.npz")
    if not kept.is_file():
        files = _files()
        tokens = np.concatenate([_tokens(path) for path, _ in files])
        unfinished = kept.with_name(f"unfinished-{os.getpid()}.npz")
        np.savez_compressed(unfinished, tokens=tokens, kinds=np.array([kind for _, kind in files]))
        unfinished.replace(kept)
    with np.load(kept) as arrays:
        return arrays["tokens"], arrays["kinds"]


def _files() -> list[tuple[Path, str]]:
    """Up to 30 files of each kind from the standard library and the installed packages, shuffled by a fixed seed."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib", "include")}
    by_suffix: dict[str, set[Path]] = {suffix: set() for suffix in _KINDS}
    for root in roots:
        for path in root.rglob("*"):
            named_falsely = "LICENSE" in path.name or path.parts[-2:-1] == ("licenses",)  # plain text called .md
            if path.suffix in by_suffix and not named_falsely and path.is_file() and path.stat().st_size >= _SHORTEST:
                by_suffix[path.suffix].add(path)
    draw = random.Random(0)
    chosen = [
        (path, _KINDS[suffix])
        for suffix, paths in sorted(by_suffix.items())
        for path in draw.sample(sorted(paths), min(_PER_KIND, len(paths)))
    ]
    draw.shuffle(chosen)
    return chosen


@cache
def _config() -> dict[str, list[str]]:
    config: dict[str, list[str]] = json.loads(fetch("magika").with_name("config.min.json").read_bytes())
    return config


def _tokens(path: Path) -> Array:
    """Magika's features, version 2: both ends, without white space there, of at most 4096 bytes; 256 pads."""
    with path.open("rb") as stream:
        head = stream.read(4096).lstrip()[:1024]
        stream.seek(max(0, path.stat().st_size - 4096))
        tail = stream.read(4096).rstrip()[-1024:]
    tokens = np.full((1, 2048), 256, np.uint16)
    tokens[0, : len(head)] = np.frombuffer(head, np.uint8)
    tokens[0, 2048 - len(tail) :] = np.frombuffer(tail, np.uint8)
    return tokens

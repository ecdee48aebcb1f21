"""Names of files that a .conx file brings back: relative, and the same on every system."""

import re
import unicodedata
from collections.abc import Iterable

__all__ = ["RESERVED", "name_fault"]

RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE)
"""Names that Windows keeps for devices, with any ending."""

MAX_PART = 255  # bytes of UTF-8 that file systems take for one part of a path
FORBIDDEN = re.compile(r'[\x00-\x1f<>:"|?*\\\x7f]')


def name_fault(names: Iterable[str]) -> tuple[str, str] | None:
    """The first name that must not become a file's, and why; None if all are right.

    A name is parts joined by `/`. Two names must not be one file where case or the form of Unicode does not count, nor
    must one be a folder of another.
    """
    files: dict[str, str] = {}
    folders: set[str] = set()
    for name in names:
        parts = name.split("/")
        for part in parts:
            rule = _part_fault(part)
            if rule:
                return name, rule
        folded = [unicodedata.normalize("NFC", part).casefold() for part in parts]
        above = {"/".join(folded[:i]) for i in range(1, len(folded))}
        whole = "/".join(folded)
        if whole in files:
            return name, f"is the same file as {files[whole]!r} where case does not count"
        if whole in folders or above & files.keys():
            return name, "is a folder in one name and a file in another"
        files[whole] = name
        folders |= above
    return None


def _part_fault(part: str) -> str:
    if part in ("", ".", ".."):
        return "must be relative, without empty parts, '.' or '..'"
    if FORBIDDEN.search(part):
        return "has a character that not every system takes in a file's name"
    if part[-1] in ". ":
        return "has a part that ends in a dot or a space"
    if RESERVED.fullmatch(part):
        return "is a device's name on Windows"
    if len(part.encode("utf-8", "surrogatepass")) > MAX_PART:
        return f"has a part of more than {MAX_PART} bytes"
    return ""

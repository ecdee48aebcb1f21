"""What the user asks for: how tensors are coded, in general and by name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["Rule", "Rules", "parse_rule"]

BITS = range(2, 9)


@dataclass(frozen=True)
class Rule:
    """How a float matrix, kernel or embedding is coded.

    Attributes:
        lossless: bit for bit; the rest does not matter then.
        bits: the grid has codes from -(2^(bits-1) - 1) to 2^(bits-1) - 1.
        block_size: a scale for each run of so many values along the axis that is summed over; None: for each channel.
        palette: bits of a palette's index; None: a grid.
        group: channels that share a palette; None: one palette for the tensor.
        smallest: where it is stored bit for bit, whatever is smallest, even if it decodes more slowly.
    """

    lossless: bool = False
    bits: int = 8
    block_size: int | None = None
    palette: int | None = None
    group: int | None = None
    smallest: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits}: from 2 to 8 are possible")
        if self.block_size is not None and self.block_size < 8:
            raise ValueError(f"block_size={self.block_size}: 8 or more are possible")
        if self.palette is not None and self.palette not in range(1, 9):
            raise ValueError(f"palette={self.palette}: from 1 to 8 bits are possible")
        if self.group is not None and (self.group < 1 or self.palette is None):
            raise ValueError(f"group={self.group}: 1 or more, together with palette")


@dataclass(frozen=True)
class Rules:
    """The rule for every tensor, and those for tensors whose name matches a pattern (the first match counts)."""

    default: Rule
    by_name: tuple[tuple[str, Rule], ...] = ()

    def of(self, names: Iterable[str]) -> Rule:
        """The rule of a tensor that has these names."""
        known = list(names)
        for pattern, rule in self.by_name:
            if any(fnmatchcase(name, pattern) for name in known):
                return rule
        return self.default

    def asked(self, names: Iterable[str]) -> bool:
        """Whether a pattern names this tensor."""
        known = list(names)
        return any(fnmatchcase(name, pattern) for pattern, _ in self.by_name for name in known)

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """The patterns that match none of the names."""
        known = list(names)
        return [pattern for pattern, _ in self.by_name if not any(fnmatchcase(name, pattern) for name in known)]


def parse_rule(text: str) -> Rule:
    """A rule as the command line writes it: `lossless`, `smallest`, `bits:4,block:64`, or `palette:4,group:16`.

    `smallest` is lossless too.

    Raises:
        ValueError: naming the part that is not understood.

    >>> parse_rule("bits:4,block:64")
    Rule(lossless=False, bits=4, block_size=64, palette=None, group=None, smallest=False)
    """
    if text in ("lossless", "smallest"):
        return Rule(lossless=True, smallest=text == "smallest")
    given: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(bits|block|palette|group):(\d{1,6})", part.strip())
        if match is None:
            raise ValueError(
                f"{part!r} in {text!r}: write lossless or smallest, or bits:N, block:N, palette:N, group:N with commas"
            )
        name = {"block": "block_size"}.get(match[1], match[1])
        if name in given:
            raise ValueError(f"{text!r} says {match[1]} twice")
        given[name] = int(match[2])
    if "palette" in given and given.keys() & {"bits", "block_size"}:
        raise ValueError(f"{text!r}: palette replaces the grid: it goes with neither bits nor block")
    return Rule(**given)  # type: ignore[arg-type]  # the names are those of the pattern

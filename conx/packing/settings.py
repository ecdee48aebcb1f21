"""The settings of `conx.pack`, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conx.quantize.rules import Rule, Rules, parse_rule

__all__ = ["PRECISIONS", "SMALLEST", "Settings", "make_settings"]

PRECISIONS = ("fp32", "fp16", "int8")
SMALLEST = "smallest"
"""As `lossless`: bit for bit and as small as can be, rather than as fast to load."""


@dataclass(frozen=True)
class Settings:
    """What to do.

    Attributes:
        rules: how tensors are coded.
        lossless: whether all is kept bit for bit.
        precisions: which graphs to make beside the model's own.
        original: whether the model's files are kept as they were, where every weight is.
        verify: whether the model and what is made of it are run.
        calibration: the user's inputs for that, if there are any.
        half_io: whether the float16 graph takes and gives float16.
        asked: whether the user said how weights are coded.
        external_above: bytes from which a model's own graph keeps its weights outside of the message.
    """

    rules: Rules
    lossless: bool
    precisions: tuple[str, ...]
    original: bool
    external_above: int

    asked: bool = True
    verify: bool = False
    calibration: Any = None
    half_io: bool = False

    def as_lossless(self) -> "Settings":
        """The same for a model that is to be kept as it is."""
        return replace(self, lossless=True, rules=replace(self.rules, default=Rule(lossless=True)))

    def to_map(self) -> dict[str, Any]:
        """For the file's metadata."""
        rule = self.rules.default
        lossless = SMALLEST if rule.smallest else self.lossless
        found: dict[str, Any] = {"lossless": lossless, "precisions": list(self.precisions)}
        if not self.lossless:
            found |= {"bits": rule.bits}
            found |= {k: v for k in ("block_size", "palette", "group") if (v := getattr(rule, k)) is not None}
        if self.rules.by_name:
            found["by_name"] = [[pattern, repr(rule)] for pattern, rule in self.rules.by_name]
        return found


def make_settings(
    lossless: bool | str,
    bits: int | None,
    block_size: int | None,
    palette: int | None,
    keep: Sequence[str],
    overrides: Mapping[str, str | Rule] | Sequence[tuple[str, str | Rule]],
    precisions: Sequence[str],
    original: bool,
    external_above: int,
) -> Settings:
    """Settings from the arguments of `conx.pack`.

    Raises:
        ValueError: arguments that exclude each other or are out of range, by name.
    """
    if not isinstance(lossless, bool) and lossless != SMALLEST:
        raise ValueError(f"lossless={lossless!r}: True, False or {SMALLEST!r}")
    given = {"bits": bits, "block_size": block_size, "palette": palette}
    named = [name for name, value in given.items() if value is not None]
    if lossless and named:
        raise ValueError(f"lossless and {named[0]} exclude each other")
    if palette is not None and (bits is not None or block_size is not None):
        raise ValueError("palette replaces the grid: it goes with neither bits nor block_size")
    if isinstance(keep, str):
        raise ValueError("keep takes a list of name patterns, not one string")
    unknown = [p for p in precisions if p not in PRECISIONS]
    if isinstance(precisions, str) or unknown:
        raise ValueError(f"precisions={precisions!r}: a list of {', '.join(map(repr, PRECISIONS))}")
    default = Rule(
        lossless=bool(lossless),
        bits=8 if bits is None else bits,
        block_size=block_size,
        palette=palette,
        smallest=lossless == SMALLEST,
    )
    pairs = list(overrides.items()) if isinstance(overrides, Mapping) else list(overrides)
    by_name = [(pattern, Rule(lossless=True, smallest=default.smallest)) for pattern in keep]
    by_name += [(pattern, rule if isinstance(rule, Rule) else parse_rule(rule)) for pattern, rule in pairs]
    rules = Rules(default, tuple(by_name))
    asked = bool(named or pairs)
    return Settings(rules, bool(lossless), tuple(precisions), original, external_above, asked)

"""Rules: what the user may write, and which one counts."""

import re

import pytest

from conx.quantize.rules import Rule, Rules, parse_rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lossless", Rule(lossless=True)),
        ("bits:4", Rule(bits=4)),
        ("bits:8", Rule()),
        ("block:64", Rule(block_size=64)),
        ("bits:2,block:8", Rule(bits=2, block_size=8)),
        ("block:32, bits:7", Rule(bits=7, block_size=32)),
        ("palette:1", Rule(palette=1)),
        ("palette:8,group:16", Rule(palette=8, group=16)),
    ],
)
def test_parse(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "''"),
        ("lossy", "'lossy'"),
        ("Lossless", "'Lossless'"),
        ("lossless,bits:4", "'lossless'"),
        ("bits", "'bits'"),
        ("bits:", "'bits:'"),
        ("bits=4", "'bits=4'"),
        ("bits:4;block:8", "'bits:4;block:8'"),
        ("bits:4,", "''"),
        ("bits:-4", "'bits:-4'"),
        ("bits:4.0", "'bits:4.0'"),
        ("bits:four", "'bits:four'"),
        ("bits:1", "bits=1"),
        ("bits:9", "bits=9"),
        ("bits:0", "bits=0"),
        ("block:7", "block_size=7"),
        ("block:0", "block_size=0"),
        ("block:12345678", "'block:12345678'"),
        ("palette:0", "palette=0"),
        ("palette:9", "palette=9"),
        ("group:4", "group=4"),
        ("bits:4,group:4", "group=4"),
        ("palette:4,group:0", "group=0"),
        ("axis:1", "'axis:1'"),
    ],
)
def test_what_is_not_understood_is_named(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        parse_rule(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["bits:4,bits:5", "palette:4,bits:4", "palette:4,block:64"])
def test_parts_that_contradict_each_other(text: str) -> None:
    """`conx.pack(palette=4, bits=4)` is refused too."""
    with pytest.raises(ValueError, match=r"bits|block|palette"):
        parse_rule(text)


FOUR, FIVE, KEEP = Rule(bits=4), Rule(bits=5), Rule(lossless=True)


def test_the_first_match_counts() -> None:
    rules = Rules(Rule(), (("head.*", KEEP), ("*.weight", FOUR), ("*", FIVE)))
    assert rules.of(["head.weight"]) == KEEP
    assert rules.of(["body.weight"]) == FOUR
    assert rules.of(["body.bias"]) == FIVE
    assert Rules(FOUR).of(["anything"]) == FOUR
    assert Rules(FOUR, (("a", KEEP),)).of(["b"]) == FOUR


def test_any_name_of_a_tied_weight_counts() -> None:
    rules = Rules(Rule(), (("embedding", KEEP), ("head", FOUR)))
    assert rules.of(["head", "embedding"]) == KEEP
    assert rules.of(["embedding", "head"]) == KEEP
    assert rules.of([]) == Rule()


def test_patterns_are_those_of_fnmatch_with_case() -> None:
    rules = Rules(Rule(), (("layer.[0-3].w?", FOUR),))
    assert rules.of(["layer.2.w1"]) == FOUR
    for other in ("layer.4.w1", "layer.2.w", "layer.2.w10", "LAYER.2.W1", "x.layer.2.w1"):
        assert rules.of([other]) == Rule()
    assert Rules(Rule(), (("a[[]0]", FOUR),)).of(["a[0]"]) == FOUR


def test_asked() -> None:
    rules = Rules(Rule(), (("a*", FOUR),))
    assert rules.asked(["b", "ab"])
    assert not rules.asked(["b", "ba"])
    assert not Rules(Rule()).asked(["a"])


def test_unmatched() -> None:
    rules = Rules(Rule(), (("a*", FOUR), ("b*", FIVE), ("ab", KEEP), ("c", KEEP)))
    assert rules.unmatched(["ab", "x"]) == ["b*", "c"]
    assert rules.unmatched(["ab", "b", "c"]) == []
    assert rules.unmatched(iter(["c"])) == ["a*", "b*", "ab"]
    assert rules.unmatched([]) == ["a*", "b*", "ab", "c"]

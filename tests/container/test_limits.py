"""The specification's tables are the code's."""

import re
from pathlib import Path

from conx.container import limits
from conx.container.header import HEADER_SIZE, MAGIC, MAJOR
from conx.container.index import DRAFT, FEATURES
from conx.container.limits import decoded_limit
from conx.dtypes import DType

SPEC = (Path(__file__).resolve().parents[2] / "spec" / "conx.md").read_text(encoding="utf-8")


def number(text: str) -> int:
    """A value of the table: `2^24 + 2^17`, `2^31 − 1`, `1000`."""
    assert re.fullmatch(r"[0-9^ +−]+", text), text
    total = 0
    for sign, base, exponent in re.findall(r"([+−]?) ?(\d+)(?:\^(\d+))?", text):
        total += (-1 if sign == "−" else 1) * int(base) ** int(exponent or 1)
    return total


def test_the_table_of_limits() -> None:
    table = SPEC.split("## Limits")[1]
    found = {}
    for names, values in re.findall(r"^\| (`[A-Z_`, ]+`) \| ([^|]+) \|", table, re.MULTILINE):
        for name, value in zip(re.findall(r"\w+", names), values.split(","), strict=True):
            found[name] = number(value.strip())
    ours = {name: getattr(limits, name) for name in limits.__all__ if name.isupper()}
    elsewhere = {  # told in other places
        "SEGMENT": number(next(iter(re.findall(r"default `SEGMENT` = ([^ |]+)", SPEC)))),
        "INDEX_FREE_RAW": number(next(iter(re.findall(r"raw ≤ (2\^\d+) \+", table)))),
        "INDEX_EXPANSION": number(next(iter(re.findall(r"\+ (\d+) · stored", table)))),
    }
    assert found | elsewhere == ours


def test_the_header() -> None:
    magic = re.findall(r"\| magic \| `([0-9A-F ]+)`", SPEC)
    assert [bytes.fromhex(each) for each in magic] == [MAGIC]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", SPEC.split("## 3. Header")[1].split("## 4.")[0], re.MULTILINE)
    at = 0
    for offset, size, _ in rows:
        assert int(offset) == at
        at += int(size)
    assert at == HEADER_SIZE == 96
    assert MAJOR == 1


def test_features_and_element_types() -> None:
    assert {f"codec:{page.stem}" for page in (Path(__file__).parents[2] / "spec" / "codecs").glob("*.md")} | {
        DRAFT
    } == FEATURES
    types = re.findall(r"Element types: `([^`]+)`", SPEC)
    assert set(types[0].split()) == {dtype.label for dtype in DType}


def test_the_decoded_limit() -> None:
    assert decoded_limit(0) == decoded_limit(2**20) == 2**30
    assert decoded_limit(2**21) == 1000 * 2**21

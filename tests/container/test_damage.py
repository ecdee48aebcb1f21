"""Any damage is noticed, and any bytes whatever give a result or a ConxError.

The first tests go through all of a small file; the others are random. `test_the_search_finds_a_planted_bug` shows that
the search would find an exception of another kind.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conx.container import Reader, Verify
from conx.container import reader as reader_module
from conx.errors import ConxError
from tests.container.parts import SOURCE, Parts, minimal, take_apart

PROPERTY = settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))


def read_everything(data: bytes, verify: Verify = Verify.CHECKSUM) -> Iterator[bytes]:
    """All that the file holds, as a loader asks for it."""
    with Reader(data, verify=verify) as reader:
        for graph in reader.index.graphs:
            yield reader.graph(graph)
        for tensor in reader.index.tensors:
            yield from reader.side(tensor)
            for i in range(min(tensor.segments, 100)):
                yield from reader.segment(tensor, i)


def check_deep(data: bytes) -> None:
    with Reader(data) as reader:
        reader.check_deep()


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_noticed(small: bytes, flip: int) -> None:
    right = list(read_everything(small))
    for at in range(len(small)):
        bad = small[:at] + bytes([small[at] ^ flip]) + small[at + 1 :]
        with pytest.raises(ConxError):
            check_deep(bad)
        with suppress(ConxError):
            assert list(read_everything(bad)) == right, f"byte {at}"


def test_every_truncation_is_noticed(small: bytes) -> None:
    for size in range(len(small)):
        with pytest.raises(ConxError):
            Reader(small[:size])


def test_bytes_that_are_gone_or_too_many_are_noticed(small: bytes) -> None:
    for at in range(0, len(small), 7):
        for bad in (small[:at] + small[at + 1 :], small[:at] + b"\0" + small[at:]):
            with pytest.raises(ConxError):
                Reader(bad)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_flipped_bytes_of_a_big_chunk(flip: int) -> None:
    """Of which only zstd's checksum is checked by default."""
    rng = np.random.default_rng(flip)
    data = np.clip(np.rint(rng.normal(size=2**18) * 3), -127, 127).astype(np.int8).tobytes()
    parts = minimal(contents=[SOURCE, data])
    sealed = parts.seal()
    begin = len(sealed) - len(parts.frames[1])
    assert len(parts.frames[1]) > 2**16
    for at in rng.choice(len(parts.frames[1]), 200, replace=False):
        bad = bytearray(sealed)
        bad[begin + int(at)] ^= flip
        with Reader(bad) as reader:
            with suppress(ConxError):
                assert reader.chunk(1) == data
            with pytest.raises(ConxError):
                reader.check_deep()


def try_file(data: bytes) -> None:
    """The invariant: a result or a ConxError."""
    for verify in Verify:
        try:
            for _ in read_everything(data, verify):
                pass
            check_deep(data)
        except ConxError as error:
            assert "\n" not in str(error)  # noqa: PT017 - there may be none


@PROPERTY
@given(st.binary(max_size=300))
@example(b"")
def test_random_bytes(data: bytes) -> None:
    try_file(data)


@PROPERTY
@given(st.binary(max_size=300))
def test_random_index(raw: bytes) -> None:
    parts = minimal()
    parts.raw_index = raw or b"\0"
    try_file(parts.seal())


@PROPERTY
@given(st.binary(min_size=13, max_size=100))
def test_random_frame(frame: bytes) -> None:
    parts = minimal()
    parts.frames[0] = frame
    try_file(parts.seal())


ODD = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-3, 12),
    st.sampled_from([2**8, 2**10, 2**16, 2**18, 2**20, 2**21, 2**24, 2**31, 2**40, 2**48, 2**63]),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["source", "run", "float32", "int4", "bool", "raw", "fill", "linear", "draft-2", "fp32", "original"]
    ),
    st.binary(max_size=40),
    st.lists(st.integers(-1, 5), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in the index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def ascending(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: ascending(item) for key, item in sorted(value.items())}
    return [ascending(item) for item in value] if isinstance(value, list) else value


@PROPERTY
@given(st.data())
def test_index_with_odd_values(small: bytes, data: st.DataObject) -> None:
    parts = take_apart(small)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(parts.index))))
        box: Any = parts.index
        for step in path[:-1]:
            box = box[step]
        action = data.draw(st.sampled_from(["set", "delete", "repeat", "add"]))
        if action == "delete":
            del box[path[-1]]
        elif action == "repeat" and isinstance(box, list):
            box.append(box[path[-1]])
        elif action == "add" and isinstance(box, dict):
            box[data.draw(st.text(max_size=3))] = data.draw(ODD)
        else:
            box[path[-1]] = data.draw(ODD)
    parts.index = ascending(parts.index)
    try_file(parts.seal())


@PROPERTY
@given(st.data())
def test_table_with_odd_values(small: bytes, data: st.DataObject) -> None:
    parts = take_apart(small)
    page = bytearray(parts.page_content(0))
    for _ in range(data.draw(st.integers(1, 4))):
        page[data.draw(st.integers(0, len(page) - 1))] = data.draw(st.integers(0, 255))
    parts.raw_pages[0] = bytes(page)
    try_file(parts.seal())


def test_the_search_finds_a_planted_bug(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(raw: bytes, _: int) -> None:
        raise KeyError(raw[:1])

    monkeypatch.setattr(reader_module, "parse_index", bug)
    with pytest.raises(KeyError):
        try_file(parts.seal())

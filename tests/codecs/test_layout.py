"""Which parameter belongs to which element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conx.codecs.layout import Layout
from tests.codecs.reference import parameter_places


def places(layout: Layout, start: int, count: int) -> list[int]:
    """The parameter of each element of a range, as the pieces have it."""
    out = np.full(count, -1)
    pieces = list(layout.spread(np.arange(layout.count)).pieces(start, count))
    for piece in pieces:
        part = piece.of(out)
        assert not count or np.shares_memory(part, out)
        assert (part == -1).all(), "two pieces overlap"
        part[...] = piece.params
    assert len(pieces) <= 16
    return [int(place) for place in out]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, bool]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    return shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 8)), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(case=layouts(), data=st.data())
def test_any_range_of_any_layout(case: tuple[tuple[int, ...], int, int, bool], data: st.DataObject) -> None:
    shape, axis, block, shared = case
    expected = parameter_places(shape, axis, block, shared=shared)
    layout = Layout.along(shape, axis, block, shared=shared)
    assert layout.count == max(expected) + 1
    start = data.draw(st.integers(0, len(expected)))
    count = data.draw(st.integers(0, len(expected) - start))
    assert places(layout, start, count) == expected[start : start + count]


@pytest.mark.parametrize(
    ("shape", "axis", "block", "shared"),
    [
        ((700, 3), 1, 1, True),  # a short period
        ((2, 1500), 1, 1, True),  # a long one
        ((5, 64), 1, 32, False),
        ((5, 64), 1, 48, False),  # a shorter last block
        ((64, 5), 0, 32, False),
        ((3, 70, 4), 1, 32, False),
        ((3, 70, 4), 1, 32, True),
        ((1000,), 0, 1, False),
    ],
)
def test_ranges_that_begin_and_end_anywhere(shape: tuple[int, ...], axis: int, block: int, shared: bool) -> None:
    expected = parameter_places(shape, axis, block, shared=shared)
    layout = Layout.along(shape, axis, block, shared=shared)
    step = max(len(expected) // 13, 1)
    for start in range(0, len(expected), step):
        for count in (0, 1, step, 3 * step + 1, len(expected) - start):
            end = min(start + count, len(expected))
            assert places(layout, start, end - start) == expected[start:end]


def test_one_parameter_for_all() -> None:
    assert places(Layout.whole((3, 4)), 5, 7) == [0] * 7
    assert places(Layout.whole(()), 0, 1) == [0]


def test_a_row_larger_than_any_memory() -> None:
    layout = Layout.along((3, 1 << 38), 0, 1, shared=True)
    assert places(layout, (1 << 38) - 2, 4) == [0, 0, 1, 1]
    ragged = Layout.along((1 << 20, 3, 1 << 18), 1, 2, shared=True)
    assert places(ragged, (1 << 40) - (1 << 38) - (1 << 18) - 1, 3) == [0, 1, 1]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1 << 40, 0, 1 << 40), (0, 1 << 40)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        for shared in (False, True):
            layout = Layout.along(shape, axis, 5, shared=shared)
            if layout.count < 1 << 20:
                assert places(layout, 0, 0) == []

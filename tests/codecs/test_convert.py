"""Conversions of floats: every 16- and 8-bit value, and chosen and random wider ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conx.codecs.convert import BLOCK, SOURCES, convert, float32_to
from conx.codecs.float8 import float8_values
from conx.dtypes import DType
from tests.codecs.reference import FLOAT8, TARGETS, Array, as_float64, assert_same, converted

EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)
EVERY_BYTE = np.arange(1 << 8, dtype=np.uint8)


def conversion(values: Array, source: DType, target: DType) -> Array:
    out = np.empty(values.size, target.storage)
    convert(values, source, target, out)
    return out


def check(values: Array, source: DType, target: DType) -> None:
    assert_same(conversion(values, source, target), converted(values, source, target), target)


def near_ties(target: DType) -> Array:
    """The finite values of a 16-bit type, their midpoints, and the float64 next to these, with both signs."""
    grid = as_float64(EVERY_HALF.view(target.storage), target)
    grid = np.unique(grid[np.isfinite(grid)])
    grid = np.append(grid, 2 * grid[-1] - grid[-2])  # the first value that there would be beyond the range
    middle = (grid[1:] + grid[:-1]) / 2
    values = [grid, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    return np.concatenate([*values, *(-each for each in values)])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [DType.FLOAT16, DType.BFLOAT16])
def test_every_16_bit_value(source: DType, target: DType) -> None:
    values = EVERY_HALF.view(source.storage)
    if source is target:
        assert (conversion(values, source, target).view(np.uint16) == EVERY_HALF).all()
    else:
        check(values, source, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", FLOAT8)
def test_every_8_bit_value(source: DType, target: DType) -> None:
    check(EVERY_BYTE, source, target)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_tables(dtype: DType) -> None:
    assert_same(float8_values(dtype), as_float64(EVERY_BYTE, dtype).astype(np.float32), DType.FLOAT32)


@pytest.mark.parametrize("target", [DType.FLOAT16, DType.BFLOAT16])
def test_ties_and_their_neighbours(target: DType) -> None:
    values = near_ties(target)
    check(values, DType.FLOAT64, target)
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    check(singles, DType.FLOAT32, target)
    check(np.nextafter(singles, np.float32(np.inf)), DType.FLOAT32, target)
    check(np.nextafter(singles, np.float32(-np.inf)), DType.FLOAT32, target)


def test_float64_is_not_rounded_twice() -> None:
    # Just above a tie of the target, and nearer to that tie than float32 can tell.
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 2.0**-134 + 2.0**-180])
    assert conversion(values[:1], DType.FLOAT64, DType.BFLOAT16).tolist() == [0x3F81]
    assert conversion(values[1:2], DType.FLOAT64, DType.FLOAT16).view(np.uint16).tolist() == [0x3C01]
    assert conversion(values[2:], DType.FLOAT64, DType.BFLOAT16).tolist() == [1]


BIG = [1e300, -1e300, np.inf, -np.inf]


@pytest.mark.parametrize(
    ("source", "target", "values", "expected"),
    [
        (DType.FLOAT32, DType.FLOAT16, [65519.99, 65520.0, 1e38, -1e38], "7BFF 7BFF 7BFF FBFF"),
        (DType.FLOAT32, DType.FLOAT16, [np.inf, -np.inf, -0.0, 65504.0], "7C00 FC00 8000 7BFF"),
        (DType.FLOAT32, DType.BFLOAT16, [3.4e38, -3.4e38, np.inf, -np.inf, -0.0], "7F7F FF7F 7F80 FF80 8000"),
        (DType.FLOAT64, DType.FLOAT16, [*BIG, -1e-300, 65519.99], "7BFF FBFF 7C00 FC00 8000 7BFF"),
        (DType.FLOAT64, DType.BFLOAT16, [*BIG, -1e-300, 2.0], "7F7F FF7F 7F80 FF80 8000 4000"),
        (DType.FLOAT64, DType.FLOAT32, BIG, "7F7FFFFF FF7FFFFF 7F800000 FF800000"),
    ],
)
def test_the_ends_of_the_range(source: DType, target: DType, values: list[float], expected: str) -> None:
    result = conversion(np.array(values, source.storage), source, target).view(f"<u{target.bits // 8}")
    assert [f"{bits:0{target.bits // 4}X}" for bits in result.tolist()] == expected.split()


@pytest.mark.parametrize(
    ("source", "bits"),
    [
        (DType.FLOAT64, [0x7FF0000000000001, 0xFFF0000000000001, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]),
        (DType.FLOAT32, [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]),
        (DType.FLOAT16, [0x7C01, 0xFC01, 0x7FFF, 0xFFFF]),
        (DType.BFLOAT16, [0x7F81, 0xFF81, 0x7FFF, 0xFFFF]),
        (DType.FLOAT8E5M2, [0x7D, 0xFD, 0x7F, 0xFF]),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_nan_keeps_its_sign_and_no_payload(source: DType, bits: list[int], target: DType) -> None:
    if source is target:
        return
    quiet = {DType.FLOAT32: 0x7FC00000, DType.FLOAT16: 0x7E00, DType.BFLOAT16: 0x7FC0}[target]
    sign = 1 << target.bits - 1
    values = np.array(bits, f"<u{source.bits // 8}").view(source.storage)
    result = conversion(values, source, target).view(f"<u{target.bits // 8}")
    assert result.tolist() == [quiet, quiet | sign, quiet, quiet | sign]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [DType.FLOAT32, DType.FLOAT64])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_bits(source: DType, target: DType, data: st.DataObject) -> None:
    width = source.bits // 8
    bits = data.draw(hnp.arrays(np.dtype(f"<u{width}"), st.integers(0, 50)))
    values = bits.view(source.storage)
    if source is target:
        assert conversion(values, source, target).tobytes() == values.tobytes()
    else:
        check(values, source, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [DType.FLOAT32, DType.FLOAT64])
def test_many_random_values(source: DType, target: DType) -> None:
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        spread = (rng.standard_normal(200_000) * 2.0 ** rng.uniform(-140, 130, 200_000)).astype(source.storage)
        bits = rng.integers(0, 256, 200_000 * spread.itemsize, dtype=np.uint8).view(source.storage)
    for values in (spread, bits):
        if source is not target:
            check(values, source, target)


@pytest.mark.parametrize("target", [DType.FLOAT16, DType.BFLOAT16])
def test_bounded_values_need_no_looking_after(target: DType) -> None:
    values = np.linspace(-65519, 65519, 10_001, dtype=np.float32)
    out = np.empty(values.size, target.storage)
    float32_to(target, values.size, bounded=True)(values, out)
    assert_same(out, converted(values, DType.FLOAT32, target), target)


def test_blocks_meet() -> None:
    values = np.arange(2 * BLOCK + 3, dtype=np.float32)
    check(values, DType.FLOAT32, DType.FLOAT16)
    values[BLOCK] = np.nan
    check(values, DType.FLOAT32, DType.FLOAT16)


@pytest.mark.parametrize("source", [dtype for dtype in DType if dtype in SOURCES])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_converted_to_nothing(source: DType, target: DType) -> None:
    assert conversion(np.empty(0, source.storage), source, target).size == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (DType.INT8, DType.FLOAT32),
        (DType.FLOAT32, DType.FLOAT64),
        (DType.FLOAT32, DType.FLOAT8E5M2),
        (DType.FLOAT4E2M1, DType.FLOAT32),
        (DType.COMPLEX64, DType.FLOAT32),
    ],
)
def test_conversions_that_there_are_not(source: DType, target: DType) -> None:
    with pytest.raises(ValueError, match=f"{source.label} cannot be decoded into {target.label}"):
        conversion(np.zeros(4, source.storage), source, target)

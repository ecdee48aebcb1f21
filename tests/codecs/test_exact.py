"""Narrowing that must lose nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conx.codecs.convert import BLOCK
from conx.codecs.exact import NARROWER, exact_as, narrowed, widen
from conx.dtypes import DType
from tests.codecs.reference import Array

PAIRS = [(dtype, stored) for dtype, choices in NARROWER.items() for stored in choices]
LAYOUT = {DType.FLOAT16: (5, 10), DType.BFLOAT16: (8, 7), DType.FLOAT32: (8, 23), DType.FLOAT64: (11, 52)}


def wide_bits(bits: int, stored: DType, dtype: DType) -> int:
    """Widens one value in integers."""
    exponent_bits, mantissa_bits = LAYOUT[stored]
    wide_exponent_bits, wide_mantissa_bits = LAYOUT[dtype]
    sign, exponent = bits >> stored.bits - 1, bits >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = bits & (1 << mantissa_bits) - 1
    bias, wide_bias = (1 << exponent_bits - 1) - 1, (1 << wide_exponent_bits - 1) - 1
    if exponent == (1 << exponent_bits) - 1:
        wide_exponent = (1 << wide_exponent_bits) - 1
    elif exponent or bias == wide_bias:
        wide_exponent = exponent - bias + wide_bias
    elif mantissa:
        shift = mantissa_bits + 1 - mantissa.bit_length()
        mantissa = (mantissa << shift) & (1 << mantissa_bits) - 1
        wide_exponent = 1 - shift - bias + wide_bias
    else:
        wide_exponent = 0
    wide = sign << dtype.bits - 1 | wide_exponent << wide_mantissa_bits
    return wide | mantissa << wide_mantissa_bits - mantissa_bits


def unsigned(values: Array) -> Array:
    return values.view(f"<u{values.dtype.itemsize}")


def widened(values: Array, stored: DType, dtype: DType) -> Array:
    out = np.empty(values.size, dtype.storage)
    widen(values, stored, dtype, out)
    return out


def sample(stored: DType) -> Array:
    """Every 16-bit pattern, or float32 patterns of all kinds."""
    if stored.bits == 16:
        return np.arange(1 << 16, dtype=np.uint16).view(stored.storage)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    bits = np.random.default_rng(1).integers(0, 1 << 32, 5000, dtype=np.uint32)
    return np.concatenate([bits, np.array(special, np.uint32), np.array(special, np.uint32) | 0x80000000]).view("<f4")


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
def test_widening_moves_bits(dtype: DType, stored: DType) -> None:
    values = sample(stored)
    expected = [wide_bits(bits, stored, dtype) for bits in unsigned(values).tolist()]
    wide = widened(values, stored, dtype)
    assert unsigned(wide).tolist() == expected
    assert exact_as(wide, dtype, stored)
    back = narrowed(wide, dtype, stored)
    assert back is not None
    assert (unsigned(back) == unsigned(values)).all()


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_exact_is_what_survives(dtype: DType, stored: DType, data: st.DataObject) -> None:
    exact = data.draw(st.integers(0, (1 << stored.bits) - 1))
    bits = wide_bits(exact, stored, dtype) ^ data.draw(st.sampled_from([0, 1])) << data.draw(
        st.integers(0, dtype.bits - 1)
    )
    values = np.array([bits], f"<u{dtype.bits // 8}").view(dtype.storage)
    result = narrowed(values, dtype, stored)
    assert exact_as(values, dtype, stored) == (result is not None)
    if result is not None:
        assert wide_bits(int(unsigned(result)[0]), stored, dtype) == bits
    elif stored.bits == 16:
        assert bits not in {wide_bits(each, stored, dtype) for each in range(1 << 16)}


@pytest.mark.parametrize("place", [0, 4095, 4096, 4096 + BLOCK, 2 * BLOCK])
def test_one_value_is_enough_to_refuse(place: int) -> None:
    values = np.ones(2 * BLOCK + 1, np.float32)
    assert exact_as(values, DType.FLOAT32, DType.FLOAT16)
    values[place] = 0.1
    assert not exact_as(values, DType.FLOAT32, DType.FLOAT16)
    assert narrowed(values, DType.FLOAT32, DType.BFLOAT16) is None


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
def test_nothing_is_exact(dtype: DType, stored: DType) -> None:
    empty = np.empty(0, dtype.storage)
    assert exact_as(empty, dtype, stored)
    assert narrowed(empty, dtype, stored) is not None

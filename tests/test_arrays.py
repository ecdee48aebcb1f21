"""`conx.dequantize_array`: the values of the format, and misuse."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import conx

Array = npt.NDArray[Any]


LARGEST: dict[Any, float] = {
    np.float32: float(np.finfo(np.float32).max),
    np.float16: 65504.0,
    ml_dtypes.bfloat16: float(2.0**128 - 2.0**120),
}


def expected(codes: Array, scale: Any, zero_point: Any, dtype: Any) -> Any:
    """From the words of the specification; scale and zero point broadcast against the codes."""
    with np.errstate(all="ignore"):
        exact = (codes.astype(np.int64) - zero_point).astype(np.float32) * np.float32(scale)
        limit = LARGEST[dtype]
        clipped = np.where(np.isfinite(exact), exact.clip(-limit, limit), exact)
        return clipped.astype(dtype)


def spread(values: Any, axis: int, block: int, length: int) -> Array:
    return np.repeat(values, block, axis).take(range(length), axis)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_values(kind: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    low = np.iinfo(kind).min
    codes = rng.integers(low, low + 256, (7, 30, 11)).astype(kind)
    zero = rng.integers(low, low + 256)
    got = conx.dequantize_array(codes, 0.37, int(zero), dtype=dtype)
    np.testing.assert_array_equal(got, expected(codes, np.array(0.37), zero, dtype))
    assert got.dtype == dtype
    for axis in (0, 1, 2, -1):
        length = codes.shape[axis]
        scale: Any = (rng.standard_normal(length) * 2.0 ** rng.integers(-40, 14)).astype(np.float32)
        zeros: Any = rng.integers(low, low + 256, length).astype(kind)
        dims = [length if i == axis % 3 else 1 for i in range(3)]
        got = conx.dequantize_array(codes, scale, zeros, axis=axis, dtype=dtype)
        wanted = expected(codes, scale.reshape(dims), zeros.reshape(dims).astype(np.int64), dtype)
        np.testing.assert_array_equal(got, wanted)
        for block in (1, 4, 7, 100):
            shape = [-(-d // block) if i == axis % 3 else d for i, d in enumerate(codes.shape)]
            scale = rng.standard_normal(shape).astype(np.float32)
            zeros = rng.integers(low, low + 256, shape)
            got = conx.dequantize_array(codes, scale, zeros, axis=axis, block_size=block, dtype=dtype)
            wanted = expected(codes, spread(scale, axis, block, length), spread(zeros, axis, block, length), dtype)
            np.testing.assert_array_equal(got, wanted)


def test_large_arrays_and_strides() -> None:
    codes = np.random.default_rng(1).integers(-128, 128, (900, 700)).astype(np.int8)
    scale = np.random.default_rng(2).random(700).astype(np.float32)
    wanted = expected(codes, scale, np.array(0), np.float16)
    for given in (codes, np.asfortranarray(codes), np.repeat(codes, 2, 1)[:, ::2]):
        np.testing.assert_array_equal(conx.dequantize_array(given, scale, axis=1, dtype="float16"), wanted)


def test_long_runs_of_one_scale() -> None:
    """Where tables are used: rows, rows of several axes, blocks, the last of them shorter."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (3, 17, 9001), dtype=np.uint8)
    for axis, block in ((0, None), (1, None), (1, 3), (2, 4096), (2, 9000), (2, 20000)):
        shape = [-(-d // (block or 1)) if i == axis else d for i, d in enumerate(codes.shape)]
        if block is None:
            shape = [codes.shape[axis]]
        scale = (rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 12)).astype(np.float32)
        zeros = rng.integers(0, 256, shape, dtype=np.uint8)
        got = conx.dequantize_array(codes, scale, zeros, axis=axis, block_size=block, dtype="float16")
        if block is None:
            dims = [-1 if i == axis else 1 for i in range(3)]
            wide, wide_zeros = scale.reshape(dims), zeros.reshape(dims)
        else:
            wide, wide_zeros = (spread(each, axis, block, codes.shape[axis]) for each in (scale, zeros))
        np.testing.assert_array_equal(got, expected(codes, wide, wide_zeros.astype(np.int64), np.float16))


def test_the_bits_of_bfloat16_by_name() -> None:
    codes = np.arange(256, dtype=np.uint8)
    bits = conx.dequantize_array(codes, 0.1, dtype="bfloat16")
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, conx.dequantize_array(codes, 0.1, dtype=ml_dtypes.bfloat16).view(np.uint16))


def test_one_scale_for_all_positions() -> None:
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    got = conx.dequantize_array(codes, 2, np.array([1]), axis=1)
    np.testing.assert_array_equal(got, (codes.astype(np.float32) - 1) * 2)


def test_into_a_given_array() -> None:
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    out = np.zeros((2, 3), np.float16)
    assert conx.dequantize_array(codes, 0.5, dtype=np.float16, out=out) is out
    np.testing.assert_array_equal(out, codes / 2)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_shapes_of_few_elements(shape: tuple[int, ...]) -> None:
    got = conx.dequantize_array(np.ones(shape, np.int8), 0.5, dtype="float16")
    assert got.shape == shape
    assert (got == 0.5).all()


def test_overflow_and_odd_scales() -> None:
    codes = np.array([1, -1, 127, 0], np.int8)
    big = conx.dequantize_array(codes, 60000.0, dtype="float16")
    np.testing.assert_array_equal(big, np.array([60000, -60000, 65504, 0], np.float16))
    np.testing.assert_array_equal(conx.dequantize_array(codes, np.inf)[:3], [np.inf, -np.inf, np.inf])
    assert np.isnan(conx.dequantize_array(codes, np.nan, dtype="float16")).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codes": np.zeros(3, np.int16)}, "codes are int16, but must be int8 or uint8"),
        ({"dtype": np.float64}, "dtype is float64, but must be one of bfloat16, float16, float32"),
        ({"axis": 2}, "axis is 2, but the codes have 2 axes"),
        ({"axis": -3}, "axis is -3, but the codes have 2 axes"),
        ({"block_size": 4}, "block_size is 4, but axis is missing"),
        ({"axis": 0, "block_size": 0}, "block_size is 0, but must be at least 1"),
        ({"scale": [1.0, 2.0]}, r"scale has shape \(2,\), but needs \(\) or one value"),
        ({"axis": 0, "scale": [1.0, 2.0]}, r"scale has shape \(2,\), but needs \(3,\) or one value"),
        ({"axis": 1, "scale": [1.0] * 3}, r"scale has shape \(3,\), but needs \(4,\) or one value"),
        ({"zero_point": 200}, "zero_point must be in -128 … 127, as the codes"),
        ({"zero_point": 0.5}, "zero_point is float64, but must be integers"),
        ({"out": np.zeros((3, 4), np.float16)}, r"out must be a C-contiguous array of float32 \(3, 4\), not float16"),
        ({"out": np.zeros((4, 3), np.float32)}, r"out must be .*not float32 \(4, 3\)"),
        ({"out": np.zeros((4, 3), np.float32).T}, "out must be a C-contiguous array"),
    ],
)
def test_misuse(settings: dict[str, Any], message: str) -> None:
    given = {"codes": np.zeros((3, 4), np.int8), "scale": 1.0, **settings}
    with pytest.raises(ValueError, match=message):
        conx.dequantize_array(**given)

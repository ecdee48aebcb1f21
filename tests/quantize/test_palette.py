"""Palettes: the exact ones bit for bit, the fitted ones no worse than their starting points."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conx.quantize import palette as module
from conx.quantize.palette import Palette, exact_palette, fit_palette
from tests.builders import normal

Array = npt.NDArray[Any]
TYPES = ["u1", "i1", "<u2", "<i2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8", "<c8"]


def restored(palette: Palette) -> Array:
    """The values of a palette of one group."""
    assert palette.values.shape[0] == 1
    found: Array = palette.values[0][palette.indices]
    return found


def distinct_values(count: int, kind: str) -> Array:
    """Values of so many bit patterns, spread over the whole range of the type."""
    dtype = np.dtype(kind)
    step = 256**dtype.itemsize // count
    return np.array([i * step for i in range(count)], f"<u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 255, 256])
def test_exact(kind: str, count: int) -> None:
    values = np.random.default_rng(count).permutation(np.resize(distinct_values(count, kind), 3 * count + 5))
    found = exact_palette(values)
    assert found is not None
    assert found.entries == count
    assert found.values.dtype == values.dtype
    assert found.indices.dtype == np.uint8
    assert restored(found).tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", [kind for kind in TYPES if np.dtype(kind).itemsize > 1])
@pytest.mark.parametrize("size", [257, 5000])
def test_one_too_many(kind: str, size: int) -> None:
    assert exact_palette(np.resize(distinct_values(257, kind), size)) is None


def test_one_too_many_far_apart() -> None:
    """The 257th value is none that the first look at the tensor sees, and not in its first part."""
    values = np.resize(distinct_values(256, "<f4"), 3_000_000)
    few = exact_palette(values)
    assert few is not None
    assert restored(few).tobytes() == values.tobytes()
    values[2_500_001] = 0.12345
    assert exact_palette(values) is None


def test_bits_count_not_values() -> None:
    """Zeros of both signs and NaNs of all payloads are entries of their own."""
    patterns = np.array(
        [0x00000000, 0x80000000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FC12345, 0x7F800000, 0xFF800000, 1, 0x80000001],
        "<u4",
    )
    values = np.random.default_rng(0).permutation(np.resize(patterns, 999)).view("<f4")
    found = exact_palette(values)
    assert found is not None
    assert found.entries == len(patterns)
    assert restored(found).tobytes() == values.tobytes()


def test_not_for_what_a_palette_cannot_hold() -> None:
    assert exact_palette(np.zeros(0, np.float32)) is None
    assert exact_palette(np.zeros(9, np.complex128)) is None


def squared_error(palette: Palette, values: npt.NDArray[np.float32], groups: Array | None = None) -> float:
    rows = np.zeros(values.size, int) if groups is None else groups
    return float(np.square(palette.values[rows, palette.indices].astype(np.float64) - values).sum())


def nearest_error(values: npt.NDArray[np.float32], entries: Array) -> float:
    """Squared error with each value at the nearest entry."""
    off = values.astype(np.float64)[:, None] - entries.astype(np.float64)
    smallest: Array = np.square(off).min(axis=1)
    return float(smallest.sum())


KINDS = {
    "normal": normal(3000),
    "laplace": np.random.default_rng(0).laplace(size=3000).astype(np.float32),
    "uniform": np.random.default_rng(0).uniform(-1, 3, 3000).astype(np.float32),
    "two clusters": np.concatenate([normal(1500), normal(1500, seed=1) + np.float32(50)]),
    "one outlier": np.append(normal(2999), np.float32(1e6)),
    "subnormal": normal(3000, scale=1e-40),
    "1e30": normal(3000, scale=1e30),
    "3e38": (np.tanh(normal(3000)) * 3.4e38).astype(np.float32),
    "constant": np.full(3000, 0.7, np.float32),
    "few": np.resize(np.array([-1, 0, -0.0, 0.25, 7], np.float32), 3000),
}


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_fitted(kind: str, bits: int) -> None:
    values = KINDS[kind]
    given = values.copy()
    found = fit_palette(values, bits)
    assert values.tobytes() == given.tobytes()
    assert found.values.shape == (1, 2**bits)
    assert found.values.dtype == np.float32
    assert np.isfinite(found.values).all()
    assert int(found.indices.max()) < 2**bits
    error = squared_error(found, values)
    rounding = 1 + 1e-5  # means are rounded to float32
    assert error <= nearest_error(values, found.values[0]) * rounding + 1e-90
    quantiles: Array = np.quantile(values.astype(np.float64), np.linspace(0, 1, 2**bits))
    assert error <= nearest_error(values, quantiles) * 1.02 + 1e-90


@pytest.mark.parametrize("kind", ["constant", "few"])
def test_few_values_are_fitted_exactly(kind: str) -> None:
    found = fit_palette(KINDS[kind], 4)
    np.testing.assert_array_equal(restored(found), KINDS[kind])


def test_lloyd_converges_to_the_known_quantizer() -> None:
    """Max, "Quantizing for minimum distortion", 1960, table I: the best 2-bit quantizer of a normal distribution."""
    values = normal(200_000)
    found = fit_palette(values, 2)
    np.testing.assert_allclose(found.values[0], [-1.510, -0.4528, 0.4528, 1.510], atol=0.02)
    assert squared_error(found, values) / values.size == pytest.approx(0.1175, rel=0.02)


def test_a_sample_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(50_000)
    whole = squared_error(fit_palette(values, 4), values)
    monkeypatch.setattr(module, "FIT_SAMPLE", 5000)
    assert squared_error(fit_palette(values, 4), values) < whole * 1.05


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_groups(bits: int) -> None:
    """Each group is fitted as if it were alone."""
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.resize(np.arange(5), 4000))
    values = (normal(4000) * np.float32(10.0) ** (groups - 2) + groups).astype(np.float32)
    found = fit_palette(values, bits, groups)
    assert found.values.shape == (5, 2**bits)
    for group in range(5):
        alone = fit_palette(values[groups == group], bits)
        np.testing.assert_array_equal(found.values[group], alone.values[0])
        np.testing.assert_array_equal(found.indices[groups == group], alone.indices)
    assert squared_error(found, values, groups) < squared_error(fit_palette(values, bits), values)


def test_small_groups() -> None:
    """Groups of fewer values than entries are exact."""
    groups = np.repeat(np.arange(6), [1, 2, 3, 4, 5, 16])
    values = normal(groups.size)
    found = fit_palette(values, 4, groups)
    np.testing.assert_array_equal(found.values[groups, found.indices], values)

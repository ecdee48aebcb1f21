"""Grids: what comes back is within half a step, and the step is no larger than it has to be."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from conx.codecs import Linear, TensorMeta
from conx.codecs.linear import log8_scales
from conx.dtypes import DType
from conx.quantize import grid as module
from conx.quantize.grid import Grid, fit_grid
from tests.builders import normal

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

HALF = 0.5 + 2e-5  # of a step: a division and a multiplication round, each by 2^-24 of up to 127 steps
OCTAVE = 2 ** (1 / 8) * (1 + 1e-6)  # a step of logarithmic scales
SHAPES = [(1,), (37,), (1, 1), (33, 5), (5, 33), (3, 4, 5), (2, 3, 4, 5), (2, 1, 3, 2, 4)]
Place = tuple[int | None, int | None]


def decoded(grid: Grid, shape: tuple[int, ...]) -> F32:
    """What a reader makes of the grid."""
    codec = Linear(axis=grid.axis, block=grid.block, base=grid.base)
    meta = TensorMeta(shape, DType.FLOAT32)
    side = codec.make_side(grid.scales if grid.log_codes is None else grid.log_codes)
    out = np.empty(meta.count, np.float32)
    codec.decoder(meta, side, DType.FLOAT32)(0, meta.count, codec.encode(grid.codes, meta), out)
    return out.reshape(shape)


def blocks(values: npt.NDArray[np.generic], axis: int | None, block: int | None) -> Iterator[tuple[slice, ...]]:
    """The elements under each scale, in the order of the scales."""
    if axis is None:
        yield (slice(None),) * values.ndim
        return
    step = block or 1
    places = [
        [slice(i, i + step) for i in range(0, size, step)]
        if dim == axis
        else [slice(None)]
        if block is None
        else [slice(i, i + 1) for i in range(size)]
        for dim, size in enumerate(values.shape)
    ]
    yield from itertools.product(*places)


def steps(grid: Grid, shape: tuple[int, ...]) -> F64:
    """The scale of each element."""
    found = np.full(shape, np.nan)
    parts = list(blocks(found, grid.axis, grid.block))
    assert len(parts) == grid.scales.size
    for part, scale in zip(parts, grid.scales, strict=True):
        found[part] = scale
    return found


def places(shape: tuple[int, ...]) -> list[Place]:
    """Ways to lay scales over a tensor."""
    axes = range(len(shape))
    return [(None, None), *((axis, block) for axis in axes for block in (None, 1, 3, 8, 99))]


def rows(shape: tuple[int, ...], axis: int | None) -> npt.NDArray[np.intp]:
    """The position of each element along the axis."""
    found: npt.NDArray[np.intp] = np.indices(shape)[0 if axis is None else axis]
    return found


def counted(shape: tuple[int, ...]) -> npt.NDArray[np.intp]:
    """0, 1, 2 and so on, in row-major order."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


Kind = Callable[[tuple[int, ...], int | None], F32]
KINDS: dict[str, Kind] = {
    "normal": lambda shape, _: normal(*shape),
    "zeros": lambda shape, _: np.zeros(shape, np.float32),
    "negative zeros": lambda shape, _: np.full(shape, -0.0, np.float32),
    "rows of zeros": lambda shape, axis: np.where(rows(shape, axis) % 2, normal(*shape), np.float32(0)),
    "one huge row": lambda shape, axis: np.where(rows(shape, axis) == 0, np.float32(1e30), 1) * normal(*shape),
    "one huge value": lambda shape, _: np.where(counted(shape), normal(*shape), np.float32(1e6)),
    "1e30": lambda shape, _: normal(*shape, scale=1e30),
    "2e38": lambda shape, _: (np.tanh(normal(*shape)) * 2e38).astype(np.float32),
    "1e-30": lambda shape, _: normal(*shape, scale=1e-30),
    "1e-37": lambda shape, _: normal(*shape, scale=1e-37),
    "1e-40": lambda shape, _: normal(*shape, scale=1e-40),
    "1e-43": lambda shape, _: normal(*shape, scale=1e-43),
    "1e-45": lambda shape, _: (np.sign(normal(*shape)) * np.float32(1e-45)).astype(np.float32),
    "one subnormal row": lambda shape, axis: np.where(rows(shape, axis) == 0, np.float32(1e-41), 1) * normal(*shape),
    "constant rows": lambda shape, axis: (rows(shape, axis) - 1.7).astype(np.float32),
    "positive": lambda shape, _: np.abs(normal(*shape)),
    "negative": lambda shape, _: -np.abs(normal(*shape)),
    "wide rows": lambda shape, axis: np.exp2(-7.3 * rows(shape, axis)).astype(np.float32) * normal(*shape),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits_are_within_half_a_step(kind: str, shape: tuple[int, ...]) -> None:
    for axis, block in places(shape):
        values = KINDS[kind](shape, axis)
        given = values.copy()
        grid = fit_grid(values, axis, block, 8)
        assert values.tobytes() == given.tobytes()
        assert (grid.axis, grid.block) == (axis, block)
        assert grid.codes.shape == (values.size,)
        assert grid.codes.min() >= -127
        off = np.abs(decoded(grid, shape).astype(np.float64) - values)
        assert (off <= HALF * steps(grid, shape)).all(), (axis, block)
        assert not decoded(grid, shape)[values == 0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_take_no_coarser_steps_than_they_need(kind: str) -> None:
    """A step is a 127th of the largest magnitude or a 32nd of the root mean square, and the rounding of log codes."""
    shape = (6, 7, 9)
    for axis, block in places(shape):
        values = KINDS[kind](shape, axis)
        grid = fit_grid(values, axis, block, 8)
        for part, scale in zip(blocks(values, axis, block), grid.scales.astype(np.float64), strict=True):
            magnitudes = np.abs(values[part].astype(np.float64))
            peak, rms = magnitudes.max(), np.sqrt(np.square(magnitudes).mean())
            if peak == 0:
                continue
            assert scale * 127.5 >= peak
            assert scale <= max(peak / 127, rms / 32) * OCTAVE + 2.0**-149


@pytest.mark.parametrize("bits", range(2, 9))
def test_log8_steps_are_never_below_what_the_largest_value_needs(bits: int) -> None:
    """For every fraction of an octave, and at the ends of the range: a smaller step would clip."""
    top = 2 ** (bits - 1) - 1
    peaks = np.exp2(-np.concatenate([np.linspace(0, 2, 97), np.linspace(2, 31.8, 200)])).astype(np.float32)
    values = np.stack([peaks, -peaks / 2, peaks / 3, peaks], axis=1)
    grid = fit_grid(values, 0, None, bits)
    assert grid.base is not None
    assert grid.log_codes is not None
    np.testing.assert_array_equal(grid.scales, log8_scales(grid.base, grid.log_codes))
    wanted = peaks.astype(np.float64) / top
    if bits == 8:
        wanted = np.maximum(wanted, np.sqrt(np.square(values, dtype=np.float64).mean(axis=1)) / 32)
        assert (grid.scales >= wanted * (1 - 1e-6)).all()
        assert (grid.scales <= wanted * OCTAVE).all()
    assert (grid.scales >= wanted * 0.46 * (1 - 1e-6)).all()  # fewer bits may clip


@pytest.mark.parametrize(
    ("scale", "logarithmic"),
    [(2.0**-31, True), (2.0**-32, False), (2.0**-100, False), (1e-44, False), (0.0, True)],
)
def test_scales_stay_float32_where_their_range_is_too_wide(scale: float, logarithmic: bool) -> None:
    values = normal(4, 64)
    values[2] = np.linspace(-scale, scale, 64) if scale < 1e-40 else values[0] * np.float32(scale)
    grid = fit_grid(values, 0, None, 8)
    assert (grid.base is not None) is (grid.log_codes is not None) is logarithmic
    if not logarithmic:
        peaks, rms = np.abs(values).max(axis=1), np.sqrt(np.square(values, dtype=np.float64).mean(axis=1))
        np.testing.assert_allclose(grid.scales, np.maximum(peaks / 127, rms / 32), rtol=1e-6, atol=2.0**-149)


def test_scales_stay_float32_where_log_codes_gain_nothing() -> None:
    for values, axis in ((normal(5, 5), None), (normal(1, 25), 0), (np.zeros((5, 5), np.float32), 0)):
        grid = fit_grid(values, axis, None, 8)
        assert (grid.base, grid.log_codes) == (None, None)
    assert fit_grid(normal(5, 5, scale=2.0**-100), 0, None, 8).base is None  # steps would lose bits below 2^-126


def test_zero_rows_beside_others_decode_to_zero() -> None:
    values = normal(9, 30)
    values[[0, 4, 8]] = 0
    values[4, ::2] = -0.0
    for axis, block in ((0, None), (1, 8), (1, 30)):
        grid = fit_grid(values, axis, block, 8)
        assert grid.log_codes is not None
        assert not decoded(grid, values.shape)[[0, 4, 8]].any()


def test_a_huge_row_costs_the_others_nothing() -> None:
    values = normal(9, 30)
    alone = fit_grid(values, 0, None, 8)
    values[3] *= np.float32(1e30)
    beside = fit_grid(values, 0, None, 8)
    others = np.arange(9) != 3
    off = [np.abs(decoded(g, values.shape).astype(np.float64) - values)[others].max() for g in (alone, beside)]
    assert off[1] <= off[0]  # scales that are not rounded up to log codes are finer


def plain_step(inside: F32, bits: int) -> float:
    """The step of the plain grid: the largest magnitude over the largest code, as a float32 that does not clip it."""
    top = 2 ** (bits - 1) - 1
    peak = np.abs(inside).max()
    step = (peak / top).astype(np.float32)
    return float(np.nextafter(step, np.float32(1)) if float(step) * (top + 0.5) < peak else step)


def plain_error(inside: F32, bits: int) -> float:
    """The squared error of the plain grid."""
    step = plain_step(inside, bits)
    wide = inside.astype(np.float64)
    return float(np.square(np.rint(wide / step) * step - wide).sum()) if step else 0.0


def squared_errors(grid: Grid, values: F32) -> F64:
    found: F64 = np.square(decoded(grid, values.shape).astype(np.float64) - values)
    return found


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_bits(kind: str, bits: int) -> None:
    """Codes are in range; no scale has a larger error than the plain grid's, but for the rounding of log codes."""
    top = 2 ** (bits - 1) - 1
    shape = (5, 6, 7)
    for axis, block in places(shape):
        values = KINDS[kind](shape, axis)
        grid = fit_grid(values, axis, block, bits)
        assert -top <= grid.codes.min()
        assert grid.codes.max() <= top
        found = squared_errors(grid, values)
        for part in blocks(values, axis, block):
            limit = plain_error(values[part], bits)
            if grid.base is not None:  # what was clipped stays so, the rest is within half of a step rounded up
                limit += values[part].size * (plain_step(values[part], bits) * OCTAVE / 2) ** 2
            rounding = max(float(np.abs(values[part]).max()) * 2.0**-22, 2.0**-149)  # of each product
            assert found[part].sum() <= (np.sqrt(limit) + np.sqrt(values[part].size) * rounding) ** 2


@pytest.mark.parametrize("bits", range(2, 8))
@pytest.mark.parametrize(("axis", "block"), [(None, None), (0, None), (1, None), (0, 32), (1, 32), (1, 30)])
@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform"])
def test_log_codes_cost_little(kind: str, axis: int | None, block: int | None, bits: int) -> None:
    """At most what steps larger by an eighth of an octave would, where values are spread as weights are."""
    rng = np.random.default_rng(0)
    values = getattr(rng, kind)(size=(64, 128)).astype(np.float32)
    plain = sum(plain_error(values[part], bits) for part in blocks(values, axis, block))
    assert squared_errors(fit_grid(values, axis, block, bits), values).sum() <= plain * OCTAVE**2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_clipping_gains_where_bits_are_few(bits: int) -> None:
    values = np.random.default_rng(0).laplace(size=(16, 512)).astype(np.float32)
    plain = sum(plain_error(row, bits) for row in values)
    assert squared_errors(fit_grid(values, 0, None, bits), values).sum() < 0.85 * plain


def test_each_bit_halves_the_error() -> None:
    values = normal(32, 256)
    errors = [np.sqrt(squared_errors(fit_grid(values, 0, None, bits), values).mean()) for bits in range(2, 9)]
    ratios = np.array(errors[:-1]) / errors[1:]
    assert (ratios > 1.5).all()
    assert (ratios < 2.5).all()


def test_noise_compares_grids_of_a_tensor() -> None:
    values = normal(64, 64) * np.where(np.arange(64) % 2, np.float32(0.25), np.float32(1))
    along, across = fit_grid(values, 1, None, 5), fit_grid(values, 0, None, 5)
    assert along.noise < across.noise
    assert squared_errors(along, values).sum() < 0.8 * squared_errors(across, values).sum()
    assert fit_grid(values, None, None, 8).noise == pytest.approx(float(fit_grid(values, None, None, 8).scales[0]) ** 2)


SLAB_CASES: list[tuple[tuple[int, ...], int | None, int | None]] = [
    *(((40, 6, 10), axis, None) for axis in (None, 0, 1, 2)),
    *(((40, 6, 10), axis, block) for axis in (0, 1, 2) for block in (1, 4, 40)),
    ((2400,), None, None),
    ((2400,), 0, 7),
    ((2, 1200), 0, None),
    ((1200, 2), 0, None),
    ((2, 3, 400), 1, None),
]


@pytest.mark.parametrize("slab", [1, 7, 64, 300, 1300])
@pytest.mark.parametrize(("shape", "axis", "block"), SLAB_CASES, ids=str)
def test_slabs_are_each_element_once(
    shape: tuple[int, ...], axis: int | None, block: int | None, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLAB", slab)
    view = module._three_axes(np.zeros(shape, np.float32), axis)
    scales = counted(module._peaks(view, axis is not None, block).shape)
    seen, scale_of = np.zeros(view.shape, int), np.zeros(view.shape, int)
    for outer, middle, inner, at in module._slabs(view, block):
        seen[outer, middle, inner] += 1
        part = module._scale_part(scales.astype(np.float32), outer, at)
        scale_of[outer, middle, inner] = np.broadcast_to(part, scale_of[outer, middle, inner].shape)
    assert (seen == 1).all()
    wanted = np.zeros(shape, int)
    for number, place in enumerate(blocks(wanted, axis, block)):
        wanted[place] = number
    np.testing.assert_array_equal(scale_of.reshape(shape), wanted)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("shape", "axis", "block"), SLAB_CASES, ids=str)
def test_slabs_change_nothing(
    shape: tuple[int, ...], axis: int | None, block: int | None, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values with few bits: their squares add up exactly, in whatever order."""
    rng = np.random.default_rng(1)
    values = np.clip(np.rint(rng.normal(0, 20, shape)), -127, 127).astype(np.float32)
    for some in blocks(values, axis, block):  # a power of two as the largest value
        values[tuple(slice(s.start or 0, (s.start or 0) + 1) for s in some)] = 128
    whole = fit_grid(values, axis, block, bits)
    counts = set()
    for slab in (7, 64, 300, 1300):
        monkeypatch.setattr(module, "SLAB", slab)
        counts.add(len(module._slabs(module._three_axes(values, axis), block)))
        found = fit_grid(values, axis, block, bits)
        np.testing.assert_array_equal(found.codes, whole.codes)
        np.testing.assert_array_equal(found.scales, whole.scales)
        assert found.base == whole.base
    assert max(counts) > 1 or (axis, block) == (0, 40)


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_the_smallest_floats(bits: int) -> None:
    """Every number of units of the smallest subnormal as the largest value: none is clipped by more than half a step.

    The step that just fits is chosen without clipping here, as the candidates of `_best_clip` are no larger.
    """
    top = 2 ** (bits - 1) - 1
    peaks = (np.arange(1, 3000) * 2.0**-149).astype(np.float32).reshape(-1, 1, 1)
    steps = module._at_least_smallest(peaks, top)
    off = np.maximum(peaks.astype(np.float64) - steps.astype(np.float64) * top, 0)
    assert (off <= steps.astype(np.float64) / 2).all()

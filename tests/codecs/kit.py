"""Tensors for the conformance tests, coded in every way, with their values computed from the specification's words."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from conx.codecs import Codec, Fill, Heads, Linear, Palette, Planes, Raw, TensorMeta
from conx.dtypes import DType
from tests.codecs.reference import FLOAT8, Array, parameter_places, rounded

FLOATS = [DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, *FLOAT8]
PACKED = [dtype for dtype in DType if dtype.bits < 8]
WHOLE = [dtype for dtype in DType if dtype.bits >= 8]


@dataclass(frozen=True)
class Case:
    """A coded tensor: what `encode` is given, and the values (storage type of the tensor) that must come out."""

    label: str
    codec: Codec
    meta: TensorMeta
    side: tuple[bytes, ...]
    data: Array
    values: Array
    exact: Array | None = None  # the values in float32, where the tensor's own type is a rounding of them


def random_bits(count: int, dtype: DType, seed: int = 0) -> Array:
    """Any bits: NaNs, infinities and subnormal numbers among them."""
    size = dtype.nbytes(count)
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).view(dtype.storage)
    return values & 1 if dtype is DType.BOOL else values


def _raw(dtype: DType) -> Case:
    meta = TensorMeta((5, 43), dtype)
    values = random_bits(meta.count, dtype)
    return Case(f"raw {dtype.label}", Raw(), meta, (), values, values)


def _fill(dtype: DType) -> Case:
    meta = TensorMeta((3, 50), dtype)
    value = random_bits(1, dtype, seed=3)
    side = Fill().make_side(value)
    return Case(f"fill {dtype.label}", Fill(), meta, side, np.empty(meta.count, np.uint8), np.repeat(value, meta.count))


def _planes(dtype: DType, stored: DType | None) -> Case:
    meta = TensorMeta((7, 31), dtype)
    if stored is None:
        values = data = random_bits(meta.count, dtype)
    else:  # bits of NaNs have a test of their own
        data = np.random.default_rng(1).standard_normal(meta.count).astype("<f4")
        data[:4] = 0, np.inf, -np.inf, 2.0**-130
        data = rounded(data.astype("<f8"), stored)
        wide = (data.astype("<u4") << 16).view("<f4") if stored is DType.BFLOAT16 else data
        values = wide.astype(dtype.storage)
    label = f"planes {dtype.label} {stored.label if stored else ''}"
    return Case(label, Planes(stored), meta, (), data, values)


def _heads(codec: Heads, dtype: DType, shape: tuple[int, ...] = (3, 7, 11)) -> Case:
    """Data of any bits: most heads are escapes. The values by the page's sum, element by element."""
    meta = TensorMeta(shape, dtype)
    kind = codec.stored or dtype
    data = random_bits(meta.count, kind, seed=5)
    rng = np.random.default_rng(6)
    axes = [axis for axis in range(len(shape)) if codec.axes >> axis & 1]
    codes = {axis: rng.integers(0, 256, shape[axis], dtype=np.uint8) for axis in axes}
    low, unsigned = kind.bits - 1 - codec.bits, f"<u{kind.bits // 8}"
    if codec.stored is not None:  # bits of NaNs have a test of their own: no exponent of ones
        data = (data.view(unsigned) & (1 << kind.bits) - 1 - (1 << kind.bits - 2)).view(kind.storage)
    restored = []
    for index, word in zip(np.ndindex(*shape), data.view(unsigned).tolist(), strict=True):
        expected = codec.base + sum(int(codes[axis][index[axis]]) << codec.shift for axis in axes)
        head = ((word >> low) + expected) % (1 << codec.bits)
        restored.append(word & ~((1 << codec.bits) - 1 << low) | head << low)
    values = np.array(restored, np.uint64).astype(unsigned).view(kind.storage)
    if codec.stored is not None:
        wide = (values.astype("<u4") << 16).view("<f4") if kind is DType.BFLOAT16 else values
        values = wide.astype(dtype.storage)
    side = tuple(codes[axis].tobytes() for axis in axes)
    return Case(f"{codec} {dtype.label}", codec, meta, side, data, values)


def _palette(codec: Palette, shape: tuple[int, ...], dtype: DType) -> Case:
    meta = TensorMeta(shape, dtype)
    indices = np.random.default_rng(2).integers(0, codec.entries, meta.count, dtype=np.uint8)
    if codec.axis is None or codec.group is None:
        groups, places = 1, [0] * meta.count
    else:
        groups = -(-shape[codec.axis] // codec.group)
        places = parameter_places(shape, codec.axis, codec.group, shared=True)
    palettes = random_bits(groups * codec.entries, dtype).reshape(groups, codec.entries)
    values = palettes[np.array(places, np.intp), indices]
    return Case(f"{codec} {shape} {dtype.label}", codec, meta, codec.make_side(palettes), indices, values)


def _linear(codec: Linear, shape: tuple[int, ...], dtype: DType, spread: float = 0.01) -> Case:
    meta = TensorMeta(shape, dtype)
    rng = np.random.default_rng(4)
    wide = 3 if codec.pack == 4 else 9 if codec.pack == 2 else 128
    symbols = np.clip(np.rint(rng.laplace(0, wide / 3, meta.count)), -128, 127).astype(int)
    codes = ((symbols + codec.center) % 256).astype(np.uint8).view(codec.code.storage)
    if codec.axis is None:
        places = [0] * meta.count
    else:
        places = parameter_places(shape, codec.axis, codec.block or 1, shared=codec.block is None)
    count = max(places) + 1
    zero_points = None
    if codec.zero_points:
        zero_points = rng.integers(0, 256, count, dtype=np.uint8).view(codec.code.storage)
    if codec.base is None:
        scales = stored = (rng.standard_normal(count) * spread).astype("<f4")
    else:
        stored = rng.integers(0, 256, count, dtype=np.uint8)
        scales = np.array([log8(codec.base, int(code)) for code in stored], "<f4")
    exact = np.empty(meta.count, "<f4")
    with np.errstate(all="ignore"):
        for i, place in enumerate(places):
            zero = codec.zero_point if zero_points is None else int(zero_points[place])
            exact[i] = np.float32(int(codes[i]) - zero) * np.float32(scales[place])
    values = exact if dtype is DType.FLOAT32 else rounded(exact.astype("<f8"), dtype)
    side = codec.make_side(stored, zero_points)
    return Case(f"{codec} {shape} {dtype.label}", codec, meta, side, codes, values, exact)


def log8(base: float, code: int) -> np.float32:
    """A log code's scale, one operation after the other."""
    root = np.float32(2.0 ** (-(code % 8) / 8))
    with np.errstate(under="ignore"):
        return np.float32(np.float32(np.float32(base) * root) * np.float32(2.0 ** -(code // 8)))


def _linear_cases() -> list[Case]:
    shape = (4, 6, 5)
    layouts: list[dict[str, Any]] = [
        {},
        *({"axis": axis} for axis in range(3)),
        {"axis": 0, "block": 3},
        {"axis": 1, "block": 4},
        {"axis": 2, "block": 2},
        {"axis": 2, "block": 99},
    ]
    cases = []
    for pack in (1, 2, 4):
        for kind in (
            {},
            {"code": DType.UINT8, "zero_points": True, "center": 128},
            {"base": 0.5},
            {"zero_point": -5, "center": -128},
            {"code": DType.UINT8, "zero_point": 200, "base": 2.0**-100},
        ):
            cases += [_linear(Linear(**layout, **kind, pack=pack), shape, DType.FLOAT32) for layout in layouts]
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        cases += [_linear(Linear(**layout), shape, dtype) for layout in layouts]
        cases.append(_linear(Linear(), (333,), dtype, spread=1e5))
    cases += [_linear(Linear(axis=0), (9, 40), DType.FLOAT32, spread) for spread in (1e4, 1e36, 1e38, 1e-40)]
    cases.append(_linear(Linear(), (), DType.FLOAT32))
    return cases


def _palette_cases() -> list[Case]:
    kinds = [Palette(256), Palette(1, 8), Palette(2, 8), Palette(3, 4), Palette(4, 4), Palette(11, 2), Palette(16, 2)]
    cases = [_palette(codec, (9, 23), DType.FLOAT32) for codec in kinds]
    cases += [_palette(Palette(5), (77,), dtype) for dtype in WHOLE]
    cases += [_palette(Palette(5, 2), (77,), dtype) for dtype in WHOLE]
    for axis, group in ((0, 1), (0, 2), (1, 4), (2, 1), (2, 3), (1, 50)):
        cases.append(_palette(Palette(16, 2, axis, group), (4, 6, 5), DType.FLOAT32))
        cases.append(_palette(Palette(200, 1, axis, group), (4, 6, 5), DType.BFLOAT16))
    return cases


CASES = [
    *map(_raw, DType),
    *map(_fill, WHOLE),
    *(_planes(dtype, None) for dtype in FLOATS),
    *(_planes(DType.FLOAT64, stored) for stored in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)),
    *(_planes(DType.FLOAT32, stored) for stored in (DType.FLOAT16, DType.BFLOAT16)),
    *(_heads(Heads(bits), dtype) for dtype in FLOATS[:4] for bits in range(8, 16)),
    *(_heads(Heads(bits, 200, 5, 1), dtype) for dtype in FLOATS[:4] for bits in (8, 11)),
    *(_heads(Heads(10, base, axes, 7 if axes else 0), DType.FLOAT32) for base in (0, 1023) for axes in (0, 1, 2, 7)),
    *(_heads(Heads(bits, stored=DType.BFLOAT16), dtype) for dtype in FLOATS[:2] for bits in (8, 13)),
    _heads(Heads(9, stored=DType.FLOAT16), DType.FLOAT32),
    _heads(Heads(12, stored=DType.FLOAT32), DType.FLOAT64),
    _heads(Heads(10), DType.FLOAT32, ()),
    *_palette_cases(),
    *_linear_cases(),
]

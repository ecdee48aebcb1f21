"""Coded tensors of all kinds, made by chance, and what a device's kernels and the NumPy codecs make of them.

Needs nothing but conx, so that tools/gpu_check.py can use it where no tests can run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs import Fill, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.base import Encoded
from conx.codecs.exact import NARROWER
from conx.dtypes import DType
from conx.runtime.cuda.batches import Addresses, Batch, Recipe
from conx.runtime.cuda.device import Device
from conx.runtime.cuda.recipes import Transposed, recipe_for, refused

__all__ = ["FLOATS", "KINDS", "TARGETS", "Coded", "MalformedError", "by_codec", "by_device", "check", "generated"]

Array = npt.NDArray[Any]
FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
TARGETS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def random_bits(rng: np.random.Generator, count: int, dtype: DType) -> Array:
    """Any bits: NaNs, infinities and subnormal numbers among them."""
    return rng.integers(0, 256, dtype.nbytes(count), dtype=np.uint8).view(dtype.storage)


@dataclass(frozen=True)
class Coded:
    """A coded tensor, cut into segments."""

    encoded: Encoded
    meta: TensorMeta
    segment: int

    def segments(self) -> Iterator[tuple[int, int, list[bytes]]]:
        for start in range(0, self.meta.count, self.segment):
            stop = min(start + self.segment, self.meta.count)
            yield start, stop, self.encoded.segment(self.meta, start, stop)


class MalformedError(Exception):
    """Kernels found a stream malformed; the text says how."""


def by_codec(coded: Coded, target: DType) -> Array:
    decoder = coded.encoded.codec.decoder(coded.meta, coded.encoded.side, target)
    out = np.empty(coded.meta.count, target.storage)
    for start, stop, streams in coded.segments():
        decoder(start, stop - start, streams, out[start:stop])
    return out


def by_device(
    device: Device, coded: Coded, target: DType, *, joined: int = 3, shift: int = 0, transposed: bool = False
) -> Array:
    """The values that a device makes, `joined` segments in a batch, `shift` elements and bytes off alignment."""
    with device.active():
        return _by_device(device, coded, target, joined, shift, transposed)


def _by_device(device: Device, coded: Coded, target: DType, joined: int, shift: int, transposed: bool) -> Array:
    codec, meta, size = coded.encoded.codec, coded.meta, target.storage.itemsize
    bytewise = isinstance(codec, Palette | Planes) or (isinstance(codec, Linear) and codec.pack == 1)
    off = shift if bytewise else 16 * shift  # a GPU reads numbers of several bytes from multiples of their size only
    recipe: Recipe | None = recipe_for(codec, meta, coded.encoded.side, target)
    assert recipe is not None
    if transposed:
        rows, columns = meta.shape
        recipe = Transposed(recipe, rows, columns, size)
    stream = device.stream()
    kept: list[Any] = []
    tables = []
    for table in recipe.tables:
        data = np.zeros(table, np.uint8) if isinstance(table, int) else np.ascontiguousarray(table)
        kept.append(data.reshape(-1).view(np.uint8))
        tables.append(device.alloc(max(1, data.nbytes)))
        device.upload(tables[-1].address, kept[-1], stream)
    addresses = tuple(memory.address for memory in tables)
    device.launch(recipe.setup(addresses), stream)
    out, flags = device.alloc((meta.count + shift) * size), device.alloc(4)
    kept.append(np.zeros(4, np.uint8))
    device.upload(flags.address, kept[-1], stream)
    segments = [*coded.segments()]
    step = joined if recipe.joins(coded.segment) else 1
    for i in range(0, len(segments), step):
        part = segments[i : i + step]
        sizes = tuple(tuple(map(len, streams)) for _, _, streams in part)
        batch = Batch(part[0][0], part[-1][1], sizes, coded.segment)
        stage_bytes, scratch_bytes = recipe.room(batch)
        stage, scratch = device.alloc(stage_bytes + off + 1), device.alloc(scratch_bytes + 1)
        host = np.zeros(stage_bytes, np.uint8)
        recipe.write(batch, [streams for _, _, streams in part], host)
        if stage_bytes:
            device.upload(stage.address + off, host, stream)
        at = Addresses(stage.address + off, scratch.address, out.address + shift * size, flags.address, addresses)
        device.launch(recipe.launches(batch, at), stream)
        kept += [stage, scratch, host]
    found = int(device.download(flags.address, 4).view("<u4")[0])
    values = device.download(out.address, out.nbytes)[shift * size :].view(target.storage).copy()
    if found:
        raise MalformedError(refused(found))
    return values


def assert_bits(actual: Array, wanted: Array, what: object) -> None:
    unsigned = f"<u{wanted.dtype.itemsize}"
    wrong = np.flatnonzero(actual.view(unsigned) != wanted.view(unsigned))
    assert not wrong.size, f"{what}: {wrong.size} of {wanted.size} differ, first {wrong[0]}: " + " ".join(
        hex(int(a.view(unsigned)[wrong[0]])) for a in (actual, wanted)
    )


def check(device: Device, coded: Coded, target: DType, **how: Any) -> None:
    wanted = by_codec(coded, target)
    if how.get("transposed"):
        wanted = wanted.reshape(coded.meta.shape).T.reshape(-1).copy()
    assert_bits(by_device(device, coded, target, **how), wanted, (coded.encoded.codec, coded.meta, target, how))


# Generated tensors


def shape_of(rng: np.random.Generator, most: int) -> tuple[int, ...]:
    """Dims of all sorts: long and short rows, a multiple of four or not, of up to four axes."""
    rank = int(rng.integers(1, 5))
    dims = [int(rng.choice([1, 2, 3, 4, 5, 8, 12, 17, 33, 64, 100, 127, 768, 4099])) for _ in range(rank)]
    while math.prod(dims) > most:
        dims[int(rng.integers(rank))] = int(rng.choice([1, 2, 3, 4]))
    return tuple(dims)


def linear_of(rng: np.random.Generator, meta: TensorMeta) -> Encoded:
    axis = int(rng.integers(len(meta.shape))) if rng.random() < 0.8 else None
    block = int(rng.choice([1, 2, 3, 4, 16, 32, 33, 5000])) if axis is not None and rng.random() < 0.5 else None
    code = DType.UINT8 if rng.random() < 0.5 else DType.INT8
    low = 0 if code is DType.UINT8 else -128
    codec = Linear(
        code=code,
        axis=axis,
        block=block,
        base=float(np.float32(2.0 ** rng.uniform(-130, 120))) if rng.random() < 0.3 else None,
        zero_point=0,
        zero_points=bool(rng.random() < 0.4),
        center=int(rng.integers(low, low + 256)) if rng.random() < 0.5 else 0,
        pack=int(rng.choice([1, 2, 4])),
    )
    if not codec.zero_points and rng.random() < 0.5:
        codec = Linear(**{**vars(codec), "zero_point": int(rng.integers(low, low + 256))})
    wide = float(rng.choice([0.0, 0.3, 1.0, 3.0, 60.0]))
    symbols = np.clip(np.rint(rng.laplace(0, wide, meta.count)), -128, 127).astype(int)
    codes = ((symbols + codec.center) % 256).astype(np.uint8).view(code.storage)
    count = codec.layout(meta).count
    zeros = rng.integers(0, 256, count, dtype=np.uint8).view(code.storage) if codec.zero_points else None
    if codec.base is None:
        spread = float(2.0 ** rng.choice([-149, -135, -30, -20, -7, 0, 9, 16, 60, 126]))
        largest = float(np.finfo(np.float32).max)
        scales: Array = (rng.standard_normal(count) * spread).clip(-largest, largest).astype("<f4")
    else:
        scales = rng.integers(0, 256, count, dtype=np.uint8)
    return Encoded(codec, codec.make_side(scales, zeros), codes)


def palette_of(rng: np.random.Generator, meta: TensorMeta) -> Encoded:
    pack = int(rng.choice([1, 2, 4, 8]))
    entries = int(rng.integers(1, (1 << 8 // pack) + 1))
    axis = int(rng.integers(len(meta.shape))) if rng.random() < 0.6 else None
    group = int(rng.choice([1, 2, 3, 8, 999])) if axis is not None else None
    codec = Palette(entries, pack, axis, group)
    values = random_bits(rng, codec.layout(meta).count * entries, meta.dtype)
    indices = rng.integers(0, entries, meta.count, dtype=np.uint8)
    return Encoded(codec, codec.make_side(values), indices)


def bits_of_floats(rng: np.random.Generator, count: int, dtype: DType) -> Array:
    """Any bits, and many of those where conversions are delicate: ties, limits, subnormal numbers, NaNs."""
    values = random_bits(rng, count, dtype)
    edges = {
        DType.FLOAT32: [0x7F7F8000, 0x7F7F7FFF, 0x477FEFFF, 0x477FF000, 0x33000000, 0x33000001, 0x387FE000, 0x7F800001],
        DType.FLOAT64: [
            *(int(v) for v in np.array([65504, 65520, 65519.99, 2**-25, 2**-24, 3.4e38, 3.5e38, 1e-320]).view("<u8")),
            *(0x3FF0002000000000 + d for d in (-1, 0, 1)),
            *(0x3FF0100000000000 + d for d in (-1, 0, 1)),
            0x7FF0000000000001,
        ],
    }.get(dtype, [])
    if edges:
        where = rng.random(count) < 0.3
        sign = rng.integers(0, 2, count).astype(f"<u{dtype.bits // 8}") << (dtype.bits - 1)
        chosen = rng.choice(np.array(edges, f"<u{dtype.bits // 8}"), count) | sign
        values = np.where(where, chosen, values.view(chosen.dtype)).view(dtype.storage)
    if dtype in (DType.FLOAT32, DType.FLOAT64) and rng.random() < 0.5:
        usual: Array = (rng.standard_normal(count) * 2.0 ** rng.uniform(-26, 17)).astype(dtype.storage)
        values = np.where(rng.random(count) < 0.8, usual, values)
    return values


def exact_of(rng: np.random.Generator, meta: TensorMeta) -> Encoded:
    values = bits_of_floats(rng, meta.count, meta.dtype)
    kind = rng.integers(3)
    if kind == 0:
        return Encoded(Raw(), (), values)
    if kind == 1 or meta.dtype not in NARROWER:
        return Encoded(Planes(), (), values)
    stored = NARROWER[meta.dtype][int(rng.integers(len(NARROWER[meta.dtype])))]
    return Encoded(Planes(stored), (), bits_of_floats(rng, meta.count, stored))


def fill_of(rng: np.random.Generator, meta: TensorMeta) -> Encoded:
    return Encoded(Fill(), Fill().make_side(bits_of_floats(rng, 1, meta.dtype)), np.empty(meta.count, np.uint8))


KINDS = {"linear": linear_of, "palette": palette_of, "exact": exact_of, "fill": fill_of}


def generated(kind: str, seed: int, most: int = 9000) -> tuple[Coded, DType, dict[str, Any]]:
    rng = np.random.default_rng([seed, len(kind)])
    target = TARGETS[int(rng.integers(3))]
    types = TARGETS if kind == "linear" else FLOATS
    meta = TensorMeta(shape_of(rng, most), types[int(rng.integers(len(types)))])
    encoded = KINDS[kind](rng, meta)
    segment = int(rng.choice([16, 60, 1000, 1001, 1024, 1 << 18]))
    how = {
        "joined": int(rng.integers(1, 5)),
        "shift": int(rng.choice([0, 0, 1, 3])),
        "transposed": len(meta.shape) == 2 and rng.random() < 0.5,
    }
    return Coded(encoded, meta, segment), target, how

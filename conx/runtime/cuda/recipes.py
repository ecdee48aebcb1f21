"""How a stored tensor is decoded on a GPU: what is copied there of each batch of segments, and which kernels run.

A batch is a run of consecutive segments. Its main streams are laid into a stage, whose copy on the device the kernels
read; they write into the tensor's final memory, through scratch memory where they must. Only addresses are handled
here, so the same recipes run on a GPU and, in tests, on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from conx.codecs import Buffer, Codec, Fill, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.base import as_array
from conx.codecs.checks import byte_streams
from conx.codecs.convert import TARGETS, check_target, convert
from conx.codecs.layout import Layout
from conx.dtypes import DType
from conx.runtime.cuda.device import Bytes, Launch
from conx.runtime.cuda.sources import SQUARE, TILE, TILE_BYTES

__all__ = ["Addresses", "Batch", "Recipe", "Table", "Transposed", "linear_launch", "recipe_for", "refused"]

_ALIGNMENT = 16
_SEGMENT_FIELDS = 7  # of the kernels' struct Segment
_FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_SAFE = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 3e38}  # float32 values below these stay finite

# As in fields.cu and palette.cu.
_FAULTS = {
    1: "there are more or fewer escapes than escaped fields",
    2: "unused bits of the last byte of packed codes are set",
    4: "an index is not in its palette",
}

Table = npt.NDArray[Any] | int
"""What a recipe needs on the device for all batches: its content, or only a number of bytes."""


@dataclass(frozen=True)
class Batch:
    """Elements start … stop-1 (stored order): a run of segments, with the bytes of each one's main streams."""

    start: int
    stop: int
    sizes: tuple[tuple[int, ...], ...]
    segment: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    def counts(self) -> list[int]:
        """Elements of each segment."""
        return [min(self.segment, self.count - i * self.segment) for i in range(len(self.sizes))]


@dataclass(frozen=True)
class Addresses:
    """Where things lie on the device. `out` is where the tensor begins, whatever the batch."""

    stage: int
    scratch: int
    out: int
    flags: int
    tables: tuple[int, ...]


class Recipe(Protocol):
    """Decoding of one tensor into one type."""

    @property
    def tables(self) -> tuple[Table, ...]: ...

    def joins(self, segment: int) -> bool:
        """Whether segments of so many elements can share a batch."""
        ...

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        """What runs once, when the tables are there."""
        ...

    def room(self, batch: Batch) -> tuple[int, int]:
        """Bytes of the stage and of the scratch memory."""
        ...

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        """Lay the main streams of each segment into the stage. Raises FormatError where a size is wrong."""
        ...

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        """The kernels that decode the batch."""
        ...


def recipe_for(codec: Codec, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Recipe | None:
    """The recipe for a tensor, or None where there are no kernels for it.

    Raises:
        FormatError: the side streams do not fit.
    """
    check_target(meta.dtype, target)
    if target not in TARGETS or meta.dtype not in _FLOATS:
        return None
    codec.decoder(meta, side, target)  # for its checks of the side streams
    if isinstance(codec, Linear):
        return _linear(codec, meta, side, target)
    if isinstance(codec, Palette):
        return _Palette(codec, meta, target, _converted(side[0], meta.dtype, target))
    if isinstance(codec, Fill):
        return _Fill(target, int(_converted(side[0], meta.dtype, target).view(_unsigned(target))[0]))
    if isinstance(codec, Planes):
        return _Planes(codec, meta, target)
    return _Raw(codec, meta, target) if isinstance(codec, Raw) else None


def refused(flags: int) -> str:
    """What is wrong with a batch, from the bits that its kernels have set."""
    return "; ".join(text for bit, text in _FAULTS.items() if flags & bit)


def linear_launch(
    layout: Layout,
    first: int,
    count: int,
    target: DType,
    *,
    signed: bool,
    zero_point: int,
    bounded: bool,
    codes: int,
    scales: int,
    zeros: int,
    out: int,
) -> Launch:
    """The kernel that makes values of codes; the last four are addresses, `zeros` may be 0: then all are alike."""
    flip = 0x80 if signed else 0
    arguments = (
        codes, first, count, scales, zeros, layout.length, layout.inner, layout.block, layout.blocks, layout.shared,
        flip, zero_point + flip, _run(layout, first), bounded, out,
    )  # fmt: skip
    return Launch(f"linear_{target.label}", (_tiles(count), 1), tuple(map(int, arguments)))


def _run(layout: Layout, first: int) -> int:
    """How the parameters of four elements lie: all the same (0), one after the other (1), or anyhow (2)."""
    if layout.count == 1:
        return 0
    if first % 4:
        return 2
    if layout.shared or layout.inner == 1:
        if layout.block * layout.inner % 4 == 0 and layout.length * layout.inner % 4 == 0:
            return 0
        return 1 if layout.inner == layout.block == 1 and layout.length % 4 == 0 else 2
    return 1 if layout.inner % 4 == 0 else 2


def _linear(codec: Linear, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> "_Linear":
    layout = codec.layout(meta)
    scales = as_array(side[0], "<f4" if codec.base is None else "u1")
    largest = codec.base if codec.base is not None else float(np.abs(scales).max(initial=0))
    zeros = as_array(side[1], "u1") if codec.zero_points else None
    return _Linear(codec, meta, target, layout, scales, zeros, 255 * largest < _SAFE.get(target, 0))


@dataclass(frozen=True)
class _Plain:
    """What most recipes do: streams one after the other into the stage, no tables, no scratch memory."""

    codec: Codec
    meta: TensorMeta
    target: DType

    @property
    def tables(self) -> tuple[Table, ...]:
        return ()

    def joins(self, segment: int) -> bool:
        return True

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        return []

    def room(self, batch: Batch) -> tuple[int, int]:
        return sum(size for sizes in batch.sizes for size in sizes), 0

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        at = 0
        for given, count in zip(streams, batch.counts(), strict=True):
            for array in self.checked(given, count):
                stage[at : at + array.size] = array
                at += array.size

    def checked(self, streams: Sequence[Buffer], count: int) -> list[npt.NDArray[Any]]:
        """The main streams of one segment."""
        names, sizes = self.codec.stream_names(self.meta), self.codec.stream_sizes(self.meta, count)
        return byte_streams(self.codec.id, names, streams, sizes)

    def place(self, at: Addresses, batch: Batch) -> int:
        """Where the batch's values go."""
        return at.out + batch.start * self.target.storage.itemsize


class _Raw(_Plain):
    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        name = f"cast_{self.meta.dtype.label}_{self.target.label}"
        return [Launch(name, (_tiles(batch.count), 1), (at.stage, batch.count, self.place(at, batch)))]


class _Planes(_Plain):
    @property
    def stored(self) -> DType:
        return (self.codec.stored if isinstance(self.codec, Planes) else None) or self.meta.dtype

    def room(self, batch: Batch) -> tuple[int, int]:
        return _padded(batch.count) * self.stored.storage.itemsize, 0

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        at, stride = 0, _padded(batch.count)
        for given, count in zip(streams, batch.counts(), strict=True):
            for i, plane in enumerate(self.checked(given, count)):
                stage[i * stride + at : i * stride + at + count] = plane
            at += count

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        exact = self.target is self.meta.dtype
        arguments = (at.stage, _padded(batch.count), batch.count, int(exact), self.place(at, batch))
        return [Launch(f"planes_{self.stored.label}_{self.target.label}", (_tiles(batch.count), 1), arguments)]


@dataclass(frozen=True)
class _Palette(_Plain):
    values: npt.NDArray[Any]

    @property
    def tables(self) -> tuple[Table, ...]:
        return (self.values,)

    def joins(self, segment: int) -> bool:
        return segment % self._codec().pack == 0

    def _codec(self) -> Palette:
        assert isinstance(self.codec, Palette)
        return self.codec

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        codec, size = self._codec(), self.target.storage.itemsize
        layout = codec.layout(self.meta)
        arguments = (
            at.stage, batch.start, batch.count, codec.pack, at.tables[0], codec.entries, layout.length, layout.inner,
            layout.block, layout.blocks, self.place(at, batch), at.flags,
        )  # fmt: skip
        return [Launch(f"palette_{size}", (_tiles(batch.count), 1), arguments)]


@dataclass(frozen=True)
class _Fill:
    target: DType
    bits: int

    tables: tuple[Table, ...] = ()

    def joins(self, segment: int) -> bool:
        return True

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        return []

    def room(self, batch: Batch) -> tuple[int, int]:
        return 0, 0

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        pass

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        size = self.target.storage.itemsize
        place = at.out + batch.start * size
        return [Launch(f"fill_{size}", (_tiles(batch.count), 1), (self.bits, batch.count, place))]


@dataclass(frozen=True)
class _Linear(_Plain):
    layout: Layout
    scales: npt.NDArray[Any]
    zeros: npt.NDArray[Any] | None
    bounded: bool

    @property
    def tables(self) -> tuple[Table, ...]:
        zeros: tuple[Table, ...] = () if self.zeros is None else (self.zeros,)
        return (self.scales, *zeros) if self._codec().base is None else (4 * self.scales.size, *zeros, self.scales)

    def _codec(self) -> Linear:
        assert isinstance(self.codec, Linear)
        return self.codec

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        base = self._codec().base
        if base is None:
            return []
        bits = int(np.array([base], "<f4").view("<u4")[0])
        return [Launch("log8", (_tiles(self.scales.size), 1), (tables[-1], self.scales.size, bits, tables[0]))]

    def room(self, batch: Batch) -> tuple[int, int]:
        if self._codec().pack == 1:
            return super().room(batch)
        fields = _Fields(batch, self._codec().pack)
        return fields.stage_bytes, fields.scratch_bytes

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        codec = self._codec()
        if codec.pack == 1:
            super().write(batch, streams, stage)
            if codec.center:
                codes = stage[: batch.count]
                np.add(codes, np.uint8(codec.center % 256), out=codes)
            return
        arrays = [self.checked(given, count) for given, count in zip(streams, batch.counts(), strict=True)]
        _Fields(batch, codec.pack).write(arrays, stage)

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        codec = self._codec()
        before: list[Launch] = []
        codes = at.stage
        if codec.pack > 1:
            before, codes = _Fields(batch, codec.pack).launches(at, codec.center % 256)
        launch = linear_launch(
            self.layout, batch.start, batch.count, self.target,
            signed=codec.code is DType.INT8, zero_point=codec.zero_point, bounded=self.bounded, codes=codes,
            scales=at.tables[0], zeros=at.tables[1] if self.zeros is not None else 0, out=self.place(at, batch),
        )  # fmt: skip
        return [*before, launch]


class _Fields:
    """Codes two or four to a byte: where a batch's streams lie in the stage, and what is made of them in scratch.

    The stage has a row for each segment (struct Segment of fields.cu) and each level, then the streams. Two levels, if
    four codes lie in a byte: the nibbles of all segments first become symbols, which the fields then take.
    """

    def __init__(self, batch: Batch, pack: int) -> None:
        self.batch, self.pack = batch, pack
        self.levels = (pack,) if pack == 2 else (4, 2)
        rows = len(batch.sizes)
        self.table_bytes = rows * _SEGMENT_FIELDS * 8
        self.offsets: list[list[int]] = []
        at = _padded(self.table_bytes * len(self.levels))
        for sizes in batch.sizes:
            self.offsets.append([])
            for size in sizes:
                self.offsets[-1].append(at)
                at = _padded(at + size)
        self.stage_bytes = at
        # Scratch: the codes, the counts of each level, and the symbols of the nibbles.
        self.count_tiles = [[-(-sizes[level] // TILE_BYTES) for sizes in batch.sizes] for level in range(pack // 2)]
        self.codes_at = 0
        self.counts_at = [_padded(batch.count)]
        self.counts_at.append(_padded(self.counts_at[0] + 4 * sum(self.count_tiles[0])))
        self.symbols_at = _padded(self.counts_at[1] + 4 * sum(self.count_tiles[-1])) if pack == 4 else 0
        symbols = sum(2 * sizes[1] for sizes in batch.sizes) if pack == 4 else 0
        self.scratch_bytes = self.symbols_at + symbols if pack == 4 else self.counts_at[1]

    def write(self, arrays: Sequence[Sequence[npt.NDArray[Any]]], stage: Bytes) -> None:
        for given, offsets in zip(arrays, self.offsets, strict=True):
            for array, at in zip(given, offsets, strict=True):
                stage[at : at + array.size] = array
        rows = np.array(self._rows(), "<i8")
        stage[: rows.nbytes] = rows.reshape(-1).view(np.uint8)

    def _rows(self) -> list[list[int]]:
        """As in struct Segment: packed, fields, escapes, escape_count, loose, out, tiles."""
        rows = []
        for level in range(len(self.levels)):
            out = tiles = symbols = 0
            for i, (sizes, offsets, count) in enumerate(
                zip(self.batch.sizes, self.offsets, self.batch.counts(), strict=True)
            ):
                fields = count if level == 0 else 2 * sizes[1]
                nested = level == 0 and self.pack == 4
                escapes = [symbols, 2 * sizes[1], 1] if nested else [offsets[level + 1], sizes[level + 1], 0]
                rows.append([offsets[level], fields, *escapes, out, tiles])
                out += fields
                tiles += self.count_tiles[level][i]
                symbols += 2 * sizes[1]
        return rows

    def launches(self, at: Addresses, center: int) -> tuple[list[Launch], int]:
        """The kernels, and the address of the codes that they make."""
        made: list[Launch] = []
        for level in reversed(range(len(self.levels))):
            rows = at.stage + level * self.table_bytes
            counts = at.scratch + self.counts_at[level]
            nested = level == 0 and self.pack == 4
            escapes = at.scratch + self.symbols_at if nested else at.stage
            out = at.scratch + (self.codes_at if level == 0 else self.symbols_at)
            grid = (max(1, *self.count_tiles[level]), len(self.batch.sizes))
            per_byte = self.levels[level]
            made.append(Launch("count", grid, (at.stage, rows, per_byte, counts)))
            unpack = (at.stage, rows, per_byte, counts, escapes, center if level == 0 else 0, out, at.flags)
            made.append(Launch("unpack", grid, unpack))
        return made, at.scratch + self.codes_at


@dataclass(frozen=True)
class Transposed:
    """A recipe for a matrix that is wanted with its axes exchanged: rows and columns are those stored."""

    inner: Recipe
    rows: int
    columns: int
    itemsize: int

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.inner.tables

    def joins(self, segment: int) -> bool:
        return self.inner.joins(segment)

    def setup(self, tables: tuple[int, ...]) -> list[Launch]:
        return self.inner.setup(tables)

    def room(self, batch: Batch) -> tuple[int, int]:
        stage, scratch = self.inner.room(batch)
        return stage, _padded(scratch) + batch.count * self.itemsize

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        self.inner.write(batch, streams, stage)

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        values = at.scratch + _padded(self.inner.room(batch)[1])
        into = Addresses(at.stage, at.scratch, values - batch.start * self.itemsize, at.flags, at.tables)
        high = (batch.stop - 1) // self.columns - batch.start // self.columns + 1
        grid = (-(-self.columns // SQUARE), -(-high // SQUARE))
        arguments = (values, batch.start, batch.count, self.rows, self.columns, at.out)
        return [*self.inner.launches(batch, into), Launch(f"transpose_{self.itemsize}", grid, arguments)]


def _converted(stored: Buffer, source: DType, target: DType) -> npt.NDArray[Any]:
    values = as_array(stored, source.storage)
    out = np.empty(values.size, target.storage)
    convert(values, source, target, out)
    return out


def _unsigned(dtype: DType) -> str:
    return f"<u{dtype.storage.itemsize}"


def _tiles(count: int) -> int:
    return -(-count // TILE)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""How a stored tensor is decoded on a GPU: what is copied there of each batch of segments, and which kernels run.

A batch is a run of consecutive segments. Its main streams are laid into a stage, whose copy on the device the kernels
read; they write into the tensor's final memory, through scratch memory where they must. Only addresses are handled
here, so the same recipes run on a GPU and, in tests, on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs import Buffer, Codec, Fill, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.base import Decoder, as_array
from conx.codecs.checks import byte_streams
from conx.codecs.convert import TARGETS, check_target, convert
from conx.codecs.layout import Layout
from conx.dtypes import DType
from conx.runtime.cuda.batches import Addresses, Batch, Recipe, Table, padded, tiles
from conx.runtime.cuda.device import Bytes, Launch
from conx.runtime.cuda.fields import Fields
from conx.runtime.cuda.sources import SQUARE

__all__ = ["Transposed", "linear_launch", "recipe_for", "refused"]

_FLOATS = (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_SAFE = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 3e38}  # float32 values below these stay finite

# As in fields.cu and palette.cu.
_FAULTS = {
    1: "there are more or fewer escapes than escaped fields",
    2: "unused bits of the last byte of packed codes are set",
    4: "an index is not in its palette",
}


def recipe_for(codec: Codec, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Recipe | None:
    """The recipe for a tensor, or None where its type or the target is none that kernels know.

    What a codec without kernels holds is decoded by the host's threads, and copied.

    Raises:
        FormatError: the side streams do not fit.
    """
    check_target(meta.dtype, target)
    if target not in TARGETS or meta.dtype not in _FLOATS:
        return None
    decoder = codec.decoder(meta, side, target)  # also where it is not used: it checks the side streams
    if isinstance(codec, Linear):
        return _linear(codec, meta, side, target)
    if isinstance(codec, Palette):
        return _Palette(codec, meta, target, _converted(side[0], meta.dtype, target))
    if isinstance(codec, Fill):
        return _Fill(target, int(_converted(side[0], meta.dtype, target).view(_unsigned(target))[0]))
    if isinstance(codec, Planes):
        return _Planes(codec, meta, target)
    return _Raw(codec, meta, target) if isinstance(codec, Raw) else _Decoded(codec, meta, target, decoder)


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
    return Launch(f"linear_{target.label}", (tiles(count), 1), tuple(map(int, arguments)))


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
        return [Launch(name, (tiles(batch.count), 1), (at.stage, batch.count, self.place(at, batch)))]


@dataclass(frozen=True)
class _Decoded(_Plain):
    """For codecs without kernels: values, not streams, are laid into the stage."""

    decoder: Decoder

    def room(self, batch: Batch) -> tuple[int, int]:
        return self.target.nbytes(batch.count), 0

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        values = stage[: self.target.nbytes(batch.count)].view(self.target.storage)
        at = 0
        for given, count in zip(streams, batch.counts(), strict=True):
            self.decoder(batch.start + at, count, given, values[at : at + count])
            at += count

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        name = f"cast_{self.target.label}_{self.target.label}"
        return [Launch(name, (tiles(batch.count), 1), (at.stage, batch.count, self.place(at, batch)))]


class _Planes(_Plain):
    @property
    def stored(self) -> DType:
        return (self.codec.stored if isinstance(self.codec, Planes) else None) or self.meta.dtype

    def room(self, batch: Batch) -> tuple[int, int]:
        return padded(batch.count) * self.stored.storage.itemsize, 0

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        at, stride = 0, padded(batch.count)
        for given, count in zip(streams, batch.counts(), strict=True):
            for i, plane in enumerate(self.checked(given, count)):
                stage[i * stride + at : i * stride + at + count] = plane
            at += count

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        exact = self.target is self.meta.dtype
        arguments = (at.stage, padded(batch.count), batch.count, int(exact), self.place(at, batch))
        return [Launch(f"planes_{self.stored.label}_{self.target.label}", (tiles(batch.count), 1), arguments)]


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
        return [Launch(f"palette_{size}", (tiles(batch.count), 1), arguments)]


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
        return [Launch(f"fill_{size}", (tiles(batch.count), 1), (self.bits, batch.count, place))]


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
        return [Launch("log8", (tiles(self.scales.size), 1), (tables[-1], self.scales.size, bits, tables[0]))]

    def room(self, batch: Batch) -> tuple[int, int]:
        if self._codec().pack == 1:
            return super().room(batch)
        fields = Fields(batch, self._codec().pack)
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
        Fields(batch, codec.pack).write(arrays, stage)

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        codec = self._codec()
        before: list[Launch] = []
        codes = at.stage
        if codec.pack > 1:
            before, codes = Fields(batch, codec.pack).launches(at, codec.center % 256)
        launch = linear_launch(
            self.layout, batch.start, batch.count, self.target,
            signed=codec.code is DType.INT8, zero_point=codec.zero_point, bounded=self.bounded, codes=codes,
            scales=at.tables[0], zeros=at.tables[1] if self.zeros is not None else 0, out=self.place(at, batch),
        )  # fmt: skip
        return [*before, launch]


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
        return stage, padded(scratch) + batch.count * self.itemsize

    def write(self, batch: Batch, streams: Sequence[Sequence[Buffer]], stage: Bytes) -> None:
        self.inner.write(batch, streams, stage)

    def launches(self, batch: Batch, at: Addresses) -> list[Launch]:
        values = at.scratch + padded(self.inner.room(batch)[1])
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

"""From a file to values on a GPU: host threads decompress, copies and kernels run beside them.

Each batch of segments takes a slot: a stage in pinned memory, its copy on the device, scratch memory and a stream.
What runs on the device is in the order of the slot's stream, so only the pinned stage needs care: before it is filled
again, the event recorded after the last batch must have come. With a few slots more than threads, decompression, the
bus and the kernels overlap. Beside the values the device holds only the slots, and these only until all is done.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import numpy as np

from conx.codecs import TensorMeta, codec_from
from conx.container.reader import Reader
from conx.container.records import Tensor
from conx.dtypes import DType
from conx.errors import ConxError, FormatError
from conx.runtime.cuda.batches import Addresses, Batch, Recipe
from conx.runtime.cuda.device import Bytes, Device, Memory
from conx.runtime.cuda.recipes import Transposed, recipe_for, refused

__all__ = ["Wanted", "decode_on_device", "recipe_of"]

log = logging.getLogger("conx")

Progress = Callable[[int, int], None]

BATCH_ELEMENTS = 1 << 21  # a batch ends with the segment that reaches so many
BATCH_BYTES = 1 << 22  # of its streams, likewise
SPARE_SLOTS = 2  # more than threads, so that a thread rarely waits for the device


@dataclass(frozen=True)
class Wanted:
    """A stored tensor's values in a type and an order of the axes (None: the one of its shape)."""

    tensor: int
    dtype: DType
    perm: tuple[int, ...] | None = None


@dataclass
class _Slot:
    """What a batch needs while it is under way."""

    pinned: Bytes
    stage: Memory
    scratch: Memory
    stream: Any
    event: Any = None


@dataclass(frozen=True)
class _Job:
    """A batch of one tensor, and the number of its flags."""

    number: int
    tensor: Tensor
    recipe: Recipe
    batch: Batch
    first: int  # segment
    at: Addresses  # stage and scratch are the slot's
    nbytes: int


def recipe_of(reader: Reader, wanted: Wanted) -> Recipe | None:
    """How a tensor is decoded on a device, or None where it cannot be.

    Raises:
        FormatError, IntegrityError: the file is damaged; the message names the tensor.
    """
    tensor = reader.index.tensors[wanted.tensor]
    meta = TensorMeta(tensor.stored_shape, tensor.dtype)
    perm = wanted.perm or tuple(range(len(tensor.shape)))
    order = tensor.order or tuple(range(len(tensor.shape)))
    if perm != order and len(perm) != 2:
        return None
    try:
        codec = codec_from(tensor.codec, tensor.params, meta)
        if len(codec.stream_names(meta)) != len(tensor.streams):
            raise FormatError(f"{len(tensor.streams)} main streams, the codec {tensor.codec!r} has others")
        if tuple(stream.size for stream in tensor.side) != codec.side_sizes(meta):
            raise FormatError(f"side streams of other sizes than the codec {tensor.codec!r} needs")
        recipe = recipe_for(codec, meta, reader.side(tensor), wanted.dtype)
    except ConxError as e:
        raise type(e)(f"tensor {tensor.name!r}: {e}") from None
    if recipe is None or perm == order or 1 in meta.shape:
        return recipe
    rows, columns = meta.shape
    return Transposed(recipe, rows, columns, wanted.dtype.storage.itemsize)


def decode_on_device(
    reader: Reader,
    wanted: Sequence[tuple[Wanted, Recipe]],
    device: Device,
    threads: int,
    progress: Progress | None = None,
) -> list[Memory]:
    """The values of tensors, each in its own memory of the device, complete when this returns.

    Args:
        reader: the file.
        wanted: what is wanted, with `recipe_of` it.
        device: where.
        threads: of the host, this one among them.
        progress: called on this thread with bytes decoded, and in all.

    Raises:
        FormatError, IntegrityError: the file is damaged; the message names the tensor.
    """
    with device.active():
        try:
            return _Pipeline(reader, device).run(wanted, threads, progress)
        finally:
            device.synchronize()  # nothing may still read or write memory that is given back now


class _Pipeline:
    def __init__(self, reader: Reader, device: Device) -> None:
        self.reader, self.device = reader, device
        self.waiting: deque[_Job] = deque()
        self.finished: deque[int] = deque()
        self.failed: list[BaseException] = []
        self.free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        self.tables: list[Memory] = []
        self.done = self.total = 0

    def run(self, wanted: Sequence[tuple[Wanted, Recipe]], threads: int, progress: Progress | None) -> list[Memory]:
        outputs, jobs = self._plan(wanted)
        if not jobs:
            return outputs
        self.total = sum(job.nbytes for job in jobs)
        flags = self.device.alloc(4 * len(jobs))
        stream = self.device.stream()
        zeros = np.zeros(4 * len(jobs), np.uint8)
        self.device.upload(flags.address, zeros, stream)
        self.device.synchronize()  # tables and flags are there before other streams use them
        self.waiting.extend(replace(job, at=replace(job.at, flags=flags.address + 4 * job.number)) for job in jobs)
        count = max(1, min(threads, len(jobs)))
        try:
            self._make_slots(jobs, min(count + SPARE_SLOTS, len(jobs)))
            self._work_with(count, progress)
        finally:
            self.device.synchronize()
        self._check(jobs, self.device.download(flags.address, flags.nbytes).view("<u4"))
        return outputs

    def _plan(self, wanted: Sequence[tuple[Wanted, Recipe]]) -> tuple[list[Memory], list[_Job]]:
        """Memory for every tensor, and all batches; tables are put on the device."""
        stream = self.device.stream()
        keep: list[Any] = []
        outputs: list[Memory] = []
        jobs: list[_Job] = []
        for want, recipe in wanted:
            tensor = self.reader.index.tensors[want.tensor]
            outputs.append(self.device.alloc(max(1, want.dtype.nbytes(tensor.count))))
            tables: list[int] = []
            for table in recipe.tables:
                data = None if isinstance(table, int) else np.ascontiguousarray(table).reshape(-1).view(np.uint8)
                memory = self.device.alloc(max(1, table if isinstance(table, int) else data.size))  # type: ignore[union-attr]
                self.tables.append(memory)
                tables.append(memory.address)
                if data is not None and data.size:
                    keep.append(data)
                    self.device.upload(memory.address, data, stream)
            self.device.launch(recipe.setup(tuple(tables)), stream)
            at = Addresses(0, 0, outputs[-1].address, 0, tuple(tables))
            for first, batch in self._batches(tensor, recipe):
                nbytes = want.dtype.nbytes(batch.count)
                jobs.append(_Job(len(jobs), tensor, recipe, batch, first, at, nbytes))
        self.device.synchronize()
        return outputs, jobs

    def _batches(self, tensor: Tensor, recipe: Recipe) -> Iterator[tuple[int, Batch]]:
        """The batches of a tensor, each with the number of its first segment."""
        sizes: list[tuple[int, ...]] = []
        joins, first = recipe.joins(tensor.segment), 0
        for i in range(tensor.segments):
            sizes.append(self._stream_sizes(tensor, i))
            stored = sum(map(sum, sizes))
            full = len(sizes) * tensor.segment >= BATCH_ELEMENTS or stored >= BATCH_BYTES
            if full or not joins or i == tensor.segments - 1:
                start, stop = tensor.segment_range(first)[0], tensor.segment_range(i)[1]
                yield first, Batch(start, stop, tuple(sizes), tensor.segment)
                sizes, first = [], i + 1

    def _stream_sizes(self, tensor: Tensor, segment: int) -> tuple[int, ...]:
        if tensor.segments == 1:
            return tuple(stream.size for stream in tensor.streams)
        width = len(tensor.streams)
        return tuple(self.reader.row(stream.chunk + segment * width).raw for stream in tensor.streams)

    def _make_slots(self, jobs: Sequence[_Job], count: int) -> None:
        rooms = [job.recipe.room(job.batch) for job in jobs]
        stage, scratch = (max(1, *(room[i] for room in rooms)) for i in (0, 1))
        for _ in range(count):
            slot = _Slot(
                self.device.pinned(stage),
                self.device.alloc(stage),
                self.device.alloc(scratch),
                self.device.stream(),
            )
            self.free.put(slot)

    def _work_with(self, count: int, progress: Progress | None) -> None:
        others = [Thread(target=self._work, name=f"conx-device-{i}") for i in range(1, count)]
        for thread in others:
            thread.start()
        self._work(progress)
        for thread in others:
            thread.join()
        if self.failed:
            raise self.failed[0]
        self._report(progress)

    def _work(self, progress: Progress | None = None) -> None:
        try:
            with self.device.active():
                while not self.failed:
                    try:
                        job = self.waiting.popleft()
                    except IndexError:
                        return
                    self._decode(job)
                    self.finished.append(job.nbytes)
                    self._report(progress)
        except BaseException as e:  # noqa: BLE001 - raised again on the caller's thread
            self.failed.append(e)

    def _decode(self, job: _Job) -> None:
        try:
            streams = [self.reader.segment(job.tensor, job.first + i) for i in range(len(job.batch.sizes))]
            sizes = [tuple(map(len, each)) for each in streams]
            if sizes != [*job.batch.sizes]:
                raise FormatError(f"streams of {sizes} bytes, planned for {[*job.batch.sizes]}")
        except ConxError as e:
            raise type(e)(f"{_label(job)}: {e}") from None
        slot = self.free.get()
        try:
            if slot.event is not None:
                self.device.wait(slot.event)
            try:
                job.recipe.write(job.batch, streams, slot.pinned)
            except ConxError as e:
                raise type(e)(f"{_label(job)}: {e}") from None
            used = job.recipe.room(job.batch)[0]
            if used:
                self.device.upload(slot.stage.address, slot.pinned[:used], slot.stream)
            at = replace(job.at, stage=slot.stage.address, scratch=slot.scratch.address)
            self.device.launch(job.recipe.launches(job.batch, at), slot.stream)
            slot.event = self.device.record(slot.stream)
        finally:
            self.free.put(slot)

    def _report(self, progress: Progress | None) -> None:
        """Tell what has been handed to the device; `progress` is None on all threads but the caller's."""
        if progress is None:
            return
        before = self.done
        while self.finished:
            self.done += self.finished.popleft()
        if self.done > before:
            progress(self.done, self.total)

    def _check(self, jobs: Sequence[_Job], flags: Any) -> None:
        """Raises FormatError where kernels found a batch malformed."""
        for number in np.flatnonzero(flags):
            raise FormatError(f"{_label(jobs[int(number)])}: {refused(int(flags[number]))}")


def _label(job: _Job) -> str:
    last = job.first + len(job.batch.sizes) - 1
    segments = f"segment {job.first}" if last == job.first else f"segments {job.first} to {last}"
    return f"tensor {job.tensor.name!r}, {segments}"

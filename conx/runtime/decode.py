"""Decode stored tensors into the buffers that a graph wants, segment by segment, on several threads.

Every segment decodes alone and straight into its slice of the final buffer. Where a graph wants the axes in another
order than they are stored, the segment goes through a scratch buffer and is scattered.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs import codec_from
from conx.codecs.base import TensorMeta
from conx.codecs.convert import SOURCES, TARGETS
from conx.container.reader import Reader
from conx.container.records import Binding, External, Graph, Tensor
from conx.dtypes import DType
from conx.errors import ConxError, FormatError

__all__ = ["Progress", "decode_all", "fill_holes", "thread_count"]

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
"""`progress(done, total)`: bytes decoded so far, and in all."""

ALIGNMENT = 64  # bytes; of the buffers within an arena
WORTH_THREADS = 1 << 22  # bytes; less is decoded before threads have started


@dataclass(frozen=True)
class _Job:
    """One segment into one buffer."""

    run: Callable[[int], None]
    segment: int
    nbytes: int


def thread_count(threads: int | None) -> int:
    """The number of threads asked for, or one for each core that this process may use.

    Raises:
        ValueError: fewer than one is asked for.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads={threads}: 1 or more are possible")
        return threads
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, 16))


def decode_all(
    reader: Reader, bindings: Sequence[Binding], threads: int | None = None, progress: Progress | None = None
) -> list[Array]:
    """The values of each binding, flat, in the storage type that it asks for.

    Bindings that want the same bytes get the same array. Arrays lie in a few arenas, as large allocations are had
    with few page faults: those of externals that are repacked in one, so that it can be dropped whole, all others in
    another.

    Raises:
        FormatError, IntegrityError: the file is damaged; the message names the tensor.
    """
    keys = [_key(reader, binding) for binding in bindings]
    wanted: dict[_Key, bool] = {}  # whether it is only for externals that are repacked
    for key, binding in zip(keys, bindings, strict=True):
        wanted[key] = wanted.get(key, True) and isinstance(binding, External) and binding.repacked
    buffers: dict[_Key, Array] = {}
    for repacked in (False, True):
        mine = [key for key, flag in wanted.items() if flag is repacked]
        sizes = [key[1].nbytes(reader.index.tensors[key[0]].count) for key in mine]
        buffers |= zip(mine, _arena(sizes, [key[1].storage for key in mine]), strict=True)
    jobs: list[_Job] = []
    for key in wanted:
        number, target, perm = key
        jobs += _jobs(reader, reader.index.tensors[number], target, perm, buffers[key])
    _Work(jobs, progress).run(thread_count(threads))
    return [buffers[key] for key in keys]


_Key = tuple[int, DType, tuple[int, ...] | None]


def _key(reader: Reader, binding: Binding) -> _Key:
    """What tells the bytes that a binding wants from others: tensor, type, permutation."""
    tensor = reader.index.tensors[binding.tensor]
    identity = binding.perm == tuple(range(len(tensor.shape)))
    return binding.tensor, binding.dtype_of(tensor), None if identity else binding.perm


def _arena(sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
    """Flat arrays of these bytes and types in one allocation, each aligned."""
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    arena = np.empty(sum(padded) + ALIGNMENT, np.uint8)
    at = -arena.ctypes.data % ALIGNMENT
    arrays = []
    for size, pad, dtype in zip(sizes, padded, dtypes, strict=True):
        arrays.append(arena[at : at + size].view(dtype))
        at += pad
    return arrays


def fill_holes(reader: Reader, graph: Graph, threads: int | None = None) -> bytes:
    """The graph's complete message, its holes filled."""
    skeleton = reader.graph(graph)
    if not graph.holes:
        return skeleton
    arrays = decode_all(reader, graph.holes, threads)
    pieces: list[Any] = []
    at = 0
    for hole, array in zip(graph.holes, arrays, strict=True):
        pieces += [skeleton[at : hole.at], array.data.cast("B")]
        at = hole.at
    return b"".join([*pieces, skeleton[at:]])


def _jobs(reader: Reader, tensor: Tensor, target: DType, perm: tuple[int, ...] | None, out: Array) -> Iterable[_Job]:
    meta = TensorMeta(tensor.stored_shape, tensor.dtype)
    label = f"tensor {tensor.name!r}"
    if target is not tensor.dtype and not (tensor.dtype in SOURCES and target in TARGETS):
        raise FormatError(f"{label}: {tensor.dtype.label} cannot be decoded to {target.label}")
    view = _stored_view(tensor, perm, out, label)
    try:
        codec = codec_from(tensor.codec, tensor.params, meta)
        names = codec.stream_names(meta)
        if len(names) != len(tensor.streams):
            raise FormatError(f"{len(tensor.streams)} main streams, the codec {tensor.codec!r} has {len(names)}")
        sizes = codec.side_sizes(meta)
        given = tuple(stream.size for stream in tensor.side)
        if given != sizes:
            raise FormatError(f"side streams of {given} bytes, the codec {tensor.codec!r} needs {sizes}")
        decoder = codec.decoder(meta, reader.side(tensor), target)
    except ConxError as e:
        raise type(e)(f"{label}: {e}") from None

    def run(i: int) -> None:
        start, stop = tensor.segment_range(i)
        try:
            streams = reader.segment(tensor, i)
            if view is None:
                first, last = (start, stop) if target.bits >= 8 else (target.nbytes(start), target.nbytes(stop))
                decoder(start, stop - start, streams, out[first:last])
            else:
                scratch = np.empty(stop - start, target.storage)
                decoder(start, stop - start, streams, scratch)
                _scatter(view, start, scratch)
        except ConxError as e:
            raise type(e)(f"{label}, segment {i}: {e}") from None

    nbytes = [target.nbytes(stop - start) for start, stop in map(tensor.segment_range, range(tensor.segments))]
    return [_Job(run, i, n) for i, n in enumerate(nbytes)]


def _stored_view(tensor: Tensor, perm: tuple[int, ...] | None, out: Array, label: str) -> Array | None:
    """`out` seen with its axes in stored order, or None where that is the order wanted."""
    rank = len(tensor.shape)
    wanted = perm or tuple(range(rank))
    order = tensor.order or tuple(range(rank))
    if wanted == order:
        return None
    if tensor.dtype.bits < 8:
        raise FormatError(f"{label}: axes of {tensor.dtype.label}, which is smaller than a byte, cannot be exchanged")
    shaped = out.reshape([tensor.shape[axis] for axis in wanted])
    return shaped.transpose([wanted.index(axis) for axis in order])


def _scatter(view: Array, start: int, values: Array) -> None:
    """Put `values` at flat positions start … of `view` (any strides)."""
    if view.ndim == 1:
        view[start : start + values.size] = values
        return
    row = math.prod(view.shape[1:])
    first, inside = divmod(start, row)
    done = 0
    if inside:
        done = min(row - inside, values.size)
        _scatter(view[first], inside, values[:done])
        first += 1
    rows = (values.size - done) // row
    view[first : first + rows] = values[done : done + rows * row].reshape(rows, *view.shape[1:])
    done += rows * row
    if done < values.size:
        _scatter(view[first + rows], 0, values[done:])


class _Work:
    """Jobs done by the calling thread and others; the first error ends it, and is raised by `run`."""

    def __init__(self, jobs: Sequence[_Job], progress: Progress | None) -> None:
        self.total = sum(job.nbytes for job in jobs)
        self.count = len(jobs)
        self.waiting = deque(jobs)
        self.finished: deque[int] = deque()
        self.failed: list[BaseException] = []
        self.done = 0
        self.progress = progress

    def run(self, threads: int) -> None:
        count = min(threads, self.count) if self.total >= WORTH_THREADS else 1
        others = [Thread(target=self._work, name=f"conx-decode-{i}") for i in range(1, count)]
        for thread in others:
            thread.start()
        self._work(report=True)
        for thread in others:
            thread.join()
        if self.failed:
            raise self.failed[0]
        self._report()

    def _work(self, report: bool = False) -> None:
        try:
            while not self.failed:
                try:
                    job = self.waiting.popleft()
                except IndexError:
                    return
                job.run(job.segment)
                self.finished.append(job.nbytes)
                if report:
                    self._report()
        except BaseException as e:  # noqa: BLE001 - raised again by `run`, on the caller's thread
            self.failed.append(e)

    def _report(self) -> None:
        """Tell what has been done; on the caller's thread only."""
        before = self.done
        while self.finished:
            self.done += self.finished.popleft()
        if self.progress is not None and self.done > before:
            self.progress(self.done, self.total)

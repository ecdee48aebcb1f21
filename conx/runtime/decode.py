"""Decode stored tensors into the buffers that a graph wants, segment by segment, on several threads.

Every segment decodes alone and straight into its slice of the final buffer. Where a graph wants the axes in another
order than they are stored, the segment goes through a scratch buffer and is scattered.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.codecs import codec_from
from conx.codecs.base import Codec, Decoder, TensorMeta
from conx.codecs.convert import SOURCES, TARGETS
from conx.container.reader import Reader
from conx.container.records import CODES, SCALES, ZERO_POINTS, Binding, External, Graph, Tensor
from conx.dtypes import DType
from conx.errors import ConxError, FormatError, UnsupportedError
from conx.runtime.placing import scatter, stored_view
from conx.runtime.views import code_type, codes_decoder, grid_decoder, nibbles, scales_of, zero_points_of

__all__ = ["STORED_LEVEL", "Progress", "decode_all", "fill_holes", "thread_count"]

Array = npt.NDArray[Any]
Progress = Callable[[int, int], None]
"""`progress(done, total)`: bytes decoded so far, and in all."""

STORED_LEVEL = 4  # the accuracy_level in a stored graph
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
    forms: dict[_Key, Binding] = {}
    wanted: dict[_Key, bool] = {}  # whether it is only for externals that are repacked
    for key, binding in zip(keys, bindings, strict=True):
        forms.setdefault(key, binding)
        wanted[key] = wanted.get(key, True) and isinstance(binding, External) and binding.repacked
    buffers: dict[_Key, Array] = {}
    for repacked in (False, True):
        mine = [key for key, flag in wanted.items() if flag is repacked]
        sizes = [forms[key].nbytes_of(reader.index.tensors[forms[key].tensor]) for key in mine]
        types = [forms[key].dtype_of(reader.index.tensors[forms[key].tensor]).storage for key in mine]
        buffers |= zip(mine, _arena(sizes, types), strict=True)
    jobs: list[_Job] = []
    for key in wanted:
        jobs += _jobs(reader, forms[key], buffers[key])
    _Work(jobs, progress).run(thread_count(threads))
    return [buffers[key] for key in keys]


_Key = tuple[Any, ...]


def _key(reader: Reader, binding: Binding) -> _Key:
    """What tells the bytes that a binding wants from others: all but where they go."""
    tensor = reader.index.tensors[binding.tensor]
    identity = binding.perm == tuple(range(len(tensor.shape)))
    perm = None if identity else binding.perm
    form = (binding.view, binding.grid, binding.pad, binding.repeat)
    return (binding.tensor, binding.dtype_of(tensor), perm, form, binding.nbytes_of(tensor))


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


def fill_holes(reader: Reader, graph: Graph, threads: int | None = None, accuracy_level: int | None = None) -> bytes:
    """The graph's complete message, its holes filled.

    Args:
        reader: the file.
        graph: one of its graphs.
        threads: as in `thread_count`.
        accuracy_level: of its MatMulNBits; None: as it is stored.

    Raises:
        FormatError, IntegrityError: the file is damaged.
        UnsupportedError: the graph has no place for an accuracy level.
    """
    skeleton = reader.graph(graph)
    if accuracy_level is not None:
        skeleton = _with_level(skeleton, graph, accuracy_level)
    if not graph.holes:
        return skeleton
    arrays = decode_all(reader, graph.holes, threads)
    pieces: list[Any] = []
    at = 0
    for hole, array in zip(graph.holes, arrays, strict=True):
        pieces += [skeleton[at : hole.at], array.data.cast("B")]
        at = hole.at
    return b"".join([*pieces, skeleton[at:]])


def _with_level(message: bytes, graph: Graph, level: int) -> bytes:
    if not graph.accuracy_levels:
        raise UnsupportedError(
            f"accuracy_level={level}: the graph for {' and '.join(graph.precisions)} has no such level"
        )
    changed = bytearray(message)
    for place in graph.accuracy_levels:
        if changed[place] != STORED_LEVEL:
            raise FormatError(
                f"graph {' '.join(graph.precisions)}: byte {place} is {changed[place]}, not an accuracy level"
            )
        changed[place] = level
    return bytes(changed)


def _jobs(reader: Reader, binding: Binding, out: Array) -> Iterable[_Job]:
    tensor = reader.index.tensors[binding.tensor]
    label = f"tensor {tensor.name!r}"
    target = binding.dtype_of(tensor)
    try:
        whole = _whole(reader, tensor, binding)
        if whole is not None:
            return [_Job(lambda _: whole(out), 0, out.nbytes)]
        decoder = _decoder(reader, tensor, binding)
        view = stored_view(tensor, binding, out)
    except ConxError as e:
        raise _named(e, label) from None

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
                scatter(view, start, scratch)
        except ConxError as e:
            raise _named(e, f"{label}, segment {i}") from None

    nbytes = [target.nbytes(stop - start) for start, stop in map(tensor.segment_range, range(tensor.segments))]
    return [_Job(run, i, n) for i, n in enumerate(nbytes)]


def _named(error: ConxError, label: str) -> ConxError:
    return error if str(error).startswith("tensor ") else type(error)(f"{label}: {error}")


def _decoder(reader: Reader, tensor: Tensor, binding: Binding) -> Decoder:
    """What decodes a segment to the values or codes that the binding wants, in stored order."""
    codec, side = _codec(reader, tensor)
    target = binding.dtype_of(tensor)
    meta = _meta(tensor)
    if binding.view == CODES and binding.grid is None:
        return codes_decoder(codec, target)
    if binding.view == CODES and binding.grid is not None:
        (scales,) = decode_all(reader, [Binding(tensor=binding.grid.scales)], 1)
        return grid_decoder(tensor, codec.decoder(meta, side, DType.FLOAT32), binding.grid.axis, scales, target)
    if target is not tensor.dtype and not (tensor.dtype in SOURCES and target in TARGETS):
        raise FormatError(f"{tensor.dtype.label} cannot be decoded to {target.label}")
    return codec.decoder(meta, side, target)


def _codec(reader: Reader, tensor: Tensor) -> tuple[Codec, list[bytes]]:
    """A tensor's codec and side streams, whose number and sizes are right."""
    meta = _meta(tensor)
    codec = codec_from(tensor.codec, tensor.params, meta)
    names = codec.stream_names(meta)
    if len(names) != len(tensor.streams):
        raise FormatError(f"{len(tensor.streams)} main streams, the codec {tensor.codec!r} has {len(names)}")
    sizes = codec.side_sizes(meta)
    given = tuple(stream.size for stream in tensor.side)
    if given != sizes:
        raise FormatError(f"side streams of {given} bytes, the codec {tensor.codec!r} needs {sizes}")
    return codec, reader.side(tensor)


def _whole(reader: Reader, tensor: Tensor, binding: Binding) -> Callable[[Array], None] | None:
    """What fills the buffer at once, where it is not made segment by segment: it is small, or seldom wanted."""
    target = binding.dtype_of(tensor)
    if binding.view in (SCALES, ZERO_POINTS):
        of = scales_of if binding.view == SCALES else zero_points_of
        found = of(tensor, *_codec(reader, tensor), binding)
    elif binding.view == CODES and target.bits < 8:
        found = _nibbles(reader, tensor, binding)
    elif binding.repeat != 1:
        (once,) = decode_all(reader, [replace(_plain(binding), repeat=1, shape=None)], 1)
        found = np.repeat(once, binding.repeat)
    else:
        return None
    return lambda out: np.copyto(out, found.view(out.dtype))


def _nibbles(reader: Reader, tensor: Tensor, binding: Binding) -> Array:
    """Codes of 4 bits: had as bytes first."""
    source = code_type(codec_from(tensor.codec, tensor.params, _meta(tensor)), binding)
    dims = [tensor.shape[axis] for axis in binding.perm or range(len(tensor.shape))]
    bytewise = replace(_plain(binding), dtype=source, pad=None, shape=tuple(dims))
    (codes,) = decode_all(reader, [bytewise], 1)
    return nibbles(codes, source, binding.dtype_of(tensor), None if binding.pad is None else (dims[-1], binding.pad))


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tensor.stored_shape, tensor.dtype)


def _plain(binding: Binding) -> Binding:
    """The binding without where its bytes go."""
    names = [f.name for f in dataclass_fields(Binding)]
    return Binding(**{name: getattr(binding, name) for name in names})


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

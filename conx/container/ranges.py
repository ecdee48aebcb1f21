"""Streams against the whole chunk table: what needs every chunk's raw size."""

import numpy as np
import numpy.typing as npt

from conx.container.fields import refuse
from conx.container.limits import MAX_SHARED_RAW, MIN_RUN_RAW
from conx.container.records import Index, Stream, Tensor
from conx.errors import FormatError

__all__ = ["check_ranges"]


def check_ranges(index: Index, raw: npt.NDArray[np.uint32], max_decoded: int) -> None:
    """Checks every stream of an index that `parse_index` has accepted.

    Args:
        index: The index.
        raw: Raw size of each chunk.
        max_decoded: Bytes that all chunks may decompress to.

    Raises:
        FormatError: a stream does not lie in its chunks; the message names it.
    """
    ends = np.cumsum(raw, dtype=np.uint64)
    total = int(ends[-1]) if len(ends) else 0
    if total > max_decoded:
        raise FormatError(f"chunks decompress to {total} bytes: at most {max_decoded}, unless the limit is raised")
    for i, graph in enumerate(index.graphs):
        _check_range(graph.stream, f"graphs[{i}].stream", raw, ends)
    for i, original in enumerate(index.originals):
        _check_range(original.stream, f"originals[{i}].stream", raw, ends)
    for i, tensor in enumerate(index.tensors):
        for j, stream in enumerate(tensor.side):
            _check_range(stream, f"tensors[{i}].side[{j}]", raw, ends)
        if tensor.segments > 1:
            _check_segments(tensor, f"tensors[{i}].streams", raw)
            continue
        for j, stream in enumerate(tensor.streams):
            _check_range(stream, f"tensors[{i}].streams[{j}]", raw, ends)


def _check_range(stream: Stream, path: str, raw: npt.NDArray[np.uint32], ends: npt.NDArray[np.uint64]) -> None:
    if not stream.size:
        return
    shown = [stream.chunk, stream.offset, stream.size]
    first = int(raw[stream.chunk])
    if stream.offset >= first:
        raise refuse(path, shown, f"begins beyond chunk {stream.chunk}, which has {first} bytes")
    begin = int(ends[stream.chunk]) - first + stream.offset
    if begin + stream.size > int(ends[-1]):
        raise refuse(path, shown, f"runs beyond the last of {len(raw)} chunks")
    last = int(np.searchsorted(ends, begin + stream.size))
    for number, whole in (
        (stream.chunk, begin == int(ends[stream.chunk]) - first and stream.size >= first),
        (last, begin <= int(ends[last]) - int(raw[last]) and begin + stream.size == int(ends[last])),
    ):
        if not whole and raw[number] > MAX_SHARED_RAW:
            rule = f"uses a part of chunk {number}: {raw[number]} bytes are more than {MAX_SHARED_RAW}"
            raise refuse(path, shown, rule)
    runs = raw[stream.chunk : last]
    if len(runs) and int(runs.min()) < MIN_RUN_RAW:
        number = stream.chunk + int(runs.argmin())
        raise refuse(path, shown, f"runs on from chunk {number}: {raw[number]} bytes are less than {MIN_RUN_RAW}")


def _check_segments(tensor: Tensor, path: str, raw: npt.NDArray[np.uint32]) -> None:
    width = len(tensor.streams)
    for j, stream in enumerate(tensor.streams):
        last = stream.chunk + (tensor.segments - 1) * width
        total = int(raw[stream.chunk : last + 1 : width].sum(dtype=np.uint64))
        if total != stream.size:
            raise refuse(f"{path}[{j}]", [stream.chunk, stream.offset, stream.size], f"its chunks have {total} bytes")

"""The index: canonical msgpack <-> records, with every rule of the format that the index alone can break."""

import hashlib
from collections.abc import Iterable
from typing import Any

from conx.container import canonical
from conx.container.fields import as_array, as_map, refuse, required
from conx.container.limits import (
    MAX_CHUNK_RAW,
    MAX_CHUNKS,
    MAX_GRAPHS,
    MAX_INDEX_RAW,
    MAX_ORIGINALS,
    MAX_TENSORS,
    PAGE_ROWS,
)
from conx.container.names import name_fault
from conx.container.records import EMPTY_STREAM, SOURCE, Graph, Index, Original, Page, Stream, Tensor
from conx.container.schema import (
    parse_graph,
    parse_original,
    parse_page,
    parse_strings,
    parse_tensor,
    serialize_graph,
    serialize_original,
    serialize_page,
    serialize_tensor,
)
from conx.errors import FormatError, UnsupportedError

__all__ = ["DRAFT", "FEATURES", "content_id", "parse_index", "serialize_index"]

DRAFT = "draft-2"
FEATURES = frozenset({DRAFT, "codec:raw", "codec:planes", "codec:linear", "codec:palette", "codec:fill", "codec:heads"})
"""What the format defines today. A feature is a name here, so that its absence can be named; codecs live elsewhere."""


def parse_index(raw: bytes, max_decoded: int | None = None) -> Index:
    """The index from its raw bytes.

    Args:
        raw: The content of the index's frame.
        max_decoded: Bytes that the tensors may decode to; None for no limit.

    Raises:
        FormatError: the bytes break a rule of the format; the message names field, value and rule.
        UnsupportedError: a feature is not known.
    """
    if len(raw) > MAX_INDEX_RAW:
        raise FormatError(f"index: {len(raw)} bytes: at most {MAX_INDEX_RAW}")
    value = canonical.parse_canonical(raw)
    if type(value) is not dict:
        raise FormatError("index: the value is not a map")
    features = _parse_features(value)
    pages = _parse_pages(required(value, "pages", ""))
    tensors = _parse_tensors(required(value, "tensors", ""), features)
    graphs = _parse_graphs(required(value, "graphs", ""), tensors)
    metadata = as_map(required(value, "metadata", ""), "metadata")
    originals = _parse_originals(value.get("originals", []), tensors)
    index = Index(features, graphs, tensors, pages, metadata, originals)
    _check_streams(index)
    if max_decoded is not None:
        _check_totals(index, max_decoded)
    return index


def serialize_index(index: Index) -> bytes:
    """The raw bytes of the index. Nothing is checked but that it can be written: `parse_index` does the rest.

    Raises:
        ValueError: parameters or metadata hold what canonical form has not.
    """
    fields: dict[str, Any] = {
        "features": index.features,
        "graphs": [serialize_graph(graph, index.tensors) for graph in index.graphs],
        "metadata": index.metadata,
        "pages": [serialize_page(page) for page in index.pages],
        "tensors": [serialize_tensor(tensor) for tensor in index.tensors],
    }
    if index.originals:
        fields["originals"] = [serialize_original(original, index.tensors) for original in index.originals]
    return canonical.pack(fields)


def content_id(index: Index) -> bytes:
    """Names what a file holds, whoever packed it with whatever zstd: SHA-256 over graphs and tensors only."""
    graphs = [serialize_graph(graph, index.tensors) for graph in index.graphs]
    for graph in graphs:
        del graph["stream"]
    tensors = [{"dtype": t.dtype.label, "shape": t.shape, "sha256": t.sha256} for t in index.tensors]
    return hashlib.sha256(canonical.pack({"graphs": graphs, "tensors": tensors})).digest()


def _parse_features(value: dict[str, Any]) -> tuple[str, ...]:
    features = parse_strings(required(value, "features", ""), "features")
    unknown = [name for name in features if name not in FEATURES]
    if unknown:
        names = ", ".join(repr(name[:60]) for name in unknown[:5])
        raise UnsupportedError(f"index: features has {names}: this conx does not know it, a newer one is needed")
    if DRAFT not in features:
        raise refuse("features", features, f"must have {DRAFT!r}")
    return features


def _parse_pages(value: Any) -> tuple[Page, ...]:
    items = as_array(value, "pages", most=MAX_CHUNKS // PAGE_ROWS)
    return tuple([parse_page(item, f"pages[{i}]", last=i + 1 == len(items)) for i, item in enumerate(items)])


def _parse_tensors(value: Any, features: tuple[str, ...]) -> tuple[Tensor, ...]:
    items = as_array(value, "tensors", most=MAX_TENSORS)
    tensors = []
    for i, item in enumerate(items):
        tensor = parse_tensor(item, f"tensors[{i}]")
        if f"codec:{tensor.codec}" not in features:
            raise refuse(f"tensors[{i}].codec", tensor.codec, "is not among the features")
        tensors.append(tensor)
    return tuple(tensors)


def _parse_graphs(value: Any, tensors: tuple[Tensor, ...]) -> tuple[Graph, ...]:
    items = as_array(value, "graphs", most=MAX_GRAPHS)
    graphs = tuple([parse_graph(item, f"graphs[{i}]", tensors) for i, item in enumerate(items)])
    sources = [i for i, graph in enumerate(graphs) if graph.role == SOURCE]
    if len(sources) != 1:
        raise refuse("graphs", value, f"exactly one must have the role {SOURCE!r}, not {len(sources)}")
    served: dict[str, int] = {}
    for i, graph in enumerate(graphs):
        for precision in graph.precisions:
            if precision in served:
                raise refuse(f"graphs[{i}].precisions", precision, f"graphs[{served[precision]}] serves it already")
            served[precision] = i
    return graphs


def _parse_originals(value: Any, tensors: tuple[Tensor, ...]) -> tuple[Original, ...]:
    items = as_array(value, "originals", most=MAX_ORIGINALS)
    originals = tuple([parse_original(item, f"originals[{i}]", tensors) for i, item in enumerate(items)])
    fault = name_fault(original.name for original in originals)
    if fault is not None:
        name, rule = fault
        place = next(i for i, original in reversed([*enumerate(originals)]) if original.name == name)
        raise refuse(f"originals[{place}].name", name, rule)
    return originals


def _check_streams(index: Index) -> None:
    """Streams must lie within the chunks that there are; what depends on the chunks' sizes is for the chunk table."""
    chunks = index.chunks
    for i, graph in enumerate(index.graphs):
        _check_range(graph.stream, f"graphs[{i}].stream", chunks)
    for i, original in enumerate(index.originals):
        _check_range(original.stream, f"originals[{i}].stream", chunks)
    for i, tensor in enumerate(index.tensors):
        for j, stream in enumerate(tensor.side):
            _check_range(stream, f"tensors[{i}].side[{j}]", chunks)
        if tensor.segments > 1:
            _check_segments(tensor, f"tensors[{i}].streams", chunks)
            continue
        for j, stream in enumerate(tensor.streams):
            if stream.size and not tensor.count:
                raise refuse(f"tensors[{i}].streams[{j}]", _triple(stream), "a tensor without elements has no bytes")
            _check_range(stream, f"tensors[{i}].streams[{j}]", chunks)


def _check_range(stream: Stream, path: str, chunks: int) -> None:
    if not stream.size:
        if stream != EMPTY_STREAM:
            raise refuse(path, _triple(stream), f"a stream of size 0 must be {_triple(EMPTY_STREAM)}")
    elif stream.chunk >= chunks:
        raise refuse(path, _triple(stream), f"there are {chunks} chunks")
    elif stream.offset + stream.size > (chunks - stream.chunk) * MAX_CHUNK_RAW:
        raise refuse(path, _triple(stream), f"runs beyond the last of {chunks} chunks")


def _check_segments(tensor: Tensor, path: str, chunks: int) -> None:
    """Several segments: segment i of main stream j is the whole chunk streams[j].chunk + i·k."""
    for j, stream in enumerate(tensor.streams):
        first = tensor.streams[0].chunk
        if stream.chunk != first + j or stream.offset:
            rule = f"with several segments, main stream {j} must begin at [{first + j}, 0]"
            raise refuse(f"{path}[{j}]", _triple(stream), rule)
        if stream.size > tensor.segments * MAX_CHUNK_RAW:
            raise refuse(f"{path}[{j}]", _triple(stream), f"{tensor.segments} chunks cannot hold it")
    if tensor.streams and tensor.streams[0].chunk + tensor.segments * len(tensor.streams) > chunks:
        rule = f"{tensor.segments} segments of {len(tensor.streams)} streams run beyond the last of {chunks} chunks"
        raise refuse(f"{path}[0]", _triple(tensor.streams[0]), rule)


def _check_totals(index: Index, limit: int) -> None:
    """What a small file may ask for is bounded: memory, and work (a stream counts as often as it is used)."""
    tensors = index.tensors
    _check_total("tensors", "decode to", (tensor.nbytes for tensor in tensors), limit)
    streams = (stream.size for tensor in tensors for stream in (*tensor.side, *tensor.streams))
    _check_total("tensors", "have streams of", streams, limit)
    for i, graph in enumerate(index.graphs):
        bound = (binding.nbytes_of(tensors[binding.tensor]) for binding in (*graph.holes, *graph.externals))
        _check_total(f"graphs[{i}]", "comes to", (graph.stream.size, *bound), limit)
    _check_total("originals", "come to", (original.size for original in index.originals), limit)


def _check_total(path: str, verb: str, sizes: Iterable[int], limit: int) -> None:
    total = sum(sizes)
    if total > limit:
        raise FormatError(f"index: {path} {verb} {total} bytes: at most {limit}, unless the limit is raised")


def _triple(stream: Stream) -> list[int]:
    return [stream.chunk, stream.offset, stream.size]

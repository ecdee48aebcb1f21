"""The model's files as they were, kept as weights that are stored anyway and the bytes between them."""

import hashlib
import logging

from conx.container.limits import MAX_ORIGINALS
from conx.container.names import name_fault
from conx.container.records import Graph, Hole, Original
from conx.container.writer import Writer
from conx.graph.originals import OriginalFile, original_files
from conx.graph.read import SourceModel
from conx.packing.store import Store

__all__ = ["write_originals"]

log = logging.getLogger("conx")

MOST_BETWEEN = 1 << 30  # bytes between weights that are kept: they are in memory at once


def write_originals(writer: Writer, source: SourceModel, store: Store, graph: Graph) -> list[Original]:
    """Write what is needed to bring back every file of a model whose weights are stored bit for bit.

    Args:
        writer: takes the bytes between the weights.
        source: the model.
        store: how weights are had from the file's tensors.
        graph: the model as it was built, whose message is mostly that of the .onnx without its weights.

    Returns:
        The files; none, with a warning, where one has a name that not every system takes.
    """
    files = original_files(source)
    fault = name_fault(file.name for file in files)
    between = sum(f.file.size - sum(source.weights[n].nbytes for _, n in f.weights) for f in files)
    if fault is not None:
        log.warning("%s: its files cannot be brought back as they were: %r %s", source.path, *fault)
        return []
    if between > MOST_BETWEEN or len(files) > MAX_ORIGINALS:
        log.warning("%s: its files cannot be brought back as they were: too much lies between weights", source.path)
        return []
    return [_original(writer, source, store, file, graph) for file in files]


def _original(writer: Writer, source: SourceModel, store: Store, file: OriginalFile, graph: Graph) -> Original:
    pieces = list(file.between(source))
    holes = []
    at = 0
    for piece, (_, number) in zip(pieces, file.weights, strict=False):
        at += len(piece)
        holes.append(Hole(at=at, **store.of_weight(number, source.weights[number].dtype)))
    content = b"".join(pieces)
    if file.model and hashlib.sha256(content).digest() == graph.sha256:
        stream = graph.stream
    elif file.model:
        stream = writer.add_graph(content)
    else:
        stream = writer.add_stream(content, "original")
    return Original(file.name, file.file.size, file.sha256(), stream, tuple(holes))

"""`conx.unpack`: from a .conx file back to .onnx.

Weights are spliced into the message that the file keeps; above protobuf's limit they go to a data file beside it.
Neither the message nor all weights are ever in memory at once, and files appear under their names only when they are
whole.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from conx.container.reader import Reader, Verify
from conx.container.records import Binding, Graph
from conx.container.target import Target
from conx.errors import UnsupportedError
from conx.graph.skeleton import MESSAGE_MAX, externals_to_holes
from conx.runtime.decode import decode_all, fill_holes, thread_count

__all__ = ["unpack"]

ALIGNMENT = 4096  # of tensors in a data file, so that they can be mapped


def unpack(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    precision: str | None = None,
    threads: int | None = None,
    external_above: int = MESSAGE_MAX,
) -> Path:
    """Write a .conx file's model as .onnx.

    Args:
        path: the .conx file.
        output: path of the .onnx; default: the file's with the suffix .onnx. Weights that the file keeps outside of the
            graph go into it where it has room, else to a file of the same name with `.data` appended.
        precision: None: the model as it was built (its own graph, names and types); "original", "fp32" or "fp16": the
            graph that a session of this precision opens.
        threads: decoding threads; None: one for each core.
        external_above: bytes for which an .onnx has room (protobuf's limit).

    Returns:
        The path of the .onnx.

    Raises:
        FormatError, IntegrityError: the file is damaged; nothing is written.
        UnsupportedError: it has no graph of this precision.
    """
    source = Path(path)
    target = Path(output) if output is not None else source.with_suffix(".onnx")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: is the .conx file itself; name another output")
    with Reader(source, verify=Verify.FULL) as reader:
        graph = _graph(reader, precision)
        _Unpacking(reader, graph, target, thread_count(threads), external_above).run()
    return target


def _graph(reader: Reader, precision: str | None) -> Graph:
    if precision is None:
        return reader.index.source
    graph = reader.index.serving(precision)
    if graph is None:
        available = sorted(p for g in reader.index.graphs for p in g.precisions)
        raise UnsupportedError(f"{reader.name}: has no precision {precision!r}, only {', '.join(available)}")
    return graph


class _Unpacking:
    def __init__(self, reader: Reader, graph: Graph, target: Path, threads: int, external_above: int) -> None:
        self.reader, self.graph, self.target, self.threads = reader, graph, target, threads
        self.external_above = external_above
        self.data_name = target.name + ".data"

    def run(self) -> None:
        if self.graph.externals:
            self._with_externals()
        else:
            holes = [(hole.at, hole) for hole in self.graph.holes]
            self._write(self.reader.graph(self.graph), holes, [])

    def _with_externals(self) -> None:
        """A graph whose initializers are handed over: into the message if it has room, else into a data file."""
        tensors = self.reader.index.tensors
        bound: dict[str, Binding] = {e.location: e for e in self.graph.externals}
        sizes = {location: b.nbytes_of(tensors[b.tensor]) for location, b in bound.items()}
        message = fill_holes(self.reader, self.graph, self.threads)
        places: dict[str, tuple[str, int]] = {}
        if len(message) + sum(sizes.values()) > self.external_above:
            at = 0
            for location, size in sizes.items():
                places[location] = (self.data_name, at)
                at += -(-size // ALIGNMENT) * ALIGNMENT
        skeleton, holes = externals_to_holes(message, sizes, places.get)
        inside = [(at, bound[location]) for at, location in holes]
        self._write(skeleton, inside, [(offset, bound[location]) for location, (_, offset) in places.items()])

    def _write(
        self, skeleton: bytes, holes: Sequence[tuple[int, Binding]], outside: Sequence[tuple[int, Binding]]
    ) -> None:
        targets = [Target(self.target)]
        try:
            with targets[0].create() as file:
                at = 0
                for position, binding in holes:
                    file.write(memoryview(skeleton)[at:position])
                    file.write(self._bytes(binding))
                    at = position
                file.write(memoryview(skeleton)[at:])
                _sync(file)
            if outside:
                targets.insert(0, Target(self.target.with_name(self.data_name)))
                with targets[0].create() as data:
                    for offset, binding in outside:
                        data.write(bytes(offset - data.tell()))
                        data.write(self._bytes(binding))
                    _sync(data)
            for target in targets:
                target.commit()
        finally:
            for target in targets:
                target.discard()

    def _bytes(self, binding: Binding) -> memoryview:
        return decode_all(self.reader, [binding], self.threads)[0].data.cast("B")


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())

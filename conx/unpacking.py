"""`conx.unpack`: from a .conx file back to .onnx.

Weights are spliced into the message that the file keeps; above protobuf's limit they go to a data file beside it.
Neither the message nor all weights are ever in memory at once, and files appear under their names only when they are
whole.
"""

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from conx.container.reader import Reader, Verify
from conx.container.records import Binding, External, Graph
from conx.container.target import Target
from conx.errors import UnsupportedError
from conx.graph.merge import merged_externals
from conx.graph.skeleton import MESSAGE_MAX, externals_to_holes
from conx.runtime.decode import decode_all, fill_holes, thread_count
from conx.runtime.splice import original_pieces, spliced

__all__ = ["unpack"]

ALIGNMENT = 4096  # of tensors in a data file, so that they can be mapped


def unpack(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    precision: str | None = None,
    original: bool = False,
    dedup: bool = False,
    threads: int | None = None,
    external_above: int = MESSAGE_MAX,
) -> Path:
    """Write a .conx file's model as .onnx.

    Args:
        path: the .conx file.
        output: path of the .onnx; default: the file's with the suffix .onnx. Weights that the file keeps outside of the
            graph go into it where it has room, else to a file of the same name with `.data` appended. With `original`,
            a folder, which is made if it is not there; default: the file's own.
        precision: None: the model as it was built (its own graph, names and types), byte for byte if it was one file
            and every weight is kept; "original", "fp32", "fp16" or "int8": the graph that a session of this precision
            opens.
        dedup: the graph that a session opens (of `precision`, default "original"), in which equal initializers are one.
        original: the files that the model was, byte for byte, external data under its own names.
        threads: decoding threads; None: one for each core.
        external_above: bytes for which an .onnx has room (protobuf's limit).

    Returns:
        The path of the .onnx.

    Raises:
        FormatError, IntegrityError: the file is damaged; nothing is written.
        UnsupportedError: it has no graph of this precision, or not what `original` needs.
    """
    source = Path(path)
    if original and (precision is not None or dedup):
        raise ValueError(f"original and {'dedup' if dedup else 'precision'} exclude each other")
    if original:
        return _unpack_originals(source, Path(output) if output is not None else source.parent, threads)
    target = Path(output) if output is not None else source.with_suffix(".onnx")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: is the .conx file itself; name another output")
    with Reader(source, verify=Verify.FULL) as reader:
        originals = reader.index.originals
        if precision is None and len(originals) == 1 and not dedup:
            _write_files({target: original_pieces(reader, originals[0], threads)})
            return target
        graph = _graph(reader, "original" if dedup and precision is None else precision)
        _Unpacking(reader, graph, target, thread_count(threads), external_above, dedup).run()
    return target


def _graph(reader: Reader, precision: str | None) -> Graph:
    if precision is None:
        return reader.index.source
    graph = reader.index.serving(precision)
    if graph is None:
        available = sorted(p for g in reader.index.graphs for p in g.precisions)
        raise UnsupportedError(f"{reader.name}: has no precision {precision!r}, only {', '.join(available)}")
    return graph


def _unpack_originals(source: Path, folder: Path, threads: int | None) -> Path:
    """Write the files that the model was into a folder; answers the path of the .onnx."""
    made: list[Path] = []
    with Reader(source, verify=Verify.FULL) as reader:
        originals = reader.index.originals
        if not originals:
            why = "its weights were not kept bit for bit, or it was packed without"
            raise UnsupportedError(f"{source}: does not hold the original files ({why}); unpack without `original`")
        paths = {folder.joinpath(*one.name.split("/")): one for one in originals}
        for target in paths:
            if target.exists() and target.samefile(source):
                raise ValueError(f"{target}: is the .conx file itself; name another folder")
        try:
            for path in paths:
                made += _make_folders(path.parent)
            _write_files({path: original_pieces(reader, one, threads) for path, one in paths.items()})
        except BaseException:
            for path in reversed(made):
                path.rmdir()
            raise
        return next(iter(paths))


def _make_folders(folder: Path) -> list[Path]:
    """Make a folder and those above it; answers those that were not there, outer before inner."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    for path in missing:
        path.mkdir()
    return missing


def _write_files(contents: Mapping[Path, Iterable[memoryview | bytes]]) -> None:
    """Write files; none appears before all are whole, and the first appears last."""
    targets: list[Target] = []
    try:
        for path, pieces in contents.items():
            targets.append(Target(path))
            with targets[-1].create() as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        for target in reversed(targets):
            target.commit()
    finally:
        for target in targets:
            target.discard()


def _content(external: External) -> Hashable:
    """What is equal for externals of the same bytes."""
    form = (external.view, external.grid, external.pad, external.repeat)
    return (external.tensor, external.dtype, external.perm, *form)


class _Unpacking:
    def __init__(
        self, reader: Reader, graph: Graph, target: Path, threads: int, external_above: int, dedup: bool
    ) -> None:
        self.reader, self.graph, self.target, self.threads = reader, graph, target, threads
        self.external_above, self.dedup = external_above, dedup
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
        if self.dedup:
            message, kept = merged_externals(message, {e.location: _content(e) for e in self.graph.externals})
            sizes = {location: size for location, size in sizes.items() if location in kept}
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
        contents: dict[Path, Iterable[memoryview | bytes]] = {
            self.target: spliced(self.reader, skeleton, holes, self.threads)
        }
        if outside:
            contents[self.target.with_name(self.data_name)] = self._data(outside)
        _write_files(contents)

    def _data(self, outside: Sequence[tuple[int, Binding]]) -> Iterator[memoryview | bytes]:
        """A data file: the bytes of bindings at their offsets."""
        at = 0
        for offset, binding in outside:
            yield bytes(offset - at)
            piece = decode_all(self.reader, [binding], self.threads)[0].data.cast("B")
            yield piece
            at = offset + len(piece)

"""The files that a model was read from, as ranges of weights and what lies between them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from conx.graph.external import DataFile
from conx.graph.read import SourceModel

__all__ = ["OriginalFile", "original_files"]

BLOCK = 1 << 24  # bytes read at once


@dataclass(frozen=True)
class OriginalFile:
    """A file of the model.

    Attributes:
        name: relative to the model's folder, parts joined by `/`.
        file: the file.
        weights: (offset, number) of weights that lie in it, ascending; they do not overlap.
        model: whether it is the .onnx itself.
    """

    name: str
    file: DataFile
    weights: tuple[tuple[int, int], ...]
    model: bool

    def between(self, source: SourceModel) -> Iterator[bytes]:
        """The bytes before, between and behind the weights, one piece for each, in order."""
        at = 0
        for offset, number in self.weights:
            yield bytes(self.file.read(at, offset - at))
            at = offset + source.weights[number].nbytes
        yield bytes(self.file.read(at, self.file.size - at))

    def sha256(self) -> bytes:
        """Of the whole file."""
        digest = hashlib.sha256()
        for at in range(0, self.file.size, BLOCK):
            digest.update(self.file.read(at, min(BLOCK, self.file.size - at)))
        return digest.digest()


def original_files(source: SourceModel) -> list[OriginalFile]:
    """The model's files, the .onnx first.

    Of weights that overlap, one is taken and the rest is left to what lies between.
    """
    inside: dict[int, list[tuple[int, int, int]]] = {}
    for weight in source.weights:
        if weight.file is not None and weight.nbytes:
            inside.setdefault(id(weight.file), []).append((weight.offset, -weight.nbytes, weight.number))
    found = []
    for i, (name, file) in enumerate(source.named_files()):
        chosen: list[tuple[int, int]] = []
        end = 0
        for offset, size, number in sorted(inside.get(id(file), ())):
            if offset >= end:
                chosen.append((offset, number))
                end = offset - size
        found.append(OriginalFile(name, file, tuple(chosen), i == 0))
    return found

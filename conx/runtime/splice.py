"""The bytes of a graph or a file with its holes filled, piece by piece: never all weights in memory at once."""

import hashlib
from collections.abc import Iterator, Sequence

from conx.container.reader import Reader
from conx.container.records import Binding, Original
from conx.errors import IntegrityError
from conx.runtime.decode import decode_all

__all__ = ["original_pieces", "spliced"]


def spliced(
    reader: Reader, content: bytes, holes: Sequence[tuple[int, Binding]], threads: int | None = None
) -> Iterator[memoryview]:
    """`content` with the bytes of bindings inserted before the positions that they have."""
    at = 0
    for position, binding in holes:
        yield memoryview(content)[at:position]
        yield decode_all(reader, [binding], threads)[0].data.cast("B")
        at = position
    yield memoryview(content)[at:]


def original_pieces(reader: Reader, original: Original, threads: int | None = None) -> Iterator[memoryview]:
    """The bytes of a file of the model as it was.

    Raises:
        IntegrityError: after the last piece, where they do not have the SHA-256 that is recorded.
    """
    digest = hashlib.sha256()
    holes = [(hole.at, hole) for hole in original.holes]
    for piece in spliced(reader, reader.stream(original.stream), holes, threads):
        digest.update(piece)
        yield piece
    if digest.digest() != original.sha256:
        raise IntegrityError(f"{reader.name}: {original.name!r} comes out with another SHA-256 than recorded")

"""`conx.check`: is this file whole? Header, index and tables at once; with `deep`, every byte."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from conx.container.reader import Reader, Verify
from conx.container.records import Binding
from conx.errors import ConxError, IntegrityError
from conx.runtime.decode import Progress, decode_all, thread_count

__all__ = ["CheckReport", "check", "verify_tensors"]

ALONE = 1 << 24  # bytes above which a tensor is decoded by all threads, with no other beside it


@dataclass(frozen=True)
class CheckReport:
    """What was checked and found right.

    Attributes:
        deep: every chunk was hashed and decoded.
        chunks, tensors, graphs: how many there are.
        bytes: size of the file.
        file_id, content_id: identities (see spec/conx.md), hexadecimal.
    """

    deep: bool
    chunks: int
    tensors: int
    graphs: int
    bytes: int
    file_id: str
    content_id: str


def check(
    path: str | os.PathLike[str] | bytes | BinaryIO,
    *,
    deep: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Check a .conx file.

    Args:
        path: path, bytes or a binary file object that can seek.
        deep: hash and decode everything: finds a change of any byte.
        threads: decoding threads; None: one for each core.
        progress: called as progress(done, total): bytes of tensors decoded.

    Raises:
        FormatError, IntegrityError: what is wrong, and where.
        UnsupportedError: the file needs a newer conx.
    """
    with Reader(path, verify=Verify.FULL) as reader:
        if deep:
            reader.check_deep()
            verify_tensors(reader, thread_count(threads), progress)
        else:
            reader.check()
        return CheckReport(
            deep=deep,
            chunks=reader.chunks,
            tensors=len(reader.index.tensors),
            graphs=len(reader.index.graphs),
            bytes=reader.header.file_size,
            file_id=reader.file_id.hex(),
            content_id=reader.content_id.hex(),
        )


def verify_tensors(reader: Reader, threads: int, progress: Progress | None = None) -> None:
    """Decode every tensor and compare the SHA-256 of its values with the recorded one.

    Raises:
        IntegrityError: naming the tensor.
    """
    total = sum(t.nbytes for t in reader.index.tensors)
    done = 0

    def one(number: int, within: int = 1) -> int:
        tensor = reader.index.tensors[number]
        values = decode_all(reader, [Binding(tensor=number)], within)[0]
        if hashlib.sha256(values.data).digest() != tensor.sha256:
            raise IntegrityError(
                f"{reader.name}: tensor {tensor.name!r}: decoded values have another SHA-256 than recorded"
            )
        return tensor.nbytes

    small = [i for i, tensor in enumerate(reader.index.tensors) if tensor.nbytes <= ALONE]
    large = [i for i, tensor in enumerate(reader.index.tensors) if tensor.nbytes > ALONE]
    with ThreadPoolExecutor(threads, thread_name_prefix="conx-check") as pool:
        try:
            for nbytes in chain(pool.map(one, small), (one(number, threads) for number in large)):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        except ConxError:
            pool.shutdown(cancel_futures=True)
            raise

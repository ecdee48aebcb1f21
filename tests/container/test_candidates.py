"""Noise is coded near its entropy, redundancy is found, and a frame depends on nothing but data and candidate."""

import threading

import numpy as np
import numpy.typing as npt
import pytest

from conx.container.candidates import CANDIDATES, HUFFMAN, LEVEL_1, LEVEL_3, Candidate, choose, compress, compress_best
from conx.container.frames import decompress, frame_header

COUNT = 2**18


def entropy(data: bytes) -> float:
    """Bits for each byte."""
    counts = np.bincount(np.frombuffer(data, np.uint8))
    shares = counts[counts > 0] / len(data)
    return float(-np.sum(shares * np.log2(shares)))


def codes(bits: float) -> npt.NDArray[np.int8]:
    """Gaussian int8 codes of about this entropy."""
    sigma = 2**bits / np.sqrt(2 * np.pi * np.e)
    noise = np.random.default_rng(int(bits * 100)).normal(size=COUNT) * sigma
    values: npt.NDArray[np.int8] = np.clip(np.rint(noise), -127, 127).astype(np.int8)
    return values


def nibbles(values: npt.NDArray[np.int8]) -> bytes:
    fields = np.where(np.abs(values.astype(int)) <= 7, values + 7, 15).astype(np.uint8)
    packed: bytes = (fields[0::2] | fields[1::2] << 4).tobytes()
    return packed


def plane(bits: npt.NDArray[np.unsignedinteger], width: int) -> bytes:
    """The exponent plane of floats."""
    return ((bits << 1) >> (width - 8)).astype(np.uint8).tobytes()


WEIGHTS = (np.random.default_rng(0).normal(size=COUNT) * 0.04).astype(np.float32)
TEXT = b"".join(b'\n\x12/encoder/layer.%d/x\x12\x05w%d\x1a\x06MatMul"\x06MatMul' % (i, i) for i in range(3000))

NOISE: dict[str, tuple[bytes, float]] = {
    "codes of 7 bits": (codes(7).tobytes(), 1.02),
    "codes of 4.2 bits": (codes(4.2).tobytes(), 1.02),
    "codes of 3.2 bits": (codes(3.2).tobytes(), 1.02),
    "codes of 2.25 bits": (codes(2.25).tobytes(), 1.045),  # for which packing is better
    "nibbles of 3.2 bits": (nibbles(codes(3.2)), 1.02),
    "nibbles of 2.25 bits": (nibbles(codes(2.25)), 1.02),
    "exponents of float32": (plane(WEIGHTS.view(np.uint32), 32), 1.03),
    "exponents of float16": (plane(WEIGHTS.astype(np.float16).view(np.uint16), 16), 1.02),
    "mantissas": ((WEIGHTS.view(np.uint32) & 255).astype(np.uint8).tobytes(), 1.001),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_coded_near_its_entropy(name: str) -> None:
    data, most = NOISE[name]
    candidate = choose([data])
    assert candidate.level < 19
    assert len(compress(data, candidate)) <= most * entropy(data) * len(data) / 8


def test_levels_find_false_repetitions_in_noise() -> None:
    """What the choice is for."""
    data = codes(3.2).tobytes()
    assert len(compress(data, LEVEL_3)) > 1.15 * len(compress(data, HUFFMAN))


@pytest.mark.parametrize(
    "data",
    [TEXT, np.arange(30_000, dtype="<i8").tobytes(), codes(5)[:4096].tobytes() * 40, bytes(100_000)],
    ids=["text", "integers", "repetition", "zeros"],
)
def test_redundancy_is_found(data: bytes) -> None:
    best = min(len(compress(data, candidate)) for candidate in CANDIDATES)
    assert len(compress(data, choose([data]))) <= 1.03 * best
    assert len(compress_best(data)) <= 1.03 * best


def test_the_choice_is_for_all_samples() -> None:
    assert choose([codes(4).tobytes()] * 2) is HUFFMAN
    assert choose([]) is HUFFMAN
    assert choose([b"", b""]) is HUFFMAN
    assert choose([TEXT, TEXT[:1000]]) not in {HUFFMAN, LEVEL_1}


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
@pytest.mark.parametrize("size", [0, 1, 255, 256, 65791, 65792, 2**20 + 1])
def test_frames_have_the_header_of_the_format(candidate: Candidate, size: int) -> None:
    data = codes(6).tobytes()[:size] * 5
    frame = compress(data, candidate)
    assert frame.startswith(frame_header(len(data)))
    assert decompress(frame, len(data), "c") == data


def test_the_largest_frame_is_a_single_segment() -> None:
    data = bytes(2**25)
    for candidate in CANDIDATES[:3]:
        assert decompress(compress(data, candidate), len(data), "c") == data


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
def test_a_frame_does_not_depend_on_what_was_compressed_before(candidate: Candidate) -> None:
    inputs = [codes(3)[:50_000].tobytes(), TEXT[:60_000], b"", codes(2)[:10].tobytes(), codes(3)[:50_000].tobytes()]
    frames: list[list[bytes]] = []

    def work(order: list[bytes]) -> None:
        made = {data: compress(data, candidate) for data in order}
        frames.append([made[data] for data in inputs])

    for order in (inputs, inputs[::-1], inputs * 2):
        thread = threading.Thread(target=work, args=(order,))
        thread.start()
        thread.join()
    assert frames[0] == frames[1] == frames[2]


def test_names_differ() -> None:
    assert len({candidate.name for candidate in CANDIDATES}) == len(CANDIDATES)

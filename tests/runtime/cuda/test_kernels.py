"""Every kernel, compiled for the host, against the NumPy codecs: bit for bit, on generated tensors of all kinds."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from conx.codecs import Codec, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.base import Encoded
from conx.dtypes import DType
from conx.errors import FormatError
from conx.runtime.cuda.device import Launch
from conx.runtime.cuda.sources import TILE, kernel_names, kernel_source
from tests.codecs.kit import CASES
from tests.runtime.cuda.generated import (
    FLOATS,
    KINDS,
    TARGETS,
    Coded,
    MalformedError,
    by_codec,
    by_device,
    check,
    generated,
)
from tests.runtime.cuda.host import COMPILER, HostDevice, Kernels, compile_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


@pytest.mark.parametrize(("kind", "tries"), [("linear", 700), ("palette", 400), ("exact", 500), ("fill", 60)])
def test_generated_tensors(kind: str, tries: int, kernels: Kernels) -> None:
    for seed in range(tries):
        coded, target, how = generated(kind, seed)
        check(HostDevice(kernels), coded, target, **how)


def test_tensors_of_many_tiles(kernels: Kernels) -> None:
    for seed in range(10):
        coded, target, how = generated("linear", 10_000 + seed, most=40 * TILE)
        check(HostDevice(kernels), coded, target, **how)
        coded, target, how = generated("palette", 10_000 + seed, most=10 * TILE)
        check(HostDevice(kernels), coded, target, **how)


def usable(meta: TensorMeta) -> bool:
    return meta.dtype in FLOATS and meta.count > 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.label)
def test_the_codecs_own_cases(target: DType, kernels: Kernels) -> None:
    cases = [case for case in CASES if usable(case.meta)]
    assert len(cases) > 100
    for case in cases:
        for segment in (16, 1 << 18):
            check(
                HostDevice(kernels),
                Coded(Encoded(case.codec, case.side, case.data), case.meta, segment),
                target,
                shift=segment % 5,
            )


class Unknown:
    """A codec for which there are no kernels."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)


def test_a_codec_without_kernels(kernels: Kernels) -> None:
    for seed in range(30):
        coded, target, how = generated("exact", seed)
        encoded = Encoded(cast(Codec, Unknown(coded.encoded.codec)), coded.encoded.side, coded.encoded.data)
        check(HostDevice(kernels), Coded(encoded, coded.meta, coded.segment), target, **how)


def test_every_float16_and_bfloat16(kernels: Kernels) -> None:
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        every = np.arange(1 << 16, dtype="<u2").view(dtype.storage)
        for target in TARGETS:
            for codec in (Raw(), Planes()):
                check(
                    HostDevice(kernels),
                    Coded(Encoded(codec, (), every), TensorMeta((1 << 16,), dtype), 1 << 18),
                    target,
                )
        wide = DType.FLOAT32
        check(
            HostDevice(kernels), Coded(Encoded(Planes(dtype), (), every), TensorMeta((1 << 16,), wide), 1 << 18), wide
        )


def test_every_kernel_is_tested(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    real = kernels.run

    def noted(launch: Launch) -> None:
        seen.add(launch.kernel)
        real(launch)

    monkeypatch.setattr(kernels, "run", noted)
    check_many(kernels, 250, most=60)
    assert seen == kernel_names().keys()


# Malformed streams


def damaged(pack: int, change: int, unused: int = 0) -> Coded:
    """Escapes added or taken away, or unused bits set."""
    meta = TensorMeta((1 << 14 | 1,), DType.FLOAT32)
    codes = np.clip(np.rint(np.random.default_rng(1).laplace(0, 3, meta.count)), -128, 127).astype(np.int8)
    codec = Linear(pack=pack)

    class Changed(Encoded):
        def segment(self, meta: TensorMeta, start: int, stop: int) -> list[bytes]:
            streams = [bytearray(s) for s in super().segment(meta, start, stop)]
            streams[-1] = streams[-1] + b"\1" * change if change > 0 else streams[-1][: len(streams[-1]) + change]
            streams[0][-1] |= unused
            return [bytes(s) for s in streams]

    return Coded(Changed(codec, codec.make_side(np.ones(1, "<f4")), codes), meta, 1 << 18)


@pytest.mark.parametrize("pack", [2, 4])
@pytest.mark.parametrize(("change", "unused"), [(1, 0), (-1, 0), (-100, 0), (3000, 0), (0, 0x80)])
def test_malformed_fields_are_refused(pack: int, change: int, unused: int, kernels: Kernels) -> None:
    coded = damaged(pack, change, unused)
    with pytest.raises(FormatError):
        by_codec(coded, DType.FLOAT16)
    with pytest.raises(MalformedError, match="unused bits" if unused else "escapes"):
        by_device(HostDevice(kernels), coded, DType.FLOAT16)
    check(HostDevice(kernels), damaged(pack, 0), DType.FLOAT16)


def test_malformed_nibbles_between_quads_and_escapes(kernels: Kernels) -> None:
    """A nibble too many or too few, and a last half that is not zero."""
    meta = TensorMeta((64,), DType.FLOAT32)
    codec = Linear(pack=4)
    codes = np.zeros(64, np.int8)
    codes[::9] = 5  # 8 escaped fields, 4 bytes of nibbles
    side = codec.make_side(np.ones(1, "<f4"))

    class Changed(Encoded):
        nibbles: bytes = b""

        def segment(self, meta: TensorMeta, start: int, stop: int) -> list[bytes]:
            quads, nibbles, escapes = super().segment(meta, start, stop)
            return [quads, Changed.nibbles + nibbles if Changed.nibbles else nibbles[:-1], escapes]

    for extra in (b"", b"\0", b"\0\0"):
        Changed.nibbles = extra
        coded = Coded(Changed(codec, side, codes), meta, 1 << 18)
        with pytest.raises(FormatError):
            by_codec(coded, DType.FLOAT16)
        with pytest.raises(MalformedError, match="escapes"):
            by_device(HostDevice(kernels), coded, DType.FLOAT16)


def test_an_odd_number_of_nibbles_ends_with_zero(kernels: Kernels) -> None:
    meta = TensorMeta((64,), DType.FLOAT32)
    codec = Linear(pack=4)
    codes = np.zeros(64, np.int8)
    codes[::10] = 5  # 7 escaped fields
    side = codec.make_side(np.ones(1, "<f4"))

    class Changed(Encoded):
        def segment(self, meta: TensorMeta, start: int, stop: int) -> list[bytes]:
            quads, nibbles, escapes = super().segment(meta, start, stop)
            return [quads, nibbles[:-1] + bytes([nibbles[-1] | 0x10]), escapes]

    check(HostDevice(kernels), Coded(Encoded(codec, side, codes), meta, 1 << 18), DType.FLOAT16)
    coded = Coded(Changed(codec, side, codes), meta, 1 << 18)
    with pytest.raises(FormatError):
        by_codec(coded, DType.FLOAT16)
    with pytest.raises(MalformedError, match="unused bits"):
        by_device(HostDevice(kernels), coded, DType.FLOAT16)


def test_malformed_palettes_are_refused(kernels: Kernels) -> None:
    meta = TensorMeta((33,), DType.FLOAT32)
    for codec, stream in [
        (Palette(3, 4), b"\xff" * 9),
        (Palette(200), b"\xc8" * 33),
        (Palette(4, 4), b"\0" * 8 + b"\4"),
    ]:
        encoded = Encoded(codec, codec.make_side(np.arange(codec.entries, dtype="<f4")), np.empty(33, np.uint8))

        class Changed(Encoded):
            def segment(self, meta: TensorMeta, start: int, stop: int, stream: bytes = stream) -> list[bytes]:
                return [stream]

        coded = Coded(Changed(encoded.codec, encoded.side, encoded.data), meta, 1 << 18)
        with pytest.raises(FormatError):
            by_codec(coded, DType.FLOAT16)
        with pytest.raises(MalformedError):
            by_device(HostDevice(kernels), coded, DType.FLOAT16)


# The tests themselves


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("magnitude >= 0x477FF000", "magnitude > 0x477FF000"),
        ("code & 7]", "code & 3]"),
        ("if (at.l < p.of.length) return;", ""),
        ("j < left && run != SAME", "j < left && run == ANY"),
        ("bits + 0x7FFF + (bits >> 16 & 1)", "bits + 0x8000"),
        ("(turned & 1) << (8 * width - 1)", "(turned & 1) << (8 * width - 2)"),
        ("if (!(bits & 1) && lost > 0) ++bits;", ""),
        ("unused > run.loose", "unused > 1"),
        ("thread >= step ? before", "thread > step ? before"),
    ],
)
def test_planted_errors_are_found(right: str, wrong: str, tmp_path: Path) -> None:
    source = kernel_source()
    assert source.count(right) >= 1, "the source has changed: plant another"
    planted = compile_kernels(tmp_path, source.replace(right, wrong))
    if "unused" in right:
        by_device(HostDevice(planted), damaged(2, 1), DType.FLOAT16)  # is not refused
        return
    with pytest.raises((AssertionError, MalformedError)):
        check_many(planted, 400)


def check_many(kernels: Kernels, seeds: int, most: int = 9000) -> None:
    for seed in range(seeds):
        for kind in KINDS:
            coded, target, how = generated(kind, seed, most)
            check(HostDevice(kernels), coded, target, **how)

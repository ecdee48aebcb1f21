"""What only one codec does: golden bytes, and its own rules."""

import re
from pathlib import Path

import numpy as np
import pytest

from conx.codecs import CODECS, Codec, Fill, Heads, Linear, Palette, Planes, Raw, TensorMeta
from conx.codecs.linear import log8_scales
from conx.dtypes import DType
from conx.errors import FormatError
from tests.codecs.kit import CASES, log8
from tests.codecs.reference import Array

PAGES = Path(__file__).resolve().parents[2] / "spec" / "codecs"
F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16


def values(dtype: DType, bits: str) -> Array:
    """An array of `dtype` from its elements' bits in hexadecimal, as one writes numbers."""
    return np.array([int(word, 16) for word in bits.split()], f"<u{dtype.bits // 8}").view(dtype.storage)


GOLDEN: list[tuple[str, Codec, TensorMeta, list[str], Array, list[str], Array]] = [
    # label, codec, tensor, side streams, data, main streams, values
    (
        "raw float32",
        Raw(),
        TensorMeta((2,), F32),
        [],
        values(F32, "3F800000 7FA00001"),
        ["00 00 80 3F 01 00 A0 7F"],
        values(F32, "3F800000 7FA00001"),
    ),
    (
        "raw int4",
        Raw(),
        TensorMeta((3,), DType.INT4),
        [],
        np.array([0x21, 0xF3], np.uint8),
        ["21 F3"],
        np.array([0x21, 0xF3], np.uint8),
    ),
    (
        "fill",
        Fill(),
        TensorMeta((3,), DType.INT16),
        ["FE FF"],
        np.zeros(3, "<i2"),
        [],
        np.array([-2, -2, -2], "<i2"),
    ),
    (
        "planes float32",
        Planes(),
        TensorMeta((3,), F32),
        [],
        values(F32, "3F800000 BF800001 12345678"),
        ["7F 7F 24", "00 00 68", "00 00 AC", "00 03 F0"],
        values(F32, "3F800000 BF800001 12345678"),
    ),
    (
        "planes float16",
        Planes(),
        TensorMeta((2,), F16),
        [],
        values(F16, "3C00 BC01"),
        ["78 78", "00 03"],
        values(F16, "3C00 BC01"),
    ),
    (
        "planes float8",
        Planes(),
        TensorMeta((2,), DType.FLOAT8E5M2),
        [],
        values(DType.FLOAT8E5M2, "81 7C"),
        ["03 F8"],
        values(DType.FLOAT8E5M2, "81 7C"),
    ),
    (
        "planes float64 stored as bfloat16",
        Planes(BF16),
        TensorMeta((3,), DType.FLOAT64),
        [],
        values(BF16, "3F80 FF81 8000"),
        ["7F FF 00", "00 03 01"],
        values(DType.FLOAT64, "3FF0000000000000 FFF0200000000000 8000000000000000"),
    ),
    (
        "heads float32",
        Heads(),
        TensorMeta((3,), F32),
        [],
        values(F32, "3F800000 BF800001 12345678"),
        ["7F 7F 24", "00 80 34", "00 00 01 00 78 56"],
        values(F32, "3F800000 BF800001 12345678"),
    ),
    (
        "heads bfloat16, two axes, escapes",
        Heads(11, base=2000, axes=3, shift=2),
        TensorMeta((1, 3), BF16),
        ["01", "02 00 0B"],
        values(BF16, "0FE5 8FF0 7FFF"),
        ["FE FF FF", "FF 00 FF 07", "05 0F", "02"],
        values(BF16, "0DA5 8D30 7FFF"),
    ),
    (
        "heads float64 stored as float16",
        Heads(9, stored=F16),
        TensorMeta((2,), DType.FLOAT64),
        [],
        values(F16, "3C01 8000"),
        ["F0 00", "", "01", "00", "02"],
        values(DType.FLOAT64, "3FF0040000000000 8000000000000000"),
    ),
    (
        "palette",
        Palette(3, 4),
        TensorMeta((5,), BF16),
        ["80 3F 00 C0 00 00"],
        np.array([0, 1, 2, 1, 2], np.uint8),
        ["64 02"],
        values(BF16, "3F80 C000 0000 C000 0000"),
    ),
    (
        "palette in groups",
        Palette(2, 8, axis=1, group=2),
        TensorMeta((2, 3), DType.INT8),
        ["01 02 03 04"],
        np.array([0, 1, 0, 1, 1, 1], np.uint8),
        ["3A"],
        np.array([1, 2, 3, 2, 2, 4], np.int8),
    ),
    (
        "linear",
        Linear(),
        TensorMeta((3,), F32),
        ["00 00 00 3F"],
        np.array([-128, 3, 0], np.int8),
        ["80 03 00"],
        np.array([-64, 1.5, 0], np.float32),
    ),
    (
        "linear, log codes, zero points, two to a byte",
        Linear(DType.UINT8, axis=1, base=1.0, zero_points=True, center=128, pack=2),
        TensorMeta((2, 2), F32),
        ["00 0C", "80 7F"],
        np.array([129, 127, 128, 143], np.uint8),
        ["68 F7", "0F"],
        values(F32, "3F800000 00000000 00000000 40B504F3"),
    ),
    (
        "linear, blocks, four to a byte",
        Linear(axis=1, block=2, zero_point=1, pack=4),
        TensorMeta((1, 3), F16),
        ["00 00 80 3F 00 00 80 44"],
        np.array([1, 0, 100], np.int8),
        ["36", "0F", "64"],
        values(F16, "0000 BC00 7BFF"),
    ),
]


@pytest.mark.parametrize(
    ("codec", "meta", "side", "data", "streams", "expected"),
    [row[1:] for row in GOLDEN],
    ids=[row[0] for row in GOLDEN],
)
def test_golden_bytes(
    codec: Codec, meta: TensorMeta, side: list[str], data: Array, streams: list[str], expected: Array
) -> None:
    stored = [bytes.fromhex(stream) for stream in streams]
    assert codec.encode(data, meta) == stored
    out = np.empty_like(expected)
    codec.decoder(meta, [bytes.fromhex(stream) for stream in side], meta.dtype)(0, meta.count, stored, out)
    assert out.tobytes().hex(" ") == expected.tobytes().hex(" ")


def test_every_codec_has_golden_bytes_a_case_and_a_page() -> None:
    assert {row[1].id for row in GOLDEN} == {case.codec.id for case in CASES} == set(CODECS)
    assert {page.stem for page in PAGES.glob("*.md")} == set(CODECS)
    assert all(codec.id == name for name, codec in CODECS.items())


@pytest.mark.parametrize("codec", CODECS)
def test_the_page_lists_the_parameters(codec: str) -> None:
    page = (PAGES / f"{codec}.md").read_text(encoding="utf-8")
    table = page.partition("| parameter |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {name for case in CASES if case.codec.id == codec for name in case.codec.to_params()}


def test_the_page_lists_the_roots() -> None:
    page = (PAGES / "linear.md").read_text(encoding="utf-8")
    listed = re.findall(r"\b[0-9A-F]{8}\b", page)
    roots = log8_scales(1.0, np.arange(8, dtype=np.uint8))
    assert [f"{bits:08X}" for bits in roots.view("<u4").tolist()] == listed


@pytest.mark.parametrize("base", [1.0, 0.0123291015625, 2.0**-140, 3.0e38])
def test_log_codes(base: float) -> None:
    codes = np.arange(256, dtype=np.uint8)
    base = float(np.float32(base))
    expected = np.array([log8(base, code) for code in range(256)], "<f4")
    assert log8_scales(base, codes).tobytes() == expected.tobytes()


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_must_be_finite(scale: float) -> None:
    side = [np.array([1, scale], "<f4").tobytes()]
    with pytest.raises(FormatError, match="scale 1 is not finite"):
        Linear(axis=0).decoder(TensorMeta((2, 3), F32), side, F32)


def test_a_product_beyond_float32_is_infinite() -> None:
    meta = TensorMeta((2,), F32)
    side = [np.array([3e38], "<f4").tobytes()]
    for target, expected in ((F32, "7F800000 FF800000"), (F16, "7C00 FC00"), (BF16, "7F80 FF80")):
        out = np.empty(2, target.storage)
        Linear().decoder(meta, side, target)(0, 2, [b"\x02\xfe"], out)
        assert out.tobytes() == values(target, expected).tobytes()


def test_codes_and_scales_themselves() -> None:
    codec = Linear(DType.UINT8, axis=0, zero_points=True, center=9, pack=2)
    codes, scales, zeros = np.array([9, 8, 255], "u1"), np.array([1, 2, 3], "<f4"), np.array([7, 8, 9], "u1")
    meta = TensorMeta((3,), F32)
    streams, side = codec.encode(codes, meta), codec.make_side(scales, zeros)
    out = np.empty(3, "u1")
    codec.decode_codes(0, 3, streams, out)
    assert out.tolist() == codes.tolist()
    assert codec.scales_from(side).tolist() == scales.tolist()
    assert codec.zero_points_from(side).tolist() == zeros.tolist()
    assert Linear(zero_point=-3).zero_points_from(side).tolist() == [-3]


def test_wrong_data_is_the_callers_fault() -> None:
    meta = TensorMeta((2,), F32)
    two = np.zeros(2, "<f4")
    with pytest.raises(ValueError, match="codes are float32"):
        Linear().encode(two, meta)
    with pytest.raises(ValueError, match="indices less than 3"):
        Palette(3).encode(np.array([3], np.uint8), meta)
    with pytest.raises(ValueError, match="planes of 2 bytes"):
        Planes(F16).encode(two, meta)
    with pytest.raises(ValueError, match="heads of float16"):
        Heads(stored=F16).encode(two, meta)
    with pytest.raises(ValueError, match="one value"):
        Fill().make_side(two)
    with pytest.raises(ValueError, match="scales are float64"):
        Linear().make_side(two.astype("<f8"))
    with pytest.raises(ValueError, match="scales are float32"):
        Linear(base=1.0).make_side(two)
    with pytest.raises(ValueError, match="stores none"):
        Linear().make_side(two, np.zeros(2, np.int8))
    with pytest.raises(ValueError, match="needs 2 zero points of type int8"):
        Linear(zero_points=True).make_side(two)


@pytest.mark.parametrize(
    ("codec", "packed", "message"),
    [
        (Palette(3, 4), "C0 00", "index 3 in a palette of 3"),
        (Palette(3, 4), "00 04", "unused bits"),
        (Palette(4, 4), "00 FC", "unused bits"),
        (Palette(11, 2, 0, 2), "00 0B 00", "index 11"),
        (Palette(11, 2), "B0 00 00", "index 11"),
        (Palette(16, 2, 0, 2), "00 00 10", "unused bits"),
        (Palette(200, 1), "00 00 C8 00 00", "index 200"),
    ],
)
def test_indices_that_there_are_not(codec: Palette, packed: str, message: str) -> None:
    meta = TensorMeta((5,), F32)
    decoder = codec.decoder(meta, [bytes(size) for size in codec.side_sizes(meta)], F32)
    with pytest.raises(FormatError, match=message):
        decoder(0, 5, [bytes.fromhex(packed)], np.empty(5, "<f4"))


@pytest.mark.parametrize(
    ("symbols", "escapes", "rest", "message"),
    [
        ("FF FF", "FF 00", "00", "2 symbols or more are 255, but there are 1 escapes"),
        ("FF 00", "FF 00 00 01", "00", "1 symbols or more are 255, but there are 2 escapes"),
        ("FF 00", "FF", "00", "stream 'escapes' has 1 bytes"),
        ("FF 00", "FE 00", "00", "an escape is 254, but must be in 255 … 4095"),
        ("FF 00", "00 10", "00", "an escape is 4096"),
    ],
)
def test_escapes_that_do_not_fit(symbols: str, escapes: str, rest: str, message: str) -> None:
    streams = [bytes.fromhex(text) for text in (symbols, escapes, rest)]
    with pytest.raises(FormatError, match=message):
        Heads(12).decoder(TensorMeta((2,), BF16), (), BF16)(0, 2, streams, np.empty(2, "<u2"))


def test_unused_bits_of_the_rest_are_zero() -> None:
    streams = [b"\0", b"", b"\x10"]
    with pytest.raises(FormatError, match="unused bits"):
        Heads(12).decoder(TensorMeta((1,), BF16), (), BF16)(0, 1, streams, np.empty(1, "<u2"))


def test_residuals_are_undone_over_blocks_and_segments() -> None:
    meta, codec = TensorMeta((3, 190, 457), F32), Heads(10, base=77, axes=7, shift=1)
    given = np.random.default_rng(0).standard_normal(meta.count).astype("<f4")
    side = [np.random.default_rng(i).integers(0, 256, n, np.uint8).tobytes() for i, n in enumerate(meta.shape)]
    data = codec.residuals(given, meta, side)
    decoder = codec.decoder(meta, side, F32)
    out = np.empty_like(given)
    for start in range(0, meta.count, 100_000):
        stop = min(start + 100_000, meta.count)
        assert (codec.residuals_of(given, meta, side, start, stop).view("u4") == data[start:stop].view("u4")).all()
        decoder(start, stop - start, codec.encode(data[start:stop], meta), out[start:stop])
    assert out.tobytes() == given.tobytes()


def test_nans_survive_narrow_storage() -> None:
    bits = values(F16, "7C01 FE00 7FFF FC00")
    meta = TensorMeta((4,), F32)
    out = np.empty(4, "<f4")
    Planes(F16).decoder(meta, (), F32)(0, 4, Planes(F16).encode(bits, meta), out)
    assert out.tobytes() == values(F32, "7F802000 FFC00000 7FFFE000 FF800000").tobytes()

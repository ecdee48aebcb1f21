"""Codes and indices packed into bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conx.codecs.fields import pack_fields, unpack_fields
from conx.codecs.linear import pack_codes, unpack_codes
from conx.codecs.symbols import PACKS, stream_names, stream_sizes
from conx.errors import FormatError
from tests.codecs.reference import Array


def unpacked(streams: list[bytes], count: int, center: int, pack: int, dtype: str = "i1") -> list[int]:
    out = np.full(count, 99, dtype)
    unpack_codes(streams, count, center, pack, out)
    return [int(code) for code in out]


@pytest.mark.parametrize(
    ("pack", "codes", "streams"),
    [
        (1, [-128, -1, 0, 1, 127], ["80 FF 00 01 7F"]),
        (2, [-7, 7, 0, -1, 1], ["E0 67 08", ""]),
        (2, [-8, 8, 0, 127, -128], ["FF F7 0F", "F8 08 7F 80"]),
        (4, [-1, 0, 1, 0, 1], ["64 02", "", ""]),
        (4, [2, -1, 0, -7, 8], ["D3 03", "09 0F", "08"]),
        (2, [], ["", ""]),
        (4, [], ["", "", ""]),
    ],
)
def test_golden_codes(pack: int, codes: list[int], streams: list[str]) -> None:
    expected = [bytes.fromhex(stream) for stream in streams]
    assert pack_codes(np.array(codes, np.int8), 0, pack) == expected
    assert unpacked(expected, len(codes), 0, pack) == codes


def test_golden_center() -> None:
    codes = np.array([128, 127, 135, 136, 0], np.uint8)
    expected = [bytes.fromhex("67 FE 0F"), bytes.fromhex("08 80")]
    assert pack_codes(codes, 128, 2) == expected
    assert unpacked(expected, 5, 128, 2, "u1") == codes.tolist()
    assert pack_codes(np.array([-128, 127], np.int8), -128, 1) == [b"\x00\xff"]


@settings(max_examples=200, deadline=None)
@given(
    values=st.one_of(
        hnp.arrays(np.int8, st.integers(0, 70)),
        hnp.arrays(np.int8, st.integers(0, 70), elements=st.integers(-9, 9)),
        hnp.arrays(np.int8, st.integers(0, 70), elements=st.integers(-2, 2)),
        hnp.arrays(np.uint8, st.integers(0, 70)),
    ),
    center=st.integers(-128, 255),
    pack=st.sampled_from(PACKS),
)
def test_codes_come_back(values: Array, center: int, pack: int) -> None:
    streams = pack_codes(values, center, pack)
    assert len(streams) == len(stream_names(pack)) == len(stream_sizes(values.size, pack))
    assert all(size in {None, len(s)} for size, s in zip(stream_sizes(values.size, pack), streams, strict=True))
    out = np.empty_like(values)
    unpack_codes(streams, values.size, center, pack, out)
    assert (out == values).all()
    read_only = [memoryview(b"\0" + stream)[1:] for stream in streams]
    unpack_codes(read_only, values.size, center, pack, out)
    assert (out == values).all()


@pytest.mark.parametrize(
    ("pack", "count", "streams", "message"),
    [
        (1, 2, ["00"], "'codes' has 1 bytes"),
        (1, 1, [], "0 streams, but needs 1"),
        (2, 3, ["00", ""], "'nibbles' has 1 bytes"),
        (2, 3, ["77 07", "00"], "'escapes' has 1 bytes, but 0 codes need 0"),
        (2, 3, ["77 0F", ""], "'escapes' has 0 bytes, but 1 codes need 1"),
        (2, 3, ["77 17", ""], "unused bits"),
        (2, 3, ["77 F7", ""], "unused bits"),
        (4, 5, ["00", "", ""], "'quads' has 1 bytes"),
        (4, 5, ["03 00", "", ""], "'nibbles' has 0 bytes, but 1 codes need 1"),
        (4, 5, ["00 00", "00", ""], "'nibbles' has 1 bytes, but 0 codes need 0"),
        (4, 5, ["00 00", "", "00"], "'escapes' has 1 bytes"),
        (4, 5, ["03 00", "0F", ""], "'escapes' has 0 bytes"),
        (4, 5, ["03 00", "17", ""], "unused bits"),
        (4, 5, ["00 04", "", ""], "unused bits"),
        (4, 0, ["", "", "", ""], "4 streams, but needs 3"),
    ],
)
def test_streams_that_do_not_fit(pack: int, count: int, streams: list[str], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        unpacked([bytes.fromhex(stream) for stream in streams], count, 0, pack)


@settings(max_examples=200, deadline=None)
@given(
    streams=st.lists(st.binary(max_size=6), max_size=4),
    count=st.integers(0, 20),
    center=st.integers(-128, 127),
    pack=st.sampled_from(PACKS),
)
def test_any_streams_give_codes_or_a_format_error(streams: list[bytes], count: int, center: int, pack: int) -> None:
    try:
        codes = unpacked(streams, count, center, pack)
    except FormatError:
        return
    assert unpacked(pack_codes(np.array(codes, np.int8), center, pack), count, center, pack) == codes


@pytest.mark.parametrize(
    ("per_byte", "fields", "packed"),
    [
        (1, [0, 255], "00 FF"),
        (2, [1, 2, 15], "21 0F"),
        (4, [1, 2, 3, 0, 3], "39 03"),
        (8, [1, 0, 0, 0, 0, 0, 1, 1, 1], "C1 01"),
    ],
)
def test_golden_fields(per_byte: int, fields: list[int], packed: str) -> None:
    assert pack_fields(np.array(fields, np.uint8), per_byte).tobytes() == bytes.fromhex(packed)
    out = np.empty(len(fields), np.uint8)
    unpack_fields(np.frombuffer(bytes.fromhex(packed), np.uint8), per_byte, out)
    assert out.tolist() == fields


@pytest.mark.parametrize("per_byte", [2, 4, 8])
def test_every_byte_of_fields(per_byte: int) -> None:
    bits = 8 // per_byte
    out = np.empty(256 * per_byte, np.uint8)
    unpack_fields(np.arange(256, dtype=np.uint8), per_byte, out)
    assert out.tolist() == [byte >> bits * i & (1 << bits) - 1 for byte in range(256) for i in range(per_byte)]
    assert pack_fields(out, per_byte).tolist() == list(range(256))

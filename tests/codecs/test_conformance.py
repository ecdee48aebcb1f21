"""What every codec must do, tried on every case of the kit."""

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conx.codecs import CODECS, Buffer, TensorMeta, codec_from, pack_params
from conx.codecs.convert import SOURCES
from conx.dtypes import DType
from conx.errors import ConxError, FormatError, UnsupportedError
from tests.codecs.kit import CASES, PACKED, WHOLE, Case
from tests.codecs.reference import TARGETS, Array, assert_same, bits_of, converted

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)


def encoded(case: Case) -> list[bytes]:
    return case.codec.encode(case.data, case.meta)


def decoded(case: Case, target: DType, streams: Sequence[Buffer], side: Sequence[Buffer] | None = None) -> Array:
    out = np.zeros(case.values.size, target.storage)
    case.codec.decoder(case.meta, case.side if side is None else side, target)(0, case.meta.count, streams, out)
    return out


@every_case
def test_own_type_bit_for_bit(case: Case) -> None:
    result = decoded(case, case.meta.dtype, encoded(case))
    assert (bits_of(result) == bits_of(case.values)).all()


@every_case
@pytest.mark.parametrize("target", TARGETS)
def test_other_types(case: Case, target: DType) -> None:
    dtype = case.meta.dtype
    if dtype not in SOURCES:
        with pytest.raises(ValueError, match="cannot be decoded"):
            case.codec.decoder(case.meta, case.side, target)
    elif target is not dtype:
        given, source = (case.values, dtype) if case.exact is None else (case.exact, DType.FLOAT32)
        assert_same(decoded(case, target, encoded(case)), converted(given, source, target), target)


@every_case
@pytest.mark.parametrize("segment", [8, 56, 64])
def test_segments_are_the_whole(case: Case, segment: int) -> None:
    def split(values: Array, start: int, stop: int) -> Array:
        bits = case.meta.dtype.bits
        return values[start:stop] if bits >= 8 else values[start * bits // 8 : (stop * bits + 7) // 8]

    targets = {case.meta.dtype, DType.FLOAT16} if case.meta.dtype in SOURCES else {case.meta.dtype}
    for target in targets:
        decoder = case.codec.decoder(case.meta, case.side, target)
        whole = decoded(case, target, encoded(case))
        out = np.zeros_like(whole)
        for start in range(0, case.meta.count, segment):
            stop = min(start + segment, case.meta.count)
            streams = case.codec.encode(split(case.data, start, stop), case.meta)
            decoder(start, stop - start, streams, split(out, start, stop))
        assert (bits_of(out) == bits_of(whole)).all()


@every_case
def test_sizes_are_as_foretold(case: Case) -> None:
    streams = encoded(case)
    sizes = case.codec.stream_sizes(case.meta, case.meta.count)
    assert len(streams) == len(sizes) == len(case.codec.stream_names(case.meta))
    assert all(size in {None, len(stream)} for size, stream in zip(sizes, streams, strict=True))
    assert tuple(map(len, case.side)) == case.codec.side_sizes(case.meta)


@every_case
def test_params_come_back(case: Case) -> None:
    codec_id, params = pack_params(case.codec, case.meta)
    assert codec_id == case.codec.id
    assert codec_from(codec_id, params, case.meta) == case.codec
    assert not {value for value in params.values() if value is None or value is False}
    with pytest.raises(UnsupportedError, match="'trellis' is unknown"):
        codec_from(codec_id, params | {"trellis": 8}, case.meta)
    for name in params:
        with pytest.raises(FormatError, match=name):
            codec_from(codec_id, params | {name: [1]}, case.meta)


@every_case
def test_wrong_sizes_are_refused(case: Case) -> None:
    own, streams = case.meta.dtype, encoded(case)
    for wrong in _wrongs(streams):
        with pytest.raises(FormatError):
            decoded(case, own, wrong)
    for wrong in _wrongs(list(case.side)):
        with pytest.raises(FormatError):
            decoded(case, own, streams, wrong)


def _wrongs(streams: list[bytes]) -> list[list[bytes]]:
    longer = [[*streams[:i], stream + b"\0", *streams[i + 1 :]] for i, stream in enumerate(streams)]
    shorter = [[*streams[:i], stream[:-1], *streams[i + 1 :]] for i, stream in enumerate(streams) if stream]
    return [*longer, *shorter, [*streams, b""], *([streams[:-1]] if streams else [])]


@every_case
def test_any_buffer_will_do(case: Case) -> None:
    def odd(streams: Sequence[bytes]) -> list[memoryview]:
        return [memoryview(bytearray(b"\0" + stream))[1:] for stream in streams]

    result = decoded(case, case.meta.dtype, odd(encoded(case)), odd(case.side))
    assert (bits_of(result) == bits_of(case.values)).all()


@every_case
def test_misuse_is_a_value_error(case: Case) -> None:
    own, streams, size = case.meta.dtype, encoded(case), case.values.size
    decoder = case.codec.decoder(case.meta, case.side, own)
    strided = np.zeros(2 * size, own.storage)[::2]
    for out in (
        np.zeros(size + 1, own.storage),
        np.zeros((1, size), own.storage),
        np.zeros(size, "S3"),
        strided[:size],
    ):
        if out.shape != (1,):
            with pytest.raises(ValueError, match="out must be"):
                decoder(0, case.meta.count, streams, out)


@pytest.mark.parametrize("codec", CODECS)
def test_threads_may_share_a_decoder(codec: str) -> None:
    cases = [case for case in CASES if case.codec.id == codec and case.meta.dtype in TARGETS]
    with ThreadPoolExecutor(4) as pool:
        for case in cases:
            decoder = case.codec.decoder(case.meta, case.side, DType.FLOAT16)
            outs = [np.empty(case.meta.count, "<f2") for _ in range(4)]
            streams = encoded(case)
            list(pool.map(lambda out: decoder(0, out.size, streams, out), outs))  # noqa: B023 - done within the loop
            assert len({out.tobytes() for out in outs}) == 1


@every_case
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_bytes_give_values_or_a_format_error(case: Case, data: st.DataObject) -> None:
    streams = [bytearray(stream) for stream in encoded(case)]
    side = [bytearray(stream) for stream in case.side]
    for stream in [*streams, *side]:
        if stream:
            place = data.draw(st.integers(0, len(stream) - 1))
            noise = data.draw(st.binary(max_size=8))
            stream[place : place + len(noise)] = noise
    own = case.meta.dtype
    for target in {own, DType.BFLOAT16} if own in SOURCES else {own}:
        with contextlib.suppress(ConxError):
            decoded(case, target, streams, side)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from([2**31, 2**64, -(2**63)]), st.floats(), st.binary(),
    st.sampled_from(["int8", "uint8", "float32", "log8", "float16", "bfloat16", "", "é"]), st.just([1]), st.just({}),
)  # fmt: skip
keys = [
    "code",
    "axis",
    "block",
    "scale",
    "base",
    "zero_point",
    "zero_points",
    "center",
    "pack",
    "entries",
    "group",
    "stored",
    "bits",
    "axes",
    "shift",
]


@settings(max_examples=300, deadline=None)
@given(
    codec=st.sampled_from([*CODECS, "huffman"]),
    params=st.dictionaries(st.sampled_from([*keys, "x"]), scalars),
    shape=st.lists(st.sampled_from([0, 1, 3, 4, 1 << 40]), max_size=3),
    dtype=st.sampled_from(DType),
)
def test_any_params_give_a_codec_or_a_conx_error(
    codec: str, params: dict[str, object], shape: list[int], dtype: DType
) -> None:
    meta = TensorMeta(tuple(shape), dtype)
    try:
        made = codec_from(codec, params, meta)
    except ConxError:
        return
    assert pack_params(made, meta) == (codec, made.to_params())
    side = [bytes(size) if size < 1000 else b"" for size in made.side_sizes(meta)]
    made.stream_names(meta)
    try:
        decoder = made.decoder(meta, side, dtype)
        if meta.count < 1000:
            sizes = made.stream_sizes(meta, meta.count)
            out = np.empty(meta.count if dtype.bits >= 8 else dtype.nbytes(meta.count), dtype.storage)
            decoder(0, meta.count, [bytes(size or 0) for size in sizes], out)
    except FormatError:
        pass


@pytest.mark.parametrize(
    ("codec", "params", "dtype", "message"),
    [
        ("fill", {}, DType.INT4, "fill: element type int4 is smaller than a byte"),
        ("palette", {"entries": 2, "pack": 8}, DType.UINT2, "palette: element type uint2"),
        ("palette", {"entries": 3, "pack": 8}, DType.INT8, "'entries' is 3, but must be an integer in 1 … 2"),
        ("palette", {"entries": 0, "pack": 1}, DType.INT8, "'entries' is 0"),
        ("palette", {"entries": True, "pack": 1}, DType.INT8, "'entries' is True"),
        ("palette", {"entries": 3, "pack": 3}, DType.INT8, "'pack' is 3, but must be one of 1, 2, 4, 8"),
        ("palette", {"entries": 3}, DType.INT8, "'pack' is missing"),
        ("palette", {"entries": 3, "pack": 1, "axis": 1}, DType.INT8, "'axis' .* 'group'"),
        ("palette", {"entries": 3, "pack": 1, "group": 1}, DType.INT8, "'axis' .* 'group'"),
        ("palette", {"entries": 3, "pack": 1, "axis": 1, "group": 0}, DType.INT8, "'group' is 0"),
        ("palette", {"entries": 3, "pack": 1, "axis": 2, "group": 1}, DType.INT8, "'axis' is 2"),
        ("palette", {"entries": 3, "pack": 1, "axis": -1, "group": 1}, DType.INT8, "'axis' is -1"),
        ("planes", {}, DType.INT8, "int8 is not a float"),
        ("planes", {}, DType.FLOAT4E2M1, "float4e2m1 is not a float of whole bytes"),
        ("planes", {"stored": "float32"}, DType.FLOAT32, "'stored' is 'float32'"),
        ("planes", {"stored": "float16"}, DType.BFLOAT16, "'stored' is 'float16', but must be absent"),
        ("planes", {"stored": "float8e5m2"}, DType.FLOAT32, "'stored' is 'float8e5m2'"),
        ("heads", {"bits": 8}, DType.FLOAT8E5M2, "float8e5m2 is not a float of at least 16 bits"),
        ("heads", {"bits": 8}, DType.INT32, "int32 is not a float"),
        ("heads", {}, DType.FLOAT32, "'bits' is missing"),
        ("heads", {"bits": 7}, DType.FLOAT32, "'bits' is 7, but must be an integer in 8 … 15"),
        ("heads", {"bits": 16}, DType.FLOAT32, "'bits' is 16"),
        ("heads", {"bits": 9, "base": 512}, DType.FLOAT32, "'base' is 512, but must be an integer in 0 … 511"),
        ("heads", {"bits": 9, "axes": 0}, DType.FLOAT32, "'axes' is 0, but must be an integer in 1 … 3"),
        ("heads", {"bits": 9, "axes": 4}, DType.FLOAT32, "'axes' is 4"),
        ("heads", {"bits": 9, "axes": 1, "shift": 8}, DType.FLOAT32, "'shift' is 8"),
        ("heads", {"bits": 9, "shift": 1}, DType.FLOAT32, "'shift' is 1, but must be absent without axes"),
        ("heads", {"bits": 8, "stored": "float32"}, DType.FLOAT32, "'stored' is 'float32'"),
        ("linear", {}, DType.FLOAT64, "element type float64"),
        ("linear", {"scale": "float32", "pack": 1}, DType.FLOAT32, "'code' is missing"),
        ("linear", {"code": "int4"}, DType.FLOAT32, "'code' is 'int4'"),
        ("linear", {"code": "int8", "pack": 1}, DType.FLOAT32, "'scale' is missing"),
        ("linear", {"code": "int8", "scale": "log8", "pack": 1}, DType.FLOAT32, "'base' is missing"),
        ("linear", {"code": "int8", "scale": "log8", "base": 0.0}, DType.FLOAT32, "'base' is 0.0"),
        ("linear", {"code": "int8", "scale": "log8", "base": 1}, DType.FLOAT32, "'base' is 1"),
        ("linear", {"code": "int8", "scale": "log8", "base": 0.1}, DType.FLOAT32, "'base' is 0.1"),
        ("linear", {"code": "int8", "scale": "log8", "base": 1e39}, DType.FLOAT32, "'base' is 1e"),
        ("linear", {"code": "int8", "scale": "log8", "base": float("nan")}, DType.FLOAT32, "'base' is nan"),
        ("linear", {"code": "int8", "scale": "log8", "base": float("inf")}, DType.FLOAT32, "'base' is inf"),
        ("linear", {"code": "int8", "scale": "float32", "pack": 8}, DType.FLOAT32, "'pack' is 8"),
        ("linear", {"code": "int8", "scale": "float32", "block": 2, "pack": 1}, DType.FLOAT32, "'axis' is missing"),
        ("linear", {"code": "int8", "scale": "float32", "axis": 0, "block": 0}, DType.FLOAT32, "'block' is 0"),
        ("linear", {"code": "int8", "scale": "float32", "zero_point": 128}, DType.FLOAT32, "'zero_point' is 128"),
        ("linear", {"code": "uint8", "scale": "float32", "zero_point": -1}, DType.FLOAT32, "'zero_point' is -1"),
        ("linear", {"code": "uint8", "scale": "float32", "zero_points": False}, DType.FLOAT32, "'zero_points'"),
        ("linear", {"code": "uint8", "scale": "float32", "zero_points": 1}, DType.FLOAT32, "'zero_points' is 1"),
        (
            "linear",
            {"code": "int8", "scale": "float32", "zero_points": True, "zero_point": 0, "pack": 1},
            DType.FLOAT32,
            "exclude each other",
        ),
    ],
)  # fmt: skip
def test_bad_params(codec: str, params: dict[str, object], dtype: DType, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        codec_from(codec, params, TensorMeta((4, 5), dtype))


def test_base_without_log_codes_is_not_known() -> None:
    params = {"code": "int8", "scale": "float32", "base": 1.0, "pack": 1}
    with pytest.raises(UnsupportedError, match="'base'"):
        codec_from("linear", params, TensorMeta((4,), DType.FLOAT32))


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(FormatError, match="scalar"):
        codec_from("palette", {"axis": 0, "entries": 1, "group": 1, "pack": 1}, TensorMeta((), DType.INT8))


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(UnsupportedError, match="codec 'huffman' is unknown"):
        codec_from("huffman", {}, TensorMeta((1,), DType.INT8))


def test_codecs_that_no_reader_would_take_are_the_callers_fault() -> None:
    meta = TensorMeta((4,), DType.FLOAT32)
    for codec in (CODECS["linear"](axis=1), CODECS["palette"](17, 2), CODECS["planes"](DType.FLOAT32)):  # type: ignore[call-arg] # the protocol has no constructor
        with pytest.raises(ValueError, match="but must be"):
            pack_params(codec, meta)


@pytest.mark.parametrize("dtype", [*WHOLE, *PACKED])
def test_nothing(dtype: DType) -> None:
    for shape in ((0,), (3, 0), (0, 1 << 40)):
        meta = TensorMeta(shape, dtype)
        codec = CODECS["raw"].from_params({}, meta)
        codec.decoder(meta, (), dtype)(0, 0, [b""], np.empty(0, dtype.storage))

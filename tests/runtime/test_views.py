"""What a graph may want beside values: codes, scales and zero points, in any order of axes, padded and repeated."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conx.codecs import Linear, Planes, pack_params
from conx.codecs.base import Codec, Encoded, TensorMeta
from conx.container.limits import MIN_SEGMENT
from conx.container.reader import Reader
from conx.container.records import CODES, SCALES, SOURCE, ZERO_POINTS, Binding, Graph, Grid, Tensor
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.errors import FormatError
from conx.runtime.decode import decode_all

pytestmark = pytest.mark.usefixtures("no_sync")

Array = npt.NDArray[Any]
Part = tuple[Codec, tuple[Array, ...], Array, tuple[int, ...], dict[str, Any]]
SHAPE = (40, 50)
DRAW = np.random.default_rng(0)


def stored(folder: Path, *tensors: Part) -> Reader:
    """A file with tensors of float32: codec, side arrays, data (flat, in stored order), dims, and other fields."""
    with Writer(folder / "m.conx", None) as writer:
        records = []
        for codec, side, data, shape, fields in tensors:
            order = fields.get("order") or range(len(shape))
            meta = TensorMeta(tuple(shape[i] for i in order), DType.FLOAT32)
            encoded = Encoded(codec, tuple(array.tobytes() for array in side), data)
            codec_id, params = pack_params(codec, meta)
            starts = range(0, meta.count, MIN_SEGMENT)
            segments = (encoded.segment(meta, at, min(at + MIN_SEGMENT, meta.count)) for at in starts)
            streams = writer.add_segments([codec_id + name for name in codec.stream_names(meta)], segments)
            sides = tuple(writer.add_stream(part, "side") for part in encoded.side)
            records.append(
                Tensor(
                    "t",
                    shape,
                    DType.FLOAT32,
                    codec_id,
                    params,
                    sides,
                    streams,
                    bytes(32),
                    segment=MIN_SEGMENT,
                    **fields,
                )
            )
        graph = Graph(SOURCE, (), writer.add_graph(b"graph"), bytes(32))
        features = {"draft-2", *(f"codec:{record.codec}" for record in records)}
        writer.finish(features, [graph], records, {})
    return Reader(folder / "m.conx")


def view(reader: Reader, **fields: Any) -> Array:
    (found,) = decode_all(reader, [Binding(tensor=0, **fields)], 2)
    return found.reshape(fields["shape"]) if found.size == np.prod(fields["shape"]) else found


def coded(folder: Path, codes: Array, order: Sequence[int] | None = None, **settings: Any) -> Reader:
    codec = Linear(**{"axis": 1, **settings})
    turned = codes if order is None else codes.transpose(order)
    if order is not None and codec.axis is not None:
        codec = replace(codec, axis=order.index(codec.axis))
    meta = TensorMeta(turned.shape, DType.FLOAT32)
    count = codec.layout(meta).count
    side: tuple[Array, ...] = (np.arange(1, count + 1, dtype=np.float32),)
    if codec.zero_points:
        side += (np.arange(count, dtype=np.uint8).view(codec.code.storage),)
    fields = {} if order is None else {"order": tuple(order)}
    return stored(folder, (codec, side, np.ascontiguousarray(turned).reshape(-1), codes.shape, fields))


SIGNED = DRAW.integers(-128, 128, SHAPE).astype(np.int8)
SMALL = DRAW.integers(-8, 8, SHAPE).astype(np.int8)


@pytest.mark.parametrize("order", [None, (1, 0)])
@pytest.mark.parametrize("pack", [1, 2])
def test_codes_in_any_order_padded_and_of_either_sign(tmp_path: Path, order: tuple[int, ...] | None, pack: int) -> None:
    with coded(tmp_path, SIGNED, order, pack=pack) as reader:
        plain = view(reader, view=CODES, dtype=DType.INT8, shape=SHAPE)
        turned = view(reader, view=CODES, dtype=DType.UINT8, shape=(50, 3, 16), perm=(1, 0), pad=48)
    np.testing.assert_array_equal(plain.view(np.int8), SIGNED)
    wanted = np.full((50, 48), 128)
    wanted[:, :40] = SIGNED.T.astype(int) + 128
    np.testing.assert_array_equal(turned.reshape(50, 48), wanted)


@pytest.mark.parametrize("order", [None, (1, 0)])
def test_codes_of_four_bits(tmp_path: Path, order: tuple[int, ...] | None) -> None:
    with coded(tmp_path, SMALL, order) as reader:
        (found,) = decode_all(
            reader, [Binding(tensor=0, view=CODES, dtype=DType.UINT4, shape=(50, 44), perm=(1, 0), pad=44)]
        )
        (signed,) = decode_all(reader, [Binding(tensor=0, view=CODES, dtype=DType.INT4, shape=SHAPE)])
    wanted = np.full((50, 44), 8)
    wanted[:, :40] = SMALL.T.astype(int) + 8
    flat = wanted.reshape(-1)
    np.testing.assert_array_equal(found.view(np.uint8), flat[0::2] | flat[1::2] << 4)
    flat = SMALL.reshape(-1).astype(int) & 15
    np.testing.assert_array_equal(signed.view(np.uint8), flat[0::2] | flat[1::2] << 4)


def test_codes_that_do_not_fit_four_bits(tmp_path: Path) -> None:
    with (
        coded(tmp_path, SIGNED) as reader,
        pytest.raises(FormatError, match=r"tensor 't', segment 0: .* in 4 bits|tensor 't': .* in 4 bits"),
    ):
        view(reader, view=CODES, dtype=DType.UINT4, shape=SHAPE)


@pytest.mark.parametrize("order", [None, (1, 0)])
@pytest.mark.parametrize(
    ("settings", "dims"),
    [
        ({"axis": None}, (1, 1)),
        ({"axis": 1}, (1, 50)),
        ({"axis": 0, "block": 16}, (3, 50)),
        ({"axis": 1, "block": 50}, (40, 1)),
    ],
    ids=str,
)
def test_scales(tmp_path: Path, order: tuple[int, ...] | None, settings: dict[str, Any], dims: tuple[int, int]) -> None:
    with coded(tmp_path, SIGNED, order, **settings) as reader:
        count = dims[0] * dims[1]
        found = view(reader, view=SCALES, dtype=DType.FLOAT32, shape=(count * 2,), perm=(1, 0), repeat=2)
        half = view(reader, view=SCALES, dtype=DType.FLOAT16, shape=dims)
    wanted = np.arange(1, count + 1, dtype=np.float32).reshape(dims if order is None else dims[::-1])
    wanted = wanted if order is None else wanted.T
    np.testing.assert_array_equal(found, np.repeat(wanted.T.reshape(-1), 2))
    np.testing.assert_array_equal(half.view(np.float16), wanted)


def test_zero_points(tmp_path: Path) -> None:
    with coded(tmp_path, SIGNED.view(np.uint8), code=DType.UINT8, zero_points=True) as reader:
        found = view(reader, view=ZERO_POINTS, dtype=DType.UINT8, shape=(100,), repeat=2)
        signed = view(reader, view=ZERO_POINTS, dtype=DType.INT8, shape=(50,))
    np.testing.assert_array_equal(found, np.repeat(np.arange(50), 2))
    np.testing.assert_array_equal(signed.view(np.int8), np.arange(50) - 128)


def test_one_zero_point_for_all(tmp_path: Path) -> None:
    with coded(tmp_path, SIGNED, zero_point=-3) as reader:
        found = view(reader, view=ZERO_POINTS, dtype=DType.UINT8, shape=(1, 50))
    np.testing.assert_array_equal(found, np.full((1, 50), 125))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("order", [None, (1, 0)])
def test_codes_made_of_values(tmp_path: Path, axis: int, order: tuple[int, ...] | None) -> None:
    values = DRAW.standard_normal(SHAPE).astype(np.float32)
    values[3] = 0
    scales = (np.abs(values).max(axis=1 - axis) / 127).astype(np.float32)
    flat = np.ascontiguousarray(values if order is None else values.T).reshape(-1)
    fields = {} if order is None else {"order": order}
    tensors: tuple[Part, ...] = ((Planes(), (), flat, SHAPE, fields), (Planes(), (), scales, scales.shape, {}))
    with stored(tmp_path, *tensors) as reader:
        found = view(reader, view=CODES, dtype=DType.UINT8, shape=(50, 40), perm=(1, 0), grid=Grid(1, axis))
        repeated = decode_all(reader, [Binding(tensor=1, shape=(scales.size, 3), repeat=3)])[0]
    along = scales[:, None] if axis == 0 else scales[None, :]
    with np.errstate(invalid="ignore"):
        wanted = np.where(along == 0, 0, np.rint(values / np.where(along == 0, 1, along)))
    np.testing.assert_array_equal(found, wanted.T + 128)
    np.testing.assert_array_equal(repeated, np.repeat(scales, 3))


def test_what_the_codec_does_not_have(tmp_path: Path) -> None:
    values = DRAW.standard_normal(SHAPE).astype(np.float32)
    with stored(tmp_path, (Planes(), (), values.reshape(-1), SHAPE, {})) as reader:
        for kind, dtype in (
            (CODES, DType.INT8),
            (SCALES, DType.FLOAT32),
            (ZERO_POINTS, DType.INT8),
            (CODES, DType.INT4),
        ):
            with pytest.raises(
                FormatError, match=r"tensor 't': a graph wants its .*, which the codec 'planes' does not"
            ):
                view(reader, view=kind, dtype=dtype, shape=SHAPE)


def test_another_number_of_scales_than_there_are(tmp_path: Path) -> None:
    with coded(tmp_path, SIGNED) as reader, pytest.raises(FormatError, match="wants 7 scales, there are 50, 1 times"):
        view(reader, view=SCALES, dtype=DType.FLOAT32, shape=(7,))


def test_scales_of_a_grid_that_are_not_finite(tmp_path: Path) -> None:
    values = DRAW.standard_normal(SHAPE).astype(np.float32)
    scales = np.full(50, np.inf, np.float32)
    tensors: tuple[Part, ...] = ((Planes(), (), values.reshape(-1), SHAPE, {}), (Planes(), (), scales, (50,), {}))
    with stored(tmp_path, *tensors) as reader, pytest.raises(FormatError, match="a scale of its grid is not finite"):
        view(reader, view=CODES, dtype=DType.INT8, shape=SHAPE, grid=Grid(1, 1))

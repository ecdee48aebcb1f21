"""Tensors go into the file: their streams to the writer, their records to the index."""

import hashlib

from conx.codecs import pack_params
from conx.codecs.base import Encoded, TensorMeta
from conx.container.limits import SEGMENT
from conx.container.records import Tensor
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.packing.axes import Axes
from conx.packing.choose import choose
from conx.packing.codes import Codes
from conx.quantize.rules import Rule

__all__ = ["write_scales", "write_tensor"]


def write_tensor(writer: Writer, name: str, meta: TensorMeta, encoded: Encoded, sha256: bytes) -> Tensor:
    """Write a tensor's streams.

    Args:
        writer: takes them.
        name: for people.
        meta: dims, which are in stored order, and type.
        encoded: the tensor, coded.
        sha256: of the bytes that it decodes to.
    """
    codec_id, params = pack_params(encoded.codec, meta)
    names = [f"{codec_id}.{stream}" for stream in encoded.codec.stream_names(meta)]
    side = tuple(writer.add_stream(data, f"{codec_id}.side{i}") for i, data in enumerate(encoded.side))
    starts = range(0, meta.count, SEGMENT)
    segments = (encoded.segment(meta, start, min(start + SEGMENT, meta.count)) for start in starts)
    streams = writer.add_segments(names, segments) if names else ()
    return Tensor(name, meta.shape, meta.dtype, codec_id, params, side, streams, sha256)


def write_scales(writer: Writer, tensors: list[Tensor], codes: Codes) -> dict[tuple[int, int], int]:
    """Write the scales of the grids on which codes are made while loading, and append them to the tensors.

    Returns:
        Their places among the tensors, by the number of the stored weight and the axis.
    """
    places = {}
    for number, one in codes.coded.items():
        for axis, scales in one.grids.items():
            choice = choose(scales, scales.shape, DType.FLOAT32, Rule(lossless=True), Axes((), False))
            digest = hashlib.sha256(scales.tobytes()).digest()
            places[number, axis] = len(tensors)
            name = f"{codes.weights[number].name}/int8 scales"
            meta = TensorMeta(scales.shape, DType.FLOAT32)
            tensors.append(write_tensor(writer, name, meta, choice.encoded, digest))
    return places

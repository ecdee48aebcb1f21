"""Tensors go into the file: their streams to the writer, their records to the index."""

import hashlib
import logging

import numpy as np
import numpy.typing as npt

from conx.codecs import pack_params
from conx.codecs.base import Encoded, TensorMeta
from conx.container.limits import SEGMENT
from conx.container.records import Tensor
from conx.container.writer import Writer
from conx.dtypes import DType
from conx.graph.dequantize import FloatWeight
from conx.packing.axes import Axes
from conx.packing.choose import choose
from conx.packing.floats import FREE_EXTRA, MOST_EXTRA, FloatModel
from conx.packing.store import Store, Stored
from conx.quantize.rules import Rule

__all__ = ["write_exact", "write_extras", "write_scales", "write_tensor"]

log = logging.getLogger("conx")


def write_tensor(
    writer: Writer,
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    encoded: Encoded,
    sha256: bytes,
    order: tuple[int, ...] | None = None,
) -> Tensor:
    """Write a tensor's streams.

    Args:
        writer: takes them.
        name: for people.
        shape: dims.
        dtype: element type.
        encoded: the tensor, coded, its axes in stored order.
        sha256: of the bytes that it decodes to.
        order: the axes of `shape` in stored order; None: as they are.
    """
    meta = TensorMeta(shape if order is None else tuple(shape[axis] for axis in order), dtype)
    codec_id, params = pack_params(encoded.codec, meta)
    names = [f"{codec_id}.{stream}" for stream in encoded.codec.stream_names(meta)]
    side = tuple(writer.add_stream(data, f"{codec_id}.side{i}") for i, data in enumerate(encoded.side))
    starts = range(0, meta.count, SEGMENT)
    segments = (encoded.segment(meta, start, min(start + SEGMENT, meta.count)) for start in starts)
    streams = writer.add_segments(names, segments) if names else ()
    return Tensor(name, shape, dtype, codec_id, params, side, streams, sha256, order)


def write_scales(writer: Writer, tensors: list[Tensor], store: Store) -> None:
    """Write the scales of the grids on which codes are made while loading, append them to the tensors, note them."""
    for number, stored in store.tensors.items():
        for axis, scales in stored.grids.items():
            stored.scales[axis] = len(tensors)
            tensors.append(write_exact(writer, f"{store.weights[number].name}/int8 scales", scales))


def write_extras(writer: Writer, tensors: list[Tensor], store: Store, floats: FloatModel) -> FloatModel:
    """Write the values of float weights that cannot be had from stored codes, if they are few.

    Returns:
        The model that float graphs are made of: the source itself where these values are too many.
    """
    missing = [w for w in floats.model.weights if isinstance(w, FloatWeight) and not store.holds(w.number)]
    total = sum(w.nbytes for w in store.weights if not isinstance(w, FloatWeight))
    if sum(w.nbytes for w in missing) > MOST_EXTRA * total + FREE_EXTRA:
        log.warning(
            "%s: no float graphs: the values of %r and %d others cannot be had from its codes",
            floats.model.path, missing[0].name, len(missing) - 1,
        )  # fmt: skip
        return floats.without()
    for weight in missing:
        dtype = weight.dtype
        choice = choose(weight.read(), weight.shape, dtype, Rule(lossless=True), Axes((), False))
        digest = hashlib.sha256(weight.read().tobytes()).digest()
        store.add(weight.number, Stored(len(tensors), weight.shape, dtype, choice.encoded.codec))
        tensors.append(write_tensor(writer, f"{weight.name}/values", weight.shape, dtype, choice.encoded, digest))
    return floats


def write_exact(writer: Writer, name: str, values: npt.NDArray[np.float32]) -> Tensor:
    """Write float32 values of any dims bit for bit."""
    values = np.ascontiguousarray(values)
    choice = choose(values.reshape(-1), values.shape, DType.FLOAT32, Rule(lossless=True), Axes((), False))
    digest = hashlib.sha256(values.tobytes()).digest()
    return write_tensor(writer, name, values.shape, DType.FLOAT32, choice.encoded, digest)

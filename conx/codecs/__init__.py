"""Coding of one tensor: an id, parameters, encode, decode. One module per codec; its page is spec/codecs/<id>.md."""

from collections.abc import Mapping
from typing import Any

from conx.codecs.base import Array, Buffer, Codec, Decoder, Encoded, TensorMeta
from conx.codecs.fill import Fill
from conx.codecs.heads import Heads
from conx.codecs.linear import Linear
from conx.codecs.palette import Palette
from conx.codecs.planes import Planes
from conx.codecs.raw import Raw
from conx.errors import ConxError, UnsupportedError

__all__ = [
    "CODECS",
    "Array",
    "Buffer",
    "Codec",
    "Decoder",
    "Encoded",
    "Fill",
    "Heads",
    "Linear",
    "Palette",
    "Planes",
    "Raw",
    "TensorMeta",
    "codec_from",
    "pack_params",
]

CODECS: dict[str, type[Codec]] = {
    "fill": Fill,
    "heads": Heads,
    "linear": Linear,
    "palette": Palette,
    "planes": Planes,
    "raw": Raw,
}


def codec_from(codec_id: str, params: Mapping[str, Any], meta: TensorMeta) -> Codec:
    """The codec that a file asks for.

    Args:
        codec_id: its id.
        params: its parameters, as they were read.
        meta: dims in stored order and element type of the tensor.

    Raises:
        UnsupportedError: the codec or one of the parameters is unknown.
        FormatError: a parameter is missing or wrong, or the codec cannot hold such a tensor.
    """
    codec = CODECS.get(codec_id)
    if codec is None:
        raise UnsupportedError(f"codec '{codec_id}' is unknown to this version of conx, which has {', '.join(CODECS)}")
    return codec.from_params(params, meta)


def pack_params(codec: Codec, meta: TensorMeta) -> tuple[str, dict[str, Any]]:
    """Id and parameters as they go into a file.

    Raises:
        ValueError: the codec was made with parameters that no reader would take.
    """
    params = codec.to_params()
    try:
        same = codec_from(codec.id, params, meta) == codec
    except ConxError as error:
        raise ValueError(str(error)) from error
    if not same:
        raise ValueError(f"{codec} does not survive its own parameters {params}")
    return codec.id, params

"""Codes on a uniform grid (spec/codecs/linear.md): value = float32(code - zero_point) * float32(scale)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from conx.codecs.base import Array, Buffer, Decoder, TensorMeta, as_array
from conx.codecs.checks import Params, byte_streams, check_out, check_side
from conx.codecs.convert import BLOCK, TARGETS, check_target, convert, float32_to
from conx.codecs.layout import Layout
from conx.codecs.symbols import PACKS, pack_codes, stream_names, stream_sizes, unpack_codes
from conx.dtypes import DType
from conx.errors import FormatError

__all__ = ["Linear", "linear_writer", "log8_scales", "pack_codes", "unpack_codes"]

_CODES = {DType.INT8: (-128, 127), DType.UINT8: (0, 255)}

# 2^(-i/8) rounded to float32, as the specification lists them.
_OCTAVE = np.array(
    [0x3F800000, 0x3F6AC0C7, 0x3F5744FD, 0x3F45672A, 0x3F3504F3, 0x3F25FED7, 0x3F1837F0, 0x3F0B95C2], "<u4"
).view("<f4")

_POWER = np.array([2.0**-i for i in range(32)], "<f4")

# Elements with one scale, one after the other, from which on a table of their 256 values pays.
_LONG_RUN = 4096

# float32 values below these stay finite in the target.
_SAFE = {DType.FLOAT16: 65504.0, DType.BFLOAT16: 3e38}


def log8_scales(base: float, codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The float32 scales of log codes: base · 2^(-code/8), as the format defines its rounding."""
    with np.errstate(under="ignore"):
        scales: npt.NDArray[np.float32] = np.float32(base) * _OCTAVE[codes & 7]
        scales *= _POWER[codes >> 3]
    return scales


@dataclass(frozen=True)
class Linear:
    """Parameters as in the specification; `base` is None for float32 scales and otherwise means log codes.

    The stored data are codes of the type `code` (DType.INT8 or DType.UINT8), one for each element.
    """

    id: ClassVar[str] = "linear"

    code: DType = DType.INT8
    axis: int | None = None
    block: int | None = None
    base: float | None = None
    zero_point: int = 0
    zero_points: bool = False
    center: int = 0
    pack: int = 1

    @classmethod
    def from_params(cls, params: Mapping[str, Any], meta: TensorMeta) -> "Linear":
        """See `Codec.from_params`."""
        if meta.dtype not in TARGETS:
            raise FormatError(f"linear: element type {meta.dtype.label} is not float32, float16 or bfloat16")
        reader = Params(cls.id, params)
        code = DType.INT8 if reader.required_text("code", ("int8", "uint8")) == "int8" else DType.UINT8
        axis = reader.axis(meta)
        block = reader.optional_int("block", 1)
        logarithmic = reader.required_text("scale", ("float32", "log8")) == "log8"
        base = reader.positive_float32("base") if logarithmic else None
        zero_points = reader.flag("zero_points")
        zero_point = reader.optional_int("zero_point", *_CODES[code])
        center = reader.optional_int("center", *_CODES[code])
        pack = reader.pack(PACKS)
        reader.finish()
        if block is not None and axis is None:
            raise FormatError(f"linear: parameter 'block' is {block}, but 'axis' is missing")
        if zero_points and zero_point is not None:
            raise FormatError("linear: parameters 'zero_point' and 'zero_points' exclude each other")
        return cls(code, axis, block, base, zero_point or 0, zero_points, center or 0, pack)

    def to_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"code": self.code.label, "pack": self.pack}
        params["scale"] = "float32" if self.base is None else "log8"
        optional = {"axis": self.axis, "base": self.base, "block": self.block}
        params |= {name: value for name, value in optional.items() if value is not None}
        nonzero = {"center": self.center, "zero_point": self.zero_point, "zero_points": self.zero_points}
        return params | {name: value for name, value in nonzero.items() if value}

    def layout(self, meta: TensorMeta) -> Layout:
        """Which scale and zero point belong to which element."""
        if self.axis is None:
            return Layout.whole(meta.shape)
        return Layout.along(meta.shape, self.axis, self.block or 1, shared=self.block is None)

    def side_sizes(self, meta: TensorMeta) -> tuple[int, ...]:
        count = self.layout(meta).count
        scales = count * 4 if self.base is None else count
        return (scales, count) if self.zero_points else (scales,)

    def stream_names(self, meta: TensorMeta) -> tuple[str, ...]:
        return stream_names(self.pack)

    def stream_sizes(self, meta: TensorMeta, count: int) -> tuple[int | None, ...]:
        return stream_sizes(count, self.pack)

    def make_side(self, scales: Array, zero_points: Array | None = None) -> tuple[bytes, ...]:
        """The side streams.

        Args:
            scales: float32, or log codes (uint8) if `base` is given; any dims, row-major.
            zero_points: of the type of the codes, if `zero_points` is set.
        """
        if scales.dtype != (np.float32 if self.base is None else np.uint8):
            raise ValueError(f"scales are {scales.dtype}, but base is {self.base}")
        if not self.zero_points:
            if zero_points is not None:
                raise ValueError("zero points given to a codec that stores none")
            return (scales.tobytes(),)
        if zero_points is None or zero_points.dtype != self.code.storage or zero_points.size != scales.size:
            raise ValueError(f"needs {scales.size} zero points of type {self.code.label}")
        return (scales.tobytes(), zero_points.tobytes())

    def scales_from(self, side: Sequence[Buffer]) -> npt.NDArray[np.float32]:
        """The float32 scales, flat. Raises FormatError where one is not finite."""
        if self.base is not None:
            return log8_scales(self.base, as_array(side[0], "u1"))
        scales = as_array(side[0], "<f4")
        if not np.isfinite(scales).all():
            raise FormatError(f"linear: scale {int(np.flatnonzero(~np.isfinite(scales))[0])} is not finite")
        return scales

    def zero_points_from(self, side: Sequence[Buffer]) -> Array:
        """The zero points, of the type of the codes: one for each scale, or just one."""
        if self.zero_points:
            return as_array(side[1], self.code.storage)
        return np.array([self.zero_point], self.code.storage)

    def encode(self, data: Array, meta: TensorMeta) -> list[bytes]:
        if data.dtype != self.code.storage:
            raise ValueError(f"codes are {data.dtype}, not {self.code.label}")
        return pack_codes(data, self.center, self.pack)

    def decode_codes(self, start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
        """A segment's codes: as a `Decoder` does it, but with `out` of the type of the codes."""
        check_out(out, count, self.code)
        unpack_codes(streams, count, self.center, self.pack, out)

    def decoder(self, meta: TensorMeta, side: Sequence[Buffer], target: DType) -> Decoder:
        """See `Codec.decoder`."""
        check_target(meta.dtype, target)
        check_side(self.id, side, self.side_sizes(meta))
        scales, zero_points = self.scales_from(side), self.zero_points_from(side)
        with np.errstate(all="ignore"):
            write = linear_writer(self.layout(meta), scales, zero_points, target)

        def decode(start: int, count: int, streams: Sequence[Buffer], out: Array) -> None:
            check_out(out, count, target)
            if self.pack == 1 and self.center == 0:  # they lie there as they are
                (codes,) = byte_streams(self.id, stream_names(1), streams, (count,))
            else:
                codes = np.empty(count, np.uint8)
                unpack_codes(streams, count, self.center, self.pack, codes)
            with np.errstate(all="ignore"):
                write(codes.view(self.code.storage), start, out)

        return decode


def linear_writer(
    layout: Layout, scales: Array, zero_points: Array, target: DType
) -> Callable[[Array, int, Array], None]:
    """A function of codes, the place of the first of them, and `out`, which it fills with their values in `target`.

    The caller silences floating-point warnings, here and there.

    Args:
        layout: which scale belongs to which code.
        scales: float32, flat.
        zero_points: int8 or uint8, as the codes: one for each scale, or one.
        target: float32, float16 or bfloat16.
    """
    in_float32 = _float32_writer(layout, scales, zero_points)
    if target is DType.FLOAT32:
        return in_float32
    if target is DType.FLOAT16 and layout.count == 1:
        singles, table = np.empty(256, "<f4"), np.empty(256, "<f2")
        every = np.arange(256, dtype=np.uint8).view(zero_points.dtype)
        _float32_writer(Layout.whole(every.shape), scales, zero_points)(every, 0, singles)
        convert(singles, DType.FLOAT32, target, table)

        def look_up(codes: Array, _start: int, out: Array) -> None:
            np.take(table, codes.view(np.uint8), out=out, mode="clip")

        return look_up
    if target is DType.FLOAT16 and layout.run >= _LONG_RUN:
        return _table_writer(layout, scales, zero_points)
    bounded = 255 * float(np.abs(scales).max(initial=0)) < _SAFE[target]

    def write(codes: Array, start: int, out: Array) -> None:
        size = min(codes.size, BLOCK)
        singles = np.empty(size, "<f4")
        narrow = float32_to(target, size, bounded=bounded)
        for at in range(0, codes.size, BLOCK):
            part = out[at : at + BLOCK]
            in_float32(codes[at : at + BLOCK], start + at, singles[: part.size])
            narrow(singles[: part.size], part)

    return write


def _table_writer(layout: Layout, scales: Array, zero_points: Array) -> Callable[[Array, int, Array], None]:
    """To float16 by a table for each run of elements with one scale: for long runs quicker than converting each."""
    every = np.arange(256, dtype=np.uint8).view(zero_points.dtype).astype("<f4")
    offsets = np.broadcast_to(zero_points.astype("<f4"), scales.shape)

    def write(codes: Array, start: int, out: Array) -> None:
        runs = list(layout.runs(start, codes.size))
        params = [param for param, _ in runs]
        singles = (every - offsets[params, None]) * scales[params, None]
        tables = np.empty(singles.shape, "<f2")
        convert(singles.reshape(-1), DType.FLOAT32, DType.FLOAT16, tables.reshape(-1))
        indices, at = codes.view(np.uint8), 0
        for (_, size), table in zip(runs, tables, strict=True):
            np.take(table, indices[at : at + size], out=out[at : at + size], mode="clip")
            at += size

    return write


def _float32_writer(layout: Layout, scales: Array, zero_points: Array) -> Callable[[Array, int, Array], None]:
    # Integers of this size are exact in float32, so subtracting there gives what subtracting integers would.
    offsets = zero_points.astype("<f4")
    scaling = layout.spread(scales)
    shifting = layout.spread(offsets) if offsets.size == layout.count else None
    shifted = bool(offsets.any())

    def write(codes: Array, start: int, out: Array) -> None:
        # Copying first is quicker than letting the multiplication convert, which it does in small buffers.
        np.copyto(out, codes)
        if shifted and shifting is None:
            np.subtract(out, offsets, out=out)
        elif shifted and shifting is not None:
            for piece in shifting.pieces(start, out.size):
                np.subtract(piece.of(out), piece.params, out=piece.of(out))
        for piece in scaling.pieces(start, out.size):
            np.multiply(piece.of(out), piece.params, out=piece.of(out))

    return write

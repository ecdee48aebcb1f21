"""Float models of the corpus, quantized in the ways of onnxruntime's own tools."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import version_converter
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization import matmul_nbits_quantizer as nbits

from benchmarks.corpus import fetch
from benchmarks.feeds import Feed
from benchmarks.inputs import feeds

__all__ = ["WAYS", "Quantize", "messages", "quietly", "renamed"]

_CALIBRATION = 16
_STATIC_OPSET = 13  # from which DequantizeLinear has an axis

Quantize = Callable[[str, Path], None]
"""Quantizes the model of a key into a file."""


class _Inputs(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self, given: Sequence[Feed]) -> None:
        self.given = iter(given)

    def get_next(self) -> Any:
        return next(self.given, None)


def _dynamic(key: str, target: Path) -> None:
    quantize_dynamic(fetch(key), target, per_channel=True, weight_type=QuantType.QInt8)


def _static(form: QuantFormat, key: str, target: Path) -> None:
    source = fetch(key)
    model = onnx.load(source, load_external_data=False)
    if next(entry.version for entry in model.opset_import if not entry.domain) < _STATIC_OPSET:
        source = target.with_name(f"{key}-{_STATIC_OPSET}.onnx")
        onnx.save(version_converter.convert_version(onnx.load(fetch(key)), _STATIC_OPSET), source)
    types = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
    inputs = _Inputs(feeds(key, _CALIBRATION))
    quantize_static(str(source), str(target), inputs, quant_format=form, per_channel=True, **types)


def _blocks(bits: int, key: str, target: Path) -> None:
    config = nbits.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=bits)
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(fetch(key)), algo_config=config)
    quantizer.process()
    onnx.save(quantizer.model.model, target)


WAYS: dict[str, Quantize] = {
    "dynamic": _dynamic,
    "QDQ": partial(_static, QuantFormat.QDQ),
    "QOperator": partial(_static, QuantFormat.QOperator),
    "MatMulNBits 8": partial(_blocks, 8),
    "MatMulNBits 4": partial(_blocks, 4),
}


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """All initializers of the main graph, of which these models have all, under names that tell nothing."""
    new = {tensor.name: f"t{number}" for number, tensor in enumerate(model.graph.initializer)}
    for tensor in model.graph.initializer:
        tensor.name = new[tensor.name]
    for node in messages(model.graph, onnx.NodeProto):
        node.input[:] = [new.get(name, name) for name in node.input]
    return model


def quietly(work: Callable[[], object]) -> None:
    """Without the quantizers' advice and progress."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            work()
    finally:
        logging.disable(logging.NOTSET)


def messages(message: Message, kind: type[Any]) -> Iterator[Any]:
    """All messages of a type in a model: main graph, subgraphs, attributes, functions."""
    for _, value in message.ListFields():
        for each in [value] if isinstance(value, Message | bytes | str | int | float) else value:
            if isinstance(each, kind):
                yield each
            if isinstance(each, Message):
                yield from messages(each, kind)

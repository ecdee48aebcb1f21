"""Quantize small models with onnxruntime's own tools, undo it, and compare."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

from conx.graph.dequantize import Dequantized, FloatWeight, dequantized
from conx.graph.dequantize.files import complete, opened
from conx.graph.dequantize.operators import is_quantized_type
from conx.graph.lift import nested_graphs, subgraphs
from tests.builders import CPU

__all__ = [
    "Array",
    "dynamic",
    "exact",
    "float_outputs",
    "near",
    "operators",
    "outputs",
    "quantized_left",
    "static",
    "undo",
]

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    def __init__(self, feeds: Sequence[Feeds]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def dynamic(model: onnx.ModelProto, folder: Path, **options: Any) -> onnx.ModelProto:
    """The model after quantize_dynamic."""
    return _quantized(lambda source, target: quantize_dynamic(source, target, **options), model, folder)


def static(
    model: onnx.ModelProto, folder: Path, feeds: Sequence[Feeds], form: str = "QDQ", **options: Any
) -> onnx.ModelProto:
    """The model after quantize_static."""
    options.setdefault("weight_type", QuantType.QInt8)
    options.setdefault("activation_type", QuantType.QUInt8)

    def run(source: str, target: str) -> None:
        quantize_static(source, target, _Reader(feeds), quant_format=QuantFormat[form], **options)

    return _quantized(run, model, folder)


def _quantized(run: Any, model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    source, target = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(model, source)
    logging.disable(logging.WARNING)
    try:
        run(str(source), str(target))
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(target)


def undo(model: onnx.ModelProto, keep_activations: bool = False) -> tuple[onnx.ModelProto, Dequantized]:
    """The dequantized model with its data, checked, and what else the pass answers."""
    before = model.SerializeToString(deterministic=True)
    with opened(model) as source:
        skeleton = source.proto.SerializeToString(deterministic=True)
        made = dequantized(source, keep_activations)
        assert source.proto.SerializeToString(deterministic=True) == skeleton
        whole = complete(made)
        for number, weight in enumerate(made.weights):
            assert weight.number == number
        # So that weights can be read when the file is gone:
        source.weights[:] = [replace(w, file=None, offset=0, data=w.read().tobytes()) for w in source.weights]
    assert model.SerializeToString(deterministic=True) == before
    for side in ("input", "output"):
        assert list(getattr(whole.graph, side)) == list(getattr(model.graph, side))
    contrib = any(op.startswith("com.microsoft.") for op in operators(whole))
    onnx.checker.check_model(whole, full_check=not contrib)
    return whole, made


def operators(model: onnx.ModelProto) -> list[str]:
    """Operators in order, those of subgraphs and functions too."""

    def of(nodes: Any) -> Iterator[str]:
        for node in nodes:
            yield f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            for graph in subgraphs(node):
                yield from of(graph.node)

    return [*of(model.graph.node), *(op for f in model.functions for op in of(f.node))]


def quantized_left(model: onnx.ModelProto) -> list[str]:
    return [op for op in operators(model) if is_quantized_type(op)]


def outputs(model: onnx.ModelProto, feeds: Feeds) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # or DequantizeLinear before MatMul is rounded
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=CPU)
    found: list[Array] = session.run(None, dict(feeds))
    return found


def with_weights(model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
    """The float model with the dequantized weights put in under their names."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for graph in (made.graph, *nested_graphs(made.graph)):
        for tensor in graph.initializer:
            if tensor.name in weights and tuple(tensor.dims) == weights[tensor.name].shape:
                tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return made


def float_outputs(model: onnx.ModelProto, undone: onnx.ModelProto, feeds: Feeds) -> list[Array]:
    """What the float model answers with the weights of the dequantized one."""
    weights = {t.name: numpy_helper.to_array(t) for t in undone.graph.initializer}
    return outputs(with_weights(model, weights), feeds)


def near(got: Sequence[Array], want: Sequence[Array], bound: float = 1e-5) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.abs(a.astype(np.float64) - b).max(initial=0) <= bound * np.abs(b).max(initial=1e-30)


def exact(codes: Array, scale: Array, zero: Array | None = None) -> Array:
    """What the values have to be, by NumPy alone: scale and zero point broadcast against the codes."""
    wide = codes.astype(np.int64) - (0 if zero is None else zero.astype(np.int64))
    return wide.astype(np.float32) * scale.astype(np.float32)


def describes(weight: FloatWeight, codes: Array) -> Array:
    """The values by what a weight says of itself, `codes` being the tensor of its codes."""
    layout = weight.grid.layout(weight.codes_shape)
    flat = codes.astype(np.int64).reshape(layout.outer, layout.length, layout.inner)
    groups = np.arange(layout.length) // layout.block
    shape = (1, layout.blocks, 1) if layout.shared else (layout.outer, layout.blocks, layout.inner)
    zero = 0 if weight.zero_point is None else weight.zero_point.reshape(shape)[:, groups]
    values: Array = (flat - zero).astype(np.float32) * weight.scale.reshape(shape)[:, groups]
    values = values.reshape(weight.codes_shape)
    for how, what in weight.moves:
        values = values.transpose(what) if how == "perm" else values.reshape(what)
    return values

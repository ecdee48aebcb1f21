"""Small models for tests, and the comparison of what they answer.

Models are written in ONNX's own text form, where names that nothing defines are the weights given beside it.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, parser

__all__ = [
    "CPU",
    "as_tensor",
    "external",
    "give",
    "model",
    "normal",
    "one_thread",
    "run",
    "run_plain",
    "same_bits",
    "save",
    "tensors",
    "varint",
]

Array = npt.NDArray[Any]
CPU = ["CPUExecutionProvider"]
HEAD = '<ir_version: 8, opset_import: ["": 17]>'


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Float32 from a normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(scale)


def model(text: str, weights: Mapping[str, Array | TensorProto] | None = None, head: str = HEAD) -> onnx.ModelProto:
    """A model from the text of its graph, with initializers."""
    made = parser.parse_model(f"{head} {text}")
    made.graph.initializer.extend(as_tensor(name, value) for name, value in (weights or {}).items())
    return made


def as_tensor(name: str, value: Array | TensorProto) -> TensorProto:
    """The array as a tensor with raw data."""
    if isinstance(value, TensorProto):
        value.name = name
        return value
    return numpy_helper.from_array(value, name)


def give(graph: onnx.GraphProto, output: str, value: Array | TensorProto) -> None:
    """Put a Constant node before all others."""
    node = helper.make_node("Constant", [], [output], value=as_tensor("", value))
    nodes = [node, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def external(tensor: TensorProto, location: str, offset: int | None = None, length: int | None = None) -> bytes:
    """Make a tensor external, in place; answers its bytes, which the caller puts there."""
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": offset, "length": length}
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return data


def save(made: onnx.ModelProto, path: Path, data: str | None = None) -> Path:
    """Write a model; with `data`, all initializers lie one after the other in a file of that name beside it."""
    if data is not None:
        contents = b""
        for tensor in made.graph.initializer:
            size = len(tensor.raw_data)
            contents += external(tensor, data, len(contents), size)
        (path.parent / data).write_bytes(contents)
    path.write_bytes(made.SerializeToString())
    return path


def tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """All dense tensors of a graph: initializers and attributes, subgraphs included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t
            for sub in (attribute.g, *attribute.graphs):
                yield from tensors(sub)


def one_thread() -> onnxruntime.SessionOptions:
    """Options for small models: no threads, and no words about what tests provoke."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return options


def run_plain(
    source: bytes | Path, feeds: Mapping[str, Any], options: onnxruntime.SessionOptions | None = None
) -> list[Any]:
    """What onnxruntime itself answers."""
    given = os.fspath(source) if isinstance(source, Path) else source
    return run(onnxruntime.InferenceSession(given, options or one_thread(), providers=CPU), feeds)


def run(session: Any, feeds: Mapping[str, Any]) -> list[Any]:
    """All outputs; those of types that NumPy lacks as (type, shape, bytes)."""
    given = {name: _feed(session, name, value) for name, value in feeds.items()}
    try:
        answer: list[Any] = session.run(None, given)
    except RuntimeError as error:
        if "No corresponding Numpy type" not in str(error):
            raise
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        values = {k: v if isinstance(v, onnxruntime.OrtValue) else make(v) for k, v in given.items()}
        return [_bits(value) for value in session.run_with_ort_values(None, values)]
    return answer


def _feed(session: Any, name: str, value: Any) -> Any:
    """The value in a form that onnxruntime takes: types that NumPy lacks as an OrtValue."""
    if not isinstance(value, np.ndarray) or value.dtype.kind in "biufcOSU":
        return value
    number = next(t for t in TYPES if TYPES[t] == _type_of(session, name))
    words = value.view(f"u{value.dtype.itemsize}")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(words, number)


TYPES = {16: "tensor(bfloat16)"} | {
    number: f"tensor({kind})"
    for number, kind in enumerate(("float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"), 17)
}


def _type_of(session: Any, name: str) -> str:
    return next(str(given.type) for given in session.get_inputs() if given.name == name)


def _bits(value: Any) -> tuple[str, list[int], bytes]:
    return value.data_type(), value.shape(), ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())


def same_bits(wanted: Any, got: Any) -> bool:
    """Whether two answers are equal bit for bit: -0 is not 0, but one NaN is as good as another."""
    if isinstance(wanted, np.ndarray) and isinstance(got, np.ndarray):
        if wanted.dtype != got.dtype or wanted.shape != got.shape:
            return False
        if wanted.dtype.kind in "OSU":
            return bool(wanted.tolist() == got.tolist())
        if wanted.tobytes() == got.tobytes():
            return True
        if wanted.dtype.kind not in "fc":
            return False
        number = ~np.isnan(wanted)
        return bool(np.array_equal(number, ~np.isnan(got)) and wanted[number].tobytes() == got[number].tobytes())
    if isinstance(wanted, Sequence) and isinstance(got, Sequence) and not isinstance(wanted, str | bytes):
        return len(wanted) == len(got) and all(map(same_bits, wanted, got))
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return wanted.keys() == got.keys() and all(same_bits(wanted[key], got[key]) for key in wanted)
    return bool(type(wanted) is type(got) and wanted == got)


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])

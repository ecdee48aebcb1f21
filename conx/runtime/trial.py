"""Does the onnxruntime at hand, on this processor, copy a weight into a layout of its own?

Shown by a small model whose weights are overwritten once its session exists. The models are written here as protobuf
messages, field by field, since the loader has no onnx.
"""

from functools import cache
from typing import Any

import numpy as np
import onnxruntime

from conx.runtime.providers import CPU

__all__ = ["USE_BUFFERS", "is_repacked"]

USE_BUFFERS = "session.use_external_initializer_file_buffers_directly"

FLOAT, UINT8 = 1, 2  # TensorProto.DataType
SIDE = 32  # of the float32 matrices
CHANNELS = 16  # of the matrices of codes
PACKED_LEVEL = 4  # the accuracy_level at which onnxruntime repacks codes


def is_repacked(dtype: np.dtype[Any], shape: tuple[int, ...], level: int) -> bool:
    """Whether the weight of a matrix product is copied, so that its buffer may be dropped.

    Args:
        dtype: float32 for MatMul, Gemm and FusedMatMul, uint8 for MatMulNBits of 8 bits.
        shape: its dims; of codes [channels, blocks, block size].
        level: the accuracy_level of MatMulNBits.
    """
    if dtype == np.float32:
        return _repacks_floats()
    return dtype == np.uint8 and level == PACKED_LEVEL and len(shape) == 3 and _repacks_codes(shape[2])


@cache
def _repacks_floats() -> bool:
    """Of y = FusedMatMul(Gemm(MatMul(x, A), B), C), the last transposed."""
    nodes = [_node("MatMul", ["x", "A"], "h"), _node("Gemm", ["h", "B"], "k")]
    nodes.append(_node("FusedMatMul", ["k", "C"], "y", "com.microsoft", {"transB": 1}))
    model = _model(nodes, dict.fromkeys("ABC", (FLOAT, (SIDE, SIDE))), SIDE)
    weights = {name: np.ones((SIDE, SIDE), np.float32) for name in "ABC"}
    return _answer(model, weights, "ABC", SIDE) == SIDE**3


@cache
def _repacks_codes(block: int) -> bool:
    """Of y = MatMulNBits(x, A, B) with such a block size: codes A, scales B."""
    given = {"K": block, "N": CHANNELS, "bits": 8, "block_size": block, "accuracy_level": PACKED_LEVEL}
    nodes = [_node("MatMulNBits", ["x", "A", "B"], "y", "com.microsoft", given)]
    model = _model(nodes, {"A": (UINT8, (CHANNELS, 1, block)), "B": (FLOAT, (CHANNELS, 1))}, block)
    weights = {"A": np.full((CHANNELS, 1, block), 129, np.uint8), "B": np.ones((CHANNELS, 1), np.float32)}
    return abs(_answer(model, weights, "A", block) - block) < 0.1 * block


def _answer(model: bytes, weights: dict[str, Any], spoiled: str, length: int) -> float:
    """What a model makes of ones after the weights named in `spoiled` were overwritten."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    options.add_session_config_entry(USE_BUFFERS, "1")
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(w) for name, w in weights.items()}
    options.add_external_initializers(list(values), list(values.values()))
    session = onnxruntime.InferenceSession(model, options, providers=[CPU])
    for name in spoiled:
        weights[name].view(np.uint8).fill(0xFF)
    (found,) = session.run(None, {"x": np.ones((1, length), np.float32)})
    return float(found[0, 0]) if (found == found[0, 0]).all() else float("nan")


def _model(nodes: list[bytes], weights: dict[str, tuple[int, tuple[int, ...]]], length: int) -> bytes:
    """ModelProto: x [1, length] float32 to y, float32 [1, ...], with external initializers."""
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"g")
    graph += b"".join(_field(5, _stub(name, *kind)) for name, kind in weights.items())
    graph += _field(11, _value("x", (1, length))) + _field(12, _value("y", (1, -1)))
    opsets = [_number(2, 13), _field(1, b"com.microsoft") + _number(2, 1)]
    return _number(1, 8) + _field(7, graph) + b"".join(_field(8, opset) for opset in opsets)


def _node(
    op_type: str, inputs: list[str], output: str, domain: str = "", attributes: dict[str, int] | None = None
) -> bytes:
    message = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, output.encode())
    message += _field(4, op_type.encode())
    for name, value in (attributes or {}).items():
        message += _field(5, _field(1, name.encode()) + _number(3, value) + _number(20, 2))
    return message + _field(7, domain.encode())


def _stub(name: str, kind: int, dims: tuple[int, ...]) -> bytes:
    entry = _field(1, b"location") + _field(2, name.encode())
    message = b"".join(_number(1, dim) for dim in dims) + _number(2, kind) + _field(8, name.encode())
    return message + _field(13, entry) + _number(14, 1)


def _value(name: str, dims: tuple[int, ...]) -> bytes:
    shape = b"".join(_field(1, _number(1, dim) if dim >= 0 else b"") for dim in dims)
    tensor = _number(1, FLOAT) + _field(2, shape)
    return _field(1, name.encode()) + _field(2, _field(1, tensor))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])

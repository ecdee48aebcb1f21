"""Hand decoded weights to onnxruntime.

Two ways, measured on memory (benchmarks/loading.py):
- Files in memory, with the key that makes onnxruntime use our buffers directly: no copy; the buffers must live as long
  as the session.
- OrtValues for weights that the CPU provider repacks (the packer found that only MatMul and Gemm use them): onnxruntime
  makes its own copy in another layout and never looks at ours again, so ours is dropped when the session exists.

With that key onnxruntime copies nothing else, OrtValues included: a weight that is not repacked after all would be read
after it was dropped. So the second way is taken only where nothing hinders repacking, and after a trial has shown
that this onnxruntime on this processor repacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from conx.container.records import External, Tensor

__all__ = ["Handed", "hand_over"]

USE_BUFFERS = "session.use_external_initializer_file_buffers_directly"
NO_REPACKING = "session.disable_prepacking"
CPU = "CPUExecutionProvider"

# ModelProto: ir_version 8, opset 13, y = Gemm(MatMul(x, A), B), x [1, 32], A and B external [32, 32] at locations "A"
# and "B".
TRIAL = bytes.fromhex(
    "08083a89010a110a01780a014112016822064d61744d756c0a0f0a01680a0142120179220447656d6d1201672a1a0820082010014201416a"
    "0d0a086c6f636174696f6e12014170012a1a0820082010014201426a0d0a086c6f636174696f6e12014270015a130a0178120e0a0c0801"
    "12080a0208010a02082062130a0179120e0a0c080112080a0208010a02082042040a00100d"
)


@dataclass
class Handed:
    """Buffers that onnxruntime refers to: `keep` as long as the session lives, `until_open` until it exists."""

    keep: list[Any] = field(default_factory=list)
    until_open: list[Any] = field(default_factory=list)


def hand_over(
    options: onnxruntime.SessionOptions,
    externals: Sequence[External],
    tensors: Sequence[Tensor],
    arrays: Sequence[npt.NDArray[Any]],
    *,
    repacking: bool,
) -> Handed:
    """Put a graph's weights into session options of our own.

    Args:
        options: changed; must not be the caller's object.
        externals: the graph's.
        tensors: the file's.
        arrays: the values of each external, flat.
        repacking: whether the session will run on the CPU provider, with repacking on.
    """
    handed = Handed()
    values: dict[str, Any] = {}
    files: dict[str, npt.NDArray[Any]] = {}
    drop = repacking and repacks()
    for external, array in zip(externals, arrays, strict=True):
        if drop and external.repacked and array.dtype == np.float32 and array.size:
            shape = external.shape_of(tensors[external.tensor])
            values[external.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array.reshape(shape))
            handed.until_open.append(array)
        else:
            files[external.location] = array
            handed.keep.append(array)
    if files:
        options.add_session_config_entry(USE_BUFFERS, "1")
        sizes = [array.nbytes for array in files.values()]
        options.add_external_initializers_from_files_in_memory(list(files), list(files.values()), sizes)
    if values:
        options.add_external_initializers(list(values), list(values.values()))
        handed.until_open += values.values()
    return handed


@cache
def repacks() -> bool:
    """Whether MatMul and Gemm of this onnxruntime on this processor copy their weights into a layout of their own.

    Shown by a small model whose weights are overwritten once the session exists.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry(USE_BUFFERS, "1")
    weights = {name: np.ones((32, 32), np.float32) for name in "AB"}
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(w) for name, w in weights.items()}
    options.add_external_initializers(list(values), list(values.values()))
    session = onnxruntime.InferenceSession(TRIAL, options, providers=[CPU])
    for weight in weights.values():
        weight.fill(np.nan)
    (found,) = session.run(None, {"x": np.ones((1, 32), np.float32)})
    return bool((found == 32.0 * 32.0).all())

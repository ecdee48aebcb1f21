"""Hand decoded weights to onnxruntime.

Two ways, measured on memory (benchmarks/loading.py):
- Files in memory, with the key that makes onnxruntime use our buffers directly: no copy; the buffers must live as long
  as the session.
- OrtValues for weights that the CPU provider repacks (the packer found that only matrix products use them): onnxruntime
  makes its own copy in another layout and never looks at ours again, so ours is dropped when the session exists.

With that key onnxruntime copies nothing else, OrtValues included: a weight that is not repacked after all would be read
after it was dropped. So the second way is taken only where nothing hinders repacking, and after a trial has shown
that this onnxruntime on this processor repacks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import onnxruntime

from conx.container.records import External, Tensor
from conx.runtime.trial import USE_BUFFERS, is_repacked

__all__ = ["NO_REPACKING", "Handed", "hand_over"]

NO_REPACKING = "session.disable_prepacking"


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
    level: int,
) -> Handed:
    """Put a graph's weights into session options of our own.

    Args:
        options: changed; must not be the caller's object.
        externals: the graph's.
        tensors: the file's.
        arrays: the values of each external, flat.
        repacking: whether the session will run on the CPU provider, with repacking on.
        level: the accuracy_level of MatMulNBits.
    """
    handed = Handed()
    values: dict[str, Any] = {}
    files: dict[str, npt.NDArray[Any]] = {}
    for external, array in zip(externals, arrays, strict=True):
        shape = external.shape_of(tensors[external.tensor])
        if repacking and external.repacked and array.size and is_repacked(array.dtype, shape, level):
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

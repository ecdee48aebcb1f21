"""Hand weights that lie on a device to onnxruntime, without a copy.

onnxruntime takes the value of an initializer from the caller by its name (`add_initializer`) and uses it where it lies.
Its optimizers, however, look at the model's own data, which is not there. Two measures keep them from computing with
nothing: the initializer is listed among the graph's inputs, so that it is no constant and nothing is folded; and its
external location is an empty file that exists, so that any attempt to read it fails loudly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from conx.container.records import VALUES, External, Tensor
from conx.dtypes import DType
from conx.runtime.dlpack import ort_value_at
from conx.runtime.folder import PrivateFolder
from conx.runtime.message import PRODUCTS, as_inputs, only_read_by

__all__ = ["LARGE", "Injection", "candidates", "copyable", "give_copies", "give_values"]

LARGE = 1 << 18  # bytes; smaller weights are copied, and stay constants that onnxruntime may fuse

FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Injection:
    """A weight on a device: where it lies, and what keeps it there. It is in row-major order, in type `dtype`."""

    external: External
    dtype: DType
    shape: tuple[int, ...]
    address: int
    owner: Any


def candidates(model: bytes, externals: Sequence[External], tensors: Sequence[Tensor]) -> list[External]:
    """The externals that can be injected: large matrices that only products and Gather of the main graph read.

    All others are better off as constants, which onnxruntime may fold, fuse and lay out anew.
    """
    large = {
        external.name: external
        for external in externals
        if external.view == VALUES
        and external.dtype_of(tensors[external.tensor]) in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
        and len(external.shape_of(tensors[external.tensor])) == 2
        and external.nbytes_of(tensors[external.tensor]) >= LARGE
    }
    found = only_read_by(model, PRODUCTS, large)
    return [external for name, external in large.items() if name in found]


def give_values(
    options: onnxruntime.SessionOptions,
    injections: Sequence[Injection],
    folder: PrivateFolder,
    kind: int,
    number: int,
) -> tuple[bytes, list[Any]]:
    """Put weights on a device into session options of our own.

    Args:
        options: changed; must not be the caller's object.
        injections: the weights; their owners must live as long as the session.
        folder: gets an empty file for each of them; may go when the session exists.
        kind: of the device, as in `conx.runtime.dlpack`.
        number: the device's.

    Returns:
        What to append to the graph's message, and what must live until the session exists.
    """
    options.add_session_config_entry(FOLDER, str(folder.path))
    values = []
    for each in injections:
        (folder.path / each.external.location).touch(exist_ok=False)
        values.append(ort_value_at(each.address, each.dtype, each.shape, kind, number))
        options.add_initializer(each.external.name, values[-1])
    return as_inputs((each.external.name, each.dtype, each.shape) for each in injections), values


def give_copies(
    options: onnxruntime.SessionOptions,
    externals: Sequence[External],
    tensors: Sequence[Tensor],
    arrays: Sequence[npt.NDArray[Any]],
) -> list[Any]:
    """Hand over weights of the host for onnxruntime to copy; what is returned must live until the session exists."""
    values = {
        external.name: _ort_value(array, external.dtype_of(tensors[external.tensor]), shape)
        for external, array in zip(externals, arrays, strict=True)
        for shape in [external.shape_of(tensors[external.tensor])]
    }
    if values:
        options.add_external_initializers(list(values), list(values.values()))
    return [*values.values(), *arrays]


def copyable(external: External, tensor: Tensor) -> bool:
    """Whether `give_copies` can hand it over: not types smaller than a byte."""
    return external.dtype_of(tensor).bits >= 8


def _ort_value(array: npt.NDArray[Any], dtype: DType, shape: Sequence[int]) -> onnxruntime.OrtValue:
    shaped = array.reshape(shape)
    if dtype is DType.BOOL:
        return onnxruntime.OrtValue.ortvalue_from_numpy(shaped.view(np.bool_))
    if dtype.storage.name == dtype.label:
        return onnxruntime.OrtValue.ortvalue_from_numpy(shaped)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(shaped, dtype.number)

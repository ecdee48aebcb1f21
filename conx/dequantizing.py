"""`conx.dequantize`: a quantized ONNX model as a float model."""

import os
from pathlib import Path
from typing import Any

from conx.graph.dequantize import Report, dequantized
from conx.graph.dequantize.files import complete, opened, write

__all__ = ["dequantize", "dequantize_file"]


def dequantize(model: Any, *, keep_activations: bool = False) -> Any:
    """Undo the quantization of an ONNX model, in whatever way it was quantized.

    Weights are exactly those that the quantized model computes with: `(code - zero_point) * scale`, rounded once to the
    type in which it is multiplied. The quantization of activations is dropped, and with it its rounding; what it
    clipped away as a Relu or a Clip to 0 … 6 becomes one again. Inputs and outputs keep their names and types. What
    cannot be undone stays; `conx dequantize` prints what and why.

    Args:
        model: an onnx.ModelProto with its data, or the path of a .onnx file. It is not changed.
        keep_activations: leave pairs of QuantizeLinear and DequantizeLinear on activations where they are.

    Returns:
        An onnx.ModelProto.

    Raises:
        ModelError: the model cannot be read, or its external data is not loaded.
        UnsupportedError: the float model is larger than a ModelProto can be.
    """
    with opened(model) as source:
        return complete(dequantized(source, keep_activations))


def dequantize_file(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, keep_activations: bool = False
) -> Report:
    """Likewise, from file to file, of any size: above 2 GB with a data file beside the output.

    Args:
        path: the .onnx file.
        output: path of the float model.
        keep_activations: see `dequantize`.

    Returns:
        What was undone, and what stays and why.

    Raises:
        ModelError: the model cannot be read.
        ValueError: the output is the model itself.
    """
    target = Path(output)
    if target.exists() and target.samefile(path):
        raise ValueError(f"{target}: is the model itself; name another output")
    with opened(path) as source:
        made = dequantized(source, keep_activations)
        write(made, target)
    return made.report

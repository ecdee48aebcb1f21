"""The end of packing: the file's outputs against the model's, at each precision, on inputs made for it."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conx.container.reader import Reader
from conx.errors import ConxError
from conx.graph.facts import computes_in_floats
from conx.graph.read import SourceModel
from conx.verification import VerifyReport, verify

__all__ = ["measure_outputs", "passed", "to_metadata"]

log = logging.getLogger("conx")

MEASURED_BELOW = (
    1 << 29
)  # bytes of weights: sessions hold them, and packing must not need memory for all of a large model
SAMPLES = 2
SECONDS = 60  # for a run
ADDED = 0.005  # what float16 may add to the error of float32 with the same weights, and still be chosen by itself
MOST = 0.03  # error of the float16 graph, every rounding counted (a CPU leaves most of them out)
DIGITS = 2  # that are kept: more would depend on the processor


def measure_outputs(path: Path, source: SourceModel, inputs: Any = None) -> tuple[VerifyReport | None, str]:
    """Run the packed file and the model on inputs, or on generated ones.

    Returns:
        What was found, or None and why nothing was.
    """
    nbytes = sum(weight.nbytes for weight in source.weights)
    if nbytes > MEASURED_BELOW:
        return None, f"{nbytes >> 20} MiB of weights are not run while packing; use `conx verify`"
    with Reader(path) as reader:
        graphs = [p for graph in reader.index.graphs for p in graph.precisions]
    wanted = ("fp32", "fp16", "int8") if computes_in_floats(source) else ("original", "fp32", "fp16")
    chosen = [p for p in wanted if p in graphs]
    try:
        return verify(
            path, source.path, inputs=inputs, precisions=chosen, samples=SAMPLES, threads=1, seconds=SECONDS
        ), ""
    except ConxError as e:
        return None, str(e).replace(os.fspath(path), "the packed file")


def passed(report: VerifyReport, half_error: float | None) -> list[str]:
    """The precisions that may be chosen by themselves: float16 where it adds little to the error of float32.

    Args:
        report: what was measured on the CPU.
        half_error: error of the float16 graph against float32, every rounding counted; None: it was not tried.
    """
    if half_error is None or not half_error <= MOST:
        return []
    plain = {e.output: e.rms for e in report.errors if e.precision == "fp32"}
    half = [e for e in report.errors if e.precision == "fp16"]
    good = all(not e.nonfinite and e.rms <= 1.5 * plain.get(e.output, 0.0) + ADDED for e in half)
    return ["fp16"] if half and good else []


def to_metadata(report: VerifyReport, half_error: float | None) -> Mapping[str, Any]:
    """Errors by precision and output, and the precisions that passed."""
    errors: dict[str, dict[str, Any]] = {}
    for e in report.errors:
        measured = {"nonfinite": e.nonfinite, "peak": _rounded(e.peak), "rms": _rounded(e.rms)}
        errors.setdefault(e.precision, {})[e.output] = measured
    found: dict[str, Any] = {"output_errors": errors, "passed": passed(report, half_error)}
    return found if half_error is None else found | {"fp16_error": _rounded(half_error)}


def _rounded(error: float) -> float:
    return float(f"{error:.{DIGITS}g}")

"""`conx.verify`: how far a file's outputs are from the original's, at each precision."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conx.errors import ModelError, UnsupportedError
from conx.feeds import Feed, fitting_feeds, read_feeds
from conx.inspection import inspect
from conx.runtime.installed import RUNTIME_ERRORS
from conx.runtime.options import quiet_options
from conx.runtime.running import run_within
from conx.runtime.session import InferenceSession

__all__ = ["OutputError", "VerifyReport", "verify"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputError:
    """How one output at one precision compares with the original's, over all inputs.

    Attributes:
        precision, output: which.
        cosine: mean over the inputs of the cosine of the flattened arrays.
        rms: root mean square of the error over that of the output.
        peak: largest error over the largest magnitude of the output.
        top1: share of equal positions of the largest value along the last axis; None where that has one element.
        equal: share of equal elements.
        nonfinite: elements where NaN or infinity stand on one side only.
    """

    precision: str
    output: str
    cosine: float
    rms: float
    peak: float
    top1: float | None
    equal: float
    nonfinite: int


@dataclass(frozen=True)
class VerifyReport:
    """What `conx.verify` found: `errors`, over `runs` inputs."""

    path: str
    against: str
    runs: int
    errors: tuple[OutputError, ...]

    def worst(self, precision: str | None = None) -> OutputError:
        """The output with the largest `rms`, of one precision or of all."""
        found = [e for e in self.errors if precision in (None, e.precision)]
        if not found:
            raise ValueError(f"nothing was measured at precision {precision!r}")
        return max(found, key=lambda e: (e.nonfinite > 0, e.rms))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    inputs: Any = None,
    precisions: Sequence[str] | None = None,
    samples: int = 4,
    seed: int = 0,
    providers: Sequence[Any] | None = None,
    threads: int | None = None,
    seconds: float | None = None,
) -> VerifyReport:
    """Run a .conx file and the model that it was packed from, and compare their outputs.

    Args:
        path: the .conx file.
        against: the .onnx model, run as it is.
        inputs: an .npz file, a folder of them, a mapping of arrays, or mappings (see `conx.feeds.read_feeds`); None:
            random ones that fit the model's description.
        precisions: which to compare; None: all that the file has.
        samples: number of random inputs.
        seed: of the random inputs.
        providers: onnxruntime's; None: the CPU.
        threads: of each session; None: onnxruntime's choice.
        seconds: after which a run is ended, with a ModelError; None: never.

    Raises:
        ModelError: onnxruntime cannot open the original or run it on the inputs, or the file's outputs have other names
            or shapes.
        FormatError, IntegrityError, UnsupportedError: as `conx.InferenceSession`.
    """
    wanted = list(precisions) if precisions is not None else list(inspect(path).precisions)
    used = list(providers or ["CPUExecutionProvider"])
    original = _open_original(against, used, threads)
    names = [output.name for output in original.get_outputs()]
    if inputs is None:
        feeds = _generated(original, names, seed, samples, os.fspath(against), seconds)
    else:
        feeds = read_feeds(inputs, original.get_inputs())
    want = _run(original, names, feeds, os.fspath(against), seconds)
    del original
    errors: list[OutputError] = []
    for precision in wanted:
        session = InferenceSession(path, _options(threads), precision=precision, providers=used)
        got = _run(
            session,
            names,
            [_fitting(feed, session) for feed in feeds],
            f"{os.fspath(path)} at precision {precision}",
            seconds,
        )
        for i, name in enumerate(names):
            errors.append(_compare(precision, name, [run[i] for run in want], [run[i] for run in got]))
        del session
    return VerifyReport(os.fspath(path), os.fspath(against), len(feeds), tuple(errors))


_RUN_ERRORS: tuple[type[Exception], ...] = (*RUNTIME_ERRORS, ValueError)


def _options(threads: int | None) -> Any:
    options = quiet_options()
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def _open_original(path: str | os.PathLike[str], providers: list[Any], threads: int | None) -> InferenceSession:
    try:
        return InferenceSession(path, _options(threads), providers=providers)
    except RUNTIME_ERRORS as e:
        raise ModelError(f"{os.fspath(path)}: onnxruntime cannot open it: {e}") from None


def _generated(
    session: InferenceSession, names: list[str], seed: int, samples: int, label: str, seconds: float | None
) -> list[Feed]:
    """Random inputs that the model takes."""
    try:
        return fitting_feeds(
            session.get_inputs(), lambda feed: run_within(session, names, feed, seconds), seed, samples
        )
    except UnsupportedError as e:
        raise ModelError(f"{label}: {e}") from None


def _fitting(feed: Feed, session: InferenceSession) -> Feed:
    """The feed with float16 where a graph takes that instead of float32."""
    halves = {spec.name for spec in session.get_inputs() if spec.type == "tensor(float16)"}
    return {k: v.astype(np.float16) if k in halves and v.dtype == np.float32 else v for k, v in feed.items()}


def _run(
    session: InferenceSession, names: list[str], feeds: list[Feed], label: str, seconds: float | None
) -> list[list[Any]]:
    try:
        return [run_within(session, names, feed, seconds) for feed in feeds]
    except _RUN_ERRORS as e:
        raise ModelError(f"{label}: onnxruntime cannot run it on these inputs: {e}") from None


def _compare(precision: str, name: str, want: list[Any], got: list[Any]) -> OutputError:
    sums = _Sums()
    for one, other in zip(want, got, strict=True):
        if isinstance(one, np.ndarray):
            if one.shape != other.shape:
                raise ModelError(f"output {name!r} at precision {precision} is {other.shape}, not {one.shape}")
            sums.add(one, other)
    return sums.result(precision, name)


class _Sums:
    """What is added up over the inputs."""

    def __init__(self) -> None:
        self.cosines: list[float] = []
        self.power = self.noise = self.largest = self.worst = 0.0
        self.top: list[float] = []
        self.same = self.elements = self.nonfinite = 0

    def add(self, want: Array, got: Array) -> None:
        self.elements += want.size
        if want.dtype.kind not in "fiub" or not want.size:
            self.same += int(np.count_nonzero(want == got))
            return
        with np.errstate(invalid="ignore"):  # signaling NaN
            a, b = want.astype(np.float64).reshape(-1), got.astype(np.float64).reshape(-1)
        finite = np.isfinite(a) & np.isfinite(b)
        both = ~finite & ((a == b) | (np.isnan(a) & np.isnan(b)))
        self.same += int(np.count_nonzero(a == b)) + int(np.count_nonzero(np.isnan(a) & np.isnan(b)))
        self.nonfinite += int(np.count_nonzero(~finite & ~both))
        if want.ndim and want.shape[-1] > 1:
            rows = want.shape[-1]
            self.top.append(float((a.reshape(-1, rows).argmax(1) == b.reshape(-1, rows).argmax(1)).mean()))
        a, b = a[finite], b[finite]
        off = b - a
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        self.cosines.append(float(a @ b) / lengths if lengths else float(not off.any()))
        self.power += float(a @ a)
        self.noise += float(off @ off)
        self.largest = max(self.largest, float(np.abs(a).max(initial=0)))
        self.worst = max(self.worst, float(np.abs(off).max(initial=0)))

    def result(self, precision: str, name: str) -> OutputError:
        return OutputError(
            precision=precision,
            output=name,
            cosine=float(np.mean(self.cosines)) if self.cosines else 1.0,
            rms=_ratio(self.noise**0.5, self.power**0.5),
            peak=_ratio(self.worst, self.largest),
            top1=float(np.mean(self.top)) if self.top else None,
            equal=self.same / self.elements if self.elements else 1.0,
            nonfinite=self.nonfinite,
        )


def _ratio(error: float, size: float) -> float:
    if size:
        return error / size
    return float("inf") if error else 0.0

"""How errors, times and memory are measured, the same way for every candidate."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.feeds import Array, Outputs

__all__ = ["PairedTimes", "output_error", "paired_times", "peak_and_final_rss", "table"]

_CHILD_TIMEOUT_S = 1800


@dataclass(frozen=True)
class PairedTimes:
    """Times of two pieces of work that took turns.

    Attributes:
        first_s: median of the first, in seconds.
        second_s: median of the second, in seconds.
        ratio: median over the rounds of second / first: what drifts (clock rate, cache, neighbours) hits both.
        rounds: number of rounds.
    """

    first_s: float
    second_s: float
    ratio: float
    rounds: int


def output_error(want: Sequence[Outputs], got: Sequence[Outputs]) -> dict[str, float]:
    """Compares outputs with the original's.

    Args:
        want: the original's outputs, one dict for each feed.
        got: the outputs under test, the same feeds in the same order.

    Returns:
        Of floating outputs: ``cosine``, the mean over feeds and outputs of the cosine of the flattened arrays;
        ``max_rel``, the largest ``max |got - want| / max |want|`` of any array; ``rel_rms``, the largest over the
        outputs of ``rms(got - want) / rms(want)``, each taken over all feeds. Of other outputs: ``equal``, the share
        of equal elements. Infinities and NaN at the same places agree; elsewhere they make both errors infinite and
        the cosine 0.

    Raises:
        ValueError: the number of feeds, the names or the shapes differ.
    """
    if len(want) != len(got):
        raise ValueError(f"{len(got)} outputs to compare with {len(want)}")
    cosines: list[float] = []
    peaks: list[float] = [0.0]
    squares: dict[str, tuple[float, float]] = {}
    equal: list[Array] = []
    for one, other in zip(want, got, strict=True):
        if one.keys() != other.keys():
            raise ValueError(f"outputs {sorted(other)} to compare with {sorted(one)}")
        for name in one:
            if one[name].shape != other[name].shape:
                raise ValueError(f"output {name!r} is {other[name].shape}, not {one[name].shape}")
            if one[name].dtype.kind != "f":
                equal.append((one[name] == other[name]).ravel())
                continue
            cosine, peak, error, power = _compare(one[name], other[name])
            cosines.append(cosine)
            peaks.append(peak)
            before = squares.get(name, (0.0, 0.0))
            squares[name] = (before[0] + error, before[1] + power)
    figures = {
        "cosine": statistics.fmean(cosines) if cosines else 1.0,
        "max_rel": max(peaks),
        "rel_rms": max((_ratio(error, power) ** 0.5 for error, power in squares.values()), default=0.0),
    }
    if equal:
        figures["equal"] = float(np.concatenate(equal).mean())
    return figures


def paired_times(
    first: Callable[[], object] | Sequence[str],
    second: Callable[[], object] | Sequence[str],
    rounds: int = 7,
    setup: Sequence[str] = (),
) -> PairedTimes:
    """Times two pieces of work in turn, each beginning every other round, after a round that is dropped.

    Args:
        first: a function, timed in this process; or lines of Python, timed in a fresh process each, where what an
            earlier round left in memory must not help (page caches of the system stay warm).
        second: the same.
        rounds: number of rounds that count.
        setup: lines run before the lines that are timed, such as imports.

    Returns:
        The medians and the ratio second / first.
    """
    kept: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        if number % 2:
            after = _seconds(second, setup)
            kept.append((_seconds(first, setup), after))
        else:
            kept.append((_seconds(first, setup), _seconds(second, setup)))
    kept = kept[1:]
    return PairedTimes(
        first_s=statistics.median(time for time, _ in kept),
        second_s=statistics.median(time for _, time in kept),
        ratio=statistics.median(other / one for one, other in kept),
        rounds=rounds,
    )


def peak_and_final_rss(code: Sequence[str], setup: Sequence[str] = ()) -> tuple[float, float]:
    """Measures the memory of some work in a fresh process. Linux only.

    Args:
        code: lines of Python; what they leave in variables counts to the final memory.
        setup: lines run before, whose own peak doesn't count (where the kernel lets a process reset it) but whose
            remaining memory does: subtract a run with empty ``code`` for the work alone.

    Returns:
        Peak (VmHWM) and final (VmRSS, after a garbage collection and ``malloc_trim``) resident memory in MB (1e6).

    Raises:
        RuntimeError: the code failed; the message ends with its error.
    """
    words = _child([*setup, *_RESET_PEAK.splitlines(), *code, *_PRINT_MEMORY.splitlines()]).split()
    return float(words[-2]) * 1024 / 1e6, float(words[-1]) * 1024 / 1e6


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Formats rows as a Markdown table: the columns in order of first appearance, floats with four digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name: all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns}
    lines = [columns, ["---:" if numeric[name] else "---" for name in columns]]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_RESET_PEAK = """\
try:
    with open("/proc/self/clear_refs", "w") as _stream: _stream.write("5")
except OSError:
    pass"""
_PRINT_MEMORY = """\
import ctypes as _ctypes, gc as _gc
_gc.collect()
getattr(_ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
_status = dict(_line.split(":", 1) for _line in open("/proc/self/status"))
print(_status["VmHWM"].split()[0], _status["VmRSS"].split()[0])"""


def _compare(want: Array, got: Array) -> tuple[float, float, float, float]:
    one, other = want.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    finite = np.isfinite(one) & np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return 0.0, float("inf"), float("inf"), 1.0
    one, other = one[finite], other[finite]
    if not one.size:
        return 1.0, 0.0, 0.0, 0.0
    error, power = float(np.square(other - one).sum()), float(np.square(one).sum())
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    cosine = float(one @ other) / lengths if lengths else float(error == 0)
    return cosine, _ratio(float(np.abs(other - one).max()), float(np.abs(one).max())), error, power


def _ratio(error: float, size: float) -> float:
    if size:
        return error / size
    return float("inf") if error else 0.0


def _seconds(work: Callable[[], object] | Sequence[str], setup: Sequence[str]) -> float:
    if callable(work):
        gc.collect()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    clock = ["import time as _time", "_start = _time.perf_counter()", *work, "print(_time.perf_counter() - _start)"]
    return float(_child([*setup, *clock]).split()[-1])


def _child(lines: Sequence[str]) -> str:
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise RuntimeError(f"the measured code failed: {last[0]}")
    return done.stdout


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

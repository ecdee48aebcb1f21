"""Which nodes of a float16 graph had better stay float32, found by running the model.

First what leaves float16's range: the float32 model is run, and of every value that would be float16 the largest and
the smallest element are looked at. Then what costs accuracy: the float16 graph is emulated (`fp16_emulated`), and if an
output is off by more than `BOUND`, the nodes to blame are searched for. Errors of different nodes are nearly
uncorrelated, so that their powers add up: the nodes are split into groups in topological order, each group is run with
its rounding alone, and the group that contributes most is halved, until what is left is small enough.

The number of runs is bounded, not their time, so that a file does not depend on the speed of the machine; `seconds` is
for models that take far longer than usual.
"""

import heapq
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from conx.graph.fp16 import Half, to_float16
from conx.graph.fp16_emulated import Emulation
from conx.graph.fp16_ranges import main_values, overflowing, with_ranges
from conx.graph.fp32 import Widening
from conx.graph.read import SourceModel, weight_number
from conx.graph.trial import Trial

__all__ = ["BOUND", "GROSS", "SEARCH_MAX", "Feed", "Open", "search_float16"]

log = logging.getLogger("conx")

Feed = Mapping[str, npt.NDArray[Any]]
Run = Callable[[Feed], list[Any]]
Open = Callable[[Path], Run]

# Bytes of weights, above which a model is not run while packing: running it takes about 2.5 times as much memory, and
# that of packing is not to grow with the model.
SEARCH_MAX = 1 << 28
BOUND = 1e-4  # power of an output's error over the output's own: a cosine of about 0.99995
FEEDS = 4  # inputs that are run
GROSS = 1e-2  # the same for random inputs: they are nothing that a model was made for, and it may answer anything
RUNS = 64  # of the emulated graph, in search of nodes
GROUPS = 8  # to begin with
GAIN = 3.0  # by which keeping nodes must lower the power of the error, unless it is small then
SHARE = 0.04  # of the weights' bytes that may stay float32 for accuracy
SWITCHED_MAX = 1 << 27  # bytes of weights, up to which their rounding is switched too


def search_float16(
    source: SourceModel,
    open_model: Open,
    feeds: Sequence[Feed] | Callable[[], Sequence[Feed]],
    *,
    io: bool = False,
    bound: float = BOUND,
    seconds: float = 20.0,
) -> Half:
    """Make the float16 model of a float32 one, with what does not bear float16 on these inputs kept float32.

    Args:
        source: the model.
        open_model: opens a model file on the CPU, and gives a function from a feed to the outputs in their order.
        feeds: inputs of the model, or what makes them where they are needed; the first few are run.
        io: as `to_float16`.
        bound: power of an output's error over its own, above which nodes are searched for; `GROSS` for random feeds.
        seconds: after which the search ends with what it knows, once it gets to look at the clock.

    Returns:
        As `to_float16`, with `kept` and `error`. Where the model cannot be run, the static rules alone stand.
    """
    half = to_float16(source, io=io)
    size = sum(w.nbytes for w in source.weights)
    if not half.narrow:
        return half
    if size > SEARCH_MAX:
        log.info("%s: %d bytes of weights, too many to try the float16 graph", source.path, size)
        return half
    try:
        given = list(feeds() if callable(feeds) else feeds)[:FEEDS]
        if not given:
            return half
        with TemporaryDirectory(prefix="conx-") as folder:
            search = _Search(source, open_model, given, Trial(source.weights, Path(folder)), bound, seconds)
            return search.run(io)
    except Exception as e:  # noqa: BLE001 - a runtime raises what it likes; the static rules still hold
        log.info("%s: the float16 graph could not be tried (%s: %s)", source.path, type(e).__name__, e)
        return half


class _Search:
    def __init__(
        self, source: SourceModel, open_model: Open, feeds: Sequence[Feed], trial: Trial, bound: float, seconds: float
    ) -> None:
        self.source, self.open, self.feeds, self.trial, self.bound = source, open_model, feeds, trial, bound
        self.deadline = time.monotonic() + seconds
        self.keep: dict[str, str] = {}
        self.runs = RUNS

    def run(self, io: bool) -> Half:
        half = to_float16(self.source)
        wide = Widening(self.source.proto).run()
        self.wanted, ranges = self.observe(wide, half)
        self.keep |= overflowing(wide, half, ranges)
        if self.keep:
            half = to_float16(self.source, self.keep)
        error = None
        if time.monotonic() < self.deadline:
            error = self.emulated_error(half)
            if error > self.bound and self.deterministic(wide):
                half, error = self.improve(half, error)
        if io:
            half = to_float16(self.source, self.keep, io=True)
        half.error = None if error is None else error**0.5
        return half

    def improve(self, half: Half, error: float) -> tuple[Half, float]:
        """Keep more nodes float32 as long as it helps. Gives the graph and its error."""
        while error > self.bound:
            former = dict(self.keep)
            try:
                if not self.bisect(half, error):
                    break
            except Exception as e:  # noqa: BLE001 - as in search_float16; what was found until here stands
                log.info("%s: no search for nodes to keep (%s: %s)", self.source.path, type(e).__name__, e)
                break
            tried = to_float16(self.source, self.keep)
            better = self.emulated_error(tried)
            if better > max(self.bound, error / GAIN):
                self.keep = former
                break
            half, error = tried, better
        return half, error

    def emulated_error(self, half: Half) -> float:
        return self.error(self.open(self.trial.write(Emulation(half.model).run())))

    def observe(self, wide: onnx.ModelProto, half: Half) -> tuple[list[list[Any]], dict[str, tuple[float, float]]]:
        """Run the float32 model: its outputs, and the range of every value that would be float16."""
        there = main_values(wide.graph)
        names = [v for v in dict.fromkeys((*half.entries, *half.values)) if v in there]
        count = len(wide.graph.output)
        run = self.open(self.trial.write(with_ranges(wide, names)))
        low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        wanted = []
        for feed in self.feeds:
            outputs = run(feed)
            wanted.append(outputs[:count])
            ends = np.array([float(end[0]) for end in outputs[count:]])
            low, high = np.minimum(low, ends[::2]), np.maximum(high, ends[1::2])
        return wanted, {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}

    def deterministic(self, wide: onnx.ModelProto) -> bool:
        """Whether the float32 model answers the same again: what draws random numbers cannot be compared."""
        return self.error(self.open(self.trial.write(wide))) < self.bound / 10

    def error(self, run: Run, switches: Feed | None = None) -> float:
        """The power of the worst output's error over the output's own; infinite where it is not finite."""
        powers: dict[int, tuple[float, float]] = {}
        for feed, wanted in zip(self.feeds, self.wanted, strict=True):
            for i, (one, other) in enumerate(zip(wanted, run({**feed, **(switches or {})}), strict=False)):
                before = powers.get(i, (0.0, 0.0))
                noise, power = compare(one, other)
                powers[i] = before[0] + noise, before[1] + power
        return max((noise / power if power else noise and 1.0 for noise, power in powers.values()), default=0.0)

    def bisect(self, half: Half, total: float) -> bool:
        """Find nodes to keep, of a graph with an error in all. Answers whether there are new ones."""
        if self.runs < GROUPS or time.monotonic() > self.deadline or not switchable(half.model):
            return False
        small = sum(w.nbytes for w in self.source.weights) <= SWITCHED_MAX
        emulation = Emulation(half.model, half.narrow, weights=small)
        run = self.open(self.trial.write(emulation.run()))
        there = set(emulation.switches)
        switched = [name for name in half.narrow.values() if emulation.name(name) in there]

        def error(on: Sequence[str]) -> float:
            self.runs -= 1
            chosen = set(on)
            return self.error(run, {emulation.name(n): np.array(n in chosen) for n in switched})

        blamed = self.blame(error, switched, total)
        costs = weight_bytes(half, self.source)
        left = SHARE * sum(costs.values())
        found = 0
        for group in sorted(blamed, key=lambda g: g.key):
            cost = sum(costs.get(name, 0) for name in group.nodes)
            if np.isfinite(group.error) and cost > left:
                continue
            left -= cost
            why = f"{group.error**0.5:.2g} of an output" if np.isfinite(group.error) else "outputs that are not finite"
            for name in group.nodes:
                self.keep[name] = f"costs accuracy: an error of {why}"
            found += len(group.nodes)
        return bool(found)

    def blame(self, error: Callable[[Sequence[str]], float], nodes: Sequence[str], total: float) -> list["_Group"]:
        """The groups that contribute most, single nodes where there were runs enough.

        None where powers do not add up, but any rounding anywhere does as much: then the outputs themselves hang in
        the balance, as a reader's at a letter that it cannot tell, and no node is to blame.
        """
        base = error([])
        size = max(1, -(-len(nodes) // GROUPS))
        groups: list[_Group] = []
        for i in range(0, len(nodes), size):
            if time.monotonic() > self.deadline:
                return []
            groups.append(_measured(nodes[i : i + size], error, base))
        if not base <= self.bound or (np.isfinite(total) and sum(g.error for g in groups) > GAIN * total):
            return []
        heapq.heapify(groups)
        blamed: list[_Group] = []
        while groups and not sum(g.error for g in groups) <= self.bound / 2:
            worst = heapq.heappop(groups)
            if len(worst.nodes) == 1 or self.runs < 2 or time.monotonic() > self.deadline:
                blamed.append(worst)
                continue
            middle = len(worst.nodes) // 2
            for part in (worst.nodes[:middle], worst.nodes[middle:]):
                heapq.heappush(groups, _measured(part, error, base))
        return blamed


@dataclass(order=True)
class _Group:
    """Nodes next to each other, and what their rounding alone costs."""

    key: float
    nodes: tuple[str, ...] = field(compare=False)
    error: float = field(compare=False)


def _measured(nodes: Sequence[str], error: Callable[[Sequence[str]], float], base: float) -> _Group:
    power = error(nodes)
    power = max(0.0, power - base) if np.isfinite(base) and np.isfinite(power) else power
    return _Group(-power, tuple(nodes), power)


def compare(wanted: Any, got: Any) -> tuple[float, float]:
    """Power of the error and of the output; an infinite error where NaN or infinities are not in the same places."""
    if not isinstance(wanted, np.ndarray) or wanted.dtype.kind != "f":
        return 0.0, 0.0
    if wanted.shape != got.shape:
        return 1.0, 1.0  # sizes that depend on values: all is wrong, but nothing overflowed
    one, other = wanted.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return float("inf"), 1.0
    return float(np.square(other[finite] - one[finite]).sum()), float(np.square(one[finite]).sum())


def switchable(model: onnx.ModelProto) -> bool:
    """Whether the model has the operator that switches."""
    return any(o.version >= 9 for o in model.opset_import if o.domain in ("", "ai.onnx"))


def weight_bytes(half: Half, source: SourceModel) -> dict[str, int]:
    """Bytes of the float16 weights that each node uses."""
    sizes = {}
    for tensor in half.model.graph.initializer:
        number = weight_number(tensor)
        if number is not None and tensor.data_type == TensorProto.FLOAT16:
            sizes[tensor.name] = source.weights[number].count * 2
    return {
        half.narrow[node.output[0]]: sum(sizes.get(name, 0) for name in set(node.input))
        for node in half.model.graph.node
        if node.output and node.output[0] in half.narrow
    }

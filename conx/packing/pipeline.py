"""`conx.pack`: read, find ties, decide, encode, write, verify, rename.

Everything that needs judgement happens here, so that loading is a table look-up. Weights are read one by one; what is
in memory at any time are the tensors being worked on, and the segments being compressed.
"""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conx._version import __version__
from conx.checking import verify_tensors
from conx.codecs.base import TensorMeta
from conx.container.index import DRAFT
from conx.container.reader import Reader, Verify
from conx.container.records import Tensor
from conx.container.writer import Writer
from conx.errors import ConxError, ModelError
from conx.graph.facts import graph_facts, parameter_counts
from conx.graph.read import SourceModel, Weight, read_model
from conx.graph.skeleton import MESSAGE_MAX
from conx.graph.ties import find_ties, shared_names
from conx.graph.validate import check_inline_tensors
from conx.packing.axes import Axes, stored_axes
from conx.packing.bindings import Bindings
from conx.packing.choose import Choice, as_float32, choose
from conx.packing.codes import Coded, CodedUses, Codes, serves
from conx.packing.graphs import coded_weights, write_graphs
from conx.packing.lookahead import ordered_map
from conx.packing.measure import WeightError, decoded, measure
from conx.packing.originals import write_originals
from conx.packing.outputs import measure_outputs, to_metadata
from conx.packing.report import PackReport, make_report
from conx.packing.settings import PRECISIONS, Settings, make_settings
from conx.packing.tensors import write_scales, write_tensor
from conx.quantize.grid import peak_scales
from conx.quantize.rules import Rule
from conx.runtime.decode import Progress, thread_count
from conx.runtime.splice import original_pieces
from conx.verification import VerifyReport

__all__ = ["pack"]

IN_FLIGHT = 1 << 26  # bytes of weights that are worked on at once, beyond the one that is needed next


def pack(  # noqa: PLR0913 - the public face: each is a setting of its own
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    lossless: bool = False,
    bits: int | None = None,
    block_size: int | None = None,
    palette: int | None = None,
    keep: Sequence[str] = (),
    overrides: Mapping[str, str | Rule] | Sequence[tuple[str, str | Rule]] = (),
    threads: int | None = None,
    progress: Progress | None = None,
    precisions: Sequence[str] = PRECISIONS,
    verify: bool = True,
    original: bool = True,
    external_above: int = MESSAGE_MAX,
) -> PackReport:
    """Pack an ONNX model into a .conx file.

    Float matrices, kernels and embeddings of at least 1,024 elements become int8 codes with a scale for each output
    channel; everything else is stored bit for bit.

    Args:
        model: path of the .onnx; its external data is found beside it.
        output: path of the .conx; default: the model's with the suffix .conx.
        lossless: every weight bit for bit.
        bits: 8 (default) to 2; fewer bits, smaller file, larger error.
        block_size: a scale for each run of so many weights along the axis that is summed over.
        palette: bits of an index (1 to 8) into a palette fitted to each tensor, instead of a grid.
        keep: patterns (as in fnmatch) of names of weights to store bit for bit.
        overrides: pattern to rule, in order; a rule is `lossless` or like `bits:4,block:64` or `palette:4,group:16`.
        threads: threads for coding; default: one for each core. The file does not depend on it.
        progress: called as progress(done, total) with bytes of weights read; each is read twice.
        precisions: which graphs to make beside the model's own: "fp32", "fp16", "int8"; they share the weights.
        verify: whether the file's outputs are measured against the model's, on random inputs. Needed for "fp16" to be
            chosen by itself. Models above 512 MiB are never run while packing.
        original: whether a file whose every weight is stored bit for bit brings back the model's own files, byte for
            byte (`conx unpack --original`).
        external_above: bytes from which the model's own graph keeps weights outside (protobuf's limit).

    Raises:
        ModelError: the model is damaged, or its external data is not there.
        ValueError: settings that exclude each other, or a pattern that no weight matches.
    """
    settings = make_settings(lossless, bits, block_size, palette, keep, overrides, precisions, original, external_above)
    source_path = Path(model)
    target = Path(output) if output is not None else source_path.with_suffix(".conx")
    if target.exists() and source_path.exists() and target.samefile(source_path):
        raise ValueError(f"{target}: is the model itself; name another output")
    with read_model(source_path) as source:
        check_inline_tensors(source)
        if target.exists() and any(target.samefile(file.path) for file in source.files.values()):
            raise ValueError(f"{target}: is a data file of the model; name another output")
        return _Packing(source, target, settings, thread_count(threads), progress, verify).run()


@dataclass(frozen=True)
class _Stored:
    """What became of a stored weight, before its streams are written."""

    weight: Weight
    choice: Choice
    sha256: bytes
    error: WeightError | None
    grids: dict[int, npt.NDArray[np.float32]]


class _Packing:
    def __init__(
        self,
        source: SourceModel,
        target: Path,
        settings: Settings,
        threads: int,
        progress: Progress | None,
        verify: bool,
    ) -> None:
        self.source, self.target, self.settings, self.threads = source, target, settings, threads
        self.total = 2 * sum(w.nbytes for w in source.weights)
        self.done = 0
        self.progress = progress
        self.verify = verify
        self.outputs: VerifyReport | None = None
        self.unmeasured = "" if verify else "not asked for"

    def run(self) -> PackReport:
        begun = time.perf_counter()
        unmatched = self.settings.rules.unmatched(self._names())
        if unmatched:
            raise ValueError(f"no weight of {self.source.path} is named like {unmatched[0]!r}; `conx info` lists them")
        self.ties = find_ties(self.source.weights, self._advance)
        self.axes = stored_axes(self.source, self.ties)
        wanted = coded_weights(self.source) if "int8" in self.settings.precisions else []
        self.uses = CodedUses(self.source.weights, self.ties, wanted)
        with (
            ThreadPoolExecutor(self.threads, thread_name_prefix="conx-pack") as pool,
            Writer(self.target, pool) as writer,
        ):
            stored = [w for w in self.source.weights if self.ties[w.number].stored == w.number]
            self._advance(sum(w.nbytes for w in self.source.weights) - sum(w.nbytes for w in stored))
            tensors: list[Tensor] = []
            errors = []
            coded: dict[int, Coded] = {}
            for one in ordered_map(pool, self._decide, stored, [w.nbytes for w in stored], self.threads, IN_FLIGHT):
                meta = TensorMeta(one.weight.shape, one.weight.dtype)
                tensors.append(write_tensor(writer, one.weight.name, meta, one.choice.encoded, one.sha256))
                errors.append(one.error)
                coded[one.weight.number] = Coded(one.choice.encoded.codec, one.grids)
                self._advance(one.weight.nbytes)
                del one  # before the next one is read
            codes = Codes(self.source.weights, self.ties, coded)
            bindings = Bindings(codes, write_scales(writer, tensors, codes))
            graphs, wide = write_graphs(writer, self.source, bindings, codes, self.settings)
            originals = []
            if self.settings.original and all(e is None for e in errors):
                originals = write_originals(writer, self.source, bindings, graphs[0])
            features = sorted({DRAFT} | {f"codec:{t.codec}" for t in tensors})
            writer.finish(features, graphs, tensors, self._metadata(errors, wide), self._verify, originals)
        seconds = time.perf_counter() - begun
        return make_report(self.source.path, self.target, seconds, self.outputs, self.unmeasured)

    def _names(self) -> list[str]:
        return [w.name for w in self.source.weights]

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _decide(self, weight: Weight) -> _Stored:
        """Code one weight; runs on a worker thread."""
        tied = [w.name for w, t in zip(self.source.weights, self.ties, strict=True) if t.stored == weight.number]
        rule = self.settings.rules.of(tied)
        axes = self.axes[weight.number]
        if axes.exact and self.settings.rules.asked(tied):
            axes = Axes.of_any(weight.shape)
        try:
            data = weight.read()
            choice = choose(data, weight.shape, weight.dtype, rule, axes)
        except ConxError as e:
            raise ModelError(f"{self.source.path}: tensor {weight.name!r}: {e}") from None
        grids = {}
        if self.settings.lossless or not rule.lossless:
            grids = self._grids(weight, choice, data)
        if choice.lossless:
            return _Stored(weight, choice, self.ties[weight.number].sha256, None, grids)
        digest, error = measure(choice.encoded, TensorMeta(weight.shape, weight.dtype), data)
        same = digest == self.ties[weight.number].sha256
        return _Stored(weight, choice, digest, None if same else error, grids)

    def _grids(self, weight: Weight, choice: Choice, data: npt.NDArray[Any]) -> dict[int, npt.NDArray[np.float32]]:
        """Scales along the axes for which int8 codes are wanted and not stored."""
        axes = [a for a in self.uses.of(weight.number) if not serves(choice.encoded.codec, weight.shape, a)]
        if not axes:
            return {}
        kept = (
            as_float32(data, weight.dtype) if choice.lossless else decoded(choice.encoded, weight.shape, weight.dtype)
        )
        found = {axis: peak_scales(kept.reshape(weight.shape), axis) for axis in axes}
        return {axis: scales for axis, scales in found.items() if scales is not None}

    def _metadata(self, errors: list[WeightError | None], wide: dict[str, int]) -> dict[str, Any]:
        measured = {str(i): e.to_map() for i, e in enumerate(errors) if e is not None}
        facts = graph_facts(self.source)
        facts["parameters"], facts["unique_parameters"] = parameter_counts(self.source, self.ties)
        facts["bytes"] = self.source.size
        return {
            "errors": measured,
            "fp16_kept_float32": wide,
            "lossless": all(e is None for e in errors),
            "model": facts,
            "producer": f"conx {__version__}",
            "settings": self.settings.to_map(),
            "shared": self._shared(),
        }

    def _shared(self) -> dict[str, list[str]]:
        """The names of the weights that a tensor stands for beside its own, by its place."""
        stored = [w.number for w in self.source.weights if self.ties[w.number].stored == w.number]
        places = {number: str(place) for place, number in enumerate(stored)}
        return {places[number]: names for number, names in shared_names(self.source.weights, self.ties).items()}

    def _verify(self, path: Path) -> Mapping[str, Any] | None:
        """Reopen what was written: every chunk's hash, every graph, every tensor decoded, and its outputs."""
        with Reader(path, verify=Verify.FULL) as reader:
            reader.check()
            for graph in reader.index.graphs:
                reader.graph(graph)
            verify_tensors(reader, self.threads)
            for original in reader.index.originals:
                deque(original_pieces(reader, original, self.threads), maxlen=0)
        if not self.verify:
            return None
        self.outputs, self.unmeasured = measure_outputs(path, self.source)
        return None if self.outputs is None else to_metadata(self.outputs)

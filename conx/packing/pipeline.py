"""`conx.pack`: read, find ties, decide, encode, write, verify, rename.

Everything that needs judgement happens here, so that loading is a table look-up. Weights are read one by one; what is
in memory at any time are the tensors being worked on, and the segments being compressed.
"""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from conx._version import __version__
from conx.checking import verify_tensors
from conx.container.index import DRAFT
from conx.container.reader import Reader, Verify
from conx.container.records import Tensor
from conx.container.writer import Writer
from conx.graph.facts import graph_facts
from conx.graph.fp16 import Half
from conx.graph.parameters import parameter_facts
from conx.graph.read import SourceModel, Weight, read_model
from conx.graph.skeleton import MESSAGE_MAX
from conx.graph.ties import find_ties, shared_names
from conx.graph.validate import check_inline_tensors
from conx.packing.axes import stored_axes
from conx.packing.decide import Decider
from conx.packing.floats import float_model, wanted_axes
from conx.packing.graphs import coded_weights, write_graphs
from conx.packing.lookahead import ordered_map
from conx.packing.measure import WeightError
from conx.packing.originals import write_originals
from conx.packing.outputs import measure_outputs, to_metadata
from conx.packing.pairs import Pair, PairReport, find_pairs
from conx.packing.report import PackReport, make_report
from conx.packing.settings import PRECISIONS, Settings, make_settings
from conx.packing.store import Store, Stored
from conx.packing.tensors import write_extras, write_scales, write_tensor
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
    lossless: bool | str = False,
    bits: int | None = None,
    block_size: int | None = None,
    palette: int | None = None,
    keep: Sequence[str] = (),
    overrides: Mapping[str, str | Rule] | Sequence[tuple[str, str | Rule]] = (),
    threads: int | None = None,
    progress: Progress | None = None,
    precisions: Sequence[str] = PRECISIONS,
    quantized: str | os.PathLike[str] | None = None,
    verify: bool = True,
    calibration: Any = None,
    half_io: bool = False,
    original: bool = True,
    external_above: int = MESSAGE_MAX,
) -> PackReport:
    """Pack an ONNX model into a .conx file.

    Float matrices, kernels and embeddings of at least 1,024 elements become int8 codes with a scale for each output
    channel; everything else is stored bit for bit.

    Args:
        model: path of the .onnx; its external data is found beside it.
        output: path of the .conx; default: the model's with the suffix .conx.
        lossless: every weight bit for bit; "smallest": the same in a smaller file that loads more slowly.
        bits: 8 (default) to 2; fewer bits, smaller file, larger error.
        block_size: a scale for each run of so many weights along the axis that is summed over.
        palette: bits of an index (1 to 8) into a palette fitted to each tensor, instead of a grid.
        keep: patterns (as in fnmatch) of names of weights to store bit for bit.
        overrides: pattern to rule, in order; a rule is `lossless` or like `bits:4,block:64` or `palette:4,group:16`.
        threads: threads for coding; default: one for each core. The file does not depend on it.
        progress: called as progress(done, total) with bytes of weights read; each is read twice.
        precisions: which graphs to make beside the model's own: "fp32", "fp16", "int8"; they share the weights.
        quantized: path of a quantized form of the model: its codes become those of the float weights that they are of,
            matched by name or by value; graph and all else are the model's.
        verify: whether the model and what is made of it are run: nodes that float16 does not bear are found and kept
            float32, and the file's outputs are measured against the model's. Needed for "fp16" to be chosen by itself.
            Models above 512 MiB of weights (for float16: 256 MiB) are never run while packing.
        calibration: inputs for that: an .npz file, a folder of them, a mapping of arrays, or mappings; None: random.
        half_io: whether the float16 graph takes and gives float16 where the model has float32.
        original: whether a file whose every weight is stored bit for bit brings back the model's own files, byte for
            byte (`conx unpack --original`).
        external_above: bytes from which the model's own graph keeps weights outside (protobuf's limit).

    Raises:
        ModelError: the model is damaged, or its external data is not there.
        ValueError: settings that exclude each other, or a pattern that no weight matches.
    """
    settings = make_settings(lossless, bits, block_size, palette, keep, overrides, precisions, original, external_above)
    settings = replace(settings, verify=verify, calibration=calibration, half_io=half_io)
    source_path = Path(model)
    target = Path(output) if output is not None else source_path.with_suffix(".conx")
    if target.exists() and source_path.exists() and target.samefile(source_path):
        raise ValueError(f"{target}: is the model itself; name another output")
    with read_model(source_path) as source:
        check_inline_tensors(source)
        if target.exists() and any(target.samefile(file.path) for file in source.files.values()):
            raise ValueError(f"{target}: is a data file of the model; name another output")
        packing = _Packing(source, target, settings, thread_count(threads), progress)
        if quantized is None:
            return packing.run(None)
        with read_model(quantized) as twin:
            check_inline_tensors(twin)
            return packing.run(twin)


class _Packing:
    def __init__(
        self,
        source: SourceModel,
        target: Path,
        settings: Settings,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self.source, self.target, self.settings, self.threads = source, target, settings, threads
        self.total = 2 * sum(w.nbytes for w in source.weights)
        self.done = 0
        self.progress = progress
        self.outputs: VerifyReport | None = None
        self.pairs: PairReport | None = None
        self.half_error: float | None = None
        self.unmeasured = "" if settings.verify else "not asked for"

    def run(self, twin: SourceModel | None) -> PackReport:
        """Pack, with the codes of a quantized twin if there is one."""
        begun = time.perf_counter()
        unmatched = self.settings.rules.unmatched(self._names())
        if unmatched:
            raise ValueError(f"no weight of {self.source.path} is named like {unmatched[0]!r}; `conx info` lists them")
        ties = find_ties(self.source.weights, self._advance)
        self.floats = floats = float_model(self.source, ties)
        self.ties = floats.ties
        if floats.quantized and not self.settings.asked:  # nothing is coded a second time
            self.settings = self.settings.as_lossless()
        pairs: dict[int, Pair] = {}
        if twin is not None:
            pairs, self.pairs = find_pairs(self.source, self.ties, twin)
        self.store = store = Store(floats.model.weights, self.ties)
        uses = coded_weights(floats) if "int8" in self.settings.precisions else []
        axes = stored_axes(self.source, self.ties)
        decide = Decider(self.source, self.ties, self.settings, axes, wanted_axes(floats, uses), floats.forms, pairs)
        with (
            ThreadPoolExecutor(self.threads, thread_name_prefix="conx-pack") as pool,
            Writer(self.target, pool) as writer,
        ):
            stored = self._stored()
            self._advance(sum(w.nbytes for w in self.source.weights) - sum(w.nbytes for w in stored))
            tensors: list[Tensor] = []
            errors = []
            for one in ordered_map(pool, decide, stored, [w.nbytes for w in stored], self.threads, IN_FLIGHT):
                codec = one.choice.encoded.codec
                store.add(one.weight.number, Stored(len(tensors), one.shape, one.dtype, codec, one.form, one.grids))
                name, order = one.weight.name, one.order
                tensors.append(write_tensor(writer, name, one.shape, one.dtype, one.encoded, one.sha256, order))
                errors.append(one.error)
                self._advance(one.weight.nbytes)
                del one  # before the next one is read
            floats = write_extras(writer, tensors, store, floats)
            write_scales(writer, tensors, store)
            graphs, half = write_graphs(writer, self.source, floats, store, self.settings)
            self.half_error = None if half is None else half.error
            originals = []
            if self.settings.original and all(e is None for e in errors):
                originals = write_originals(writer, self.source, store, graphs[0])
            features = sorted({DRAFT} | {f"codec:{t.codec}" for t in tensors})
            writer.finish(features, graphs, tensors, self._metadata(errors, half), self._verify, originals)
        seconds = time.perf_counter() - begun
        return make_report(self.source.path, self.target, seconds, self.outputs, self.unmeasured, self.pairs)

    def _names(self) -> list[str]:
        return [w.name for w in self.source.weights]

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _stored(self) -> list[Weight]:
        """The weights that become tensors, in the order in which they do."""
        operands = self.floats.operands
        return [w for w in self.source.weights if self.ties[w.number].stored == w.number and w.number not in operands]

    def _metadata(self, errors: list[WeightError | None], half: Half | None) -> dict[str, Any]:
        measured = {str(i): e.to_map() for i, e in enumerate(errors) if e is not None}
        facts = graph_facts(self.source)
        facts |= parameter_facts(self.source, self.ties, self.floats.made)
        facts["bytes"] = self.source.size
        return {
            "errors": measured,
            "fp16_kept_float32": {} if half is None else half.wide,
            "fp16_kept_nodes": {} if half is None else half.kept,
            "lossless": all(e is None for e in errors),
            "model": facts,
            "producer": f"conx {__version__}",
            "quantized": self.floats.quantized,
            "settings": self.settings.to_map(),
            "shared": self._shared(),
        }

    def _shared(self) -> dict[str, list[str]]:
        """The names of the weights that a tensor stands for beside its own, by its place."""
        names = shared_names(self.source.weights, self.ties)
        return {str(s.place): names[number] for number, s in self.store.tensors.items() if number in names}

    def _verify(self, path: Path) -> Mapping[str, Any] | None:
        """Reopen what was written: every chunk's hash, every graph, every tensor decoded, and its outputs."""
        with Reader(path, verify=Verify.FULL) as reader:
            reader.check()
            for graph in reader.index.graphs:
                reader.graph(graph)
            verify_tensors(reader, self.threads)
            for original in reader.index.originals:
                deque(original_pieces(reader, original, self.threads), maxlen=0)
        if not self.settings.verify:
            return None
        self.outputs, self.unmeasured = measure_outputs(path, self.source, self.settings.calibration)
        return None if self.outputs is None else to_metadata(self.outputs, self.half_error)

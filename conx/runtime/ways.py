"""The ways in which a graph and its weights can be handed to onnxruntime, the best first.

- `device`: with CUDA and CuPy, weights are decoded on the GPU and stay there.
- `memory`: weights are decoded on the host and handed over in memory.
- `files`: a real .onnx with its weights in files, for providers that take nothing else.

Each is prepared when the one before it has failed. Decoding is checked in all of them alike, so an error of the file
ends the opening, whatever the way.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnxruntime

from conx.container.reader import Reader
from conx.container.records import External, Graph
from conx.errors import ConxError, UnsupportedError
from conx.runtime.cuda.device import Device
from conx.runtime.cuda.pipeline import Wanted, decode_on_device, recipe_of
from conx.runtime.decode import Progress, decode_all, thread_count
from conx.runtime.folder import PrivateFolder
from conx.runtime.handover import hand_over
from conx.runtime.injection import Injection, candidates, copyable, give_copies, give_values
from conx.runtime.providers import CPU, CUDA, Provider

__all__ = ["DEVICE_DECODE", "Opening", "Way", "find_device", "ways"]

log = logging.getLogger("conx")

DEVICE_DECODE = (True, False, "auto")

# Providers that are known to take weights in memory, so that another failure of theirs is not tried again with files.
TAKE_MEMORY = {CPU, CUDA, "DmlExecutionProvider", "ROCMExecutionProvider", "MIGraphXExecutionProvider"}
REFUSE_MEMORY = {"OpenVINOExecutionProvider"}

_WARNING, _ERROR = 2, 3  # severities of onnxruntime's log


@dataclass(frozen=True)
class Opening:
    """What is to be opened, and how.

    Attributes:
        reader: the file.
        graph: one of its run graphs.
        model: its message, holes filled.
        options: makes session options that may be changed.
        usable: the providers that will run it; none where they cannot be seen.
        providers: as onnxruntime is given them.
        provider_options: likewise.
        device_decode: True, False or "auto".
        threads: that decode.
        progress: told of decoding.
        repacking: whether the CPU provider alone will run the graph, with repacking on.
        level: the accuracy_level of MatMulNBits.
    """

    reader: Reader
    graph: Graph
    model: bytes
    options: Callable[[], onnxruntime.SessionOptions]
    usable: Sequence[Provider]
    providers: Sequence[Any] | None
    provider_options: Sequence[Mapping[Any, Any]] | None
    device_decode: bool | str
    threads: int | None
    progress: Progress | None
    repacking: bool
    level: int


@dataclass
class Way:
    """A model ready to be opened.

    Attributes:
        name: of the way.
        model: a message, or the path of a file.
        options: for the session.
        keep: what must live as long as the session.
        until_open: what must live until it exists.
        instead: what comes next where onnxruntime refuses, for people; empty: nothing.
        folder: to be removed when the session exists.
    """

    name: str
    model: bytes | str
    options: onnxruntime.SessionOptions
    keep: list[Any] = field(default_factory=list)
    until_open: list[Any] = field(default_factory=list)
    instead: str = ""
    folder: PrivateFolder | None = None

    def close(self) -> None:
        """Let go of what is needed no longer, the session existing or not."""
        self.until_open.clear()
        if self.folder is not None:
            self.folder.remove()


def ways(opening: Opening) -> Iterator[Way]:
    """The ways to try, each prepared when it is asked for.

    Raises:
        FormatError, IntegrityError: the file is damaged.
        UnsupportedError: decoding on the device was demanded and is not possible.
    """
    name, options = opening.usable[0] if opening.usable else ("", {})
    if opening.device_decode is not False:
        way = _device_way(opening, name, options)
        if way is not None:
            yield way
    if name not in REFUSE_MEMORY:
        yield _memory_way(opening, name)
    if name not in TAKE_MEMORY and name:
        yield _files_way(opening)


def find_device(provider: str, options: Mapping[str, Any]) -> Device:
    """The GPU that a provider will run on.

    Raises:
        UnsupportedError: there is none for decoding; the text says why.
    """
    if provider != CUDA:
        raise UnsupportedError(f"the first provider is {provider or 'in the session options'}, not {CUDA}")
    try:
        from conx.runtime.cuda.cupy_device import CuPyDevice, device_count
    except ImportError as e:
        raise UnsupportedError(f'CuPy cannot be imported ({e}): pip install "conx-onnx[cuda13]"') from None
    number = int(options.get("device_id", 0))
    try:
        count = device_count()
        if number >= count:
            raise UnsupportedError(f"device_id is {number}, but CuPy sees {count} GPUs")
        return CuPyDevice(number)
    except UnsupportedError:
        raise
    except Exception as e:  # a driver too old, a compiler that is not there, ...
        raise UnsupportedError(f"CuPy cannot use GPU {number}: {_line(e)}") from e


def _device_way(opening: Opening, provider: str, options: Mapping[str, Any]) -> Way | None:
    """Weights decoded on the device; None where that is not possible and not demanded."""
    try:
        device = find_device(provider, options)
        chosen = [
            (external, wanted, recipe)
            for external in candidates(opening.model, opening.graph.externals, opening.reader.index.tensors)
            for wanted in [_wanted(opening, external)]
            for recipe in [recipe_of(opening.reader, wanted)]
            if recipe is not None
        ]
        rest = _all_but(opening.graph.externals, [external for external, _, _ in chosen])
        if not all(copyable(external, opening.reader.index.tensors[external.tensor]) for external in rest):
            raise UnsupportedError("the graph has weights of types smaller than a byte, which only the host hands over")
        if not chosen:
            raise UnsupportedError("the graph has no large matrix that only MatMul, Gemm or Gather use")
    except UnsupportedError as e:
        if opening.device_decode is True:
            raise UnsupportedError(f"device_decode=True: {e}") from e
        log.debug("decoding on the host: %s", e)
        return None
    try:
        return _on_device(opening, device, chosen, rest)
    except ConxError:
        raise
    except Exception as e:
        if opening.device_decode is True:
            raise UnsupportedError(f"device_decode=True: decoding on the GPU failed: {_line(e)}") from e
        log.warning("decoding on the GPU failed (%s); decoding on the host", _line(e))
        return None


def _on_device(opening: Opening, device: Device, chosen: Sequence[Any], rest: Sequence[External]) -> Way:
    tensors = opening.reader.index.tensors
    recipes = {wanted: recipe for _, wanted, recipe in chosen}  # tied weights are decoded once
    total = sum(wanted.dtype.nbytes(tensors[wanted.tensor].count) for wanted in recipes)
    for_rest = sum(external.nbytes_of(tensors[external.tensor]) for external in rest)
    told = _shifted(opening.progress, 0, total + for_rest)
    found = decode_on_device(opening.reader, [*recipes.items()], device, thread_count(opening.threads), told)
    memory = dict(zip(recipes, found, strict=True))
    injections = [
        Injection(
            external,
            wanted.dtype,
            external.shape_of(tensors[external.tensor]),
            memory[wanted].address,
            memory[wanted],
        )
        for external, wanted, _ in chosen
    ]
    arrays = decode_all(opening.reader, rest, opening.threads, _shifted(opening.progress, total, total + for_rest))
    options = opening.options()
    if options.log_severity_level in (-1, _WARNING):
        options.log_severity_level = _ERROR  # or it warns of each injected weight that it is not constant
    folder = PrivateFolder()
    more, values = give_values(options, injections, folder, device.kind, device.number)
    copies = give_copies(options, rest, tensors, arrays)
    return Way(
        "device", opening.model + more, options, keep=list(memory.values()), until_open=[*values, *copies],
        instead="" if opening.device_decode is True else "decoding on the host", folder=folder,
    )  # fmt: skip


def _memory_way(opening: Opening, provider: str) -> Way:
    tensors, externals = opening.reader.index.tensors, opening.graph.externals
    arrays = decode_all(opening.reader, externals, opening.threads, opening.progress)
    options = opening.options()
    instead = "" if provider in TAKE_MEMORY or not provider else "trying with real files"
    if provider not in ("", CPU) and all(copyable(each, tensors[each.tensor]) for each in externals):
        # The provider has a copy of its own, and what runs on the CPU after all is copied by onnxruntime.
        copies = give_copies(options, externals, tensors, arrays)
        return Way("memory", opening.model, options, until_open=copies, instead=instead)
    handed = hand_over(options, externals, tensors, arrays, repacking=opening.repacking, level=opening.level)
    return Way("memory", opening.model, options, handed.keep, handed.until_open, instead)


def _files_way(opening: Opening) -> Way:
    """The model and its weights as files, where the provider finds them as it would find any model's."""
    externals = opening.graph.externals
    folder = PrivateFolder()
    log.info("the weights are written to %s until the session exists", folder.path)
    try:
        arrays = decode_all(opening.reader, externals, opening.threads, opening.progress)
        for external, array in zip(externals, arrays, strict=True):
            (folder.path / external.location).write_bytes(array.data.cast("B"))
        names = {external.location.lower() for external in externals}
        model = folder.path / next(f"model{n}.onnx" for n in range(len(names) + 1) if f"model{n}.onnx" not in names)
        model.write_bytes(opening.model)
    except BaseException:
        folder.remove()
        raise
    return Way("files", str(model), opening.options(), keep=[folder], folder=folder)


def _wanted(opening: Opening, external: External) -> Wanted:
    tensor = opening.reader.index.tensors[external.tensor]
    return Wanted(external.tensor, external.dtype_of(tensor), external.perm)


def _all_but(externals: Sequence[External], some: Sequence[External]) -> list[External]:
    names = {external.name for external in some}
    return [external for external in externals if external.name not in names]


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Progress of a part, told as that of the whole."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

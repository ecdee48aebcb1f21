"""`conx.InferenceSession`: an onnxruntime session opened from a .conx file.

Loading is a table look-up: take the graph of the precision, decode each weight into a buffer, hand both to onnxruntime.
"""

import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import onnxruntime

from conx.container.header import MAGIC, begins_like_conx
from conx.container.reader import Reader, Verify
from conx.errors import UnsupportedError
from conx.runtime.decode import STORED_LEVEL, Progress, fill_holes
from conx.runtime.handover import NO_REPACKING
from conx.runtime.installed import RUNTIME_ERRORS, check_onnxruntime
from conx.runtime.options import clone_options
from conx.runtime.providers import GPU, only_cpu, usable_providers
from conx.runtime.ways import DEVICE_DECODE, Opening, ways

__all__ = ["PRECISIONS", "InferenceSession", "is_conx"]

check_onnxruntime()

log = logging.getLogger("conx")

PRECISIONS = ("auto", "original", "fp32", "fp16", "int8")
MEMORY = ("auto", "low")
ACCURACY_LEVELS = (0, 1, 2, 3, 4)

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime is untyped
    """An `onnxruntime.InferenceSession` whose model is a .conx file; a plain .onnx is passed through.

    Args:
        path_or_bytes: path, bytes, or a binary file object that can seek.
        sess_options: options for the session. They are cloned, so nothing of the file is left in them; custom operator
            libraries cannot be seen in them: name those in `custom_ops`.
        providers, provider_options: as in onnxruntime.
        precision: "original" (the model's own graph and types), "fp32", "fp16", "int8" (matrices stay int8 in memory),
            or "auto": "original" for a lossless file and a quantized model, else "fp16" where a GPU's provider comes
            first and the error measured when packing allows it, else "fp32".
        memory: "low" keeps onnxruntime from making repacked copies of weights, at the price of speed, and of the last
            bits of outputs where it then computes in another order.
        accuracy_level: of an int8 session: 4 (default) also makes activations int8, block by block, which is fastest; 1
            and 0 compute in float32. As the attribute of onnxruntime's MatMulNBits.
        device_decode: with CUDA, whether large matrices are decoded on the GPU by CuPy and stay there: "auto" where
            that is possible, False never, True always or an error says why not. onnxruntime would warn of each such
            weight, so its warnings are off then, unless `sess_options` ask for more than the default.
        verify: "checksum" checks each chunk's zstd checksum, "full" its SHA-256 before it is decoded.
        progress: called as progress(done, total) with bytes decoded, from the opening thread.
        threads: decoding threads; None: one for each core.
        custom_ops: paths of libraries of custom operators.
        **kwargs: as in onnxruntime. `enable_fallback` is off unless given: a provider that fails says so.

    Attributes:
        precision: the precision that was opened.
        opened_by: how the weights came in: "device", "memory" or "files".

    Raises:
        FormatError, IntegrityError: the file is damaged.
        UnsupportedError: the file has no graph for this precision, or needs a newer conx.
    """

    precision: str
    opened_by: str = "memory"
    # Buffers that onnxruntime refers to, and how to open the file again. Set last: until then, a session that is opened
    # again by `set_providers` still has its former ones.
    _keep: Sequence[Any] = ()
    _again: tuple[Any, Any, dict[str, Any]] | None = None

    def __init__(
        self,
        path_or_bytes: Source,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        precision: str = "auto",
        memory: str = "auto",
        accuracy_level: int | None = None,
        device_decode: bool | str = "auto",
        verify: str = "checksum",
        progress: Progress | None = None,
        threads: int | None = None,
        custom_ops: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        _check_choice("precision", precision, PRECISIONS)
        _check_choice("memory", memory, MEMORY)
        _check_choice("verify", verify, tuple(v.value for v in Verify))
        if accuracy_level is not None:
            _check_choice("accuracy_level", accuracy_level, ACCURACY_LEVELS)
        _check_choice("device_decode", device_decode, DEVICE_DECODE)
        if not is_conx(path_or_bytes):
            self._pass_through(path_or_bytes, sess_options, providers, provider_options, precision, kwargs)
            return

        def own_options() -> onnxruntime.SessionOptions:
            options = clone_options(sess_options, custom_ops)
            if memory == "low":
                options.add_session_config_entry(NO_REPACKING, "1")
            return options

        kwargs.setdefault("enable_fallback", 0)
        usable = usable_providers(sess_options, providers, provider_options)
        with Reader(path_or_bytes, verify=Verify(verify)) as reader:
            chosen = _choose(reader, precision, [name for name, _ in usable])
            graph = reader.index.serving(chosen)
            assert graph is not None  # _choose answers with a precision that is there
            opening = Opening(
                reader,
                graph,
                model=fill_holes(reader, graph, threads, accuracy_level),
                options=own_options,
                usable=usable,
                providers=providers,
                provider_options=provider_options,
                device_decode=device_decode,
                threads=threads,
                progress=progress,
                repacking=memory != "low" and only_cpu(usable) and _repacking(sess_options),
                level=STORED_LEVEL if accuracy_level is None else accuracy_level,
            )
            log.info("opening %s at precision %s", _label(path_or_bytes), chosen)
            on_cpu = usable[:1] and usable[0][0] not in GPU
            keep = self._open(opening, _without_crash(kwargs) if chosen == "fp16" and on_cpu else kwargs)
        self._model_bytes = None  # onnxruntime has parsed it
        self.precision, self._keep = chosen, keep
        self._again = (
            _path_only(path_or_bytes),
            sess_options,
            {
                "precision": precision,
                "memory": memory,
                "accuracy_level": accuracy_level,
                "device_decode": device_decode,
                "verify": verify,
                "custom_ops": custom_ops,
                **kwargs,
            },
        )

    def _open(self, opening: Opening, kwargs: dict[str, Any]) -> list[Any]:
        """Open in the first way that onnxruntime takes; answers what must live as long as the session."""
        for way in ways(opening):
            try:
                super().__init__(way.model, way.options, opening.providers, opening.provider_options, **kwargs)
            except RUNTIME_ERRORS as e:
                if not way.instead:
                    raise
                way.keep.clear()  # on a GPU there may not be room for both
                log.warning("onnxruntime refuses this way of opening (%s); %s", " ".join(str(e).split()), way.instead)
            else:
                self.opened_by = way.name
                return way.keep
            finally:
                way.close()
        raise AssertionError("the last way has no other to fall back to")

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        """As in onnxruntime: opens the model again with other providers. A .conx is read again from its path.

        Raises:
            RuntimeError: the .conx did not come from a path, so it is no longer at hand.
        """
        if self._again is None:
            super().set_providers(providers, provider_options)
            return
        source, options, settings = self._again
        if not isinstance(source, (str, os.PathLike)):
            raise RuntimeError("set_providers: this .conx was not opened from a path; open another session")
        self.__init__(source, options, providers, provider_options, **settings)  # type: ignore[misc]  # as onnxruntime does

    def _pass_through(
        self,
        model: Any,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any] | None,
        provider_options: Sequence[dict[Any, Any]] | None,
        precision: str,
        kwargs: dict[str, Any],
    ) -> None:
        if precision not in ("auto", "original"):
            raise UnsupportedError(
                f"{_label(model)} is no .conx file: it has no precision {precision!r}; pack it first"
            )
        if not isinstance(model, (str, os.PathLike, bytes)):
            model = bytes(model) if isinstance(model, (bytearray, memoryview)) else model.read()
        self.precision = "original"
        super().__init__(model, options, providers, provider_options, **kwargs)


def is_conx(source: Source) -> bool:
    """Whether `source` is a .conx file, perhaps a damaged one, rather than an .onnx model.

    The magic decides; a file whose name ends in .conx is one whatever it holds, so that damage to the magic is
    reported as such. A file object is left at its start.
    """
    if isinstance(source, (str, os.PathLike)):
        if os.fspath(source).lower().endswith(".conx"):
            return True
        try:
            with open(source, "rb") as file:
                head = file.read(len(MAGIC))
        except OSError:
            return False
    elif isinstance(source, (bytes, bytearray, memoryview)):
        head = bytes(source[: len(MAGIC)])
    elif isinstance(source, io.IOBase) or hasattr(source, "read"):
        source.seek(0)
        head = source.read(len(MAGIC))
        source.seek(0)
    else:
        raise TypeError(f"a model is a path, bytes or a binary file object, not {type(source).__name__}")
    return begins_like_conx(head)


def _choose(reader: Reader, precision: str, providers: Sequence[str]) -> str:
    available = sorted(p for graph in reader.index.graphs for p in graph.precisions)
    if precision == "auto":
        metadata = reader.index.metadata
        passed = metadata.get("passed")
        quantized = metadata.get("quantized") is True
        fast = providers[:1] and providers[0] in GPU and isinstance(passed, list) and "fp16" in passed
        if fast and "fp16" in available and (quantized or metadata.get("lossless") is not True):
            precision = "fp16"
        elif quantized or metadata.get("lossless") is True or "fp32" not in available:
            precision = "original"
        else:
            precision = "fp32"
    if precision not in available:
        raise UnsupportedError(
            f"precision {precision!r} is not in this file, which has {', '.join(available) or 'none'};"
            " open it with one of these, or pack the model again"
        )
    return precision


def _without_crash(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for a float16 graph, without the optimization that crashes on the CPU provider.

    With the casts that this provider has put in, onnxruntime 1.31 and 1.32 end in a segmentation fault where a
    transposed float16 input, its first axis not in its place, is multiplied by a constant matrix.
    """
    disabled = {*(kwargs.get("disabled_optimizers") or ()), "MatmulTransposeFusion"}
    return {**kwargs, "disabled_optimizers": sorted(disabled)}


def _repacking(options: onnxruntime.SessionOptions | None) -> bool:
    """Whether the options let the CPU provider repack weights."""
    if options is None:
        return True
    try:
        return bool(options.get_session_config_entry(NO_REPACKING) != "1")
    except RuntimeError:  # the entry is not there
        return True


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose {', '.join(map(repr, choices))}")


def _path_only(source: Source) -> Any:
    """The path of a source, or None: a session does not hold on to a file's bytes."""
    return Path(source).absolute() if isinstance(source, (str, os.PathLike)) else None


def _label(source: Any) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the model"

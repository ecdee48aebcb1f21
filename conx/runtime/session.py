"""`conx.InferenceSession`: an onnxruntime session opened from a .conx file.

Loading is a table look-up: take the graph of the precision, decode each weight into a buffer, hand both to onnxruntime.
Weights reach it by two ways. What it copies into a layout of its own anyway (`repacked`: MatMul, Conv, recurrent
operators) goes as OrtValues, which are dropped when the session exists. The rest goes as files in memory with
the key that makes onnxruntime use our buffers directly: no copy, and the session object keeps them alive.
"""

import io
import logging
import os
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np
import onnxruntime

from conx.container.header import MAGIC
from conx.container.reader import Reader, Verify
from conx.container.records import External, Graph
from conx.dtypes import DType
from conx.errors import FormatError, UnsupportedError
from conx.runtime.decode import Progress, decode_all, fill_holes
from conx.runtime.options import clone_options

__all__ = ["PRECISIONS", "InferenceSession", "is_conx"]

log = logging.getLogger("conx")

PRECISIONS = ("auto", "original", "fp32")
MEMORY = ("auto", "low")
USE_BUFFERS = "session.use_external_initializer_file_buffers_directly"
NO_REPACKING = "session.disable_prepacking"
# Element types that an OrtValue takes from a NumPy array as they are.
ORTVALUE_TYPES = (DType.FLOAT32, DType.FLOAT16, DType.FLOAT64, DType.INT8, DType.UINT8, DType.INT32, DType.INT64)

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]  # onnxruntime is untyped
    """An `onnxruntime.InferenceSession` whose model is a .conx file; a plain .onnx is passed through.

    Args:
        path_or_bytes: path, bytes, or a binary file object that can seek.
        sess_options: options for the session. They are cloned, so nothing of the file is left in them; custom operator
            libraries cannot be seen in them: name those in `custom_ops`.
        providers, provider_options: as in onnxruntime.
        precision: "original" (the model's own graph and types), "fp32", or "auto".
        memory: "low" keeps onnxruntime from making repacked copies of weights, at the price of speed.
        verify: "checksum" checks each chunk's zstd checksum, "full" its SHA-256 before it is decoded.
        progress: called as progress(done, total) with bytes decoded, from the opening thread.
        threads: decoding threads; None: one for each core.
        custom_ops: paths of libraries of custom operators.
        **kwargs: as in onnxruntime. `enable_fallback` is off unless given: a provider that fails says so.

    Attributes:
        precision: the precision that was opened.

    Raises:
        FormatError, IntegrityError: the file is damaged.
        UnsupportedError: the file has no graph for this precision, or needs a newer conx.
    """

    precision: str

    def __init__(
        self,
        path_or_bytes: Source,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        precision: str = "auto",
        memory: str = "auto",
        verify: str = "checksum",
        progress: Progress | None = None,
        threads: int | None = None,
        custom_ops: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        _check_choice("precision", precision, PRECISIONS)
        _check_choice("memory", memory, MEMORY)
        _check_choice("verify", verify, tuple(v.value for v in Verify))
        self._keep: list[Any] = []
        if not is_conx(path_or_bytes):
            self._pass_through(path_or_bytes, sess_options, providers, provider_options, precision, kwargs)
            return
        options = clone_options(sess_options, custom_ops)
        if memory == "low":
            options.add_session_config_entry(NO_REPACKING, "1")
        with Reader(_openable(path_or_bytes), verify=Verify(verify)) as reader:
            self.precision = _choose(reader, precision)
            graph = reader.index.serving(self.precision)
            assert graph is not None  # _choose answers with a precision that is there
            model = fill_holes(reader, graph, threads)
            temporary = self._hand_over(reader, graph, options, memory, threads, progress)
        log.info("opening %s at precision %s", _label(path_or_bytes), self.precision)
        kwargs.setdefault("enable_fallback", 0)
        super().__init__(model, options, providers, provider_options, **kwargs)
        del temporary
        self._model_bytes = None  # onnxruntime has parsed it

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        """Refused for a .conx: onnxruntime would make the session again, and the weights have been handed over.

        Raises:
            RuntimeError: always, for a .conx; open another session with these providers.
        """
        if self._keep:
            raise RuntimeError("set_providers: a .conx session is opened with its providers; open another one")
        super().set_providers(providers, provider_options)

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
            raise UnsupportedError(f"{_label(model)} is no .conx file: it has no precision {precision!r}; pack it first")
        if not isinstance(model, (str, os.PathLike, bytes)):
            model = bytes(model) if isinstance(model, (bytearray, memoryview)) else model.read()
        self.precision = "original"
        super().__init__(model, options, providers, provider_options, **kwargs)

    def _hand_over(
        self,
        reader: Reader,
        graph: Graph,
        options: onnxruntime.SessionOptions,
        memory: str,
        threads: int | None,
        progress: Progress | None,
    ) -> list[Any]:
        """Give the graph's weights to `options`. Returns what must live until the session exists."""
        arrays = decode_all(reader, graph.externals, threads, progress)
        values: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for external, array in zip(graph.externals, arrays, strict=True):
            tensor = reader.index.tensors[external.tensor]
            if memory == "auto" and _as_ortvalue(external, external.dtype_of(tensor), array):
                shaped = array.reshape(external.shape_of(tensor))
                values[external.name] = onnxruntime.OrtValue.ortvalue_from_numpy(shaped)
            else:
                files[external.location] = array
        if files:
            options.add_session_config_entry(USE_BUFFERS, "1")
            options.add_external_initializers_from_files_in_memory(
                list(files), list(files.values()), [array.nbytes for array in files.values()]
            )
        if values:
            options.add_external_initializers(list(values), list(values.values()))
        self._keep = [*files.values()] or [None]
        return [*values.values(), arrays]


def is_conx(source: Source) -> bool:
    """Whether `source` is a .conx file, perhaps a damaged one, rather than an .onnx model.

    The magic decides; a file whose name ends in .conx is one whatever it holds, so that damage to the magic is reported as
    such. A file object is left at its start.
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
    equal = sum(a == b for a, b in zip(head, MAGIC, strict=False))
    return equal >= len(MAGIC) - 2 or (equal == len(head) > 0)


def _choose(reader: Reader, precision: str) -> str:
    available = sorted(p for graph in reader.index.graphs for p in graph.precisions)
    if precision == "auto":
        lossless = reader.index.metadata.get("lossless") is True
        precision = "fp32" if "fp32" in available and not lossless else "original"
    if precision not in available:
        raise UnsupportedError(
            f"precision {precision!r} is not in this file, which has {', '.join(available) or 'none'};"
            " open it with one of these, or pack the model again"
        )
    return precision


def _as_ortvalue(external: External, dtype: DType, array: np.ndarray[Any, Any]) -> bool:
    return external.repacked and dtype in ORTVALUE_TYPES and array.size > 0


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose {', '.join(map(repr, choices))}")


def _openable(source: Source) -> Any:
    return source


def _label(source: Any) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else "the model"

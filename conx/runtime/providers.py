"""The execution providers that a session is asked for, as far as they can be used here."""

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnxruntime

from conx.runtime.options import IDENTITY, quiet_options

__all__ = ["CPU", "CUDA", "GPU", "Provider", "only_cpu", "usable_providers"]

log = logging.getLogger("conx")

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
AZURE = "AzureExecutionProvider"  # stands before the CPU's in the list of all providers, and runs no ordinary node
# Where float16 is fast. Elsewhere it is computed in float32, with casts.
GPU = {
    CUDA,
    "DmlExecutionProvider",
    "MIGraphXExecutionProvider",
    "NvTensorRTRTXExecutionProvider",
    "ROCMExecutionProvider",
    "TensorrtExecutionProvider",
    "WebGpuExecutionProvider",
}
NEED_CUDA = {CUDA, "NvTensorRTRTXExecutionProvider", "TensorrtExecutionProvider"}

Provider = tuple[str, Mapping[str, Any]]
"""A provider's name and its options."""


def usable_providers(
    session_options: onnxruntime.SessionOptions | None,
    providers: Sequence[Any] | None,
    provider_options: Sequence[Mapping[Any, Any]] | None,
) -> list[Provider]:
    """The providers that will run a model, in their order; none where session options have some, unseen from Python.

    onnxruntime leaves out a provider that it was not built with, or whose libraries, driver or device are missing, and
    goes on with the others. So does this, with a warning for a provider that was asked for.
    """
    if session_options is not None and session_options.has_providers():
        return []
    available = onnxruntime.get_available_providers()
    found: list[Provider] = []
    for number, each in enumerate(providers or available):
        name, own = (
            (each, (provider_options or [])[number : number + 1]) if isinstance(each, str) else (each[0], each[1:])
        )
        options = {str(k): str(v) for options in own for k, v in options.items()}
        if name in (CPU, AZURE) or (
            name in available and _can_be_made(name, tuple(options.items()), providers is None)
        ):
            found.append((name, options))
        elif providers is not None:
            log.warning("%s cannot be used here, so another provider runs the model; see `conx doctor`", name)
    return [each for each in found if each[0] != AZURE] or [(CPU, {})]


@cache
def _can_be_made(name: str, options: tuple[tuple[str, str], ...], by_default: bool) -> bool:
    """Whether a session of a tiny model gets the provider.

    An error is one of onnxruntime's about a provider that was asked for: it will come again, and be told.
    """
    if name in NEED_CUDA:
        _load_cuda_libraries()
    try:
        session = onnxruntime.InferenceSession(
            IDENTITY, quiet_options(), providers=[(name, dict(options)), CPU], enable_fallback=0
        )
    except Exception:  # noqa: BLE001 - onnxruntime's errors have no common base but this
        return not by_default
    return name in session.get_providers()


def only_cpu(usable: Sequence[Provider]) -> bool:
    """Whether the CPU's provider alone will run a model."""
    return [name for name, _ in usable] == [CPU]


@cache
def _load_cuda_libraries() -> None:
    """Load CUDA's libraries from where pip has put them, which is not where the system looks."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        try:
            onnxruntime.preload_dlls()
        except (OSError, RuntimeError) as e:
            print(e, file=told)
    for line in told.getvalue().splitlines():
        log.debug("CUDA's libraries: %s", line)

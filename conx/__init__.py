"""Store ONNX models small, run them at full precision.

    import conx
    conx.pack("model.onnx", "model.conx")
    session = conx.InferenceSession("model.conx")       # is an onnxruntime.InferenceSession

Public names are loaded when they are first used: importing conx loads neither onnx nor onnxruntime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conx._version import __version__
from conx.errors import ConxError, FormatError, IntegrityError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from conx.arrays import dequantize_array
    from conx.checking import check
    from conx.dequantizing import dequantize
    from conx.inspection import inspect
    from conx.packing.pipeline import pack
    from conx.packing.report import PackReport
    from conx.runtime.session import InferenceSession
    from conx.unpacking import unpack
    from conx.verification import VerifyReport, verify

__all__ = [
    "ConxError",
    "FormatError",
    "InferenceSession",
    "IntegrityError",
    "ModelError",
    "PackReport",
    "UnsupportedError",
    "VerifyReport",
    "__version__",
    "check",
    "dequantize",
    "dequantize_array",
    "inspect",
    "pack",
    "unpack",
    "verify",
]

# Where each public name lives, and the extra of the distribution that it needs.
_HOMES = {
    "InferenceSession": ("conx.runtime.session", "cpu"),
    "PackReport": ("conx.packing.report", "pack"),
    "check": ("conx.checking", ""),
    "dequantize": ("conx.dequantizing", "pack"),
    "dequantize_array": ("conx.arrays", ""),
    "inspect": ("conx.inspection", ""),
    "pack": ("conx.packing.pipeline", "pack"),
    "unpack": ("conx.unpacking", "pack"),
    "VerifyReport": ("conx.verification", "cpu"),
    "verify": ("conx.verification", "cpu"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'conx' has no attribute {name!r}")
    module, extra = _HOMES[name]
    try:
        value = getattr(import_module(module), name)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.split(".")[0] == "conx" or not extra:
            raise
        raise UnsupportedError(f'conx.{name} needs the package {e.name}: pip install "conx-onnx[{extra}]"') from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

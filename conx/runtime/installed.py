"""Is the onnxruntime at hand one that conx can use?

Two distributions, onnxruntime and onnxruntime-gpu, install the same module over each other; with both, which one is
imported is chance.
"""

import re
import warnings
from pathlib import Path

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

from conx.errors import UnsupportedError

__all__ = ["FLOOR", "RUNTIME_ERRORS", "check_onnxruntime"]

# What onnxruntime raises: some of its errors are RuntimeErrors, the others have no common base but Exception.
RUNTIME_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)

FLOOR = (1, 31)  # the first that uses buffers of external initializers without copying them
WHEELS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")


def check_onnxruntime() -> None:
    """Raise UnsupportedError for an onnxruntime that is too old; warn where two distributions of it are installed."""
    found = re.match(r"(\d+)\.(\d+)", onnxruntime.__version__)
    if found and (int(found[1]), int(found[2])) < FLOOR:
        floor = ".".join(map(str, FLOOR))
        raise UnsupportedError(
            f"onnxruntime {onnxruntime.__version__} is too old: conx needs {floor} or newer;"
            f' pip install -U "onnxruntime>={floor}"'
        )
    site = Path(onnxruntime.__file__).parent.parent
    both = sorted(name for name in WHEELS if any(site.glob(f"{name.replace('-', '_')}-*.dist-info")))
    if len(both) > 1:
        warnings.warn(
            f"{' and '.join(both)} are installed together, but are the same module: uninstall all and install one",
            RuntimeWarning,
            stacklevel=2,
        )

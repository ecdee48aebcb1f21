"""SessionOptions of one's own: a clone of the caller's, so that nothing of a .conx is left in his object.

onnxruntime's SessionOptions cannot be copied from Python. But a session gives out the options it was made with: a
session of a model with one Identity node is opened with the caller's options and asked for them.
"""

from collections.abc import Sequence

import onnxruntime

__all__ = ["IDENTITY", "clone_options", "quiet_options"]

# ModelProto: ir_version 8, opset 13, graph "g": y = Identity(x), both float32 scalars.
IDENTITY = bytes.fromhex(
    "08083a2f0a100a017812017922084964656e746974791201675a0b0a017812060a0408011200620b0a017912060a040801120042040a00100d"
)


def clone_options(
    given: onnxruntime.SessionOptions | None, custom_ops: Sequence[str] = ()
) -> onnxruntime.SessionOptions:
    """Options equal to `given` (None: the defaults) that may be changed freely.

    Args:
        given: the caller's options; left as they are.
        custom_ops: libraries of custom operators to register; those of `given` cannot be seen from Python.
    """
    if given is None:
        options = onnxruntime.SessionOptions()
    else:
        path, profiling = given.optimized_model_filepath, given.enable_profiling
        try:
            given.optimized_model_filepath, given.enable_profiling = "", False
            probe = onnxruntime.InferenceSession(IDENTITY, given, providers=["CPUExecutionProvider"])
        finally:
            given.optimized_model_filepath, given.enable_profiling = path, profiling
        options = probe.get_session_options()
        options.optimized_model_filepath, options.enable_profiling = path, profiling
    for library in custom_ops:
        options.register_custom_ops_library(library)
    return options


def quiet_options() -> onnxruntime.SessionOptions:
    """Options of a session that logs nothing: for trying whether something runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options

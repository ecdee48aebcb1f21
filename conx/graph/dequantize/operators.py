"""Which operators are quantized."""

from conx.graph.facts import is_quantized_operator

__all__ = ["is_quantized_type"]

OTHERS = ("qembed", "qordered", "fpq4", "gemmfloat8")  # parts of names of operators that onnxruntime adds


def is_quantized_type(op_type: str) -> bool:
    """Whether an operator has quantized operands."""
    return is_quantized_operator(op_type) or any(part in op_type.lower() for part in OTHERS)

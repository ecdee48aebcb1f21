"""Undo the quantization of a model; one module for each family of operators."""

from conx.graph.dequantize.frames import Left
from conx.graph.dequantize.result import Dequantized, Report, dequantized
from conx.graph.dequantize.weights import FloatWeight

__all__ = ["Dequantized", "FloatWeight", "Left", "Report", "dequantized"]

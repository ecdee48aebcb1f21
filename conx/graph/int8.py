"""The int8 graph: matrices stay int8 codes in memory, and the session computes with them.

MatMul and Gemm by a constant matrix become MatMulNBits with 8 bits (a contributed operator that onnxruntime's CPU and
CUDA providers have), built of the codes and scales as they are stored. Of an embedding, codes are gathered and the
gathered rows dequantized. All other weights are decoded to floats.

Which weights have codes, and on which grid, is decided by whoever stores them (`CodeSource`).
"""

import re
from dataclasses import dataclass

import onnx

from conx.graph.coded_nodes import ACCURACY, GATHER, MICROSOFT, REWRITES, CodedNodes, CodeSource, Rewrites
from conx.graph.derived import Derived
from conx.graph.fp16_graph import drop_unused, forget_defaults, inlined
from conx.graph.lift import nested_graphs

__all__ = ["Int8", "coded_uses", "to_int8", "with_coded_rows"]

LEVEL = b"\n\x0eaccuracy_level\x18" + bytes([ACCURACY])  # the attribute in a message: its name, then its value


@dataclass
class Int8:
    """The int8 model, whose stubs beyond those of weights are of `derived`, in their order."""

    model: onnx.ModelProto
    derived: list[Derived]

    def level_places(self, message: bytes) -> tuple[int, ...]:
        """Positions of the bytes of a message made of the model that are an accuracy_level.

        Empty if they cannot be told from other bytes that look alike.
        """
        places = [found.end() - 1 for found in re.finditer(re.escape(LEVEL), message)]
        count = sum(_count_nbits(g) for g in (self.model.graph, *nested_graphs(self.model.graph)))
        return tuple(places) if len(places) == count else ()


def _count_nbits(graph: onnx.GraphProto) -> int:
    return sum(node.op_type == "MatMulNBits" for node in graph.node)


def to_int8(model: onnx.ModelProto, weights: int, codes: CodeSource) -> Int8:
    """Make the int8 model of a float32 one with stubs, which is not changed.

    Args:
        model: computes in float32; local functions are inlined where they can be.
        weights: how many weights there are: numbers of stubs beyond them are free.
        codes: what is known of them.
    """
    return _rewritten(model, weights, codes, REWRITES)


def with_coded_rows(model: onnx.ModelProto, weights: int, codes: CodeSource) -> Int8:
    """Make the float32 model whose embeddings are codes, of which the gathered rows alone are dequantized.

    That gives the very same values, from a quarter of the memory. Arguments as of `to_int8`; `codes` should answer None
    for weights that are not only gathered from, which would be there twice.
    """
    return _rewritten(model, weights, codes, {GATHER: REWRITES[GATHER]})


def _rewritten(model: onnx.ModelProto, weights: int, codes: CodeSource, rewrites: Rewrites) -> Int8:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.ClearField("training_info")
    if made.functions:
        made = inlined(made)
    if made.ir_version < 4:  # there, every initializer is an input too, and as constant as any
        forget_defaults(made.graph)
    run = CodedNodes(made, weights, codes, rewrites)
    run.graph(made.graph, {})
    if run.derived:
        run.drop_moves(made.graph)
        drop_unused(made.graph, {})
        if all(o.domain != MICROSOFT for o in made.opset_import):
            made.opset_import.add(domain=MICROSOFT, version=1)
    return Int8(made, run.derived)


def coded_uses(model: onnx.ModelProto) -> list[tuple[int, int]]:
    """The (weight, axis of its channels) for which `to_int8` would ask, each once."""
    seen: dict[tuple[int, int], None] = {}
    to_int8(model, 0, lambda weight, axis: seen.setdefault((weight, axis)))
    return list(seen)

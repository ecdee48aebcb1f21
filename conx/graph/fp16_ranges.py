"""Between which values a model's floats lie, and what follows from it for a float16 graph."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from conx.graph.fp16 import Half
from conx.graph.fp16_rules import CLIPPED
from conx.graph.fp16_values import LARGEST
from conx.graph.lift import nested_graphs

__all__ = ["main_values", "overflowing", "with_ranges"]

MARGIN = 4.0  # how far values on other inputs may lie beyond those that were seen


def overflowing(wide: onnx.ModelProto, half: Half, ranges: Mapping[str, tuple[float, float]]) -> dict[str, str]:
    """Nodes that give or take values beyond what float16 holds with a margin, and how large these are."""
    peaks = {name: max(-low, high) for name, (low, high) in ranges.items()}
    large = {name for name, peak in peaks.items() if LARGEST / MARGIN < peak < np.inf}
    narrow = set(half.narrow.values())
    known = {t.name for t in wide.graph.initializer}
    found: dict[str, str] = {}
    for node in (n for graph in (wide.graph, *nested_graphs(wide.graph)) for n in graph.node):
        first = node.output[0] if node.output else ""
        if node.op_type == "Constant":
            known.add(first)
        if first not in narrow:
            continue
        given = [name for name in node.input if name in large]
        if node.op_type in CLIPPED and not given:
            # Beyond the range is only a constant, that of a mask or a bound.
            large -= set(node.output) if known & set(node.input) else set()
        given += [name for name in node.output if name in large]
        if given:
            worst = max(peaks[name] for name in given)
            found[first] = f"values beyond float16's range or near its end: up to {worst:.3g}"
    return found


def with_ranges(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with two outputs more for each of some float32 values: its least and its largest element, [1] each.

    onnxruntime starts from the last of the nodes that nothing else needs, and computes what that needs first. So the
    nodes for the earliest values come last: they run as soon as their value is there, and it is freed.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    graph.initializer.append(helper.make_tensor("conx/flat", TensorProto.INT64, [1], [-1]))
    order = {name: i for i, name in enumerate(name for node in graph.node for name in node.output)}
    for name in sorted(names, key=lambda n: -order.get(n, -1)):
        flat = f"conx/flat/{name}"
        graph.node.append(helper.make_node("Reshape", [name, "conx/flat"], [flat]))
        graph.node.append(helper.make_node("ReduceMin", [flat], [f"conx/least/{name}"], keepdims=1))
        graph.node.append(helper.make_node("ReduceMax", [flat], [f"conx/most/{name}"], keepdims=1))
    for name in names:
        for end in ("least", "most"):
            graph.output.append(helper.make_tensor_value_info(f"conx/{end}/{name}", TensorProto.FLOAT, [1]))
    return made


def main_values(graph: onnx.GraphProto) -> set[str]:
    """What the main graph is given and makes; not what lies in its subgraphs."""
    return {v.name for v in graph.input} | {name for node in graph.node for name in node.output}

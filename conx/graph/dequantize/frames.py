"""Graphs being rewritten: the values in scope, and the nodes and constants of the new graph."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from conx.graph.dequantize.constants import Constant
from conx.graph.dequantize.values import UNKNOWN, Value
from conx.graph.dequantize.weights import FloatWeight
from conx.graph.read import Weight

__all__ = ["Frame", "Left", "Run"]

_NUMPY: dict[int, Any] = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}


@dataclass(frozen=True)
class Left:
    """A quantized operator that stays: its type, the node's name or first output, and why."""

    op_type: str
    node: str
    reason: str


@dataclass
class Run:
    """One run over a model.

    Attributes:
        weights: the source's, to which the run adds its own.
        taken: names that something has.
        opsets: versions of the operator sets.
        keep: whether quantization of activations stays.
        made: what was undone, by operator.
        why: reasons, by the first output of the node that stays.
    """

    weights: list[Weight | FloatWeight]
    source: Sequence[Weight]
    taken: set[str]
    opsets: dict[str, int]
    keep: bool
    made: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)
    known: dict[tuple[Any, ...], Value] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        return self.opsets[""]

    def fresh(self, name: str, part: str = "float") -> str:
        """A new name after another: that which integers probably had as floats, if it is free."""
        before = name.removesuffix("_quantized")
        if part == "float" and before not in (name, "") and before not in self.taken:
            self.taken.add(before)
            return before
        new, number = f"{name}/{part}", 0
        while new in self.taken:
            number += 1
            new = f"{name}/{part}_{number}"
        self.taken.add(new)
        return new


class Frame:
    """A graph or a function's body.

    Args:
        run: what the frames of a model share.
        graph: where initializers go; None in a function.
        outer: the frame around it.
    """

    def __init__(self, run: Run, graph: onnx.GraphProto | None, outer: "Frame | None" = None) -> None:
        self.run, self.graph, self.outer = run, graph, outer
        self.values: dict[str, Value] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.NodeProto] = []  # of a function: before all other nodes
        self.initializers: list[onnx.TensorProto] = []
        self.cache: dict[tuple[Any, ...], Value] = {}
        self.outputs: set[str] = set()
        self.wanted: dict[str, str] = {}  # by the name of integers: the name that their floats have later on

    def get(self, name: str) -> Value | None:
        """The value of that name in the source; None for an input that is left out."""
        if not name:
            return None
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.values[name]
            frame = frame.outer
        return self.define(Value(name))

    def define(self, value: Value, name: str = "") -> Value:
        """Put a value into scope, under its own name or another."""
        self.values[name or value.name] = value
        return value

    def cached(self, key: tuple[Any, ...]) -> Value | None:
        """What was made before under this key, here or around."""
        frame: Frame | None = self
        while frame is not None:
            if key in frame.cache:
                return frame.cache[key]
            frame = frame.outer
        return None

    def emit(
        self,
        op_type: str,
        inputs: Iterable[Value | str | None],
        want: str = "",
        *,
        like: str = "",
        kind: int = UNKNOWN,
        rank: int | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Value:
        """Add a node of one output and define that.

        Args:
            op_type: operator.
            inputs: values or names; None: left out.
            want: name of the output; "": a new one after `like`.
            like: see `want`.
            kind: element type of the output.
            rank: its axes.
            domain: of the operator.
            attributes: the node's.
        """
        name = want or self.run.fresh(like or "value")
        names = ["" if v is None else v if isinstance(v, str) else v.name for v in inputs]
        while names and not names[-1]:
            names.pop()
        self.nodes.append(helper.make_node(op_type, names, [name], domain=domain, **attributes))
        return self.define(Value(name, kind, rank))

    def constant(self, values: Any, like: str, kind: int = UNKNOWN) -> Value:
        """Add a small constant, of a float type if `kind` says one."""
        name = self.run.fresh(like, "constant")
        array = np.asarray(values)
        if kind in (TensorProto.FLOAT, TensorProto.DOUBLE):
            tensor = numpy_helper.from_array(array.astype(_NUMPY[kind]), name)
        elif kind != UNKNOWN:
            flat = array.reshape(-1).tolist()
            tensor = helper.make_tensor(name, kind, array.shape, flat)
        else:
            tensor = numpy_helper.from_array(array, name)
        self.add_tensor(tensor)
        value = Value(
            name, tensor.data_type, array.ndim, Constant(tensor, self.run.source), self, scalar=array.size == 1
        )
        return self.define(value)

    def add_tensor(self, tensor: onnx.TensorProto) -> None:
        """Add a tensor of a name: an initializer, or in a function a Constant node."""
        if self.graph is not None:
            self.initializers.append(tensor)
        else:
            self.constants.append(helper.make_node("Constant", [], [tensor.name], value=tensor))

    def keep(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """Add a node of the source, fed by what its inputs are called now; its outputs are defined if they aren't."""
        for slot, name in enumerate(node.input):
            value = self.get(name)
            if value is not None:
                node.input[slot] = value.name
        self.nodes.append(node)
        for name in node.output:
            if name and name not in self.values:
                self.define(Value(name))
        return node

    def stays(self, node: onnx.NodeProto, reason: str) -> None:
        """Add a quantized node as it is and note why."""
        self.run.why.setdefault(next(filter(None, node.output), ""), reason)
        self.keep(node)

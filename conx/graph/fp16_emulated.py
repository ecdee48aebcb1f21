"""Float16 emulated in float32: what a float16 graph computes, on a machine that computes in float32.

onnxruntime's CPU provider does not show it: it has float32 kernels alone, and removes the casts between them, so that
nothing is rounded and nothing overflows. Here every value that the graph has as float16 is cast to float16 and back by
nodes of the graph, which stay. Between nodes this gives a GPU's values, whose sums within a node are float32 too.

With switches, each node's rounding, of what it gives and of the weights and float32 values that it is fed, can be left
out in any run of one session.
"""

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from conx.graph.fp32 import Value, Widening
from conx.graph.fp32_fields import SHORT
from conx.graph.read import weight_number

__all__ = ["Emulation"]

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
SWITCH = "conx/switch/"
# Of float16 values they give float16 values.
EXACT = {
    "Abs", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements",
    "GatherND", "GlobalMaxPool", "Identity", "Max", "MaxPool", "Min", "Neg", "Pad", "Relu", "Reshape",
    "ScatterElements", "ScatterND", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "Where",
}  # fmt: skip


class Emulation(Widening):
    """Makes the emulated graph of a model with float16 parts.

    Args:
        model: the float16 graph; weights may be stubs. Not changed.
        switched: first outputs of the nodes that can be switched, and what their switches are called; None: no
            switches. A switch is an input, a boolean scalar; true rounds. Needs opset 9.
        weights: whether the rounding of weights can be switched too; they take three times the memory then.
    """

    def __init__(
        self, model: onnx.ModelProto, switched: Mapping[str, str] | None = None, *, weights: bool = True
    ) -> None:
        super().__init__(model)
        self.switched, self.weights = switched, weights
        self.exact_weights: dict[str, str] = {}  # by float16 initializer: the same as float32
        self.unrounded: dict[str, str] = {}  # by cast value: what it was cast from
        self.used: dict[str, None] = {}
        self.former: dict[str, str] = {}  # first outputs that were renamed

    @property
    def switches(self) -> list[str]:
        """Names of the inputs that switch, in the order of the nodes."""
        return [self.name(name) for name in self.used]

    def name(self, node: str) -> str:
        """The input that is a node's switch."""
        return SWITCH + node

    def run(self) -> onnx.ModelProto:
        """Convert; gives the new model."""
        made = super().run()
        made.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in self.switches)
        return made

    def initializer(self, tensor: TensorProto) -> None:
        """Float16 weights stay, so that a runtime casts what is really stored."""

    def initializers(self, graph: onnx.GraphProto, scope: dict[str, Value], fixed: set[str]) -> None:
        """With switches, every float16 weight is there as float32 too."""
        super().initializers(graph, scope, fixed)
        if self.switched is not None and self.weights:
            for tensor in [t for t in graph.initializer if t.data_type == HALF and weight_number(t) is not None]:
                copy = graph.initializer.add()
                copy.CopyFrom(tensor)
                copy.name, copy.data_type = self.fresh(tensor.name), FLOAT
                self.exact_weights[tensor.name] = copy.name

    def feed(self, node: onnx.NodeProto, value: Value, wanted: int, nodes: list[onnx.NodeProto]) -> str:
        """Weights and values cast for the node are rounded if its switch says so."""
        if wanted == FLOAT and value.kind == HALF:
            exact = self.exact_weights.get(value.names.get(HALF, "")) or self.unrounded.get(value.names.get(FLOAT, ""))
            if exact and (switch := self.switch(node)):
                return self.choose(switch, self.use(value, FLOAT, nodes), exact, nodes)
        return self.use(value, wanted, nodes)

    def widen_output(
        self, node: onnx.NodeProto, slot: int, value: Value, wide: str, nodes: list[onnx.NodeProto]
    ) -> None:
        """Round what the node gives."""
        if value.wrapped or node.op_type in EXACT:
            node.output[slot] = wide
            return
        switch = self.switch(node)
        exact = self.fresh(wide)
        if slot == 0:
            self.former[exact] = node.output[0]
        node.output[slot] = exact
        rounded = self.fresh(wide) if switch else wide
        self.round(exact, rounded, value.kind, nodes)
        if switch:
            nodes.append(helper.make_node("Where", [switch, rounded, exact], [wide]))

    def cast(
        self,
        node: onnx.NodeProto,
        value: Value,
        to: int,
        scope: dict[str, Value],
        nodes: list[onnx.NodeProto],
        returned: set[str],
    ) -> bool:
        """Casts to 16 bits round."""
        if to not in SHORT or to == value.kind or node.output[0] in returned:
            return super().cast(node, value, to, scope, nodes, returned)
        exact, name = self.use(value, FLOAT, nodes), node.output[0]
        self.round(exact, name, to, nodes)
        self.unrounded[name] = exact
        scope[name] = Value(to, {FLOAT: name})
        return True

    def round(self, exact: str, rounded: str, kind: int, nodes: list[onnx.NodeProto]) -> None:
        """Cast to 16 bits and back."""
        short = self.fresh(rounded)
        nodes.append(helper.make_node("Cast", [exact], [short], to=kind))
        nodes.append(helper.make_node("Cast", [short], [rounded], to=FLOAT))

    def switch(self, node: onnx.NodeProto) -> str:
        """The name of the node's switch, "" if it has none."""
        first = node.output[0] if node.output else ""
        name = (self.switched or {}).get(self.former.get(first, first), "")
        if not name:
            return ""
        self.used[name] = None
        return SWITCH + name

    def choose(self, switch: str, rounded: str, exact: str, nodes: list[onnx.NodeProto]) -> str:
        """The name of one of two values."""
        chosen = self.fresh(rounded)
        nodes.append(helper.make_node("Where", [switch, rounded, exact], [chosen]))
        return chosen

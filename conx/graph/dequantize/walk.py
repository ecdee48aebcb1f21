"""The walk through a graph that is dequantized.

The nodes are visited in order, with what is known of each value. Integers carry along what floats they stand for: the
value that was quantized, constant codes, a product, or another operator's output made of such. Where they become floats
again (DequantizeLinear; Cast, Sub and Mul; an operator with scales), that is asked for, and the floats take the place
of what was computed. Integer operators stay in the graph meanwhile, and go in the end if nothing needs them.
"""

from collections.abc import Callable

import onnx
from onnx import helper

from conx.graph.dequantize import blocks, casts, cleanup, fused, linear, moves, products, qlinear
from conx.graph.dequantize.constants import Constant
from conx.graph.dequantize.frames import Frame, Run
from conx.graph.dequantize.moe import moe
from conx.graph.dequantize.operators import is_quantized_type
from conx.graph.dequantize.values import UNKNOWN, Value
from conx.graph.lift import subgraphs

__all__ = ["walk_function", "walk_graph"]

STANDARD = ("", "ai.onnx")
MICROSOFT = "com.microsoft"


def walk_graph(run: Run, graph: onnx.GraphProto, constant: bool) -> None:
    """Dequantize a model's main graph in place. `constant`: its initializers are, also those that are inputs."""
    _Graph(run, graph, None, constant).rewrite()


def walk_function(run: Run, function: onnx.FunctionProto) -> None:
    """Dequantize a function that could not be inlined, in place."""
    opsets = run.opsets
    run.opsets = {"": opsets[""]} | {o.domain: o.version for o in function.opset_import}
    frame = Frame(run, None)
    for name in function.input:
        frame.define(Value(name, fed=True))
    walker = _Nodes(frame, set(function.output))
    for node in list(function.node):
        walker.node(node)
    walker.finish(list(function.output))
    nodes = [*frame.constants, *frame.nodes]
    nodes = [nodes[i] for i in cleanup.needed(nodes, set(function.output))]
    del function.node[:]
    function.node.extend(nodes)
    del function.value_info[:]
    run.opsets = opsets


Handler = Callable[[onnx.NodeProto, Frame], None]
HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "QuantizeLinear"): linear.quantize_linear,
    ("", "DequantizeLinear"): linear.dequantize_linear,
    ("", "DynamicQuantizeLinear"): linear.dynamic_quantize_linear,
    ("", "MatMulInteger"): products.integer_product,
    ("", "ConvInteger"): products.integer_product,
    ("", "Cast"): casts.cast,
    ("", "Sub"): casts.subtract,
    ("", "Mul"): casts.multiply,
    ("", "Div"): casts.divide,
    **{("", op): casts.round_off for op in ("Floor", "Round")},
    ("", "Add"): products.add,
    **{("", op): moves.move for op in moves.DATA},
    **{("", op): qlinear.qlinear for op in ("QLinearConv", "QLinearMatMul")},
    **{(MICROSOFT, op): qlinear.qlinear for op in qlinear.QLINEAR},
    (MICROSOFT, "QuantizeLinear"): linear.quantize_linear,
    (MICROSOFT, "DequantizeLinear"): linear.dequantize_linear,
    (MICROSOFT, "MatMulIntegerToFloat"): products.matmul_integer_to_float,
    (MICROSOFT, "DynamicQuantizeMatMul"): products.dynamic_quantize_matmul,
    (MICROSOFT, "DynamicQuantizeLSTM"): fused.lstm,
    (MICROSOFT, "QAttention"): fused.attention,
    (MICROSOFT, "QEmbedLayerNormalization"): fused.embed_layer_normalization,
    (MICROSOFT, "MatMulNBits"): blocks.matmul_nbits,
    (MICROSOFT, "GatherBlockQuantized"): blocks.gather_block_quantized,
    (MICROSOFT, "MatMulBnb4"): blocks.matmul_bnb4,
    (MICROSOFT, "QMoE"): moe,
}


class _Nodes:
    """Walks through the nodes of a graph or function."""

    def __init__(self, frame: Frame, outputs: set[str]) -> None:
        self.frame = frame
        frame.outputs = outputs
        self.ends: set[str] = set()

    def node(self, source: onnx.NodeProto) -> None:
        frame = self.frame
        node = onnx.NodeProto()
        node.CopyFrom(source)
        for graph in subgraphs(node):
            _Graph(frame.run, graph, frame, True).rewrite()
        domain = "" if node.domain in STANDARD else node.domain
        handler = HANDLERS.get((domain, node.op_type))
        inputs = [frame.get(name) for name in node.input]
        if any(a.ref_attr_name for a in node.attribute):  # in a function: known only where it is called
            if is_quantized_type(node.op_type):
                frame.stays(node, "it has attributes of the function that it is in")
            else:
                frame.keep(node)
        elif handler is not None:
            handler(node, frame)
        elif node.op_type == "Identity" and not domain and inputs[0] is not None:
            frame.define(inputs[0], node.output[0])
        else:
            frame.keep(node)
            self._constant(node, domain)
        if not domain:
            self._learn(node, inputs)

    def _constant(self, node: onnx.NodeProto, domain: str) -> None:
        if node.op_type != "Constant" or domain or len(node.attribute) != 1:
            return
        attribute, name = node.attribute[0], node.output[0]
        if attribute.name == "value":
            tensor = attribute.t
        elif attribute.name in ("value_float", "value_int", "value_floats", "value_ints"):
            value = helper.get_attribute_value(attribute)
            kind = onnx.TensorProto.FLOAT if "float" in attribute.name else onnx.TensorProto.INT64
            several = attribute.name.endswith("s")
            tensor = helper.make_tensor(name, kind, [len(value)] if several else [], value if several else [value])
        else:
            return
        if not tensor.name:
            tensor.name = name
        _define_constant(self.frame, name, tensor, True)

    def _learn(self, node: onnx.NodeProto, inputs: list[Value | None]) -> None:
        """What is known of the outputs of operators that stay."""
        for name in node.output:
            value = self.frame.values.get(name)
            if value is None or value.constant is not None or value.integer is not None:
                continue
            value.positive = value.positive or moves.stays_positive(node, inputs)
            if value.kind == UNKNOWN and node.op_type in KEEPS_KIND and inputs and inputs[0] is not None:
                value.kind = inputs[0].kind

    def finish(self, outputs: list[str]) -> None:
        """Give results their names."""
        for name in outputs:
            value = self.frame.get(name)
            if value is not None and value.name != name:
                self.frame.nodes.append(helper.make_node("Identity", [value.name], [name]))
                self.ends.add(name)


KEEPS_KIND = {
    "Add", "Relu", "Conv", "MatMul", "Gemm", "Sigmoid", "Softmax", "Tanh", "LayerNormalization", "BatchNormalization",
    "AveragePool", "GlobalAveragePool", "Div", "Sqrt", "Erf", "Exp", "LeakyRelu", "ConvTranspose", "Neg", "Abs", "Pow",
    "ReduceMean", "ReduceSum", "InstanceNormalization", "HardSigmoid", "Elu", "PRelu", "Dropout", "Sum",
}  # fmt: skip


class _Graph:
    def __init__(self, run: Run, graph: onnx.GraphProto, outer: Frame | None, defaults: bool) -> None:
        self.run, self.graph, self.outer, self.defaults = run, graph, outer, defaults

    def rewrite(self) -> None:
        """Walk through the graph and put the new nodes and initializers in."""
        graph = self.graph
        frame = Frame(self.run, graph, self.outer)
        walker = _Nodes(frame, {v.name for v in graph.output})
        self._describe(frame)
        if not self.run.keep:
            frame.wanted = _wanted(graph)
        for node in graph.node:
            walker.node(node)
        walker.finish([v.name for v in graph.output])
        nodes = [*frame.constants, *frame.nodes]
        nodes = [nodes[i] for i in cleanup.needed(nodes, {v.name for v in graph.output})]
        made = {node.output[0] for node in nodes if node.op_type in ("Conv", "Gemm")} - self._own_products()
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.extend(frame.initializers)
        cleanup.rename_ends(graph, walker.ends)
        cleanup.fold_bias(graph, made)
        cleanup.drop_unneeded(graph)
        self._drop_initializers()
        cleanup.forget_stale(graph)

    def _own_products(self) -> set[str]:
        return {n.output[0] for n in self.graph.node if n.op_type in ("Conv", "Gemm") and n.output}

    def _describe(self, frame: Frame) -> None:
        graph = self.graph
        fed = {v.name for v in graph.input}
        for info in (*graph.value_info, *graph.input):
            kind = info.type.tensor_type
            rank = len(kind.shape.dim) if kind.HasField("shape") else None
            frame.define(Value(info.name, kind.elem_type, rank, fed=info.name in fed))
        for tensor in graph.initializer:
            _define_constant(frame, tensor.name, tensor, self.defaults or tensor.name not in fed)

    def _drop_initializers(self) -> None:
        """Drop those that nothing uses."""
        graph = self.graph
        used = cleanup.names_used(graph.node) | {v.name for v in graph.output}
        inputs = {v.name for v in graph.input}
        interface = set() if self.defaults else inputs
        gone = {t.name for t in graph.initializer if t.name not in used and t.name not in interface}
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name in gone:
                del graph.initializer[i]
        for i in reversed(range(len(graph.input))):
            if graph.input[i].name in gone:
                del graph.input[i]


def _define_constant(frame: Frame, name: str, tensor: onnx.TensorProto, fixed: bool) -> None:
    """An initializer or the tensor of a Constant node."""
    kept = onnx.TensorProto()
    kept.CopyFrom(tensor)
    constant = Constant(kept, frame.run.source)
    usable = fixed and constant.readable()
    rank = len(tensor.dims)
    value = Value(name, tensor.data_type, rank, constant if usable else None, frame, scalar=constant.size == 1)
    value.fed = not fixed
    frame.define(value)


def _wanted(graph: onnx.GraphProto) -> dict[str, str]:
    """By the name of integers that a node makes: that of the floats that a DequantizeLinear makes of them."""
    scales: dict[str, tuple[str, ...]] = {}
    for node in graph.node:
        form = qlinear.QLINEAR.get(node.op_type)
        if form is not None and len(node.input) > form.scale + 1:
            scales[node.output[0]] = tuple(node.input[form.scale : form.scale + 2])
        elif node.op_type == "QuantizeLinear" and not any(a.name in ("axis", "block_size") for a in node.attribute):
            scales[node.output[0]] = (node.input[1], *node.input[2:3])
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or any(a.name in ("block_size", "output_dtype") for a in node.attribute):
            continue
        if scales.get(node.input[0]) == tuple(node.input[1:3]):
            found.setdefault(node.input[0], node.output[0])
    return found

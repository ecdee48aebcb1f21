"""QMoE: a mixture of experts whose matrices are quantized."""

from typing import Any

import onnx
from onnx import helper

from conx.graph.dequantize.blocks import block_codes
from conx.graph.dequantize.frames import Frame
from conx.graph.dequantize.products import MICROSOFT
from conx.graph.dequantize.values import Value

__all__ = ["moe"]

# Attributes that MoE has too.
SHARED = {
    "activation_type", "activation_alpha", "activation_beta", "k", "normalize_routing_weights", "swiglu_fusion",
    "swiglu_limit", "use_sparse_mixer",
}  # fmt: skip
MATRICES = ((2, 11), (5, 12), (8, 13))  # slots of the codes, which scales follow, and of the zero points


def moe(node: onnx.NodeProto, frame: Frame) -> None:
    """MoE of the float matrices: integers only, and only what that operator takes."""
    inputs = [frame.get(name) for name in [*node.input, *[""] * 21][:21]]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    reason = _unusable(inputs, attributes)
    matrices: list[Value | None] = []
    for i, (slot, zero) in enumerate(MATRICES if not reason else ()):
        codes, scales = inputs[slot], inputs[slot + 1]
        made = None
        if codes is not None:
            made = None if scales is None else _matrices(frame, codes, scales, inputs[zero], attributes, i + 1)
            reason = reason or ("" if made else "its weights, scales and zero points do not fit together")
        matrices.append(made)
    if reason:
        frame.stays(node, reason)
        return
    fed = [*inputs[:2], matrices[0], inputs[4], matrices[1], inputs[7], matrices[2], inputs[10]]
    names = ["" if v is None else v.name for v in fed]
    while not names[-1]:
        names.pop()
    result = helper.make_node("MoE", names, list(node.output), node.name, domain=MICROSOFT)
    result.attribute.extend(a for a in node.attribute if a.name in SHARED)
    frame.nodes.append(result)
    frame.define(Value(node.output[0]))


def _unusable(inputs: list[Value | None], attributes: dict[str, Any]) -> str:
    if attributes.get("quant_type", b"int") != b"int":
        return "its codes are not integers"
    if attributes.get("weights_prepacked", -1) > 0 or attributes.get("swiglu_limit_after_activation"):
        return "its weights are packed for one device, or MoE has no such activation"
    if inputs[14] is not None:
        return "MoE takes no router weights"
    return ""


def _matrices(
    frame: Frame, codes: Value, scales: Value, zeros: Value | None, attributes: dict[str, Any], number: int
) -> Value | None:
    """Float matrices [experts, N, K], as MoE has them."""
    if codes.constant is None or len(codes.constant.shape) != 3:
        return None
    bits = attributes.get(f"fc{number}_expert_weight_bits", attributes.get("expert_weight_bits", 4))
    shape = codes.constant.shape
    length = shape[2] * 8 // bits
    block = attributes.get("block_size", 0) or length
    return block_codes(frame, codes, scales, zeros, (*shape[:2], length), bits, block, turned=False)

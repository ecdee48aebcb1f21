"""What types an operator takes and gives: onnx's schemas, and a table of com.microsoft's (tools/contrib_schemas.py)."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from onnx import defs

__all__ = ["Signature", "signature"]

CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class Signature:
    """Type strings of an operator's formal inputs and outputs: a type variable, or a type like `tensor(float)`.

    `half` are the variables that may be float16. The last input or output may stand for any number of them.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    variadic_input: bool
    variadic_output: bool
    half: frozenset[str]

    def input(self, slot: int) -> str:
        """Type string of input `slot`, "" if there is none."""
        return _at(self.inputs, slot, self.variadic_input)

    def output(self, slot: int) -> str:
        """Type string of output `slot`, "" if there is none."""
        return _at(self.outputs, slot, self.variadic_output)


# Operators of onnxruntime's that stand in onnx's own domain, and that models really have.
UNOFFICIAL = {
    "SimplifiedLayerNormalization": Signature(("T", "V"), ("V", "U"), False, False, frozenset({"T", "V"})),
}


@cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """The signature of an operator at an opset version, or None if it is not known."""
    if domain == CONTRIB:
        return _contrib().get(op_type)
    try:
        schema = defs.get_schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    except defs.SchemaError:
        return UNOFFICIAL.get(op_type) if domain in ("", "ai.onnx") else None
    variadic = defs.OpSchema.FormalParameterOption.Variadic
    return Signature(
        inputs=tuple(p.type_str for p in schema.inputs),
        outputs=tuple(p.type_str for p in schema.outputs),
        variadic_input=bool(schema.inputs) and schema.inputs[-1].option == variadic,
        variadic_output=bool(schema.outputs) and schema.outputs[-1].option == variadic,
        half=frozenset(c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs),
    )


@cache
def _contrib() -> dict[str, Signature]:
    table = json.loads(files("conx.graph").joinpath("contrib_schemas.json").read_text(encoding="utf-8"))
    return {
        name: Signature(
            inputs=tuple(row["inputs"]),
            outputs=tuple(row["outputs"]),
            variadic_input=row["variadic"][0],
            variadic_output=row["variadic"][1],
            half=frozenset(row["half"]),
        )
        for name, row in table.items()
    }


def _at(types: tuple[str, ...], slot: int, variadic: bool) -> str:
    if slot < len(types):
        return types[slot]
    return types[-1] if variadic and types else ""

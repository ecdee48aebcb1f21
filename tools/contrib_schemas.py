"""Write conx/graph/contrib_schemas.json: the types of com.microsoft's operators, which the package onnx does not know.

Run it with the newest onnxruntime and commit what changes: `python tools/contrib_schemas.py`.
"""

import json
from pathlib import Path
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as state

TARGET = Path(__file__).resolve().parent.parent / "conx" / "graph" / "contrib_schemas.json"
DOMAIN = "com.microsoft"


def signature(schema: Any) -> dict[str, Any]:
    """Type variables (or types) of inputs and outputs, and which variables admit float16."""
    formal = state.schemadef.OpSchema.FormalParameterOption.Variadic
    return {
        "half": sorted(c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs),
        "inputs": [p.typeStr for p in schema.inputs],
        "outputs": [p.typeStr for p in schema.outputs],
        "variadic": [bool(side) and side[-1].option == formal for side in (schema.inputs, schema.outputs)],
    }


def main() -> None:
    """Write the file."""
    schemas = [s for s in state.get_all_operator_schema() if s.domain == DOMAIN]
    found = {s.name: signature(s) for s in sorted(schemas, key=lambda s: s.name)}
    lines = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in found.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(found)} operators in {TARGET}")


if __name__ == "__main__":
    main()

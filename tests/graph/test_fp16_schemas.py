"""The table of onnxruntime's own operators, against the onnxruntime that is installed."""

import json
from importlib.resources import files
from typing import Any

import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

from conx.graph.schemas import CONTRIB, UNOFFICIAL, signature

MADE_WITH = (1, 32)  # the onnxruntime that the table was written with; others have other operators


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Any]:
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) != MADE_WITH:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} is not that of the table")
    return {(s.domain, s.name): s for s in state.get_all_operator_schema()}


@pytest.fixture(scope="module")
def schemas(known: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return {name: schema for (domain, name), schema in known.items() if domain == CONTRIB}


def rows() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("conx.graph").joinpath("contrib_schemas.json").read_text("utf-8"))
    return table


@pytest.mark.parametrize("name", rows())
def test_types_are_those_of_onnxruntime(name: str, schemas: dict[str, Any]) -> None:
    if name not in schemas:
        pytest.skip("a build for another provider has it")
    row, schema = rows()[name], schemas[name]
    assert row["inputs"] == [p.typeStr for p in schema.inputs]
    assert row["outputs"] == [p.typeStr for p in schema.outputs]
    half = {c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs}
    assert set(row["half"]) == half


@pytest.mark.parametrize("name", UNOFFICIAL)
def test_types_of_operators_in_the_domain_of_onnx(name: str, known: dict[tuple[str, str], Any]) -> None:
    found, schema = signature("", name, 17), known["", name]
    assert found is not None
    assert found.inputs == tuple(p.typeStr for p in schema.inputs)
    assert found.outputs == tuple(p.typeStr for p in schema.outputs)
    half = {c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs}
    assert found.half == half


def test_most_operators_are_there(schemas: dict[str, Any]) -> None:
    """The table is not of something else."""
    assert len(rows().keys() & schemas.keys()) > 0.9 * len(schemas)


def test_the_last_formal_input_may_stand_for_many() -> None:
    assert signature("", "Concat", 17) == signature("ai.onnx", "Concat", 17)
    concat = signature("", "Concat", 17)
    assert concat is not None
    assert (concat.input(0), concat.input(7), concat.output(0), concat.output(1)) == ("T", "T", "T", "")
    attention = signature(CONTRIB, "Attention", 1)
    assert attention is not None
    assert (attention.input(0), attention.input(3), attention.input(99)) == ("T", "M", "")
    assert signature("", "NoSuchOperator", 17) is None
    assert signature(CONTRIB, "NoSuchOperator", 1) is None
    assert signature("other", "Conv", 1) is None

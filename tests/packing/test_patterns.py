"""Which weights a pattern names."""

from pathlib import Path
from typing import Any

import pytest
from onnx import helper

import conx
from tests.builders import as_tensor, model, normal, save
from tests.packing.kit import Packed, pack

pytestmark = pytest.mark.usefixtures("no_sync")

LAYERS = ["encoder.0.weight", "encoder.1.weight", "decoder.weight"]


def layers() -> Any:
    """Three products."""
    made = model("g (float[2, 40] x) => (float[2, 40] y) { y = Identity(x) }")
    del made.graph.node[:]
    for i, name in enumerate(LAYERS):
        made.graph.initializer.append(as_tensor(name, normal(40, 40, seed=i)))
        made.graph.node.append(
            helper.make_node("MatMul", [f"h{i}" if i else "x", name], [f"h{i + 1}" if i < 2 else "y"])
        )
    return made


def lossless(packed: Packed) -> list[str]:
    return [name for name in packed.stored if packed.error(name) == 0]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["decoder.weight"], LAYERS[2:]),
        (["encoder.*"], LAYERS[:2]),
        (["encoder.?.weight"], LAYERS[:2]),
        (["encoder.[1-9].weight"], LAYERS[1:2]),
        (["*.1.*", "dec*"], LAYERS[1:]),
        (["*"], LAYERS),
    ],
)
def test_patterns_of_what_to_keep(patterns: list[str], kept: list[str], tmp_path: Path) -> None:
    packed = pack(layers(), tmp_path, keep=patterns, threads=1)
    assert lossless(packed) == kept
    for i, name in enumerate(LAYERS):
        same = packed.values(name).tobytes() == normal(40, 40, seed=i).tobytes()
        assert same == (name in kept)


def test_patterns_are_about_case(tmp_path: Path) -> None:
    path = save(layers(), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="Encoder"):
        conx.pack(path, keep=["Encoder.*"], threads=1)


def test_a_pattern_codes_what_is_kept_otherwise(tmp_path: Path) -> None:
    """Thresholds stay exact unless they are named."""
    made = model("g (float[40, 40] x) => (bool[40, 40] y) { y = Greater(x, w) }", {"w": normal(40, 40)})
    assert lossless(pack(made, tmp_path, threads=1)) == ["w"]
    assert lossless(pack(made, tmp_path, "n", overrides={"w": "bits:8"}, threads=1)) == []


def test_a_pattern_of_one_of_the_tied_weights(tmp_path: Path) -> None:
    """Stored once, so the rule for one holds for all."""
    made = model(
        "g (float[2, 40] x) => (float[2, 40] y) { a = MatMul(x, v) y = MatMul(a, w) }",
        {"w": normal(40, 40), "v": normal(40, 40)},
    )
    for name in "vw":
        assert packed_values(pack(made, tmp_path, name, keep=[name], threads=1)) == {"w": True, "v": True}


def packed_values(packed: Packed) -> dict[str, bool]:
    """Which weights come back bit for bit."""
    return {name: packed.values(name).tobytes() == normal(40, 40).tobytes() for name in "wv"}

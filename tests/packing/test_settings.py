"""Bits, blocks, palettes, and rules by name."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import conx
from conx.container.reader import Reader
from conx.quantize.rules import Rule
from tests.builders import give, model, normal, save
from tests.packing.kit import matmul, pack, pack_weights

pytestmark = pytest.mark.usefixtures("no_sync")

W = normal(96, 80)


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_bits(kind: Any, tmp_path: Path) -> None:
    """Fewer bits: fewer values in a channel, a smaller file, a larger error."""
    weights = W.astype(kind)
    sizes, errors = [], []
    for bits in range(2, 9):
        packed = pack(matmul(weights) if kind is not ml_dtypes.bfloat16 else _gathered(weights), tmp_path, bits=bits)
        stored = packed.stored["w"]
        values = packed.values("w")
        assert stored.codec == "linear"
        assert stored.params["axis"] == (0 if kind is ml_dtypes.bfloat16 else 1)
        assert values.dtype == weights.dtype
        channels = values if kind is ml_dtypes.bfloat16 else values.T
        assert max(np.unique(c.astype(np.float32)).size for c in channels) <= 2**bits - 1
        off = values.astype(np.float64) - weights.astype(np.float64)
        rms = float(np.sqrt(np.square(off).sum() / np.square(weights.astype(np.float64)).sum()))
        assert packed.error("w") == pytest.approx(rms, rel=1e-4)
        sizes.append(packed.report.bytes)
        errors.append(rms)
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.6
    assert errors[-1] < 0.011


def _gathered(weights: npt.NDArray[Any]) -> Any:
    return model("g (int64[n] i) => (bfloat16[n,80] y) { y = Gather(w, i) }", {"w": weights})


@pytest.mark.parametrize(("given", "stored"), [(8, 8), (32, 32), (95, 95), (96, 96), (100, 96), (10**6, 96)])
def test_block_size(given: int, stored: int, tmp_path: Path) -> None:
    """Blocks run along the axis that is summed over; a block is never longer than it."""
    packed = pack(matmul(W), tmp_path, bits=4, block_size=given)
    params = packed.stored["w"].params
    assert (packed.stored["w"].codec, params["axis"], params["block"]) == ("linear", 0, stored)
    assert packed.error("w") <= pack(matmul(W), tmp_path, bits=4).error("w") * 1.01


def test_smaller_blocks_are_more_precise(tmp_path: Path) -> None:
    errors = [pack(matmul(W), tmp_path, bits=4, block_size=size).error("w") for size in (96, 32, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_palette(bits: int, tmp_path: Path) -> None:
    packed = pack(matmul(W), tmp_path, palette=bits)
    assert packed.stored["w"].codec == "palette"
    assert packed.stored["w"].params == {"entries": 2**bits, "pack": {1: 8, 2: 4, 3: 2, 4: 2}.get(bits, 1)}
    values = packed.values("w")
    assert np.unique(values).size <= 2**bits
    assert packed.error("w") < 0.7 / 1.7 ** (bits - 1)
    off = np.square(values.astype(np.float64) - W)
    assert packed.error("w") == pytest.approx(
        float(np.sqrt(off.sum() / np.square(W, dtype=np.float64).sum())), rel=1e-4
    )


@pytest.mark.parametrize(("group", "groups"), [(1, 80), (16, 5), (30, 3), (80, 1), (200, 1)])
def test_palettes_of_groups(group: int, groups: int, tmp_path: Path) -> None:
    """A palette for each so many output channels; the last group may be smaller."""
    packed = pack(matmul(W), tmp_path, overrides={"w": f"palette:3,group:{group}"})
    stored = packed.stored["w"]
    assert stored.codec == "palette"
    assert stored.params["axis"] == 1
    assert sum(stream.size for stream in stored.side) == groups * 8 * 4
    values = packed.values("w")
    for start in range(0, 80, group):
        assert np.unique(values[:, start : start + group]).size <= 8
    assert packed.error("w") <= pack(matmul(W), tmp_path, palette=3).error("w") * 1.01


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_palettes_hold_values_of_the_type(kind: Any, tmp_path: Path) -> None:
    packed = pack_weights({"w": W.astype(kind)}, tmp_path, palette=4)
    assert packed.stored["w"].codec == "palette"
    assert packed.values("w").dtype == kind
    assert np.unique(packed.values("w").astype(np.float32)).size == 16
    assert packed.error("w") < 0.15


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lossless and bits": ({"lossless": True, "bits": 8}, ValueError, "lossless and bits"),
    "lossless and blocks": ({"lossless": True, "block_size": 32}, ValueError, "lossless and block_size"),
    "lossless and palette": ({"lossless": True, "palette": 4}, ValueError, "lossless and palette"),
    "palette and bits": ({"palette": 4, "bits": 4}, ValueError, "palette"),
    "palette and blocks": ({"palette": 4, "block_size": 32}, ValueError, "palette"),
    **{f"bits {n}": ({"bits": n}, ValueError, f"bits={n}") for n in (-8, 0, 1, 9, 16)},
    **{f"block {n}": ({"block_size": n}, ValueError, f"block_size={n}") for n in (-1, 0, 7)},
    **{f"palette {n}": ({"palette": n}, ValueError, f"palette={n}") for n in (-1, 0, 9)},
    "keep is a string": ({"keep": "w"}, ValueError, "keep"),
    "keep matches nothing": ({"keep": ["w", "nothing*"]}, ValueError, "'nothing*'"),
    "override matches nothing": ({"overrides": {"W": "bits:4"}}, ValueError, "'W'"),
    "override of a small tensor": ({"overrides": {"b": "bits:4"}}, ValueError, "'b'"),
    "override is no rule": ({"overrides": {"w": "bits:44"}}, ValueError, "bits=44"),
    "override is no rule at all": ({"overrides": [("w", "coarse")]}, ValueError, "'coarse'"),
    "negative threads": ({"threads": -1}, ValueError, "threads=-1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name: str, tmp_path: Path) -> None:
    """The error says what is wrong, and nothing is written."""
    settings, error, told = WRONG[name]
    path = save(matmul(W, b=normal(4, 4)), tmp_path / "m.onnx")
    with pytest.raises(error, match=re.escape(told)) as caught:
        conx.pack(path, **settings)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


NAMES = ("enc.0.q", "enc.0.k", "enc.1.q", "enc.1.k", "head")


def codes(tmp_path: Path, **settings: Any) -> dict[str, str]:
    """What became of each of five weights: their bits, or their codec."""
    weights = {name: normal(64, 64, seed=i) for i, name in enumerate(NAMES)}
    packed = pack_weights(weights, tmp_path, **settings)
    found = {}
    for name, stored in packed.stored.items():
        exact = packed.values(name).tobytes() == weights[name].tobytes()
        assert exact is (stored.codec == "heads")
        found[name] = "exact" if exact else stored.codec
        if stored.codec == "linear":
            rows = packed.values(name) if stored.params["axis"] == 0 else packed.values(name).T
            most = max(np.unique(row).size for row in rows)
            found[name] = "blocks" if "block" in stored.params else f"{most.bit_length()} bits"
    return found


def test_keep(tmp_path: Path) -> None:
    found = codes(tmp_path, bits=4, keep=["enc.?.q", "head"])
    assert found == {"enc.0.q": "exact", "enc.0.k": "4 bits", "enc.1.q": "exact", "enc.1.k": "4 bits", "head": "exact"}


@pytest.mark.parametrize("as_pairs", [False, True])
def test_overrides_in_order(as_pairs: bool, tmp_path: Path) -> None:
    rules: dict[str, str | Rule] = {
        "enc.0.*": "bits:3",
        "*.k": Rule(bits=5),
        "head": "palette:4",
        "*q": "bits:4,block:16",
    }
    found = codes(tmp_path, overrides=list(rules.items()) if as_pairs else rules)
    assert found == {
        "enc.0.q": "3 bits",
        "enc.0.k": "3 bits",
        "enc.1.q": "blocks",
        "enc.1.k": "5 bits",
        "head": "palette",
    }


def test_keep_goes_before_overrides(tmp_path: Path) -> None:
    found = codes(tmp_path, keep=["enc.0.q"], overrides={"enc.0.*": "bits:3", "*": "bits:4"})
    assert list(found.values()) == ["exact", "3 bits", "4 bits", "4 bits", "4 bits"]


def test_a_rule_in_a_lossless_file(tmp_path: Path) -> None:
    """Everything bit for bit but what is named."""
    found = codes(tmp_path, lossless=True, overrides={"head": "bits:4"})
    assert list(found.values()) == ["exact"] * 4 + ["4 bits"]


def test_the_default_for_a_name_in_a_coarse_file(tmp_path: Path) -> None:
    assert codes(tmp_path, bits=3, overrides={"head": "bits:4"})["head"] == "4 bits"


def test_settings_are_recorded(tmp_path: Path) -> None:
    packed = pack(matmul(W), tmp_path, bits=4, block_size=16, keep=["w"])
    with Reader(packed.path) as reader:
        settings = reader.index.metadata["settings"]
    assert settings["bits"] == 4
    assert settings["block_size"] == 16
    assert settings["lossless"] is False
    assert settings["by_name"][0][0] == "w"


def test_patterns_name_constants_by_their_output(tmp_path: Path) -> None:
    made = model("g (float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }")
    give(made.graph, "w", normal(64, 64))
    assert pack(made, tmp_path, keep=["w"]).report.lossless

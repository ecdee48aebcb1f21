"""Damaged files: opening finds what it reads, `check` finds everything, and nothing is left behind."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conx
from conx.errors import ConxError, FormatError, IntegrityError
from tests.builders import CPU, as_tensor, model, normal, one_thread, run, run_plain, same_bits, save


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """A packed model of a few kilobytes, and what it answers."""
    made = model(
        """g (float[1, 17] x) => (float[1, 17] y) {
            a = MatMul(x, w) b = Add(a, z) y = If (yes) <
                then_branch = p () => (float[1, 17] yp) { yp = MatMul(b, inner) },
                else_branch = q () => (float[1, 17] yq) { yq = Identity(b) }
            >
        }""",
        {"w": normal(17, 17), "z": np.zeros((1, 17), np.float32), "f": np.full(400, 3.5), "yes": np.array(True)},
    )
    made.graph.node[2].attribute[0].g.initializer.append(as_tensor("inner", normal(17, 17, seed=1)))
    path = save(made, tmp_path_factory.mktemp("small") / "m.onnx")
    conx.pack(path, lossless=True, threads=1)
    return path.with_suffix(".conx").read_bytes(), run_plain(path, {"x": normal(1, 17)})


def attempt(content: bytes, wanted: list[Any], **settings: Any) -> bool:
    """Open and run: True if that went right, False for a ConxError; nothing else may happen."""
    try:
        session = conx.InferenceSession(content, one_thread(), CPU, threads=1, **settings)
    except ConxError as error:
        assert "\n" not in str(error)  # noqa: PT017 - there may be none
        return False
    assert same_bits(wanted, run(session, {"x": normal(1, 17)}))
    return True


@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_every_flipped_byte(flip: int, small: tuple[bytes, list[Any]]) -> None:
    content, wanted = small
    assert len(content) < 10_000
    assert attempt(content, wanted)
    passed = 0
    for at in range(len(content)):
        bad = content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :]
        with pytest.raises(ConxError):
            conx.check(bad, deep=True, threads=1)
        passed += attempt(bad, wanted)
    assert passed < len(content) // 10


def test_every_truncation(small: tuple[bytes, list[Any]]) -> None:
    content, wanted = small
    for size in range(1, len(content)):
        with pytest.raises(ConxError):
            conx.check(content[:size], deep=True, threads=1)
        assert not attempt(content[:size], wanted)


def test_bytes_after_the_end(small: tuple[bytes, list[Any]]) -> None:
    content, wanted = small
    for more in (b"\0", content, b"\x28\xb5\x2f\xfd"):
        with pytest.raises(FormatError, match="bytes after its end"):
            conx.check(content + more)
        assert not attempt(content + more, wanted)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model with chunks so large that their SHA-256 is not always computed."""
    made = model("g (float[1, 400] x) => (float[1, 300] y) { y = MatMul(x, w) }", {"w": normal(400, 300)})
    path = save(made, tmp_path_factory.mktemp("large") / "m.onnx")
    conx.pack(path, lossless=True, threads=1)
    return path


@pytest.mark.parametrize("verify", ["checksum", "full"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_chunk_is_named(verify: str, threads: int, large: Path, tmp_path: Path) -> None:
    content = bytearray(large.with_suffix(".conx").read_bytes())
    content[-1000] ^= 4
    bad = tmp_path / "bad.conx"
    bad.write_bytes(content)
    with pytest.raises(IntegrityError) as caught:
        conx.InferenceSession(bad, verify=verify, threads=threads)
    assert "bad.conx" in str(caught.value)
    assert "tensor 'w'" in str(caught.value)
    with pytest.raises(IntegrityError, match=r"bad\.conx"):
        conx.check(bad, deep=True)
    conx.check(bad)


def test_random_damage_of_large_chunks(large: Path) -> None:
    content = large.with_suffix(".conx").read_bytes()
    wanted = run_plain(large, {"x": normal(1, 400)})
    rng = np.random.default_rng(0)
    for at in rng.choice(len(content), 150, replace=False):
        bad = bytearray(content)
        bad[at] ^= 1 << rng.integers(8)
        with pytest.raises(ConxError):
            conx.check(bytes(bad), deep=True, threads=1)
        try:
            session = conx.InferenceSession(bytes(bad), one_thread(), CPU, threads=1)
        except ConxError:
            continue
        assert same_bits(wanted, run(session, {"x": normal(1, 400)}))


def test_nothing_is_left_after_a_failure(large: Path) -> None:
    """No threads, and no files that are still open (a ResourceWarning is an error here)."""
    content = bytearray(large.with_suffix(".conx").read_bytes())
    content[-1000] ^= 4
    for _ in range(5):
        with pytest.raises(IntegrityError):
            conx.InferenceSession(bytes(content), threads=3)
    gc.collect()
    session = conx.InferenceSession(large.with_suffix(".conx"), one_thread(), CPU)
    assert same_bits(run_plain(large, {"x": normal(1, 400)}), run(session, {"x": normal(1, 400)}))

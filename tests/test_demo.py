"""`conx demo` tells what its files are: each number is computed again here, from the files."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import conx
from conx.demo import HEAD, SETTINGS, Row, compare, held_out, run_demo
from conx.report import bytes_text
from tools import train_demo

MODEL = train_demo.FOLDER / "digits.onnx"
MAX_BYTES = 1_000_000  # of what the demo adds to the repository and to each wheel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    return list(compare(folder))


def answers(session: onnxruntime.InferenceSession) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = session.run(["probabilities"], {"images": held_out()[0]})[0]
    return found


def original() -> npt.NDArray[np.float32]:
    return answers(onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"]))


def cells(text: str) -> list[dict[str, str]]:
    """The table of a demo's output, cut where the line under its head says that the columns are."""
    lines = text.splitlines()
    under = next(i for i, line in enumerate(lines) if line.startswith("---"))
    spans = [match.span() for match in re.finditer("-+", lines[under])]
    head, *body = (
        [line[start:stop].strip() for start, stop in spans]
        for line in lines[under - 1 : lines.index("", under)]
        if line != lines[under]
    )
    assert tuple(head) == HEAD
    return [dict(zip(HEAD, row, strict=True)) for row in body]


def test_the_model_has_the_accuracy_that_its_tool_claims() -> None:
    claim = re.search(r"(\d+) of the other (\d+) rightly \((0\.\d+)\)", train_demo.__doc__ or "")
    assert claim is not None
    _, labels = held_out()
    right = int((original().argmax(axis=1) == labels).sum())
    assert claim.groups() == (str(right), str(len(labels)), f"{right / len(labels):.4f}")
    assert right / len(labels) >= train_demo.LEAST


def test_the_held_out_images_are_those_of_the_split() -> None:
    trained_on, _, images, labels = train_demo.split()
    np.testing.assert_array_equal(held_out()[0] * train_demo.BRIGHTEST, images)
    np.testing.assert_array_equal(held_out()[1], labels)
    assert {i.tobytes() for i in trained_on} & {i.tobytes() for i in images} == set()


def test_the_tool_builds_this_model_and_computes_what_it_computes() -> None:
    model = onnx.load(MODEL)
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    assert train_demo.build(weights) == model
    np.testing.assert_allclose(train_demo.probabilities(weights, held_out()[0]), original(), rtol=0, atol=1e-5)


def test_the_data_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.parent.iterdir()) <= MAX_BYTES


def test_the_rows_are_those_that_the_files_offer(rows: list[Row], folder: Path) -> None:
    offered = [(name, precision) for name in SETTINGS for precision in conx.inspect(folder / name).precisions]
    assert [(r.file, r.precision) for r in rows] == [("digits.onnx", "original"), ("zipped .onnx", ""), *offered]
    assert {row.precision for row in rows} >= {"original", "fp32"}


def test_sizes_accuracies_and_differences_are_right(rows: list[Row], folder: Path) -> None:
    model = MODEL.read_bytes()
    assert (folder / "digits.onnx").read_bytes() == model
    expected, labels = original(), held_out()[1]
    for row in rows:
        if not row.precision:
            assert row == Row(row.file, "", len(zlib.compress(model, 9)), row.ratio)
            continue
        path = folder / row.file
        found = answers(conx.InferenceSession(path, providers=["CPUExecutionProvider"], precision=row.precision))
        assert row.size == path.stat().st_size
        assert row.ratio == row.size / len(model)
        assert row.load is not None
        assert 0 < row.load < 60
        assert row.accuracy == np.mean(found.argmax(axis=1) == labels)
        assert row.difference == np.abs(found - expected).max()


def test_lossless_is_exact_and_each_file_smaller_than_the_one_before(rows: list[Row], folder: Path) -> None:
    lossless = [row for row in rows if row.file == "lossless.conx"]
    assert [row.difference for row in lossless if row.precision in {"original", "fp32"}] == [0, 0]
    assert conx.inspect(folder / "lossless.conx").lossless
    assert conx.unpack(folder / "lossless.conx", folder / "back.onnx").read_bytes() == MODEL.read_bytes()
    sizes = list(dict.fromkeys(row.size for row in rows))
    assert sizes == sorted(sizes, reverse=True)
    default = next(row for row in rows if row.file == "default.conx")
    assert default.accuracy is not None
    assert default.accuracy >= train_demo.LEAST


def test_it_prints_what_it_measured(rows: list[Row]) -> None:
    said: list[str] = []
    run_demo(said.append)
    text = "\n".join(said)
    assert max(map(len, text.splitlines())) <= 80, "wider than a terminal"
    assert "147,946 parameters" in text
    assert "360 images" in text
    check_table(text, rows)


def test_the_command_prints_it(rows: list[Row]) -> None:
    command = [sys.executable, "-m", "conx", "demo"]
    done = subprocess.run(
        command, cwd=train_demo.FOLDER.parent.parent, capture_output=True, encoding="utf-8", check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    check_table(done.stdout, rows)


def check_table(text: str, rows: list[Row]) -> None:
    """The table in `text` shows `rows`, but for the times, which are another run's."""
    shown = cells(text)
    for row in shown:
        assert bool(row["load ms"]) == bool(row["precision"])
        assert not row["load ms"] or float(row["load ms"]) > 0
    expected = [dict(zip(HEAD, row.cells(), strict=True)) for row in rows]
    assert [row | {"load ms": ""} for row in shown] == [row | {"load ms": ""} for row in expected]


def test_cells() -> None:
    assert Row("a.conx", "fp32", 67_900, 0.11453, 0.00412, 354 / 360, 0.35481).cells() == [
        "a.conx",
        "fp32",
        bytes_text(67_900),
        "11.5%",
        "4.1",
        "98.3%",
        "0.355",
    ]
    assert Row("a.zip", "", 900, 0.5).cells() == ["a.zip", "", "900 B", "50.0%", "", "", ""]


@pytest.mark.parametrize(("package", "extra"), [("onnx", "pack"), ("onnxruntime", "cpu")])
def test_a_missing_extra_is_named_in_one_line(package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from conx.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert f'pip install "conx-onnx[{extra}]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr

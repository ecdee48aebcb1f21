"""`conx demo`: the main job on a small model that comes with conx. It is trained by `tools/train_demo.py`."""

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

import conx
from conx.report import bytes_text, table

__all__ = ["HEAD", "Row", "compare", "run_demo"]

HEAD = ("file", "precision", "size", "of .onnx", "load ms", "accuracy", "difference")
# The settings of `conx.pack` that are shown, by the name of the file.
SETTINGS: dict[str, dict[str, Any]] = {
    "lossless.conx": {"lossless": True},
    "default.conx": {},
    "4bits.conx": {"bits": 4},
    "2bits.conx": {"bits": 2},
}
PROVIDERS = ["CPUExecutionProvider"]
OPENINGS = 15  # the fastest counts: what else the machine does only adds time

BEFORE = """\
A network that names handwritten digits ({parameters:,} parameters) was packed in
{ways} ways. Each file is opened in onnxruntime at each precision that it offers,
and run on {images} images that the network was not trained on.
"""
AFTER = """
precision   what the graph computes in; `original` is the model's own graph
load ms     until the session can run, best of {openings}; here mostly fixed costs
accuracy    part of the images that are named rightly
difference  the largest between a probability and the one that the .onnx gives

Lossless keeps every bit of the weights. The default keeps a code of 8 bits for
each weight, which is then compressed; with fewer bits the file gets smaller and
the weights coarser. Now pack a model of yours:

    conx pack model.onnx -o model.conx   (also --lossless, --bits 4; see --help)
    conx info model.conx

and in Python, in place of onnxruntime.InferenceSession("model.onnx"):

    session = conx.InferenceSession("model.conx")"""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """What was measured of one file at one precision.

    Attributes:
        file: its name.
        precision: what it was opened at; "" where it cannot be opened.
        size: bytes.
        ratio: `size` over that of the .onnx.
        load: seconds from path to session; None where it cannot be opened, as with the next two.
        accuracy: part of the held-out images that are named rightly.
        difference: the largest between a probability and that of the .onnx.
    """

    file: str
    precision: str
    size: int
    ratio: float
    load: float | None = None
    accuracy: float | None = None
    difference: float | None = None

    def cells(self) -> list[str]:
        """The texts under `HEAD`."""
        return [
            self.file,
            self.precision,
            bytes_text(self.size),
            f"{self.ratio:.1%}",
            "" if self.load is None else f"{1000 * self.load:.1f}",
            "" if self.accuracy is None else f"{self.accuracy:.1%}",
            "" if self.difference is None else f"{self.difference:.3g}",
        ]


def run_demo(say: Callable[[str], None]) -> None:
    """Pack the model that comes with conx in some ways, load and run each, and tell what came out.

    Args:
        say: called with each piece of text.

    Raises:
        UnsupportedError: onnx or onnxruntime is not installed; it names the pip command.
    """
    with TemporaryDirectory(prefix="conx-demo-") as name:
        rows = list(compare(Path(name)))
        parameters = conx.inspect(Path(name) / rows[0].file).parameters
    say(BEFORE.format(parameters=parameters, ways=len(SETTINGS), images=len(held_out()[0])))
    say(table(HEAD, [row.cells() for row in rows]))
    say(AFTER.format(openings=OPENINGS))


def compare(folder: Path) -> Iterator[Row]:
    """Write the model and its packed files into `folder`, and measure each: the .onnx, it zipped, the .conx files."""
    images, labels = held_out()
    model = (files("conx") / "demo_data" / "digits.onnx").read_bytes()
    original = folder / "digits.onnx"
    original.write_bytes(model)
    expected = _run(_open(original, "original")[0], images)

    def measured(path: Path, precision: str) -> Row:
        session, seconds = _open(path, precision)
        for _ in range(OPENINGS - 1):
            seconds = min(seconds, _open(path, precision)[1])
        found = _run(session, images)
        accuracy = float((found.argmax(axis=1) == labels).mean())
        difference = float(np.abs(found - expected).max())
        size = path.stat().st_size
        return Row(path.name, precision, size, size / len(model), seconds, accuracy, difference)

    yield measured(original, "original")
    zipped = len(zlib.compress(model, 9))
    yield Row("zipped .onnx", "", zipped, zipped / len(model))
    for name, settings in SETTINGS.items():
        packed = folder / name
        conx.pack(original, packed, **settings)
        for precision in conx.inspect(packed).precisions:
            yield measured(packed, precision)


def held_out() -> tuple[Floats, npt.NDArray[np.uint8]]:
    """The images that the model was not trained on, [n, 1, 8, 8] of 0 to 1, and their digits."""
    with (files("conx") / "demo_data" / "held_out.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"].astype(np.float32) / 16, arrays["labels"]


def _open(path: Path, precision: str) -> tuple["conx.InferenceSession", float]:
    """A session and the seconds that it took to open. An .onnx goes straight to onnxruntime."""
    begun = time.perf_counter()
    session = conx.InferenceSession(path, providers=PROVIDERS, precision=precision)
    return session, time.perf_counter() - begun


def _run(session: "conx.InferenceSession", images: Floats) -> Floats:
    found: Floats = session.run(None, {session.get_inputs()[0].name: images})[0]
    return found

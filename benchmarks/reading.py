"""The models that read pictures of text: PP-OCR's recognizers and detector, and ddddocr.

All recognizers end in connectionist temporal classification (Graves et al. 2006): class 0 is the blank, and a class
that follows itself is one character.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import onnxruntime
from PIL import Image

from benchmarks.corpus import fetch
from benchmarks.feeds import SCORING, Array, Feed, Run
from benchmarks.pictures import captchas, lines, pages

__all__ = ["captcha_feeds", "captcha_score", "line_feeds", "line_score", "page_feeds"]

_LINES, _CAPTCHAS = 300, 400
_LINE_HEIGHT, _LINE_WIDTH = 48, 320  # pixels; PP-OCR pads narrower lines
_CAPTCHA_HEIGHT = 64


def line_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives lines for a PP-OCR recognizer, ``x`` [1, 3, 48, width] float32 in -1…1, BGR."""
    return [_line_feed(picture) for _, picture in lines(limit, seed)]


def line_score(key: str) -> Callable[[Run, int | None], dict[str, float]]:
    """Makes the scorer of one recognizer: its character error rate, edits per character, and its exact lines."""

    def score(run: Run, limit: int | None) -> dict[str, float]:
        drawn = lines(limit or _LINES, SCORING)
        read = [_decode(_only(run(_line_feed(picture)))[0], _ppocr_characters(key)) for _, picture in drawn]
        edits = sum(_edits(text, wanted) for text, (wanted, _) in zip(read, drawn, strict=True))
        exact = sum(text == wanted for text, (wanted, _) in zip(read, drawn, strict=True))
        return {"cer": edits / sum(len(wanted) for wanted, _ in drawn), "exact": exact / len(drawn)}

    return score


def page_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives pages for PP-OCR's detector, ``x`` [1, 3, 736, 736] float32 in -1…1, BGR."""
    return [{"x": _signed(page)} for page in pages(limit, seed)]


def captcha_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives captchas for ddddocr, ``input1`` [1, 1, 64, width] float32 in 0…1."""
    return [_captcha_feed(picture) for _, picture in captchas(limit, seed)]


def captcha_score(key: str) -> Callable[[Run, int | None], dict[str, float]]:
    """Makes the scorer of one ddddocr model: the share of captchas read exactly, letter case aside."""
    name = "CHARSET_OLD" if key == "ddddocr_old" else "CHARSET_BETA"

    def score(run: Run, limit: int | None) -> dict[str, float]:
        drawn = captchas(limit or _CAPTCHAS, SCORING)
        classes = _ddddocr_characters(name)
        read = [_decode(_only(run(_captcha_feed(picture)))[:, 0], classes) for _, picture in drawn]
        right = sum(text.upper() == wanted for text, (wanted, _) in zip(read, drawn, strict=True))
        return {"exact": right / len(drawn)}

    return score


def _line_feed(picture: Image.Image) -> Feed:
    width = math.ceil(_LINE_HEIGHT * picture.width / picture.height)
    scaled = _signed(picture.resize((width, _LINE_HEIGHT), Image.Resampling.BILINEAR))
    padding = max(0, _LINE_WIDTH - width)
    return {"x": np.pad(scaled, ((0, 0), (0, 0), (0, 0), (0, padding)))}


def _captcha_feed(picture: Image.Image) -> Feed:
    width = int(picture.width * _CAPTCHA_HEIGHT / picture.height)
    grey = picture.resize((width, _CAPTCHA_HEIGHT), Image.Resampling.LANCZOS).convert("L")
    return {"input1": np.asarray(grey, np.float32)[None, None] / 255}


def _signed(picture: Image.Image) -> Array:
    bgr = np.asarray(picture, np.float32)[:, :, ::-1]
    return np.ascontiguousarray((bgr / 255 - 0.5).transpose(2, 0, 1)[None] / 0.5)


def _only(outputs: dict[str, Array]) -> Array:
    (output,) = outputs.values()
    return output


def _decode(logits: Array, classes: Sequence[str]) -> str:
    best = logits.argmax(axis=1)  # [steps, classes] -> [steps]
    first = np.concatenate(([True], best[1:] != best[:-1]))
    return "".join(classes[number] for number in best[first & (best != 0)])


def _edits(one: str, other: str) -> int:
    """Levenshtein's distance, by rows."""
    row = list(range(len(other) + 1))
    for number, left in enumerate(one, start=1):
        before, row[0] = row[0], number
        for column, right in enumerate(other, start=1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (left != right))
    return row[-1]


@cache
def _ppocr_characters(key: str) -> tuple[str, ...]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(fetch(key)), options, providers=["CPUExecutionProvider"])
    stored: str = session.get_modelmeta().custom_metadata_map["character"]
    return ("", *stored.split("\n"), " ")


@cache
def _ddddocr_characters(name: str) -> tuple[str, ...]:
    """Reads a list out of the package's source as a literal, without running it."""
    source = fetch("ddddocr").with_name("charsets.py").read_text("utf-8")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return tuple(ast.literal_eval(statement.value))
    raise LookupError(f"charsets.py of ddddocr defines no {name}")

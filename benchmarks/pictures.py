"""Pictures: photos and fonts out of packages, drawn text, captchas."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import captcha.image
from PIL import Image, ImageDraw, ImageFont

from benchmarks.corpus import fetch_files
from benchmarks.registries import Registry
from benchmarks.texts import sentences

__all__ = ["captchas", "crops", "lines", "pages", "photos"]

_SKIMAGE_PHOTOS = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "hubble_deep_field.jpg")
_SKIMAGE_MORE = ("ihc.png", "moon.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg", "brick.png", "grass.png")
_SKLEARN_PHOTOS = ("china.jpg", "flower.jpg")
_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Bold",
          "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic")  # fmt: skip
_CAPTCHA_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@cache
def photos() -> tuple[Image.Image, ...]:
    """Opens the sample photos of scikit-image and scikit-learn, in RGB."""
    image = [f"skimage/data/{name}" for name in _SKIMAGE_PHOTOS + _SKIMAGE_MORE]
    learn = [f"sklearn/datasets/images/{name}" for name in _SKLEARN_PHOTOS]
    paths = fetch_files(Registry.PIP, "scikit-image", "0.26.0", image)
    paths += fetch_files(Registry.PIP, "scikit-learn", "1.7.2", learn)
    return tuple(Image.open(path).convert("RGB") for path in paths)


def crops(count: int, size: int, seed: int = 0) -> list[Image.Image]:
    """Cuts random squares, of 40 to 100 % of a photo's shorter side, and resizes them to ``size`` pixels."""
    draw = random.Random(seed)
    cut = []
    for number in range(count):
        photo = photos()[number % len(photos())]
        side = int(min(photo.size) * draw.uniform(0.4, 1))
        left, top = draw.randint(0, photo.width - side), draw.randint(0, photo.height - side)
        square = photo.crop((left, top, left + side, top + side))
        cut.append(square.resize((size, size), Image.Resampling.BILINEAR))
    return cut


@cache
def lines(count: int, seed: int = 0) -> tuple[tuple[str, Image.Image], ...]:
    """Draws sentences, dark on light, each in one of matplotlib's fonts, as tight pictures of one text line."""
    draw = random.Random(seed)
    drawn = []
    for text in sentences(count, seed):
        font = ImageFont.truetype(str(draw.choice(_fonts())), draw.randint(26, 40))
        box = font.getbbox(text)
        margin = draw.randint(3, 8)
        size = (int(box[2] - box[0]) + 2 * margin, int(box[3] - box[1]) + 2 * margin)
        picture = Image.new("RGB", size, _shade(draw, 215, 255))
        ImageDraw.Draw(picture).text((margin - box[0], margin - box[1]), text, _shade(draw, 0, 70), font)
        drawn.append((text, picture))
    return tuple(drawn)


def pages(count: int, seed: int = 0, width: int = 736, height: int = 736) -> list[Image.Image]:
    """Draws pages with lines of different fonts and sizes down the page."""
    draw = random.Random(seed)
    drawn = []
    for _ in range(count):
        page = Image.new("RGB", (width, height), _shade(draw, 225, 255))
        pen = ImageDraw.Draw(page)
        top = 20.0
        for text in sentences(40, draw.getrandbits(32)):
            size = draw.randint(14, 34)
            if top + 2 * size > height:
                break
            font = ImageFont.truetype(str(draw.choice(_fonts())), size)
            pen.text((draw.randint(10, 120), top), text, _shade(draw, 0, 70), font)
            top += size * draw.uniform(1.3, 2.2)
        drawn.append(page)
    return drawn


@cache
def captchas(count: int, seed: int = 0) -> tuple[tuple[str, Image.Image], ...]:
    """Draws captchas of four characters with the package captcha, reproducibly.

    The package takes its chances from the operating system through ``secrets``, which cannot be seeded, so a seeded
    generator stands in for that module while it draws.
    """
    draw = random.Random(seed)
    seeded = SimpleNamespace(randbelow=draw.randrange, randbits=draw.getrandbits, choice=draw.choice)
    generator = captcha.image.ImageCaptcha()
    with mock.patch.object(captcha.image, "secrets", seeded):
        texts = ["".join(draw.choices(_CAPTCHA_CHARACTERS, k=4)) for _ in range(count)]
        return tuple((text, generator.generate_image(text)) for text in texts)


@cache
def _fonts() -> tuple[Path, ...]:
    names = [f"matplotlib/mpl-data/fonts/ttf/{name}.ttf" for name in _FONTS]
    return tuple(fetch_files(Registry.PIP, "matplotlib", "3.10.8", names))


def _shade(draw: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return draw.randint(low, high), draw.randint(low, high), draw.randint(low, high)

"""Photos as the picture models want them: opennsfw, ViT-S focus, VGG16, background removal, face age."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image

from benchmarks.feeds import Array, Feed
from benchmarks.pictures import crops

__all__ = ["face_age_feeds", "imgly_feeds", "opennsfw_feeds", "vgg16_feeds", "vit_feeds"]

_OPENNSFW_MEAN_BGR = np.array([104, 117, 123], np.float32)
_IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)


def opennsfw_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives crops, ``input:0`` [1, 224, 224, 3] float32, BGR around its mean, after a JPEG as in training."""
    feeds: list[Feed] = []
    for picture in crops(limit, 256, seed):
        jpeg = BytesIO()
        picture.crop((16, 16, 240, 240)).save(jpeg, "JPEG")
        bgr = np.asarray(Image.open(jpeg), np.float32)[:, :, ::-1]
        feeds.append({"input:0": (bgr - _OPENNSFW_MEAN_BGR)[None]})
    return feeds


def vit_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives crops, ``input_image`` [1, 3, 224, 224] float32, normalized as ImageNet's."""
    return [{"input_image": _planes((_unit(p) - _IMAGENET_MEAN) / _IMAGENET_STD)} for p in crops(limit, 224, seed)]


def vgg16_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives crops, ``input`` [1, 240, 240, 3] float32 in 0…1."""
    return [{"input": _unit(picture)[None]} for picture in crops(limit, 240, seed)]


def imgly_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives crops, ``input`` [1, 3, 1024, 1024] float32 in -0.5…0.5."""
    return [{"input": _planes(_unit(picture) * (255 / 256) - 0.5)} for picture in crops(limit, 1024, seed)]


def face_age_feeds(limit: int, seed: int) -> list[Feed]:
    """Gives crops, ``input`` [1, 3, 64, 64] float32 in 0…1."""
    return [{"input": _planes(_unit(picture))} for picture in crops(limit, 64, seed)]


def _unit(picture: Image.Image) -> Array:
    return np.asarray(picture, np.float32) / 255


def _planes(picture: Array) -> Array:
    return np.ascontiguousarray(picture.transpose(2, 0, 1)[None], np.float32)

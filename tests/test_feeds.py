"""Inputs made to fit a model's description, with sizes and bounds tried until it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from conx.errors import UnsupportedError
from conx.feeds import Feed, fitting_feeds, generated_feeds


@dataclass(frozen=True)
class Spec:
    name: str
    type: str
    shape: Sequence[int | str | None]


IDS = Spec("ids", "tensor(int64)", ["batch", "length"])
PICTURE = Spec("x", "tensor(float)", [None, 3, None, None])


def refuses(message: str) -> RuntimeError:
    return RuntimeError(message)


def test_sizes_that_agree() -> None:
    """The batch is 1 wherever it stands, in a state of layers too, and everything else of one length."""
    specs = [
        Spec("sound", "tensor(float)", [None, None]),
        Spec("state", "tensor(float)", [2, None, 128]),
        Spec("other", "tensor(float)", [4, "batch", 8]),
        Spec("mask", "tensor(bool)", ["batch", "length"]),
        Spec("picture", "tensor(float16)", [1, 3, "height", "width"]),
        Spec("scale", "tensor(double)", []),
    ]
    (feed,) = generated_feeds(specs, length=24)
    assert {name: values.shape for name, values in feed.items()} == {
        "sound": (1, 24), "state": (2, 1, 128), "other": (4, 1, 8), "mask": (1, 24), "picture": (1, 3, 24, 24),
        "scale": (),
    }  # fmt: skip
    assert feed["mask"].all()
    assert feed["picture"].dtype == np.float16


def test_a_table_that_ends() -> None:
    """Integers become smaller until the model takes them."""
    tried = []

    def run(feed: Feed) -> None:
        tried.append(int(feed["ids"].max()))
        if tried[-1] >= 5:
            raise refuses("index out of bounds")

    feeds = fitting_feeds([IDS], run, seed=3, count=2)
    assert len(feeds) == 2
    assert tried[-1] < 5 < tried[0]
    again = fitting_feeds([IDS], run, seed=3, count=2)
    assert all(np.array_equal(one["ids"], other["ids"]) for one, other in zip(feeds, again, strict=True))


def test_a_window_that_is_too_short() -> None:
    def run(feed: Feed) -> None:
        if feed["x"].shape[1] < 300:
            raise refuses("the window is too short")

    (feed,) = fitting_feeds([Spec("x", "tensor(float)", ["batch", "samples"])], run)
    assert feed["x"].shape == (1, 512)


def test_a_picture_that_is_halved() -> None:
    def run(feed: Feed) -> None:
        if feed["x"].shape[2] % 32:
            raise refuses("sizes differ")

    (feed,) = fitting_feeds([PICTURE], run)
    assert feed["x"].shape == (1, 3, 64, 64)


def test_a_model_that_takes_nothing() -> None:
    def run(_: Feed) -> None:
        raise refuses("no such file")

    with pytest.raises(UnsupportedError, match="no such file"):
        fitting_feeds([IDS, PICTURE], run)
    with pytest.raises(UnsupportedError, match="is a seq"):
        fitting_feeds([Spec("s", "seq(tensor(float))", [])], run)

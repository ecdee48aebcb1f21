"""What a measurement passes around: feeds, outputs, and a function from the one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CALIBRATION",
    "COMPARISON",
    "SCORING",
    "Array",
    "Feed",
    "InputSpec",
    "Outputs",
    "Run",
    "SessionLike",
    "runner",
]

Array: TypeAlias = NDArray[Any]
Feed: TypeAlias = dict[str, Array]
Outputs: TypeAlias = dict[str, Array]
Run: TypeAlias = Callable[[Feed], Outputs]


# Seeds of the three draws from any data, so that nothing is scored on what it was fitted to.
SCORING, CALIBRATION, COMPARISON = range(3)


class InputSpec(Protocol):
    """What onnxruntime tells of an input or output (its ``NodeArg``)."""

    @property
    def name(self) -> str:
        """Name to feed it by."""
        ...

    @property
    def type(self) -> str:
        """Such as ``tensor(float)``."""
        ...

    @property
    def shape(self) -> Sequence[int | str | None]:
        """Sizes; a name or None where the size is free."""
        ...


class SessionLike(Protocol):
    """The part of ``onnxruntime.InferenceSession`` that measuring needs."""

    def run(self, output_names: Sequence[str] | None, input_feed: Feed) -> Sequence[Any]:
        """Computes the outputs."""
        ...

    def get_outputs(self) -> Sequence[InputSpec]:
        """Describes the outputs, in the order in which ``run`` gives them."""
        ...


def runner(session: SessionLike) -> Run:
    """Wraps a session as a function from a feed to its outputs by name.

    A sequence of maps, such as a tree ensemble's probabilities by class, becomes an array [samples, classes].
    """
    names = [output.name for output in session.get_outputs()]

    def run(feed: Feed) -> Outputs:
        return {name: _array(value) for name, value in zip(names, session.run(None, feed), strict=True)}

    return run


def _array(value: object) -> Array:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return np.array([[row[key] for key in sorted(row)] for row in value])
    return np.asarray(value)

"""What is known of a value of the graph while it is walked through."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnx

from conx.graph.dequantize.constants import Constant

__all__ = ["Affine", "Integer", "Params", "Value", "is_zero", "leaves", "same", "same_params"]

FLOAT, UNKNOWN = onnx.TensorProto.FLOAT, onnx.TensorProto.UNDEFINED


@dataclass(eq=False)
class Value:
    """A value of the graph.

    Attributes:
        name: under which it is had now.
        kind: element type in the source; UNKNOWN where nothing says it.
        rank: number of its axes, where something says it.
        constant: what it is, if it never changes.
        home: the Frame where the constant is defined (which would be a circle of imports).
        integer: what it stands for, if it is made of integers that stand for floats.
        affine: if it is `(integer - zero) * scale` so far, of what.
        factors: values whose product it is.
        divided: (value, divisor): the value over factors, rounded or not.
        picked: (constant, indices): rows of a constant, gathered along its first axis.
        scalar: whether it has one element.
        positive: whether none of it is below 0.
        fed: whether it is an input of the graph.
        picks: name of the constant integers that it is gathered or cut from.
    """

    name: str
    kind: int = UNKNOWN
    rank: int | None = None
    constant: Constant | None = None
    home: Any = None
    integer: "Integer | None" = None
    affine: "Affine | None" = None
    factors: "tuple[Value, ...]" = ()
    divided: "tuple[Value, tuple[Value, ...]] | None" = None
    picked: "tuple[Value, str] | None" = None
    scalar: bool = False
    positive: bool = False
    fed: bool = False
    picks: str = ""

    @property
    def fixed(self) -> str:
        """The name of the constant that it is, or is a part of; "" if it is none."""
        return self.picks if self.constant is None else self.constant.tensor.name or self.name


@dataclass(frozen=True)
class Params:
    """How integers stand for floats: `(integer - zero) * scale`.

    Attributes:
        scale: values whose product is the scale.
        zero: the zero point; None: 0.
        axis: that a scale or zero point of one dimension lies along; None: they broadcast against the integers.
        block: positions of `axis` that share a scale, if there are blocks.
        kind: element type of the floats.
    """

    scale: tuple[Value, ...]
    zero: Value | None = None
    axis: int | None = None
    block: int = 0
    kind: int = FLOAT

    def key(self) -> tuple[object, ...]:
        zero = None if self.zero is None else self.zero.name
        return (*(v.name for v in self.scale), None, zero, self.axis, self.block, self.kind)

    def single(self) -> bool:
        """Whether there is one scale and one zero point, as far as is known."""
        values = (*self.scale, *([self.zero] if self.zero else []))
        return not self.block and all(v.constant is None or v.constant.size == 1 for v in values)


@dataclass(frozen=True)
class Affine:
    """A value made of integers: `(of - zero) * scale`, with what came of it until now.

    Attributes:
        of: the integers.
        params: of what is not yet known, nothing or None.
        wide: whether the arithmetic is exact: done in floats or wider integers than the source's.
    """

    of: Value
    params: Params = field(default_factory=lambda: Params(()))
    wide: bool = True


class Integer(Protocol):
    """Integers that stand for floats."""

    @property
    def params(self) -> Params | None:
        """Their scale and zero point, where they are known."""
        ...

    def floats(self, frame: Any, params: Params, want: str) -> Value | None:
        """The floats that they stand for, if that is what `params` make of them. Nodes needed go into the Frame.

        `want` is the name that the result should have, "" if any.
        """
        ...


def leaves(value: Value) -> tuple[Value, ...]:
    """The values whose product this one is."""
    return value.factors or (value,)


def is_zero(value: Value | None) -> bool:
    """Whether a zero point is nothing to subtract."""
    if value is None:
        return True
    return value.constant is not None and not value.constant.values().any()


def same(a: Value | None, b: Value | None) -> bool:
    """Whether two scales or two zero points are equal for certain."""
    if a is None or b is None:
        return is_zero(a) and is_zero(b)
    if a is b or a.name == b.name:
        return True
    if a.constant is None or b.constant is None:
        return False
    if a.constant.tensor is b.constant.tensor and a.constant.moves == b.constant.moves:
        return True
    one = a.constant.size == b.constant.size == 1
    if not one and a.constant.shape != b.constant.shape:
        return False
    first, second = a.constant.values(), b.constant.values()
    return np.array_equal(first.reshape(-1), second.reshape(-1))


def same_params(a: Params, b: Params) -> bool:
    """Whether two readings of integers are one."""
    rest = list(b.scale)
    for value in a.scale:
        found = next((v for v in rest if same(v, value)), None)
        if found is None:
            return False
        rest.remove(found)
    if rest or not same(a.zero, b.zero):
        return False
    return (a.single() and b.single()) or (a.axis == b.axis and a.block == b.block)

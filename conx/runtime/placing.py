"""Where decoded elements go in a buffer whose axes are in another order than the stored ones."""

import math

from conx.codecs.base import Array
from conx.container.records import Binding, Tensor
from conx.errors import FormatError
from conx.runtime.views import zero_code

__all__ = ["scatter", "stored_view"]


def stored_view(tensor: Tensor, binding: Binding, out: Array) -> Array | None:
    """`out` seen with its axes in stored order, or None where that is the order wanted. Padding is filled in."""
    rank = len(tensor.shape)
    wanted = binding.perm or tuple(range(rank))
    order = tensor.order or tuple(range(rank))
    dims = [tensor.shape[axis] for axis in wanted]
    padded = binding.pad is not None and binding.pad != dims[-1]
    if wanted == order and not padded:
        return None
    if tensor.dtype.bits < 8:
        raise FormatError(f"axes of {tensor.dtype.label}, which is smaller than a byte, cannot be exchanged")
    if binding.pad is None or not padded:
        shaped = out.reshape(dims)
    else:
        shaped = out.reshape([*dims[:-1], binding.pad])
        shaped[..., dims[-1] :] = zero_code(binding.dtype_of(tensor))
        shaped = shaped[..., : dims[-1]]
    return shaped.transpose([wanted.index(axis) for axis in order])


def scatter(view: Array, start: int, values: Array) -> None:
    """Puts `values` at flat positions start … of `view` (any strides)."""
    if view.ndim == 1:
        view[start : start + values.size] = values
        return
    row = math.prod(view.shape[1:])
    first, inside = divmod(start, row)
    done = 0
    if inside:
        done = min(row - inside, values.size)
        scatter(view[first], inside, values[:done])
        first += 1
    rows = (values.size - done) // row
    view[first : first + rows] = values[done : done + rows * row].reshape(rows, *view.shape[1:])
    done += rows * row
    if done < values.size:
        scatter(view[first + rows], 0, values[done:])

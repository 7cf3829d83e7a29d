"""Largest possible results of operators whose results depend on values.

``LARGEST`` has functions that make the largest result where values decide its size, as for
``x[x > 0]``. ``largest_value`` returns the largest number in the results of other operators, such
as ``argmax``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

_ATEN = torch.ops.aten
_DTYPES_OF_MASKS = (torch.bool, torch.uint8)


def is_known(tensor: Any) -> bool:
    """Return True if torch knows the values of a fake tensor."""
    return getattr(tensor, "constant", None) is not None


def _nonzero(tensor: Any, *, share: float = 1.0) -> Any:
    """Return the positions of a tensor's nonzero elements if its values are known; otherwise as
    many positions as the assumed share of its elements, all by default.
    """
    if is_known(tensor):
        return _ATEN.nonzero.default(tensor)
    shape = (tensor.dim(), _rounded_share(tensor.numel(), share))
    by_dimension = tensor.new_empty(shape, dtype=torch.long)
    return by_dimension.t()


def _rounded_share(number: int, share: float) -> int:
    """Return a share of a number, rounded up."""
    return math.ceil(number * share)


def _masked_select(tensor: Any, mask: Any, *, share: float = 1.0) -> Any:
    """Return as many elements as a mask selects if all its values are true, or a share of them."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    positions = _nonzero(mask.expand(shape), share=share)
    return tensor.new_empty(len(positions))


def _index(tensor: Any, indices: Any, *, share: float = 1.0) -> Any:
    """Return the elements at ``indices``.

    In a mask among these, the assumed share of the elements counts as true.
    """
    positions: list[Any] = []
    for index in indices:
        if is_mask(index):
            positions += _nonzero(index, share=share).unbind(1)
        else:
            positions.append(index)
    return _ATEN.index.Tensor(tensor, positions)


def is_mask(index: Any) -> bool:
    """Return True if an index is a mask: it selects where it is true."""
    if index is None:
        return False
    return index.dtype in _DTYPES_OF_MASKS


def _unique(
    tensor: Any,
    _: bool = True,
    inverse: bool = False,
    counts: bool = False,
    *,
    share: float = 1.0,
) -> Any:
    """Return the result of ``x.unique()`` as if all elements were different, or a share of them.

    That is a tuple of the values, of each element's position among them (if the code asks for it by
    ``inverse``), and of how often each value occurs (``counts``).
    """
    count = _number_of_different(tensor, tensor.numel(), share)
    positions, numbers = _empty_positions_and_counts(
        tensor, tensor.shape, count, has_positions=inverse, has_counts=counts
    )
    return tensor.new_empty(count), positions, numbers


_MOST_DIFFERENT_VALUES = {torch.bool: 2, torch.uint8: 256, torch.int8: 256}
"""The number of different values of small types."""


def _number_of_different(tensor: Any, number: int, share: float) -> int:
    """Return how many different values there are assumed to be among ``number`` values of a tensor.

    That is a share of them, at most as many as the tensor's type can represent, and at least one
    unless there are none.
    """
    count = _rounded_share(number, share)
    count = min(count, _MOST_DIFFERENT_VALUES.get(tensor.dtype, count))
    return max(count, min(1, number))


def _unique_in(
    tensor: Any,
    dim: int,
    _: bool = True,
    inverse: bool = False,
    counts: bool = False,
    *,
    share: float = 1.0,
) -> Any:
    """Return the result of ``x.unique(dim=dim)`` as if all slices were different, or a share.

    The other arguments are those of ``_unique``.
    """
    length = tensor.shape[dim]
    count = max(_rounded_share(length, share), min(1, length))
    positions, numbers = _empty_positions_and_counts(
        tensor, (length,), count, has_positions=inverse, has_counts=counts
    )
    shape = list(tensor.shape)
    shape[dim] = count
    return tensor.new_empty(shape), positions, numbers


def _empty_positions_and_counts(
    tensor: Any, shape: Any, count: int, *, has_positions: bool, has_counts: bool
) -> tuple[Any, Any]:
    """Return the second and the third result of ``_unique``: positions, and counts of values.

    Args:
        tensor: the tensor, whose device they are on.
        shape: the shape of the positions.
        count: the number of counts.
        has_positions: False if the code does not ask for them: then they have no elements.
        has_counts: the same for the counts.
    """
    if not has_positions:
        shape = (0,)
    if not has_counts:
        count = 0
    positions = tensor.new_empty(shape, dtype=torch.long)
    numbers = tensor.new_empty(count, dtype=torch.long)
    return positions, numbers


def _sorted_unique(
    tensor: Any, is_sorted: bool = True, inverse: bool = False, *, share: float = 1.0
) -> Any:
    """Return the result of ``torch._unique``, which counts no values."""
    values, positions, _ = _unique(tensor, is_sorted, inverse, share=share)
    return values, positions


def _unique_consecutive(
    tensor: Any,
    inverse: bool = False,
    counts: bool = False,
    dim: int | None = None,
    *,
    share: float = 1.0,
) -> Any:
    """Return the result of ``torch.unique_consecutive`` as if all neighbours were different, or a
    share of them.
    """
    if dim is None:
        return _unique_neighbours(tensor, inverse, counts, share)
    return _unique_in(tensor, dim, inverse=inverse, counts=counts, share=share)


def _unique_neighbours(tensor: Any, inverse: bool, counts: bool, share: float) -> Any:
    """Return the values that differ from the one before.

    Unlike different values, their number is not limited by the tensor's type.
    """
    count = max(_rounded_share(tensor.numel(), share), min(1, tensor.numel()))
    positions, numbers = _empty_positions_and_counts(
        tensor, tensor.shape, count, has_positions=inverse, has_counts=counts
    )
    return tensor.new_empty(count), positions, numbers


def _unique_consecutive_in(
    tensor: Any, dim: int, *flags: bool, share: float = 1.0, **named_flags: bool
) -> Any:
    """Return the result of ``unique_consecutive`` along ``dim``; its flags: inverse, counts."""
    is_sorted = True  # an argument of ``unique`` that ``unique_consecutive`` does not have
    return _unique_in(tensor, dim, is_sorted, *flags, share=share, **named_flags)


def _bincount(
    tensor: Any, weights: Any = None, minlength: int = 0, *, share: float | None = None
) -> Any:
    """Return ``minlength`` bins, or one for each value if it is 0.

    The largest value decides the true number, which has no upper bound. ``share`` is the assumed
    number of bins, as a share of the number of values.
    """
    if weights is None:
        dtype = torch.long
    elif weights.is_floating_point():
        dtype = weights.dtype
    else:
        dtype = torch.double
    bins = minlength or tensor.numel()
    if share is not None:
        bins = max(minlength, _rounded_share(tensor.numel(), share))
    return tensor.new_empty(bins, dtype=dtype)


def _ctc_loss(log_probs: Any, targets: Any, *_: Any) -> tuple[Any, Any]:
    """Return the losses, and the forward variables for targets of maximum length."""
    steps = log_probs.shape[0]
    batch = 1
    if log_probs.dim() > 2:
        batch = log_probs.shape[1]
    states = 2 * targets.shape[-1] + 1  # a blank between two labels, and at both ends
    losses = log_probs.new_empty(batch)
    return losses, log_probs.new_empty(batch, steps, states)


def _nms(boxes: Any, *_: Any, share: float = 1.0) -> Any:
    """Return the positions of all boxes, or of a share of them, as if none were suppressed."""
    return boxes.new_empty(_rounded_share(len(boxes), share), dtype=torch.long)


LARGEST: dict[str, Callable[..., Any]] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::index.Tensor": _index,
    "aten::_unique2": _unique,
    "aten::_unique": _sorted_unique,
    "aten::unique_dim": _unique_in,
    "aten::unique_consecutive": _unique_consecutive,
    "aten::unique_dim_consecutive": _unique_consecutive_in,
    "aten::bincount": _bincount,
    "aten::_ctc_loss.Tensor": _ctc_loss,
    "torchvision::nms": _nms,
}
"""Functions that return the largest possible result, by operator.

They have the operator's arguments, and all but that of ``_ctc_loss`` the share of that result.
"""


def of_share(function: Callable[..., Any], share: float) -> Callable[..., Any] | None:
    """Return a function of ``LARGEST`` with a share as its argument; None if it takes none."""
    if function is _ctc_loss:  # the length of the targets decides
        return None
    return functools.partial(function, share=share)


_POSITIONS = {
    "argmax": 1,
    "argmin": 1,
    "max": 1,
    "min": 1,
    "median": 1,
    "mode": 1,
    "sort": 1,
    "topk": 2,
    "kthvalue": 2,
}
"""Operators that return positions, and the number of the argument with their dimension."""
_RANDOM = frozenset(
    {"rand", "uniform", "randint", "randint_like", "random", "randperm", "multinomial"}
)


def largest_value(name: str, args: Any, kwargs: Any, result: Any) -> tuple[Any, float] | None:
    """Return the tensor with positions or random numbers in an operator's result, and their largest
    value; None for another operator.

    Code may use such a number as an index, so that the value must be valid. For the positions that
    a mask selects it is 0, because code usually continues from the first.
    """
    if name == "nonzero":
        return result, 0
    if name in _POSITIONS:
        return _largest_position(name, args, kwargs, result)
    if name in _RANDOM:
        return _largest_random_number(name, args, result)
    return None


def _largest_position(name: str, args: Any, kwargs: Any, result: Any) -> tuple[Any, int] | None:
    """Return the positions in an operator's result, and the last position; None if it has none."""
    source = args[0]
    number = _POSITIONS[name]
    dim = None
    if len(args) > number:
        dim = args[number]
    dim = kwargs.get("dim", dim)
    if name in ("argmax", "argmin"):
        count = source.numel()
        if dim is not None:
            count = _size_of_dimension(source, dim)
        return result, count - 1
    if not isinstance(result, tuple):  # such as max() of a whole tensor: no positions
        return None
    if dim is None:
        dim = -1
    return result[1], _size_of_dimension(source, dim) - 1


def _largest_random_number(name: str, args: Any, result: Any) -> tuple[Any, float] | None:
    """Return the result of a random operator with its largest possible value; None if that is not
    known.
    """
    if name == "multinomial":
        return result, args[0].shape[-1] - 1
    if name in ("rand", "uniform"):
        bound = 1.0
        if len(args) > 2:
            bound = args[2]
        return result, math.nextafter(bound, -math.inf)
    bounds = [number for number in args if type(number) is int]
    if not bounds:
        return None
    return result, bounds[-1] - 1


def _size_of_dimension(tensor: Any, dim: int) -> int:
    """Return the size of a dimension; 1 for a scalar, for which torch accepts dimension 0."""
    if tensor.dim() == 0:
        return 1
    return int(tensor.shape[dim])

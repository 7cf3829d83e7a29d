"""The orders of reading and writing at indices and masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.operators.column_sums import column_sums_bytes
from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.operators.largest import is_mask
from ipygpumem.estimating.operators.transients import (
    cumulative_sums_bytes,
    is_contiguous,
    sort_bytes,
)


@order_of("count_nonzero")
def _count_nonzero(kernel: Kernel, args: Any) -> None:
    """Log a mask of the values that are not zero, then its 8-byte integers, then their sums."""
    source, *options = args
    count = source.numel()
    with kernel.blocks([count, 8 * count]):
        kernel.log_results()
        if options and options[0] is not None:
            dims = options[0]
            if not isinstance(dims, (list, tuple)):
                dims = [dims]
            processors = kernel.card.processors
            sums_bytes = column_sums_bytes(source, dims, itemsize=8, processors=processors)
            kernel.allocate_briefly(sums_bytes)


class _Indices(NamedTuple):
    """The indices in ``x[...]``; a mask counts as the positions at which it is true.

    ``x[rows, :, mask]`` has the dimensions 0 and 2, and two tensors of positions: ``rows`` itself,
    and the positions in ``mask``.
    """

    dims: list[int]
    """The dimensions that are indexed."""
    positions: list[Any]
    """The positions in each of these dimensions."""
    masks: list[Any]
    """The indices that are masks."""
    selected: int
    """Number of positions at which a mask is true."""

    @property
    def are_adjacent(self) -> bool:
        """True if no dimension without an index is between those with one.

        For ``x[i, :, j]`` that is False.
        """
        return _are_adjacent(self.dims)

    def copied_bytes(self) -> list[int]:
        """Return the bytes of each tensor of positions that torch copies.

        If they differ in shape or strides, torch expands all to one shape, and copies those that
        are not contiguous then.
        """
        layouts = {(index.shape, index.stride()) for index in self.positions}
        if len(layouts) < 2:
            return []
        sizes: list[int] = []
        for index in self.positions:
            is_expanded = index.numel() != self.positions_count
            if is_expanded or not is_contiguous(index):
                sizes.append(self.positions_count * index.itemsize)
        return sizes

    @property
    def positions_count(self) -> int:
        """The number of elements of ``x`` that the indices select, when expanded to one shape."""
        return math.prod(torch.broadcast_shapes(*(index.shape for index in self.positions)))


def _indices_of(source: Any, indices: Sequence[Any], values: Any) -> _Indices:
    """Return the indices with which an operation reads or replaces ``values`` of a tensor.

    Args:
        source: the tensor.
        indices: the index of each dimension, None for a slice of the whole dimension. A mask covers
            as many dimensions as it has itself.
        values: the values at the indices; their shape says how many positions a mask selects.
    """
    masks = [index for index in indices if is_mask(index)]
    dims = _indexed_dims(indices)
    selected = _number_of_selected(source, dims, masks, values)
    positions: list[Any] = []
    for index in indices:
        if is_mask(index):
            positions += [index.new_empty(selected, dtype=torch.long)] * index.dim()
        elif index is not None:
            positions.append(index)
    return _Indices(dims, positions, masks, selected)


def _indexed_dims(indices: Iterable[Any]) -> list[int]:
    """Return the dimensions that have an index: 0 and 2 for ``x[i, :, j]``."""
    dims: list[int] = []
    dim = 0
    for index in indices:
        covered = index.dim() if is_mask(index) else 1
        if index is not None:
            dims += range(dim, dim + covered)
        dim += covered
    return dims


def _are_adjacent(dims: Sequence[int]) -> bool:
    """Return True if sorted dimensions have no other dimension between them."""
    return dims[-1] - dims[0] < len(dims)


def _number_of_selected(source: Any, dims: list[int], masks: list[Any], values: Any) -> int:
    """Return at how many positions masks are true, from the shape of the selected ``values``.

    If the shape does not say it, as in ``x[mask] = 0``, that is all positions.
    """
    all_positions = max((mask.numel() for mask in masks), default=0)
    # In the values, the dimension of the positions comes before the remaining ones of the source.
    dims_behind = source.dim() - len(dims)  # torch moves positions of dimensions apart to the front
    if _are_adjacent(dims):
        dims_behind = source.dim() - 1 - dims[-1]
    if values.dim() <= dims_behind:
        return all_positions
    selected = int(values.shape[-1 - dims_behind])
    if selected == 1:  # the same value for all positions
        return all_positions
    return min(selected, all_positions)


def _log_positions_of_masks(
    kernel: Kernel, masks: Iterable[Any], selected: int, positions: ExitStack
) -> None:
    """Log the positions at which masks are true; their blocks live until ``positions`` closes."""
    for mask in masks:
        with kernel.copies(mask):
            positions.enter_context(kernel.blocks([8 * selected * mask.dim()]))


@order_of("nonzero")
def _nonzero(kernel: Kernel, args: Any) -> None:
    """Log the positions of ``x.nonzero()``, and a copy of ``x`` if it is not contiguous."""
    with kernel.copies(args[0]):
        kernel.log_results()


@order_of("masked_select")
def _masked_select(kernel: Kernel, args: Any) -> None:
    """Log the positions at which the mask is true, and the values there."""
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    selected = kernel.first_result.numel()
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, [mask.expand(shape)], selected, positions)
        kernel.log_results()


@order_of("index")
def _index(kernel: Kernel, args: Any) -> None:
    """Log the values of ``x[indices]``.

    Masks become positions, and indices that differ in shape or strides are copied; both are freed
    at the end.
    """
    source, index_tensors = args[:2]
    indices = _indices_of(source, index_tensors, kernel.first_result)
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)
        with kernel.blocks(indices.copied_bytes()):
            kernel.log_results()


@order_of("index_put", "_index_put_impl")
def _index_put(kernel: Kernel, args: Any) -> None:
    """Log how a kernel replaces values, as in ``x[indices] = y``, or adds to them.

    The gradient of ``x[indices]`` is such a sum (``accumulate=True``).
    """
    target, index_tensors, values, *options = args
    indices = _indices_of(target, index_tensors, values)
    accumulates = bool(options) and options[0]
    kernel.log_results()
    if accumulates:
        _log_added_values(kernel, target, indices, values)
        return
    is_number = values.numel() == 1 and values.device.type == "cpu"
    if is_number:  # ``x[mask] = 0`` fills the mask, and needs no positions
        return
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)


def _log_added_values(kernel: Kernel, target: Any, indices: _Indices, values: Any) -> None:
    """Log how a kernel adds values at indices, of which several may be the same: it sorts the
    positions in the whole tensor.
    """
    index_bytes = 8 * indices.positions_count
    with ExitStack() as stack:
        with ExitStack() as positions:
            _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)
            _log_summed_positions(kernel, len(indices.dims), index_bytes, stack)
        stack.enter_context(kernel.copies(values))
        if not indices.are_adjacent:
            # A copy of the target with the indexed dimensions first.
            stack.enter_context(kernel.blocks([target.nbytes]))
        # The sorted positions, and the numbers of the values before and after the sort.
        stack.enter_context(kernel.blocks([index_bytes, index_bytes, index_bytes]))
        bits = _bits_of_positions(target.shape, indices)
        kernel.allocate_briefly(sort_bytes(indices.positions_count, bits))


def _log_summed_positions(
    kernel: Kernel, indices: int, index_bytes: int, positions: ExitStack
) -> None:
    """Log the positions of values in the whole tensor; ``positions`` keeps the result alive.

    They are sums over the ``indices`` dimensions: ``x[i, j]`` is at ``i * width + j``.
    """
    for number in range(indices):
        with kernel.blocks([index_bytes]):  # negative indices become positive
            product = kernel.blocks([index_bytes])
            if number == 0:
                positions.enter_context(product)
                continue
            with product:  # freed once it is added to the first one
                pass


def _bits_of_positions(shape: Any, indices: _Indices) -> int:
    """Return the number of bits of the highest position, by which the positions are sorted."""
    if indices.are_adjacent:
        positions = math.prod(shape[: indices.dims[-1] + 1])
    else:
        positions = math.prod(shape[dim] for dim in indices.dims)
    return max(1, int(positions - 1).bit_length())


@order_of("masked_scatter")
def _masked_scatter(kernel: Kernel, args: Any) -> None:
    """Log ``x.masked_scatter(mask, source)``: each element gets its position in the source, which
    is a cumulative sum of the mask.
    """
    mask = args[1]
    kernel.log_results()
    result = kernel.first_result
    count = result.numel()
    kernel.allocate_briefly(
        8 * count, *_copied_mask_bytes(mask, result), cumulative_sums_bytes(count)
    )


@order_of("masked_scatter_backward")
def _masked_scatter_backward(kernel: Kernel, args: Any) -> None:
    """Log a copy of the mask, before the gradient."""
    gradient, mask = args[:2]
    kernel.allocate_briefly(*_copied_mask_bytes(mask, gradient))


def _copied_mask_bytes(mask: Any, tensor: Any) -> list[int]:
    """Return the bytes of a mask's copy in a tensor's shape; none if it can be read as it is."""
    if mask.shape == tensor.shape and is_contiguous(mask):
        return []
    return [tensor.numel()]


@order_of("scatter_reduce")
def _scatter_reduce(kernel: Kernel, args: Any) -> None:
    """Log ``scatter_reduce`` with means: ones, their sums by position, and a mask of no values."""
    source = _log_means_of(kernel, args)
    if source is None:
        return
    kernel.allocate_briefly(source.nbytes, kernel.result_bytes, kernel.first_result.numel())


@order_of("index_reduce")
def _index_reduce(kernel: Kernel, args: Any) -> None:
    """Log ``index_reduce`` with means: the number of values by position, then a mask of none."""
    source = _log_means_of(kernel, args)
    if source is None:
        return
    with kernel.blocks([kernel.result_bytes]):
        kernel.allocate_briefly(source.nbytes)
        kernel.allocate_briefly(kernel.first_result.numel())


def _log_means_of(kernel: Kernel, args: Any) -> Any:
    """Log the results of a reduction to means, and return the values that it reduces.

    None for another reduction, such as ``"sum"``, which needs no further blocks: its results are
    logged after its order.
    """
    if args[4] != "mean":
        return None
    kernel.log_results()
    return args[3]

"""The orders of reading and writing at indices and masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.column_sums import column_sums_bytes
from ipygpumem.estimating.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.largest import is_mask
from ipygpumem.estimating.transients import (
    cumulative_sums_bytes,
    is_contiguous,
    sort_bytes,
)


@order_of("count_nonzero")
def _count_nonzero(kernel: Kernel, args: Any) -> None:
    """Log a mask of the values that are not zero, then its 8-byte integers, then their sums."""
    source, *dims = args
    count = source.numel()
    with kernel.blocks([count, 8 * count]):
        kernel.results()
        if dims and dims[0] is not None:
            summed = list(dims[0]) if isinstance(dims[0], (list, tuple)) else [dims[0]]
            kernel.allocate_briefly(column_sums_bytes(source, summed, 8, kernel.card.processors))


class _Indices(NamedTuple):
    """Indices of a tensor's dimensions; masks count as the positions at which they are true."""

    dims: list[int]
    """The dimensions that are indexed."""
    positions: list[Any]
    """The index of each of these dimensions."""
    masks: list[Any]
    """The indices that are masks."""
    selected: int
    """Number of positions at which a mask is true."""

    @property
    def are_adjacent(self) -> bool:
        """True if no dimension without an index is between those with one."""
        return self.dims[-1] - self.dims[0] < len(self.dims)

    def copied_bytes(self) -> list[int]:
        """Return the bytes of each index that is copied, because the indices differ in layout."""
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
        """The number of positions that the indices have together."""
        return math.prod(torch.broadcast_shapes(*(index.shape for index in self.positions)))


def _indices_of(source: Any, indices: Sequence[Any], values: Any) -> _Indices:
    """Return the indices with which an operation reads or replaces ``values`` of a tensor.

    The shape of the values says how many of them masks select; without it they select all.
    """
    masks = [index for index in indices if is_mask(index)]
    dims: list[int] = []
    dim = 0
    for index in indices:
        covered = index.dim() if is_mask(index) else 1
        if index is not None:
            dims += range(dim, dim + covered)
        dim += covered
    selected = _number_of_selected(source, dims, masks, values)
    positions: list[Any] = []
    for index in indices:
        if is_mask(index):
            positions += [index.new_empty(selected, dtype=torch.long)] * index.dim()
        elif index is not None:
            positions.append(index)
    return _Indices(dims, positions, masks, selected)


def _number_of_selected(source: Any, dims: list[int], masks: list[Any], values: Any) -> int:
    """Return at how many positions masks are true, from the shape of the selected ``values``."""
    most = max((mask.numel() for mask in masks), default=0)
    if dims[-1] - dims[0] < len(dims):
        dims_behind = source.dim() - 1 - dims[-1]
    else:  # indices that are apart come first
        dims_behind = source.dim() - len(dims)
    if values.dim() <= dims_behind:
        return most
    selected = int(values.shape[-1 - dims_behind])
    if selected == 1:  # for all positions
        return most
    return min(selected, most)


def _log_positions_of_masks(
    kernel: Kernel, masks: Iterable[Any], selected: int, positions: ExitStack
) -> None:
    """Log the positions at which masks are true, which ``positions`` keeps."""
    for mask in masks:
        with kernel.copies(mask):
            positions.enter_context(kernel.blocks([8 * selected * mask.dim()]))


@order_of("nonzero")
def _nonzero(kernel: Kernel, args: Any) -> None:
    """Log the positions, and a copy of a tensor that is not contiguous."""
    with kernel.copies(args[0]):
        kernel.results()


@order_of("masked_select")
def _masked_select(kernel: Kernel, args: Any) -> None:
    """Log the positions at which the mask is true, and the values there."""
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    selected = kernel.first_result.numel()
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, [mask.expand(shape)], selected, positions)
        kernel.results()


@order_of("index")
def _index(kernel: Kernel, args: Any) -> None:
    """Log the values at some indices. Masks become positions, and indices with different strides
    are copied; both are freed at the end.
    """
    source, index_tensors = args[:2]
    indices = _indices_of(source, index_tensors, kernel.first_result)
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)
        with kernel.blocks(indices.copied_bytes()):
            kernel.results()


@order_of("index_put", "_index_put_impl")
def _put(kernel: Kernel, args: Any) -> None:
    """Log how a kernel replaces values at indices, or adds values to them."""
    target, index_tensors, values, *options = args
    indices = _indices_of(target, index_tensors, values)
    accumulates = bool(options) and options[0]
    kernel.results()
    if accumulates:
        _log_added_values(kernel, target, indices, values)
        return
    is_number = values.numel() == 1 and values.device.type == "cpu"
    if is_number:  # filled in by the mask
        return
    with ExitStack() as positions:
        _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)


def _log_added_values(kernel: Kernel, target: Any, indices: _Indices, values: Any) -> None:
    """Log how a kernel adds values at indices, which may be repeated: it sorts positions."""
    index_bytes = 8 * indices.positions_count
    with ExitStack() as stack:
        with ExitStack() as positions:
            _log_positions_of_masks(kernel, indices.masks, indices.selected, positions)
            _log_summed_positions(kernel, len(indices.dims), index_bytes, stack)
        stack.enter_context(kernel.copies(values))
        if not indices.are_adjacent:
            stack.enter_context(kernel.blocks([target.nbytes]))  # in another order of dimensions
        stack.enter_context(kernel.blocks([index_bytes, index_bytes, index_bytes]))
        bits = _bits_of_positions(target.shape, indices)
        kernel.allocate_briefly(sort_bytes(indices.positions_count, bits))


def _log_summed_positions(
    kernel: Kernel, indices: int, index_bytes: int, positions: ExitStack
) -> None:
    """Log the positions of values in the whole tensor, which ``positions`` keeps.

    They are sums over the dimensions: ``x[i, j]`` is at ``i * width + j``.
    """
    for number in range(indices):
        with kernel.blocks([index_bytes]):  # negative indices become positive
            product = kernel.blocks([index_bytes])
            if number == 0:
                positions.enter_context(product)
                continue
            with product:  # the sum is kept in the first one
                pass


def _bits_of_positions(shape: Any, indices: _Indices) -> int:
    """Return the number of bits of the highest position to which values are added."""
    if indices.are_adjacent:
        positions = math.prod(shape[: indices.dims[-1] + 1])
    else:
        positions = math.prod(shape[dim] for dim in indices.dims)
    return max(1, int(positions - 1).bit_length())


@order_of("masked_scatter")
def _masked_scatter(kernel: Kernel, args: Any) -> None:
    """Log the position in the source for each element, which is a cumulative sum of the mask."""
    mask = args[1]
    kernel.results()
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
    """Return the bytes of a copy of a mask, unless it is contiguous and has a tensor's shape."""
    if mask.shape == tensor.shape and is_contiguous(mask):
        return []
    return [tensor.numel()]


@order_of("scatter_reduce")
def _scatter_reduce(kernel: Kernel, args: Any) -> None:
    """Log how a mean is computed: ones, how many of them fall on each position, and where none."""
    source = _source_of_means(kernel, args)
    if source is None:
        return
    kernel.allocate_briefly(source.nbytes, kernel.result_bytes, kernel.first_result.numel())


@order_of("index_reduce")
def _index_reduce(kernel: Kernel, args: Any) -> None:
    """Log how a mean is computed: how many values fall on each position, then where none."""
    source = _source_of_means(kernel, args)
    if source is None:
        return
    with kernel.blocks([kernel.result_bytes]):
        kernel.allocate_briefly(source.nbytes)
        kernel.allocate_briefly(kernel.first_result.numel())


def _source_of_means(kernel: Kernel, args: Any) -> Any:
    """Log the results of a reduction, and return its values; None if it computes no means."""
    if args[4] != "mean":
        return None
    kernel.results()
    return args[3]

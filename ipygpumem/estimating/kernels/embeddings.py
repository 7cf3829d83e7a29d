"""The orders of embeddings, their gradients and sparse gradients."""

from __future__ import annotations

from typing import Any

from ipygpumem.estimating.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.kernels.sorting import MOST_SORTED_IN_PLACE, log_sort_of_rows
from ipygpumem.estimating.sparse import parts_of
from ipygpumem.estimating.transients import (
    FEW_INDICES,
    merge_sort_bytes,
    sort_bytes,
)
from ipygpumem.units import divided_up


@order_of("_coalesce")
def _coalesced(kernel: Kernel, args: Any) -> None:
    """Log a sort by index, which keeps two copies of the indices until the values are added up.

    The sorted indices of one dimension are those of the result.
    """
    count = args[0]._nnz()
    indices_bytes = 8 * count
    indices, values = parts_of(kernel.first_result)
    sorted_bytes = indices_bytes
    if len(indices) == 1:
        kernel.part(indices)
        sorted_bytes = 0
    with kernel.blocks([sorted_bytes, indices_bytes, indices_bytes]):
        kernel.allocate_briefly(merge_sort_bytes(count, items=2))
        kernel.part(values)
        kernel.results()


@order_of("sparse_mask")
def _values_at_indices(kernel: Kernel, args: Any) -> None:
    """Log the entries of a dense tensor, which the kernel multiplies by one."""
    dense, mask = args
    count = mask._values().numel()
    with kernel.blocks([dense.itemsize, count * dense.itemsize]):
        kernel.results()


@order_of("embedding_dense_backward")
def _embedding_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table: many indices are sorted before it is allocated."""
    gradient, indices, rows, _, by_frequency = args[:5]
    has_few_indices = indices.numel() <= FEW_INDICES
    with kernel.copies(gradient):
        if has_few_indices and not by_frequency:
            kernel.results()
        else:
            _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


def _log_sorted_sums(
    kernel: Kernel, gradient: Any, indices: Any, rows: int, *, by_frequency: bool
) -> None:
    """Log the kernels that sort indices, and add up the rows of the gradient for each one."""
    count = indices.numel()
    width = gradient.shape[-1]
    indices_bytes = 8 * count
    segments = min(count, rows)
    parts = divided_up(count, 10) + segments  # of ten indices, or of one row's
    begins = [indices_bytes]
    if by_frequency:
        begins *= 3
    of_segments = [8 * segments, 8 * segments]
    of_parts = [8 * parts, 4 * parts * width]
    with kernel.blocks([indices_bytes, indices_bytes]):
        kernel.allocate_briefly(indices_bytes, sort_bytes(count, 64))
        kernel.results()
        with kernel.blocks(begins):
            kernel.allocate_briefly(indices_bytes)  # while it finds where each row begins
            kernel.allocate_briefly(*of_segments, *of_parts)


@order_of("embedding_renorm")
def _limited_norms(kernel: Kernel, args: Any) -> None:
    """Log how a kernel finds the rows whose norms it limits: it sorts the last dimension."""
    indices = args[1]
    indices_bytes = 8 * indices.numel()
    with kernel.blocks([indices_bytes]):
        with kernel.blocks([indices_bytes]):
            if indices.dim() and indices.shape[-1] > MOST_SORTED_IN_PLACE:
                length = indices.shape[-1]
                log_sort_of_rows(kernel, indices.numel() // length, length, indices.itemsize)
        kernel.allocate_briefly(indices_bytes)


@order_of("_embedding_bag", "_embedding_bag_forward_only")
def _bags(kernel: Kernel, _: Any) -> None:
    """Log the sizes of the bags, each index's bag, the sums, and the largest values' positions."""
    for number in (2, 1, 0, 3):
        kernel.result(number)


@order_of("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _bags_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table that is read in bags."""
    gradient, indices, *options = args
    gets_offsets = len(args) > 10  # the first of these operators
    if gets_offsets:
        options = options[1:]
    rows, by_frequency, mode = options[3:6]
    takes_maximum = mode == 2
    if takes_maximum:
        kernel.results()
        return
    _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)

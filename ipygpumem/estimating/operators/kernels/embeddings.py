"""The orders of embeddings, their gradients and sparse gradients."""

from __future__ import annotations

from typing import Any

from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.operators.kernels.sorting import MOST_SORTED_IN_PLACE, log_sort_of_rows
from ipygpumem.estimating.operators.sparse import parts_of
from ipygpumem.estimating.operators.transients import (
    MOST_INDICES_WITHOUT_SORT,
    merge_sort_bytes,
    sort_bytes,
)
from ipygpumem.units import divided_up


@order_of("_coalesce")
def _coalesce(kernel: Kernel, args: Any) -> None:
    """Log ``x.coalesce()``: a sort by index, then the sums of the values with equal indices.

    The sorted indices and two more blocks of their size are alive until the values are added up. If
    the indices have one dimension, the sorted ones become a part of the result.
    """
    count = args[0]._nnz()
    indices_bytes = 8 * count
    indices, values = parts_of(kernel.first_result)
    sorted_bytes = indices_bytes
    if len(indices) == 1:
        kernel.log_part(indices)  # which are the sorted ones
        sorted_bytes = 0
    with kernel.blocks([sorted_bytes, indices_bytes, indices_bytes]):
        kernel.allocate_briefly(merge_sort_bytes(count, items=2))
        kernel.log_part(values)
        kernel.log_results()


@order_of("sparse_mask")
def _sparse_mask(kernel: Kernel, args: Any) -> None:
    """Log ``dense.sparse_mask(mask)``: the selected entries, then these times a one."""
    dense, mask = args
    count = mask._values().numel()
    with kernel.blocks([dense.itemsize, count * dense.itemsize]):
        kernel.log_results()


@order_of("embedding_dense_backward")
def _embedding_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of an embedding's table, after a sort of the indices if they are many.

    A few indices are also sorted if the code asks for their frequencies
    (``scale_grad_by_freq=True``).
    """
    gradient, indices, rows, _, by_frequency = args[:5]
    has_few_indices = indices.numel() <= MOST_INDICES_WITHOUT_SORT
    with kernel.copies(gradient):
        if has_few_indices and not by_frequency:
            kernel.log_results()
        else:
            _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)


def _log_sorted_sums(
    kernel: Kernel, gradient: Any, indices: Any, rows: int, *, by_frequency: bool
) -> None:
    """Log the kernels that sort indices, and then add up the gradients of each row of the table.

    Args:
        kernel: logs the allocations.
        gradient: the gradient of the embedding's result.
        indices: the rows that the embedding has read.
        rows: the number of rows of the table.
        by_frequency: True if the sums are divided by the number of each row's indices.
    """
    count = indices.numel()
    width = gradient.shape[-1]
    indices_bytes = 8 * count
    # A segment is all indices of one row; a part is at most ten indices of one segment.
    most_segments = min(count, rows)
    most_parts = divided_up(count, 10) + most_segments
    starts_of_segments = [indices_bytes]
    if by_frequency:  # two more blocks of this size, to count the indices of each segment
        starts_of_segments *= 3
    segments_bytes = [8 * most_segments, 8 * most_segments]
    parts_bytes = [8 * most_parts, 4 * most_parts * width]
    with kernel.blocks([indices_bytes, indices_bytes]):  # sorted indices, and their positions
        kernel.allocate_briefly(indices_bytes, sort_bytes(count, bits=64))
        kernel.log_results()
        with kernel.blocks(starts_of_segments):
            kernel.allocate_briefly(indices_bytes)  # while it finds where each segment begins
            kernel.allocate_briefly(*segments_bytes, *parts_bytes)


@order_of("embedding_renorm")
def _embedding_renorm(kernel: Kernel, args: Any) -> None:
    """Log how ``max_norm`` of an embedding finds the different rows to limit.

    It sorts the indices along their last dimension.
    """
    indices = args[1]
    indices_bytes = 8 * indices.numel()
    with kernel.blocks([indices_bytes]):
        with kernel.blocks([indices_bytes]):
            if indices.dim() and indices.shape[-1] > MOST_SORTED_IN_PLACE:
                length = indices.shape[-1]
                log_sort_of_rows(kernel, indices.numel() // length, length, indices.itemsize)
        kernel.allocate_briefly(indices_bytes)


@order_of("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(kernel: Kernel, _: Any) -> None:
    """Log the results of ``nn.EmbeddingBag`` in the order of its kernel.

    These are the sizes of the bags, the bag of each index, the sums, and the positions of the
    largest values.
    """
    for index in (2, 1, 0, 3):
        kernel.log_result(index=index)


@order_of("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradient of a table that is read in bags."""
    gradient, indices, *options = args
    has_offsets = len(args) > 10  # only ``_embedding_bag_backward`` gets them
    if has_offsets:
        options = options[1:]
    rows, by_frequency, mode = options[3:6]
    takes_maximum = mode == 2
    if takes_maximum:
        kernel.log_results()
        return
    _log_sorted_sums(kernel, gradient, indices, rows, by_frequency=by_frequency)

"""The orders of sorts, unique and repeated values, modes and largest values."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.operators.transients import (
    cumulative_sums_bytes,
    merge_sort_bytes,
    sort_bytes,
    sort_bytes_without_positions,
)
from ipygpumem.units import divided_up, rounded_up

MOST_SORTED_IN_PLACE = 4096
"""Maximum length of rows that are sorted without a copy."""
_LEAST_LENGTH_SORTED_ALONE = 1_000_000
"""Minimum length of rows that are sorted one after the other."""
_LEAST_ROWS_SORTED_AT_ONCE = 128
"""Minimum number of shorter rows that one kernel sorts at once, each for itself.

Fewer rows are sorted together, as if they were one row, and then by their row numbers.
"""
_BITS_OF_ROW_NUMBER = 7
"""Bits of the numbers of fewer than 128 rows."""


@order_of("sort")
def _sort(kernel: Kernel, args: Any) -> None:
    """Log ``x.sort(dim)``."""
    source, dim = (*args, kernel.options.get("dim", -1))[:2]
    kernel.log_results()
    _log_sort(kernel, source, dim)


def _log_sort(kernel: Kernel, source: Any, dim: int) -> None:
    """Log how a kernel sorts a tensor along a dimension, into results that are logged already.

    The kernel reads and writes rows whose values are next to each other. Other tensors are copied
    before, and so are the values and positions of other results.
    """
    if source.dim() == 0 or source.shape[dim] <= MOST_SORTED_IN_PLACE:
        return
    result = kernel.first_result
    is_dense = source.stride() == result.stride()
    copies_bytes: list[int] = []
    if not is_dense or source.stride(dim) != 1:
        copies_bytes.append(source.nbytes)
    if result.stride(dim) != 1:
        copies_bytes += [source.nbytes, 8 * source.numel()]
    length = source.shape[dim]
    with kernel.blocks(copies_bytes):
        log_sort_of_rows(kernel, source.numel() // length, length, source.itemsize)


def log_sort_of_rows(kernel: Kernel, rows: int, length: int, itemsize: int) -> None:
    """Log a radix sort of long rows with their positions.

    It follows ATen/native/cuda/SortStable.cu.
    """
    bits = 8 * itemsize
    count = rows * length
    values_bytes = itemsize * count
    positions_bytes = 8 * count
    if rows == 1 or length >= _LEAST_LENGTH_SORTED_ALONE:  # one row after the other
        with kernel.blocks([8 * length]):
            for _ in range(rows):
                kernel.allocate_briefly(sort_bytes(length, bits, itemsize))
    elif rows < _LEAST_ROWS_SORTED_AT_ONCE:  # all values, and then by row number
        by_row_number = sort_bytes_without_positions(count, _BITS_OF_ROW_NUMBER, torch.int64)
        with kernel.blocks([positions_bytes, positions_bytes]):
            kernel.allocate_briefly(values_bytes, sort_bytes(count, bits, itemsize))
            kernel.allocate_briefly(by_row_number)
    else:
        copied_bytes = rounded_up(values_bytes, 256) + rounded_up(positions_bytes, 256)
        kernel.allocate_briefly(positions_bytes, copied_bytes + 1)


@order_of("_unique", "_unique2")
def _unique(kernel: Kernel, args: Any) -> None:
    """Log ``x.unique()``: a sort, together with positions if the code asks for them
    (``return_inverse=True``).
    """
    source, *options = args
    if source.dtype is torch.bool:  # its kernel only counts the truth values
        return
    has_positions = len(options) > 1 and options[1]
    count = source.numel()
    bits = 8 * source.itemsize
    positions_bytes = 8 * count
    with kernel.copies(source), kernel.blocks([source.nbytes]), ExitStack() as order:
        if has_positions:
            with kernel.blocks([positions_bytes]):
                # The positions in sorted order live until the end, the unsorted ones do not.
                order.enter_context(kernel.blocks([positions_bytes]))
                kernel.allocate_briefly(sort_bytes(count, bits, source.itemsize))
            kernel.log_result(index=1)
            kernel.allocate_briefly(positions_bytes)
        else:
            kernel.allocate_briefly(sort_bytes_without_positions(count, bits, source.dtype))
        kernel.log_results()


@order_of("unique_consecutive")
def _unique_consecutive(kernel: Kernel, args: Any) -> None:
    """Log ``x.unique_consecutive()``: the position of each value, if the code asks for it, before
    the values.
    """
    source, *options = args
    has_positions, has_counts, dim = (*options, None, None, None)[:3]
    if dim is not None:
        _log_different_slices(
            kernel, source, dim, has_positions=has_positions, has_counts=has_counts
        )
        return
    with kernel.copies(source):
        if has_positions:
            kernel.log_result(index=1)
            kernel.allocate_briefly(4 * source.numel())
        kernel.log_results()


@order_of("unique_dim_consecutive")
def _unique_dim_consecutive(kernel: Kernel, args: Any) -> None:
    """Log the slices along a dimension that differ from the one before."""
    source, dim, *options = args
    has_positions, has_counts = (*options, False, False)[:2]
    _log_different_slices(kernel, source, dim, has_positions=has_positions, has_counts=has_counts)


@order_of("unique_dim")
def _unique_dim(kernel: Kernel, args: Any) -> None:
    """Log the different slices along a dimension (``x.unique(dim=0)``), which is sorted first."""
    source, dim, *options = args
    _, has_positions, has_counts = [*options, False, False, False][:3]
    _log_different_slices(
        kernel, source, dim, has_positions=has_positions, has_counts=has_counts, sorts=True
    )


def _log_different_slices(
    kernel: Kernel,
    source: Any,
    dim: int,
    *,
    has_positions: bool | None,
    has_counts: bool | None,
    sorts: bool = False,
) -> None:
    """Log the different slices of a tensor, in the steps of ATen/native/cuda/Unique.cu.

    Args:
        kernel: logs the allocations.
        source: the tensor.
        dim: the dimension along which its slices are compared.
        has_positions: True if the code asks for each slice's position among the different ones.
        has_counts: True if the code asks how often each of them occurs.
        sorts: True if the slices are sorted first, by the numbers that refer to them.
    """
    count = source.shape[dim]
    numbers_bytes = 8 * count
    with kernel.copies(source.movedim(dim, 0)), kernel.blocks([numbers_bytes]):
        if sorts:
            kernel.allocate_briefly(merge_sort_bytes(count))
        if has_positions:
            kernel.log_result(index=1)
            kernel.allocate_briefly(numbers_bytes)
        if has_counts:
            with kernel.blocks([numbers_bytes + 8]):
                kernel.log_result(index=2)
        kernel.log_results()


@order_of("roll")
def _roll(kernel: Kernel, args: Any) -> None:
    """Log ``x.roll(shifts, dims)``: a copy for each dimension, of which the last is the result.

    The earlier copies are alive until the result is computed.
    """
    source, _, dims = (*args, ())[:3]
    before_last = [source.nbytes] * (len(dims) - 1)
    with kernel.blocks(before_last):
        kernel.log_results()


@order_of("repeat_interleave")
def _repeat_interleave(kernel: Kernel, args: Any) -> None:
    """Log where the repetitions of each element end, then the repeated positions.

    The ends are the cumulative sums of the numbers of repetitions.
    """
    count = args[0].numel()
    with kernel.blocks([8 * count]):
        kernel.allocate_briefly(cumulative_sums_bytes(count))
        kernel.log_results()


_LONGEST_OF_MODE = 2048
"""Maximum length of slices whose most frequent value one kernel finds."""


@order_of("mode")
def _mode(kernel: Kernel, args: Any) -> None:
    """Log the most frequent values, then a copy whose slices are rows, unless they are long."""
    source, dim = (*args, -1)[:2]
    kernel.log_results()
    if source.dim() and source.shape[dim] <= _LONGEST_OF_MODE:
        with kernel.copies(source.transpose(dim, -1)):
            pass


_LENGTHS_OF_SHARED_ROWS = (
    (20, 20_000),
    (40, 10_000),
    (80, 8000),
    (199, 5000),
    (799, 3000),
    (4000, 800),
)
"""Numbers of rows, and for up to so many rows the minimum length for which several blocks of
threads share the search of one row.
"""
_LEAST_LENGTH_OF_MANY_ROWS = 400
"""The same for more rows than the last of these."""
_THREADS_OF_SEARCH = 6 * 256
"""Threads that search the largest values on one multiprocessor."""


@order_of("topk")
def _topk(kernel: Kernel, args: Any) -> None:
    """Log ``x.topk(count)``: its results, and the blocks for the search if the rows are long."""
    source, wanted, *options = args
    if source.dim() == 0:
        return
    dim = -1
    if options:
        dim = options[0]
    length = source.shape[dim]
    rows = source.numel() // max(1, length)
    kernel.log_results()
    with kernel.copies(source):
        if _shares_rows(rows, length):
            kernel.allocate_briefly(*_search_sizes(kernel, source, rows, length))
    is_sorted = len(options) < 3 or options[2]
    if is_sorted and wanted > MOST_SORTED_IN_PLACE:
        _log_sorted_results(kernel, dim)


def _shares_rows(rows: int, length: int) -> bool:
    """Return True if several blocks of a card's threads search one row.

    The limits are those of ATen/native/cuda/TensorTopK.cu.
    """
    for most_rows, least_length in _LENGTHS_OF_SHARED_ROWS:
        if rows <= most_rows:
            return length >= least_length
    return length >= _LEAST_LENGTH_OF_MANY_ROWS


def _log_sorted_results(kernel: Kernel, dim: int) -> None:
    """Log a sort of the largest values, and the positions in the order of that sort."""
    values = kernel.first_result
    positions_bytes = 8 * values.numel()
    with kernel.blocks([positions_bytes, values.nbytes]):
        _log_sort(kernel, values, dim)
        kernel.allocate_briefly(positions_bytes)


def _search_sizes(kernel: Kernel, source: Any, rows: int, length: int) -> list[int]:
    """Return the bytes of the blocks with which several blocks of threads search each row.

    They find the smallest of the largest values digit by digit, by counting the values with each
    digit.
    """
    equal_share = divided_up(rows * length, kernel.card.processors * _THREADS_OF_SEARCH)
    values_of_thread = max(4, min(equal_share, 64))
    blocks = rows * divided_up(length, 256 * values_of_thread)
    state_of_rows_bytes = [source.itemsize * rows, 8 * rows, 8 * rows]
    counts_of_digits_bytes = [512 * blocks, 1024 * rows]
    return [*state_of_rows_bytes, *counts_of_digits_bytes, 4 * blocks, 4 * blocks]

"""The orders of sorts, unique and repeated values, modes and largest values."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from ipygpumem.estimating.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.transients import (
    cumulative_sums_bytes,
    merge_sort_bytes,
    sort_bytes,
    sort_bytes_without_positions,
)
from ipygpumem.units import divided_up, rounded_up

MOST_SORTED_IN_PLACE = 4096
"""Maximum length of rows that are sorted without a copy."""
_LENGTH_SORTED_ALONE = 1_000_000
"""Least length of rows that are sorted one after the other."""
_ROWS_SORTED_BY_NUMBER = 128
"""Least number of shorter rows for which a kernel takes the rows as they are.

Fewer ones are sorted as one row, and then by their numbers.
"""
_BITS_OF_ROWS = 7
"""Bits of the number of a row."""


@order_of("sort")
def _sort(kernel: Kernel, args: Any) -> None:
    """Log a sort along a dimension."""
    source, dim = (*args, kernel.options.get("dim", -1))[:2]
    kernel.results()
    _log_sort(kernel, source, dim)


def _log_sort(kernel: Kernel, source: Any, dim: int) -> None:
    """Log how a kernel sorts a tensor into its results, which exist already.

    It sorts dense rows whose values are next to each other, and copies other tensors and results.
    """
    if source.dim() == 0 or source.shape[dim] <= MOST_SORTED_IN_PLACE:
        return
    result = kernel.first_result
    is_dense = source.stride() == result.stride()
    copies: list[int] = []
    if not is_dense or source.stride(dim) != 1:
        copies.append(source.nbytes)
    if result.stride(dim) != 1:
        copies += [source.nbytes, 8 * source.numel()]
    length = source.shape[dim]
    with kernel.blocks(copies):
        log_sort_of_rows(kernel, source.numel() // length, length, source.itemsize)


def log_sort_of_rows(kernel: Kernel, rows: int, length: int, itemsize: int) -> None:
    """Log a radix sort of long rows with their positions.

    It follows ATen/native/cuda/SortStable.cu.
    """
    bits = 8 * itemsize
    count = rows * length
    values_bytes = itemsize * count
    positions_bytes = 8 * count
    if rows == 1 or length >= _LENGTH_SORTED_ALONE:
        with kernel.blocks([8 * length]):
            for _ in range(rows):
                kernel.allocate_briefly(sort_bytes(length, bits, itemsize))
    elif rows < _ROWS_SORTED_BY_NUMBER:
        with kernel.blocks([positions_bytes, positions_bytes]):  # with the numbers of rows
            kernel.allocate_briefly(values_bytes, sort_bytes(count, bits, itemsize))
            kernel.allocate_briefly(sort_bytes_without_positions(count, _BITS_OF_ROWS, torch.int64))
    else:
        copied_bytes = rounded_up(values_bytes, 256) + rounded_up(positions_bytes, 256)
        kernel.allocate_briefly(positions_bytes, copied_bytes + 1)


@order_of("_unique", "_unique2")
def _unique(kernel: Kernel, args: Any) -> None:
    """Log a sort, with its positions if the code asks for the position of each value.

    Truth values are counted instead.
    """
    source, *options = args
    if source.dtype is torch.bool:
        return
    has_positions = len(options) > 1 and options[1]
    count = source.numel()
    bits = 8 * source.itemsize
    positions_bytes = 8 * count
    with kernel.copies(source), kernel.blocks([source.nbytes]), ExitStack() as stack:
        if has_positions:
            with kernel.blocks([positions_bytes]):
                stack.enter_context(kernel.blocks([positions_bytes]))
                kernel.allocate_briefly(sort_bytes(count, bits, source.itemsize))
            kernel.result(1)
            kernel.allocate_briefly(positions_bytes)
        else:
            kernel.allocate_briefly(sort_bytes_without_positions(count, bits, source.dtype))
        kernel.results()


@order_of("unique_consecutive")
def _unique_of_neighbours(kernel: Kernel, args: Any) -> None:
    """Log the position of each value, if the code asks for it, before the values."""
    source, *options = args
    has_positions, has_numbers, dim = (*options, None, None, None)[:3]
    if dim is not None:
        _log_different_slices(
            kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers
        )
        return
    with kernel.copies(source):
        if has_positions:
            kernel.result(1)
            kernel.allocate_briefly(4 * source.numel())
        kernel.results()


@order_of("unique_dim_consecutive")
def _unique_neighbours_in(kernel: Kernel, args: Any) -> None:
    """Log the slices along a dimension that differ from the one before."""
    source, dim, *options = args
    has_positions, has_numbers = (*options, False, False)[:2]
    _log_different_slices(kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers)


@order_of("unique_dim")
def _unique_in(kernel: Kernel, args: Any) -> None:
    """Log the different slices along a dimension, which is sorted first."""
    source, dim, *options = args
    _, has_positions, has_numbers = [*options, False, False, False][:3]
    _log_different_slices(
        kernel, source, dim, has_positions=has_positions, has_numbers=has_numbers, sorts=True
    )


def _log_different_slices(
    kernel: Kernel,
    source: Any,
    dim: int,
    *,
    has_positions: bool | None,
    has_numbers: bool | None,
    sorts: bool = False,
) -> None:
    """Log the numbers of the slices along a dimension, and copies of the different slices.

    ``sorts``: the numbers are sorted first. It follows ATen/native/cuda/Unique.cu.
    """
    count = source.shape[dim]
    numbers_bytes = 8 * count
    with kernel.copies(source.movedim(dim, 0)), kernel.blocks([numbers_bytes]):
        if sorts:
            kernel.allocate_briefly(merge_sort_bytes(count))
        if has_positions:
            kernel.result(1)
            kernel.allocate_briefly(numbers_bytes)
        if has_numbers:
            with kernel.blocks([numbers_bytes + 8]):
                kernel.result(2)
        kernel.results()


@order_of("roll")
def _rolled(kernel: Kernel, args: Any) -> None:
    """Log one block for each rolled dimension, as large as the source. The last block is the
    result; the earlier ones stay alive until it is computed.
    """
    source, _, dims = (*args, ())[:3]
    before_last = [source.nbytes] * (len(dims) - 1)
    with kernel.blocks(before_last):
        kernel.results()


@order_of("repeat_interleave")
def _repeated(kernel: Kernel, args: Any) -> None:
    """Log where the repetitions of each element end: cumulative sums of their numbers."""
    count = args[0].numel()
    with kernel.blocks([8 * count]):
        kernel.allocate_briefly(cumulative_sums_bytes(count))
        kernel.results()


_LONGEST_OF_MODE = 2048
"""Maximum length of slices whose most frequent value one kernel finds."""


@order_of("mode")
def _mode(kernel: Kernel, args: Any) -> None:
    """Log the most frequent values, and a copy of slices that are not next to each other."""
    source, dim = (*args, -1)[:2]
    kernel.results()
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
"""Up to so many rows, and their least length with which several blocks search one row."""
_LENGTH_OF_MANY_SHARED_ROWS = 400
_THREADS_OF_SEARCH = 6 * 256
"""Threads that search the largest values on one multiprocessor."""


@order_of("topk")
def _topk(kernel: Kernel, args: Any) -> None:
    """Log a search for the largest values of rows; it takes memory if the rows are long."""
    source, most, *options = args
    if source.dim() == 0:
        return
    dim = -1
    if options:
        dim = options[0]
    length = source.shape[dim]
    rows = source.numel() // max(1, length)
    kernel.results()
    with kernel.copies(source):
        if _shares_rows(rows, length):
            kernel.allocate_briefly(*_search_sizes(kernel, source, rows, length))
    is_sorted = len(options) < 3 or options[2]
    if is_sorted and most > MOST_SORTED_IN_PLACE:
        _log_sorted_results(kernel, dim)


def _shares_rows(rows: int, length: int) -> bool:
    """Return True if several blocks of a card's threads search one row.

    The limits are those of ATen/native/cuda/TensorTopK.cu.
    """
    for most_rows, least_length in _LENGTHS_OF_SHARED_ROWS:
        if rows <= most_rows:
            return length >= least_length
    return length >= _LENGTH_OF_MANY_SHARED_ROWS


def _log_sorted_results(kernel: Kernel, dim: int) -> None:
    """Log a sort of the largest values, and the positions in the order of that sort."""
    values = kernel.first_result
    positions_bytes = 8 * values.numel()
    with kernel.blocks([positions_bytes, values.nbytes]):
        _log_sort(kernel, values, dim)
        kernel.allocate_briefly(positions_bytes)


def _search_sizes(kernel: Kernel, source: Any, rows: int, length: int) -> list[int]:
    """Return the bytes of the state of each row, and of the counts of each block and digit."""
    values = divided_up(rows * length, kernel.card.processors * _THREADS_OF_SEARCH)
    values_of_thread = max(4, min(values, 64))
    blocks = rows * divided_up(length, 256 * values_of_thread)
    of_rows = [source.itemsize * rows, 8 * rows, 8 * rows]
    of_digits = [512 * blocks, 1024 * rows]
    return [*of_rows, *of_digits, 4 * blocks, 4 * blocks]

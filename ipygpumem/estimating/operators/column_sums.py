"""Partial sums of a reduction in which several blocks of a card's kernel share one result.

This is so for the sums of columns, such as a bias's gradient. The number of blocks follows
ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ipygpumem.units import divided_up

_MOST_THREADS_OF_BLOCK = 512
_THREADS_OF_WARP = 32
_THREADS_OF_PROCESSOR = 2048
_LEAST_VALUES_OF_THREAD = 16
_MOST_VALUES_OF_THREAD = 256
"""Minimum and maximum number of values that a thread adds up if several blocks share one sum."""


def column_sums_bytes(
    tensor: Any, dims: Iterable[int | None], itemsize: int, processors: int
) -> int:
    """Return the bytes of the partial sums of a reduction; 0 if one block computes each sum.

    Args:
        tensor: the tensor to reduce, such as ``x`` in ``x.sum(0)``.
        dims: the dimensions to reduce.
        itemsize: bytes of a partial sum.
        processors: the card's multiprocessors.
    """
    if tensor.dim() == 0:
        return 0
    reduced_dims = {dim % tensor.dim() for dim in dims if dim is not None}
    dims_by_stride = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    dims_by_stride.sort(key=tensor.stride)
    if not reduced_dims or not dims_by_stride:
        return 0
    innermost = dims_by_stride[0]
    # If neighbouring values are summed, as in ``x.sum(1)``, one block computes each sum.
    if innermost in reduced_dims or tensor.stride(innermost) == 0:
        return 0
    sums = values_of_sum = 1
    for dim in dims_by_stride:
        if dim in reduced_dims:
            values_of_sum *= tensor.shape[dim]
        else:
            sums *= tensor.shape[dim]
    vector = _values_read_at_once(tensor, dims_by_stride)
    columns = sums // vector
    block = _ThreadBlock.of(columns, values_of_sum, _MOST_THREADS_OF_BLOCK // vector)
    blocks_of_sum = _blocks_of_sum(columns, values_of_sum, block, processors)
    if blocks_of_sum <= 1:
        return 0
    return int(itemsize * sums * blocks_of_sum * block.width * vector)


def _values_read_at_once(tensor: Any, dims_by_stride: Sequence[int]) -> int:
    """Return the number of neighbouring values that a thread reads at once: 1, 2 or 4.

    ``dims_by_stride``: the dimensions with more than one position, the innermost first.
    """
    innermost, *outer = dims_by_stride
    if tensor.stride(innermost) != 1:
        return 1
    vector = math.gcd(4, tensor.shape[innermost])
    for dim in outer:
        vector = math.gcd(vector, tensor.stride(dim))
    return vector


class _ThreadBlock(NamedTuple):
    """The shape of a block of threads."""

    width: int
    """The number of columns that it adds up."""
    height: int
    """The number of threads that share a column."""

    @classmethod
    def of(cls, columns: int, values_of_sum: int, threads: int) -> _ThreadBlock:
        """Return the shape that torch chooses for a block of at most so many threads.

        It is at first as wide as a warp, then as high as there are values, and at last as wide as
        the remaining threads allow.
        """
        most_wide = _power_of_2(columns, threads)
        most_high = _power_of_2(values_of_sum, threads)
        width = min(most_wide, _THREADS_OF_WARP)
        height = min(most_high, threads // width)
        width = min(most_wide, threads // height)
        return cls(width, height)


def _power_of_2(size: int, most: int) -> int:
    """Return the largest power of 2 that is not above ``size``; ``most`` if that is smaller."""
    if size >= most:
        return most
    exponent = max(0, size.bit_length() - 1)
    return 1 << exponent


def _blocks_of_sum(columns: int, values_of_sum: int, block: _ThreadBlock, processors: int) -> int:
    """Return the number of blocks that share one sum.

    There are several if a thread would have many values, and the card could run more blocks than
    there are columns for.
    """
    least_values = min(block.height * _LEAST_VALUES_OF_THREAD, _MOST_VALUES_OF_THREAD)
    values_of_thread = divided_up(values_of_sum, block.height)
    if values_of_sum < least_values or values_of_thread < _MOST_VALUES_OF_THREAD:
        return 1
    blocks_of_columns = divided_up(columns, block.width)
    blocks_of_processor = _THREADS_OF_PROCESSOR // (block.width * block.height)
    blocks_of_card = processors * blocks_of_processor
    if blocks_of_columns > blocks_of_card:
        return 1
    wanted = divided_up(blocks_of_card, blocks_of_columns)
    most = divided_up(values_of_thread, _LEAST_VALUES_OF_THREAD)
    least = divided_up(values_of_thread, _MOST_VALUES_OF_THREAD)
    return max(least, min(wanted, most))

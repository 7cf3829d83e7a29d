"""Partial sums of a reduction in which several blocks of a card's kernel share one result.

This is so for the sums of columns, such as a bias's gradient. The number of blocks follows
ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ipygpumem.units import divided_up

_THREADS = 512
"""Maximum number of threads of a block."""
_WARP = 32
_THREADS_OF_PROCESSOR = 2048
_LEAST_VALUES = 16
_MOST_VALUES = 256
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
    width, height = _threads_of_block(columns, values_of_sum, _THREADS // vector)
    blocks = _blocks_of_sum(columns, values_of_sum, width, height, processors)
    if blocks <= 1:
        return 0
    return int(itemsize * sums * blocks * width * vector)


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


def _threads_of_block(columns: int, values_of_sum: int, threads: int) -> tuple[int, int]:
    """Return the width and the height of a block of threads: the number of sums that it adds up,
    and the number of threads that share a sum.
    """
    most_wide = _power_of_2(columns, threads)
    most_high = _power_of_2(values_of_sum, threads)
    width = min(most_wide, _WARP)
    height = min(most_high, threads // width)
    width = min(most_wide, threads // height)
    return width, height


def _power_of_2(size: int, most: int) -> int:
    """Return the largest power of 2 that is not above ``size``, and at most ``most``."""
    if size >= most:
        return most
    exponent = max(0, size.bit_length() - 1)
    return 1 << exponent


def _blocks_of_sum(
    columns: int, values_of_sum: int, width: int, height: int, processors: int
) -> int:
    """Return the number of blocks of ``width`` times ``height`` threads that share one sum."""
    least_values = min(height * _LEAST_VALUES, _MOST_VALUES)
    values_of_thread = divided_up(values_of_sum, height)
    if values_of_sum < least_values or values_of_thread < _MOST_VALUES:
        return 1
    blocks = divided_up(columns, width)
    blocks_of_processor = _THREADS_OF_PROCESSOR // (width * height)
    most_blocks = processors * blocks_of_processor
    if blocks > most_blocks:
        return 1
    shares_of_blocks = divided_up(most_blocks, blocks)
    most_shares = divided_up(values_of_thread, _LEAST_VALUES)
    least_shares = divided_up(values_of_thread, _MOST_VALUES)
    return max(least_shares, min(shares_of_blocks, most_shares))

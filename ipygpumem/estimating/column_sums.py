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
    given: Any, dims: Iterable[int | None], itemsize: int, processors: int
) -> int:
    """Return the bytes of the partial sums; 0 if each sum is that of one block.

    Args:
        given: the tensor to reduce.
        dims: the dimensions to reduce.
        itemsize: bytes of a partial sum.
        processors: the card's multiprocessors.
    """
    if given.dim() == 0:
        return 0
    reduced = {dim % given.dim() for dim in dims if dim is not None}
    by_stride = [dim for dim, size in enumerate(given.shape) if size > 1]
    by_stride.sort(key=given.stride)
    if not reduced or not by_stride:
        return 0
    innermost = by_stride[0]
    if innermost in reduced or given.stride(innermost) == 0:
        return 0
    outputs = inputs = 1
    for dim in by_stride:
        if dim in reduced:
            inputs *= given.shape[dim]
        else:
            outputs *= given.shape[dim]
    vector = _vector(given, by_stride)
    columns = outputs // vector
    width, height = _threads_of_block(columns, inputs, _THREADS // vector)
    shares = _blocks_of_sum(columns, inputs, width, height, processors)
    if shares <= 1:
        return 0
    return int(itemsize * outputs * shares * width * vector)


def _vector(given: Any, by_stride: Sequence[int]) -> int:
    """Return the number of neighbouring values that a thread reads at once: 1, 2 or 4.

    ``by_stride``: the dimensions with more than one position, the innermost first.
    """
    innermost, *outer = by_stride
    if given.stride(innermost) != 1:
        return 1
    vector = math.gcd(4, given.shape[innermost])
    for dim in outer:
        vector = math.gcd(vector, given.stride(dim))
    return vector


def _threads_of_block(columns: int, inputs: int, threads: int) -> tuple[int, int]:
    """Return the threads of a block that add up different sums, and those that share a sum."""
    most_wide = _power_of_2(columns, threads)
    most_high = _power_of_2(inputs, threads)
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


def _blocks_of_sum(columns: int, inputs: int, width: int, height: int, processors: int) -> int:
    """Return the number of blocks that share one sum."""
    least_inputs = min(height * _LEAST_VALUES, _MOST_VALUES)
    values_of_thread = divided_up(inputs, height)
    if inputs < least_inputs or values_of_thread < _MOST_VALUES:
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

"""Partial sums of a reduction in which several blocks of a card's kernel share one result.

This is so for the sums of columns, such as a bias's gradient. The number of blocks follows
ATen/native/cuda/Reduce.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

_THREADS, _WARP, _THREADS_OF_PROCESSOR = 512, 32, 2048
_LEAST_VALUES, _MOST_VALUES = 16, 256
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
    reduced = set[int]()
    if given.dim():
        reduced = {dim % given.dim() for dim in dims if dim is not None}
    moving = [dim for dim in range(given.dim()) if given.shape[dim] > 1]
    moving.sort(key=given.stride)
    # Only if the innermost dimension is not reduced.
    if not reduced or not moving or moving[0] in reduced or given.stride(moving[0]) == 0:
        return 0
    outputs = math.prod(given.shape[dim] for dim in moving if dim not in reduced)
    inputs = math.prod(given.shape[dim] for dim in moving if dim in reduced)
    vector = _vector(given, moving)
    width, height = _block(outputs // vector, inputs, _THREADS // vector)
    shares = _blocks_of_sum(outputs // vector, inputs, width, height, processors)
    if shares <= 1:
        return 0
    return int(itemsize * outputs * shares * width * vector)


def _vector(given: Any, moving: Sequence[int]) -> int:
    """Return the number of neighbouring values that a thread reads at once: 1, 2 or 4."""
    innermost = moving[0]
    vector = 4 if given.stride(innermost) == 1 else 1
    vector = math.gcd(vector, given.shape[innermost])
    for dim in moving[1:]:
        vector = math.gcd(vector, given.stride(dim))
    return vector


def _block(columns: int, inputs: int, threads: int) -> tuple[int, int]:
    """Return the threads of a block that add up different sums, and those that share a sum."""
    width = min(_power_of_2(columns, threads), _WARP)
    height = min(_power_of_2(inputs, threads), threads // width)
    width = min(_power_of_2(columns, threads), threads // height)
    return width, height


def _power_of_2(size: int, most: int) -> int:
    """Return the largest power of 2 that is not above ``size``, and at most ``most``."""
    return most if size >= most else 1 << max(0, size.bit_length() - 1)


def _blocks_of_sum(columns: int, inputs: int, width: int, height: int, processors: int) -> int:
    """Return the number of blocks that share one sum."""
    values_of_thread = _divided_up(inputs, height)
    if inputs < min(height * _LEAST_VALUES, _MOST_VALUES) or values_of_thread < _MOST_VALUES:
        return 1
    blocks = _divided_up(columns, width)
    most_blocks = processors * (_THREADS_OF_PROCESSOR // (width * height))
    if blocks > most_blocks:
        return 1
    shares = min(_divided_up(most_blocks, blocks), _divided_up(values_of_thread, _LEAST_VALUES))
    return max(shares, _divided_up(values_of_thread, _MOST_VALUES))


def _divided_up(size: int, divisor: int) -> int:
    return -(-size // divisor)

"""The orders of attention."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.operators.transients import (
    copies_by_heads,
)
from ipygpumem.units import divided_up, rounded_up


@order_of("_scaled_dot_product_efficient_attention")
def _efficient_attention(kernel: Kernel, args: Any) -> None:
    """Log the results of attention, and a buffer for heads of 16 bits wider than 128.

    Their sums are computed in float32, in that buffer.
    """
    kernel.skip_results(
        indices=(2, 3)
    )  # the random state of dropout, which is in RAM outside CUDA graphs
    kernel.log_results()
    query, _, value = args[:3]
    batch, heads, length, width = query.shape
    width_of_value = value.shape[-1]
    is_half = query.itemsize == 2
    if is_half and max(width, width_of_value) > 128:
        sums_bytes = batch * heads * length * width_of_value * 4
        kernel.allocate_briefly(sums_bytes)


@order_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradients, a sum for each row of the gradient times the output, and a buffer.

    The kernels of 16 bits multiply these rows themselves. For float32, torch computes the products
    of all elements first, and adds them up.
    """
    gradient, query = args[:2]
    batch, heads, length, _ = query.shape
    sums_bytes = batch * heads * length * 4
    kernel.log_results()
    with ExitStack() as stack:
        stack.enter_context(kernel.blocks(copies_by_heads(gradient)))
        sums = kernel.blocks([sums_bytes])
        if query.itemsize == 2:
            stack.enter_context(sums)
        else:
            with kernel.blocks([gradient.nbytes, sums_bytes]):
                stack.enter_context(sums)  # the sums outlive the products
        kernel.allocate_briefly(_buffer_bytes(args))


def _buffer_bytes(args: Any) -> int:
    """Return the bytes of the buffer in which the backward pass adds up gradients in float32.

    For each head it has the sums of the query's gradient, and 16 bytes for each tile of them. The
    kernel that torch chooses, and so the size of a tile, depends on the widest head.
    """
    _, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    all_heads = batch * heads
    width_of_value = value.shape[-1]
    widest = max(width, width_of_value)
    is_half = query.itemsize == 2
    sums = _sums_of_query(length, width, widest)
    if widest > 128 and is_half:
        # Such heads do not fit into registers: the sums for keys and values are in the buffer, too.
        sums += _sums_of_keys(key.shape[-2], width, width_of_value, all_heads)
    tiles = _tiles_of_query(length, width, widest, is_half=is_half)
    return int(all_heads * (sums * 4 + tiles * 16))


def _sums_of_query(length: int, width: int, widest: int) -> int:
    """Return the number of sums for the gradient of one head's query, in whole tiles."""
    tile_columns = 64
    if 64 < widest <= 128:
        tile_columns = 128
    return rounded_up(length, 64) * rounded_up(width, tile_columns)


def _sums_of_keys(keys: int, width: int, width_of_value: int, all_heads: int) -> int:
    """Return the number of sums for the gradients of one head's keys and values.

    The kernel splits the keys into parts: the more heads there are, the fewer parts.
    """
    parts_of_keys = divided_up(keys, 64)
    parts = max(1, min(parts_of_keys, 200 // all_heads))
    widths = rounded_up(width, 128) + rounded_up(width_of_value, 128)
    return parts * 64 * widths


def _tiles_of_query(length: int, width: int, widest: int, *, is_half: bool) -> int:
    """Return the number of tiles into which a kernel divides the gradient of one head's query."""
    tile_rows = 128
    if widest <= 64:
        tile_rows = 64
    tile_columns = 64
    if is_half and 64 < widest <= 128:
        tile_columns = 128
    return divided_up(length, tile_rows) * divided_up(width, tile_columns)

"""The orders of attention."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ipygpumem.estimating.kernels.kernel import Kernel, order_of
from ipygpumem.estimating.transients import (
    copies_by_heads,
)
from ipygpumem.units import divided_up, rounded_up


@order_of("_scaled_dot_product_efficient_attention")
def _efficient_attention(kernel: Kernel, args: Any) -> None:
    """Log attention; outside of graphs, the state of its random numbers is in RAM.

    Wide heads of 16 bits are summed up in float32.
    """
    kernel.on_host(2, 3)
    kernel.results()
    query, _, value = args[:3]
    batch, heads, length, width = query.shape
    width_of_value = value.shape[-1]
    is_half = query.itemsize == 2
    if is_half and max(width, width_of_value) > 128:
        sums_bytes = batch * heads * length * width_of_value * 4
        kernel.allocate_briefly(sums_bytes)


@order_of("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradients, then the sums of the gradient's products with the output, then a buffer.

    Only the kernels of 16 bits compute these products themselves.
    """
    gradient, query = args[:2]
    batch, heads, length, _ = query.shape
    sums_bytes = batch * heads * length * 4
    kernel.results()
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
    """Return the bytes of float32 sums for tiles of the query's gradient, with 16 bytes each."""
    _, query, key, value = args[:4]
    batch, heads, length, width = query.shape
    rows = batch * heads
    width_of_value = value.shape[-1]
    widest = max(width, width_of_value)
    is_half = query.itemsize == 2
    is_middle = 64 < widest <= 128
    sums_columns = 64
    if is_middle:
        sums_columns = 128
    sums = rounded_up(length, 64) * rounded_up(width, sums_columns)
    if widest > 128 and is_half:
        parts_of_keys = divided_up(key.shape[-2], 64)
        parts = max(1, min(parts_of_keys, 200 // rows))
        widths = rounded_up(width, 128) + rounded_up(width_of_value, 128)
        sums += parts * 64 * widths
    tile_rows = 128
    if widest <= 64:
        tile_rows = 64
    tile_columns = 64
    if is_half and is_middle:
        tile_columns = 128
    tiles = divided_up(length, tile_rows) * divided_up(width, tile_columns)
    return int(rows * (sums * 4 + tiles * 16))

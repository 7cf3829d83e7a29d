"""Knows what kernels of recurrent layers return and keep, where fake tensors do not."""

from __future__ import annotations

from typing import Any

import torch

_PAGE_BYTES, _LINE_BYTES = 4096, 64


def lstm_workspace(source: Any, *weights: Any) -> int:
    """Return what oneDNN keeps of a recurrent layer for backward, which no fake tensor tells.

    Gates and outputs of every step, and states and their gradients, those of inputs padded, each from a new page on:
    seen to be exact with oneDNN of torch 2.13.
    """
    gates, wide = weights[1].shape
    steps, batch, given = source.shape
    size = source.element_size()
    padded = 2 * (steps + 1) * batch * _row(max(given, wide), size)
    plain = 2 * (steps + 1) * batch * wide
    spaces = (steps * batch * _row(gates, size), steps * batch * _row(wide, size), *[padded] * 3, *[plain] * 2)
    return sum(-(-space * size // _PAGE_BYTES) * _PAGE_BYTES for space in spaces)


def _row(wide: int, size: int) -> int:
    """Return the length of a row as oneDNN lays it out: whole lines of the cache, and none of a multiple of 256."""
    line = _LINE_BYTES // size
    row = -(-wide // line) * line
    return row + line if row % 256 == 0 else row


def _gru_cell(gates: Any, _: Any, state: Any, *biases: Any) -> tuple[Any, Any]:
    return torch.empty_like(state), state.new_empty(len(state), 5 * state.shape[1])


def _gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:  # torch's own
    count, wide = gradient.shape
    gates = [gradient.new_empty(count, 3 * wide) for _ in range(2)]
    biases = [gradient.new_empty(3 * wide) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(gradient), *biases)


UNTOLD = {
    torch.ops.aten._thnn_fused_gru_cell.default: _gru_cell,
    torch.ops.aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""What stands in for operations of which torch does not tell what they give: a GRU's cell on a card without cuDNN."""

"""Replaces functions whose CUDA kernels differ from the CPU's: calls these by name, or allocates as
they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

_ATEN = torch.ops.aten
_MOST_OF_FLASH = 256
"""Maximum width of a head in flash attention."""


def attention(
    attend: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention from the kernel that torch chooses on CUDA.

    ``attend`` computes it from matrix products. The choice follows
    ATen/native/transformers/cuda/sdp_utils.cpp, without cuDNN.
    """
    items = (query, key, value)
    if _takes_flash(items, attn_mask, is_causal=is_causal, is_grouped_allowed=enable_gqa):
        return _flash_attention(items, dropout_p, is_causal=is_causal, scale=scale)
    if _takes_efficient(items):
        mask = None if attn_mask is None else _mask_of_efficient(attn_mask, query, key)
        keeps_sums = torch.is_grad_enabled() and any(item.requires_grad for item in items)
        return _ATEN._scaled_dot_product_efficient_attention(
            *items, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
    return attend(*items, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _is_fusible(items: Sequence[Any]) -> bool:
    """Return True if fused kernels can read query, key and value."""
    query, *_ = items
    return query.dim() == 4 and all(item.stride(-1) == 1 for item in items)


def _is_grouped(items: Sequence[Any]) -> bool:
    """Return True if several heads of the query share a key and a value."""
    query, key, value = items
    return not query.shape[:2] == key.shape[:2] == value.shape[:2]


def _takes_flash(
    items: Sequence[Any], mask: Any, *, is_causal: bool, is_grouped_allowed: bool
) -> bool:
    """Return True if torch chooses flash attention."""
    query, key, _ = items
    widths = {item.shape[-1] for item in items}
    is_square = query.shape[-2] == key.shape[-2]
    return (
        _is_fusible(items)
        and torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and query.itemsize == 2
        and len(widths) == 1
        and max(widths) <= _MOST_OF_FLASH
        and (is_grouped_allowed or not _is_grouped(items))
        and (is_square or not is_causal)
    )


def _flash_attention(
    items: Sequence[Any], dropout_p: float, *, is_causal: bool, scale: float | None
) -> Any:
    """Return flash attention; heads are padded to a width that is a multiple of 8."""
    width = items[0].shape[-1]
    if width % 8:
        items = [functional.pad(item, (0, -width % 8)) for item in items]
    attended = _ATEN._scaled_dot_product_flash_attention(
        *items, dropout_p, is_causal, False, scale=scale or width**-0.5
    )[0]
    return attended[..., :width]


def _takes_efficient(items: Sequence[Any]) -> bool:
    """Return True if torch chooses memory-efficient attention, after it has refused flash."""
    itemsize = items[0].itemsize
    is_aligned = all(item.shape[-1] * itemsize % 16 == 0 for item in items)
    is_allowed = torch.backends.cuda.mem_efficient_sdp_enabled()
    return _is_fusible(items) and not _is_grouped(items) and is_aligned and is_allowed


def _mask_of_efficient(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as memory-efficient attention reads it: numbers, with aligned rows."""
    keys = key.shape[-2]
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, query.new_full((), -torch.inf))
    if any(stride % 8 for stride in mask.stride()[:-1]):
        mask = functional.pad(mask, (0, -keys % 8))[..., :keys]
    return mask.expand(*query.shape[:2], query.shape[-2], keys)


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    width: int,
    heads: int,
    weight: Any,
    bias: Any,
    out_weight: Any,
    out_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Imitate ``torch._native_multi_head_attention``, with the allocations of its CUDA kernels."""
    batch, length, of_head = query.shape[0], query.shape[1], width // heads
    if query is key is value and mask is None and not need_weights and of_head % 8 == 0:
        parts = functional.linear(query, weight, bias).chunk(3, -1)
        items = [part.view(batch, -1, heads, of_head).transpose(1, 2) for part in parts]
        joined = (
            functional.scaled_dot_product_attention(*items)
            .transpose(1, 2)
            .reshape(batch, -1, width)
        )
        return functional.linear(joined, out_weight, out_bias), None
    projected = functional.linear(query, weight)
    packed = query.new_empty((3, batch * heads, length, of_head))
    del projected
    weights = torch.bmm(packed[0], packed[1].transpose(1, 2))
    if mask is not None:  # else softmax is in place
        copied = torch.empty(
            weights.shape if mask_type == 0 else (0,), dtype=torch.bool, device=weights.device
        )
        weights = weights.softmax(-1)
        del copied
    result = functional.linear(torch.empty_like(query), out_weight, out_bias)
    if not need_weights:
        return result, None
    weights = weights.view(batch, heads, length, -1)
    return result, weights.mean(1) if average else weights


def encoder_layer(
    source: Any,
    width: int,
    heads: int,
    weight: Any,
    bias: Any,
    out_weight: Any,
    out_bias: Any,
    gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> Any:
    """Imitate ``torch._transformer_encoder_layer_fwd``, which runs nn.TransformerEncoderLayer
    without gradients.
    """
    norms, (grow, grown, shrink, shrunk) = (rest[:2], rest[2:4]), rest[4:8]
    mask, mask_type = (*rest[8:], None, None)[:2]

    def normed(tensor: Any, number: int) -> Any:
        return functional.layer_norm(tensor, (width,), norms[number][0], norms[number][1], eps)

    given = normed(source, 0) if norm_first else source
    last = multi_head_attention(
        given,
        given,
        given,
        width,
        heads,
        weight,
        bias,
        out_weight,
        out_bias,
        mask,
        False,
        True,
        mask_type,
    )[0].add_(source)
    del given  # the kernel frees it before the second norm
    last = last if norm_first else normed(last, 0)
    given = normed(last, 1) if norm_first else last
    rows = given.view(-1, width)
    result = torch.addmm(
        shrunk, torch._addmm_activation(grown, rows, grow.t(), use_gelu=gelu), shrink.t()
    )
    result = result.view(source.shape).add_(last)
    return result if norm_first else normed(result, 1)


def lstm_cell(source: Any, state: Any, *weights: Any) -> Any:
    """Return the next state of an LSTM, from CUDA's fused kernel."""
    # cast at each step
    gates = (
        torch.matmul(source, weights[0].t()),
        torch.matmul(state[0], weights[1].t()),
    )
    biases = weights[2:4] if len(weights) > 3 else (None, None)
    hidden, cell, _ = _ATEN._thnn_fused_lstm_cell(*gates, state[1], *biases)
    return torch.matmul(hidden, weights[-1].t()) if len(weights) % 2 else hidden, cell


def gru_cell(source: Any, state: Any, *weights: Any) -> Any:
    """Return the next state of a GRU, from CUDA's fused kernel."""
    gates = torch.matmul(source, weights[0].t()), torch.matmul(state, weights[1].t())
    biases = weights[2:] or (None, None)
    return _ATEN._thnn_fused_gru_cell(*gates, state, *biases)[0]

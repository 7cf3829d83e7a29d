"""Replaces functions whose CUDA kernels differ from the CPU's: calls these by name, or allocates as
they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

_ATEN = torch.ops.aten
_LINEAR: Any = torch._C._nn.linear
"""torch's own ``functional.linear``, which an estimate replaces.

Autocast converts the weights of a recurrent cell once for several steps, and so it does for this.
"""
_MOST_WIDTH_OF_FLASH = 256
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
    """Return scaled dot product attention from the kernel that torch chooses on CUDA.

    These are flash attention, memory-efficient attention, or ``attend``, which computes it from
    products of matrices. The choice follows ATen/native/transformers/cuda/sdp_utils.cpp, without
    cuDNN. The arguments after ``attend`` have torch's names.
    """
    query_key_value = (query, key, value)
    if _takes_flash(query_key_value, attn_mask, is_causal=is_causal, is_grouped_allowed=enable_gqa):
        return _flash_attention(query_key_value, dropout_p, is_causal=is_causal, scale=scale)
    if _takes_efficient(query_key_value):
        mask = None
        if attn_mask is not None:
            mask = _mask_for_efficient(attn_mask, query, key)
        return _efficient_attention(
            query_key_value, mask, dropout_p, is_causal=is_causal, scale=scale
        )
    return attend(
        *query_key_value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _efficient_attention(
    query_key_value: Sequence[Any],
    mask: Any,
    dropout_p: float,
    *,
    is_causal: bool,
    scale: float | None,
) -> Any:
    """Return memory-efficient attention, which keeps sums for the backward pass if there is one."""
    attend = _ATEN._scaled_dot_product_efficient_attention
    keeps_sums = torch.is_grad_enabled() and any(item.requires_grad for item in query_key_value)
    attended, *_ = attend(*query_key_value, mask, keeps_sums, dropout_p, is_causal, scale=scale)
    return attended


def _is_fusible(query_key_value: Sequence[Any]) -> bool:
    """Return True if fused kernels can read query, key and value."""
    query, *_ = query_key_value
    if query.dim() != 4:
        return False
    return all(item.stride(-1) == 1 for item in query_key_value)


def _is_grouped(query_key_value: Sequence[Any]) -> bool:
    """Return True if several heads of the query share a key and a value.

    The three tensors have the shape (batch, heads, length, width).
    """
    batches_and_heads = {tuple(item.shape[:2]) for item in query_key_value}
    return len(batches_and_heads) > 1


def _takes_flash(
    query_key_value: Sequence[Any], mask: Any, *, is_causal: bool, is_grouped_allowed: bool
) -> bool:
    """Return True if torch chooses flash attention.

    ``is_grouped_allowed``: heads of the query may share a key (``enable_gqa=True``).
    """
    query, key, _ = query_key_value
    is_enabled = torch.backends.cuda.flash_sdp_enabled()
    if not is_enabled or not _is_fusible(query_key_value):
        return False
    if mask is not None or query.itemsize != 2:
        return False
    widths = {item.shape[-1] for item in query_key_value}
    if len(widths) > 1 or max(widths) > _MOST_WIDTH_OF_FLASH:
        return False
    if _is_grouped(query_key_value) and not is_grouped_allowed:
        return False
    if not is_causal:
        return True
    # A causal mask that is not square is aligned at another corner than flash attention's.
    is_square = query.shape[-2] == key.shape[-2]
    return bool(is_square)


def _flash_attention(
    query_key_value: Sequence[Any], dropout_p: float, *, is_causal: bool, scale: float | None
) -> Any:
    """Return flash attention; heads are padded to a width that is a multiple of 8."""
    attend = _ATEN._scaled_dot_product_flash_attention
    width = query_key_value[0].shape[-1]
    scale = scale or width**-0.5  # of the heads before they are padded
    if width % 8:
        padding = (0, -width % 8)
        query_key_value = [functional.pad(item, padding) for item in query_key_value]
    returns_mask = False
    attended, *_ = attend(*query_key_value, dropout_p, is_causal, returns_mask, scale=scale)
    return attended[..., :width]


def _takes_efficient(query_key_value: Sequence[Any]) -> bool:
    """Return True if torch chooses memory-efficient attention, after it has refused flash."""
    is_enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    if not is_enabled or not _is_fusible(query_key_value):
        return False
    if _is_grouped(query_key_value):
        return False
    itemsize = query_key_value[0].itemsize
    rows_bytes = [item.shape[-1] * itemsize for item in query_key_value]
    return all(row_bytes % 16 == 0 for row_bytes in rows_bytes)


def _mask_for_efficient(mask: Any, query: Any, key: Any) -> Any:
    """Return a mask as memory-efficient attention reads it.

    It has a number for each query and key: 0 or minus infinity for a truth value. Rows begin at
    multiples of 8 numbers.
    """
    batch, heads, length = query.shape[:3]
    keys = key.shape[-2]
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, query.new_full((), -torch.inf))
    *strides_of_rows, _ = mask.stride()
    if any(stride % 8 for stride in strides_of_rows):
        padding = (0, -keys % 8)
        mask = functional.pad(mask, padding)[..., :keys]
    return mask.expand(batch, heads, length, keys)


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
    """Imitate ``torch._native_multi_head_attention``, with the allocations of its CUDA kernels.

    The arguments are those of the operator, in its order.
    """
    is_self_attention = query is key is value
    has_aligned_heads = width // heads % 8 == 0
    takes_fused = is_self_attention and has_aligned_heads and mask is None and not need_weights
    if takes_fused:
        joined = _attended_by_heads(query, heads, weight, bias)
        return functional.linear(joined, out_weight, out_bias), None
    packed = _packed_heads(query, heads, weight)  # the kernel keeps it until it returns
    weights = _attention_weights(packed, mask, mask_type)
    result = functional.linear(torch.empty_like(query), out_weight, out_bias)
    if not need_weights:
        return result, None
    batch, length = query.shape[:2]
    weights = weights.view(batch, heads, length, -1)
    if average:
        weights = weights.mean(1)
    return result, weights


def _attended_by_heads(query: Any, heads: int, weight: Any, bias: Any) -> Any:
    """Return the attention of sequences to themselves, of shape (batch, length, width).

    In a row, the results of the heads are next to each other.
    """
    batch, _, width = query.shape
    parts = functional.linear(query, weight, bias).chunk(3, -1)
    query_key_value = []
    for part in parts:
        by_head = part.view(batch, -1, heads, width // heads)
        query_key_value.append(by_head.transpose(1, 2))
    attended = functional.scaled_dot_product_attention(*query_key_value)
    return attended.transpose(1, 2).reshape(batch, -1, width)


def _packed_heads(query: Any, heads: int, weight: Any) -> Any:
    """Return queries, keys and values of all heads, of shape (3, batch * heads, length, width)."""
    batch, length, width = query.shape
    projected = functional.linear(query, weight)
    packed = query.new_empty((3, batch * heads, length, width // heads))
    del projected  # alive until here: the kernel frees it after it has filled ``packed``
    return packed


def _attention_weights(packed: Any, mask: Any, mask_type: int | None) -> Any:
    """Return the weights of attention, of shape (batch * heads, length, length)."""
    queries = packed[0]
    keys = packed[1]
    weights = torch.bmm(queries, keys.transpose(1, 2))
    if mask is None:  # softmax is in place
        return weights
    mask_shape = (0,)
    if mask_type == 0:  # a mask of queries and keys, which is copied for each head
        mask_shape = weights.shape
    copied_mask = torch.empty(mask_shape, dtype=torch.bool, device=weights.device)
    weights = weights.softmax(-1)
    del copied_mask
    return weights


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

    The arguments are those of the operator, in its order; ``rest`` has the weights and biases of
    the norms and of the two linear layers, then the mask.
    """
    first_weight, first_bias, second_weight, second_bias = rest[:4]
    linear_parameters = rest[4:8]
    mask, mask_type = (*rest[8:], None, None)[:2]
    projections = (weight, bias, out_weight, out_bias)

    def first_norm(tensor: Any) -> Any:
        return functional.layer_norm(tensor, (width,), first_weight, first_bias, eps)

    def second_norm(tensor: Any) -> Any:
        return functional.layer_norm(tensor, (width,), second_weight, second_bias, eps)

    def attend_to_itself(tensor: Any) -> Any:
        query_key_value = (tensor, tensor, tensor)
        result, _ = multi_head_attention(
            *query_key_value,
            width,
            heads,
            *projections,
            mask,
            need_weights=False,
            average=True,
            mask_type=mask_type,
        )
        return result

    # The kernel frees the first norm's result before the second norm.
    if norm_first:
        last = attend_to_itself(first_norm(source)).add_(source)
        return _feed_forward(second_norm(last), linear_parameters, gelu=gelu).add_(last)
    last = first_norm(attend_to_itself(source).add_(source))
    return second_norm(_feed_forward(last, linear_parameters, gelu=gelu).add_(last))


def _feed_forward(source: Any, parameters: Sequence[Any], *, gelu: bool) -> Any:
    """Return the result of the two linear layers after attention.

    ``parameters``: weight and bias of both.
    """
    first_weight, first_bias, second_weight, second_bias = parameters
    rows = source.view(-1, source.shape[-1])
    hidden = torch._addmm_activation(first_bias, rows, first_weight.t(), use_gelu=gelu)
    result = torch.addmm(second_bias, hidden, second_weight.t())
    return result.view(source.shape)


def lstm_cell(source: Any, state: Any, *weights: Any) -> Any:
    """Return the next state of an LSTM, from CUDA's fused kernel.

    ``weights`` are those for the input and the hidden state, then their biases if there are any,
    and at last the weight of a projection if the cell has one.
    """
    hidden, cell = state
    gates = (_LINEAR(source, weights[0]), _LINEAR(hidden, weights[1]))
    biases = (None, None)
    if len(weights) > 3:
        biases = weights[2:4]
    # The third result, which backward needs, is freed before the gates if no node keeps it.
    hidden, cell = _ATEN._thnn_fused_lstm_cell(*gates, cell, *biases)[:2]
    has_projection = len(weights) % 2 == 1
    if has_projection:
        hidden = _LINEAR(hidden, weights[-1])
    return hidden, cell


def gru_cell(source: Any, state: Any, *weights: Any) -> Any:
    """Return the next state of a GRU, from CUDA's fused kernel; weights as in ``lstm_cell``."""
    gates = (_LINEAR(source, weights[0]), _LINEAR(state, weights[1]))
    biases = weights[2:] or (None, None)
    return _ATEN._thnn_fused_gru_cell(*gates, state, *biases)[0]

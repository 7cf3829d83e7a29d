"""Computes results that torch cannot infer for fake tensors, or infers for the CPU only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ipygpumem.estimating.operators.sparse import embedding_bag_backward
from ipygpumem.units import rounded_up

_ATEN = torch.ops.aten
_ALIGNED_BYTES = 16
"""Rows of a grouped product are multiples of this."""


def _lstm_cell(gates: Any, _: Any, state: Any, *__: Any) -> tuple[Any, Any, Any]:
    """Return an empty hidden state, cell state, and workspace that backward needs."""
    hidden = torch.empty_like(state)
    cell = torch.empty_like(state)
    return hidden, cell, torch.empty_like(gates)


def _gru_cell(gates: Any, _: Any, state: Any, *__: Any) -> tuple[Any, Any]:
    """Return an empty hidden state, and the workspace that backward needs."""
    batch, width = state.shape
    hidden = torch.empty_like(state)
    return hidden, state.new_empty(batch, 5 * width)


def _gru_cell_backward(gradient: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return empty gradients of the gates from the input and from the hidden state, of that state,
    and of the biases of both.
    """
    batch, width = gradient.shape
    gates_of_input = gradient.new_empty(batch, 3 * width)
    gates_of_hidden = gradient.new_empty(batch, 3 * width)
    bias_of_input = bias_of_hidden = None
    if has_bias:
        bias_of_input = gradient.new_empty(3 * width)
        bias_of_hidden = gradient.new_empty(3 * width)
    state = torch.empty_like(gradient)
    return gates_of_input, gates_of_hidden, state, bias_of_input, bias_of_hidden


def _ctc_loss_backward(_: Any, log_probabilities: Any, *__: Any) -> Any:
    """Return an empty gradient of the scores."""
    return torch.empty_like(log_probabilities)


def _grouped_mm(
    first: Any, second: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return the empty result of a grouped product, with the padded rows of CUDA's kernel.

    torch's own rule for fake tensors accepts bfloat16 only. The arguments have torch's names.
    """
    groups: list[int] = []
    if first.dim() == second.dim() == 2:
        groups = [len(offs)]
    elif second.dim() > 2:
        groups = list(first.shape[:-2])
    rows = first.shape[-2]
    columns = second.shape[-1]
    dtype = out_dtype or first.dtype
    row_bytes = rounded_up(columns * dtype.itemsize, _ALIGNED_BYTES)
    padded_shape = (*groups, rows, row_bytes // dtype.itemsize)
    padded = first.new_empty(padded_shape, dtype=dtype)
    return padded[..., :columns]


def _no_other_kernel(*_: Any) -> bool:
    """Return False: CTC loss has no kernel of cuDNN or MIOpen."""
    return False


def _no_result(*_: Any, **__: Any) -> None:
    """Stand for an operator that only changes its arguments."""
    return


def _operator_if_present(name: str, overload: str) -> Any:
    """Return an operator; None if this version of torch does not have it."""
    overloads = getattr(_ATEN, name, None)
    return getattr(overloads, overload, None)


STAND_INS: dict[Any, Callable[..., Any]] = {
    _operator_if_present("_grouped_mm", "default"): _grouped_mm,
    _ATEN._thnn_fused_lstm_cell.default: _lstm_cell,
    _ATEN._thnn_fused_gru_cell.default: _gru_cell,
    _ATEN._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    _ATEN._embedding_bag_backward.default: embedding_bag_backward,
    _ATEN._ctc_loss_backward.Tensor: _ctc_loss_backward,
    _operator_if_present("_use_cudnn_ctc_loss", "default"): _no_other_kernel,
    _operator_if_present("_use_cudnn_ctc_loss", "Tensor"): _no_other_kernel,
    _operator_if_present("_use_miopen_ctc_loss", "default"): _no_other_kernel,
    _operator_if_present("_use_miopen_ctc_loss", "Tensor"): _no_other_kernel,
    _operator_if_present("_fused_sgd_", "default"): _no_result,
    _operator_if_present("_fused_sgd_", "tensor_lr"): _no_result,
}
"""Functions that run instead of operators, with their arguments; of None for missing operators."""


# -- recurrent layers on the CPU -------------------------------------------------------------------

_PAGE_BYTES = 4096
_LINE_BYTES = 64
"""Bytes of a cache line."""


def with_saved_workspace(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return the result of oneDNN's recurrent layer, with the workspace that it saves for backward.

    Fake tensors have an empty one. Without training, the result stays as it is.
    """
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False))
    arguments.update(kwargs)
    if not arguments["train"]:
        return result
    output, hidden, cell, *_ = result
    size_bytes = _lstm_workspace_bytes(*args)
    workspace = torch.empty(size_bytes, dtype=torch.uint8, device=output.device)
    return output, hidden, cell, workspace


def _lstm_workspace_bytes(source: Any, *weights: Any) -> int:
    """Return the bytes that oneDNN saves for a recurrent layer's backward pass.

    It saves the gates and outputs of every step, and states with their gradients, each on its own
    pages. The result was exact with the oneDNN of torch 2.13.
    """
    gates, width = weights[1].shape
    steps, batch, input_width = source.shape
    itemsize = source.element_size()
    rows = steps * batch
    rows_of_states = 2 * (steps + 1) * batch  # also one before the first step; with gradients
    # Numbers of elements:
    padded_states = rows_of_states * _padded_row_length(max(input_width, width), itemsize)
    plain_states = rows_of_states * width
    all_gates = rows * _padded_row_length(gates, itemsize)
    all_outputs = rows * _padded_row_length(width, itemsize)
    spaces = [all_gates, all_outputs, *[padded_states] * 3, *[plain_states] * 2]
    return sum(rounded_up(space * itemsize, _PAGE_BYTES) for space in spaces)


def _padded_row_length(width: int, itemsize: int) -> int:
    """Return oneDNN's row length: whole cache lines, and one more if that is a multiple of 256."""
    line = _LINE_BYTES // itemsize
    row = rounded_up(width, line)
    if row % 256 == 0:
        row += line
    return row


def without_channels_last(result: Any) -> Any:
    """Return the results of a convolution in the usual layout: the CPU keeps channels last."""
    return tree_map_only(torch.Tensor, _in_usual_layout, result)


def _in_usual_layout(tensor: Any) -> Any:
    """Return an empty contiguous tensor of the same shape."""
    return tensor.new_empty(tensor.shape)

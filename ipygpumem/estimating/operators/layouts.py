"""Corrects the strides of results for which torch's fake tensors differ from a card's kernels.

Strides decide memory later: a convolution, for example, copies a gradient that is not contiguous.
The rules were measured with torch 2.11 on a simulated card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _prims_common as prims

_ATEN = torch.ops.aten
_CONTIGUOUS = (
    _ATEN._log_softmax_backward_data.default,
    _ATEN.glu_backward.default,
    _ATEN.huber_loss_backward.default,
    _ATEN.mse_loss_backward.default,
    _ATEN.native_layer_norm_backward.default,
    _ATEN.pixel_unshuffle.default,
    _ATEN.rrelu_with_noise.default,
    _ATEN.smooth_l1_loss_backward.default,
)
"""Operators whose first result is contiguous."""
_FIRST_ARGUMENT_FIRST = (
    _ATEN.elu_backward.default,
    _ATEN.hardsigmoid_backward.default,
    _ATEN.hardswish_backward.default,
    _ATEN.hardtanh_backward.default,
    _ATEN.softplus_backward.default,
    _ATEN.xlogy.Tensor,
)
"""Operators whose results have the strides of their first argument, then those of the second.

An expanded dimension has no stride to follow.
"""
_SECOND_ARGUMENT_FIRST = (
    _ATEN._prelu_kernel_backward.default,
    _ATEN.leaky_relu_backward.default,
)
"""Operators whose results have the strides of their second argument, then those of the first."""
_ARITHMETIC = (_ATEN.add.Tensor, _ATEN.div.Tensor, _ATEN.mul.Tensor, _ATEN.sub.Tensor)
"""Operators like ``_FIRST_ARGUMENT_FIRST`` if an argument is expanded.

Fake tensors convert numbers of 16 bits first, and thereby lose that a dimension is expanded.
"""

Strides = tuple[int, ...]


def may_differ_in_layout(func: Any) -> bool:
    """Return True if a fake result of an operator may have other strides than a card's."""
    return func in _RULES


def with_layout_of_card(func: Any, args: Any, result: Any) -> Any:
    """Return an operation's result with the strides that a card's kernel gives it."""
    rule = _RULES[func]
    if isinstance(result, torch.Tensor):
        return _with_strides(result, rule(args, result))
    first, *remaining = result
    if first is None:  # a gradient that is not needed
        return result
    strides = rule(args, first)
    if func in _SECOND_ARGUMENT_FIRST:  # all results have the same shape
        return tuple(_with_strides(tensor, strides) for tensor in result)
    return (_with_strides(first, strides), *remaining)


def _with_strides(tensor: Any, strides: Strides) -> Any:
    """Return the tensor if it has these strides; otherwise an empty one of its shape with them."""
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides)


def _contiguous(_: Any, result: Any) -> Strides:
    """Return the strides of a contiguous result."""
    return tuple(prims.make_contiguous_strides_for(result.shape))


def _rule_of_channels(*, index: int) -> Callable[[Any, Any], Strides]:
    """Return a rule: the result is in channels-last layout if the argument at ``index`` is."""

    def rule(args: Any, result: Any) -> Strides:
        layout = prims.suggest_memory_format(args[index])
        if layout is torch.contiguous_format:
            return _contiguous(args, result)
        return tuple(prims.make_channels_last_strides_for(result.shape))

    return rule


def _elementwise(args: Any, result: Any) -> Strides:
    """Return the strides that a result gets from torch's loop over elements (TensorIterator).

    They follow the first argument, and the second one in dimensions in which the first is expanded.
    """
    tensors = [value for value in args[:2] if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        return tuple(result.stride())
    operands = [tensor.expand(result.shape) for tensor in tensors]
    return tuple(prims.compute_elementwise_output_strides(*operands))


def _elementwise_input_first(args: Any, result: Any) -> Strides:
    """Return the strides of a gradient that follows the operator's input, then its gradient."""
    output_gradient, operators_input = args[:2]
    return _elementwise((operators_input, output_gradient), result)


def _elementwise_of_slopes(args: Any, result: Any) -> Strides:
    """Return the strides of a gradient of randomized ReLU, which has random slopes in training."""
    output_gradient, operators_input, slopes, _, _, is_training = args[:6]
    first = slopes if is_training else operators_input
    return _elementwise((first, output_gradient), result)


def _elementwise_if_expanded(args: Any, result: Any) -> Strides:
    """Return the strides of a result of arithmetic, such as ``x + y``.

    Those of the fake result are right, unless an argument is expanded and the result has 16 bits.
    """
    if result.itemsize != 2 or result.dim() < 2:
        return tuple(result.stride())
    for value in args:
        if isinstance(value, torch.Tensor) and 0 in value.stride():
            return _elementwise(args, result)
    return tuple(result.stride())


Rule = Callable[[Any, Any], Strides]
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CONTIGUOUS, _contiguous),
    **dict.fromkeys(_FIRST_ARGUMENT_FIRST, _elementwise),
    **dict.fromkeys(_SECOND_ARGUMENT_FIRST, _elementwise_input_first),
    **dict.fromkeys(_ARITHMETIC, _elementwise_if_expanded),
    _ATEN.native_batch_norm_backward.default: _rule_of_channels(index=1),
    _ATEN.rrelu_with_noise_backward.default: _elementwise_of_slopes,
    _ATEN.upsample_bilinear2d.default: _rule_of_channels(index=0),
}
"""Rules by operator: the strides of the first result for the arguments and that result."""
# Older versions of torch do not have this operator.
if hasattr(_ATEN, "_fused_rms_norm_backward"):
    _RULES[_ATEN._fused_rms_norm_backward.default] = _contiguous

"""The orders of losses."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of


@order_of("binary_cross_entropy_with_logits")
def _loss_of_logits(kernel: Kernel, args: Any) -> None:
    """Log the logarithms of sigmoids, then the losses of all elements if they are reduced.

    With weights of classes (``pos_weight``) a block of their products is freed before the losses.
    """
    source = args[0]
    options = list(args[2:])
    defaults = [None, None, 1]  # no weights, no weights of classes, and the mean
    options += defaults[len(options) :]
    _, weights_of_classes, reduction = options
    weights_bytes = losses_bytes = 0
    if weights_of_classes is not None:
        weights_bytes = source.nbytes
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([source.nbytes]):
        kernel.allocate_briefly(weights_bytes)
        with kernel.blocks([losses_bytes]):
            kernel.log_results()


@order_of("huber_loss")
def _huber_loss(kernel: Kernel, args: Any) -> None:
    """Log the losses of all elements, if they are reduced to a sum or a mean."""
    source, _, reduction = (*args, 1)[:3]  # 1, the mean, is the default
    losses_bytes = 0
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([losses_bytes]):
        kernel.log_results()


_MOST_WORK_OF_ONE_KERNEL = 450
"""Maximum weighted sum of frames, sequences and labels for which torch takes one kernel for all."""


@order_of("_ctc_loss_backward")
def _ctc_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log the backward variables, which are as many as the forward ones, and the gradient.

    With ``zero_infinity=True`` the gradient is computed in a block of its own, and the result is a
    copy of it in which infinite values are zero.
    """
    log_probabilities = args[1]
    forward = args[6]
    zeroes_infinity = len(args) > 8 and args[8]
    first_gradient_bytes = 0
    if zeroes_infinity:
        first_gradient_bytes = log_probabilities.nbytes
    with kernel.blocks([forward.nbytes, first_gradient_bytes]):
        if not zeroes_infinity:
            kernel.log_results()
        _log_sums_of_blanks(kernel, log_probabilities, forward)
        kernel.log_results()


def _log_sums_of_blanks(kernel: Kernel, log_probabilities: Any, forward: Any) -> None:
    """Log the sums over the blanks of each frame, unless one kernel computes the whole gradient."""
    frames, batch, labels = log_probabilities.shape
    # the weights are torch's own
    if 2 * frames + 24 * batch // 10 + 2 * labels // 10 <= _MOST_WORK_OF_ONE_KERNEL:
        return
    frames_bytes = frames * batch * log_probabilities.itemsize
    blanks = (forward.shape[2] + 1) // 2
    sums_bytes = frames_bytes * blanks
    with kernel.blocks([sums_bytes, frames_bytes]):
        kernel.allocate_briefly(frames_bytes, frames * batch)
        kernel.allocate_briefly(sums_bytes, frames_bytes)


@order_of("soft_margin_loss_backward")
def _soft_margin_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log a negation, a product and the exponential of that.

    Only the exponential is still alive when the gradient is allocated.
    """
    source = args[1]
    exponential = kernel.blocks([source.nbytes])
    with ExitStack() as stack:
        with kernel.blocks([source.nbytes, source.nbytes]):
            stack.enter_context(exponential)
        kernel.log_results()

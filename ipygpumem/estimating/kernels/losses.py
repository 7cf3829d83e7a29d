"""The orders of losses."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ipygpumem.estimating.kernels.kernel import Kernel, order_of


@order_of("binary_cross_entropy_with_logits")
def _loss_of_logits(kernel: Kernel, args: Any) -> None:
    """Log the logarithms of sigmoids, weights of classes that are freed, and the losses."""
    source = args[0]
    options = list(args[2:])
    options += [None, None, 1][len(options) :]
    _, weights_of_classes, reduction = options
    weights_bytes = losses_bytes = 0
    if weights_of_classes is not None:
        weights_bytes = source.nbytes
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([source.nbytes]):
        kernel.allocate_briefly(weights_bytes)
        with kernel.blocks([losses_bytes]):
            kernel.results()


@order_of("huber_loss")
def _huber_loss(kernel: Kernel, args: Any) -> None:
    """Log the losses of all elements, which are then reduced."""
    source, _, reduction = (*args, 1)[:3]
    losses_bytes = 0
    if reduction:
        losses_bytes = source.nbytes
    with kernel.blocks([losses_bytes]):
        kernel.results()


_FEW_FRAMES = 450
"""Maximum of frames, sequences and labels, weighted, whose gradients one kernel adds up."""


@order_of("_ctc_loss_backward")
def _ctc_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log the backward variables, the gradient, and a copy if infinite losses count as zero."""
    log_probabilities = args[1]
    forward = args[6]
    has_copy = len(args) > 8 and args[8]
    copied_bytes = 0
    if has_copy:
        copied_bytes = log_probabilities.nbytes
    with kernel.blocks([forward.nbytes, copied_bytes]):
        if not has_copy:
            kernel.results()
        _log_sums_of_blanks(kernel, log_probabilities, forward)
        kernel.results()


def _log_sums_of_blanks(kernel: Kernel, log_probabilities: Any, forward: Any) -> None:
    """Log the sums over the blanks of each frame; one kernel does without if frames are few."""
    frames, batch, labels = log_probabilities.shape
    if 2 * frames + 24 * batch // 10 + 2 * labels // 10 <= _FEW_FRAMES:
        return
    frames_bytes = frames * batch * log_probabilities.itemsize
    blanks = (forward.shape[2] + 1) // 2
    sums_bytes = frames_bytes * blanks
    with kernel.blocks([sums_bytes, frames_bytes]):
        kernel.allocate_briefly(frames_bytes, frames * batch)
        kernel.allocate_briefly(sums_bytes, frames_bytes)


@order_of("soft_margin_loss_backward")
def _soft_margin_loss_backward(kernel: Kernel, args: Any) -> None:
    """Log a negation, a product and its exponential, which alone is alive with the gradient."""
    source = args[1]
    exponential = kernel.blocks([source.nbytes])
    with ExitStack() as stack:
        with kernel.blocks([source.nbytes, source.nbytes]):
            stack.enter_context(exponential)
        kernel.results()

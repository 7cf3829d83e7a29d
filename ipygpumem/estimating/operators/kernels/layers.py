"""The orders of layers: dropout, normalisation, recurrent cells, folds and grids."""

from __future__ import annotations

import math
from typing import Any

from ipygpumem.estimating.operators.column_sums import column_sums_bytes
from ipygpumem.estimating.operators.kernels.kernel import Kernel, order_of


@order_of("native_dropout")
def _dropout(kernel: Kernel, _: Any) -> None:
    """Log the mask, then the values: the kernel makes the second result first."""
    kernel.log_result(index=1)
    kernel.log_result(index=0)


@order_of("native_layer_norm")
def _layer_norm(kernel: Kernel, args: Any) -> None:
    """Log the values, the means and the deviations; the kernel needs a contiguous argument."""
    with kernel.copies(args[0]):
        kernel.log_results()


@order_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(kernel: Kernel, args: Any) -> None:
    """Log the gradients of the input and the parameters."""
    gradient, source = args[:2]
    with kernel.copies(gradient, source):
        kernel.log_results()


@order_of("logsumexp")
def _logsumexp(kernel: Kernel, args: Any) -> None:
    """Log the maxima that are subtracted, then the exponentials and their sums.

    The maxima have a mask of infinite ones, from their absolute values.
    """
    source, dims = args[:2]
    partial_maxima = column_sums_bytes(source, dims, source.itemsize, kernel.card.processors)
    itemsize = max(4, source.itemsize)
    partial_sums = column_sums_bytes(source, dims, itemsize, kernel.card.processors)
    result_bytes = kernel.result_bytes
    with kernel.blocks([result_bytes]):
        kernel.allocate_briefly(partial_maxima)
        kernel.allocate_briefly(result_bytes, result_bytes // source.itemsize)
        with kernel.blocks([source.nbytes]):
            kernel.log_results()
            kernel.allocate_briefly(partial_sums)


@order_of("col2im", "im2col")
def _fold(kernel: Kernel, args: Any) -> None:
    """Log ``nn.Unfold``, which returns the windows of an image, and its inverse ``nn.Fold``."""
    with kernel.resized_result(args[0]):
        pass  # the copy of the argument is freed


@order_of("affine_grid_generator")
def _affine_grid(kernel: Kernel, args: Any) -> None:
    """Log the grid of all positions, then its product with the transforms.

    A point of the grid has a coordinate for each dimension, and a 1 for the translation.
    """
    transforms, size = args[:2]
    batch, _, *positions = size
    coordinates = len(positions) + 1
    grid_bytes = batch * math.prod(positions) * coordinates * transforms.itemsize
    with kernel.blocks([grid_bytes]):
        kernel.log_results()
        kernel.log_workspaces()


@order_of("_thnn_fused_gru_cell")
def _gru_cell(kernel: Kernel, _: Any) -> None:
    """Log the gates, which backward needs, then the new state."""
    kernel.log_result(index=1)
    kernel.log_result(index=0)


@order_of("_thnn_fused_lstm_cell")
def _lstm_cell(kernel: Kernel, _: Any) -> None:
    """Log the gates, which backward needs, then the hidden state and the cell state."""
    kernel.log_result(index=2)
    kernel.log_results()

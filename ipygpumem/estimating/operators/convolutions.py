"""The blocks that convolutions without cuDNN allocate, and their order."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.operators.kernels.kernel import Kernel


def takes_cudnn() -> bool:
    """Return True if convolutions use cuDNN, which is assumed if torch is built without CUDA."""
    cudnn = torch.backends.cudnn
    if not cudnn.enabled:
        return False
    return not torch.backends.cuda.is_built() or bool(cudnn.is_available())


class Gradients(NamedTuple):
    """Says which gradients a backward pass computes: frozen weights get none."""

    of_input: bool = True
    of_weight: bool = True
    of_bias: bool = True

    @property
    def multiplies(self) -> bool:
        """True if it multiplies matrices; a bias's gradient is a sum."""
        return self.of_input or self.of_weight


@dataclass(frozen=True)
class Convolution:
    """A convolution without cuDNN, or its backward pass."""

    is_backward: bool
    output: Any
    """Its result; in the backward pass, the result's gradient."""
    source: Any
    """The tensor that is convolved, of shape (samples, channels, positions ...)."""
    weight: Any
    """The kernels, of shape (channels out, channels in per group, sizes ...)."""
    stride: Any
    padding: Any
    dilation: Any
    is_transposed: bool
    """True for ``nn.ConvTranspose2d`` and its like."""
    groups: int
    """Number of groups of channels that are convolved apart."""
    has_bias: bool
    gradients: Gradients
    """The gradients that the backward pass computes."""

    @classmethod
    def of(cls, name: str, args: Any, result: Any) -> Convolution:
        """Return the convolution that an operator computes.

        Args:
            name: ``convolution`` or ``convolution_backward``.
            args: the operator's arguments.
            result: its first result.
        """
        if name == "convolution_backward":
            output, source, weight, bias_shape, *options = args[:10]
            is_backward = True
            has_bias = bias_shape is not None
            gradients = Gradients(*args[10])
        else:
            source, weight, bias, *options = args[:9]
            output = result
            is_backward = False
            has_bias = bias is not None
            gradients = Gradients()
        stride, padding, dilation, is_transposed, _, groups = options
        return cls(
            is_backward,
            output,
            source,
            weight,
            stride,
            padding,
            dilation,
            is_transposed,
            groups,
            has_bias,
            gradients,
        )

    @property
    def is_depthwise(self) -> bool:
        """True if each channel is convolved for itself, for which torch has a kernel of its own."""
        channels = self.source.shape[1]
        if self.is_transposed or channels == 1:
            return False
        return bool(self.groups == channels)

    @property
    def is_3d(self) -> bool:
        """True if it is a convolution in three dimensions."""
        return bool(self.weight.dim() == 5)

    @property
    def is_dilated(self) -> bool:
        """True if the positions of its kernel are not next to each other."""
        return any(step != 1 for step in self.dilation)

    def log(self, kernel: Kernel) -> None:
        """Log the results and the intermediate blocks in the order of torch's kernels.

        The results of the backward pass are the gradients of the input (0), the weight (1) and the
        bias (2). torch computes a convolution as a product of the weight with the unfolded input: a
        matrix with a column for each window.
        """
        if self.is_depthwise:
            self._log_depthwise(kernel)
        elif self.groups > 1:
            self._log_groups(kernel)
        elif not self.is_backward and self.is_transposed and self.is_3d:
            with kernel.resized_result(self.source):
                self._log_product(kernel)
        elif not self.is_backward:
            with kernel.copies(self.source):
                kernel.log_results()
                self._log_product(kernel)
        elif self.is_transposed:
            with kernel.copies(self.output, self.source):
                self._log_transposed_gradients(kernel)
        else:
            with kernel.copies(self.output, self.source):
                self._log_gradients(kernel)

    def _log_product(self, kernel: Kernel) -> None:
        """Log the product of matrices for one sample, from its unfolded input.

        A transposed convolution adds its bias by a product with ones.
        """
        ones_bytes = 0
        if self.is_transposed and self.has_bias and not self.is_backward:
            ones_bytes = math.prod(self.output.shape[2:]) * self.output.element_size()
        with kernel.blocks([self._unfolded_bytes(), ones_bytes]):
            kernel.log_workspaces()

    def _log_transposed_gradients(self, kernel: Kernel) -> None:
        """Log the gradients of a transposed convolution.

        Those of weight and bias are computed together, from one unfolding.
        """
        kernel.log_result(index=0)
        if self.gradients.of_input:
            self._log_product(kernel)
        kernel.log_result(index=1)
        self._log_parameters_gradients(kernel)
        kernel.log_results()

    def _log_parameters_gradients(self, kernel: Kernel) -> None:
        """Log how a transposed convolution computes the gradients of weight and bias."""
        if self.gradients.of_weight:
            self._log_product(kernel)
        elif self.gradients.of_bias:
            kernel.allocate_briefly(self._unfolded_bytes())

    def _log_gradients(self, kernel: Kernel) -> None:
        """Log the gradients; in 3D and with dilation all are allocated before the unfolding."""
        if not self.gradients.multiplies:
            kernel.log_results()
            return
        kernel.log_result(index=0)
        if self.is_3d or self.is_dilated:
            kernel.log_results()
        with kernel.blocks([self._unfolded_bytes()]):
            kernel.log_workspaces()
            kernel.log_result(index=2)
            kernel.log_result(index=1)

    def _log_depthwise(self, kernel: Kernel) -> None:
        """Log the kernels of a depthwise convolution, of which that of the weight's gradient runs
        first.
        """
        if not self.is_backward:
            with kernel.copies(self.source):
                kernel.log_results()
            return
        with kernel.copies(self.output):
            with kernel.copies(self.source):
                kernel.log_result(index=1)
            kernel.log_result(index=0)

    def _log_groups(self, kernel: Kernel) -> None:
        """Log a grouped convolution: torch convolves the groups one by one, and joins their results
        at the end.

        Each group reads a copy of its channels.
        """
        copied_bytes = []
        if len(self.source) > 1:  # a single sample's channels are contiguous
            copied_bytes = [tensor.nbytes // self.groups for tensor in self._operands()]
        with kernel.copies(self.source), ExitStack() as pieces:
            for _ in range(self.groups):
                with kernel.blocks(copied_bytes):
                    self._log_group(kernel, pieces)
            kernel.log_results()

    def _log_group(self, kernel: Kernel, pieces: ExitStack) -> None:
        """Log the convolution of one group; its results live until ``pieces`` is closed."""

        def keep(tensor: Any) -> None:
            """Log a result for this group's part of a tensor."""
            part_bytes = tensor.nbytes // self.groups
            pieces.enter_context(kernel.blocks([part_bytes]))

        if not self.is_backward:
            keep(self.output)
            self._log_product(kernel)
            return
        gradients = self.gradients
        if gradients.of_input:
            keep(self.source)
        if self.is_transposed:
            if gradients.of_input:
                self._log_product(kernel)
            if gradients.of_weight:
                keep(self.weight)
            self._log_parameters_gradients(kernel)
        elif gradients.multiplies:
            with kernel.blocks([self._unfolded_bytes()]):
                kernel.log_workspaces()
                if gradients.of_weight:
                    keep(self.weight)

    def _operands(self) -> list[Any]:
        """Return the tensors of which each group takes its channels."""
        if self.is_backward:
            return [self.output, self.source]
        return [self.source]

    def _unfolded_bytes(self) -> int:
        """Return the bytes of one unfolded sample of a group, with a row for each channel and
        position of the kernel, and a column for each window.

        0 if the convolution is a plain product of matrices.
        """
        kernel = self.weight.shape[2:]
        if self.is_transposed:
            rows = self.weight.shape[1]
            positions = self.source.shape[2:]
        elif self._is_product(kernel):
            return 0
        else:
            rows = self.source.shape[1] // self.groups
            positions = self.output.shape[2:]
        columns = math.prod((*kernel, *positions))
        return int(rows * columns * self.source.element_size())

    def _is_product(self, kernel: Any) -> bool:
        """Return True if torch computes the convolution as a plain product of matrices."""
        if self.is_backward or len(kernel) > 2:
            return False
        if any(self.padding):
            return False
        return all(size == 1 for size in (*kernel, *self.stride))

"""Computes cumulative products of fake tensors, with the backward pass of other tensors."""

from __future__ import annotations

from typing import Any

import torch


def cumprod(original: Any, input: Any, dim: int, **options: Any) -> Any:  # noqa: A002
    """Return a cumulative product.

    In the backward pass torch asks if a value is zero. Where it cannot ask, as for fake tensors, it
    runs several kernels for each value along the dimension. No value is assumed to be zero.
    """
    is_transformed = torch._C._are_functorch_transforms_active()
    if options or is_transformed or not input.requires_grad:
        return original(input, dim, **options)
    return _CumulativeProduct.apply(input, dim)


class _CumulativeProduct(torch.autograd.Function):  # type: ignore[misc]  # torch declares no type
    """Multiplies values, with the allocations of torch's own functions."""

    @staticmethod
    def forward(ctx: Any, source: Any, dim: int) -> Any:
        result = torch.ops.aten.cumprod(source, dim)
        ctx.dim = dim
        ctx.save_for_backward(source, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradient, by the steps of torch's own backward pass: each result that torch
        allocates is allocated here, too.
        """
        source, result = ctx.saved_tensors
        dim = ctx.dim
        weighted = result * gradient
        zeros = source == 0
        zeros.any()
        flipped = weighted.flip(dim)
        flipped_sums = flipped.cumsum(dim)
        sums = flipped_sums.flip(dim)
        del flipped, flipped_sums
        return sums.div(source), None

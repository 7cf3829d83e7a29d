"""Packs and pads sequences of different lengths as torch does, whose functions in C++ read the
lengths from memory that fake tensors do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch

from ipygpumem.estimating.largest import is_known


class PackedSequences:
    """Handlers of torch's functions for packed sequences.

    Args:
        bound: called if the lengths are not known; then every sequence counts as the longest.
    """

    def __init__(self, bound: Callable[[], object]) -> None:
        self._bound = bound

    def pack(self, _: Any, input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:  # noqa: A002
        """Return the steps of all sequences one after the other, and the batch of each step."""
        batch, steps = input.shape[:2] if batch_first else reversed(input.shape[:2])
        values = values_of(lengths)
        if values is None:
            self._bound()
            values = [steps] * batch
        batches = [sum(length > step for length in values) for step in range(max(values))]
        data = _Packed.apply(input, batches, batch_first)
        return data, _with_values(batches)

    def pad(
        self,
        _: Any,
        data: Any,
        batch_sizes: Any,
        batch_first: bool,
        padding_value: float,
        total_length: int,
    ) -> tuple[Any, Any]:
        """Return the sequences of packed data as one tensor, and their lengths."""
        batches = values_of(batch_sizes) or []
        steps = max(len(batches), total_length)
        shape = (steps, batches[0], *data.shape[1:])
        padded = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
        for first, stop, start, batch in _runs(batches):
            rows = data[start : start + (stop - first) * batch]
            padded[first:stop, :batch].copy_(rows.view(stop - first, batch, *data.shape[1:]))
        if batch_first:
            padded = padded.transpose(0, 1)
        lengths = [sum(batch > row for batch in batches) for row in range(batches[0])]
        return padded, _with_values(lengths)


class _Packed(torch.autograd.Function):  # type: ignore[misc]  # torch declares no type
    """Packs sequences with the allocations of torch's kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, source: Any, batches: list[int], batch_first: bool) -> Any:
        ctx.batches, ctx.batch_first, ctx.shape = batches, batch_first, source.shape
        by_step = source.transpose(0, 1) if batch_first else source
        parts = [
            by_step[first:stop, :batch].contiguous().view(-1, *source.shape[2:])
            for first, stop, _, batch in _runs(batches)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        steps, rest = ctx.shape[:2], ctx.shape[2:]
        if ctx.batch_first:
            steps = steps[::-1]
        by_step = gradient.new_zeros((*steps, *rest))
        start = 0
        for step, batch in enumerate(ctx.batches):
            by_step[step, :batch].copy_(gradient[start : start + batch])
            start += batch
        found = by_step.transpose(0, 1) if ctx.batch_first else by_step
        return found, None, None


def _runs(batches: list[int]) -> list[tuple[int, int, int, int]]:
    """Return first step, end, first row of the data, and batch of each run of equal batches."""
    runs = []
    step = row = 0
    for batch, members in groupby(batches):
        count = len(list(members))
        runs.append((step, step + count, row, batch))
        step, row = step + count, row + count * batch
    return runs


def values_of(tensor: Any) -> list[int] | None:
    """Return the values of a tensor of integers; None if they are not known."""
    real = real_values(tensor)
    if real is None:
        return None
    with torch._C._DisableTorchDispatch():
        values: list[int] = real.tolist()
    return values


def real_values(tensor: Any) -> Any:
    """Return the real tensor with a fake tensor's values; None if they are not known."""
    if is_known(tensor):
        return tensor.constant
    return None if hasattr(tensor, "fake_mode") else tensor


def _with_values(values: list[int]) -> Any:
    """Return a fake tensor on the host whose values are known."""
    with torch._C._DisableTorchDispatch():
        real = torch.tensor(values)
    made = torch.empty(len(values), dtype=torch.long, device="cpu")
    made.constant = real
    return made

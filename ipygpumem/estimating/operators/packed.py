"""Packs and pads sequences of different lengths as torch does, whose functions in C++ read the
lengths from memory that fake tensors do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch

from ipygpumem.estimating.operators.largest import is_known


class PackedSequences:
    """Handlers of torch's functions for packed sequences.

    Packed data has the rows of all sequences' first step, then of all second steps, and so on. A
    batch is the number of sequences that have not ended at a step.

    Args:
        note_unknown_lengths: called if the lengths are not known; then every sequence counts as
            the longest.
    """

    def __init__(self, note_unknown_lengths: Callable[[], object]) -> None:
        self._note_unknown_lengths = note_unknown_lengths

    def pack(self, _: Any, input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:  # noqa: A002
        """Stand for ``torch._pack_padded_sequence``: return packed data, and the batches."""
        steps, batch = input.shape[:2]
        if batch_first:
            batch, steps = input.shape[:2]
        values = values_of(lengths)
        if values is None:
            self._note_unknown_lengths()
            values = [steps] * batch
        batches = _counts_above(values, max(values))
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
        """Stand for ``torch._pad_packed_sequence``: return a padded tensor of all sequences, and
        their lengths.
        """
        batches = values_of(batch_sizes) or []
        largest_batch = batches[0]
        steps = max(len(batches), total_length)
        row_shape = data.shape[1:]
        shape = (steps, largest_batch, *row_shape)
        padded = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
        for first_step, stop, first_row, batch in _runs(batches):
            count = stop - first_step
            rows = data[first_row : first_row + count * batch]
            part = padded[first_step:stop, :batch]
            part.copy_(rows.view(count, batch, *row_shape))
        if batch_first:
            padded = padded.transpose(0, 1)
        lengths = _counts_above(batches, largest_batch)
        return padded, _with_values(lengths)


class _Packed(torch.autograd.Function):  # type: ignore[misc]  # torch declares no type
    """The function that packs sequences, with the allocations of torch's kernels."""

    @staticmethod
    def forward(ctx: Any, source: Any, batches: list[int], batch_first: bool) -> Any:
        """Return the packed rows of all steps.

        Args:
            ctx: keeps what backward needs.
            source: padded sequences.
            batches: the number of sequences at each step.
            batch_first: True if the first dimension of ``source`` is that of sequences, not steps.
        """
        ctx.batches = batches
        ctx.batch_first = batch_first
        ctx.shape = source.shape
        by_step = source
        if batch_first:
            by_step = source.transpose(0, 1)
        row_shape = source.shape[2:]
        parts = []
        for first_step, stop, _, batch in _runs(batches):
            rows = by_step[first_step:stop, :batch].contiguous()
            parts.append(rows.view(-1, *row_shape))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Return the gradient of the padded sequences, with zeros in the padding."""
        first, second, *row_shape = ctx.shape
        shape = (first, second, *row_shape)
        if ctx.batch_first:
            shape = (second, first, *row_shape)
        by_step = gradient.new_zeros(shape)
        start = 0
        for step, batch in enumerate(ctx.batches):
            rows = gradient[start : start + batch]
            by_step[step, :batch].copy_(rows)
            start += batch
        if ctx.batch_first:
            by_step = by_step.transpose(0, 1)
        return by_step, None, None


def _counts_above(values: list[int], stop: int) -> list[int]:
    """Return how many values are above 0, above 1, and so on up to ``stop`` - 1.

    From the lengths ``[3, 3, 1]`` it makes the batches ``[3, 2, 2]``, and from these the lengths.
    """
    return [sum(value > bound for value in values) for bound in range(stop)]


class _Run(NamedTuple):
    """Successive steps of a packed batch at which equally many sequences have not ended yet."""

    first_step: int
    """The number of the first of these steps."""
    stop: int
    """The step after the last one."""
    first_row: int
    """The number of the first row of the packed data."""
    batch: int
    """The number of sequences."""


def _runs(batches: list[int]) -> list[_Run]:
    """Return the runs of equal batches: of ``[3, 3, 1]``, two steps of 3 and one of 1."""
    runs = []
    step = row = 0
    for batch, members in groupby(batches):
        count = len(list(members))
        runs.append(_Run(step, step + count, row, batch))
        step += count
        row += count * batch
    return runs


def values_of(tensor: Any) -> list[int] | None:
    """Return the values of a tensor of integers, real or fake; None if they are not known."""
    real = real_values(tensor)
    if real is None:
        return None
    with torch._C._DisableTorchDispatch():
        values: list[int] = real.tolist()
    return values


def real_values(tensor: Any) -> Any:
    """Return a real tensor with a tensor's values; None for a fake one without known values."""
    if is_known(tensor):
        return tensor.constant
    if hasattr(tensor, "fake_mode"):
        return None
    return tensor


def _with_values(values: list[int]) -> Any:
    """Return a fake tensor on the host that has these integers as its known values."""
    with torch._C._DisableTorchDispatch():
        real = torch.tensor(values)
    made = torch.empty(len(values), dtype=torch.long, device="cpu")
    made.constant = real
    return made

"""A card on which operations run, and one of these operations: what the rules of kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HOPPERS_PROCESSORS = 132
"""Multiprocessors of an unknown device, which is assumed to be an H100."""


@dataclass(frozen=True)
class Card:
    """A CUDA device that the code uses, available or assumed."""

    name: str
    """Such as ``cuda:0``."""
    name_in_log: str
    """The name of the device whose storages the log has: ``cpu`` if the CPU stands for the card."""
    properties: Any
    """torch's properties of the device; None if they are unknown."""

    @property
    def processors(self) -> int:
        """The number of multiprocessors; an unknown card counts as a Hopper."""
        if self.properties is None:
            return HOPPERS_PROCESSORS
        return int(self.properties.multi_processor_count)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability; None if it is unknown."""
        if self.properties is None:
            return None
        return self.properties.major, self.properties.minor


@dataclass(frozen=True)
class Operation:
    """One call of an operator."""

    name: str
    """The operator, as ``transients.operator_name`` returns it, such as ``addmm``."""
    args: Any
    """The arguments that it gets by position."""
    kwargs: Mapping[str, Any]
    """The arguments that it gets by name."""
    results: list[Any]
    """The tensors that it returns."""
    in_backward: bool
    """True if autograd runs it."""

"""For what a found value holds: the same code, on the same devices, with about as much memory free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ipygpumem.fitting.plan import Values
from ipygpumem.model import Reading
from ipygpumem.probes.host import available_bytes

Key = tuple[object, ...]
Remembered = dict[Key, Values]


def key_of(code: str, start: Mapping[str, object], readings: Iterable[Reading]) -> Key:
    """Return what a found value is remembered under.

    Args:
        code: tells the code from any other.
        start: the variables and where they started.
        readings: the devices now, in detail. Free memory counts by its power of two.
    """
    devices = [(reading.device, reading.total_bytes, _free_bytes(reading).bit_length()) for reading in readings]
    return (code, *sorted(start.items()), *devices)


def _free_bytes(reading: Reading) -> int:
    if reading.device == "cpu":
        return available_bytes()
    return max(0, (reading.total_bytes or 0) - (reading.used_bytes or reading.reserved_bytes or 0))


def code_of(function: Callable[..., Any]) -> str:
    """Return the qualified name and the source of a function, or of what a partial calls."""
    inner = getattr(function, "func", function)
    name = getattr(inner, "__qualname__", "")
    try:
        return f"{name}\n{inspect.getsource(inner)}"
    except (OSError, TypeError):
        return f"{name}"

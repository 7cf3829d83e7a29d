"""The parts of a device's memory by name, after checks that all of them must pass."""

from __future__ import annotations

from ipygpumem.inventory.devices.breakdown import Reconciliation


def sizes(memory: Reconciliation) -> dict[str, int | None]:
    """Return the parts that are not empty, after the check that every device's must pass."""
    check(memory)
    return {part.name: part.size_bytes for part in memory.parts if part.size_bytes != 0}


def check(memory: Reconciliation) -> None:
    known_sizes = [part.size_bytes for part in memory.parts if part.size_bytes is not None]
    assert sum(known_sizes) == memory.total_bytes
    assert min(known_sizes, default=0) >= 0
    assert all(part.name and part.advice and "\n" not in part.advice for part in memory.parts)
    assert Reconciliation.from_dict(memory.to_dict()) == memory

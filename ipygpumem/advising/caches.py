"""Advice on memory that torch's caching allocators hold and nobody uses."""

from __future__ import annotations

from collections.abc import Iterator

from ipygpumem.advising.graphs import Graphs
from ipygpumem.advising.look import Look
from ipygpumem.advising.records import Finding
from ipygpumem.probes.allocator import snapshots

_BACKENDS = ("cuda", "xpu")


def caches(look: Look, graphs: Graphs) -> Iterator[Finding]:
    """Yield the segments of each device in which no block is in use."""
    for backend in _BACKENDS:
        try:
            by_device = snapshots(backend)
        except RuntimeError:  # an allocator without snapshots: nobody can tell
            continue
        for device, snapshot in by_device.items():
            yield Finding(
                "allocator cache",
                device,
                {(f"cache of {device}", 0): snapshot.cached_bytes},
                "segments that torch's allocator keeps, and no tensor uses",
                look.scope.line_with("torch", f"torch.{backend}.empty_cache()"),
                "if another process or library needs it: torch itself would use it again; %gpumem free does it, too",
            )

"""What other libraries than torch have on a device, as parts of its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ipygpumem.model import Reading
from ipygpumem.probes.pools import POOLS
from ipygpumem.reconcile.records import Part

_UNUSED = {
    "jax": (
        "serves JAX alone, until the kernel ends: XLA_PYTHON_CLIENT_PREALLOCATE=false before its first use lets it "
        "reserve only what it needs"
    ),
    "cupy": "free for CuPy's next arrays; %gpumem free gives it back",
}
"""What is to be said of what a pool holds and does not use."""


def pools_on(index: int, readings: Mapping[str, Reading]) -> tuple[Part, ...]:
    """Return the parts of the pools on a device, by torch's number of it."""
    devices = {device for device in readings if device.partition(":")[0] == "cuda"}
    return tuple(parts_of(readings, index, is_only=len(devices) == 1))


def parts_of(readings: Mapping[str, Reading], index: int, *, is_only: bool) -> Iterator[Part]:
    """Yield the parts of the pools on a device, and if it ``is_only``, also of those that do not say where they are."""
    for device, reading in readings.items():
        name, _, number = device.partition(":")
        if name not in POOLS or not (number == str(index) or (not number and is_only)):
            continue
        yield Part(f"{POOLS[name]}: in use", reading.current_bytes, "its arrays: delete their names")
        if reading.reserved_bytes is not None:
            unused = max(0, reading.reserved_bytes - reading.current_bytes)
            yield Part(f"{POOLS[name]}: pool's rest", unused, _UNUSED.get(name, ""))

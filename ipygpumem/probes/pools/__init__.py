"""Reads the memory pools of other libraries than torch: one file for each, found in ``sys.modules``, never imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

from ipygpumem.introspect import is_instance
from ipygpumem.model import Reading
from ipygpumem.probes import Probe
from ipygpumem.probes.accelerators import accelerators

POOLS = {"jax": "JAX", "cupy": "CuPy", "rmm": "RMM", "tensorflow": "TensorFlow"}
"""Libraries by the module that their users import. A new one is a file here, with a function ``pools``."""


class Pool(NamedTuple):
    """What a library has on one device."""

    number: int | None
    """The device's number, as the library counts; None where it does not tell."""
    in_use_bytes: int
    highest_bytes: int | None = None
    """The most that it ever had in use; None where it does not tell."""
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    kind: str = ""
    """What the device is called, if not by the library's name."""


class PoolProbe:
    """One library's pools. No peak is ever reset: it is the user's.

    A span in which the library has more in use than ever before has an exact peak; others are sampled.

    Args:
        name: the library's module.
        pools: reads its pools; nothing before the user's code has used a device.
    """

    def __init__(self, name: str, pools: Callable[[ModuleType], Iterable[Pool]]) -> None:
        self.name = name
        self._pools = pools
        self._highest: dict[int | None, int] = {}
        self._marks: dict[int | None, int] = {}
        """The highest of each device when the peak was rearmed."""

    @property
    def sampled(self) -> bool:
        """Whether the library has anything on a device."""
        return bool(self._highest)

    def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
        """Return a reading for each pool."""
        return tuple([self._reading(pool) for pool in self._pools(sys.modules[self.name])])

    def _reading(self, pool: Pool) -> Reading:
        current, highest = pool.in_use_bytes, pool.highest_bytes or 0
        self._highest[pool.number] = highest
        name = pool.kind or self.name
        return Reading(
            name if pool.number is None else f"{name}:{pool.number}",
            current,
            max(current, highest) if highest > self._marks.get(pool.number, 0) else current,
            "sampled",
            pool.limit_bytes,
            pool.reserved_bytes,
        )

    def glance(self) -> tuple[Reading, ...]:
        """Return the same: the libraries answer from the host's own books."""
        return self.read()

    def rearm(self) -> None:
        """Begin a new peak."""
        self._marks = dict(self._highest)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def finder() -> Callable[[], list[Probe]]:
    """Return a function that returns the probes of the libraries that were loaded since it was last called."""
    waiting = ["torch", *POOLS]

    def find() -> list[Probe]:
        found: list[Probe] = []
        for name in [name for name in waiting if name in sys.modules]:
            if probes := _probes_of(name):
                waiting.remove(name)
                found += probes
        return found

    return find


def _probes_of(name: str) -> list[Probe]:
    own = accelerators() if name == "torch" else []
    if not own and (name == "torch" or not is_loaded(name)):
        return []
    return [*own, PoolProbe(name, importlib.import_module(f"{__name__}.{name}").pools)]


def is_loaded(name: str) -> bool:
    """Whether the user's code has imported a library, and not just begun to."""
    module = sys.modules.get(name)
    return is_instance(module, ModuleType) and not getattr(getattr(module, "__spec__", None), "_initializing", False)

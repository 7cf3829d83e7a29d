"""``ipygpumem.in_notebook`` and ``set_seed``."""

from __future__ import annotations

from ipygpumem.api.shell import current_shell
from ipygpumem.errors import GpuMemError
from ipygpumem.introspect import type_name
from ipygpumem.scopes.seeding import is_seed, seed_generators


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel; False in a script and in IPython's terminal."""
    return getattr(current_shell(), "kernel", None) is not None


def set_seed(seed: int) -> None:
    """Seed Python's generator, and those of NumPy and torch if they are loaded, as an experiment's seed does.

    Raises:
        GpuMemError: ``seed`` does not fit into 64 bits, or is no whole number.
    """
    if not is_seed(seed):
        what = str(seed) if type(seed) is float else "one with more bits" if type(seed) is int else type_name(seed)
        raise GpuMemError(f"a seed is a whole number that fits into 64 bits, and not {what}")
    seed_generators(seed)

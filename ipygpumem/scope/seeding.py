"""Seeds random generators, so that an experiment's cells give the same numbers in each run."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def is_seed(value: object) -> bool:
    """Return True for a seed that torch accepts: an integer that fits into 64 bits, signed or
    unsigned.
    """
    return type(value) is int and -(2**63) <= value < 2**64


class Seeder(MetaPathFinder):
    """Seeds the generators of Python, NumPy and torch; the latter two also right after a cell
    imports them.

    Importing them beforehand would be simpler, but slow, and too early for code that sets
    environment variables before the import.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._being_found: set[str] = set()
        """Modules that ``find_spec`` is finding right now."""

    def seed_all(self) -> None:
        """Seed Python's generator now; NumPy's global generator and torch's ones now if they are
        imported, and else right after their import.
        """
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        random.seed(self._seed)
        self._seed_module("numpy")
        self._seed_module("torch")

    def _seed_module(self, name: str) -> None:
        """Seed the generators of NumPy or torch, if it is imported."""
        module: Any = sys.modules.get(name)  # None where an import is blocked
        if name == "numpy" and hasattr(module, "random"):
            module.random.seed(self._seed % 2**32)
        elif hasattr(module, "manual_seed"):
            module.manual_seed(self._seed)  # all devices; lazily where none is initialised

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find NumPy or torch as usual, and seed it once it is loaded."""
        if fullname not in ("numpy", "torch") or fullname in self._being_found:
            return None
        self._being_found.add(fullname)  # the call below reaches this finder again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._being_found.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            self._seed_module(fullname)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]  # this spec's own loader
        return spec

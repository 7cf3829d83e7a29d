"""Resets random generators, so that an experiment's cells give the same numbers each time they run."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def is_seed(value: object) -> bool:
    """Whether torch takes ``value`` as a seed: a whole number that fits into 64 bits, with a sign or without."""
    return type(value) is int and -(2**63) <= value < 2**64


def seed_generators(seed: int) -> None:
    """Seed Python's generator, and NumPy's global and torch's ones if those modules are loaded."""
    random.seed(seed)
    for seeder in _SEEDERS.values():
        seeder(seed)


def _seed_numpy(seed: int) -> None:
    _call(getattr(sys.modules.get("numpy"), "random", None), "seed", seed % 2**32)


def _seed_torch(seed: int) -> None:
    _call(sys.modules.get("torch"), "manual_seed", seed)  # every device; lazily where none is initialised


def _call(module: Any, name: str, seed: int) -> None:
    function = getattr(module, name, None)  # None stands in sys.modules where an import is blocked
    if function is not None:
        function(seed)


_SEEDERS: dict[str, Callable[[int], None]] = {"numpy": _seed_numpy, "torch": _seed_torch}


class SeedOnImport(MetaPathFinder):
    """Seeds NumPy and torch when a cell of the experiment imports them, since it may use them at once.

    Importing them beforehand would be simpler, but slow, and too early for code that sets environment
    variables before its import.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._busy: set[str] = set()

    def install(self) -> None:
        """Watch imports from now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find NumPy or torch as usual, and have it seeded once it is loaded."""
        if fullname not in _SEEDERS or fullname in self._busy:
            return None
        self._busy.add(fullname)  # the look-up below asks us again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            execute(module)
            _SEEDERS[fullname](self._seed)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]  # this spec's own loader
        return spec

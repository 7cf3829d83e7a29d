"""Counts the passes of our work over the heap."""

from __future__ import annotations

import gc
from typing import Any


class Passes:
    """Counts passes over the heap, and visits of objects, by the functions of ``gc`` that our code
    calls.
    """

    def __init__(self) -> None:
        self.passes = self.visits = 0
        self._real = {
            name: getattr(gc, name)
            for name in ("get_objects", "get_referrers", "get_referents", "collect")
        }

    def __enter__(self) -> Passes:
        for name in self._real:
            setattr(gc, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(gc, name, function)

    def get_objects(self, generation: int | None = None) -> list[Any]:
        self.passes += generation in (None, 2)
        objects: list[Any] = self._real["get_objects"](generation)
        return objects

    def get_referrers(self, *objects: object) -> Any:
        self.passes += 1
        return self._real["get_referrers"](*objects)

    def get_referents(self, *objects: object) -> Any:
        self.visits += len(objects)
        return self._real["get_referents"](*objects)

    def collect(self, generation: int = 2) -> Any:
        self.passes += generation == 2
        return self._real["collect"](generation)

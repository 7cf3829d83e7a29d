"""One look over everything that is alive, and who refers to whom.

The garbage collector lists containers only. NumPy arrays are not among them, and neither is a dict or tuple that
holds nothing but arrays, numbers and text (CPython stops tracking it): both are found as what listed objects refer to.
Running frames and C++ code are out of sight; ``holders`` asks for the former.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ipygpumem.arrays import library_type
from ipygpumem.kinds import is_kind

_CHUNK = 100_000


class Heap:
    """What was alive when it was made. It keeps all of that alive too: use it, then drop it.

    Attributes:
        tensors: torch tensors, also those that only another object refers to.
        ndarrays: NumPy arrays.
    """

    def __init__(self) -> None:
        self._tensor_type = library_type("torch", "Tensor")
        self._array_type = library_type("numpy", "ndarray")
        self._kinds: dict[int, str] = {}
        """What objects of a type are, by the type's identity: it lives as long as they do."""
        self._containers: list[object] = []
        self.tensors: list[object] = []
        self.ndarrays: list[object] = []
        tracked = gc.get_objects()
        for item in tracked:
            self._sort_in(item)
        self._look_behind(tracked)

    def _sort_in(self, item: object) -> None:
        kind = self._kinds.get(id(type(item))) or self._kind(item)
        if kind == "tensor":
            self.tensors.append(item)
        elif kind == "ndarray":
            self.ndarrays.append(item)

    def _kind(self, item: object) -> str:
        bases = {"tensor": self._tensor_type, "ndarray": self._array_type}
        kind = next((name for name, base in bases.items() if base is not None and is_kind(item, base)), "other")
        self._kinds[id(type(item))] = kind
        return kind

    def _look_behind(self, tracked: Sequence[object]) -> None:
        """Find the arrays and the containers that the collector does not track."""
        seen: set[int] = set()
        level: Sequence[object] = tracked
        while level:
            behind: list[object] = []
            for item in _referents(level):
                # What is neither a container nor an array cannot lead to one: most of a heap is that.
                kind = type(item)
                wanted = kind is dict or kind is tuple or kind is self._array_type
                if wanted and id(item) not in seen and not gc.is_tracked(item):
                    seen.add(id(item))
                    behind.append(item)
            self.ndarrays += [item for item in behind if type(item) is self._array_type]
            level = [item for item in behind if type(item) is not self._array_type]
            self._containers += level

    def referrers(self, objects: dict[int, object]) -> Iterator[tuple[object, list[int]]]:
        """Yield the objects that refer to some of ``objects`` (by identity), and to which."""
        found = gc.get_referrers(*objects.values())
        if any(type(item) is self._array_type or not gc.is_tracked(item) for item in objects.values()):
            found += self._untracked_referrers(objects)
        for item in found:
            children = [id(child) for child in gc.get_referents(item) if id(child) in objects]
            if children:
                yield item, list(dict.fromkeys(children))

    def _untracked_referrers(self, objects: dict[int, object]) -> list[object]:
        return [
            item
            for part in _chunks(self._containers)
            if any(id(child) in objects for child in gc.get_referents(*part))
            for item in part
            if any(id(child) in objects for child in gc.get_referents(item))
        ]


def _chunks(objects: Sequence[object]) -> Iterator[Sequence[object]]:
    return (objects[start : start + _CHUNK] for start in range(0, len(objects), _CHUNK))


def _referents(objects: Sequence[object]) -> Iterable[object]:
    return chain.from_iterable(gc.get_referents(*part) for part in _chunks(objects))

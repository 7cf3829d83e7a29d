"""The paths that lead to very many objects, as text that is made when it is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

Label = Callable[[int], str]


@dataclass(frozen=True)
class Indexed:
    """How the items of a sequence are written."""

    path: str

    def __call__(self, position: int) -> str:
        """Return the path to the item at ``position``."""
        return f"{self.path}[{position}]"


class Paths(Sequence[str]):
    """The paths to many objects, written out when they are asked for. It holds text and numbers only."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: list[tuple[Label, Sequence[int]]] = []
        self._length = 0

    def add(self, label: Label, positions: Sequence[int]) -> None:
        """Add the paths to objects at ``positions`` of what ``label`` names."""
        if type(label) is not Indexed:  # it may refer to the user's objects
            written = list(map(label, positions))
            label, positions = written.__getitem__, range(len(written))
        self._starts.append(self._length)
        self._runs.append((label, positions))
        self._length += len(positions)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> str:  # type: ignore[override]  # one at a time
        run = bisect_right(self._starts, place) - 1
        label, positions = self._runs[run]
        return label(positions[place - self._starts[run]])

    def __iter__(self) -> Iterator[str]:
        for label, positions in self._runs:
            yield from map(label, positions)


class NameColumn(Sequence["str | None"]):
    """The name of each of some objects: those with a path come first, then those without.

    Args:
        paths: of the first ones.
        nameless: how many more there are.
    """

    def __init__(self, paths: Sequence[str], nameless: int) -> None:
        self._paths = paths
        self._with_path = len(paths)
        self._length = len(paths) + nameless
        self._owners: dict[int, int] = {}

    def add_gradient(self, place: int, owner: int) -> None:
        """Name the object at ``place``, or a new one, as another's gradient if that one has a name."""
        self._length = max(self._length, place + 1)
        if self.is_named(owner):
            self._owners[place] = owner

    def is_named(self, place: int) -> bool:
        """Whether the object at ``place`` has a name."""
        return place < self._with_path or place in self._owners

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> str | None:  # type: ignore[override]  # one at a time
        if place in self._owners:
            return f"{self[self._owners[place]]}.grad"
        return self._paths[place] if place < self._with_path else None

    def __iter__(self) -> Iterator[str | None]:
        if self._owners:
            return map(self.__getitem__, range(self._length))
        return chain(self._paths, repeat(None, self._length - self._with_path))

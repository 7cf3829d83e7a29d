"""The names of tensors and arrays, and the cell that bound each name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter

from ipygpumem.inventory.arrays.records import first_part
from ipygpumem.notebook import OUTPUT_PREFIX

CellOf = Callable[[str], "int | None"]
"""Returns the last cell that bound a name; None if it is unknown."""


class Labels:
    """The notebook's names of tensors and arrays, by identity.

    Attributes:
        paths: the name of each.
    """

    def __init__(self, paths: dict[int, str], cell_of: CellOf) -> None:
        self.paths = paths
        self._cell_of = cell_of
        self._cells: dict[str, int | None] = {"": None}
        """The cell that bound the first part of a path, by the path up to its first bracket."""

    def cells(self, paths: Sequence[str | None]) -> list[int | None]:
        """Return for each path the cell that bound its first part: for ``model.fc.weight``, the
        cell that bound ``model``. Without a path, or for an unknown cell, it is None.
        """
        if not paths:
            return []
        texts = [path or "" for path in paths]
        head_of_first = texts[0].partition("[")[0]
        is_known = head_of_first in self._cells and head_of_first != "Out"
        if is_known and all(map(str.startswith, texts, repeat(f"{head_of_first}["))):
            # All are items of one object, such as a list of a million tensors.
            return [self._cells[head_of_first]] * len(texts)
        heads = self._heads_of(texts)
        for head in set(heads) - self._cells.keys():
            name = first_part(head.replace("list(", ""))
            self._cells[head] = self._cell_of(name.rstrip(")"))
        return list(map(self._cells.__getitem__, heads))

    def _heads_of(self, paths: Sequence[str]) -> list[str]:
        """Return the *head* of each path, by which its cell is found: the path up to its first
        bracket. If the first part itself has a bracket, as ``Out[5]`` or ``list(rows)[3]``, it is
        the whole path.
        """
        heads = list(map(itemgetter(0), map(str.partition, paths, repeat("["))))
        for head in set(heads):
            if head == "Out" or head.startswith("list("):
                return list(map(_head_of, paths))
        return heads

    def cell(self, item: object) -> int | None:
        """Return the cell that bound the first part of an array's name."""
        return self.cells([self.paths.get(id(item))])[0]


def _head_of(path: str) -> str:
    """Return the head of one path, as ``_heads_of`` does."""
    if path.startswith((OUTPUT_PREFIX, "list(")):
        return path
    return path.partition("[")[0]

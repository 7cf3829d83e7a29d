"""Makes rows of the old containers that have grown since the start of an experiment.

Of ``log.samples``, which keeps only numbers, the row says ``from 1,000 to 9,000,000 items``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import attrgetter
from typing import NamedTuple

from ipygpumem.heap.paths.path_writer import PathWriter
from ipygpumem.heap.paths.roots import NOTEBOOK, Roots
from ipygpumem.inventory.remaining.contents import Contents
from ipygpumem.inventory.remaining.growth import GrownContainer


class GrownRow(NamedTuple):
    """An old container that has grown, in words."""

    path: str
    size_bytes: int
    """Bytes that it has grown by."""
    items: str
    """The number of its items at the start and now, if it was not short."""
    line: str
    """The line that empties it, if it was short at the start."""
    container: GrownContainer | None = None
    """The container; None in later looks."""


def rows_of_grown_containers(
    names: Mapping[str, object],
    contents: Contents,
    smallest: int,
    roots: Roots,
    new_ids: Set[int],
) -> list[GrownRow]:
    """Return a row for each old container that has grown, the one that has grown most first.

    Args:
        names: the names and their objects.
        contents: the contents of the names at the start.
        smallest: minimum bytes of each.
        roots: the names and objects from which the user can reach objects.
        new_ids: identities of the tracked objects made since the start.
    """
    writer = PathWriter(roots)
    rows = list[GrownRow]()
    # All of them first: writing a path may give an object a dict, through which it then refers.
    for name, chain, container in list(contents.grown_containers(dict(names), smallest, new_ids)):
        path = writer.holder_from_name(name, chain).path.removeprefix(NOTEBOOK)
        line = container.line_to_empty(path)
        rows.append(GrownRow(path, container.size_bytes, container.items, line, container))
    return sorted(rows, key=attrgetter("size_bytes"), reverse=True)

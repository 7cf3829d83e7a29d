"""The built-in containers, which of them count for which purpose, and loops over their items."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ipygpumem.heap.bulk import CHUNK, types_of

CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, deque)
"""Base classes of all containers that are read: no type derives from two of them."""
CONTAINER_TYPES = frozenset(map(id, CONTAINERS))
"""Identities of the built-in containers themselves, without subclasses."""
SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
"""Containers whose items have positions."""
GROWING: tuple[Any, ...] = (list, dict, set, deque)
"""Containers to which code adds items: they grow from cell to cell."""
APPENDED: tuple[Any, ...] = (list, dict, deque)
"""Containers whose new items come last; those of a set may come anywhere."""
UNTRACKED: tuple[Any, ...] = (dict, tuple)
"""Containers that the collector stops tracking if they contain only arrays, numbers and text."""
LARGE: tuple[Any, ...] = (dict, list, set)
"""Tracked containers that a heap lists as large ones if they hold much."""


def container_base(kind: type) -> Any:
    """Return the built-in container from which a type derives; None if it derives from none."""
    for base in CONTAINERS:
        if type.__subclasscheck__(base, kind):
            return base
    return None


def lengths_of(containers: Sequence[Any], bases: Mapping[int, Any]) -> list[int]:
    """Return the number of items of each container, with the builtin types from which theirs
    derive, by type; those of plain ones in C, because there may be a million.
    """
    if types_of(containers) <= CONTAINER_TYPES:
        return list(map(len, containers))
    return [bases[id(type(item))].__len__(item) for item in containers]


def parts_of_container(container: Any, base: Any, step: int = CHUNK) -> Iterator[Sequence[Any]]:
    """Yield the items of a container, the keys and values of a dict, in chunks that begin ``step``
    items apart.

    A list of all items, as from ``gc.get_referents``, would take 800 MiB for a hundred million of
    them.

    Raises:
        RuntimeError: a thread changes the container.
    """
    length = base.__len__(container)
    if base is list or base is tuple:
        for start in range(0, length, step):
            yield base.__getitem__(container, slice(start, start + CHUNK))
        return
    iterators = [base.__iter__(container)]
    if base is dict:
        iterators.append(iter(dict.values(container)))
    if issubclass(type(container), OrderedDict):
        iterators.append(base.__iter__(container))  # its list of keys refers to each of them, too
    for items in iterators:
        # No variable for a chunk, which would count as another reference to its items.
        for _ in range(0, length, step):
            yield list(islice(items, CHUNK))
            next(islice(items, step - CHUNK, step - CHUNK), None)  # skips items in C

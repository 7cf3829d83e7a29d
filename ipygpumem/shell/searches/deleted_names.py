"""Watches the objects of names that a cell may delete, such as ``del model``.

``%gpumem why model`` then tells what is still alive of the object. No object is kept alive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

from ipygpumem.heap.live.garbage import lasting_weak
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.heap.walks.walk import MOST_AT_START
from ipygpumem.introspect import is_atom, is_instance
from ipygpumem.inventory.remaining.watched_names import WatchedName, detach_numpy, watch_names
from ipygpumem.scope.ownable import ownable
from ipygpumem.shell.context import ShellContext

_WORD = re.compile(r"\w+")
_DELETING_ANY = {"reset", "reset_selective"}
"""Words of cells that delete names which the cells don't contain."""
_DELETING = {"del", "xdel", *_DELETING_ANY}
"""Words of cells that delete names."""
_MOST_DELETED = 1000
"""Maximum number of names to watch."""


class DeletedObject(NamedTuple):
    """The part of a deleted name's object that may still be alive."""

    watched: WatchedName | None
    """Its arrays, if it had any."""
    value: object
    """The object itself if it is alive; None if it is not, or if that is unknown."""


class _DeletedName(NamedTuple):
    """A name that a cell may have deleted."""

    cell: int
    """The number of the cell that may have deleted it."""
    watched: WatchedName | None
    """The name's arrays, if it had any."""
    reference: Callable[[], object] | None
    """Returns the name's object while it is alive; None if it cannot be watched."""


class DeletedNames:
    """The names that cells may have deleted, with weak references to their objects."""

    def __init__(self, context: ShellContext) -> None:
        self._context = context
        self._names: dict[str, _DeletedName] = {}

    def watch(self, source: str) -> None:
        """Watch the objects of the names that a cell may delete; call it before its code runs.

        Of more than ``_MOST_DELETED`` names, those count that the cell has last, because cells tend
        to delete at their end. If it may delete any name, the newest ones count.

        Args:
            source: the cell's source.
        """
        words_last_first = dict.fromkeys(reversed(_WORD.findall(source)))
        words = words_last_first.keys()
        if words.isdisjoint(_DELETING):
            return
        namespace = self._context.namespace
        candidates: Iterable[str] = filter(namespace.__contains__, words_last_first)
        if words & _DELETING_ANY:  # ``%reset_selective m.*``
            candidates = reversed(namespace)
        names = ownable(candidates)[:_MOST_DELETED]
        for name in reversed(names):  # the first ones are forgotten first
            search = ArraySearch()
            search.left = MOST_AT_START // len(names)
            self._watch_name(name, namespace[name], search)
        for name in list(self._names)[:-_MOST_DELETED]:
            del self._names[name]

    def _watch_name(self, name: str, value: object, search: ArraySearch) -> None:
        """Watch the object of a name and its arrays; not a number, a text, a class or a module."""
        self._names.pop(name, None)
        if is_atom(value) or is_instance(value, type) or is_instance(value, ModuleType):
            return
        watched_names = watch_names([(name, value)], search)
        # The cell runs next, and NumPy does not resize an array with a weak reference.
        detach_numpy(watched_names)
        cell = self._context.shell.execution_count
        watched = watched_names[0] if watched_names else None
        self._names[name] = _DeletedName(cell, watched, lasting_weak(value))

    def of(self, name: str, cell: int | None) -> DeletedObject:
        """Return the part of a deleted name's object that may still be alive.

        Args:
            name: the name.
            cell: the last cell that bound it; any object from before is another one.
        """
        deleted = self._names.get(name)
        was_bound_later = deleted is not None and cell is not None and cell >= deleted.cell
        if deleted is None or was_bound_later:
            return DeletedObject(watched=None, value=None)
        value = None if deleted.reference is None else deleted.reference()
        return DeletedObject(deleted.watched, value)

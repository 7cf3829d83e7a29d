"""Adds scopes to a flat namespace: tracks the names that a scope owns, and cleans up at its end.

A scope behaves like a Python function: at the end its names are deleted, and shadowed ones get
their old objects back. If ``x`` was 1 before and the scope's code runs ``x = 2; y = 3``, its end
gives ``x`` the value 1 and deletes ``y``. It handles names only, not memory or IPython.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import filterfalse
from types import ModuleType
from typing import Any

from ipygpumem.introspect import begins_with, is_instance
from ipygpumem.scope.bindings import Bindings
from ipygpumem.scope.instrumenting import (
    BINDS,
    HAS_BOUND,
    HAS_ENDED,
    HAS_IMPORTED,
    MAY_BIND,
    split_event,
)
from ipygpumem.scope.ownable import LIBRARYS_OWN, is_ownable

Namespace = dict[str, Any]

_MISSING = object()
"""Stands for the object of a name that does not exist: a thread may delete it at any moment."""
_AFTER_STATEMENT = {HAS_BOUND, HAS_IMPORTED, HAS_ENDED}
"""Words of events that come after a statement which may have bound a name."""


@dataclass
class Outcome:
    """The names that a scope's end has deleted, restored and kept; filled as it closes, so that an
    interrupt loses nothing.
    """

    deleted: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


class SavedObjects:
    """The shadowed objects of one scope, which its end restores.

    Args:
        clock: yields growing numbers, the same iterator for all scopes over a namespace, so that
            the times of different scopes can be compared.
    """

    def __init__(self, clock: Iterator[int]) -> None:
        self._clock = clock
        self.by_name: Namespace = {}
        self._times: dict[str, int] = {}
        """When each object was saved, by the clock."""
        self.unsure_names: set[str] = set()
        """Saved names that code may have bound without a report, or may not have bound at all: the
        function ``forget_needless_saves`` drops those that it has not bound.
        """

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def add(self, objects: Namespace) -> None:
        """Save objects, given by name, instead of those that were saved for these names before."""
        self.by_name.update(objects)
        self._times.update(dict.fromkeys(objects, next(self._clock)))

    def add_unsure(self, objects: Namespace) -> None:
        """Save objects whose names code may bind without a report, given by name."""
        self.unsure_names.update(objects)
        self.add(objects)

    def drop(self, name: str) -> None:
        """Forget the object saved for ``name``; do nothing if there is none."""
        self.by_name.pop(name, None)

    def is_unchanged(self, name: str, namespace: Namespace) -> bool:
        """Return True if a saved name still refers to its saved object."""
        return namespace.get(name, _MISSING) is self.by_name[name]

    def drop_unbound(self, namespace: Namespace) -> None:
        """Forget the objects of unsure names that the code did not rebind after all."""
        while self.unsure_names:
            name = self.unsure_names.pop()
            if name in self.by_name and self.is_unchanged(name, namespace):
                del self.by_name[name]

    def is_later(self, name: str, other: SavedObjects) -> bool:
        """Return True if this scope has bound ``name`` after the ``other`` one did: it has saved an
        object for the name, and the other one has saved none, or has saved one earlier.
        """
        if name not in self.by_name:
            return False
        return name not in other.by_name or self._times[name] > other._times[name]

    def earliest_after(
        self, name: str, other_scopes: Iterable[SavedObjects]
    ) -> SavedObjects | None:
        """Return the saved objects of the scope that was the first to bind ``name`` after this one;
        None if no other scope did.
        """
        later = [other for other in other_scopes if other.is_later(name, self)]
        return min(later, key=lambda other: other._times[name], default=None)

    def inherit(self, name: str, value: object, other: SavedObjects) -> None:
        """Save ``value``, which the ``other`` scope had saved for ``name`` and no longer restores,
        with the time at which that one saved it.
        """
        self.by_name[name] = value
        self._times[name] = other._times[name]


class OuterNames:
    """The names that are older than a scope, without their objects.

    These are the names of the namespace at its start, and names that the scopes of other threads
    will restore, some of which may be unbound now.

    Args:
        namespace: the cells' namespace.
        saved_elsewhere: the objects that other threads' scopes will restore, one mapping for each.

    Attributes:
        at_start: the names of the namespace at the start.
    """

    def __init__(self, namespace: Namespace, saved_elsewhere: Iterable[Namespace]) -> None:
        self._namespace = namespace
        self.at_start = tuple(namespace)
        self._has_all_of_start = True
        """False once a name of the start may have been deleted and bound again. It is no outer name
        then, but may be at its old position.
        """
        self._saved_elsewhere: list[dict[Any, None]] = [
            dict.fromkeys(objects) for objects in saved_elsewhere
        ]

    @functools.cached_property
    def names(self) -> dict[Any, None]:
        """All outer names.

        Made when one is looked up, which an empty scope among 100,000 names never does. A dict
        without values is not examined by the collector.
        """
        names: dict[Any, None] = dict.fromkeys(self.at_start)
        for saved_names in self._saved_elsewhere:
            names.update(saved_names)
        return names

    def add(self, name: str) -> None:
        """Treat a name as one from before the scope."""
        self.names[name] = None

    def remove(self, name: str) -> None:
        """Treat a name as one that did not exist before the scope, because its old object is
        gone.
        """
        self.names.pop(name, None)
        # Bound again, it may be at its old position with a new object.
        self._has_all_of_start = False

    def candidates_for_new_names(self) -> tuple[Any, ...]:
        """Return the names of the namespace among which all new ones are: those added since the
        start, or all names if an older one has been deleted.
        """
        names_now = tuple(self._namespace)
        if self._begin_as_at_start(names_now):
            return names_now[len(self.at_start) :]
        return names_now

    def missing(self) -> list[str]:
        """Return the outer names that no longer exist."""
        if self._begin_as_at_start(tuple(self._namespace)) and self._are_those_of_start():
            return []
        return list(filterfalse(self._namespace.__contains__, list(self.names)))

    def _begin_as_at_start(self, names_now: tuple[Any, ...]) -> bool:
        """Return True if ``names_now`` begins with the names of the start in their order: dicts
        keep their order, so none of them was deleted.
        """
        return self._has_all_of_start and begins_with(names_now, self.at_start)

    def _are_those_of_start(self) -> bool:
        """Return True if all outer names are names of the start."""
        is_made = "names" in vars(self)  # asking for it would make it
        if not is_made:
            return not self._saved_elsewhere
        return len(self.names) == len(self.at_start)


class Scope:
    """One open scope over ``namespace``.

    A name is *own* if the scope has bound it: its end deletes, restores or keeps it. An *outer*
    name is older than the scope. A scope *leaves* a name to other code that has bound it: the name
    counts as an outer one from then on. A *shared* name belongs to the notebook, because a cell has
    bound it by ``global``.

    Args:
        namespace: the cells' namespace, such as IPython's ``user_ns``.
        keep: names or globs of names to keep at the end; the caller may append to the list.
        drop_imports: delete the names of imported modules too.
        clock: yields growing numbers, the same iterator for all scopes over the namespace.
        saved_by_others: returns the objects that another thread's scopes will restore, one mapping
            for each scope.
    """

    def __init__(
        self,
        namespace: Namespace,
        *,
        keep: list[str] | None = None,
        drop_imports: bool = False,
        clock: Iterator[int] | None = None,
        saved_by_others: Callable[[], Iterable[Namespace]] = tuple,
    ) -> None:
        self._namespace = namespace
        self._keep = [] if keep is None else keep
        self._drop_imports = drop_imports
        self._saved_by_others = saved_by_others
        self._outer = OuterNames(namespace, saved_by_others())
        self._assigned: set[str] = set()
        """Names that the scope's code may bind by other statements than imports."""
        self._imported: set[str] = set()
        """Names that an ``import`` has bound, or may bind without a report."""
        self._also_assigned: set[str] = set()
        """Imported names that the same code may also have bound by another statement, unreported.
        """
        self._shared: set[str] = set()
        self._saved = SavedObjects(itertools.count() if clock is None else clock)
        self._before_statement: Namespace = {}
        """Old objects of the names that the running statement may bind."""
        self.outcome = Outcome()
        self.is_closed = False
        """True once its end has deleted, restored or kept all of its names."""

    @property
    def saved(self) -> Namespace:
        """Shadowed objects to be restored."""
        return self._saved.by_name

    @property
    def names_at_start(self) -> tuple[Any, ...]:
        """The names of the namespace at its start."""
        return self._outer.at_start

    def expect_bindings(self, bindings: Bindings, reported: Iterable[str] = ()) -> None:
        """Own the names that code of this scope may bind, as soon as they are bound.

        Args:
            bindings: the bindings in the code, which runs next.
            reported: the names whose bindings the code reports, so that its imports of them are
                recorded when they happen.
        """
        self._assigned |= bindings.assigned
        # No event tells which statement binds the other names last.
        imported = bindings.imported.difference(reported)
        assigned = bindings.assigned.difference(reported)
        self._imported = (self._imported - assigned) | imported
        self._also_assigned |= imported & assigned

    def shadow(self, name: str, value: object) -> None:
        """Save ``value``, the object that ``name`` had before this scope bound it, if ``name`` is
        an outer name whose object is not saved yet.

        In any case, the name no longer counts as unsure: it is known to be bound. Nor does it count
        as bound by an ``import``: if it was one, ``confirm`` says so.
        """
        if self._would_shadow(name):
            self._saved.add({name: value})
        self._saved.unsure_names.discard(name)
        self._imported.discard(name)

    def confirm(
        self, name: str, scopes: Sequence[Scope], *, is_import: bool, by_identity: bool
    ) -> None:
        """Record that a statement has bound ``name``, and save the object that it had before the
        statement (``_before_statement``).

        Args:
            name: the name.
            scopes: the nested scopes in which the code runs; this one is the last.
            is_import: True if an ``import`` has bound it.
            by_identity: True if the statement may have failed before it bound the name: it has
                bound it if the name refers to another object now.
        """
        objects_before = list[object]()
        for scope in reversed(scopes):  # several, if the statement has opened or ended a scope
            if name in scope._before_statement:
                objects_before.append(scope._before_statement.pop(name))
        # A missing name was bound, too: "except ... as name" unbinds it at its end, and ``del`` is
        # reported.
        if by_identity:
            is_unchanged = not objects_before or self._refers_to(name, objects_before[0])
            if is_unchanged:
                return
        if objects_before:
            self.shadow(name, objects_before[0])
        if is_import:
            self._imported.add(name)
            self._also_assigned.discard(name)
        else:
            self._imported.discard(name)

    def _refers_to(self, name: str, value: object) -> bool:
        """Return True if ``name`` exists and its object is ``value``."""
        return self._namespace.get(name, _MISSING) is value

    def overwritten_objects(self) -> Namespace:
        """Return the saved objects by name, without those to which the names still refer, as after
        ``log += [x]``.
        """
        saved = self._saved.by_name
        return {name: old for name, old in saved.items() if not self._refers_to(name, old)}

    def save(self, names: Iterable[str]) -> list[str]:
        """Save the objects of the outer names among ``names`` before code may rebind them without a
        report; return the names that were not saved yet.
        """
        objects = Namespace()
        for name in names:
            value = self._namespace.get(name, _MISSING)
            if value is not _MISSING and self._would_shadow(name):
                objects[name] = value
        self._saved.add_unsure(objects)
        return list(objects)

    def save_all(self) -> None:
        """Save the objects of all outer names, for code that could not be analysed."""
        self.save(list(self._outer.names))

    def save_after_lost_event(self, event: str) -> None:
        """Save the objects of all outer names: ``event`` could not be recorded, and later ones may
        be lost as well.
        """
        word, imported_name = split_event(event)
        if word == HAS_IMPORTED:
            self._imported.add(imported_name)
        for name, value in self._before_statement.items():
            if self._would_shadow(name):
                self._saved.add_unsure({name: value})
        self._before_statement.clear()
        self.save_all()

    def unsave(self, names: Iterable[str]) -> None:
        """Undo ``save``: the code reports its bindings of ``names`` after all."""
        for name in names:
            self._saved.drop(name)

    def _would_shadow(self, name: str) -> bool:
        """Return True if binding ``name`` now would shadow an unsaved outer object."""
        return (
            name in self._outer.names
            and name not in self._saved.by_name
            and name not in self._shared
            and is_ownable(name)
        )

    def is_saved_by_others(self, name: str) -> bool:
        """Return True if the end of another thread's scope will restore ``name``: then it is no new
        name here.
        """
        return any(name in objects for objects in self._saved_by_others())

    def outer_among(self, names: set[str]) -> set[str]:
        """Return the outer names among ``names``."""
        return set(filter(is_ownable, filter(self._outer.names.__contains__, names)))

    def names_to_report(self, names: set[str]) -> set[str]:
        """Return the names among ``names`` whose bindings this scope's code must report: outer
        names and imports.

        When an outer name is bound, the scope saves its object. When an import is bound by another
        statement, as ``json`` in ``import json; json = 1``, it no longer counts as an import. Any
        other name is the scope's own, reported or not.
        """
        return self.outer_among(names) | names & self._imported

    def add_outer(self, names: set[str]) -> None:
        """Treat ``names`` as names from before the scope again: their deletion was undone.

        ``%%autofit`` does so between two tries. Without this, the scope would regard the names as
        its own, and delete them.
        """
        for name in names:
            self._outer.add(name)

    def share(self, names: Iterable[str]) -> None:
        """Leave ``names`` to the notebook for good: a cell has a top-level ``global`` statement
        with them. Objects that were saved for them are not restored.
        """
        self._shared.update(names)
        for name in names:
            self._saved.drop(name)

    def shared(self) -> list[str]:
        """Return the names that the scope's cells have bound in the notebook by ``global``."""
        existing = [name for name in sorted(self._shared) if name in self._namespace]
        return list(filter(is_ownable, existing))

    def leave_names(self, bound: Iterable[str], appeared: Iterable[str]) -> None:
        """Leave names to other code that runs at the same time, such as another subshell's.

        Args:
            bound: names that the other code has bound.
            appeared: names that are new since that code began. Those that this scope's own code
                may have bound stay its own.
        """
        names = {*bound, *set(appeared).difference(self._assigned, self._imported)}
        for name in names.intersection(self._namespace):
            self.leave(name)

    def leave(self, name: str) -> None:
        """Leave ``name`` to other code, which has bound it: the name counts as an outer one, so
        that this scope neither deletes it nor restores an object.

        If this scope's own code binds the name again, it shadows the other code's object.
        """
        if is_ownable(name):
            self._saved.drop(name)
            self._before_statement.pop(name, None)
            self._outer.add(name)

    def own_names(self) -> list[str]:
        """Return the names that the end of this scope would delete, restore or keep."""
        candidates = list(self._saved.by_name)
        later_names = self._outer.candidates_for_new_names()
        if later_names:
            # In C: there may be 100,000 names, hardly any of them this scope's.
            new_names = filterfalse(self._outer.names.__contains__, later_names)
            candidates += filter(is_ownable, new_names)
        return [name for name in candidates if self._is_own(name)]

    def names_to_delete(self, own_names: list[str]) -> list[str]:
        """Return the ``own_names`` that the end of this scope deletes or restores."""
        return [name for name in own_names if not self.stays(name)]

    def _is_own(self, name: str) -> bool:
        """Return True if this scope has bound ``name``: its old object is saved, or the name did
        not exist before the scope.
        """
        if name in self._shared:
            return False
        is_bound_by_code = name in self._assigned or name in self._imported
        if not is_bound_by_code and LIBRARYS_OWN.fullmatch(name):
            return False
        saved = self._saved.by_name
        if name not in saved or self._namespace.get(name) is not saved[name]:
            return True
        # It refers to its old object: no code has bound it after all, or to this very object, as
        # ``x = x`` does. There is nothing to restore, but it may be a name to keep.
        return name not in self._saved.unsure_names and self._matches_keep(name)

    def stays(self, name: str) -> bool:
        """Return True if the end of this scope keeps ``name`` with its new object."""
        return self._matches_keep(name) or self._stays_as_import(name)

    def _stays_as_import(self, name: str) -> bool:
        """Return True if an ``import`` has bound ``name``, unless imports are to be dropped."""
        if self._drop_imports or name not in self._imported:
            return False
        # "try: import x / except ImportError: x = None" both imports and assigns.
        is_module = is_instance(self._namespace.get(name), ModuleType)
        return name not in self._also_assigned or is_module

    def _matches_keep(self, name: str) -> bool:
        """Return True if ``name`` is one of the names to keep, or matches a glob among these."""
        return any(fnmatchcase(name, pattern) for pattern in self._keep)

    def unmatched_keep(self) -> list[str]:
        """Return the names and globs in ``keep`` that match no name at all."""
        if not self._keep:
            return []
        names = [name for name in list(self._namespace) if is_ownable(name)]
        unmatched = list[str]()
        for pattern in self._keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                unmatched.append(pattern)
        return unmatched

    def misspelt_keep(self) -> list[str]:
        """Return the names in ``keep``, without globs, that neither exist nor were ever bound."""
        if not self._keep:
            return []
        names_in_code = self._assigned | self._imported | self._outer.names.keys()
        plain_names = filter(str.isidentifier, self.unmatched_keep())
        return [name for name in plain_names if name not in names_in_code]

    def close(
        self,
        enclosing: Scope | None,
        own_names: Iterable[str] | None = None,
        *,
        is_handle: Callable[[object], bool] = lambda value: False,
        other_scopes: Sequence[Scope] = (),
    ) -> Outcome:
        """Delete, restore and keep names. An interrupted call can be repeated, and continues where
        it stopped.

        Args:
            enclosing: the scope around this one, which inherits kept and imported names.
            own_names: its own names, if the caller already has them.
            is_handle: returns True for the object whose names must stay, such as the experiment
                that the user holds; it compares by identity.
            other_scopes: the open scopes of other threads over the same names.
        """
        self._leave_new_names(other_scopes)
        if own_names is None:
            own_names = self.own_names()
        for name in own_names:
            is_outer = name in self._outer.names and name not in self._saved
            if is_outer or name not in self._namespace:
                continue  # a thread or a finaliser has deleted it, or bound it for the notebook
            if self._matches_keep(name):
                self._keep_name(name, enclosing, other_scopes)
            elif is_handle(self._namespace.get(name)):
                self._saved.drop(name)
            else:
                self._end_name(name, enclosing, other_scopes)
        for name in list(self._saved.by_name):
            self._restore(name, other_scopes)
        self.is_closed = True
        return self.outcome

    def _end_name(self, name: str, enclosing: Scope | None, other_scopes: Sequence[Scope]) -> None:
        """Restore or delete one of the scope's names, unless it stays as an import."""
        if name in self._saved:
            self._restore(name, other_scopes)
        elif not self._stays_as_import(name):
            self.outcome.deleted.append(name)
            self._namespace.pop(name, None)
        elif enclosing is not None:
            enclosing._imported.add(name)

    def _leave_new_names(self, other_scopes: Sequence[Scope]) -> None:
        """Leave this scope's new names to the scopes of other threads that have shadowed them.

        Example: this scope binds ``x = 1``, a new name. The other scope then binds ``x = 2``, and
        saves 1. This scope leaves ``x`` alone, and the other one deletes it when it ends.
        """
        for other in other_scopes:
            for name in list(other._saved.by_name):
                if name in self._outer.names or name in self._shared or self.stays(name):
                    continue
                del other._saved.by_name[name]
                other._outer.remove(name)
                self._outer.add(name)

    def restore_all(self) -> None:
        """Restore all shadowed objects without deleting names, because the scope cannot be closed.
        Names to keep stay with their new objects.
        """
        for name, value in list(self._saved.by_name.items()):
            if name not in self._namespace or not self._matches_keep(name):
                self._namespace[name] = value

    def _restore(self, name: str, other_scopes: Sequence[Scope]) -> None:
        """Give ``name`` its old object back: now, or at the end of another thread's scope that has
        bound the name later.
        """
        old_object = self._saved.by_name[name]
        must_restore = self._pass_on(name, old_object, other_scopes)
        if must_restore and not self._refers_to(name, old_object):
            self._namespace[name] = old_object
            self.outcome.restored.append(name)
        del self._saved.by_name[name]

    def _pass_on(self, name: str, old_object: object, other_scopes: Sequence[Scope]) -> bool:
        """Pass ``old_object`` on to the first of the other threads' scopes that have bound ``name``
        later, if there is one; return True if this scope has to restore the object now.

        Example: this scope binds ``x = 1``. The other scope then binds ``x = 2``, and saves 1. Once
        this scope has ended, the other one must restore the object from before both. Until then,
        ``x`` refers to 2.
        """
        saved_by_next = self._saved.earliest_after(name, [other._saved for other in other_scopes])
        if saved_by_next is None:
            return True
        # The next scope has saved this scope's object. If the name still refers to it, that scope
        # has not bound the name yet.
        refers_to_ours = saved_by_next.is_unchanged(name, self._namespace)
        saved_by_next.inherit(name, old_object, self._saved)
        return refers_to_ours

    def _keep_name(self, name: str, enclosing: Scope | None, other_scopes: Sequence[Scope]) -> None:
        """Keep ``name`` with its new object: leave it to the enclosing scope, or to the notebook if
        there is none.
        """
        if name not in self.outcome.kept:
            self.outcome.kept.append(name)
        if enclosing is None:
            self._leave_to_notebook(name, other_scopes)
        self._outer.add(name)
        has_shadowed = name in self._saved
        old_object = self._saved.by_name.pop(name, None)
        if enclosing is None:
            return
        enclosing._adopt(name)
        if has_shadowed and enclosing._would_shadow(name):
            enclosing._saved.inherit(name, old_object, self._saved)

    def _leave_to_notebook(self, name: str, other_scopes: Sequence[Scope]) -> None:
        """Prevent other threads' scopes from deleting a name that this one keeps, unless they have
        bound it later.
        """
        for other in other_scopes:
            if not other._saved.is_later(name, self._saved):
                other.leave(name)

    def _adopt(self, name: str) -> None:
        """Own a name that an inner scope has bound and keeps: the end of this scope deletes it,
        unless this one keeps it, too.
        """
        self._assigned.add(name)
        self._imported.discard(name)  # it may have imported an earlier object of this name

    def record_event(self, event: str, scopes: Sequence[Scope]) -> bool:
        """Record an event of this scope's code, such as ``has bound x``; return True if repetitions
        of it change nothing.

        Args:
            event: one of the words in instrumenting.py and a name.
            scopes: the nested scopes in which the code runs; this one is the innermost and last.
        """
        word, name = split_event(event)
        value = self._namespace.get(name, _MISSING)
        if word in _AFTER_STATEMENT:
            is_import = word == HAS_IMPORTED
            self.confirm(name, scopes, is_import=is_import, by_identity=word == HAS_ENDED)
        elif value is _MISSING:  # after ``del``, or before a new name is bound
            record_deleted(scopes, name)
            return False
        elif word == BINDS:
            self.shadow(name, value)
        elif word == MAY_BIND and (self._would_shadow(name) or name in self._imported):
            self._before_statement[name] = value
        # Once the old object is saved, and the name is no import, a further binding of it changes
        # nothing: in ``for i in range(9): total = i``, one event of ``total`` is enough.
        must_save = self._would_shadow(name)
        return not must_save and name not in self._imported

    def _deletion_loses_outer(self, name: str) -> bool:
        """Return True if a deletion of ``name``, which is still an outer name, has deleted its
        outer object for good: neither this scope nor another thread's will restore it.
        """
        return self._would_shadow(name) and not self.is_saved_by_others(name)

    def _forget_needless_saves(self) -> None:
        """Forget the objects that were saved for a statement, or for code that did not bind the
        names after all.
        """
        self._before_statement.clear()
        self._saved.drop_unbound(self._namespace)


def record_deleted(scopes: Sequence[Scope], name: str) -> None:
    """Record in nested scopes that ``name`` is deleted, from the innermost one outwards.

    Each scope that has not bound it has lost an outer name: bound again, it is a new one. The first
    scope that has bound it has only lost its own object, and the scopes around that one have lost
    nothing.
    """
    for scope in reversed(scopes):
        scope._before_statement.pop(name, None)
        scope._imported.discard(name)
        if not scope._deletion_loses_outer(name):
            return
        scope._outer.remove(name)


def forget_needless_saves(scopes: Sequence[Scope]) -> None:
    """Forget the objects that nested ``scopes`` have saved needlessly, and record the names that
    were deleted without a report. Call it when none of their code runs.
    """
    for scope in scopes:
        scope._forget_needless_saves()
    missing_names = set[str]().union(*(scope._outer.missing() for scope in scopes))
    for name in missing_names:
        record_deleted(scopes, name)

"""Adds scopes to a namespace that has none: which names a scope owns, and what becomes of them at its end.

A scope behaves like a Python function: what it binds is deleted at the end, and what that shadowed is back.
It knows names only, nothing of memory or of IPython.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import filterfalse
from operator import is_
from types import ModuleType
from typing import Any

from ipygpumem.introspect import is_instance
from ipygpumem.scopes.bindings import Bindings
from ipygpumem.scopes.instrumenting import BINDS, HAS_BOUND, HAS_ENDED, HAS_IMPORTED, MAY_BIND

Namespace = dict[str, Any]

_SHELLS_OWN = re.compile(
    r"In|Out|exit|quit|get_ipython|_ih|_oh|_dh|_sh|_exit_code|_+|_i+|_i\d+|_\d+|__(name|doc|builtin|builtins|"
    r"nonzero|package|loader|spec|file|session|warningregistry)__|_VSCODE\w*|__VSCODE\w*|_jupyterlab_variableinspector\w*"
)
"""Names that IPython or a front-end keeps in the user's namespace: never a scope's."""
_CONFIRMS = {word[:-1] for word in (HAS_BOUND, HAS_IMPORTED, HAS_ENDED)}
_LIBRARYS_OWN = re.compile(r"__\w+|\w*_\d+_c\d+(/.*)?")
"""Names that are a library's unless a cell binds them: torch.compile keeps compiled code there, and ends it itself."""


def is_ownable(name: object) -> bool:
    """Whether a scope may own ``name``: a string that neither IPython nor a front-end uses itself."""
    return type(name) is str and _SHELLS_OWN.fullmatch(name) is None


@dataclass
class Outcome:
    """What became of a scope's names. Filled while the scope closes, so that an interrupt loses nothing."""

    deleted: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


class Scope:
    """One open scope over ``namespace``.

    Args:
        namespace: the names that cells see, such as IPython's ``user_ns``.
        keep: names or globs whose values stay at the end; the caller may add to the list later.
        drop_imports: delete the names of imported modules too.
    """

    def __init__(self, namespace: Namespace, *, keep: list[str] | None = None, drop_imports: bool = False) -> None:
        self._namespace = namespace
        self._keep = keep if keep is not None else []
        self._drop_imports = drop_imports
        self._first = tuple(namespace)
        self._outer = dict.fromkeys(self._first)
        """Names that were there before, as far as is known; the collector does not look into such a dict."""
        self._assigned: set[str] = set()
        self._imported: set[str] = set()
        self._either: set[str] = set()
        """Imports among them that the same code may have bound to something else, and which it does not report."""
        self._shared: set[str] = set()
        self.waiting: Namespace = {}
        """Shadowed objects that wait to be restored."""
        self._unsure: set[str] = set()
        """Names among them that code may have bound which does not report it: see ``settle``."""
        self._maybe: Namespace = {}
        """The objects of names that the running statement may bind."""
        self.outcome = Outcome()

    def note(self, bindings: Bindings, reported: Iterable[str] = ()) -> None:
        """Note the names that code of this scope may bind; it reports its imports of those ``reported`` itself."""
        self._assigned |= bindings.assigned
        imported, assigned = bindings.imported.difference(reported), bindings.assigned.difference(reported)
        self._imported = self._imported - assigned | imported
        self._either = self._either | imported & assigned

    def shadow(self, name: str, value: object) -> None:
        """Keep ``value``, which ``name`` had before this scope bound it."""
        if self._shadows(name):
            self.waiting[name] = value
        self._unsure.discard(name)
        self._imported.discard(name)

    def confirm(self, name: str, scopes: Sequence[Scope], *, is_import: bool, by_identity: bool) -> None:
        """Note that a statement bound ``name``, or that it may have, which the object shows that the name has now."""
        # Entering the statement may have opened a scope or ended one.
        old = [scope._maybe.pop(name) for scope in reversed(scopes) if name in scope._maybe]
        if by_identity and not (old and self._namespace.get(name, old[0]) is not old[0]):
            return
        if old:
            self.shadow(name, old[0])
        if is_import:
            self._imported.add(name)
            self._either.discard(name)
        else:
            self._imported.discard(name)

    def save(self, names: Iterable[str]) -> list[str]:
        """Keep what ``names`` shadow, before code may bind them; return those that were not kept yet."""
        saved = [name for name in names if self._shadows(name) and name in self._namespace]
        self._unsure.update(saved)
        self.waiting.update((name, self._namespace[name]) for name in saved)
        return saved

    def save_all(self) -> None:
        """Like ``save`` for code that nobody has seen: it may bind any name."""
        self.save(list(self._outer))

    def missed(self, event: str) -> None:
        """Keep all that code may have bound or may bind: what it reports may be lost, as ``event`` was."""
        word, name = event.rsplit(" ", 1)
        if word == HAS_IMPORTED[:-1]:
            self._imported.add(name)
        maybe = {name: value for name, value in self._maybe.items() if self._shadows(name)}
        self.waiting.update(maybe)
        self._unsure.update(maybe)
        self._maybe.clear()
        self.save_all()

    def unsave(self, names: Iterable[str]) -> None:
        """Take back ``save``: the code reports these names itself."""
        for name in names:
            self.waiting.pop(name, None)

    def _forget_unbound(self) -> None:
        """Forget what was kept of names that the code did not bind after all."""
        while self._unsure:
            name = self._unsure.pop()
            if name in self.waiting and name in self._namespace and self._namespace[name] is self.waiting[name]:
                del self.waiting[name]

    def _shadows(self, name: str) -> bool:
        """Whether binding ``name`` now would shadow an outer object that is not kept yet."""
        return name in self._outer and name not in self.waiting and name not in self._shared and is_ownable(name)

    def outer_among(self, names: set[str]) -> set[str]:
        """Return those of ``names`` that were there before this scope, as far as it knows."""
        return set(filter(is_ownable, filter(self._outer.__contains__, names)))

    def to_report(self, names: set[str]) -> set[str]:
        """Return the ``names`` whose bindings code of this scope must report."""
        return self.outer_among(names) | names & self._imported

    def regain(self, names: set[str]) -> None:
        """Take ``names`` as outer ones again: their deletion was undone."""
        self._outer.update(dict.fromkeys(names))

    def share(self, names: Iterable[str]) -> None:
        """Leave ``names`` to the notebook: ``global`` stood at the top level of a cell."""
        self._shared.update(names)
        for name in names:
            self.waiting.pop(name, None)

    def leave_to_others(self, bound: Iterable[str], appeared: Iterable[str]) -> None:
        """Leave names to other code that runs at the same time, such as another subshell's.

        Args:
            bound: what that code binds.
            appeared: what has appeared meanwhile, which this scope's own code may have bound as well.
        """
        names = {*bound, *set(appeared).difference(self._assigned, self._imported)}
        for name in filter(is_ownable, names.intersection(self._namespace)):
            self.waiting.pop(name, None)
            self._outer[name] = None

    def own_names(self) -> list[str]:
        """Return the names that the end of this scope would delete, restore or keep."""
        # There may be 100,000 names, and hardly one of them is this scope's.
        new = filter(is_ownable, filterfalse(self._outer.__contains__, self._later_names()))
        return [name for name in (*self.waiting, *new) if self._is_own(name)]

    def _later_names(self) -> tuple[Any, ...]:
        """Return the notebook's names without those that it began with, if these are all still there."""
        names, first = tuple(self._namespace), len(self._first)
        return names[first:] if self._begins_with(self._first, names) else names

    def gone(self) -> list[str]:
        """Return which of the outer names are not there any more."""
        if len(self._outer) == len(self._first) and self._begins_with(self._first, tuple(self._namespace)):
            return []
        return list(filterfalse(self._namespace.__contains__, list(self._outer)))

    @staticmethod
    def _begins_with(first: tuple[Any, ...], names: tuple[Any, ...]) -> bool:
        """Whether ``names`` begin with ``first``: a dict keeps its order. Twice as fast as looking each one up."""
        return len(names) >= len(first) and all(map(is_, names, first))

    def names_to_delete(self, own: list[str]) -> list[str]:
        """Return those of its ``own`` names whose values the end of this scope lets go."""
        return [n for n in own if not self._matches_keep(n) and not self._stays_as_import(n)]

    def _is_own(self, name: str) -> bool:
        if name in self._shared or (_LIBRARYS_OWN.fullmatch(name) and name not in self._assigned | self._imported):
            return False
        # What waits may not have been bound since: code may have been expected to bind it and did not.
        return name not in self.waiting or self._namespace.get(name) is not self.waiting[name]

    def _stays_as_import(self, name: str) -> bool:
        if self._drop_imports or name not in self._imported:
            return False
        # "try: import x / except ImportError: x = None" both imports and assigns.
        is_module = is_instance(self._namespace.get(name), ModuleType)
        return name not in self._either or is_module

    def _matches_keep(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._keep)

    def unmatched_keep(self) -> list[str]:
        """Return the patterns of ``keep`` that match no name at all."""
        names = [name for name in list(self._namespace) if is_ownable(name)] if self._keep else []
        return [pattern for pattern in self._keep if not any(fnmatchcase(name, pattern) for name in names)]

    def misspelt_keep(self) -> list[str]:
        """Return the plain names in ``keep`` that neither exist nor occur in the scope's code."""
        known = self._assigned | self._imported | self._outer.keys()
        return [pattern for pattern in self.unmatched_keep() if pattern.isidentifier() and pattern not in known]

    def close(
        self,
        enclosing: Scope | None,
        own: Iterable[str] | None = None,
        *,
        spare: Callable[[object], bool] = lambda value: False,
    ) -> Outcome:
        """Delete, restore and keep. An interrupted call can be repeated: it goes on where it stopped.

        Args:
            enclosing: the scope around this one, which inherits what is kept and imported.
            own: its own names, if somebody has just asked for them.
            spare: says of a value (by identity) that its name must stay, as for the experiment's own handle.
        """
        namespace, outcome = self._namespace, self.outcome
        for name in self.own_names() if own is None else own:
            if name not in namespace or (name in self._outer and name not in self.waiting):
                continue  # a thread or a finaliser was faster
            if self._matches_keep(name):
                if name not in outcome.kept:
                    outcome.kept.append(name)
                self._hand_over(name, enclosing)
            elif spare(namespace[name]):
                self.waiting.pop(name, None)
            elif name in self.waiting:
                self._restore(name)
            elif self._stays_as_import(name):
                if enclosing is not None:
                    enclosing._imported.add(name)
            else:
                outcome.deleted.append(name)
                namespace.pop(name, None)
        for name in list(self.waiting):
            self._restore(name)
        return outcome

    def restore_all(self) -> None:
        """Restore what names have shadowed, and delete nothing: the scope cannot be closed."""
        for name, value in list(self.waiting.items()):
            if not self._matches_keep(name):
                self._namespace[name] = value

    def _restore(self, name: str) -> None:
        if name not in self._namespace or self._namespace[name] is not self.waiting[name]:
            self._namespace[name] = self.waiting[name]
            self.outcome.restored.append(name)
        del self.waiting[name]

    def _hand_over(self, name: str, enclosing: Scope | None) -> None:
        """Make a kept name the enclosing scope's, which will restore what this scope had shadowed."""
        self._outer[name] = None
        shadowed = name in self.waiting
        old = self.waiting.pop(name, None)
        if enclosing is None:
            return
        enclosing._assigned.add(name)
        if shadowed and name in enclosing._outer and name not in enclosing.waiting and name not in enclosing._shared:
            enclosing.waiting[name] = old


def note_event(scopes: Sequence[Scope], what: str) -> bool:
    """Note an event of code in the innermost of nested ``scopes``; return True if no repetition need be noted.

    Args:
        scopes: the scopes in which the code runs, innermost last.
        what: one of the words of instrumenting.py and a name.
    """
    scope, (word, name) = scopes[-1], what.rsplit(" ", 1)
    if word in _CONFIRMS:
        scope.confirm(name, scopes, is_import=word == HAS_IMPORTED[:-1], by_identity=word == HAS_ENDED[:-1])
    elif name not in scope._namespace:
        let_go(scopes, name)
        return False
    elif word == BINDS[:-1]:
        scope.shadow(name, scope._namespace[name])
    elif word == MAY_BIND[:-1] and (scope._shadows(name) or name in scope._imported):
        scope._maybe[name] = scope._namespace[name]
    return not scope._shadows(name) and name not in scope._imported


def let_go(scopes: Sequence[Scope], name: str) -> None:
    """Note that ``name`` is gone: an outer name is new from then on, to each scope that has not bound it itself."""
    for scope in reversed(scopes):
        scope._maybe.pop(name, None)
        scope._imported.discard(name)
        if not scope._shadows(name):
            return
        scope._outer.pop(name, None)
        scope._first = ()  # bound anew it may stand where it stood, and is another


def settle(scopes: Sequence[Scope]) -> None:
    """Once nothing runs in nested ``scopes``: forget what was kept for nothing, and what is gone."""
    for scope in scopes:
        scope._maybe.clear()
        scope._forget_unbound()
    for name in {name for scope in scopes for name in scope.gone()}:
        let_go(scopes, name)

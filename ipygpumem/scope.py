"""Scopes over a namespace that has none: which names a scope owns, and what becomes of them at its end.

A scope behaves like a Python function: what it binds is deleted at the end, and what that shadowed is back.
It knows names only, nothing of memory or of IPython.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from ipygpumem.bindings import Bindings
from ipygpumem.kinds import is_kind

Namespace = dict[str, Any]

_SHELLS_OWN = re.compile(
    r"In|Out|exit|quit|get_ipython|_ih|_oh|_dh|_sh|_exit_code|_+|_i+|_i\d+|_\d+|__(name|doc|builtin|builtins|"
    r"nonzero|package|loader|spec|file|session|warningregistry)__|_VSCODE\w*|__VSCODE\w*|_jupyterlab_variableinspector\w*"
)
"""Names that IPython or a front-end keeps in the user's namespace: never a scope's."""


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
        self._outer = {name for name in list(namespace) if is_ownable(name)}
        self._assigned: set[str] = set()
        self._imported: set[str] = set()
        self._shared: set[str] = set()
        self.waiting: Namespace = {}
        """Shadowed objects that wait to be restored."""
        self.outcome = Outcome()

    def before_code(self, bindings: Bindings) -> Pending:
        """Note what the code that runs next will bind, and save what that shadows."""
        self._assigned |= bindings.assigned
        self._imported |= bindings.imported
        pending = Pending()
        for name in bindings.bound:
            if name not in self._outer or name in self.waiting or name in self._shared:
                continue
            if name not in self._namespace:
                continue
            if name in bindings.deleted_first:
                # "del x" comes before "x = ...": the old object must not be kept alive for us.
                pending.dying[name] = id(self._namespace[name])
            else:
                self.waiting[name] = self._namespace[name]
                pending.saved.append(name)
        return pending

    def before_unknown_code(self) -> Pending:
        """Like ``before_code`` for code whose tree was not seen: it may bind any name."""
        names = {name for name in self._outer if name in self._namespace}
        return self.before_code(Bindings(assigned=names))

    def share(self, names: Iterable[str]) -> None:
        """Leave ``names`` to the notebook: ``global`` stood at the top level of a cell."""
        self._shared.update(names)
        for name in names:
            self.waiting.pop(name, None)

    def after_code(self, pending: Pending, *, failed: bool) -> None:
        """Forget what was saved for nothing, and old names that the code deleted before it bound them."""
        namespace = self._namespace
        for name in pending.saved:
            if name in self.waiting and name in namespace and namespace[name] is self.waiting[name]:
                del self.waiting[name]  # the code did not bind it after all
        for name, address in pending.dying.items():
            # After an error the same address means that the deletion was not reached: a new object could only have it
            # by chance, and then a name too many stays, which loses nothing.
            if not failed or name not in namespace or id(namespace[name]) != address:
                self._outer.discard(name)

    def own_names(self) -> list[str]:
        """Return the names that the end of this scope would delete, restore or keep."""
        # The pattern last: there may be 100,000 names, and hardly one of them is this scope's.
        names = [name for name in list(self._namespace) if type(name) is str and self._is_own(name)]
        return [name for name in names if is_ownable(name)]

    def names_to_delete(self) -> list[str]:
        """Return the names whose values the end of this scope lets go."""
        return [n for n in self.own_names() if not self._matches_keep(n) and not self._stays_as_import(n)]

    def _is_own(self, name: str) -> bool:
        if name in self._shared:
            return False
        if name in self.waiting:  # and bound since: code may have been expected to bind it and did not
            return self._namespace.get(name) is not self.waiting[name]
        return name not in self._outer

    def _stays_as_import(self, name: str) -> bool:
        if self._drop_imports or name not in self._imported:
            return False
        # "try: import x / except ImportError: x = None" both imports and assigns.
        is_module = is_kind(self._namespace.get(name), ModuleType)
        return name not in self._assigned or is_module

    def _matches_keep(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._keep)

    def unmatched_keep(self) -> list[str]:
        """Return the patterns of ``keep`` that match no name at all."""
        names = [name for name in list(self._namespace) if is_ownable(name)] if self._keep else []
        return [pattern for pattern in self._keep if not any(fnmatchcase(name, pattern) for name in names)]

    def close(self, enclosing: Scope | None, *, spare: Callable[[object], bool] = lambda value: False) -> Outcome:
        """Delete, restore and keep. An interrupted call can be repeated: it goes on where it stopped.

        Args:
            enclosing: the scope around this one, which inherits what is kept and imported.
            spare: says of a value (by identity) that its name must stay, as for the experiment's own handle.
        """
        namespace, outcome = self._namespace, self.outcome
        for name in self.own_names():
            if name not in namespace:  # a thread or a finaliser was faster
                continue
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

    def _restore(self, name: str) -> None:
        if name not in self._namespace or self._namespace[name] is not self.waiting[name]:
            self._namespace[name] = self.waiting[name]
            self.outcome.restored.append(name)
        del self.waiting[name]

    def _hand_over(self, name: str, enclosing: Scope | None) -> None:
        """Make a kept name the enclosing scope's, which will restore what this scope had shadowed."""
        self._outer.add(name)
        shadowed = name in self.waiting
        old = self.waiting.pop(name, None)
        if enclosing is None:
            return
        enclosing._assigned.add(name)
        if shadowed and name in enclosing._outer and name not in enclosing.waiting and name not in enclosing._shared:
            enclosing.waiting[name] = old


@dataclass
class Pending:
    """What ``before_code`` did, for ``after_code`` to settle."""

    saved: list[str] = field(default_factory=list)
    dying: dict[str, int] = field(default_factory=dict)


def forget_gone(scopes: Sequence[Scope]) -> None:
    """Honour deletions in nested ``scopes``: an old name that is gone now is new if it ever comes back.

    A name that any of them will restore is not gone.
    """
    waiting = set().union(*(scope.waiting for scope in scopes))
    for scope in scopes:
        gone = scope._outer.difference(scope._namespace).difference(waiting)
        scope._outer.difference_update(gone)

"""Finds the scope whose names the running code binds, and prepares it.

A scope owns what its own cells bind. Its cells are those of the thread that opened it, since another subshell runs its
cells in a thread of its own, over the same names. On an engine of a cluster they are those of one client.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ipygpumem.introspect import text_of
from ipygpumem.notebook.cell import Cell, SeenCode
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.ipython.rewriting import our_magic
from ipygpumem.scopes.bindings import Bindings, bindings_of
from ipygpumem.scopes.instrumenting import HAS_DELETED, instrument
from ipygpumem.scopes.scope import Scope, note_lookup, settle

if TYPE_CHECKING:
    from ipygpumem.notebook.experiments.run import ExperimentRun

_MEASURES_LINES = re.compile(r"^%%memlines", re.MULTILINE)
"""In such a cell there must be no lines but the user's."""


class _OfCell:
    """What is known of a running cell."""

    def __init__(self) -> None:
        self.saved_early: list[str] = []
        """Names that the open scope keeps in case that the code does not come to note them."""
        self.names_before: set[str] | None = None
        """The notebook's names when it began, or when a scope of another thread did."""


class Listener(dict[str, None]):
    """What the code looks names up in (see instrumenting.py): those that need no further note are found at once."""

    def __init__(self, note: Callable[[str], bool]) -> None:
        super().__init__()
        self._note = note

    def guard(self, guarded: Callable[[str, Callable[[str], bool]], Callable[[str], bool]]) -> None:
        """Report a failure instead of raising it: the user's code is in the middle of a statement."""
        self._note = guarded("names", self._note)

    def __missing__(self, key: str) -> None:
        __tracebackhide__ = True  # a Ctrl-C may strike here
        if self._note(key):
            self[key] = None


class Names:
    """The open scopes of one shell, and the code that runs in them."""

    def __init__(self, context: Context, experiments: list[ExperimentRun]) -> None:
        self._context = context
        self._cells = context.cells
        self._open = experiments
        self.listener = Listener(self._noted)

    def here(self, like: ExperimentRun | None = None) -> list[ExperimentRun]:
        """Return the open experiments of this thread and client, or of another's, innermost last."""
        if not self._open:
            return []
        thread, client = (like.thread, like.client) if like else (threading.get_ident(), client_of(self._context.shell))
        return [one for one in self._open if one.thread == thread and one.client == client]

    def _noted(self, key: str) -> bool:
        """Take what the code notes; return whether it need not note it again."""
        scopes = [experiment.scope for experiment in self.here()]
        if not scopes:
            return False
        note_lookup(scopes, key)
        # Deletions come each time; and another thread's code may look up the same.
        return not key.startswith(HAS_DELETED) and len(scopes) == len(self._open)

    # -- code -------------------------------------------------------------------------------------------------

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Note code that runs next in the innermost running cell; see ``Part``."""
        running, here = self._cells.running(), self.here()
        if not running:  # silent code, such as a front-end's own
            for experiment in [one for one in self._open if one not in here]:
                experiment.scope.share(bindings_of(tree).bound)
            return
        cell = running[-1]
        opens = our_magic(tree.body[0]) == "experiment" if getattr(tree, "body", None) else False
        noted = frozenset[str]()
        if may_change and not is_timed:
            noted = self._instrument(tree, text_of(getattr(cell.info, "raw_cell", None)), opens=opens)
        code = SeenCode(tree, noted)
        cell.code.append(code)
        if here:
            bindings = code.bindings()
            for experiment in here:
                experiment.scope.share(bindings.shared)
            if may_change:
                here[-1].scope.unsave(cell.of(_OfCell).saved_early)
            # A first line %%experiment opens a scope of its own for all that comes.
            saved = [] if opens or is_timed else self._expect(here[-1].scope, bindings, noted)
            cell.of(_OfCell).saved_early = [] if may_change else saved

    def _instrument(self, tree: Any, source: str, *, opens: bool) -> frozenset[str]:
        """Let the code of a cell note the names that a scope may have to know, and return them."""
        here = self.here()
        may_open_later = "experiment" in (source.lstrip().partition("\n")[2] if opens else source)
        if not (opens or here or may_open_later) or _MEASURES_LINES.search(source):
            return frozenset()
        found = bindings_of(tree)
        names = (found.bound | found.deleted) - found.shared
        if opens and not may_open_later:
            names &= self._context.namespace.keys()  # what is not there yet will be the scope's
        elif not may_open_later:
            names = here[-1].scope.outer_among(names)
        if names:
            instrument(tree, frozenset(names))
        return frozenset(names)

    def _expect(self, scope: Scope, bindings: Bindings, noted: Iterable[str]) -> list[str]:
        """Prepare ``scope`` for code; return the names saved because the code does not note them."""
        self.listener.clear()
        scope.note(bindings)
        return scope.save(bindings.bound.difference(noted))

    def expect_running_code(self, experiment: ExperimentRun) -> None:
        """Prepare a scope that becomes the innermost for what the running code will bind."""
        self.listener.clear()
        for code in [code for cell in self._cells.running(experiment.thread) for code in cell.code]:
            bindings = code.bindings()
            experiment.scope.share(bindings.shared)
            self._expect(experiment.scope, bindings, code.noted)

    # -- cells ------------------------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Note the names if scopes of others are open: new ones may be the cell's."""
        if self._open and len(self.here()) < len(self._open):
            self._note_names(cell)

    def scope_begins(self, experiment: ExperimentRun) -> None:
        """Prepare a new scope for the code that runs already, here and in other threads."""
        self.expect_running_code(experiment)
        if not self._cells.running():
            experiment.scope.save_all()
        for cell in self._cells.of_others(experiment.thread):
            self._note_names(cell)

    def _note_names(self, cell: Cell) -> None:
        known = cell.of(_OfCell)
        if known.names_before is None:
            known.names_before = set(self._context.namespace)

    def cell_ends(self, cell: Cell) -> None:
        """Leave to the cell what it has bound beside the scopes of others; settle its own."""
        self.listener.clear()
        here = self.here()
        for experiment in self._open:
            if experiment not in here:
                self._leave_to(cell, experiment)
                if cell.number is not None:
                    experiment.outputs_at_start.keys.add(cell.number)
        if here and not self._cells.running():
            settle([experiment.scope for experiment in here])

    def scope_ends(self, experiment: ExperimentRun) -> None:
        """Leave to running cells of other threads what they have bound."""
        self.listener.clear()
        for cell in self._cells.of_others(experiment.thread):
            self._leave_to(cell, experiment)

    def _leave_to(self, cell: Cell, experiment: ExperimentRun) -> None:
        bound = set().union(*(code.bindings().bound for code in cell.code))
        before = cell.of(_OfCell).names_before
        appeared = self._context.namespace.keys() - before if before is not None else ()
        experiment.scope.leave_to_others(bound, appeared)


def client_of(shell: Any) -> str | None:
    """Return which client's code runs now on an engine of a cluster; None elsewhere: front-ends share their kernel."""
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(kernel, "engine_id"):
        return None
    found: str | None = kernel.get_parent("shell").get("header", {}).get("session")
    return found

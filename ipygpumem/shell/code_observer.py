"""Observes the code of cells, and records in the open scopes which names it binds or may bind.

IPython's hooks call ``code_seen`` with the syntax tree of each cell before it runs. The code is
changed so that it reports its bindings (``scope/instrumenting.py``), and ``_record_binding`` passes
each report on to the scope around the code.

A scope owns the names that its own cells bind. Its cells run in the thread that opened it, because
each subshell runs its cells in its own thread, over the same names. On an engine of a cluster its
cells come from one client.
"""

from __future__ import annotations

import re
from threading import get_ident, main_thread
from typing import Any, Protocol, TypeVar

from ipygpumem.heap.knowledge.frames import names_in_threads
from ipygpumem.scope.bindings import Bindings, bindings_of
from ipygpumem.scope.instrumenting import (
    BINDING_WORDS,
    HAS_ENDED,
    MAY_BIND,
    BindingRecorder,
    instrument,
    split_event,
)
from ipygpumem.scope.scope import Scope, forget_needless_saves
from ipygpumem.shell.cell import Cell, SeenCode
from ipygpumem.shell.context import ShellContext
from ipygpumem.shell.ipython.rewriting import our_magic
from ipygpumem.shell.ipython.sources import has_subshells, is_in_cell

_NOT_BOUND = object()
"""Stands for the object of a name that does not exist."""
_MEASURES_LINES = re.compile(r"^%%memlines", re.MULTILINE)
"""Matches cells that are not instrumented: it would skew line costs."""


class HasScope(Protocol):
    """The part of an open experiment that the observer of code uses."""

    thread: int
    """The thread whose cells belong to it."""
    client: str | None
    """On an engine of a cluster, the only client whose cells belong to it."""

    @property
    def scope(self) -> Scope:
        """Its names."""


T = TypeVar("T", bound=HasScope)


class OpenExperiments(list[T]):
    """The open experiments of one shell, in the order in which they were opened."""

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self._shell = shell

    def here(self, like: HasScope | None = None) -> list[T]:
        """Return the experiments around the calling code, innermost last; with ``like``, those of
        the thread and client of that experiment.
        """
        if not self:
            return []
        if like is None:
            thread = get_ident()
            client = client_of(self._shell)
        else:
            thread = like.thread
            client = like.client
        return [item for item in self if item.thread == thread and item.client == client]

    def saved_elsewhere(self, thread: int, client: str | None) -> list[dict[str, Any]]:
        """Return the objects that scopes of other threads or other clients will restore: for each
        such scope, its saved objects by name.
        """
        return [item.scope.saved for item in self if item.thread != thread or item.client != client]


def client_of(shell: Any) -> str | None:
    """Return the client whose code runs on this engine of a cluster.

    None in a kernel, which all front-ends share.
    """
    kernel: Any = getattr(shell, "kernel", None)
    if not hasattr(kernel, "engine_id"):
        return None
    client: str | None = kernel.get_parent("shell").get("header", {}).get("session")
    return client


class CodeObserver:
    """Observes the code that runs while experiments are open in one shell.

    Args:
        context: the shell's services.
        experiments: the open experiments; the caller adds and removes them.
    """

    def __init__(self, context: ShellContext, experiments: OpenExperiments[Any]) -> None:
        self._context = context
        self._cells = context.cells
        self._open: OpenExperiments[HasScope] = experiments
        self.binding_recorder = BindingRecorder(self._record_binding)
        self._stand_ins: dict[int, Cell] = {}
        """The running cells whose start no hook has seen, by thread: a stand-in for each."""

    # -- events of instrumented code ---------------------------------------------------------------

    def _record_binding(self, event: str) -> bool:
        """Record an event of instrumented code; return True if it is settled (``BindingRecorder``):
        its repetitions need not be recorded.
        """
        if not self._open:
            return True  # until one opens
        scopes = [experiment.scope for experiment in self._open.here()]
        if not scopes:
            self._record_event_outside(event)
            return False
        is_settled = scopes[-1].record_event(event, scopes)
        # Another thread's code looks up the same events, and its bindings must be seen.
        return is_settled and not self._cells.outside(get_ident())

    def _record_event_outside(self, event: str) -> None:
        """Record an event of code outside all scopes: the scopes of other threads leave it the
        names that it binds.
        """
        word, name = split_event(event)
        has_bound = self._note_event_outside(word, name)
        if has_bound:
            for experiment in self._open:
                experiment.scope.leave(name)
            # The scopes' code may bind the name again, and must report that.
            self.binding_recorder.forget_settled()

    def _note_event_outside(self, word: str, name: str) -> bool:
        """Note an event of code outside all scopes; return True if it means that the code has bound
        a name.

        A statement that may bind a name has two events: the first one notes the object that the
        name has, with which the second one compares.

        Args:
            word: the kind of event, such as ``MAY_BIND``.
            name: the name.
        """
        running = self._cells.running()
        objects_before = running[-1].code.objects_before_statement if running else {}
        value = self._context.namespace.get(name, _NOT_BOUND)
        if word == MAY_BIND:
            objects_before[name] = value
            return False
        is_noted = name in objects_before
        value_before = objects_before.pop(name, _NOT_BOUND)
        if word == HAS_ENDED and is_noted:
            return value is not value_before
        return word in BINDING_WORDS

    def save_after_missed_event(self, event: str) -> bool:
        """Save the objects of all names that the running code may bind, because one of its events
        was not recorded; return False, because the event is not settled.
        """
        here = self._open.here()
        if here:
            here[-1].scope.save_after_lost_event(event)
        return False

    # -- code that runs next -----------------------------------------------------------------------

    def code_seen(self, tree: Any, *, may_change: bool, is_timed: bool) -> None:
        """Prepare the scopes for code that runs next in the innermost running cell.

        Args:
            tree: its syntax tree.
            may_change: True if the tree may be changed here, because no other transformer changes
                it later. The same code is seen twice if a user has transformers: first with False.
            is_timed: True if %timeit runs it: its names never reach the notebook, and it must not
                be slowed down.
        """
        running = self._cells.running()
        here = self._open.here()
        if not running:
            self._code_without_cell(tree, here)
        elif is_timed:
            for experiment in here:
                experiment.scope.share(bindings_of(tree).shared)
        elif may_change:
            self._final_code_seen(tree, here, running[-1])
        else:
            self._early_code_seen(tree, here, running[-1])

    def _early_code_seen(self, tree: Any, here: list[HasScope], cell: Cell) -> None:
        """Save all names that code may bind: a user's transformer may raise, and then the code runs
        without being seen again.
        """
        code = SeenCode(tree, is_final=False)
        cell.code.pieces.append(code)
        if here:
            opens_scope = _begins_with_experiment(tree)
            cell.code.names_saved_early = self._prepare_scopes(code, here, opens_scope=opens_scope)

    def _final_code_seen(self, tree: Any, here: list[HasScope], cell: Cell) -> None:
        """Instrument code, which runs next without further changes, and prepare the scopes."""
        opens_scope = _begins_with_experiment(tree)
        code = SeenCode(tree, is_final=True)
        names = self._names_to_report(code, here, cell, opens_scope=opens_scope)
        if names:
            instrument(tree, names)
        code.reported = names
        cell.code.pieces.append(code)
        if here:
            here[-1].scope.unsave(cell.code.names_saved_early)
            cell.code.names_saved_early = []
            self._prepare_scopes(code, here, opens_scope=opens_scope)

    def _prepare_scopes(
        self, code: SeenCode, here: list[HasScope], *, opens_scope: bool
    ) -> list[str]:
        """Prepare the scopes around code for its bindings; return the names that the innermost one
        has saved, because the code does not report them.

        Args:
            code: the code that runs next.
            here: the open experiments around it, at least one.
            opens_scope: True if the code's first line opens a scope, which will own its names.
        """
        bindings = code.bindings()
        for experiment in here:
            experiment.scope.share(bindings.shared)
        if opens_scope:
            return []
        return self._expect_bindings(here[-1].scope, bindings, code.reported)

    def _code_without_cell(self, tree: Any, here: list[HasScope]) -> None:
        """Prepare the scopes for the code of a silent request, which front-ends send after each
        cell, or for that of a cell whose start no hook has seen.
        """
        if not is_in_cell():
            for experiment in self._open:
                if experiment not in here:
                    experiment.scope.share(bindings_of(tree).bound)
            return
        self.code_missed()
        if self._open and not here:  # another thread's scopes leave these names to this code
            self._ensure_stand_in().code.pieces.append(SeenCode(tree, is_final=False))

    def code_missed(self, *_: object, **__: object) -> None:
        """Prepare the scopes for code that could not be analysed and may bind any name; it takes
        the arguments of ``code_seen``, in whose place it is called.
        """
        running = self._cells.running()
        if running:
            running[-1].code.has_unknown = True
        elif self._open:
            self._ensure_stand_in()  # notes the notebook's names before the code runs
        here = self._open.here()
        if here:
            here[-1].scope.save_all()

    def _names_to_report(
        self, code: SeenCode, here: list[HasScope], cell: Cell, *, opens_scope: bool
    ) -> frozenset[str]:
        """Return the names whose bindings the code must report: a scope then saves the object that
        the name had, or leaves the name to the code.

        Args:
            code: the code that runs next.
            here: the open experiments around it.
            cell: its cell.
            opens_scope: True if the code's first line opens a scope.
        """
        opens_scope_later = _mentions_experiment(cell.source, below_first_line=opens_scope)
        # A scope that another thread opens while this cell runs must leave it the names it binds.
        in_several_threads = self._cells.in_several_threads
        may_be_in_scope = self._open or opens_scope or opens_scope_later
        if not may_be_in_scope and not in_several_threads:
            return frozenset()
        if _MEASURES_LINES.search(cell.source):
            return frozenset()
        bindings = code.bindings()
        names = (bindings.bound | bindings.deleted) - bindings.shared
        # Otherwise another thread's cell may bind a name that is new here before this code does.
        in_one_thread = not (in_several_threads or has_subshells())
        are_all_here = len(here) == len(self._open)
        has_one_scope = are_all_here and not opens_scope_later
        if in_one_thread and has_one_scope:
            # A new name is the scope's own, also without a report.
            if opens_scope:
                names &= self._context.namespace.keys()
            elif here:
                names = here[-1].scope.names_to_report(names)
        names |= bindings.imported - bindings.shared
        return frozenset(names)

    def _expect_bindings(
        self, scope: Scope, bindings: Bindings, reported: frozenset[str]
    ) -> list[str]:
        """Prepare ``scope`` for code with these bindings; return the names that were saved, because
        the code does not report them.
        """
        self.binding_recorder.forget_settled()
        scope.expect_bindings(bindings, reported)
        return scope.save(bindings.bound.difference(reported))

    # -- scopes ------------------------------------------------------------------------------------

    def scope_opened(self, experiment: HasScope) -> None:
        """Prepare a new scope, which is among the open ones, for the code that runs already."""
        self.becomes_innermost(experiment)
        running = self._cells.running()
        # Without a cell, the main thread runs a silent request. Other threads run functions, which
        # bind no names of the notebook.
        in_silent_request = not running and experiment.thread == main_thread().ident
        has_unknown_code = any(cell.code.has_unknown or not cell.code.pieces for cell in running)
        if in_silent_request or has_unknown_code:
            experiment.scope.save_all()
        for cell in self._cells.outside(experiment.thread):
            cell.code.note_names(self._context.namespace)

    def becomes_innermost(self, experiment: HasScope) -> None:
        """Prepare the scope that becomes the innermost for names that the running code may bind."""
        self.binding_recorder.forget_settled()
        for cell in self._cells.running(experiment.thread):
            for code in list(cell.code.pieces):
                bindings = code.bindings()
                experiment.scope.share(bindings.shared)
                self._expect_bindings(experiment.scope, bindings, code.reported)

    def scope_ends(self, experiment: HasScope) -> None:
        """Let a scope that ends now leave the names of all code in other threads alone.

        A thread that its cells have started may go on, and need the names that it has bound by
        ``global``.
        """
        self.binding_recorder.forget_settled()
        self._stand_in_ends(experiment.thread)
        experiment.scope.leave_names((), names_in_threads(self._context.namespace))
        for cell in (*self._cells.outside(experiment.thread), *self._stand_ins.values()):
            self._leave_to(cell, experiment)

    # -- cells -------------------------------------------------------------------------------------

    def cell_begins(self, cell: Cell) -> None:
        """Prepare for a cell: note the names at its start if scopes of other threads are open."""
        if self._stand_ins and not cell.is_nested:
            self._stand_in_ends(cell.thread)
        if not self._open:
            return
        # The cell's events are not those of the cells that run already.
        self.binding_recorder.forget_settled()
        if len(self._open.here()) < len(self._open):  # names that appear may be the cell's
            cell.code.note_names(self._context.namespace)

    def code_ended(self, cell: Cell) -> None:
        """Update all scopes after a cell's code: those of other threads leave it its names, and
        those around it drop the objects that it has not rebound.
        """
        self.binding_recorder.forget_settled()
        here = self._open.here()
        for experiment in self._open:
            if experiment not in here:
                self._leave_to(cell, experiment)
        if here and not self._cells.running():
            forget_needless_saves([experiment.scope for experiment in here])

    def unseen_cell_ended(self) -> None:
        """Leave to the notebook the names of this thread's cell whose start no hook has seen."""
        self._stand_in_ends(get_ident())

    def _ensure_stand_in(self) -> Cell:
        """Return the stand-in for this thread's cell, whose start no hook has seen; the first call
        creates it and notes the notebook's names.
        """
        thread = get_ident()
        if thread in self._stand_ins:
            return self._stand_ins[thread]
        cell = Cell(None, is_nested=False, thread=thread)
        cell.code.note_names(self._context.namespace)
        self._stand_ins[thread] = cell
        return cell

    def _stand_in_ends(self, thread: int) -> None:
        """Leave to the notebook the names added by the cell of ``thread`` that has a stand-in, if
        there is one: its code is in no scope.
        """
        cell = self._stand_ins.pop(thread, None)
        if cell is None:
            return
        for experiment in self._open:
            if experiment.thread == thread:
                names = cell.code.names_added(self._context.namespace)
                experiment.scope.leave_names(names, ())
            else:
                self._leave_to(cell, experiment)
        forget_needless_saves([item.scope for item in self._open if item.thread == thread])

    def _leave_to(self, cell: Cell, experiment: HasScope) -> None:
        """Let another thread's experiment leave the cell the names that the cell binds; it has left
        the reported ones already.
        """
        names_added = cell.code.names_added(self._context.namespace)
        experiment.scope.leave_names(cell.code.bound_without_report(), names_added)


def _mentions_experiment(source: str, *, below_first_line: bool) -> bool:
    """Return True if a cell, or its part below the first line, may open a scope: it contains the
    word ``experiment``.
    """
    if below_first_line:
        _, _, source = source.lstrip().partition("\n")
    return "experiment" in source


def _begins_with_experiment(tree: Any) -> bool:
    """Return True for a cell whose first line is ``%%experiment``."""
    body: list[Any] = getattr(tree, "body", None) or []
    return bool(body) and our_magic(body[0]) == "experiment"

"""Runs an experiment from start to end: its scope, its measurement, and what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ipygpumem.errors import quoted, said
from ipygpumem.freeing import reclaim
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.introspect import is_atom, named_objects
from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, Usage
from ipygpumem.notebook.experiments import watching
from ipygpumem.notebook.experiments.allocation_file import AllocationFile
from ipygpumem.notebook.experiments.budget import NotebookBudget
from ipygpumem.notebook.experiments.budgets import Budgets
from ipygpumem.notebook.experiments.options import ExperimentOptions
from ipygpumem.notebook.experiments.survivors import Survivors
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.notebook.tools import Tools
from ipygpumem.objects.arrays import ArraySearch
from ipygpumem.objects.garbage import Mark
from ipygpumem.scopes.scope import Outcome, Scope, is_ownable
from ipygpumem.scopes.seeding import SeedOnImport, seed_generators
from ipygpumem.units import format_bytes


@dataclass(frozen=True)
class Services:
    """What experiments of one shell work with."""

    tools: Tools
    recovery: Recovery
    budgets: Budgets
    survivors: Survivors


@dataclass(frozen=True)
class _AtEnd:
    """An experiment at the moment when its end was asked for."""

    consumed: dict[str, int]
    before: dict[str, int]
    waiting: list[Held]
    watched: list[watching.Watched]
    complete: bool
    """Whether there was memory enough to see all of it; looking for survivors would need more."""


class OpenExperiment:
    """What the stack of open experiments deals with; users have an ``Experiment`` in their hands.

    Args:
        services: the shell's.
        options: what the user wants.
        spare: says which value of a name is the user's handle on it, which stays.
    """

    def __init__(self, services: Services, options: ExperimentOptions, spare: Callable[[object], bool]) -> None:
        self._services = services
        self._tools = services.tools
        self._spare = spare
        self.options = options
        self.name = options.name
        self.ooms = 0
        self.record: ExperimentRecord | None = None
        self.failed = False
        self.error_at_start = self.seen_error = 0
        self.thread = threading.get_ident()
        """The thread whose cells are the experiment's: that in which it starts."""
        self.client: str | None = None
        """On an engine of a cluster, the client whose cells alone are the experiment's."""
        sizes = options.sizes
        self._budget = NotebookBudget(services.budgets, sizes, f"experiment {self.name}") if sizes else None
        self._cells: list[CellRecord] = []
        self._remarks: list[str] = []
        self._steps: list[ReclaimStep] = []
        self._at_end: _AtEnd | None = None
        self._seed_on_import = SeedOnImport(options.seed) if options.seed is not None else None
        self._allocations = AllocationFile(options.record) if options.record is not None else None

    # -- open -------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Open scope and measurement; if this fails, ``abandon`` undoes it."""
        tools, options = self._tools, self.options
        if self._allocations is not None:
            self._allocations.start()
        self._started = time.perf_counter()
        self._started_at = time.time()
        self.scope = Scope(tools.namespace, keep=options.patterns, drop_imports=options.drop_imports)
        self.outputs_at_start = tools.outputs.mark()
        self._start = watching.Start(tools.namespace, tools.garbage, self.note)
        if self._budget is not None:
            self._budget.start()
        self._measurement = tools.meter.start()

    @property
    def was_started(self) -> bool:
        """Whether ``enter`` was called."""
        return hasattr(self, "scope")

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    @property
    def limit_notes(self) -> tuple[str, ...]:
        """What its budget cannot limit, in words."""
        return self._budget.notes if self._budget is not None else ()

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return tuple(self._cells)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if it is finished."""
        return self.record.usages if self.record is not None else self._tools.meter.read(self._measurement)

    def reseed(self) -> None:
        """Reset the random generators if the experiment has a seed, and those imported later when they come."""
        if self.options.seed is not None and self._seed_on_import is not None:
            self._seed_on_import.install()
            seed_generators(self.options.seed)

    def ran_out_of_memory(self) -> None:
        """Count an out-of-memory error, and write down where memory was allocated before any of it is given back."""
        self.ooms += 1
        if self._allocations is not None:
            self._allocations.write("written when memory ran out")

    def add_cell(self, cell: CellRecord) -> None:
        """Count a finished cell as the experiment's, the one with which it ends included."""
        self._cells.append(cell)
        if self.record is not None:
            self.record = replace(self.record, cells=self.cells)

    def note(self, text: str) -> None:
        """Add a remark to the report."""
        self._remarks.append(text)

    def waiting(self) -> list[Held]:
        """Return what the objects to be restored hold."""
        search = ArraySearch()
        entries = [search.held(name, value) for name, value in list(self.scope.waiting.items())]
        return [entry[0] for entry in entries if entry is not None]

    def abandon(self) -> None:
        """Let the names stay and stop measuring: the extension is being unloaded, or the start has failed."""
        if hasattr(self, "_measurement"):
            self._tools.meter.drop(self._measurement)
        if self._budget is not None:
            self._budget.abandon()
        if self._allocations is not None:
            self._allocations.stop(write=False)
        if self.was_started:
            self.scope.waiting.clear()
        if hasattr(self, "_start"):
            self._start.forget()
        if self._seed_on_import is not None:
            self._seed_on_import.remove()

    def saw_error(self, identity: int) -> None:
        """Note the last error that was shown, so often that no two are shown between.

        An error is made while the one that was shown before lives; a later one may have the identity of that.
        """
        self.failed |= identity != self.seen_error
        self.seen_error = identity

    # -- its end ----------------------------------------------------------------------------------------------

    def leave(self, enclosing: Scope | None) -> None:
        """Give everything back and make the record; after an interrupt, call it again."""
        if self._allocations is not None:
            self._allocations.stop(write=True)
        own = None
        if self._at_end is None:  # else an interrupt has come between, and there may be other names by now
            self._at_end, own = self._look()
        if self._budget is not None:
            self._budget.stop()
        self._give_back(enclosing, own)
        if self._seed_on_import is not None:
            self._seed_on_import.remove()
        seconds = self.elapsed_seconds
        survivors = self._survivors(self._at_end)  # first: what the look takes counts for the cell's line, too
        self.record = self._make_record(self._at_end, self._tools.meter.stop(self._measurement), seconds, survivors)
        self._start.forget()
        self._at_end.watched.clear()  # it refers weakly to arrays

    def _give_back(self, enclosing: Scope | None, own: list[str] | None) -> None:
        """Let go of names, outputs and tracebacks, then free what they held."""
        meter = self._tools.meter
        closed: list[Outcome] = []
        names = ("names", lambda: closed.append(self.scope.close(enclosing, own, spare=self._spare)))
        reclaim.run_steps(
            meter,
            [
                names,
                ("outputs", lambda: self._tools.outputs.forget_since(self.outputs_at_start)),
                ("tracebacks", self._release_tracebacks),
            ],
            self._steps,
        )
        if not closed:  # there was no memory even for that; what the tracebacks held is free now
            reclaim.run_steps(meter, [("names again", names[1])], self._steps)
        reclaim.run_steps(meter, steps_that_free(self._tools.garbage, self._since), self._steps)

    def _since(self) -> Mark | None:
        """Return the start if all that its end may find to be garbage was made since, else None."""
        lets_go_of_older_error = self.failed and self.error_at_start != 0
        return None if lets_go_of_older_error else self._start.mark_if_nothing_lingers(self._tools.namespace)

    def _look(self) -> tuple[_AtEnd, list[str] | None]:
        """Return what the experiment has and holds now, before anything is given back, and its own names."""
        usages: tuple[Usage, ...] = ()
        waiting: list[Held] = []
        own: list[str] | None = None
        watched: list[watching.Watched] = []
        complete = False
        try:
            usages = self._tools.meter.settle(self._measurement)
            waiting = self.waiting()
            own = self.scope.own_names()
            watched = self._watch(own)
            complete = True
        except MemoryError:  # the names must go all the same, and now more than ever
            self.note("memory was too short to list everything that the experiment held")
        at_end = _AtEnd(
            consumed={usage.device: usage.delta_bytes for usage in usages},
            before={usage.device: usage.after_bytes for usage in usages},
            waiting=waiting,
            watched=watched,
            complete=complete,
        )
        return at_end, own

    def _release_tracebacks(self) -> None:
        if self.failed:
            for line in self._services.recovery.release_stored_tracebacks():
                self.note(line)

    def _watch(self, own: list[str]) -> list[watching.Watched]:
        """Return what the scope's names and outputs hold, to be watched."""
        scope, search = self.scope, ArraySearch(self._start.was_there)
        namespace, outputs = self._tools.namespace, self._tools.outputs.since(self.outputs_at_start)
        values = ((name, namespace.get(name)) for name in scope.names_to_delete(own))
        named = [(name, value) for name, value in values if not is_atom(value)]
        named += [(f"Out[{key}]", value) for key, value in outputs.items()]
        ours = set(own)
        for name, value in named_objects(namespace) if named else ():
            if is_ownable(name) and name not in ours:
                search.ignore(value)  # what ``global`` has made the notebook's own is no leak
        return watching.watch_names(named, search)

    def _survivors(self, at_end: _AtEnd) -> tuple[Held, ...]:
        if not at_end.complete:
            return ()
        search = ArraySearch()
        values = [self._tools.namespace.get(name) for name in self.scope.outcome.kept]
        kept = {array.storage for value in values for _, array in search.find(value)}
        try:
            return self._services.survivors.of_experiment(
                at_end.watched,
                known=lambda item, array: array.storage in kept or self._start.was_there(item, array),
                certain=self._start.is_complete,
                first_cell=min((cell.execution_count or 0 for cell in self._cells), default=None),
            )
        except Exception as error:  # all has been given back: this only tells what has not come
            self.note(f"what is still alive could not be listed: {said(error)}")
            return ()

    def _make_record(
        self, at_end: _AtEnd, usages: tuple[Usage, ...], seconds: float, survivors: tuple[Held, ...]
    ) -> ExperimentRecord:
        after = {usage.device: usage.after_bytes for usage in usages}
        outcome = self.scope.outcome
        return ExperimentRecord(
            name=self.name,
            started_at=self._started_at,
            duration_seconds=seconds,
            cells=tuple(self._cells),
            usages=usages,
            consumed=at_end.consumed,
            reclaimed=reclaim.fallen(at_end.before, after),
            deleted=tuple(outcome.deleted),
            restored=tuple(outcome.restored),
            kept=tuple(outcome.kept),
            survivors=survivors,
            steps=tuple(self._steps),
            notes=tuple(self._notes(at_end)),
            parameters=dict(self.options.parameters),
            ooms=self.ooms,
            budget=dict(self._budget.limits) if self._budget is not None else {},
        )

    def _notes(self, at_end: _AtEnd) -> list[str]:
        notes = [f"keep: no name matches {quoted(pattern)}" for pattern in self.scope.unmatched_keep()]
        size = sum(held.size_bytes for held in at_end.waiting)
        if size >= self._tools.config.min_held_bytes:
            names = ", ".join(held.name for held in at_end.waiting)
            notes.append(f"the restored objects ({names}) took {format_bytes(size)} while the experiment ran")
        if self._budget is not None:
            notes += [*self.limit_notes, *self._budget.crossings, *self._budget.refusals]
        notes += self._remarks
        if self._allocations is not None:
            notes.append(self._allocations.remark)
        notes += [f"{step.name}: {step.error}" for step in self._steps if step.error]
        return notes

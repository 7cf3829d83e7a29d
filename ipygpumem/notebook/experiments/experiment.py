"""One experiment: a scope, the measurement of what it costs, and its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from ipygpumem.errors import ExperimentError, FileError, said
from ipygpumem.freeing import reclaim
from ipygpumem.freeing.steps import steps_that_free
from ipygpumem.introspect import is_atom, named_objects
from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, Usage
from ipygpumem.notebook.experiments import watching
from ipygpumem.notebook.experiments.parameters import checked_parameters
from ipygpumem.notebook.experiments.seeding import SeedOnImport, seed_generators
from ipygpumem.notebook.experiments.survivors import survivors
from ipygpumem.objects.arrays import ArraySearch
from ipygpumem.objects.garbage import Mark
from ipygpumem.scopes.scope import Outcome, Scope, is_ownable
from ipygpumem.units import format_bytes

if TYPE_CHECKING:
    from ipygpumem.measuring.allocations import AllocationHistory
    from ipygpumem.notebook.experiments.budget import NotebookBudget
    from ipygpumem.notebook.session import Session


@dataclass(frozen=True)
class _AtEnd:
    """An experiment at the moment when its end was asked for."""

    consumed: dict[str, int]
    before: dict[str, int]
    waiting: list[Held]
    watched: list[watching.Watched]
    complete: bool
    """Whether there was memory enough to see all of it; looking for survivors would need more."""


def _check(name: object, keep: list[str], seed: object, report: object) -> None:
    """Raise ``ExperimentError`` for an argument that would only fail when it is too late."""
    if not isinstance(name, str) or not name.strip() or len(name.splitlines()) > 1:
        raise ExperimentError("an experiment's name is one line of text that is not empty")
    if not all(isinstance(pattern, str) for pattern in keep):
        raise ExperimentError("keep is a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
        raise ExperimentError("seed is a whole number of 64 bits, as torch takes it")
    if report not in (None, "full", "compact", "none"):
        raise ExperimentError(f"report={report!r}: write 'full', 'compact' or 'none'")


def _budget_of(session: Session, sizes: Mapping[str, object], name: str) -> NotebookBudget:
    from ipygpumem.fitting import budgets  # loading the extension must stay fast
    from ipygpumem.notebook.experiments.budget import NotebookBudget

    return NotebookBudget(session, budgets.checked(sizes), f"experiment {name}")


def _history_in(file: str | os.PathLike[str]) -> AllocationHistory:
    from ipygpumem.measuring.allocations import AllocationHistory  # as above

    return AllocationHistory(file)


class Experiment:
    """A scope over the notebook's names, opened by ``start`` (or ``with``) and closed by ``finish``.

    Made by ``ipygpumem.experiment`` and by the magics. The record is in ``record`` once it is finished.

    Args:
        session: the shell's state.
        name: any one-line text; an open experiment of the same name is finished first.
        keep: names or globs whose values stay at the end.
        drop_imports: delete the names of modules that the experiment imported.
        seed: reset Python's, NumPy's and torch's generators to this before every cell.
        report: ``full``, ``compact`` or ``none``; None means as configured.
        note: parameters to remember with it: numbers or text by name.
        budget: bytes that it may use of ``gpu``, ``ram`` or ``cuda:N``.
        record: a file for torch's history of allocations on CUDA devices, ``.pickle``.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        *,
        keep: str | Iterable[str] = (),
        drop_imports: bool = False,
        seed: int | None = None,
        report: str | None = None,
        note: Mapping[str, int | float | str] | None = None,
        budget: Mapping[str, object] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        keep = [keep] if isinstance(keep, str) else list(keep)
        _check(name, keep, seed, report)
        self._session = session
        self.name = name
        self.seed = seed
        self.report = report
        self.parameters = checked_parameters(note or {})
        self._budget = _budget_of(session, budget, name) if budget else None
        self.ooms = 0
        self.record: ExperimentRecord | None = None
        self.failed = False
        self.error_at_start = 0
        self.thread = threading.get_ident()
        """The thread whose cells are the experiment's: that in which it starts."""
        self._keep = keep
        self._drop_imports = drop_imports
        self._cells: list[CellRecord] = []
        self._remarks: list[str] = []
        self._steps: list[ReclaimStep] = []
        self._at_end: _AtEnd | None = None
        self._seed_on_import = SeedOnImport(seed) if seed is not None else None
        self._allocations = _history_in(record) if record is not None else None

    def start(self) -> Experiment:
        """Open the scope here, and return the experiment.

        Raises:
            ExperimentError: it was started before.
        """
        if hasattr(self, "scope"):
            raise ExperimentError(f"experiment {self.name!r} was started already: make a new one")
        self.thread = threading.get_ident()
        self._session.begin(self)
        return self

    def _enter(self, namespace: dict[str, object]) -> None:
        """Open scope and measurement; called by the session, which calls ``_abandon`` if this fails."""
        if self._allocations is not None:
            self._allocations.start()
        self._started = time.perf_counter()
        self._started_at = time.time()
        self.scope = Scope(namespace, keep=self._keep, drop_imports=self._drop_imports)
        self.outputs_at_start = self._session.outputs.mark()
        self._start = watching.Start(namespace, self._session.garbage, self._note)
        if self._budget is not None:
            self._budget.start()
        self._measurement = self._session.meter.start()

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

    def _reseed(self) -> None:
        """Reset the random generators if the experiment has a seed, and those imported later when they come."""
        if self.seed is not None and self._seed_on_import is not None:
            self._seed_on_import.install()
            seed_generators(self.seed)

    def _ran_out_of_memory(self) -> None:
        """Count an out-of-memory error, and write down where memory was allocated before any of it is given back."""
        self.ooms += 1
        self._write_allocations("written when memory ran out")

    def _write_allocations(self, when: str = "") -> None:
        if self._allocations is None:
            return
        self._remarks = [text for text in self._remarks if not text.startswith("allocations: ")]  # one file, one line
        shared = "a recording of your own, which goes on" if self._allocations.is_shared else ""
        try:
            size = format_bytes(self._allocations.write())
            how = ", ".join(filter(None, (size, when, shared)))
            self._note(f"allocations: {self._allocations.place} ({how}); pytorch.org/memory_viz shows it")
        except (FileError, MemoryError) as error:  # it only serves the report
            self._note(f"allocations: {error or 'no memory to write them'}")

    def _stop_allocations(self, *, write: bool) -> None:
        """Switch the recording off; what an out-of-memory error has written stays."""
        if self._allocations is not None:
            if write and not self.ooms:
                self._write_allocations()
            history, self._allocations = self._allocations, None
            history.stop()

    def keep(self, *patterns: str) -> None:
        """Keep these names or globs at the end."""
        _check(self.name, list(patterns), self.seed, self.report)
        self._keep.extend(patterns)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if it is finished."""
        if self.record is not None:
            return self.record.usages
        if not hasattr(self, "scope"):
            raise ExperimentError(f"experiment {self.name!r} has not been started")
        return self._session.meter.read(self._measurement)

    def finish(self) -> ExperimentRecord:
        """End the experiment (and those inside it), show its report and return its record.

        A finished experiment returns its record again. If an interrupt stops the end half-way, the experiment
        stays open and ``finish`` can be called again.

        Raises:
            ExperimentError: it was never started, or the extension was unloaded meanwhile.
        """
        return self._session.finish(self)

    def __enter__(self) -> Experiment:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._session.recoveries.failed_inside(self, error)
        finally:
            if self.record is None:
                self.finish()

    def _add_cell(self, cell: CellRecord) -> None:
        """Count a finished cell as the experiment's, also that with which it has ended."""
        self._cells.append(cell)
        if self.record is not None:
            self.record = replace(self.record, cells=self.cells)

    def _note(self, text: str) -> None:
        """Add a remark to the report."""
        self._remarks.append(text)

    def waiting(self) -> list[Held]:
        """Return what the objects that wait to be restored hold."""
        search = ArraySearch()
        entries = [search.held(name, value) for name, value in list(self.scope.waiting.items())]
        return [entry[0] for entry in entries if entry is not None]

    def _abandon(self) -> None:
        """Let the names stay and stop measuring: the extension is being unloaded, or the start has failed."""
        if hasattr(self, "_measurement"):
            self._session.meter.drop(self._measurement)
        if self._budget is not None:
            self._budget.abandon()
        self._stop_allocations(write=False)
        if hasattr(self, "scope"):
            self.scope.waiting.clear()
        if hasattr(self, "_start"):
            self._start.forget()
        if self._seed_on_import is not None:
            self._seed_on_import.remove()

    def _leave(self, enclosing: Scope | None) -> ExperimentRecord:
        """Give everything back and return the record; after an interrupt, call it again."""
        meter = self._session.meter
        self._stop_allocations(write=True)
        own = None
        if self._at_end is None:  # else an interrupt has come between, and there may be other names by now
            self._at_end, own = self._look()
        at_end = self._at_end
        if self._budget is not None:
            self._budget.stop()
        self._give_back(enclosing, own)
        if self._seed_on_import is not None:
            self._seed_on_import.remove()
        self.record = self._make_record(at_end, meter.stop(self._measurement))
        self._start.forget()
        return self.record

    def _give_back(self, enclosing: Scope | None, own: list[str] | None) -> None:
        """Let go of names, outputs and tracebacks, then free what they held."""
        meter = self._session.meter
        closed: list[Outcome] = []
        names = ("names", lambda: closed.append(self.scope.close(enclosing, own, spare=lambda value: value is self)))
        reclaim.run_steps(
            meter,
            [
                names,
                ("outputs", lambda: self._session.outputs.forget_since(self.outputs_at_start)),
                ("tracebacks", self._release_tracebacks),
            ],
            self._steps,
        )
        if not closed:  # there was no memory even for that; what the tracebacks held is free now
            reclaim.run_steps(meter, [("names again", names[1])], self._steps)
        reclaim.run_steps(meter, steps_that_free(self._session.garbage, self._since), self._steps)

    def _since(self) -> Mark | None:
        """Return the start if all that its end may find to be garbage was made since, else None."""
        lets_go_of_older_error = self.failed and self.error_at_start != 0
        return None if lets_go_of_older_error else self._start.mark_if_nothing_lingers(self._session.namespace)

    def _look(self) -> tuple[_AtEnd, list[str] | None]:
        """Return what the experiment has and holds now, before anything is given back, and its own names."""
        usages: tuple[Usage, ...] = ()
        waiting: list[Held] = []
        own: list[str] | None = None
        watched: list[watching.Watched] = []
        complete = False
        try:
            usages = self._session.meter.settle(self._measurement)
            waiting = self.waiting()
            own = self.scope.own_names()
            watched = self._watch(own)
            complete = True
        except MemoryError:  # the names must go all the same, and now more than ever
            self._note("there was too little memory left to see what all of it held")
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
            for line in self._session.recoveries.release_stored_tracebacks():
                self._note(line)

    def _watch(self, own: list[str]) -> list[watching.Watched]:
        """Return what the scope's names and outputs hold, with functions that say whether it is still alive."""
        scope, search = self.scope, ArraySearch(self._start.was_there)
        namespace = self._session.namespace
        values = ((name, namespace.get(name)) for name in scope.names_to_delete(own))
        named = [(name, value) for name, value in values if not is_atom(value)]
        named += [(f"Out[{key}]", value) for key, value in self._session.outputs.since(self.outputs_at_start).items()]
        ours = set(own)
        for name, value in named_objects(namespace) if named else ():
            if is_ownable(name) and name not in ours:
                search.ignore(value)  # what ``global`` has made the notebook's own is no leak
        return watching.watch_names(named, search)

    def _survivors(self, at_end: _AtEnd) -> tuple[Held, ...]:
        if not at_end.complete:
            return ()
        search = ArraySearch()
        values = [self._session.namespace.get(name) for name in self.scope.outcome.kept]
        kept = {array.storage for value in values for _, array in search.find(value)}
        try:
            return survivors(
                self._session,
                at_end.watched,
                known=lambda item, array: array.storage in kept or self._start.was_there(item, array),
                certain=self._start.is_complete,
                first_cell=min((cell.execution_count or 0 for cell in self._cells), default=None),
            )
        except Exception as error:  # all has been given back: this only tells what has not come
            self._note(f"what survived could not be told: {said(error)}")
            return ()

    def _make_record(self, at_end: _AtEnd, usages: tuple[Usage, ...]) -> ExperimentRecord:
        after = {usage.device: usage.after_bytes for usage in usages}
        outcome = self.scope.outcome
        return ExperimentRecord(
            name=self.name,
            started_at=self._started_at,
            duration_seconds=self.elapsed_seconds,
            cells=tuple(self._cells),
            usages=usages,
            consumed=at_end.consumed,
            reclaimed=reclaim.fallen(at_end.before, after),
            deleted=tuple(outcome.deleted),
            restored=tuple(outcome.restored),
            kept=tuple(outcome.kept),
            survivors=self._survivors(at_end),
            steps=tuple(self._steps),
            notes=tuple(self._notes(at_end)),
            parameters=dict(self.parameters),
            ooms=self.ooms,
            budget=dict(self._budget.limits) if self._budget is not None else {},
        )

    def _notes(self, at_end: _AtEnd) -> list[str]:
        notes = [f"keep: no name matches {pattern!r}" for pattern in self.scope.unmatched_keep()]
        size = sum(held.size_bytes for held in at_end.waiting)
        if size >= self._session.config.min_held_bytes:
            names = ", ".join(held.name for held in at_end.waiting)
            notes.append(f"the shadowed objects that are back ({names}) held {format_bytes(size)} meanwhile")
        if self._budget is not None:
            notes += [*self.limit_notes, *self._budget.crossings, *self._budget.refusals]
        notes += self._remarks
        notes += [f"{step.name}: {step.error}" for step in self._steps if step.error]
        return notes

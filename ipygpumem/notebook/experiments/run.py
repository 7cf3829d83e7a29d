"""Runs an experiment: its options, its scope, its measurement, and freeing what it owns."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, replace

from ipygpumem.errors import ExperimentError, quoted, said
from ipygpumem.fitting import budgets
from ipygpumem.fitting.budgets import Budget
from ipygpumem.freeing import reclaim
from ipygpumem.freeing.reclaim import steps_that_free
from ipygpumem.introspect import is_atom, is_instance, named_objects, text_of, type_name
from ipygpumem.model import CellRecord, ExperimentRecord, Held, ReclaimStep, Usage
from ipygpumem.notebook.context import Context
from ipygpumem.notebook.experiments.survivors import Baseline, Survivors, Watched, watch_names
from ipygpumem.notebook.ipython.outputs import Outputs
from ipygpumem.notebook.parts.allocation_file import AllocationFile
from ipygpumem.notebook.recovery import Recovery
from ipygpumem.objects.garbage import Mark
from ipygpumem.objects.walk import ArraySearch
from ipygpumem.scopes.scope import Outcome, Scope, is_ownable
from ipygpumem.scopes.seeding import SeedOnImport, is_seed, seed_generators
from ipygpumem.units import format_bytes

Parameters = dict[str, int | float | str]

_NAME = re.compile(r"[^\W\d][\w.-]{0,79}")
_WHOLE = re.compile(r"[+-]?\d{1,300}", re.ASCII)


@dataclass(eq=False)
class ExperimentOptions:
    """The arguments of ``ipygpumem.experiment``, which explains them; validated here, before anything starts."""

    name: str
    keep: InitVar[str | Iterable[str]] = ()
    drop_imports: bool = False
    seed: int | None = None
    report: str | None = None
    note: InitVar[Mapping[str, int | float | str] | None] = None
    budget: InitVar[Mapping[str, int | str] | None] = None
    record: str | os.PathLike[str] | None = None

    def __post_init__(
        self,
        keep: str | Iterable[str],
        note: Mapping[str, int | float | str] | None,
        budget: Mapping[str, int | str] | None,
    ) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name.splitlines()) > 1:
            raise ExperimentError("an experiment needs a name: one line of text")
        self.patterns: list[str] = []
        """What to keep; more may come while it is open."""
        self.keep_more([keep] if isinstance(keep, str) else keep)
        if self.seed is not None and not is_seed(self.seed):
            raise ExperimentError("seed must be a whole number that fits into 64 bits")
        is_text = type(self.report) is str
        if self.report is not None and not (is_text and self.report in ("full", "compact", "none")):
            given = quoted(self.report) if is_text else type_name(self.report)
            raise ExperimentError(f"report={given}: write 'full', 'compact' or 'none'")
        self.sizes = budgets.checked(budget) if budget else None
        self.parameters: Parameters = checked_parameters(note or {})

    def keep_more(self, patterns: Iterable[str]) -> None:
        """Keep these names or globs too."""
        patterns = list(patterns)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ExperimentError("keep must be a name, a glob, or a list of them: keep='x' or keep=['x', 'y*']")
        self.patterns += patterns


@dataclass(frozen=True)
class _AtEnd:
    """The state of an experiment when its end was requested."""

    consumed: dict[str, int]
    before: dict[str, int]
    waiting: list[Held]
    watched: list[Watched]
    complete: bool
    """Whether there was memory enough to list all of it; looking for survivors would need more."""


class ExperimentRun:
    """An experiment between its start and its record; users hold an ``Experiment``."""

    def __init__(
        self,
        context: Context,
        recovery: Recovery,
        survivors: Survivors,
        options: ExperimentOptions,
        is_handle: Callable[[object], bool],
    ) -> None:
        self._context = context
        self._recovery = recovery
        self._survivors = survivors
        self._is_handle = is_handle
        self.options = options
        self.name = options.name
        self.outputs = Outputs(context.shell)
        self.ooms = 0
        self.record: ExperimentRecord | None = None
        self.was_started = self.failed = False
        self.error_at_start = self.seen_error = 0
        self.thread = threading.get_ident()
        """The thread whose cells are the experiment's: that in which it starts."""
        self.client: str | None = None
        """On an engine of a cluster, the client whose cells alone are the experiment's."""
        sizes = options.sizes
        self._budget = Budget(sizes, f"experiment {self.name}") if sizes else None
        self._cells: list[CellRecord] = []
        self._remarks: list[str] = []
        self._steps: list[ReclaimStep] = []
        self._at_end: _AtEnd | None = None
        self._seed_on_import = SeedOnImport(options.seed) if options.seed is not None else None
        self._allocations = AllocationFile(options.record) if options.record is not None else None

    # -- open -------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Open scope and measurement; if this fails, ``abandon`` undoes it."""
        context, options = self._context, self.options
        if self._allocations is not None:
            self._allocations.start()
        self._started, self._started_at = time.perf_counter(), time.time()
        self.scope = Scope(context.namespace, keep=options.patterns, drop_imports=options.drop_imports)
        self.was_started = True
        self.outputs_at_start = self.outputs.mark()
        self._baseline = Baseline(context.namespace, context.garbage, self.note)
        if self._budget is not None:
            self._budget.start()
        self._measurement = context.meter.start()

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @property
    def limit_notes(self) -> tuple[str, ...]:
        """Sentences on what its budget cannot limit."""
        return tuple(self._budget.notes) if self._budget is not None else ()

    @property
    def cells(self) -> tuple[CellRecord, ...]:
        """Its finished cells so far."""
        return tuple(self._cells)

    def usage(self) -> tuple[Usage, ...]:
        """Return each device's usage from the start until now, or until the end if it is finished."""
        return self.record.usages if self.record is not None else self._context.meter.read(self._measurement)

    def reseed(self) -> None:
        """Reset the random generators if the experiment has a seed, and those imported later when they come."""
        if self.options.seed is not None and self._seed_on_import is not None:
            self._seed_on_import.install()
            seed_generators(self.options.seed)

    def ran_out_of_memory(self) -> None:
        """Count an out-of-memory error, and write the allocation history before anything is freed."""
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
        """Return the arrays held by the objects to be restored."""
        search = ArraySearch()
        entries = [search.held(name, value) for name, value in list(self.scope.waiting.items())]
        return [entry[0] for entry in entries if entry is not None]

    def abandon(self) -> None:
        """Keep the names and stop measuring: the extension is being unloaded, or the start has failed."""
        if hasattr(self, "_measurement"):
            self._context.meter.drop(self._measurement)
        if self._budget is not None:
            self._budget.stop()
        if self._allocations is not None:
            self._allocations.stop(write=False)
        if self.was_started:
            self.scope.waiting.clear()
        if hasattr(self, "_baseline"):
            self._baseline.forget()
        if self._seed_on_import is not None:
            self._seed_on_import.remove()

    def saw_error(self, identity: int) -> None:
        """Note the last error that was shown.

        Called often enough that no two errors are shown between two calls: an error is made while the one shown
        before is alive, and a later one may reuse that one's identity.
        """
        self.failed |= identity != self.seen_error
        self.seen_error = identity

    # -- its end ----------------------------------------------------------------------------------------------

    def leave(self, enclosing: Scope | None) -> None:
        """Free everything and make the record; after an interrupt, call it again."""
        if self._allocations is not None:
            self._allocations.stop(write=True)
        own = None
        if self._at_end is None:  # else an interrupt came between, and there may be other names by now
            self._at_end, own = self._look()
        if self._budget is not None:
            self._budget.stop()
        self._free(enclosing, own)
        if self._seed_on_import is not None:
            self._seed_on_import.remove()
        seconds = self.elapsed_seconds
        survivors = self._find_survivors(self._at_end)  # first, so that its cost counts for the cell's line
        self.record = self._make_record(self._at_end, self._context.meter.stop(self._measurement), seconds, survivors)
        self._baseline.forget()
        self._at_end.watched.clear()  # it refers weakly to arrays

    def _free(self, enclosing: Scope | None, own: list[str] | None) -> None:
        """Delete names, outputs and tracebacks, then free the memory that they held."""
        meter, context = self._context.meter, self._context
        closed: list[Outcome] = []
        names = ("names", lambda: closed.append(self.scope.close(enclosing, own, spare=self._is_handle)))
        outputs = ("outputs", lambda: self.outputs.forget_since(self.outputs_at_start))
        reclaim.run_steps(meter, [names, outputs, ("tracebacks", self._release_tracebacks)], self._steps)
        if not closed:  # there was no memory even for that; the tracebacks' memory is free now
            reclaim.run_steps(meter, [("names again", names[1])], self._steps)
        reclaim.run_steps(meter, steps_that_free(context.garbage, self._since), self._steps)

    def _since(self) -> Mark | None:
        """Return the start if everything that may be garbage at the end was made since, else None."""
        releases_older_error = self.failed and self.error_at_start != 0
        return None if releases_older_error else self._baseline.mark_if_nothing_lingers(self._context.namespace)

    def _look(self) -> tuple[_AtEnd, list[str] | None]:
        """Return the experiment's state before anything is freed, and its own names."""
        usages: tuple[Usage, ...] = ()
        waiting: list[Held] = []
        own: list[str] | None = None
        watched: list[Watched] = []
        complete = False
        try:
            usages = self._context.meter.settle(self._measurement)
            waiting = self.waiting()
            own = self.scope.own_names()
            watched = self._watch(own)
            complete = True
        except MemoryError:  # now more than ever the names must be deleted
            self.note("memory was too short to list everything that the experiment held")
        consumed = {usage.device: usage.delta_bytes for usage in usages}
        before = {usage.device: usage.after_bytes for usage in usages}
        return _AtEnd(consumed, before, waiting, watched, complete), own

    def _release_tracebacks(self) -> None:
        if self.failed:
            for line in self._recovery.release_stored_tracebacks():
                self.note(line)

    def _watch(self, own: list[str]) -> list[Watched]:
        """Return the arrays held by the scope's names and outputs, to be watched."""
        scope, search = self.scope, ArraySearch(self._baseline.was_there)
        namespace, outputs = self._context.namespace, self.outputs.since(self.outputs_at_start)
        values = ((name, namespace.get(name)) for name in scope.names_to_delete(own))
        named = [(name, value) for name, value in values if not is_atom(value)]
        named += [(f"Out[{key}]", value) for key, value in outputs.items()]
        ours = set(own)
        for name, value in named_objects(namespace) if named else ():
            if is_ownable(name) and name not in ours:
                search.ignore(value)  # names made the notebook's by ``global`` are no leak
        return watch_names(named, search)

    def _find_survivors(self, at_end: _AtEnd) -> tuple[Held, ...]:
        if not at_end.complete:
            return ()
        search = ArraySearch()
        values = [self._context.namespace.get(name) for name in self.scope.outcome.kept]
        kept = {array.storage for value in values for _, array in search.find(value)}
        try:
            return self._survivors.of_experiment(
                at_end.watched,
                known=lambda item, array: array.storage in kept or self._baseline.was_there(item, array),
                certain=self._baseline.is_complete,
                first_cell=min((cell.execution_count or 0 for cell in self._cells), default=None),
            )
        except Exception as error:  # everything has been freed: this only lists the rest
            self.note(f"what is still alive could not be listed: {said(error)}")
            return ()

    def _make_record(
        self, at_end: _AtEnd, usages: tuple[Usage, ...], seconds: float, survivors: tuple[Held, ...]
    ) -> ExperimentRecord:
        outcome = self.scope.outcome
        return ExperimentRecord(
            name=self.name,
            started_at=self._started_at,
            duration_seconds=seconds,
            cells=tuple(self._cells),
            usages=usages,
            consumed=at_end.consumed,
            reclaimed=reclaim.fallen(at_end.before, {usage.device: usage.after_bytes for usage in usages}),
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
        if size >= self._context.config.min_held_bytes:
            names = ", ".join(held.name for held in at_end.waiting)
            notes.append(f"the restored objects ({names}) took {format_bytes(size)} while the experiment ran")
        if self._budget is not None:
            notes += [*self.limit_notes, *self._budget.refusals]
        notes += self._remarks
        if self._allocations is not None:
            notes.append(self._allocations.remark)
        return notes + [f"{step.name}: {step.error}" for step in self._steps if step.error]


def parse_parameters(words: Iterable[str]) -> Parameters:
    """Return the parameters that words such as ``lr=1e-3`` name; what reads as a number is one."""
    found: Parameters = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ExperimentError(
                f"--note: {word!r} is not NAME=VALUE; write the experiment's name first, then for instance "
                "--note lr=1e-3 bs=64"
            )
        if name in found:
            raise ExperimentError(f"--note: {name} is given twice")
        found[name] = _number(value)
    return found


def checked_parameters(given: object) -> Parameters:
    """Return ``note=`` with plain values, so that the record can be written to any file."""
    if not is_instance(given, Mapping) and not is_instance(given, dict):
        raise ExperimentError("note must be a dictionary of parameters: note={'lr': 1e-3, 'bs': 64}")
    found: Parameters = {}
    for name, value in given.items():  # type: ignore[attr-defined]  # is_instance says so
        if not _NAME.fullmatch(text_of(name)):
            raise ExperimentError(f"note: a parameter's name must be one word of text, not a {type_name(name)}")
        found[name] = _plain(name, value)
    return found


def _plain(name: str, value: object) -> int | float | str:
    if type(value) is bool:
        return str(value)
    if is_instance(value, int):
        return int.__int__(value)  # type: ignore[arg-type]  # NumPy's and enums' are made plain
    if is_instance(value, float):
        return _finite(float.__float__(value))  # type: ignore[arg-type]
    if is_instance(value, str):
        return str.__str__(value)
    raise ExperimentError(f"note: {name} is a {type_name(value)}; a parameter is a number or text, so write str(...)")


def _number(text: str) -> int | float | str:
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return _finite(float(text)) if text.isascii() and "_" not in text else text
    except ValueError:
        return text


def _finite(value: float) -> float | str:
    """Return what JSON can hold: it has no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)

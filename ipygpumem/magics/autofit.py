"""``%%autofit``: reruns a cell with smaller values until it fits.

``loop_over_body`` (``shell/ipython/rewriting.py``) puts a loop around the cell's body, which calls
the ``CellFit`` made here: ``while fit.again(): with fit: ...``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.inputtransformer2 import TransformerManager

from ipygpumem import interrupts
from ipygpumem.errors import AutofitError, quoted
from ipygpumem.estimating.records import FITS
from ipygpumem.fitting.fit import TOO_LARGE, Fit
from ipygpumem.fitting.plan import Number, Plan, Values
from ipygpumem.heap.walks.array_search import arrays_of_names
from ipygpumem.introspect import type_name
from ipygpumem.magics import completions
from ipygpumem.report.autofit import autofit_report
from ipygpumem.report.layout import Report
from ipygpumem.report.words import clean
from ipygpumem.scope.bindings import Bindings, bindings_of
from ipygpumem.scope.scope import Scope
from ipygpumem.shell.app import App
from ipygpumem.shell.cell import Cell
from ipygpumem.shell.commands.declarations import Options, argument, command, integer, option
from ipygpumem.shell.ipython.last_errors import last_error_id, shown_since
from ipygpumem.shell.ipython.rewriting import FIT_NAME, first_lines
from ipygpumem.units import format_bytes

_MISSING = object()
"""Stands for the object of a variable that did not exist."""
_IS_NOT_USED = "the cell does not use {}: all tries are the same, unless code that it calls uses {}"
_HAS_SET_ITSELF = "the cell has set {} itself: its value is not the one that was tried"
_SETS_ITSELF = "the cell sets {} itself, which replaces the value to try: delete that line"


@command(
    "%%autofit",
    "rerun a cell with smaller values until it fits in memory; "
    "the variable keeps the value that fits",
    argument(
        "variables",
        "NAME=VALUE",
        "such as batch_size=1024; several are reduced in turn; "
        "NAME alone starts at its current value",
        offers=completions.numbers,
        many=True,
        missing="which variable? For instance: %%autofit batch_size=1024",
    ),
    option(
        "--min", "N", "smallest value, for all or each: --min batch_size=8 seq_len=128", many=True
    ),
    option(
        "--step",
        "STEP",
        "halve, a factor such as 0.9, or search: halve, then go up to the largest that fits",
        offers=("halve", "search", "0.9"),
    ),
    option("--headroom", "5%", "share of the device's memory that must stay free at the peak"),
    option("--max-tries", "10", "maximum number of tries after the first", to=integer(minimum=0)),
    details=(
        "Followed by a line ``%%estimate``, it finds the largest value that fits from estimates "
        "alone, without the device.\n``ipygpumem.autofit`` does the same for a function."
    ),
)
def of_cell(app: App, options: Options) -> list[Report]:
    """Create the ``CellFit`` that the loop around the running cell's body calls, and let the loop
    find it.
    """
    cells = app.context.cells
    running = cells.running()
    if not running:
        raise UsageError("%%autofit must be the first line of a cell that you run yourself")
    running[-1].fit = CellFit(app, running[-1], options)
    # It needs nothing of the extension, because the cell may unload it.
    find_fit = lambda: cells.running()[-1].fit  # noqa: E731  # a function of one line
    if FIT_NAME in vars(builtins):  # set by a cell in another thread
        setattr(builtins, FIT_NAME, find_fit)
    else:  # IPython removes it after the last running cell
        app.context.shell.builtin_trap.add_builtin(FIT_NAME, find_fit)
    return []


def _plan_of(options: Options, namespace: dict[str, Any]) -> Plan:
    """Return the plan of the tries that a line describes; an AutofitError names a mistake in it."""
    variables = dict(_variable(word, namespace) for word in options.variables)
    return Plan(
        variables,
        smallest=_minima(options.min),
        step=options.step,
        headroom=options.headroom,
        max_tries=options.max_tries,
    )


def _variable(word: str, namespace: dict[str, Any]) -> tuple[str, Number]:
    """Return the variable that a word such as ``batch_size=1024`` names, and the value with which
    to start: the variable's present one if the word has none.
    """
    name, equals, text = word.partition("=")
    if not name.isidentifier():
        raise AutofitError(
            f"{word!r} is not a variable: write NAME=NUMBER, such as batch_size=1024"
        )
    if equals:
        return name, _parsed_number(name, text)
    if name not in namespace:
        raise AutofitError(
            f"there is no variable {quoted(name)}: write {name}=NUMBER to set where to start"
        )
    value = namespace[name]
    if type(value) is not int and type(value) is not float:
        raise AutofitError(
            f"{name} is a {type_name(value)}: autofit reduces whole numbers and floats"
        )
    return name, value


def _minima(words: list[str]) -> Number | dict[str, Number] | None:
    """Return the smallest values that ``--min`` sets: one for all variables (``--min 8``), or one
    by name (``--min batch_size=8``); None if there are none.
    """
    if len(words) == 1 and "=" not in words[0]:
        return _parsed_number("--min", words[0])
    minima: dict[str, Number] = {}
    for word in words:
        name, _, text = word.partition("=")
        minima[name] = _parsed_number(f"--min {name}", text)
    return minima or None


def _parsed_number(source: str, text: str) -> Number:
    """Return the number that a text means: ``1e3`` is the integer 1000, and ``1.0`` a float, which
    is reduced to 0.5.

    Raises:
        AutofitError: the text of ``source``, such as a variable, is no number.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise AutofitError(
            f"{source}: {text[:40]!r} is not a number; write one such as 1024 or 0.5"
        ) from None
    if "." not in text and value.is_integer():
        return int(value)
    return value


class _CellTry:
    """One try of the cell's code with values of the variables, in a scope of its own, and its
    results.

    Args:
        namespace: the notebook's names.
        bindings: the names that the code binds.
        values: the values of the variables.
        enclosing: the scopes of the open experiments, innermost last.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        bindings: Bindings,
        values: Values,
        enclosing: Sequence[Scope],
    ) -> None:
        self._namespace = namespace
        self._values = values
        namespace.update(values)
        self._scope = Scope(namespace)
        self._scope.expect_bindings(bindings)
        self._scope.save(bindings.bound)
        names = bindings.bound | bindings.deleted
        self._outer_names: list[tuple[Scope, set[str]]] = []
        """For each open scope, the names of the code that it regarded as outer ones before the try:
        if the code deletes one, and the try is undone, it is an outer name again.
        """
        for scope in enclosing:
            self._outer_names.append((scope, scope.outer_among(names) & namespace.keys()))
        self.depth = len(enclosing)
        """Number of experiments that were open before the try."""
        self._last_error_id = last_error_id()
        self.overwritten: list[str] = []
        """Variables that the try's code has set itself; set once the code has ended."""
        self.value: object = None
        """The value of the body's last statement, which IPython shows after the loop if the try is
        the last one.
        """
        self.estimate: object = None
        """The estimate that a ``%%estimate`` in the cell has made."""
        self._is_closing = False
        """True if ``close`` was interrupted; calling it again continues."""
        self.is_closed = False

    def note_overwritten(self) -> None:
        """Note in ``overwritten`` the variables that no longer have the values of the try."""
        values = self._values.items()
        self.overwritten = [
            name for name, value in values if self._namespace.get(name) is not value
        ]

    def error_shown(self) -> BaseException | None:
        """Return the error that a magic such as %run has shown in the try without raising it."""
        return shown_since(self._last_error_id)

    def saved_bytes(self) -> int:
        """Return the bytes of the tensors and arrays that the cell's names had before the try, and
        that the scope keeps to restore them. Other objects are not measured: it would take long.
        """
        return sum(row.size_bytes for row in arrays_of_names(self._scope.saved))

    def leave_names_of_other_threads(self) -> None:
        """Leave the new names that the try's code does not bind to the cells of other threads, such
        as a subshell's.
        """
        appeared = self._namespace.keys() - set(self._scope.names_at_start)
        self._scope.leave_names((), appeared)

    def close(self, enclosing: Scope | None) -> None:
        """Delete the names of the try, or restore their old objects.

        Args:
            enclosing: the scope of the innermost open experiment.
        """
        self._is_closing = True
        self._scope.close(enclosing)
        for scope, names in self._outer_names:
            scope.add_outer(names & self._namespace.keys())
        self._is_closing = False
        self.is_closed = True

    def end_as_last(self, enclosing: Scope | None) -> None:
        """End the last try: its names stay with their new objects, unless ``close`` was interrupted
        and continues here.
        """
        if self._is_closing:
            self.close(enclosing)
        elif not self.is_closed:
            self._scope.saved.clear()


def _source_of(cell: Cell) -> str:
    """Return the code of a cell without the lines of our magics above it.

    Raises:
        AutofitError: two of these lines are ``%%autofit``, or there is no code.
    """
    names, source = first_lines(cell.source)
    if names.count("autofit") > 1:
        raise AutofitError(
            "an autofit is already running; to reduce several variables, put them on one line"
        )
    if not source.strip():
        raise AutofitError("the cell is empty: write the code to fit below the line with %%autofit")
    return source


def _bindings_in(cell: Cell, source: str) -> Bindings:
    """Return the names that a cell binds, also if a magic such as %%capture runs its body as a cell
    of its own.
    """
    bindings = cell.code.bindings()
    if source.startswith("%%"):
        body = re.sub(r"\A(?:%%.*\n)+", "", source)
        # the body of %%bash, or an error that the magic will show
        with contextlib.suppress(SyntaxError):
            code = TransformerManager().transform_cell(body)
            bindings = bindings_of(ast.parse(code))
    return bindings


class CellFit:
    """The autofit of one running cell.

    The loop around the cell's body calls ``again`` before each try, and the body is a block of it:
    ``while fit.again(): with fit: ...``. After the cell, ``end`` returns the report.
    """

    def __init__(self, app: App, cell: Cell, options: Options) -> None:
        self._cell = cell
        self._context = app.context
        self._experiments = app.experiments
        namespace = app.context.namespace
        plan = _plan_of(options, namespace)
        self._source = _source_of(cell)
        ran_out = self._experiments.ran_out_in_try
        self._fit = Fit(plan, self._context.meter, ran_out, self._context.garbage)
        self._bindings = _bindings_in(cell, self._source)
        for name in plan.values.keys() & self._bindings.assigned:
            raise AutofitError(_SETS_ITSELF.format(name))
        self._before = {name: namespace.get(name, _MISSING) for name in plan.values}
        """The objects of the variables before the first try."""
        self._try: _CellTry | None = None
        """The last try, running or ended; None before the first one."""
        self._saved_bytes = 0
        """Memory of the old values of the cell's names during the tries."""
        self._reports: list[Report] = []
        """The report of the last estimate that a ``%%estimate`` of the cell has made."""
        self._is_over = False
        """True once the code has ended, or the extension was unloaded."""
        self._join_cell()

    def _join_cell(self) -> None:
        """Let the end of the cell end the autofit, and the innermost open experiment own its
        variables.
        """
        self._cell.at_code_end.append(self._code_ended)
        self._cell.after_recovery.append(self.end)
        variables = set(self._before)
        enclosing = self._enclosing()
        if enclosing is not None:  # the experiment's end deletes the variables
            enclosing.expect_bindings(Bindings(assigned=variables))
            enclosing.save(variables)

    def _enclosing(self) -> Scope | None:
        """Return the scope of the innermost open experiment."""
        here = self._experiments.here()
        return here[-1].scope if here else None

    # -- called by the loop ----------------------------------------------------------------------

    def again(self) -> bool:
        """Prepare the next try and return True; return False if the last one is final.

        Before a further try, the names of the last one are deleted.

        Raises:
            UsageError: no value fits.
        """
        if self._is_over:
            return False
        if self._cell.errors.interrupted_inside:
            # A Ctrl-C came at the end of a cell inside this one, where it could not be raised.
            raise KeyboardInterrupt
        if self._fit.tries:
            is_final = not self._fit.has_next and self._fit.tries[-1].outcome not in TOO_LARGE
            if is_final:
                return False
            try:
                with interrupts.reraise_swallowed():
                    self._undo_last_try()
                self._raise_if_none_fits()
            except AutofitError as error:
                # IPython shows its message alone.
                raise UsageError(clean(f"%%autofit: {error}")) from None
        scopes = [experiment.scope for experiment in self._experiments.here()]
        values = dict(self._fit.plan.values)
        self._try = _CellTry(self._context.namespace, self._bindings, values, scopes)
        return True

    def __enter__(self) -> None:
        """Begin to measure a try."""
        self._fit.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End a try, and record its outcome; return True to suppress its error, because a smaller
        value may fit.
        """
        if self._is_over or self._try is None:
            return False
        self._try.note_overwritten()
        failure = error or self._try.error_shown()
        estimate = self._try.estimate or self._try.value
        try:
            return self._fit.end(failure, estimate)
        except AutofitError as mistake:
            raise UsageError(clean(f"%%autofit: {mistake}")) from None

    def estimated(self, estimate: object, reports: list[Report]) -> None:
        """Take the estimate of the cell's ``%%estimate`` as the outcome of the running try. Its
        ``reports`` are shown at the end if this is the last try.
        """
        if self._try is not None:
            self._try.estimate = estimate
        self._reports = reports

    def keep(self, value: object) -> None:
        """Store the value of the cell's last expression until a try fits: the loop would discard
        it.
        """
        if self._try is not None:
            self._try.value = value

    def take(self) -> object:
        """Return the value that ``keep`` has stored, for the cell to display, and forget it."""
        if self._try is None:
            return None
        value = self._try.value
        self._try.value = None
        return value

    # -- between tries ---------------------------------------------------------------------------

    def _undo_last_try(self) -> None:
        """Delete the last try's names, end the experiments that it opened, and free its memory."""
        last_try = self._try
        if last_try is not None:
            last_try.value = None
            while len(self._experiments.here()) > last_try.depth:
                self._experiments.end_experiment(self._experiments.here()[-1])
            if not last_try.is_closed:
                self._saved_bytes = last_try.saved_bytes()
                if self._context.cells.in_several_threads:
                    last_try.leave_names_of_other_threads()
                last_try.close(self._enclosing())
        self._fit.free_memory()

    def _raise_if_none_fits(self) -> None:
        """Restore the variables and raise an ``AutofitError`` if no further try can fit."""
        overwritten = self._overwritten_in_last_try()
        if self._fit.has_next and not overwritten:
            return
        namespace = self._context.namespace
        for name, value in self._before.items():
            if value is _MISSING:
                namespace.pop(name, None)
            else:
                namespace[name] = value
        if overwritten:
            raise AutofitError(_SETS_ITSELF.format(overwritten[0]))
        self._fit.raise_if_nothing_fits()

    def _overwritten_in_last_try(self) -> list[str]:
        """Return the variables that the last try's code has set itself."""
        return [] if self._try is None else self._try.overwritten

    # -- at the end of the cell ------------------------------------------------------------------

    def _code_ended(self) -> list[Report]:
        """Stop measuring once the cell's code has ended; there is nothing to show yet."""
        self._is_over = True
        self._fit.abandon()
        return []

    def end(self) -> list[Report]:
        """Return the report at the end of the cell, even after an error."""
        if self._try is not None:
            self._try.end_as_last(self._enclosing())
        if not self._fit.tries:
            return self._reports
        return [*self._reports, autofit_report(self._fit.tries, self._notes(), self._fit.plan)]

    def _notes(self) -> list[str]:
        """Return notes on variables that the cell does not use or sets itself, and on old values
        that took memory during the tries.
        """
        unused = [name for name in self._before if not re.search(rf"\b{name}\b", self._source)]
        notes = [_IS_NOT_USED.format(name, name) for name in unused]
        if self._fit.tries[-1].outcome == FITS:
            notes += [_HAS_SET_ITSELF.format(name) for name in self._overwritten_in_last_try()]
        if self._saved_bytes >= self._context.config.min_held_bytes:
            size = format_bytes(self._saved_bytes)
            notes.append(
                f"the old values of the cell's names held {size} during the tries: del them before "
                f"the cell"
            )
        return notes

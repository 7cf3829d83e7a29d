"""``%%autofit``: reruns a cell with smaller values until it fits. ``loop_over_body`` creates the
loop itself.
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
from ipygpumem.heap.array_search import arrays_of_names
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
    option("--max-tries", "10", "maximum number of tries after the first", to=integer(least=0)),
    details=(
        "Followed by a line ``%%estimate``, it finds the largest value that fits from estimates "
        "alone, without the device.\n``ipygpumem.autofit`` does the same for a function."
    ),
)
def of_cell(app: App, options: Options) -> list[Report]:
    """Fit the running cell: create the ``CellFit`` that the loop around its body calls."""
    cells = app.context.cells
    running = cells.running()
    if not running:
        raise UsageError("%%autofit must be the first line of a cell that you run yourself")
    running[-1].fit = CellFit(app, running[-1], options)
    find = lambda: cells.running()[-1].fit  # noqa: E731  # works even if the cell unloads the extension
    if FIT_NAME in vars(builtins):  # set by a cell in another thread
        setattr(builtins, FIT_NAME, find)
    else:  # IPython removes it after the last running cell
        app.context.shell.builtin_trap.add_builtin(FIT_NAME, find)
    return []


def _variable(word: str, namespace: dict[str, Any]) -> tuple[str, Number]:
    """Return the variable that a word such as ``batch_size=1024`` names, and its first value."""
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
    """Return the smallest value of all variables, or of each; None if there is no limit."""
    if len(words) == 1 and "=" not in words[0]:
        return _parsed_number("--min", words[0])
    minima: dict[str, Number] = {}
    for word in words:
        name, _, text = word.partition("=")
        minima[name] = _parsed_number(f"--min {name}", text)
    return minima or None


def _parsed_number(what: str, text: str) -> Number:
    """Return the number that a text means: 1e3 is as whole as 1000, and 1.0 is a float."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise AutofitError(
            f"{what}: {text[:40]!r} is not a number; write one such as 1024 or 0.5"
        ) from None
    if "." not in text and value.is_integer():
        return int(value)
    return value


class _OpenTry:
    """The names of one try: the values given to the variables, and what the cell's code binds."""

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
        self._outer: list[tuple[Scope, set[str]]] = []
        """The names that each open scope regarded as outer before the try."""
        for scope in enclosing:
            self._outer.append((scope, scope.outer_among(names) & namespace.keys()))
        self.depth = len(enclosing)
        """Number of experiments that were open."""
        self.last_error_id = last_error_id()
        self.is_closing = False
        """True if ``close`` was interrupted; calling it again continues."""
        self.is_closed = False

    def overwritten(self) -> list[str]:
        """Return the variables that no longer have the values of the try."""
        values = self._values.items()
        return [name for name, value in values if self._namespace.get(name) is not value]

    def saved_bytes(self) -> int:
        """Return the bytes that the overwritten values of the cell's names hold."""
        return sum(row.size_bytes for row in arrays_of_names(self._scope.saved))

    def close(self, enclosing: Scope | None) -> None:
        """Delete the names of the try."""
        self.is_closing = True
        self._scope.close(enclosing)
        for scope, names in self._outer:
            scope.add_outer(names & self._namespace.keys())
        self.is_closing = False
        self.is_closed = True

    def leave(self) -> None:
        """Let the names stay."""
        self._scope.saved.clear()


def _source_of(cell: Cell) -> str:
    """Return the code of a cell without the lines of our magics above it.

    Raises:
        AutofitError: two of these are ``%%autofit``, or there is no code.
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
    """The autofit of one running cell; the loop around its body calls ``again`` and enters it."""

    def __init__(self, app: App, cell: Cell, options: Options) -> None:
        self._context = app.context
        self._experiments = app.experiments
        self._namespace = namespace = app.context.namespace
        variables = dict(_variable(word, namespace) for word in options.variables)
        plan = Plan(
            variables,
            smallest=_minima(options.min),
            step=options.step,
            headroom=options.headroom,
            max_tries=options.max_tries,
        )
        self._source = _source_of(cell)
        ran_out = self._experiments.ran_out_in_try
        self._fit = Fit(plan, self._context.meter, ran_out, self._context.garbage)
        self._bindings = _bindings_in(cell, self._source)
        for name in plan.values.keys() & self._bindings.assigned:
            raise AutofitError(_SETS_ITSELF.format(name))
        self._before = {name: namespace.get(name, _MISSING) for name in plan.values}
        """The objects of the variables before the first try."""
        self._try: _OpenTry | None = None
        """The last one."""
        self._undone: list[str] = []
        """Variables that the last try's code has set itself."""
        self._saved_bytes = 0
        """Memory of the old values of the cell's names during the tries."""
        self._value: object = None
        """The value of the body's last statement, which IPython shows after the loop."""
        self._estimate: object = None
        self._reports: list[Report] = []
        """The report of the last estimate."""
        self._cell = cell
        self._is_left = False
        """True once the code has ended, or the extension was unloaded."""
        cell.at_code_end.append(self._leave)
        cell.after_recovery.append(self.end)
        enclosing = self._enclosing()
        if enclosing is not None:  # the variables count as bound by the cell
            enclosing.expect_bindings(Bindings(assigned=set(plan.values)))
            enclosing.save(set(plan.values))

    def _enclosing(self) -> Scope | None:
        """Return the scope of the innermost open experiment."""
        here = self._experiments.here()
        return here[-1].scope if here else None

    # -- called by the loop ----------------------------------------------------------------------

    def again(self) -> bool:
        """Prepare the next try and return True; return False after the final one."""
        if self._is_left:
            return False
        if self._cell.interrupted_inside:
            raise KeyboardInterrupt
        if self._fit.tries:
            if not self._fit.more and self._fit.tries[-1].outcome not in TOO_LARGE:
                return False
            try:
                with interrupts.reraise_swallowed():
                    self._take_back()
                self._stop_if_none_fits()
            except AutofitError as error:
                raise UsageError(clean(f"%%autofit: {error}")) from None
        scopes = [experiment.scope for experiment in self._experiments.here()]
        values = dict(self._fit.plan.values)
        self._try = _OpenTry(self._namespace, self._bindings, values, scopes)
        return True

    def __enter__(self) -> None:
        self._fit.begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._is_left or self._try is None:
            return False
        self._undone = self._try.overwritten()
        # Magics such as %run show an error without raising it.
        failure = error or shown_since(self._try.last_error_id)
        estimate = self._estimate or self._value
        self._estimate = None
        try:
            return self._fit.end(failure, estimate)
        except AutofitError as mistake:
            raise UsageError(clean(f"%%autofit: {mistake}")) from None

    def estimated(self, estimate: object, reports: list[Report]) -> None:
        """Use the cell's ``%%estimate`` as the try's outcome; ``reports`` of the last try are shown
        at the end.
        """
        self._estimate = estimate
        self._reports = reports

    def keep(self, value: object) -> None:
        """Store the value of the cell's last expression until a try fits."""
        self._value = value

    def take(self) -> object:
        """Return the value of the last expression for the cell to display."""
        value = self._value
        self._value = None
        return value

    # -- between tries ---------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Delete the last try's names, end the experiments that it opened, and free its memory."""
        self._value = None
        last = self._try
        if last is not None:
            while len(self._experiments.here()) > last.depth:
                self._experiments.end_experiment(self._experiments.here()[-1])
            if not last.is_closed:
                self._saved_bytes = last.saved_bytes()
                last.close(self._enclosing())
        self._fit.free_memory()

    def _stop_if_none_fits(self) -> None:
        """If no further try can fit, restore the variables and raise ``AutofitError``."""
        if self._fit.more and not self._undone:
            return
        for name, value in self._before.items():
            if value is _MISSING:
                self._namespace.pop(name, None)
            else:
                self._namespace[name] = value
        if self._undone:
            raise AutofitError(_SETS_ITSELF.format(self._undone[0]))
        self._fit.check()

    # -- at the end of the cell ------------------------------------------------------------------

    def _leave(self) -> list[Report]:
        self._is_left = True
        self._fit.abandon()
        return []

    def end(self) -> list[Report]:
        """Return the report at the end of the cell, even after an error."""
        last = self._try
        if last is not None and last.is_closing:
            last.close(self._enclosing())
        elif last is not None and not last.is_closed:
            last.leave()
        if not self._fit.tries:
            return self._reports
        return [*self._reports, autofit_report(self._fit.tries, self._notes(), self._fit.plan)]

    def _notes(self) -> list[str]:
        """Return notes about useless tries, and about old values that made them larger."""
        unused = [name for name in self._before if not re.search(rf"\b{name}\b", self._source)]
        notes = [_IS_NOT_USED.format(name, name) for name in unused]
        if self._fit.tries[-1].outcome == FITS:
            notes += [_HAS_SET_ITSELF.format(name) for name in self._undone]
        if self._saved_bytes >= self._context.config.min_held_bytes:
            size = format_bytes(self._saved_bytes)
            notes.append(
                f"the old values of the cell's names held {size} during the tries: del them before "
                f"the cell"
            )
        return notes

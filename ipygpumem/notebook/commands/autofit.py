"""``%%autofit``: a cell runs again with a smaller value until it fits. ``loops`` makes the loop itself."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError

from ipygpumem.errors import AutofitError, NotLoadedError, quoted
from ipygpumem.fitting import fit, functions
from ipygpumem.fitting.fit import FITS, TOO_LARGE, AutofitResult, Fit
from ipygpumem.fitting.plan import Number, Values
from ipygpumem.introspect import type_name
from ipygpumem.notebook.cell import Cell, CellStack
from ipygpumem.notebook.commands.parsing import Options
from ipygpumem.notebook.ipython.rewriting import FITS_NAME, LoopOfCell, first_lines
from ipygpumem.notebook.ipython.stored_errors import last_error, shown_since
from ipygpumem.notebook.notebook import Notebook, notebook_of
from ipygpumem.objects import interrupts
from ipygpumem.objects.walk import ArraySearch
from ipygpumem.reports.autofit import autofit_report
from ipygpumem.reports.layout import Report, clean
from ipygpumem.scopes.bindings import Bindings
from ipygpumem.scopes.scope import Scope
from ipygpumem.units import format_bytes

_MISSING = object()
NESTED = "%%autofit: an autofit is running already; to reduce several variables, put them on one line"


def fit_cell(notebook: Notebook, options: Options) -> list[Report]:
    """Fit the running cell: the loop around its body asks the ``CellFit`` made here.

    Raises:
        UsageError: no cell is running.
        AutofitError: what is asked for makes no sense, or the cell is fitted already.
    """
    running = notebook.context.cells.running()
    if not running:
        raise UsageError("%%autofit must be the first line of a cell that you run yourself")
    if any(cell.of(LoopOfCell).fit is not None for cell in running):
        raise AutofitError(NESTED)
    running[-1].of(LoopOfCell).fit = CellFit(notebook, running[-1], options)
    fits = _Fits(notebook.context.cells)
    if FITS_NAME in vars(builtins):  # a cell in another thread has it
        setattr(builtins, FITS_NAME, fits)
    else:  # IPython takes it out again when no cell runs any more
        notebook.context.shell.builtin_trap.add_builtin(FITS_NAME, fits)
    return []


class _Fits:
    """Where the loops find their fits, even if the cell unloads the extension."""

    def __init__(self, cells: CellStack) -> None:
        self._cells = cells

    @property
    def fit(self) -> CellFit:
        """The autofit of the running cell."""
        found: CellFit = self._cells.running()[-1].of(LoopOfCell).fit
        return found


def given(options: Options, namespace: dict[str, Any]) -> tuple[Values, fit.Options]:
    """Return the variables with their starts, and what the options say.

    Raises:
        AutofitError: what stands for a variable or a number is none.
    """
    start = dict(_variable(word, namespace) for word in options.variables)
    return start, fit.Options(_minima(options.min), options.step, options.headroom, options.max_tries)


def _variable(word: str, namespace: dict[str, Any]) -> tuple[str, Number]:
    name, equals, text = word.partition("=")
    if not name.isidentifier():
        raise AutofitError(f"{word!r} is not a variable: write NAME=NUMBER, such as batch_size=1024")
    if equals:
        return name, _number(name, text)
    if name not in namespace:
        raise AutofitError(f"there is no variable {quoted(name)}: write {name}=NUMBER to say where to start")
    value = namespace[name]
    if type(value) is not int and type(value) is not float:
        raise AutofitError(f"{name} is a {type_name(value)}: autofit reduces whole numbers and floats")
    return name, value


def _minima(words: list[str]) -> Number | dict[str, Number] | None:
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return _number("--min", words[0])
    pairs = [word.partition("=") for word in words]
    return {name: _number(f"--min {name}", text) for name, _, text in pairs}


def _number(what: str, text: str) -> Number:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
        return int(value) if "." not in text and value.is_integer() else value  # 1e3 is as whole as 1000
    except ValueError:
        raise AutofitError(f"{what}: {text[:40]!r} is not a number; write one such as 1024 or 0.5") from None


class CellFit:
    """The autofit of one running cell; the loop in its tree calls ``again`` and enters it.

    Args:
        notebook: the shell's.
        cell: the running cell.
        options: of the line ``%%autofit``.

    Raises:
        AutofitError: what is asked for makes no sense.
    """

    def __init__(self, notebook: Notebook, cell: Cell, options: Options) -> None:
        self._notebook = notebook
        self._start, wanted = given(options, notebook.context.namespace)
        plan = wanted.plan(self._start)
        names, self._source = first_lines(str(getattr(cell.info, "raw_cell", "")))
        if names.count("autofit") > 1:
            raise AutofitError(NESTED)
        if not self._source.strip():
            raise AutofitError("the cell is empty: write the code to fit below the line with %%autofit")
        self._fit = Fit(
            plan,
            notebook.context.meter,
            headroom=wanted.share,
            limits=notebook.budgets.limits,
            ran_out=notebook.experiments.ran_out_in_try,
            garbage=notebook.context.garbage,
        )
        self._bindings = cell.code[-1].bindings() if cell.code else Bindings()
        self._before = {name: notebook.context.namespace.get(name, _MISSING) for name in self._start}
        self._given: Values = {}
        self._scope: Scope | None = None
        self._closing = False
        self._undone: list[str] = []
        self._waiting_bytes = 0
        self._depth = 0
        self._outer: list[tuple[Scope, set[str]]] = []
        """What the open scopes took for outer names before the try."""
        self._last_error = 0
        self._value: object = None
        self._cell = cell
        self._is_left = False
        """The code is over, or the extension was unloaded meanwhile."""
        cell.closers.append(self._leave)
        cell.enders.append(self.end)
        if here := notebook.experiments.here():  # the variables are bound as if a statement of the cell did it
            here[-1].scope.note(Bindings(assigned=set(self._start)))
            here[-1].scope.save(self._start)

    # -- called by the loop -----------------------------------------------------------------------------------

    def again(self) -> bool:
        """Prepare the next try and return True; return False after the one that stays.

        Raises:
            UsageError: nothing fits, or the cell itself undoes what is reduced.
        """
        if self._is_left:
            return False
        if self._cell.interrupted_inside:
            raise KeyboardInterrupt
        if self._fit.tries and not self._fit.more and self._fit.tries[-1].outcome not in TOO_LARGE:
            return False
        try:
            if self._fit.tries:
                with interrupts.kept():
                    self._take_back()
                self._check()
        except AutofitError as error:
            raise UsageError(clean(f"%%autofit: {error}")) from None
        self._given = dict(self._fit.plan.values)
        self._notebook.context.namespace.update(self._given)
        self._scope = Scope(self._notebook.context.namespace)
        self._scope.note(self._bindings)
        self._scope.save(self._bindings.bound)
        here = [experiment.scope for experiment in self._notebook.experiments.here()]
        names = self._bindings.bound | self._bindings.deleted
        self._outer = [(scope, scope.outer_among(names) & self._notebook.context.namespace.keys()) for scope in here]
        self._depth = len(here)
        self._last_error = last_error()
        return True

    def __enter__(self) -> None:
        self._fit.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._is_left:
            return False
        namespace = self._notebook.context.namespace
        self._undone = [name for name, value in self._given.items() if namespace.get(name) is not value]
        # Magics such as %run show an error and go on.
        return self._fit.end(error or shown_since(self._last_error))

    def keep(self, value: object) -> None:
        """Keep the value of the cell's last expression until a try has fitted."""
        self._value = value

    def take(self) -> object:
        """Return the value of the last expression, which the cell displays."""
        value, self._value = self._value, None
        return value

    # -- between tries ----------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Let the names of the last try go, and what it opened, and give its memory back."""
        self._value = None
        notebook, scope = self._notebook, self._scope
        while len(here := notebook.experiments.here()) > self._depth:
            notebook.experiments.close_experiment(here[-1])
        if scope is not None:
            search = ArraySearch()
            held = [search.held(name, value) for name, value in list(scope.waiting.items())]
            self._waiting_bytes = sum(entry[0].size_bytes for entry in held if entry is not None)
            self._close(scope)
        self._fit.give_back()

    def _close(self, scope: Scope) -> None:
        """Let the names of a try go; after an interrupt ``end`` calls it again, and it goes on where it stopped."""
        self._closing = True
        here = self._notebook.experiments.here()
        scope.close(here[-1].scope if here else None)
        for outer, names in self._outer:
            outer.regain(names & self._notebook.context.namespace.keys())
        self._closing = False
        self._scope = None

    def _check(self) -> None:
        """Raise ``AutofitError`` if another try makes no sense, with the variables as they were before the cell."""
        if self._fit.more and not self._undone:
            return
        for name, value in self._before.items():
            if value is _MISSING:
                self._notebook.context.namespace.pop(name, None)
            else:
                self._notebook.context.namespace[name] = value
        if self._undone:
            raise AutofitError(
                f"the cell sets {self._undone[0]} itself, which replaces the value to try: delete that line"
            )
        self._fit.check()

    # -- at the end of the cell -------------------------------------------------------------------------------

    def _leave(self) -> list[Report]:
        self._is_left = True
        self._fit.abandon()
        return []

    def end(self) -> list[Report]:
        """Return the report, once the cell is over, however it ended."""
        if self._scope is not None and self._closing:
            self._close(self._scope)
        elif self._scope is not None:
            self._scope.waiting.clear()  # the names of the last try stay
        if not self._fit.tries:
            return []
        return [autofit_report(self._fit.tries, self._remarks(), self._fit.plan)]

    def _remarks(self) -> list[str]:
        found = [
            f"the cell does not use {name}: all tries are the same, unless code that it calls uses {name}"
            for name in self._start
            if not re.search(rf"\b{name}\b", self._source)
        ]
        if self._fit.tries[-1].outcome == FITS:
            found += [
                f"the cell has set {name} itself: its value is not the one that was tried" for name in self._undone
            ]
        if self._waiting_bytes >= self._notebook.context.config.min_held_bytes:
            size = format_bytes(self._waiting_bytes)
            found.append(f"the old values of the cell's names held {size} during the tries: del them before the cell")
        return found


def fit_function(
    shell: Any, function: Callable[..., Any], start: Mapping[str, Any], options: fit.Options
) -> AutofitResult:
    """Return what fits for a function, measured by the session of ``shell`` if the extension is loaded there.

    Raises:
        AutofitError: nothing fits, what is asked for makes no sense, or the running cell is fitted itself.
    """
    __tracebackhide__ = True
    try:
        notebook = notebook_of(shell)
    except NotLoadedError:
        return functions.autofit(function, start, options)
    if any(cell.of(LoopOfCell).fit is not None for cell in notebook.context.cells.running()):
        raise AutofitError("this cell runs under %%autofit already: reduce both variables with one of the two")
    return functions.autofit(
        function,
        start,
        options,
        meter=notebook.context.meter,
        limits=notebook.budgets.limits,
        ran_out=notebook.experiments.ran_out_in_try,
        garbage=notebook.context.garbage,
    )

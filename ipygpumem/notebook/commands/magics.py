"""The magics: they parse a line, call the session, and show what comes back."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class

from ipygpumem.errors import AutofitError, ExperimentError, GpuMemError
from ipygpumem.notebook.commands.parsing import Parser, split
from ipygpumem.notebook.experiments.parameters import parse_parameters
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.objects import interrupts
from ipygpumem.reports.content import Report, clean, note

if TYPE_CHECKING:
    from ipygpumem.notebook.experiments.experiment import Experiment
    from ipygpumem.notebook.experiments.open_experiment import OpenExperiment

_PATTERN = re.compile(r"[\w*?\[\]!-]+")

_COMMANDS = {
    "on": ("actions", "switch_on"),
    "off": ("actions", "switch_off"),
    "status": ("actions", "status"),
    "preload": ("actions", "preload"),
    "free": ("actions", "free"),
    "leaks": ("leaks", "leaks"),
    "tensors": ("tensors", "tensors"),
    "history": ("history", "history"),
    "export": ("history", "export"),
    "plot": ("plot", "plot"),
    "record": ("actions", "record"),
    "postmortem": ("actions", "postmortem"),
}
"""The module and the function of each of ``%gpumem``'s commands: it takes the session and the words."""


def _experiment_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    parser.add_argument("name", nargs="*")
    parser.add_argument("--keep", nargs="+", action="extend", default=[], metavar="NAME")
    parser.add_argument("--drop-imports", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--report", choices=["full", "compact", "none"])
    parser.add_argument("--note", nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    parser.add_argument("--budget", nargs="+", action="extend", default=[], metavar="gpu=SIZE,ram=SIZE")
    parser.add_argument("--record", metavar="FILE")
    return parser


def _checked_patterns(prog: str, words: list[str]) -> list[str]:
    patterns = [part for word in words for part in word.split(",") if part]
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            raise UsageError(f"{prog}: {pattern!r} is no name and no glob; write names such as x or 'y*'")
    return patterns


def _budget(words: list[str]) -> Any:
    if not words:
        return None
    from ipygpumem.fitting.budgets import parse_budget  # loading the extension must stay fast

    return parse_budget(",".join(words))


def _one_line_errors(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our own errors into IPython's ``UsageError``."""

    @functools.wraps(magic)
    def call(*args: Any) -> Any:
        __tracebackhide__ = True  # for errors of the user's code: IPython leaves this frame out
        try:
            return magic(*args)
        except GpuMemError as error:
            raise UsageError(clean(str(error))) from None

    return call


@magics_class
class GpuMemMagics(Magics):
    """``%experiment``, ``%%experiment``, ``%gpumem``, ``%gpumemit`` and ``%%memlines``."""

    def __init__(self, shell: Any, notebook: Notebook) -> None:
        super().__init__(shell)
        self._notebook = notebook

    @line_magic("experiment")
    @_one_line_errors
    def line_experiment(self, line: str) -> None:
        """Open and close scopes over many cells.

        ::

            %experiment start NAME [--keep NAME...] [--drop-imports] [--seed N] [--report full|compact|none]
                              [--note NAME=VALUE...] [--budget gpu=SIZE,ram=SIZE] [--record FILE]
            %experiment keep x 'y*'      names (or globs) that stay at the end
            %experiment status           what is open, and what it costs so far
            %experiment end [NAME]       delete its names, restore what they shadowed, give memory back
            %experiment list             the finished ones, one row each
            %experiment compare [A B...] finished ones side by side: names, globs, or A#2 for the second run of A

        ``%%experiment NAME`` as a cell's first line does all of it for that one cell.
        """
        words = split("%experiment", line)
        commands: dict[str, Callable[[list[str]], None]] = {
            "start": self._start,
            "cell": self._start_cell,
            "end": self._end,
            "keep": self._keep,
            "status": self._status,
            "list": functools.partial(self._run, "history", "list_experiments"),
            "compare": functools.partial(self._run, "history", "compare"),
        }
        if not words or words[0] not in commands:
            given = f"no such command {words[0]!r}" if words else "a command is missing"
            raise UsageError(f"%experiment: {given}; use start NAME, end, keep NAME..., status, list or compare")
        commands[words[0]](words[1:])

    @cell_magic("experiment")
    @_one_line_errors
    def cell_experiment(self, line: str, cell: str) -> None:
        """Run one cell as a scope, like a function: afterwards its names are gone and its memory is back.

        ::

            %%experiment NAME [--keep NAME...] [--drop-imports] [--seed N] [--report full|compact|none]
            --keep NAME...   names or globs that stay, with blanks or commas: --keep model 'loss*'
            --drop-imports   delete the names of imported modules too
            --seed N         reset Python's, NumPy's and torch's random generators first
            --report STYLE   how much to show at the end
            --note NAME=VALUE...  parameters to remember with it: --note lr=1e-3 bs=64
            --budget gpu=8GiB,ram=4GiB  pretend to have less memory
            --record FILE    where CUDA memory was allocated, for torch's memory viewer (.pickle)
        """
        # A cell's first line never comes here (see rewriting.py): this serves run_cell_magic and its like.
        experiment = self._new("%%experiment", split("%%experiment", line))
        with experiment:
            result = self.shell.run_cell(cell)
            result.raise_error()

    @cell_magic("estimate")
    @_one_line_errors
    def cell_estimate(self, line: str, cell: str) -> None:
        """Say what a cell would take, without running it on a device: its tensors are fake.

        ::

            %%estimate [--device-memory 24GiB] [--device cuda:0] [--timeout 300]
            --device-memory SIZE   does it fit in this much? Without: in what each device has free
            --device D             take all tensors to be on this device, which need not be here
            --timeout SECONDS      stop it then, and name the line; 300 without
        """
        __tracebackhide__ = True  # as above
        from ipygpumem.notebook.commands.estimate import estimate  # loading the extension must stay fast

        self._show(estimate(self._notebook, self.shell, line, cell))

    def _new(self, prog: str, words: list[str]) -> Experiment:
        from ipygpumem.notebook.experiments.experiment import Experiment  # loading the extension must stay fast

        options = _experiment_parser(prog).parse_args(words)
        if not options.name:
            raise UsageError(f"{prog}: which name? It stands before the options: {prog} NAME --keep x y")
        return Experiment(
            self._notebook.experiments,
            " ".join(options.name),
            keep=_checked_patterns(prog, options.keep),
            drop_imports=options.drop_imports,
            seed=options.seed,
            report=options.report,
            note=parse_parameters(options.note),
            budget=_budget(options.budget),
            record=options.record,
        )

    def _start(self, words: list[str]) -> None:
        experiment = self._new("%experiment start", words).start()
        self._show([note(text) for text in experiment.limit_notes])  # its report may be many cells away

    def _start_cell(self, words: list[str]) -> None:
        experiment = self._new("%%experiment", words)
        self._notebook.experiments.end_with_cell(experiment.opened)
        experiment.start()

    def _innermost(self) -> OpenExperiment:
        here = self._notebook.experiments.here()
        if not here:
            others = ", ".join(repr(item.name) for item in self._notebook.experiments.open)
            raise ExperimentError(
                f"no experiment is open in this subshell; open elsewhere: {others}"
                if others
                else "no experiment is open: %experiment start NAME opens one"
            )
        return here[-1]

    def _end(self, words: list[str]) -> None:
        if not words or not self._notebook.experiments.open:
            experiment = self._innermost()
        else:
            name = " ".join(words)
            named = [item for item in self._notebook.experiments.open if item.name == name]
            if not named:
                names = ", ".join(repr(item.name) for item in self._notebook.experiments.open)
                raise ExperimentError(f"no experiment {name!r} is open; open are: {names}")
            experiment = named[0]
        self._notebook.experiments.finish(experiment)

    def _keep(self, words: list[str]) -> None:
        patterns = _checked_patterns("%experiment keep", words)
        if not patterns:
            raise UsageError("%experiment keep: which names? For instance: %experiment keep model 'loss*'")
        self._innermost().options.keep.extend(patterns)

    def _status(self, words: list[str]) -> None:
        self._run("actions", "experiment_status", words)

    def _show(self, reports: list[Report]) -> None:
        self._notebook.tools.screen.show(reports)

    @line_magic("autofit")
    @_one_line_errors
    def line_autofit(self, line: str) -> None:
        """Say that ``%%autofit`` is for whole cells; its first line is rewritten into a call of this."""
        from ipygpumem.notebook.commands.autofit import (  # loading the extension must stay fast
            NESTED,
            CellFit,
            FitOfCell,
        )

        command, _, rest = line.strip().partition(" ")
        running = self._notebook.tools.cells.running()
        if command != "cell" or not running:
            raise UsageError("%autofit: write %%autofit as the first line of a cell; a function is ipygpumem.autofit's")
        if any(cell.of(FitOfCell).fit is not None for cell in running):
            raise AutofitError(NESTED)
        running[-1].of(FitOfCell).fit = CellFit(self._notebook, running[-1], rest)

    @cell_magic("autofit")
    @_one_line_errors
    def cell_autofit(self, line: str, cell: str) -> None:
        """Run a cell again with a smaller value until it fits in memory; the variable then holds that value.

        ::

            %%autofit batch_size=1024 [NAME=VALUE...]    several are reduced in turn; NAME alone: from its value now
            --min N          the smallest value, for all or each: --min batch_size=8 seq_len=128
            --step STEP      halve, a factor such as 0.9, or search: down by halves, then up to the largest that fits
            --headroom 5%    the share of the device's memory that must stay free at the peak
            --max-tries 10   the most tries after the first
        """
        # A cell's first line never comes here (see rewriting.py): this serves run_cell_magic and its like.
        self.shell.run_cell(f"%%autofit {line}\n{cell}").raise_error()

    @property
    def fit(self) -> Any:
        """The autofit of the running cell; the loop that it puts around the body asks for it."""
        from ipygpumem.notebook.commands.autofit import FitOfCell  # loading the extension must stay fast

        return self._notebook.tools.cells.running()[-1].of(FitOfCell).fit

    @line_magic
    @_one_line_errors
    def gpumem(self, line: str) -> None:
        """Control ipygpumem.

        ::

            %gpumem on | off     show the line after each cell, or not
            %gpumem status       what is on, which experiments are open, each device's memory now
            %gpumem preload      create the accelerator's context now, and say what it costs
            %gpumem free         give memory back now: stored tracebacks, garbage, caches
            %gpumem leaks        what did not come back, and who holds it [--min SIZE]
            %gpumem tensors      tensors and arrays by storage [NAME...] [--device D] [--min SIZE] [--kind KIND]
                                 [--by name|shape|kind|cell|device] [--top N]
            %gpumem history      one row per finished cell [-n 20] [--experiment NAME]
            %gpumem export FILE  what has finished, as .json, .csv, .html or .prom [--force]
            %gpumem plot         a picture: [session|cells|devices|experiments] [--device D] [-n N]
                                 [--save FILE] [--dark] [--force]
            %gpumem record       keep a recording that outlives the kernel: on | off [--delete] | status
            %gpumem postmortem   how the last kernel died that was recorded [--all | FILE]

        All options: ``%config IPyGpuMem``.
        """
        words = split("%gpumem", line)
        if not words or words[0] not in _COMMANDS:
            given = f"no such command {words[0]!r}" if words else "a command is missing"
            raise UsageError(f"%gpumem: {given}; use {', '.join(_COMMANDS)}")
        self._run(*_COMMANDS[words[0]], words[1:])

    def _run(self, module: str, function: str, words: list[str]) -> None:
        """Show what a command gives; its module is imported only now, since loading the extension must be fast."""
        command = getattr(importlib.import_module(f"ipygpumem.notebook.commands.{module}"), function)
        with interrupts.kept():
            reports = command(self._notebook, words)
        self._show(reports)

    @line_cell_magic
    @_one_line_errors
    def gpumemit(self, line: str, cell: str | None = None) -> None:
        """Say what a statement costs: memory kept, its peak, and the time; or several, side by side.

        ::

            %gpumemit [-r RUNS] [-s SETUP] STATEMENT

            %%gpumemit [-r RUNS] [-s SETUP]
            STATEMENT                    each line is a statement; longer ones stand between lines ---
            STATEMENT
            -r RUNS     measured runs of each, after one to warm up (5)
            -s 'SETUP'  code to run before each run, not measured

        Names that a statement binds are its own; what it does to your objects stays done.
        """
        __tracebackhide__ = True
        from ipygpumem.notebook.commands.gpumemit import gpumemit  # loading the extension must stay fast

        self._show(gpumemit(self._notebook, line, cell))

    @line_cell_magic
    @_one_line_errors
    def memlines(self, line: str, cell: str | None = None) -> None:
        """Say of each line of a cell, and of functions, what it kept, its peak, its runs and its time.

        ::

            %%memlines [-f FUNCTION...] [--sort line|kept|peak|time|hits]
            -f FUNCTION  a function or method to follow too: -f train Model.forward
            --sort WHAT  the lines that ran, those that cost most first
        """
        from ipygpumem.notebook.commands.memlines import memlines  # loading the extension must stay fast

        if cell is not None:  # from run_cell_magic and its like: a cell's first line is rewritten (see rewriting.py)
            self.shell.run_cell(f"%%memlines {line}\n{cell}").raise_error()
        elif line.split()[:1] != ["cell"]:
            raise UsageError("%memlines: write %%memlines as the first line of a cell")
        else:
            memlines(self._notebook, line.split(maxsplit=1)[1] if len(line.split()) > 1 else "")

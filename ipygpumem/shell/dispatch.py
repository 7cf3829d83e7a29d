"""Creates IPython's magics: each parses its line, calls a command, and shows its reports."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class, no_var_expand

from ipygpumem import interrupts
from ipygpumem.errors import GpuMemError
from ipygpumem.failures import write_failure
from ipygpumem.shell.commands.declarations import (
    Call,
    Command,
    CommandGroup,
    CommandTable,
    Magic,
    Options,
    Run,
)
from ipygpumem.shell.ipython.rewriting import (
    NO_BODY,
    REWRITTEN,
    asks_for_help,
    is_first_line,
    is_for_engines,
    show_as_written,
    words_of,
)

if TYPE_CHECKING:
    from ipygpumem.shell.app import App  # built on the first use of a command


class HasApp(Protocol):
    """The part of the extension that its magics use."""

    @property
    def app(self) -> App:
        """The services of the shell, built on first use."""


_LOST = {"experiment": "it runs without this scope"}
"""The work that is not done if a magic fails, where that is more than the magic's own."""


class MissingPackageError(UsageError):
    """A command needs a package that is not installed.

    IPython shows ``UsageError:`` before the message of that class alone, not of this one, because
    the user's line is right.
    """

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


_MAGICS_WITH_GROWTH = ("%gpumem", "%experiment", "%%experiment")
"""Magics whose own growth is named in the line of their cell."""
OTHER_NAMES = {"gpumem": "ipygpumem"}
"""Further names of line magics: users who have written ``%load_ext ipygpumem`` try that."""


@magics_class
class GpuMemMagics(Magics):
    """All magics of the table of commands, for one shell."""

    def __init__(self, shell: Any, commands: CommandTable, extension: HasApp) -> None:
        super().__init__(shell)
        self.commands = commands
        self._extension = extension
        for magic in commands.magics.values():
            name = magic.name.lstrip("%")
            registered = _RegisteredMagic(self, magic)
            no_var_expand(registered)  # see ``_with_values_of_variables``
            if magic.name.startswith("%%"):
                self.magics["cell"][name] = registered
            else:
                self.magics["line"][name] = registered
        # A rewritten first line calls a line magic. So each cell magic is a line magic, too; the
        # line ``%estimate`` then says that ``%%estimate`` is the first line of a cell.
        for name, registered in self.magics["cell"].items():
            self.magics["line"].setdefault(name, registered)
        for name in self.magics["cell"]:
            self.magics["line"][f"%{name}"] = _MisplacedCellMagic(self, name)
        for name, other in OTHER_NAMES.items():
            self.magics["line"][other] = self.magics["line"][name]

    @property
    def app(self) -> App:
        """The services of the shell."""
        return self._extension.app

    def call(self, name: str, line: str, cell: str | None) -> None:
        """Run one of our magics.

        Args:
            name: its name without ``%``.
            line: the line after the name; that of a rewritten first line begins with a mark.
            cell: the body of a cell magic that was not rewritten; else None.
        """
        __tracebackhide__ = True
        magic = f"%{name}" if cell is None else f"%%{name}"
        help_text = self._help_text(magic, line, has_cell=cell is not None)
        is_rewritten = name in REWRITTEN
        if help_text:
            # %gpumem top -h
            sys.stdout.write(help_text)
        elif cell is not None and is_rewritten and not is_for_engines(line):
            # get_ipython().run_cell_magic("peak", "", "x = 1")
            self._run_as_plain_cell(name, line, cell)
        elif cell is not None:
            # %%estimate, or %%experiment --on 0, whose body is sent to an engine
            self._run(magic, line, cell)
        elif is_rewritten and is_first_line(line):
            # %%peak as the first line of a cell: IPython runs the body next
            if self._finds_cells_by_file():
                show_as_written(name, line)
            self._run(f"%%{name}", words_of(line))
        elif magic not in self.commands.magics:
            # %peak, which is only a cell magic
            raise UsageError(f"%{name}: write %%{name} as the first line of a cell")
        else:
            # %gpumem top
            self._run(magic, line)

    def _finds_cells_by_file(self) -> bool:
        """Return True if IPython notes which cell each of its file names stands for.

        Only then may the lines of a cell be changed in linecache. IPython 7 has no such map, and
        there ``notebook.cell_of_file`` recognises a cell by its lines.
        """
        return hasattr(self.shell.compile, "_filename_map")

    def _help_text(self, magic: str, line: str, *, has_cell: bool) -> str:
        """Return the help that a line asks for; empty if it asks for none.

        Most lines don't, and for these the modules that make help texts are not imported.
        """
        asks_above_cell = has_cell and magic in self.commands.magics and asks_for_help(line)
        may_begin_with_help = line.strip().startswith(("help", "?"))
        may_end_with_help = line.rstrip().endswith(("help", "-h"))
        if not (asks_above_cell or may_begin_with_help or may_end_with_help):
            return ""
        from ipygpumem.shell.commands.helps import help_asked_for, printed_help  # rarely used
        from ipygpumem.shell.display import terminal_columns  # as above

        if asks_above_cell:
            return printed_help(self.commands, magic, columns=terminal_columns())
        return help_asked_for(self.commands, magic, line, terminal_columns())

    def _run_as_plain_cell(self, name: str, line: str, cell: str) -> None:
        """Run a body that a magic has got as text, with ``%%name`` above it, as a cell inside the
        running one: in that cell, the first line is rewritten.

        The user has called ``run_cell_magic("peak", "", body)``, or the first line of the running
        cell could not be rewritten.
        """
        __tracebackhide__ = True
        source = f"%%{name} {line}\n{cell}"
        if self._is_running_inside_itself(source):
            # The first line cannot be rewritten, and the rewriting has reported the reason: run
            # the body alone.
            source = cell
            write_failure(f"%%{name} failed again", _LOST.get(name, ""))
        else:
            # A wrong line fails here, because IPython would show its error in both cells.
            self._parse(f"%%{name}", line)
        self.shell.run_cell(source).raise_error()

    def _is_running_inside_itself(self, source: str) -> bool:
        """Return True if the two innermost running cells both have this source: a cell whose first
        line could not be rewritten has run itself once more.
        """
        innermost_cells = self.app.context.cells.running()[-2:]
        words_of_cells = [cell.source.split() for cell in innermost_cells]
        return words_of_cells == [source.split()] * 2

    def _run(self, magic: str, line: str, *cell: str) -> None:
        """Run the command that a line names, and show its reports; ``cell`` is the body of a cell
        magic, if there is one.
        """
        __tracebackhide__ = True  # IPython hides this frame in tracebacks of the user's code
        app = self.app
        runs_users_code = bool(cell) or self.commands.magics[magic].runs_line
        try:
            with self._growth_of(magic, line, runs_users_code=runs_users_code):
                command, options = self._parse(magic, line)
                run = _run_of_option(command, options)
                if run is None:
                    reports = command.run(app, options, *cell)
                else:
                    reports = run(app, Call(command, line, options, cell))
        except (UsageError, GpuMemError) as error:
            if magic.startswith("%%") and not cell:  # a rewritten first line: the body comes next
                self._reject_cell()
            if isinstance(error, UsageError):
                raise
            from ipygpumem.report.words import clean  # the App has imported it

            message = clean(str(error))
            kind = UsageError if error.is_users_mistake else MissingPackageError
            raise kind(message) from None
        except KeyboardInterrupt as error:
            if not runs_users_code:  # otherwise IPython would show our frames
                line = f"KeyboardInterrupt: {error}".rstrip(": ")
                error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]  # IPython reads it
            raise
        app.context.display.show(reports)

    def _parse(self, magic: str, line: str) -> tuple[Command, Options]:
        """Return the command of a line, and its options; a mistake in the first line of a cell
        means that none of its code runs.
        """
        from ipygpumem.shell.commands.parsing import parse  # on the first command

        __tracebackhide__ = True
        try:
            return parse(self.commands, magic, line)
        except UsageError:
            if magic.startswith("%%"):
                self._reject_cell()
            raise

    def _reject_cell(self) -> None:
        """Note that the running cell is not run, because its first line is wrong.

        A cell without magics is run: its code has called the magic,
        ``get_ipython().run_cell_magic("peak", ...)``.
        """
        running = self.app.context.cells.running()
        if running:
            cell = running[-1]
            cell.measurement.is_rejected = cell.source.lstrip().startswith("%")

    def _growth_of(
        self, magic: str, line: str, *, runs_users_code: bool
    ) -> AbstractContextManager[None]:
        """Return a block in which growth of the process counts as the command's own, so that the
        cell's line names it; without effect for a command that runs user code.
        """
        if runs_users_code or magic not in _MAGICS_WITH_GROWTH:
            return contextlib.nullcontext()
        from ipygpumem.meter.own_growth import growth_for  # the App has imported it

        group = self.commands.find(magic)
        first_word = next(iter(line.split()), "")
        if isinstance(group, CommandGroup) and first_word in group.names:
            return growth_for(f"{magic} {first_word}")
        return growth_for(magic)


def _run_of_option(command: Command, options: Options) -> Run | None:
    """Return the function of a given option that runs instead of its command, such as that of
    ``--on``; None if no such option is given.
    """
    for argument in command.arguments:
        if argument.run is not None and getattr(options, argument.attribute) is not None:
            return argument.run
    return None


class _MisplacedCellMagic:
    """Says that a cell magic is below the first line of its cell, such as below a comment.

    There IPython takes ``%%experiment`` for a line magic of the name ``%experiment``, and would
    report that no such magic exists.
    """

    def __init__(self, magics: GpuMemMagics, name: str) -> None:
        self.__self__ = magics  # as in a method: %lsmagic groups by it
        self.__name__ = f"%{name}"
        self.__doc__ = f"Say that ``%%{name}`` must be the first line of its cell."

    def __call__(self, line: str) -> None:
        __tracebackhide__ = True
        place = "the first line of its cell, above code and comments"
        raise UsageError(f"%{self.__name__} must be {place}")


class _RegisteredMagic:
    """The callable that IPython registers for a magic."""

    def __init__(self, magics: GpuMemMagics, magic: Magic) -> None:
        self.__self__ = magics  # as in a method: %lsmagic groups by it
        self.__name__ = magic.name.lstrip("%")
        self._magic = magic

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # made when it is asked for
        from ipygpumem.shell.commands.helps import help_of  # when it is asked for

        return help_of(self.__self__.commands, self._magic.name)

    def __call__(self, line: str, cell: str | None = None) -> None:
        __tracebackhide__ = True
        if cell == NO_BODY:
            cell = ""
        if not self._magic.runs_line:
            try:
                line = _with_values_of_variables(self.__self__.shell, line)
            except Exception as error:  # the magic runs with the line as it is written
                if interrupts.is_from_signal(error):
                    raise
                self._failed(error, "variables in its line were not replaced")
        may_run_users_code = cell is not None or self._magic.runs_line
        if may_run_users_code:
            # Its errors may be the user's: nothing is caught.
            self.__self__.call(self.__name__, line, cell)
            return
        try:
            with interrupts.reraise_swallowed():
                self.__self__.call(self.__name__, line, cell)
        except UsageError:
            raise
        except BaseException as error:
            if interrupts.is_from_signal(error):
                interrupts.stop_listening()
                raise
            if not isinstance(error, Exception):
                raise
            self._failed(error, _LOST.get(self.__name__, ""))

    def _failed(self, error: Exception, lost: str) -> None:
        """Report a failure of the magic."""
        isolation = self.__self__.app.context.isolation
        isolation.failed(f"%{self.__name__}", error, lost, asked=True)


def _with_values_of_variables(shell: Any, line: str) -> str:
    """Return a line in which variables, such as ``{name}`` or ``$name``, are replaced by their
    values.

    IPython would do so itself, but it copies all names before each line, also if there are 100,000
    of them and nothing to replace. So ``no_var_expand`` tells it to leave our lines alone.
    """
    if "{" not in line and "$" not in line:
        return line
    # The frame of the user's code, whose variables are used: above this one are our magic and the
    # functions of IPython that called it.
    depth = 2
    frame = sys._getframe(2)
    while (
        frame.f_back is not None
        and frame.f_code.co_name in _CALLERS
        and frame.f_globals.get("__name__") == _IPYTHON
    ):
        depth, frame = depth + 1, frame.f_back
    expanded: str = shell.var_expand(line, depth)
    return expanded


_CALLERS = {"run_line_magic", "run_cell_magic", "magic"}
"""Functions of IPython that call a magic."""
_IPYTHON = "IPython.core.interactiveshell"

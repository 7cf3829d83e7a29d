"""Creates IPython's magics from the registry: each parses its line, calls a command, and shows its
reports.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class, no_var_expand

from ipygpumem import interrupts
from ipygpumem.errors import GpuMemError
from ipygpumem.failures import write
from ipygpumem.introspect import text_of
from ipygpumem.meter.own_growth import growth_for
from ipygpumem.report.layout import clean
from ipygpumem.shell.app import App
from ipygpumem.shell.ipython.rewriting import is_first_line, is_for_engines, words_of
from ipygpumem.shell.registry import EXTRAS, MAGICS, REWRITTEN, loaded

_LOST = {"experiment": "it runs without this scope"}
"""The work that is not done if a magic fails, where that is more than the magic's own."""


@magics_class
class GpuMemMagics(Magics):
    """All magics of the registry, for one shell."""

    def __init__(self, shell: Any, app: App) -> None:
        super().__init__(shell)
        self._app = app
        for magic in MAGICS:
            name = magic.lstrip("%")
            called = _Called(self, magic)
            no_var_expand(called)  # see ``_expanded``
            if magic.startswith("%%"):
                self.magics["cell"][name] = called
            if not magic.startswith("%%") or (name in REWRITTEN and f"%{name}" not in MAGICS):
                self.magics["line"][name] = called

    def call(self, name: str, line: str, cell: str | None) -> None:
        """Run ``%name``, ``%%name`` with a cell, or the first line ``%%name`` of the
        running cell.
        """
        __tracebackhide__ = True
        if cell is not None and name in REWRITTEN and not is_for_engines(line):
            # From run_cell_magic and similar calls, or a first line that could not be rewritten.
            source = f"%%{name} {line}\n{cell}"
            # the inner one is a retry by the run_cell below
            cells = self._app.context.cells.running()[-2:]
            texts = [text_of(getattr(running.info, "raw_cell", None)).split() for running in cells]
            if texts == [source.split()] * 2:
                source = cell
                # the reason was reported before
                write(f"%%{name} failed again", _LOST.get(name, ""))
            else:
                # below, an error would be shown twice
                loaded("magics.parsing.parse")(f"%%{name}", line)
            self.shell.run_cell(source).raise_error()
        elif cell is not None:
            self._run(f"%%{name}", line, cell)
        elif name in REWRITTEN and is_first_line(line):
            self._run(f"%%{name}", words_of(line))
        elif f"%{name}" not in MAGICS:
            raise UsageError(f"%{name}: write %%{name} as the first line of a cell")
        else:
            self._run(f"%{name}", line)

    def _run(self, magic: str, line: str, *cell: str) -> None:
        """Run a command and show its reports."""
        __tracebackhide__ = True  # IPython hides this frame in tracebacks of the user's code
        runs_users_code = True
        try:
            command, options = loaded("magics.parsing.parse")(magic, line)
            runs_users_code = bool(cell or command.ends_in_code)
            asked = growth_for(command.name) if magic == "%gpumem" else contextlib.nullcontext()
            with asked:
                if getattr(options, "on", None) is None:
                    reports = loaded(command.run)(self._app, options, *cell)
                else:
                    reports = loaded(f"extras.{EXTRAS['--on']}.on_engines")(
                        self._app, magic.lstrip("%"), command, options, line, *cell
                    )
        except GpuMemError as error:
            raise UsageError(clean(str(error))) from None
        except KeyboardInterrupt as error:
            if not runs_users_code:  # otherwise IPython would show our frames
                line = f"KeyboardInterrupt: {error}".rstrip(": ")
                error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]  # IPython reads it
            raise
        self._app.context.display.show(reports)


class _Called:
    """The callable that IPython registers for a magic."""

    def __init__(self, magics: GpuMemMagics, magic: str) -> None:
        self.__self__ = magics  # as in a method: %lsmagic groups by it
        self.__name__ = magic.lstrip("%")
        self.__doc__ = MAGICS[magic]

    def __call__(self, line: str, cell: str | None = None) -> None:
        __tracebackhide__ = True
        if self.__name__ != "gpumemit":  # code follows
            line = _expanded(self.__self__.shell, line)
        if cell is not None or self.__name__ == "gpumemit":
            # its errors may come from the user's code
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
            guard = self.__self__._app.context.guard
            guard.failed(f"%{self.__name__}", error, _LOST.get(self.__name__, ""), asked=True)


def _expanded(shell: Any, line: str) -> str:
    """Return a line with its variables, such as ``{name}`` or ``$name``.

    IPython itself copies all names before each line, also if there are 100,000 of them and nothing
    to replace.
    """
    if "{" not in line and "$" not in line:
        return line
    # from here: our magic, and the function of IPython that called it
    depth, frame = (
        2,
        sys._getframe(2),
    )
    while (
        frame.f_back is not None
        and frame.f_code.co_name in _CALLERS
        and frame.f_globals.get("__name__") == _IPYTHON
    ):
        depth, frame = depth + 1, frame.f_back
    expanded: str = shell.var_expand(line, depth)
    return expanded


_CALLERS = {"run_line_magic", "run_cell_magic", "magic"}
_IPYTHON = "IPython.core.interactiveshell"

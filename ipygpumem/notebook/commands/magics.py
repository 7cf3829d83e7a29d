"""Makes IPython's magics from the registry: each parses its line, calls a command, and shows what comes back."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, magics_class, no_var_expand

from ipygpumem.errors import GpuMemError
from ipygpumem.notebook.ipython.rewriting import is_first_line, is_for_engines, words_of
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.notebook.registry import MAGICS, Command, Magic
from ipygpumem.objects import interrupts
from ipygpumem.reports.layout import clean


@magics_class
class GpuMemMagics(Magics):
    """All magics of the registry, for one shell."""

    def __init__(self, shell: Any, notebook: Notebook) -> None:
        super().__init__(shell)
        self._notebook = notebook
        for magic in MAGICS:
            for kind in magic.kinds:
                command = magic.command(kind)
                called = _Called(self, magic, command)
                self.magics[kind][magic.name] = no_var_expand(called) if command.ends_in_code else called

    def call(self, magic: Magic, line: str, cell: str | None) -> None:
        """Do what ``%name``, ``%%name`` with a cell, or the first line ``%%name`` of a running one asks for."""
        __tracebackhide__ = True
        if cell is not None and magic.is_rewritten and not is_for_engines(line):
            # From run_cell_magic and its like: a first line never comes here. A mistake would be shown twice below.
            loaded("parsing.parse")(magic.command("cell"), line)
            self.shell.run_cell(f"%%{magic.name} {line}\n{cell}").raise_error()
        elif cell is not None:
            self._run(magic.command("cell"), line, cell)
        elif magic.is_rewritten and is_first_line(line):
            self._run(magic.command("cell"), words_of(line))
        elif magic.line is None:
            raise UsageError(f"%{magic.name}: write %%{magic.name} as the first line of a cell")
        else:
            self._run(magic.line, line)

    def _run(self, magic: Command, line: str, *cell: str) -> None:
        """Show what a command gives."""
        __tracebackhide__ = True  # for errors of the user's code: IPython leaves this frame out
        try:
            command, options = loaded("parsing.parse")(magic, line)
            runs_users_code = cell or command.ends_in_code
            with contextlib.nullcontext() if runs_users_code else interrupts.kept():
                if getattr(options, "on", None) is None:
                    reports = loaded(command.run)(self._notebook, options, *cell)
                else:
                    reports = loaded("cluster.on_engines")(
                        self._notebook, magic.name.lstrip("%"), command, options, line, *cell
                    )
        except GpuMemError as error:
            raise UsageError(clean(str(error))) from None
        self._notebook.context.screen.show(reports)


def loaded(place: str) -> Any:
    """Return a function of ``commands`` by its module and name, imported only now: loading must be fast."""
    module, _, name = place.partition(".")
    return getattr(importlib.import_module(f"ipygpumem.notebook.commands.{module}"), name)


class _Called:
    """What IPython calls for a magic. Its help, which ``?`` shows, is written when it is asked for."""

    def __init__(self, magics: GpuMemMagics, magic: Magic, command: Command) -> None:
        self.__self__ = magics  # as a method's: %lsmagic groups by it
        self.__name__ = magic.name
        self._magic = magic
        self._command = command

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # an object's own, and not its class's
        return str(loaded("help.help_of")(self._command))

    def __call__(self, line: str, cell: str | None = None) -> None:
        __tracebackhide__ = True
        self.__self__.call(self._magic, line, cell)

"""Finds the caller's environment: IPython, or a script."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import describe_error
from ipygpumem.failures import write_failure
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.interrupts import is_from_signal
from ipygpumem.meter import traces
from ipygpumem.notebook import current_shell
from ipygpumem.report import text

if TYPE_CHECKING:
    from ipygpumem.meter.traces import Traces
    from ipygpumem.report.layout import Report
    from ipygpumem.shell.app import App


def loaded_app() -> App | None:
    """Return the extension's state in the current shell; None in a script, or without the
    extension.
    """
    # Not imported for this: a script needs no IPython. Loading the extension imports it.
    options = sys.modules.get("ipygpumem.shell.config")
    shell = current_shell()
    config = None if options is None or shell is None else options.config_of(shell)
    if config is None:
        return None
    app: App = config.extension.app  # builds it in the cell that loads the extension
    return app


def current_traces() -> Traces:
    """Return the traces of the notebook, or of the script."""
    app = loaded_app()
    if app is None:
        return traces.of_script()
    return app.traces


def garbage_here() -> Garbage:
    """Return the notebook's garbage collection, or a new one in a script."""
    app = loaded_app()
    if app is None:
        return Garbage()
    return app.context.garbage


def show(report: Report, **where: Any) -> None:
    """Show a report to the caller: as a display in a notebook (see ``Display.show``), as text in a
    script.
    """
    try:
        app = loaded_app()
        if app is None:
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encodable(text.render([report]), encoding))  # noqa: T201  # requested by the script
        else:
            app.context.display.show([report], **where)
    except Exception as error:  # a broken stdout or display must not stop user code
        if is_from_signal(error):
            raise
        tell_why_not_shown(describe_error(error))


@functools.lru_cache(maxsize=16)
def tell_why_not_shown(why: str) -> None:
    """Tell on stderr why reports are not shown; once for each reason, because it is cached."""
    write_failure(f"a report could not be shown ({why})")

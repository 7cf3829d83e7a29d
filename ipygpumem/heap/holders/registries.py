"""Roots of what registries of Python and of libraries keep: the user's code put it there, and one
call takes it out.
"""

from __future__ import annotations

import signal
from typing import Any

from ipygpumem.heap.arrays import library_type
from ipygpumem.heap.holders.cuts import Cut, Kind
from ipygpumem.heap.holders.roots import Root
from ipygpumem.introspect import instance_dict, is_instance, text_of

_RANK = 1


def objects() -> dict[int, Root]:
    """Return the roots of objects that registries keep, by identity."""
    return _loggers() | _signal_handlers()


def _loggers() -> dict[int, Root]:
    """Return the loggers: the logging module keeps each of them, with its handlers and filters,
    until the end.
    """
    kind: Any = library_type("logging", "Logger")
    if kind is None:
        return {}
    found = {id(kind.root): _of_logger("root logger", "import logging; logging.getLogger()")}
    loggers = instance_dict(kind.manager) or {}
    for name, logger in list(loggers.get("loggerDict", {}).items()):
        if is_instance(logger, kind):  # else a placeholder
            code = f"import logging; logging.getLogger({name!r})".replace("'", '"')
            found[id(logger)] = _of_logger(f'logger "{text_of(name)}"', code)
    return found


def _of_logger(name: str, code: str) -> Root:
    cut = Cut(Kind.CALL, 0, "", f"{code}.handlers.clear()")
    return Root(f"the logging module, {name}", _RANK, "", code, cut=cut)


def _signal_handlers() -> dict[int, Root]:
    """Return the functions that handle signals; only the interpreter refers to them."""
    found = {}
    for number in signal.Signals:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, signal.Handlers):
            call = f"import signal; signal.signal(signal.{number.name}, signal.SIG_DFL)"
            cut = Cut(Kind.CALL, 0, "", f"{call};")
            found[id(handler)] = Root(f"handler of {number.name}", _RANK, f"{call};", cut=cut)
    return found

"""Isolates our own failures from user code in hooks of the shell; each kind of failure is reported
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ipygpumem.failures import forget_told, tell_failure
from ipygpumem.interrupts import forget_our_frames, is_from_signal, stop_listening

HookStep = tuple[Callable[..., object], str]
"""A step of our work in a hook, and what was not done if it fails: "this cell's memory was not
measured".
"""


class ErrorIsolation:
    """Isolates our own failures from user code in one shell, and reports each kind of failure once.

    An exception that a signal handler raises is none of them: it is the user's, like a Ctrl-C.
    """

    def __init__(self) -> None:
        forget_told()

    def failed(self, name: str, error: Exception, lost: str, *, asked: bool = False) -> None:
        """Report a failure of the component ``name``; see ``failures.tell_failure``."""
        tell_failure(name, error, lost, asked=asked)

    def each(self, name: str, *steps: HookStep) -> None:
        """Do all ``steps`` in order; report those that fail, and raise a signal's exception after
        the last one.
        """
        self.each_with((), name, steps)

    def each_with(self, given: tuple[object, ...], name: str, steps: Sequence[HookStep]) -> None:
        """Do steps as ``each`` does, with the arguments ``given``.

        They are not in closures, because a closure may keep a cell's result alive.
        """
        raised: list[BaseException] = []
        for work, lost in steps:
            try:
                work(*given)
            except BaseException as error:  # noqa: PERF203  # every step must run
                if is_from_signal(error):
                    forget_our_frames(error)
                    raised.append(error)
                elif isinstance(error, Exception):
                    self.failed(name, error, lost)
                else:
                    raise
        if raised:
            raise raised.pop()

    def wrap(
        self,
        name: str,
        callback: Callable[..., Any],
        *,
        lost: str,
        instead: Callable[..., Any] = lambda *_, **__: None,
        struck: Callable[..., None] | None = None,
    ) -> Callable[..., Any]:
        """Wrap ``callback`` for IPython.

        Args:
            name: the component, for the line about a failure.
            callback: the function to wrap.
            lost: what was not done because of a failure.
            instead: called with the same arguments if it fails.
            struck: called with the exception of a signal and the first argument, where IPython
                would only print it.
        """

        @functools.wraps(callback)
        def call(*args: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            try:
                return callback(*args, **options)
            except BaseException as error:
                is_signals = is_from_signal(error)
                if is_signals and struck is not None:
                    stop_listening()
                    self._call(name, instead, args, options, lost)
                    struck(error, args[0])
                    return None
                if is_signals or not isinstance(error, Exception):
                    self._call(name, instead, args, options, lost)
                    raise
                self.failed(name, error, lost)
            return self._call(name, instead, args, options, lost)

        return call

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        lost: str,
    ) -> Any:
        """Call the function that stands in for a failed one; report it if that fails too."""
        try:
            return function(*args, **options)
        except Exception as error:
            if is_from_signal(error):
                raise
            self.failed(name, error, lost)

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
"""A step of our work in a hook, and a sentence on the work that is lost if it fails: "this cell's
memory was not measured".
"""


class ErrorIsolation:
    """Isolates our own failures from user code in one shell, and reports each kind of failure once.

    An exception that a signal handler raises, such as the one of a Ctrl-C, is not our failure.
    """

    def __init__(self) -> None:
        forget_told()

    def failed(self, name: str, error: Exception, lost: str, *, asked: bool = False) -> None:
        """Report a failure of the component ``name``; see ``failures.tell_failure``.

        Args:
            name: the component, in words for the user.
            error: the failure.
            lost: the work that was not done.
            asked: True if the user has asked for the work: then it is reported each time.
        """
        tell_failure(name, error, lost, asked=asked)

    def run_all(self, name: str, *steps: HookStep) -> None:
        """Do all ``steps`` in order, even if one fails; report those that fail, and raise a
        signal's exception after the last one.

        Args:
            name: the component, for the line about a failure.
            steps: the work of each step, and the work that is lost if it fails.
        """
        self.run_all_with((), name, steps)

    def run_all_with(
        self, arguments: tuple[object, ...], name: str, steps: Sequence[HookStep]
    ) -> None:
        """Do steps as ``run_all`` does, and pass ``arguments`` to each of them.

        The arguments are not in closures, because a closure may keep a cell's result alive.
        """
        signals: list[BaseException] = []
        for work, lost in steps:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: PERF203  # every step must run
                if is_from_signal(error):
                    forget_our_frames(error)
                    signals.append(error)
                elif isinstance(error, Exception):
                    self.failed(name, error, lost)
                else:
                    raise
        if signals:
            raise signals.pop()

    def wrap(
        self,
        name: str,
        callback: Callable[..., Any],
        *,
        lost: str,
        instead: Callable[..., Any] = lambda *_, **__: None,
        on_signal: Callable[..., None] | None = None,
    ) -> Callable[..., Any]:
        """Return ``callback`` for IPython, isolated: if it fails, that is reported, and ``instead``
        is called.

        Args:
            name: the component, for the line about a failure.
            callback: the function to wrap.
            lost: the work that was not done because of a failure.
            instead: called with the same arguments if ``callback`` fails; its result is returned.
            on_signal: called with the exception of a signal and the first argument, where IPython
                would only print the exception.
        """

        @functools.wraps(callback)
        def call(*args: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            try:
                return callback(*args, **options)
            except BaseException as error:
                came_from_signal = is_from_signal(error)
                if came_from_signal and on_signal is not None:
                    stop_listening()
                    self._call(name, instead, args, options, lost)
                    on_signal(error, args[0])
                    return None
                if came_from_signal or not isinstance(error, Exception):
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

"""Whatever of ours fails, the user's code goes on: each distinct failure is reported once."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ipygpumem.errors import said

MOST_SAID = 5
"""Maximum number of failures at one place that are reported: their texts may differ by a number each time."""
_OURS = __file__.rpartition("notebook")[0]


def say_failed(name: str, error: Exception | None = None, *, hint: str = "") -> None:
    """Report a failure of ours in one line, with its reason unless that was said; the user's code is not affected."""
    reason = f" ({_text_of(error)})" if error is not None else " again"
    with contextlib.suppress(Exception):  # whatever stands for stderr now
        sys.stderr.write(f"ipygpumem: {name} failed{reason}. Your code is not affected{hint}.\n")


def _place_of(error: Exception) -> str:
    """Return the innermost line of ours that failed."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if line.startswith(_OURS)), "")


def _text_of(error: Exception) -> str:
    try:
        return said(error)
    except Exception:  # a user's error that has no text
        return type(error).__name__


class Guard:
    """Isolates our own failures from user code, in one shell; each distinct one is reported once."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], set[str]] = {}

    def failed(
        self, name: str, error: Exception, *, hint: str = "; %reload_ext ipygpumem tries again", asked: bool = False
    ) -> None:
        """Report a failure of what is called ``name``, unless that was done before and the user has not ``asked``."""
        earlier, text = self._said.setdefault((name, _place_of(error)), set()), _text_of(error)
        if text not in earlier and len(earlier) < MOST_SAID:
            earlier.add(text)
            say_failed(name, error, hint=hint)
        elif asked:
            say_failed(name, hint=hint)

    def each(self, name: str, *steps: Callable[[], object]) -> None:
        """Run all ``steps`` in their order: one that fails is reported; a Ctrl-C is raised when the last has run."""
        self.each_with((), name, steps)

    def each_with(self, given: tuple[object, ...], name: str, steps: Sequence[Callable[..., object]]) -> None:
        """Do the same with steps that take what is ``given``: a cell's result, to which no closure may refer."""
        interrupted = False
        for step in steps:
            try:
                step(*given)
            except KeyboardInterrupt:  # noqa: PERF203  # each step has its turn
                interrupted = True
            except Exception as error:
                self.failed(name, error)
        if interrupted:
            raise KeyboardInterrupt

    def __call__(
        self, name: str, callback: Callable[..., Any], instead: Callable[..., Any] = lambda *_, **__: None
    ) -> Callable[..., Any]:
        """Return ``callback`` for others to call: if it fails, it is reported and ``instead`` is called."""

        @functools.wraps(callback)
        def call(*args: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            try:
                return callback(*args, **options)
            except Exception as error:
                self.failed(name, error)
            except BaseException:  # a Ctrl-C is the user's
                self._call(name, instead, args, options)
                raise
            return self._call(name, instead, args, options)

        return call

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            self.failed(name, error)

"""Isolates our own failures from user code; each distinct failure is reported once."""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ipygpumem.errors import describe_error

MOST_REPORTED = 5
"""Maximum number of failures reported per place: their texts may differ only by a number."""
_OURS = __file__.rpartition("shell")[0]


def report_internal_error(name: str, error: Exception | None = None, *, hint: str = "") -> None:
    """Report a failure of ours in one line, with its reason unless ``error`` is None (reported before)."""
    reason = f" ({_text_of(error)})" if error is not None else " again"
    with contextlib.suppress(Exception):  # the user may have replaced stderr
        sys.stderr.write(f"ipygpumem: {name} failed{reason}. Your code is not affected{hint}.\n")


def _place_of(error: Exception) -> str:
    """Return the innermost line of our code in the traceback."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if line.startswith(_OURS)), "")


def _text_of(error: Exception) -> str:
    try:
        return describe_error(error)
    except Exception:  # a user's error whose text cannot be read
        return type(error).__name__


class Guard:
    """Isolates our own failures from user code in one shell, and reports each distinct one once."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], set[str]] = {}

    def failed(
        self, name: str, error: Exception, *, hint: str = "; %reload_ext ipygpumem tries again", asked: bool = False
    ) -> None:
        """Report a failure of the component ``name``; report it again only if the user ``asked`` for that component."""
        earlier, text = self._reported.setdefault((name, _place_of(error)), set()), _text_of(error)
        if text not in earlier and len(earlier) < MOST_REPORTED:
            earlier.add(text)
            report_internal_error(name, error, hint=hint)
        elif asked:
            report_internal_error(name, hint=hint)

    def each(self, name: str, *steps: Callable[[], object]) -> None:
        """Run all ``steps`` in order; report those that fail, and raise a Ctrl-C after the last one."""
        self.each_with((), name, steps)

    def each_with(self, given: tuple[object, ...], name: str, steps: Sequence[Callable[..., object]]) -> None:
        """Do the same with steps that take the arguments ``given``, since no closure may reference a cell's result."""
        interrupted = False
        for step in steps:
            try:
                step(*given)
            except KeyboardInterrupt:  # noqa: PERF203  # every step must run
                interrupted = True
            except Exception as error:
                self.failed(name, error)
        if interrupted:
            raise KeyboardInterrupt

    def __call__(
        self, name: str, callback: Callable[..., Any], instead: Callable[..., Any] = lambda *_, **__: None
    ) -> Callable[..., Any]:
        """Wrap ``callback`` for IPython: if it fails, report that and call ``instead``."""

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

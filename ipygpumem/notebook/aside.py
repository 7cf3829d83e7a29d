"""Whatever of ours fails, the user's code goes on: the failure is reported once."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from ipygpumem.errors import said


def say_failed(name: str, error: Exception, *, hint: str = "") -> None:
    """Report a failure of ours in one line; the user's code is not affected."""
    try:
        why = said(error)
    except Exception:  # an error of the user's that has no text
        why = type(error).__name__
    text = f"ipygpumem: {name} failed ({why}). Your code is not affected"
    with contextlib.suppress(Exception):  # whatever stands for stderr now
        sys.stderr.write(f"{text}{hint}.\n")


class Guard:
    """Wraps callbacks of one shell: the first failure of each is reported, and the user's cell goes on."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, name: str, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``callback`` with that promise; ``name`` it is called in the warning."""

        @functools.wraps(callback)
        def call(*args: Any, **options: Any) -> Any:
            try:
                return callback(*args, **options)
            except Exception as error:
                if name not in self._said:
                    self._said.add(name)
                    say_failed(name, error, hint="; %reload_ext ipygpumem tries again")

        return call

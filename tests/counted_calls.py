"""Counts the Python functions that our work calls in a cell."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.introspect import is_ours


def calls_in(shell: InteractiveShell, cell: str) -> int:
    """Return the number of Python functions that we call in a cell, directly or not."""
    calls = depth = 0
    ours = dict[CodeType, bool]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, depth
        code = frame.f_code
        if event == "call" and (depth or ours.setdefault(code, is_ours(code.co_filename))):
            depth += 1
            # Python 3.12 makes no frames for comprehensions
            calls += not code.co_name.endswith("comp>")
        elif event == "return" and depth:
            depth -= 1

    run_profiled(shell, cell, profile)
    return calls


def run_profiled(
    shell: InteractiveShell, cell: str, profile: Callable[[FrameType, str, object], object] | None
) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(profile)
        try:
            result = shell.run_cell(cell)
        finally:
            sys.setprofile(None)
    assert result.success or isinstance(result.error_in_exec, MemoryError)  # of a recovery


def least_calls_in(shell: InteractiveShell, cell: str, runs: int = 3) -> int:
    """Return the same of several runs: we do more after a cell that was slow, or in which the
    process grew.
    """
    return min(calls_in(shell, cell) for _ in range(runs))

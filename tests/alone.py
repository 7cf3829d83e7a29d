"""Tests whose result or duration depends on what else is in the process."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process that has imported its module and nothing else."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        code = f"from {test.__module__} import {test.__name__} as test; test.__wrapped__(**{given!r})"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr

    return run

"""Tests whose result or duration depends on what else is in the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def in_a_process_of_its_own(function: Callable[..., None], *arguments: object) -> None:
    """Call a function of a test module in a process that has imported that module and nothing else."""
    code = f"from {function.__module__} import {function.__name__} as run; run(*{arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr

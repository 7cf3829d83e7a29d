"""Tests whose result or duration depends on what else is in the process."""

import contextlib
import functools
import gc
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def printed(*arguments: object, **options: Any) -> str:
    """Return what a Python with these arguments prints."""
    command = [sys.executable, *map(str, arguments)]
    options = {
        "cwd": ROOT,
        "capture_output": True,
        "text": True,
        "timeout": 900,
        "check": False,
        **options,
    }
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def limit_stack() -> None:
    """Give a process an eighth of the usual stack before it begins (``preexec_fn``)."""
    resource = importlib.import_module("resource")  # not on Windows
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, most))


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process that has imported its module and nothing else."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        printed(
            "-c",
            f"from {test.__module__} import {test.__name__} as test; test.__wrapped__(**{given!r})",
        )

    return run


@contextlib.contextmanager
def estimates_of_code_alone() -> Iterator[None]:
    """Let estimates restore their code's own objects, but no module: those of tests lead to all of
    pytest, and an estimate among many of them takes four times as long.
    """
    rollback = "ipygpumem.estimating.rollback"
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{rollback}._is_users_module", lambda module: False)
        patch.setattr(f"{rollback}.is_users", lambda file: False)
        yield
    gc.unfreeze()

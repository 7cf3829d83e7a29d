"""Tests whose result or duration depends on what else is in the process."""

import contextlib
import functools
import gc
import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.answering import ROOT, Answerer, answer_questions, forked

EXAMPLES = ROOT / "examples"

_MOST_CPU_SECONDS = 900
"""Maximum CPU time of a process; how long that takes depends on what else the machine does."""


def printed(*arguments: object, **options: Any) -> str:
    """Return the output of a Python with these arguments; it has a limited time of CPU."""
    command = [sys.executable, *map(str, arguments)]
    options = {
        "cwd": ROOT,
        "capture_output": True,
        "text": True,
        "check": False,
        **options,
    }
    if os.name == "posix":
        options.setdefault("preexec_fn", _limit_cpu_time)
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def _limit_cpu_time() -> None:
    """Let the system end a process that has used too much CPU (``preexec_fn``)."""
    resource = importlib.import_module("resource")  # not on Windows
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_SECONDS, _MOST_CPU_SECONDS))


def limit_stack() -> None:
    """Give a process an eighth of the usual stack before it begins (``preexec_fn``)."""
    resource = importlib.import_module("resource")  # not on Windows
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, most))


class TestRunner:
    """A process that has imported one module of tests and nothing else; each test runs in a fork of
    it, because the import takes most of the time.
    """

    __test__ = False

    def __init__(self) -> None:
        self._module = ""
        self._process: Answerer | None = None

    def run(self, test: Callable[..., None], given: dict[str, object]) -> None:
        """Run a test with its arguments, which are data of JSON."""
        module = test.__module__
        if self._process is None or module != self._module:
            self.close()
            code = f"from tests.alone import run_tests; run_tests({module!r})"
            self._process = Answerer("-c", code)
            self._module = module
        failure = self._process.ask([test.__name__, given])
        assert failure == "", failure

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


RUNNER = TestRunner()
"""Runs the tests of this process's current module; ``conftest.py`` closes it after the module."""


def run_tests(module_name: str) -> None:
    """Run each test that the runner names, and report its traceback; empty if it passes."""
    module = importlib.import_module(module_name)

    def failure_of(name: str, given: dict[str, object]) -> str:
        try:
            getattr(module, name).__wrapped__(**given)
        except BaseException:
            return traceback.format_exc()
        return ""

    answer_questions(lambda question: forked(lambda: failure_of(*question)))


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process that has imported its module and nothing else."""

    @functools.wraps(test)
    def run(**given: object) -> None:
        RUNNER.run(test, given)

    return run


@contextlib.contextmanager
def estimates_of_code_alone() -> Iterator[None]:
    """Let estimates restore their code's own objects, but no module: those of tests lead to all of
    pytest, and an estimate among many of them takes four times as long.
    """
    estimating = "ipygpumem.estimating.isolation"
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rollback", "object_states"):
            module = f"{estimating}.{name}"
            patch.setattr(f"{module}.is_imported_users_module", lambda module: False)
        patch.setattr(f"{estimating}.object_states.is_users", lambda file: False)
        yield

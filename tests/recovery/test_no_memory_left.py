"""When not even recovery gets memory or a thread: names go all the same, and the report says what is missing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.notebook.experiments import Experiment
from ipygpumem.notebook.session import session_of
from tests.kernel import Kernel
from tests.recovery.steps import SETUP, fails
from tests.steps import works

LIMIT = """
import re, resource
def limit():
    used = int(re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.getrlimit(resource.RLIMIT_AS)[1]))
def unlimit():
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
def fill():
    mine, kept = big(), []
    limit()
    while True: kept.append(bytearray(1 << 12))
"""


@pytest.fixture
def limited() -> Iterator[Kernel]:
    """A kernel of its own that can limit its address space."""
    with contextlib.closing(Kernel()) as kernel:
        works(kernel, "%load_ext ipygpumem")
        works(kernel, SETUP + LIMIT)
        yield kernel


@pytest.mark.skipif(sys.platform != "linux", reason="no other system keeps to this limit")
def test_at_a_hard_limit_an_experiment_ends_and_its_names_go(limited: Kernel) -> None:
    works(limited, "x = 'old'")
    fails(limited, "%%experiment a\nx = big()\ny = {i: [i] for i in range(100_000)}\nfill()")
    works(limited, "unlimit()")
    assert limited.value("(x, 'y' in globals(), alive())") == ("old", False, 0)
    assert "no experiment is open" in works(limited, "%gpumem status").reports("status")[0]


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_an_error_is_released_without_a_thread(limited: Kernel) -> None:
    works(
        limited,
        'import threading\ndef refused(thread): raise RuntimeError("can\'t start new thread")\n'
        "start, threading.Thread.start = threading.Thread.start, refused",
    )
    reply = limited.run("%%experiment a\nx = big()\ndef f():\n    y = big()\n    raise MemoryError\nf()")
    works(limited, "threading.Thread.start = start")
    assert "can't start" not in "".join(reply.reports())
    assert limited.value("('x' in globals(), alive())") == (False, 0)


def _no_memory(*arguments: object, **options: object) -> object:
    raise MemoryError


@pytest.mark.parametrize("missing", ["measuring", "waiting", "watching"])
def test_names_go_even_if_what_they_hold_cannot_be_seen(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("x = 'old'")
    shell.run_cell("%experiment start a")
    shell.run_cell("x = 'new'\ny = 1")
    with monkeypatch.context() as patch:
        if missing == "measuring":
            patch.setattr(session_of(shell).meter, "read", _no_memory)
            patch.setattr(session_of(shell).meter, "now", _no_memory)
        else:
            patch.setattr(Experiment, {"waiting": "waiting", "watching": "_watch"}[missing], _no_memory)
        shell.run_cell("%experiment end")
    assert (shell.user_ns["x"], "y" in shell.user_ns) == ("old", False)
    (record,) = ipygpumem.experiments()
    assert "there was too little memory left to see what all of it held" in record.notes


def test_names_for_which_there_was_no_memory_at_first_go_after_the_tracebacks(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("%experiment start a")
    shell.run_cell("y = 1")
    scope = session_of(shell).open[-1].scope
    close, tries = scope.close, iter([_no_memory])
    monkeypatch.setattr(scope, "close", lambda *given, **options: next(tries, close)(*given, **options))
    shell.run_cell("%experiment end")
    assert "y" not in shell.user_ns
    (record,) = ipygpumem.experiments()
    assert record.deleted == ("y",)
    assert "names: memory ran out" in record.notes

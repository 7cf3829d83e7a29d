"""When not even recovery gets memory or a thread: names go all the same, and the report says what is missing."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.shell.app import app_of
from ipygpumem.shell.experiments import Experiment
from tests.kernel import Kernel
from tests.steps import works


def test_an_error_is_released_without_a_thread(notebook: Kernel) -> None:
    works(
        notebook,
        'import threading\ndef refused(thread): raise RuntimeError("can\'t start new thread")\n'
        "start, threading.Thread.start = threading.Thread.start, refused",
    )
    reply = notebook.run("%%experiment a\nx = big()\ndef f():\n    y = big()\n    raise MemoryError\nf()")
    works(notebook, "threading.Thread.start = start")
    assert "can't start" not in "".join(reply.reports())
    assert notebook.value("('x' in globals(), alive())") == (False, 0)


def _no_memory(*arguments: object, **options: object) -> object:
    raise MemoryError


@pytest.mark.parametrize("missing", ["measuring", "waiting", "watching"])
def test_names_go_even_if_what_they_hold_cannot_be_seen(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    loaded.run_cell("x = 'old'")
    loaded.run_cell("%experiment start a")
    loaded.run_cell("x = 'new'\ny = 1")
    with monkeypatch.context() as patch:
        if missing == "measuring":
            patch.setattr(app_of(loaded).context.meter, "read", _no_memory)
            patch.setattr(app_of(loaded).context.meter, "now", _no_memory)
        else:
            patch.setattr(Experiment, {"waiting": "waiting", "watching": "_watch"}[missing], _no_memory)
        loaded.run_cell("%experiment end")
    assert (loaded.user_ns["x"], "y" in loaded.user_ns) == ("old", False)
    (record,) = ipygpumem.experiments()
    assert "not enough memory to list everything that the experiment held" in record.notes


@pytest.mark.parametrize("missing", ["a part's note of the code's end", "the reading before the recovery"])
def test_what_comes_first_at_a_cells_end_keeps_no_memory_from_recovery(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    loaded.user_ns["watched"] = []
    with monkeypatch.context() as patch:
        if missing == "the reading before the recovery":
            patch.setattr(app_of(loaded).context.meter, "settle", _no_memory)
        else:
            patch.setattr(app_of(loaded).experiments, "code_ended", _no_memory)
        loaded.run_cell(
            "import weakref\nclass Thing: pass\n"
            "def f():\n    mine = Thing(); watched.append(weakref.ref(mine))\n    raise MemoryError\nf()"
        )
    assert loaded.user_ns["watched"][0]() is None


def test_names_for_which_there_was_no_memory_at_first_go_after_the_tracebacks(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_cell("%experiment start a")
    loaded.run_cell("y = 1")
    scope = app_of(loaded).experiments.open[-1].scope
    close, tries = scope.close, iter([_no_memory])
    monkeypatch.setattr(scope, "close", lambda *given, **options: next(tries, close)(*given, **options))
    loaded.run_cell("%experiment end")
    assert "y" not in loaded.user_ns
    (record,) = ipygpumem.experiments()
    assert record.deleted == ("y",)
    assert "names: memory ran out" in record.notes

"""Ctrl-C in a scope's cell, and at every line of a scope's exit."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.steps import fails, goes_on, names, open_now, works


def test_a_pending_ctrl_c_that_strikes_in_the_exit_itself_is_mended_by_another_end(notebook: Kernel) -> None:
    works(
        notebook,
        "import _thread\n"
        "class Bomb:\n    __del__ = staticmethod(_thread.interrupt_main)  # strikes after the finaliser, in our code\n"
        "old = 'old'",
        "%experiment start a",
        "a = 1\nbomb = Bomb()\nold = 'new'\nz = 2",
    )
    fails(notebook, "%experiment end", "KeyboardInterrupt")
    assert open_now(notebook) == ["a"]
    works(notebook, "%experiment end")
    assert open_now(notebook) == []
    assert notebook.value("old") == "old"
    assert not {"a", "z", "bomb"} & set(names(notebook))
    # The same at the end of a cell: the cell is over, its scope is not.
    reply = notebook.run("%%experiment b\nbomb = Bomb()\nold = 'new'\nz = 2")
    assert any("%experiment end" in text for text in reply.reports("note")), reply
    assert "is not affected" not in reply.stderr
    works(notebook, "%experiment end")
    assert notebook.value("old") == "old"
    assert "z" not in names(notebook)
    goes_on(notebook)


INTERRUPT_EVERY_LINE = '''
import sys, ipygpumem, ipygpumem.notebook.experiments as experiments
from ipygpumem.notebook.notebook import current_notebook

def interrupt_every_line(limit, step):
    """Finish nested scopes with a Ctrl-C at each ``step``-th line of our own code; return what was lost."""
    shell, session = get_ipython(), current_notebook()
    space, report = shell.user_ns, session.context.config.report
    steps, experiments.steps_that_free = experiments.steps_that_free, lambda *_, **__: []
    session.context.config.report = False
    problems, where = [], None
    ours = ("scope.py", "reclaim.py", "outputs.py", "manager.py", "run.py",
        "names.py", "recovery.py", "session.py", "arrays.py", "survivors.py")

    def finish_with_interrupt(experiment, n):
        count = 0
        def trace(frame, event, argument):
            nonlocal count, where
            if not frame.f_code.co_filename.endswith(ours) or "ipygpumem" not in frame.f_code.co_filename:
                return None
            if event == "line":
                count += 1
                if count == n:
                    where = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
                    raise KeyboardInterrupt
            return trace
        sys.settrace(trace)
        try:
            experiment.finish()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    n = 0
    while n < limit:
        n += step
        space.update(t_old="old", t_keep="old")
        outer = ipygpumem.experiment("outer", report="none").start()
        shell.run_cell("t_old = 1; t_keep = 1; t_new = []", store_history=False)
        inner = ipygpumem.experiment("inner", keep="t_keep", report="none").start()
        shell.run_cell("t_old = 2; t_keep = 2; t_new2 = []", store_history=False)
        interrupted = finish_with_interrupt(outer, n)
        for _ in range(4):
            if not session.experiments.open:
                break
            try:
                shell.run_line_magic("experiment", "end")
            except BaseException as error:
                problems.append((n, where, f"end: {type(error).__name__}: {error}"))
                break
        if session.experiments.open:
            problems.append((n, where, "still open: " + ", ".join(e.name for e in session.experiments.open)))
            session.experiments.open.clear()
        found = {name: space.pop(name, "gone") for name in ("t_old", "t_keep", "t_new", "t_new2")}
        if found != {"t_old": "old", "t_keep": "old", "t_new": "gone", "t_new2": "gone"}:
            problems.append((n, where, str(found)))
        if not interrupted:
            break
    experiments.steps_that_free, session.context.config.report = steps, report
    return n, problems
'''


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_an_exit_interrupted_at_any_line_of_our_code_is_finished_by_another_end(notebook: Kernel, step: int) -> None:
    works(notebook, INTERRUPT_EVERY_LINE)
    works(notebook, f"lines, problems = interrupt_every_line(5000, {step})", timeout=300)
    assert notebook.value("lines") in range(100, 5000)
    assert notebook.value("problems") == []
    goes_on(notebook)

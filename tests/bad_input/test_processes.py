"""Forked children, threads and subshells while a scope is open."""

from __future__ import annotations

import pytest

from tests.bad_input.steps import goes_on, works
from tests.kernel import Kernel


@pytest.mark.parametrize("peak", ["kernel", "sampled"])
def test_a_forked_child_in_a_scope_disturbs_nobody(notebook: Kernel, peak: str) -> None:
    works(notebook, f"%config IPyGpuMem.host_peak = '{peak}'")
    works(notebook, "import os, multiprocessing, ipygpumem\nx = 'old'")
    works(notebook, "%experiment start a")
    works(
        notebook,
        "x = 'new'\npid = os.fork()\n"
        "if pid == 0:\n"
        "    globals().clear(); import os; os._exit(0)\n"
        "done = os.waitpid(pid, 0)",
    )
    assert notebook.value("done[1]") == 0
    works(
        notebook,
        "def work(queue):\n"
        "    import ipygpumem\n"
        "    session = ipygpumem.notebook.notebook.current_notebook()\n"
        "    queue.put((os.getpid(), session.host.read()[0].current_bytes))\n"
        "fork = multiprocessing.get_context('fork')\nqueue = fork.Queue()\n"
        "process = fork.Process(target=work, args=(queue,)); process.start()\n"
        "child, size = queue.get(timeout=20); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert notebook.value("child != os.getpid() and size > 1 << 20") is True
    works(notebook, "%experiment end")
    assert notebook.value("x") == "old"
    works(notebook, "%config IPyGpuMem.host_peak = 'kernel'")
    goes_on(notebook)


def test_what_a_forked_child_shows_is_text(notebook: Kernel) -> None:
    reply = works(
        notebook,
        "import os, multiprocessing, ipygpumem\n"
        "def work():\n"
        "    with ipygpumem.experiment('forked'): y = 1\n"
        "process = multiprocessing.get_context('fork').Process(target=work); process.start(); process.join(20)",
    )
    assert notebook.value("process.exitcode") == 0
    assert "msg_id" not in reply.stdout + reply.stderr, (
        "a kernel's messages cannot be sent by a child: they are printed"
    )
    assert "experiment forked" in reply.stdout
    assert reply.reports("experiment") == []
    goes_on(notebook)

"""Ends that look only at what was made since the start, beside threads, subshells, forks, interrupts and errors."""

from __future__ import annotations

import sys

import pytest

from tests.kernel import Kernel
from tests.smoke.conftest import HAS_POSIX
from tests.steps import fails, ok

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python has other generations")

SETUP = """
import gc, os, sys, threading, weakref
import ipygpumem, ipygpumem.objects.garbage as garbage
garbage.Garbage.SHORTEST_SECONDS = 600  # every cell here is a short one, however slow the machine
class Node:
    def __init__(self): self.me, self.held = self, bytearray(1 << 20)
alive, full = {}, []
def node(name):
    made = Node()
    alive[name] = weakref.ref(made)
    return made
def left(): return sorted(name for name, reference in alive.items() if reference() is not None)
def count(phase, info):
    if phase == "start" and info["generation"] == 2 and sys._getframe(1).f_code.co_filename == garbage.__file__:
        full.append(1)
gc.callbacks.append(count)
gc.collect()
"""


@pytest.fixture
def counting(notebook: Kernel) -> Kernel:
    ok(notebook, SETUP)
    return notebook


def left_and_full(kernel: Kernel) -> tuple[list[str], bool]:
    """Return which nodes are alive, and whether an end has looked at everything."""
    left, full = kernel.value("(left(), len(full))")
    return left, full > 0


@pytest.mark.skipif(not HAS_POSIX, reason="there is no fork here")
def test_a_forked_child_ends_its_copy_of_the_experiment_and_the_parent_its_own(counting: Kernel) -> None:
    child = (
        "ipygpumem.experiments  # loaded\n"
        "notebook = get_ipython().find_line_magic('gpumem').__self__._notebook\n"
        "n = node('n')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    code = 99\n"
        "    try:\n"
        "        del n\n"
        "        notebook.context.garbage.collect(notebook.experiments.open[-1]._baseline._mark)\n"
        "        code = len(left()) * 10 + len(full)\n"
        "    finally:\n"
        "        os._exit(code)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
    )
    ok(counting, f"%%experiment a --keep code\n{child}")
    assert counting.value("code") == 0
    assert left_and_full(counting) == ([], False)


def test_an_end_that_was_interrupted_is_done_again_whatever_is_old_by_then(counting: Kernel) -> None:
    ok(
        counting,
        "def interrupted(self, since=None, real=garbage.Garbage.collect):\n"
        "    garbage.Garbage.collect = real\n"
        "    self.mark()\n"
        "    raise KeyboardInterrupt\n"
        "experiment = ipygpumem.experiment('a').start()",
        "n = node('n')\nresults = [node('m')]",
    )
    fails(counting, "garbage.Garbage.collect = interrupted\nexperiment.finish()", "KeyboardInterrupt")
    assert "'a'" in str(counting.value("[e.name for e in (experiment,) if e.record is None]"))
    ok(counting, "experiment.finish();")
    assert left_and_full(counting) == ([], True)


def test_the_first_error_that_is_recovered_from_frees_older_garbage_too(counting: Kernel) -> None:
    ok(counting, "def fail(name):\n    n = node(name)\n    raise MemoryError(name)")
    ok(counting, "old = node('old')", "pass", "del old")
    fails(counting, "fail('first')", "MemoryError")
    assert left_and_full(counting) == ([], True)
    ok(counting, "full.clear()")
    fails(counting, "fail('second')", "MemoryError")
    assert left_and_full(counting) == ([], True)  # a cell has been fine between them
    fails(counting, "full.clear(); fail('third')", "MemoryError")
    assert left_and_full(counting) == ([], False)


def test_an_error_after_an_experiment_inside_the_cell_takes_what_the_cell_made_before(counting: Kernel) -> None:
    # Seen: the experiment made "n" old, and the recovery looked only at what was made after that.
    inside = "with ipygpumem.experiment('inside', report='none'): pass"
    ok(counting, f"def fail(name):\n    n = node(name)\n    {inside}\n    raise MemoryError(name)")
    fails(counting, "raise MemoryError", "MemoryError")
    fails(counting, "fail('n')", "MemoryError")
    assert left_and_full(counting)[0] == []


def test_an_error_that_takes_what_holds_an_older_one_looks_at_everything(counting: Kernel) -> None:
    # Seen: a trainer in no cycle died at once, and nobody looked for its model, which was in one.
    ok(counting, "class Trainer:\n    def __init__(self, name): self.model = node(name)\ntrainer = None")
    fails(counting, "trainer = Trainer('first'); raise MemoryError", "MemoryError")
    fails(counting, "trainer = Trainer('second'); raise MemoryError", "MemoryError")
    assert left_and_full(counting)[0] == ["second"]


def test_nothing_is_collected_where_the_user_has_switched_that_off(counting: Kernel) -> None:
    ok(counting, "%config IPyGpuMem.collect_garbage = False", "node('n');")
    assert counting.value("left()") == ["n"]
    ok(counting, "%config IPyGpuMem.collect_garbage = True", "pass", "gc.disable()", "node('m');")
    assert "m" in counting.value("left()")
    ok(counting, "gc.enable()")


def test_what_an_older_array_of_objects_led_to_is_looked_for(counting: Kernel) -> None:
    # Seen: the collector does not look into arrays, and so nobody had noticed that it was there.
    pytest.importorskip("numpy")
    ok(counting, "import numpy; array = numpy.array([node('old')], dtype=object)", "%%experiment a\ndel array")
    assert left_and_full(counting) == ([], True)

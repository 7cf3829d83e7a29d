"""Ends that look only at what was made since the start, beside threads, subshells, forks,
interrupts and errors.
"""

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.live.garbage import young_generations
from tests.steps import experiment, run_failing, run_quietly

pytestmark = pytest.mark.skipif(
    young_generations() != (0, 1), reason="this Python has other generations"
)

SETUP = """
import gc, os, sys, threading, weakref
import ipygpumem, ipygpumem.heap.live.garbage as garbage, ipygpumem.probes.host as host
garbage.Garbage.SHORTEST_SECONDS = 600  # every cell here is a short one, however slow the machine
class Node:
    def __init__(self): self.me, self.held = self, bytearray(1 << 20)
alive, full, files = {}, [], {garbage.__file__, host.__file__}
def node(name):
    made = Node()
    alive[name] = weakref.ref(made)
    return made
def left(): return sorted(name for name, reference in alive.items() if reference() is not None)
def count(phase, info):
    if phase == "start" and info["generation"] == 2 and sys._getframe(1).f_code.co_filename in files:
        full.append(1)
gc.callbacks.append(count)
gc.collect()
gc.set_threshold(100_000, 1000, 1000)  # no collection of Python's own makes young objects old
"""  # noqa: E501


@pytest.fixture
def counting(notebook: Kernel) -> Kernel:
    run_quietly(notebook, SETUP)
    return notebook


def left_and_full(kernel: Kernel) -> tuple[list[str], bool]:
    """Return which nodes are alive, and whether an end has looked at everything."""
    left, full = kernel.value("(left(), len(full))")
    return left, full > 0


def test_the_first_recovery_frees_older_garbage_too(counting: Kernel) -> None:
    run_quietly(
        counting,
        """
        def fail(name):
            n = node(name)
            raise MemoryError(name)
        """,
    )
    run_quietly(counting, "old = node('old')", "pass", "del old")
    run_failing(counting, "fail('first')", "MemoryError")
    assert left_and_full(counting) == ([], True)
    run_quietly(counting, "full.clear()")
    run_failing(counting, "fail('second')", "MemoryError")
    assert left_and_full(counting) == ([], True)  # a cell has been fine between them
    run_failing(counting, "full.clear(); fail('third')", "MemoryError")
    assert left_and_full(counting) == ([], False)


def test_a_recovery_frees_objects_older_than_an_inner_experiment(counting: Kernel) -> None:
    # Seen: the experiment made "n" old, and the recovery looked only at what was made after that.
    inside = "with ipygpumem.experiment('inside', report='none'): pass"
    run_quietly(
        counting, f"def fail(name):\n    n = node(name)\n    {inside}\n    raise MemoryError(name)"
    )
    run_failing(counting, "raise MemoryError", "MemoryError")
    run_failing(counting, "fail('n')", "MemoryError")
    assert left_and_full(counting)[0] == []


def test_a_recovery_searches_everything_when_an_old_holder_dies(counting: Kernel) -> None:
    # Seen: a trainer in no cycle died at once, and nobody looked for its model, which was in one.
    run_quietly(
        counting,
        """
        class Trainer:
            def __init__(self, name): self.model = node(name)
        trainer = None
        """,
    )
    run_failing(counting, "trainer = Trainer('first'); raise MemoryError", "MemoryError")
    run_failing(counting, "trainer = Trainer('second'); raise MemoryError", "MemoryError")
    assert left_and_full(counting)[0] == ["second"]


def test_nothing_is_collected_if_the_user_disabled_collection(counting: Kernel) -> None:
    run_quietly(counting, "%config IPyGpuMem.collect_garbage = False", "node('n');")
    assert counting.value("left()") == ["n"]
    run_quietly(
        counting, "%config IPyGpuMem.collect_garbage = True", "pass", "gc.disable()", "node('m');"
    )
    assert "m" in counting.value("left()")
    run_quietly(counting, "gc.enable()")


def test_objects_referenced_by_an_older_array_are_searched(counting: Kernel) -> None:
    # Seen: the collector does not look into arrays, and so nobody had noticed that it was there.
    pytest.importorskip("numpy")
    run_quietly(
        counting,
        "import numpy; array = numpy.array([node('old')], dtype=object)",
        experiment("del array", name="a"),
    )
    assert left_and_full(counting) == ([], True)

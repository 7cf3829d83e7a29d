"""A recovery examines the objects behind a traceback: a full collection runs only if it alone frees some of them."""

import pytest

from tests.kernel import Kernel
from tests.recovery.cases import recovers
from tests.steps import works

COUNT = """
import ipygpumem.heap.garbage as garbage, ipygpumem.probes.host as host
full, files = [], {garbage.__file__, host.__file__}
def count(phase, info):
    if phase == "start" and info["generation"] == 2 and sys._getframe(1).f_code.co_filename in files:
        full.append(1)
gc.callbacks[:] = [count]
class Node:
    def __init__(self, held=None):
        self.me, self.held = self, held
class Slotted:
    __slots__ = "me", "held"
def wait():
    me, array = yield
    yield
results, heap = [], [{"number": number, "list": []} for number in range(20_000)]
"""

OLD = {
    "an instance": "node = Node(big())",
    "a list": "rows = [big()]; rows.append(rows)",
    "a dict": "names = {'array': big()}; names['names'] = names",
    "two objects": "one = Node(); one.me = {'other': Node(big())}; one.me['other'].me = one",
    "an object behind a plain one": "plain = ([{'node': Node(big())}],)",
    "a class of a function": "class Local:\n        held = big()\n    made = Local()",
    "a function that refers to itself": "array = big()\n    def again(): return again, array",
    "an object that a short-lived one holds": "results.append(Node(big())); node = results.pop()",
    "an object in a slot": "slotted = Slotted(); slotted.me, slotted.held = slotted, big()",
    "a bound method of an attribute": "class A: pass\n    a = A(); a.held = big(); a.run = Node.__init__.__get__(a)",
    "a generator that waits": "waiting = wait(); next(waiting); waiting.send((waiting, big()))",
}
"""Locals whose objects only a full collection frees once it has made them old."""

FEW = {
    "nothing": "array = big()",
    "a young cycle": "node = Node(big())",
    "an old object without a cycle": "rows = [{'array': big()}]; gc.collect(); full.clear()",
    "the notebook's objects": "array, rows, names = big(), heap, globals(); gc.collect(); full.clear()",
    "a part of the notebook's": "array, row = big(), heap[5]; gc.collect(); full.clear()",
    "an old cycle that a list of the notebook keeps": (
        "array, node = big(), Node(); results.append([node]); gc.collect(); full.clear()"
    ),
    "an old cycle behind an object of the notebook": (
        "array, node = big(), Node(Node()); results.append(node); inner = node.held; gc.collect(); full.clear()"
    ),
    "a young cycle behind an old object": "rows = []; gc.collect(); full.clear(); rows.append(Node(big()))",
}
"""Locals for which the young generations are enough."""


@pytest.fixture
def counting(notebook: Kernel) -> Kernel:
    works(notebook, COUNT)
    return notebook


def failing(statements: str) -> str:
    return f"def f():\n    {statements}\n    raise MemoryError\nfull.clear()\nf()"


@pytest.mark.parametrize("name", OLD)
def test_old_cycles_that_a_traceback_holds_are_freed(counting: Kernel, name: str) -> None:
    recovers(counting, failing(f"{OLD[name]}\n    gc.collect(); full.clear()"))
    assert counting.value("len(full)") > 0


@pytest.mark.parametrize("name", FEW)
def test_a_recovery_collects_only_young_garbage(counting: Kernel, name: str) -> None:
    recovers(counting, failing(FEW[name]))
    assert counting.value("len(full)") == 0


def test_recoveries_after_other_cells_collect_only_young_garbage(counting: Kernel) -> None:
    for _ in range(3):
        works(counting, "node = Node(); node = Node()")
        recovers(counting, failing("array = big()"))
        assert counting.value("len(full)") == 0


def test_a_recovery_with_too_many_objects_collects_everything(counting: Kernel) -> None:
    works(counting, "from ipygpumem.reclaim import old_cycles; most, old_cycles._MOST = old_cycles._MOST, 100")
    recovers(counting, failing("nodes = [Node() for _ in range(200)]; node = Node(big()); gc.collect(); full.clear()"))
    assert counting.value("len(full)") > 0
    works(counting, "old_cycles._MOST = most")


def test_a_long_container_is_not_read(counting: Kernel) -> None:
    recovers(counting, failing("rows = [[] for _ in range(200_000)]; array = big(); gc.collect(); full.clear()"))
    assert counting.value("len(full)") == 0


def test_the_frames_locals_are_emptied_as_before(counting: Kernel) -> None:
    recovers(counting, failing("names, array = locals(), big()\n    names = locals()\n    gc.collect(); full.clear()"))

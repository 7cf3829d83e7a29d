"""Graphs so long that torch cannot destroy them once the Python objects of all their nodes exist.

It destroys nodes recursively whose Python objects have been read, some 50,000 at most. The tests'
processes have an eighth of the usual stack, and our limit is an eighth, too.
"""

from collections.abc import Iterator

import pytest

from tests.alone import limit_stack
from tests.answering import Answerer

ONE_TENSOR = """
import torch
x = torch.ones(1, requires_grad=True)
for _ in range(8_000):
    x = x + 1
"""
EACH_STEP = """
import torch
steps = [torch.ones(1, requires_grad=True)]
for _ in range(8_000):
    steps.append(steps[-1] + 1)
steps.reverse()
x = steps[0]
"""
LOAD = "%load_ext ipygpumem"
DELETE = "x = steps = None"

LOOKS = {
    "leaks": ["%gpumem leaks"],
    "why": ["%gpumem why x"],
    "top": ["%gpumem top"],
    "tensors and status": ["%gpumem tensors", "%gpumem status"],
    "an error": ["def fail(tensor): raise MemoryError", "fail(x)", "%gpumem free"],
    "a second look": ["%gpumem leaks", "%gpumem why x", "%gpumem tensors", "%gpumem leaks"],
}
PARTS = ["%gpumem why c", "%gpumem why b", "%gpumem why a"]
LONG = {"one tensor": ONE_TENSOR, "each step": EACH_STEP}

FORKS = """
import gc, os, torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
from ipygpumem.heap.knowledge import nodes
from tests.answering import answer_questions
nodes.LONGEST_CHAIN //= 8
gc.collect()
gc.freeze()  # each look would pass over the objects of torch's modules
def failures(cells):
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        results = [shell.run_cell(cell, store_history=True) for cell in cells]
        os._exit(sum(not result.success for result in results))
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)
answer_questions(failures)
"""
"""Runs cells in an IPython in a forked process, and says how many failed, or the signal."""


class Forks(Answerer):
    """Runs cells in processes that have imported torch."""

    def __init__(self) -> None:
        super().__init__("-c", FORKS, preexec_fn=limit_stack)

    def failures(self, *cells: str) -> int:
        """Return the number of cells that failed; negative if the process crashed."""
        number: int = self.ask(cells)
        return number


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def test_a_graph_whose_nodes_have_been_read_ends_the_process(forks: Forks) -> None:
    read = """
nodes = [x.grad_fn]
while nodes[-1].next_functions:
    nodes.append(nodes[-1].next_functions[0][0])
del nodes
"""
    assert forks.failures(ONE_TENSOR, "del x") == 0
    assert forks.failures(ONE_TENSOR, read, "del x") < 0


@pytest.mark.parametrize("code", LONG.values(), ids=LONG)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_process_survives_looks_at_a_long_graph(forks: Forks, look: list[str], code: str) -> None:
    assert forks.failures(LOAD, code, *look, DELETE) == look.count("fail(x)")


@pytest.mark.parametrize("code", LONG.values(), ids=LONG)
def test_a_process_survives_experiments_with_a_long_graph(forks: Forks, code: str) -> None:
    kept = f"%%experiment a --keep x\n{code}"
    dropped = f"%%experiment a\n{code}"
    assert forks.failures(LOAD, kept, DELETE, dropped, DELETE) == 0


def test_a_process_survives_looks_at_a_graph_that_grows(forks: Forks) -> None:
    begin = """
import torch
x = torch.ones(1, requires_grad=True)
"""
    grow = """
for _ in range(2_000):
    x = x + 1
"""
    assert forks.failures(LOAD, begin, *[grow, "%gpumem leaks"] * 6, DELETE) == 0


def test_a_process_survives_looks_at_parts_of_a_graph(forks: Forks) -> None:
    take = "a, b, c = steps[0], steps[4_000], steps[6_500]"
    drop = "c = b = a = None"  # the longest part at last: all nodes die with it
    assert forks.failures(LOAD, EACH_STEP, take, *PARTS, DELETE, drop) == 0


IN_TRACEBACKS = {
    "one tensor": """
    x = torch.ones(2, requires_grad=True)
    for _ in range(8_000):
        x = x + 1
""",
    "each step": """
    steps = [torch.ones(2, requires_grad=True)]
    for _ in range(8_000):
        steps.append(steps[-1] + 1)
    steps.reverse()
""",
}


@pytest.mark.parametrize("steps", IN_TRACEBACKS.values(), ids=IN_TRACEBACKS)
def test_a_process_survives_a_long_graph_in_a_traceback(forks: Forks, steps: str) -> None:
    code = f"""
import torch
from ipygpumem.heap.allowance import Allowance
from ipygpumem.reclaim import listing
from ipygpumem.reclaim.tracebacks import release
def fail():{steps}    raise MemoryError
try:
    fail()
except MemoryError as error:
    kept = error.with_traceback(error.__traceback__.tb_next)
listing.held_by_frames(kept, {{}}, Allowance(1000))
release(kept)
"""
    assert forks.failures(code) == 0

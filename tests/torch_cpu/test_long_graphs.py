"""Graphs so long that torch cannot destroy them once the Python objects of all their
nodes exist.
"""

import pytest

from tests.alone import printed

ONE_TENSOR = """
import torch
x = torch.ones(1, requires_grad=True)
for _ in range(60_000):
    x = x + 1
"""
EACH_STEP = """
import torch
steps = [torch.ones(1, requires_grad=True)]
for _ in range(60_000):
    steps.append(steps[-1] + 1)
steps.reverse()
x = steps[0]
"""
DELETE = "x = steps = None"

LOOKS = {
    "leaks": ["%gpumem leaks"],
    "why": ["%gpumem why x"],
    "top": ["%gpumem top"],
    "tensors": ["%gpumem tensors"],
    "status": ["%gpumem status"],
    "an error": ["def fail(tensor): raise MemoryError", "fail(x)", "%gpumem free"],
    "a second look": ["%gpumem leaks", "%gpumem why x", "%gpumem tensors", "%gpumem leaks"],
}
PARTS = ["%gpumem why c", "%gpumem why b", "%gpumem why a"]
LONG = {"one tensor": ONE_TENSOR, "each step": EACH_STEP}


def survives(*cells: str) -> bool:
    """Return True if IPython runs all cells in a process with the extension and does not crash."""
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {["%load_ext ipygpumem", *cells]!r}:
    shell.run_cell(cell, store_history=True)
print("alive")
"""
    return printed("-c", code).splitlines()[-1] == "alive"


@pytest.mark.parametrize("code", LONG.values(), ids=LONG)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_process_survives_looks_at_a_long_graph(look: list[str], code: str) -> None:
    assert survives(code, *look, DELETE)


@pytest.mark.parametrize("code", LONG.values(), ids=LONG)
def test_a_process_survives_experiments_with_a_long_graph(code: str) -> None:
    assert survives(f"%%experiment --keep x\n{code}", DELETE, f"%%experiment\n{code}", DELETE)


def test_a_process_survives_looks_at_a_graph_that_grows() -> None:
    begin = """
import torch
x = torch.ones(1, requires_grad=True)
"""
    grow = """
for _ in range(15_000):
    x = x + 1
"""
    assert survives(begin, *[grow, "%gpumem leaks"] * 6, DELETE)


def test_a_process_survives_looks_at_parts_of_a_graph() -> None:
    assert survives(
        EACH_STEP,
        "a, b, c = steps[0], steps[30_000], steps[50_000]",
        *PARTS,
        DELETE,
        "a = b = c = None",
    )

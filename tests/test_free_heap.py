"""A cell's line says when freed memory stays with malloc."""

import re
import sys

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import run_quietly, tidied_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", hides_libraries=True)

FREE = re.compile(r"^ *([\d.]+) MiB free in the heap: %gpumem free$", re.MULTILINE)


def free(kernel: Kernel, *cells: str) -> list[float]:
    """Run cells, and return the MiB of free pages that their lines mention."""
    sizes = list[float]()
    for cell in cells:
        for text in run_quietly(kernel, cell).reports("cell"):
            sizes += map(float, FREE.findall(text))
    return sizes


FREEING = {
    "a deleted list between kept objects": """
x = [bytes(3000) for _ in range(100_000)]
kept = x[::500]
del x
""",
    "locals of a function": """
def run():
    x = [bytes(3000) for _ in range(100_000)]
    return x[::500]
kept = run()
""",
    "arrays in a loop": """
import numpy
x = [numpy.ones(400) for _ in range(100_000)]
kept = x[::500]
x = None
""",
    "a cleared dict": """
x = {number: bytearray(3000) for number in range(100_000)}
kept = [x[number] for number in range(0, 100_000, 500)]
x.clear()
""",
}


@pytest.mark.parametrize("case", FREEING)
def test_memory_that_malloc_keeps_is_mentioned_once(notebook: Kernel, case: str) -> None:
    (size,) = free(notebook, FREEING[case], "1", "y = 2; del y")
    assert size == pytest.approx(300, rel=0.1)
    run_quietly(notebook, "%gpumem free")
    assert free(notebook, "y = 2; del y") == []


def test_del_in_a_later_cell_is_mentioned(notebook: Kernel) -> None:
    assert free(notebook, "x = [bytes(3000) for _ in range(100_000)]", "kept = x[::500]") == []
    assert free(notebook, "del x") == [pytest.approx(300, rel=0.1)]


def test_memory_that_returns_to_the_system_gets_no_remark(notebook: Kernel) -> None:
    cells = (
        "x = bytearray(300 << 20)",
        "del x",
        "x = [bytes(400) for _ in range(600_000)]",
        "del x",
    )
    assert free(notebook, *cells) == []


def test_an_experiment_that_trims_the_heap_leaves_no_remark(notebook: Kernel) -> None:
    assert free(notebook, f"%%experiment a --keep kept\n{FREEING['a cleared dict']}") == []


OUR_WORK = """
import numpy
from ipygpumem.meter.own_growth import growth_for
with growth_for("a test"):
    kept_by_us = numpy.ones(1 << 20)
"""
"""Grows by 8 MiB, of which no byte is free afterwards."""
FREE_PAGES = """
from ipygpumem.probes.mappings import own_pages
own_pages().free_heap_bytes >> 20
"""


def test_our_own_work_does_not_free_heap_pages_of_user_code(notebook: Kernel) -> None:
    run_quietly(notebook, FREEING["a cleared dict"])
    run_quietly(notebook, OUR_WORK)
    # Nearly all of 300 MiB: our own work has given none of them back.
    assert int(run_quietly(notebook, FREE_PAGES).result or 0) > 250
    (freed,) = run_quietly(notebook, "%gpumem free").reports("note")
    (size,) = re.findall(r"freed: RAM ([\d.]+) MiB", freed)
    assert float(size) == pytest.approx(300, rel=0.1)


def test_our_own_work_frees_its_own_heap_pages(notebook: Kernel) -> None:
    run_quietly(notebook, "%gpumem free")
    run_quietly(
        notebook,
        """
        from ipygpumem.meter.own_growth import growth_for
        with growth_for("a test"):
            blocks = [bytes(3000) for _ in range(50_000)]
            kept_by_us = blocks[::500]
            del blocks
        """,
    )
    # Of 143 MiB.
    assert int(run_quietly(notebook, FREE_PAGES).result or 0) < 16


PEAK = "__import__('ipygpumem').experiments()[-1].usages[0].peak_delta_bytes"


def test_the_search_at_an_experiments_end_leaves_no_peak(notebook: Kernel) -> None:
    """From the second array of its size on, malloc returns no pages by itself, so that the end
    looks for what is left.
    """
    run_quietly(
        notebook, "rows = [{'number': number, 'tags': [f't{number}']} for number in range(300_000)]"
    )
    peaks = list[int]()
    for name in ("one", "two", "three"):
        run_quietly(
            notebook,
            f"""
            %%experiment {name}
            import numpy
            array = numpy.ones(1 << 20)
            """,
        )
        peaks.append(notebook.value(PEAK))
    # The array takes 8 MiB; copies of the rows would take far more.
    assert max(peaks) < 20 << 20


def test_blocks_that_python_keeps_are_named_after_an_experiment(kernel: Kernel) -> None:
    run_quietly(kernel, "kept = []")
    cell = """%%experiment fragments
objects = [[number] for number in range(600_000)]
kept += objects[::500]"""
    (text,) = run_quietly(kernel, cell).reports("experiment")
    assert re.search(r"\d\d(\.\d)? MiB free blocks of Python between objects that are alive", text)
    assert "not named" not in text

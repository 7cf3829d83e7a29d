"""The cell of docs/sharing.md, in a kernel in which ipygpumem cannot be imported."""

import re
from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.alone import ROOT
from tests.steps import run_cells, run_failing

PAGE = (ROOT / "docs/sharing.md").read_text("utf-8")
(FIRST_CELL,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MISSING = """
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "ipygpumem":
            raise ModuleNotFoundError("No module named 'ipygpumem'", name="ipygpumem")
sys.meta_path.insert(0, Missing)
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[Kernel]:
    """A kernel without ipygpumem, in which the page's first cell has run."""
    with Kernel() as kernel:
        run_cells(kernel, MISSING, FIRST_CELL)
        yield kernel


def test_without_the_cell_a_shared_notebook_stops(bare_kernel: Kernel) -> None:
    run_cells(bare_kernel, MISSING)
    run_failing(bare_kernel, "%load_ext ipygpumem", "ModuleNotFoundError")


@pytest.mark.parametrize(
    ("cell", "name", "value"),
    [
        ("%%experiment demo --keep total\ntotal = 3", "total", 3),
        ("\n%%peak --top 3\npeak = 4", "peak", 4),
        ("%%memlines\nlines = 5", "lines", 5),
        ("%%isolate --keep inner --memory 2GiB\ninner = 6", "inner", 6),
        ("%%autofit batch_size=64 --min 8\nsize = batch_size", "size", 64),
        ("%%autofit --min 8 batch_size=32\nsize = batch_size", "size", 32),
        ("%%experiment demo\n%%peak\nboth = 7", "both", 7),
        ("%%gpumem peak\nbelow = 8", "below", 8),
        ("%gpumem peak\nbelow = 9", "below", 9),
        ("for i in range(2):\n    %gpumem free\n    last = i", "last", 1),
        ("import asyncio\n%experiment start a\nslept = await asyncio.sleep(0, 10)", "slept", 10),
        ("%%experiment demo\nimport asyncio\nslept = await asyncio.sleep(0, 11)", "slept", 11),
        ("%config IPyGpuMem.quiet = True\n%gpumem\nquiet = 12", "quiet", 12),
        ("%load_ext ipygpumem\nloaded = 13", "loaded", 13),
        ("%%time\n%gpumem top\ntimed = 14", "timed", 14),
        ("%ipygpumem top\nother = 15", "other", 15),
    ],
)
def test_the_code_of_a_cell_runs_without_ipygpumem(
    bare: Kernel, cell: str, name: str, value: int
) -> None:
    run_cells(bare, cell)
    assert bare.value(name) == value


@pytest.mark.parametrize(
    "cell", ["%%estimate\nran = 1", "%%gpumemit -r 3\nran = 1", "%gpumemit f()"]
)
def test_a_cell_that_only_measures_does_nothing(bare: Kernel, cell: str) -> None:
    run_cells(bare, cell)
    run_failing(bare, "ran", "NameError")


def test_a_shared_cell_shows_its_value_and_keeps_line_numbers(bare: Kernel) -> None:
    assert run_cells(bare, "%%experiment demo\n1 + 1").result == "2"
    assert "line 2" in run_failing(bare, "%%experiment demo\n1 / 0", "ZeroDivisionError").traceback


def test_other_magics_stay_as_they_are(bare: Kernel) -> None:
    assert run_cells(bare, "%%capture text\nprint('x')\n", "text.stdout").result == repr("x\n")
    run_failing(bare, "%peaks", None)


def test_the_cell_loads_ipygpumem_if_it_is_installed(bare_kernel: Kernel) -> None:
    run_cells(bare_kernel, FIRST_CELL)
    assert run_cells(bare_kernel, "%gpumem top").reports("top")

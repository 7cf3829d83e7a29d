"""A line that a report advises frees memory at once, also that of objects in cycles."""

from __future__ import annotations

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.report.layout import TO_FREE, Listing, Report, Table
from ipygpumem.shell.advised_lines import AdvisedLines
from tests.steps import HIDE_LIBRARIES, kernel_with, needs, run_cells

notebook = kernel_with(
    "import gc, weakref\nimport numpy as np\n%load_ext ipygpumem", HIDE_LIBRARIES
)
CYCLE = """
class Node:
    def __init__(self, parent=None):
        self.parent, self.children = parent, []
        if parent is not None:
            parent.children.append(self)
root = Node()
Node(root).data = np.ones(5 * 2**20)  # so large that its pages are unmapped at once
alive = weakref.ref(root)
"""
CLASS = """
class Data:
    data = np.ones(5 * 2**20)
d = Data()
alive = weakref.ref(Data)
"""
HOOK = """
class Model:
    pass
model = Model()
model.weights = np.ones(5 * 2**20)
def trainer(_model=model):
    return _model
model.hook = trainer
alive = weakref.ref(model)
"""


def is_alive(kernel: Kernel) -> bool:
    """Return True if the object that ``alive`` refers to is still there."""
    return "True" in run_cells(kernel, "print(alive() is not None)").stdout


@pytest.mark.parametrize(
    ("made", "look", "line"),
    [
        (CYCLE, "why root", "del root"),
        (CYCLE, "top", "del root"),
        (CYCLE, "why root", "del root  # the whole tree"),
        (CLASS, "why Data", "del d; del Data"),
        (CLASS, "why Data", "del d\ndel Data"),
        (HOOK, "why trainer", "del trainer; del model"),
        (HOOK, "why trainer", "del trainer\nif True:\n    del model"),
    ],
)
@pytest.mark.parametrize("in_experiment", [False, True])
def test_an_advised_line_frees_cycles_at_once(
    notebook: Kernel, made: str, look: str, line: str, in_experiment: bool
) -> None:
    if in_experiment:
        run_cells(notebook, "%experiment start advised")
    run_cells(notebook, made)
    run_cells(notebook, f"%gpumem {look}")
    pasted = run_cells(notebook, line)
    assert not is_alive(notebook), line
    (cell_line,) = pasted.reports("cell")
    assert "RAM -" in cell_line
    if in_experiment:
        run_cells(notebook, "%experiment end")


def test_figures_that_leaks_closes_are_freed(notebook: Kernel) -> None:
    needs("matplotlib")
    run_cells(
        notebook,
        """
        import matplotlib
        matplotlib.use('agg')
        import matplotlib.pyplot as plt
        """,
    )
    run_cells(
        notebook,
        """
        for _ in range(3):
            fig, ax = plt.subplots()
            ax.plot(np.random.rand(2**18))
        alive = weakref.ref(fig)
        del fig, ax
        """,
    )
    assert 'plt.close("all")' in run_cells(notebook, "%gpumem leaks").leaks()[0]
    run_cells(notebook, 'plt.close("all")')
    assert not is_alive(notebook)


@pytest.mark.parametrize(
    "prepare",
    ["gc.disable()", "%config IPyGpuMem.collect_garbage = False", ""],
    ids=["disabled", "switched off", "another line"],
)
def test_nothing_is_collected_that_the_user_does_not_want(notebook: Kernel, prepare: str) -> None:
    run_cells(notebook, CYCLE, "%gpumem why root", "gc.collect()", prepare)
    run_cells(notebook, "del root" if prepare else "root = None")
    is_there = is_alive(notebook)
    run_cells(notebook, "gc.enable()", "%config IPyGpuMem.collect_garbage = True")
    assert is_there


def test_a_cell_that_fails_first_collects_nothing(notebook: Kernel) -> None:
    run_cells(notebook, CYCLE, "%gpumem why root", "del Node; gc.collect()", "collections = []")
    run_cells(notebook, "gc.callbacks.append(lambda phase, info: collections.append(info))")
    notebook.run("""
    1 / 0
    del root
    """)
    counted = run_cells(
        notebook,
        "del gc.callbacks[-1]; print(sum(each['generation'] == 2 for each in collections))",
    )
    assert counted.stdout.split() == ["0"]


def advised(*reports: Report) -> AdvisedLines:
    lines = AdvisedLines()
    lines.note(reports)
    return lines


def test_lines_are_remembered_from_each_part_of_a_report() -> None:
    table = Table.of([{"size": "1 MiB", TO_FREE: "del a[0]  # and more"}], whole={TO_FREE})
    listing = Listing("in one cell", ["for each in b:", "    each.x = None"], code=True)
    words = ["in one line: del c; del d", "x grew by 1 MiB · to free it: e.clear()"]
    lines = advised(Report("a", "", words, [table], listings=[listing], advised=["del f"]))
    for source in (
        "del a[0]",
        "x = 1\ndel a[0]  # and more",
        "    each.x = None",
        "del d",
        "del c; del d",
        "e.clear()",
        "%%time\ndel f",
    ):
        assert lines.are_in(source), source
    for source in ("del a", "a[0]", "", "1 MiB", "in one cell", "# del f"):
        assert not lines.are_in(source), source


def test_few_lines_are_remembered_the_last_ones() -> None:
    lines = AdvisedLines()
    for number in range(3000):
        lines.note([Report("a", "", advised=[f"del x{number}"])])
    # Of 3,000 lines, the last thousand at most.
    assert len(lines.texts) <= 1000
    assert lines.are_in("del x2999")
    assert not lines.are_in("del x0")

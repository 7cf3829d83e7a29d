"""While the user's code runs nothing of ours refers weakly to an array: NumPy resizes none to which
anything does.
"""

import textwrap
from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import experiment, run_cells

SETUP = "%load_ext ipygpumem\nimport numpy, weakref, ipygpumem\nkept = []"
MAKE_ARRAYS = "old = numpy.ones(1 << 22); words = numpy.array([[1], 2] * 5, dtype=object)"
RESIZE_ARRAYS = textwrap.dedent(
    """\
    found = [weakref.getweakrefs(array) for array in (old, words, *kept)]
    old.resize(1 << 21); words.resize(3)
    for array in kept: array.resize(1 << 21, refcheck=False)
    found"""
)
FEATURES = [
    "%gpumem tensors",
    "before = ipygpumem.tensors()\nipygpumem.diff(before, ipygpumem.tensors())",
    "tracker = ipygpumem.tracker(silent=True); tracker.track(); tracker.track(); None",
    "for i in ipygpumem.track(range(5), silent=True): kept.append(numpy.ones(1 << 22))\ndel kept[:]",  # noqa: E501
    "%gpumem free",
    "%gpumem leaks",
    "%gpumem status",
    "%%autofit n=2\nold + n",
    "%%memlines\nold + 1",
    "try:\n    with ipygpumem.experiment('failed'): numpy.ones(1 << 55)\nexcept MemoryError: pass",
]


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Kernel]:
    run_cells(kernel, SETUP, MAKE_ARRAYS)
    yield kernel
    kernel.run("%experiment end")


def resizes(kernel: Kernel, arrays: int = 2) -> bool:
    return run_cells(kernel, RESIZE_ARRAYS).result == str([[]] * arrays)


def test_an_older_array_can_be_resized_after_each_feature(notebook: Kernel) -> None:
    run_cells(notebook, "%experiment start outer")
    for code in FEATURES:
        run_cells(notebook, code)
        assert resizes(notebook), code
        run_cells(notebook, MAKE_ARRAYS)
    run_cells(
        notebook,
        """
        %experiment start inner
        mine = numpy.ones(1 << 22)
        """,
        "mine.resize(1 << 21)",
    )
    assert resizes(notebook)
    run_cells(
        notebook,
        """
        %experiment end
        %experiment end
        """,
    )
    assert resizes(notebook)
    run_cells(notebook, MAKE_ARRAYS)
    assert notebook.run("def f(array): numpy.ones(1 << 55)\nf(old)").error
    assert resizes(notebook)


def test_an_array_that_outlives_its_experiment_is_resized(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        run = ipygpumem.experiment('small').start()
        mine = numpy.ones(1 << 14); kept.append(mine)
        """,
    )
    run_cells(notebook, "record = run.finish()")
    assert run_cells(notebook, "weakref.getweakrefs(kept.pop())").result == "[]"
    report = notebook.run(
        """
        %%experiment lost
        mine = numpy.ones(1 << 22); kept.append(mine); del mine
        x = kept[-1]
        """
    )
    assert "kept[0]" in report.reports("experiment")[0]
    assert "kept[0]" in notebook.run("%gpumem leaks").reports()[0]
    assert resizes(notebook, 3)


@pytest.mark.parametrize(
    "code",
    [
        "box['top'] = numpy.ones(1 << 19), box['top']",
        "box['top'] = list(map(str, range(100_000))), box['top']",
        "box['row'] = {'inner': [box['top'], *map(str, range(100_000))]}",
        "box['row'] = [{'array': box['top'], 'words': list(map(str, range(100_000)))}]",
        "box['top'].resize(1 << 19, refcheck=False)",
    ],
)
def test_an_older_array_behind_a_leak_is_resized(notebook: Kernel, code: str) -> None:
    run_cells(notebook, "inner = numpy.arange(1000.); box = {'top': inner}")
    (report,) = run_cells(notebook, experiment(code, name="a")).reports("experiment")
    assert "still alive" in report
    for line in ("pass", "%gpumem leaks", "%gpumem leaks"):
        run_cells(notebook, line, "inner.resize(len(inner) + 1, refcheck=False)")

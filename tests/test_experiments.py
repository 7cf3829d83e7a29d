"""Experiments in a real kernel: their first error, and the memory that their rows name."""

from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import experiment, needs, run_failing, run_quietly, tidied_kernel

shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem")

REMEMBER_MODULES = """
import sys
before = set(sys.modules)
"""
NEW_LIBRARIES = """
sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"ipygpumem", "psutil"})
"""


def test_the_first_error_in_an_experiment_imports_nothing(kernel: Kernel) -> None:
    """IPython imports 34 modules for its first traceback: 2 MiB that no code of the user takes."""
    run_quietly(kernel, "%load_ext ipygpumem", "%experiment start first", REMEMBER_MODULES)
    run_failing(kernel, "1 / 0")
    assert kernel.value(NEW_LIBRARIES) == []
    run_quietly(kernel, "%experiment end")


def test_a_tracebacks_syntax_tree_is_freed_with_its_experiment(
    kernel: Kernel, tmp_path: Path
) -> None:
    """The tree of torch/nn/functional.py takes 20 MiB, and has so many references that a search for
    holders did not end.
    """
    functions = "".join(f"def f{n}(a, b): return a if a or b else not b\n" for n in range(300))
    (tmp_path / "large_file.py").write_text(f"{functions}def fails(): return 1 / 0\n")
    run_quietly(kernel, "%load_ext ipygpumem", f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    run_quietly(kernel, "import ast, gc, stack_data, large_file")
    trees = "sum(type(item) is ast.Module for item in gc.get_objects())"
    before = kernel.value(trees)
    run_failing(kernel, "large_file.fails()")
    assert kernel.value(trees) > before
    run_failing(kernel, experiment("large_file.fails()", name="failing"))
    assert kernel.value(f"(gc.collect(), {trees})[1]") == before


def test_an_experiment_is_called_by_its_cell_by_default(kernel: Kernel) -> None:
    run_quietly(
        kernel,
        """
        %%experiment --keep kept
        kept, dropped = 1, 2
        """,
    )
    run_quietly(
        kernel,
        """
        %%experiment
        kept = 3
        """,
        experiment("kept = 4", name="named"),
    )
    names = "__import__('ipygpumem').experiments()"
    assert kernel.value(f"[record.name for record in {names}]") == ["cell2", "cell3", "named"]
    assert kernel.value("(kept, 'dropped' in globals())") == (1, False)


def test_large_kept_objects_are_shown_with_their_memory(kernel: Kernel) -> None:
    keep_two = """
%%experiment e --keep small,pair,array
import numpy as np
small, array = 1, np.ones(2**20)
pair = [array, np.ones(2**18)]
"""
    (report,) = run_quietly(kernel, keep_two).reports("experiment")
    assert "kept: array (RAM 8 MiB), pair (RAM 2 MiB), small\n" in report


def test_older_arrays_do_not_count_for_kept_objects(kernel: Kernel) -> None:
    run_quietly(kernel, "import numpy as np; older = np.ones(2**21)")
    keep_view = """
%%experiment e --keep view,both,new
view, new = older[:5], np.ones(2**20)
both = [older, np.ones(2**18)]
"""
    (report,) = run_quietly(kernel, keep_view).reports("experiment")
    assert report.splitlines()[-1] == "  kept: new (RAM 8 MiB), both (RAM 2 MiB), view"


def test_a_view_of_an_older_array_alone_can_be_kept(kernel: Kernel) -> None:
    run_quietly(kernel, "import numpy as np; older = np.ones(2**22)")
    (report,) = run_quietly(kernel, experiment("view = older[:5]", options="--keep view")).reports(
        "experiment"
    )
    assert report.splitlines()[-1] == "  kept: view"


def test_kept_objects_are_measured_if_older_memory_is_freed(kernel: Kernel) -> None:
    run_quietly(kernel, "import numpy as np; box = [np.ones(2**20)]")
    (report,) = run_quietly(
        kernel, experiment("box.clear(); new = np.ones(2**20)", options="--keep new")
    ).reports("experiment")
    assert report.splitlines()[-1] == "  kept: new (RAM 8 MiB)"


STRUCK_ONCE = """
import signal
import numpy as np
from ipygpumem.shell.experiments import ending
from ipygpumem.shell.searches import survivors
def strike_once(owner, name):
    function = getattr(owner, name)
    def struck(*args, **options):
        setattr(owner, name, function)
        signal.raise_signal(signal.SIGINT)
    setattr(owner, name, struck)
kept = []
"""


@pytest.mark.parametrize(
    ("step", "lost"),
    [
        ("survivors.Survivors, 'rows_of_experiment'", "objects still alive were not listed"),
        ("survivors.Survivors, '_rows_at_end'", "objects still alive were not listed"),
    ],
)
def test_an_interrupted_end_says_that_objects_are_missing(
    notebook: Kernel, step: str, lost: str
) -> None:
    """It said that no known object accounts for 16 MiB, although it had not looked for them."""
    run_quietly(
        notebook, STRUCK_ONCE, "%experiment start e", "x = np.ones(1 << 21); kept.append(x)"
    )
    run_quietly(notebook, f"strike_once({step})")
    assert run_failing(notebook, "%experiment end").error == "KeyboardInterrupt"
    (report,) = run_quietly(notebook, "%experiment end").reports("experiment")
    assert f"an interrupt came: {lost}" in report
    assert "not named" not in report
    if "_rows_at_end" in step:
        (leaks,) = run_quietly(notebook, "%gpumem leaks").leaks()
        assert "del kept[0]" in leaks


def test_an_interrupt_before_names_are_deleted_hides_no_leak(notebook: Kernel) -> None:
    """``leaks`` found none of its arrays, which no report had listed."""
    run_quietly(
        notebook, STRUCK_ONCE, "%experiment start e", "x = np.ones(1 << 21); kept.append(x)"
    )
    run_quietly(notebook, "strike_once(ending.ExperimentEnd, '_watch_arrays')")
    assert run_failing(notebook, "%experiment end").error == "KeyboardInterrupt"
    (report,) = run_quietly(notebook, "%experiment end").reports("experiment")
    assert "x: ndarray" in report
    assert "an interrupt came" not in report
    (leaks,) = run_quietly(notebook, "%gpumem leaks").leaks()
    assert "del kept[0]" in leaks


WATCHED_READS = """
import gc, sys, _asyncio
import numpy as np
read = gc.get_referents
touched = []
def watched_read(*items):
    if any(item is _asyncio for item in items):
        touched.append(sys._getframe(1).f_code.co_name)
        items = tuple(item for item in items if item is not _asyncio)
    return read(*items)
gc.get_referents = watched_read
many = [[{"number": each}] for each in range(60_000)]
few = []
"""


@pytest.mark.parametrize("before", ["del many", "pass"])
def test_no_look_reads_the_objects_that_asyncio_has_freed(kernel: Kernel, before: str) -> None:
    """In Python 3.12 a list of them frees them again, and the next collection never ends."""
    run_quietly(kernel, WATCHED_READS, before)
    run_quietly(kernel, experiment("few.append([np.ones(1 << 20)])"))
    run_quietly(kernel, experiment("import email.mime.audio; few.append('a' * 10**7)"))
    run_quietly(
        kernel, "%gpumem leaks", "%gpumem top", "%gpumem why few", "%gpumem status", "%gpumem free"
    )
    run_quietly(kernel, "%gpumem tensors", "%gpumem")
    assert kernel.value("touched") == []


OLD_GARBAGE = """
import gc
import numpy as np
from ipygpumem.shell.app import app_of
class Ring:
    def __init__(self):
        self.me = self
        self.array = np.ones(5_000_000)
ring, keeper = Ring(), []
gc.collect();
"""
PATHS_OF_SURVIVORS = (
    "str([row.holder.path for row in app_of(get_ipython()).experiments.finished[-1].survivors])"
)


def test_arrays_in_older_garbage_are_not_left(kernel: Kernel) -> None:
    run_quietly(
        kernel, "%load_ext ipygpumem", "%config IPyGpuMem.collect_garbage = False", OLD_GARBAGE
    )
    run_quietly(
        kernel,
        """
        gc.disable()
        del ring
        """,
        "gc.enable()",
    )  # only a full collection finds it
    texts = "str(number) * 1000 for number in range(10_000)"  # so much that arrays are guessed
    run_quietly(kernel, experiment(f"keeper.extend({texts})"))
    assert kernel.value(PATHS_OF_SURVIVORS) == "['notebook variable keeper']"


def test_a_name_error_says_which_experiment_deleted_the_name(notebook: Kernel) -> None:
    says = "data belonged to experiment second, which has ended: --keep data keeps it"
    run_quietly(notebook, experiment("data = 1", name="first"))
    run_quietly(notebook, experiment("data = 2", name="second"), "def use(): return data")
    assert says in run_failing(notebook, "use()").reports("cell")[-1]
    assert "belonged" not in run_failing(notebook, "dat").reports("cell")[-1]
    assert "belonged" not in run_failing(notebook, "raise NameError('data')").reports("cell")[-1]
    run_quietly(notebook, experiment("data = 3", name="third", options="--keep data"), "use()")


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param("exec('data', {})", id="a name of other globals"),
        pytest.param("data = 2; del data\ndata", id="a name that this cell has deleted"),
        pytest.param("use()", id="a name that a later cell has deleted"),
    ],
)
def test_a_name_that_no_experiment_has_deleted_gets_no_remark(notebook: Kernel, cell: str) -> None:
    run_quietly(notebook, experiment("data = 1", name="first"), "def use(): return data")
    if cell == "use()":
        run_quietly(notebook, "data = 2", "del data")
    assert "belonged" not in run_failing(notebook, cell).reports("cell")[-1]


def test_a_name_error_of_a_rebound_name_is_explained_too(notebook: Kernel) -> None:
    says = "data belonged to experiment first, which has ended: --keep data keeps it"
    run_quietly(notebook, experiment("data = 1", name="first"))
    for cell in ("data = data + 1", "x = 1\ndata += 1", "if x:\n    data = [data]"):
        assert says in run_failing(notebook, cell).reports("cell")[-1]


SIZES_OF_SURVIVORS = """
str([
    (row.holder.path, row.size_bytes >> 20)
    for row in app_of(get_ipython()).experiments.finished[-1].survivors
])
"""
SMALL_VIEWS = """
%%experiment first
outer.append([np.ones(2**21)[place : place + 9] for place in range(3)])
"""
SECOND_EXPERIMENT = """
%%experiment second
later.append([np.ones(2**22)[:9] for place in range(3)])
"""


def test_memory_of_small_views_counts_once_and_in_one_experiment(kernel: Kernel) -> None:
    start = """
    import numpy as np
    from ipygpumem.shell.app import app_of
    outer, later = [], []
    """
    run_quietly(kernel, "%load_ext ipygpumem", start, SMALL_VIEWS.strip())
    assert (
        kernel.value(SIZES_OF_SURVIVORS.replace("\n", "")) == "[('notebook variable outer[0]', 48)]"
    )
    run_quietly(kernel, SECOND_EXPERIMENT.strip())
    assert (
        kernel.value(SIZES_OF_SURVIVORS.replace("\n", "")) == "[('notebook variable later[0]', 96)]"
    )


def test_only_new_locals_of_a_running_function_are_left(kernel: Kernel) -> None:
    needs("numpy")
    run_quietly(
        kernel,
        """
        import ipygpumem
        import numpy as np
        def holders(size):
            older = np.ones(size)
            with ipygpumem.experiment("block") as experiment:
                newer = np.ones(size)
            return [row.holder.path.partition(", ")[2] for row in experiment.record.survivors]
        """,
        "left = [holders(size) for size in (1_000_000, 5_000_000)]",
    )
    assert kernel.value("left") == [["local newer"], ["local newer"]]

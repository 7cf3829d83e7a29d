"""Number of Python functions that our work calls, and objects that it leaves in the process.

Calls can be counted exactly, while times are noise.
"""

import functools
import gc
import itertools
import re
import sys
import textwrap
import tracemalloc

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.allowance import Allowance
from ipygpumem.introspect import is_ours
from ipygpumem.shell import recovery
from tests.alone import alone
from tests.counted_calls import calls_in, least_calls_in, run_profiled
from tests.steps import experiment, needs, run_cells

MOST_CALLS = {
    "a trivial cell": 249,
    "an empty experiment": 2160,
    "an empty experiment, each object": 0.005,
    "an empty experiment, each name": 0.025,
    "%gpumem status, each object": 0.024,
    "%gpumem status, each name": 0.03,
    "%gpumem leaks, each object": 0.018,
    "%gpumem leaks, each name": 0.024,
    "%gpumem leaks, each array": 168,
    "%gpumem top, each object": 0.077,
    "%gpumem top, each name": 0.2,
    "%gpumem top, each link of a doubly linked list": 9,
    "a look at what grows, each object": 0.062,
    "a look at what grows, each name": 0.203,
    "a recovery": 2270,
    "a recovery, each object": 0.003,
    "a recovery, each name": 0.019,
    "a recovery, each frame": 150,
    "with torch, the first experiment": 3126,
    "with torch, an empty experiment": 3040,
    "with torch, a trivial cell": 249,
    "a guarded cell": 344,
    "%gpumem tensors, each tensor": 1.1,
    "an experiment that leaves tensors, each tensor": 10.5,
    "an experiment that leaves a MiB of tensors, each tensor": 103,
    "small arrays in a list, each array": 520,
    "small arrays as views, each array": 680,
    "small arrays in objects, each array": 820,
    "small arrays in generators, each array": 870,
}
"""Calls of our functions, and calls that these lead to. A commit that raises a number says why."""

MOST_FILES = {"a trivial cell": 33, "an empty experiment": 85}
"""Files of ours whose code runs, which a reader of such a cell must open. A commit that raises one
says why.
"""
MOST_MODULES = {"at %load_ext": 17, "as the first cell begins": 150}
"""Modules of ours that are imported. The first number is what delays the start of a kernel, which
without bytecode caches compiles each of them. A commit that raises one says why.
"""
SLACK = 1.1
"""Python's own functions call each other in another way in each version."""
NUMBER_OF_NAMES = 40_000
FEW_ARRAYS = 100
LINKED = 10_000
ARRAYS = 300
TENSORS = 1_000
FRAMES = 10
ARRAYS_MORE = 1_000
DEEP = """
def deep(left):
    rows = [left] * 2000
    if not left: raise MemoryError
    deep(left - 1)

deep(NUMBER)
"""
EMPTY = """\
%%experiment empty
pass
"""
RECOVERY = "raise MemoryError"
TOP_COMMAND = "%gpumem top"
LOOK_AT_GROWTH = """
from ipygpumem.meter.meter import Meter
from ipygpumem.inventory.leaks import trends
from ipygpumem.shell.searches import growth_search
growth_search.users_modules = dict  # the tests' own
made = lambda: {name: value for name, value in globals().items() if name.startswith(("name_", "objects"))}
growth_search.look_for_growth(trends.Growing(), made, "run", dict, bool, Meter([]))
"""  # noqa: E501
OBJECTS = (
    "objects = [kind() for kind in (list, dict, set, Exception) "
    f"for _ in range({NUMBER_OF_NAMES // 4})]"
)
NAMES = f"""
{OBJECTS}
globals().update((f"name_{{number}}", found) for number, found in enumerate(objects))
del objects
"""
LISTS = f"globals().update((f'name_{{number}}', [number]) for number in range({NUMBER_OF_NAMES}))"
LINKS = f"""
class Link:
    def __init__(self, before):
        self.before = before

def linked(number):
    first = last = Link(None)
    for _ in range(number):
        last.next = Link(last)
        last = last.next
    return first

first = linked({LINKED})
"""
TENSORS_KEPT = """
keeper, number = {}, NUMBER
kept = [torch.zeros(1) for _ in range(number)]
"""
LEAVES = """\
%%experiment leaves
left = [torch.zeros(1) for _ in range(number)]
keeper['left'] = left
"""
LEAVES_MORE = """\
%%experiment leaves
keeper[len(keeper)] = [torch.zeros(400) for _ in range(number)]
"""
ARRAYS_LEFT = {
    "in a list": "left = [np.ones(400) for _ in range(number)]",
    "as views": "left = list(np.ones((number, 400)))",
    "in objects": """
        class Data:
            def __init__(self):
                self.array = np.ones(400)

        left = [Data() for _ in range(number)]
    """,
    "in generators": """
        def rows():
            array = np.ones(400)
            yield array

        left = [rows() for _ in range(number)]
        for row in left:
            next(row)
    """,
}
"""Ways to leave a number of small arrays."""
STEPS = {
    "an empty experiment": EMPTY,
    "a recovery": RECOVERY,
    "a look at what grows": LOOK_AT_GROWTH,
    "%gpumem status": "%gpumem status",
    "%gpumem leaks": "%gpumem leaks",
    "%gpumem top": TOP_COMMAND,
}
"""Work whose calls must not become more with objects or names."""
TENSOR_STEPS = {
    "%gpumem tensors": "%gpumem tensors",
    "an experiment that leaves tensors": LEAVES,
    "an experiment that leaves a MiB of tensors": LEAVES_MORE,
}


def files_in(shell: InteractiveShell, cell: str) -> list[str]:
    """Return our files whose code runs in a cell, but for one whose code runs when another process
    of the machine uses /dev/shm.
    """
    files = set[str]()
    run_profiled(shell, cell, lambda frame, event, argument: files.add(frame.f_code.co_filename))
    return sorted(name for name in filter(is_ours, files) if not name.endswith("segments.py"))


def warm_up(shell: InteractiveShell, cell: str) -> None:
    """Run a cell without counting its calls, which takes three times as long: the first run
    imports.
    """
    run_profiled(shell, cell, None)


LATE = {"difflib", "psutil", "ipygpumem.inventory", "numpy"}
"""Modules that are loaded when they are needed: psutil takes as long as a third of ours."""


def measured_shell() -> InteractiveShell:
    """Return a shell with the extension in which no call depends on how fast the machine is."""
    # In C: a slow machine asks more often.
    available = itertools.repeat(1 << 50).__next__
    unlimited = functools.partial(Allowance, 1000, available=available)
    recovery.Allowance = unlimited  # type: ignore[misc, assignment]  # in a process of its own
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    return shell


def leave_room(shell: InteractiveShell) -> None:
    """Leave free memory in the heap, because we do more where the process grows."""
    shell.run_cell(NAMES)
    shell.run_cell("%reset -f")


def calls_of(
    name: str,
    shell: InteractiveShell,
    cell: str,
    runs: int = 3,
    *,
    without: int = 0,
    things: int = 1,
) -> float:
    """Return the calls in a cell beyond those ``without`` some things, for each of the things; the
    least of several runs.

    The first run that calls few enough for ``name`` is the last: more would change nothing.
    """
    calls = list[float]()
    for _ in range(runs):
        calls.append(round((calls_in(shell, cell) - without) / things, 3))
        if not risen({name: calls[-1]}):
            break
    return min(calls)


def risen(calls: dict[str, float]) -> dict[str, float]:
    """Return the numbers of calls that are larger than they were."""
    return {name: number for name, number in calls.items() if number > MOST_CALLS[name] * SLACK}


@alone
def test_loading_the_extension_loads_few_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in LATE]:
        del sys.modules[name]  # the tests' own
    measured_shell()
    assert LATE.isdisjoint(sys.modules)


def test_loading_imports_few_modules_in_a_kernel(bare_kernel: Kernel) -> None:
    imported = """
import sys
def modules_of_ours():
    names = [name for name in sys.modules if name.partition(".")[0] == "ipygpumem"]
    print(len(names))
"""
    run_cells(bare_kernel, imported)
    counts = dict[str, int]()
    for moment, load in (("at %load_ext", "%load_ext ipygpumem"), ("as the first cell begins", "")):
        printed = run_cells(bare_kernel, f"{load}\nmodules_of_ours()").stdout
        counts[moment] = int(printed.split()[0])
    for moment, count in counts.items():
        assert count <= MOST_MODULES[moment], counts


def test_no_module_of_ours_is_imported_while_a_cell_runs(bare_kernel: Kernel) -> None:
    """Memory may be short then, and the import would count as the cell's."""
    run_cells(
        bare_kernel,
        """
        import sys
        %load_ext ipygpumem
        """,
    )
    run_cells(bare_kernel, "before = set(sys.modules)")
    for failing in ("raise MemoryError", "raise KeyboardInterrupt"):
        bare_kernel.run(failing)
    late = run_cells(
        bare_kernel,
        """
        names = [name for name in set(sys.modules) - before if name.startswith("ipygpumem")]
        print("late:", sorted(names))
        """,
    )
    assert "late: []" in late.stdout


@alone
def test_a_cell_without_peak_loads_no_module_of_it() -> None:
    shell = measured_shell()
    for cell in ("1", EMPTY, "%gpumem status"):
        files_in(shell, cell)
    assert [
        name for name in sys.modules if name.startswith(("ipygpumem.extras.peak", "memray"))
    ] == []


@alone
def test_a_cell_and_an_experiment_call_few_functions() -> None:
    shell = measured_shell()
    calls = {
        "a trivial cell": calls_of("a trivial cell", shell, "1"),
        "an empty experiment": calls_of("an empty experiment", shell, EMPTY, 20),
    }
    assert risen(calls) == {}, calls


@alone
def test_a_recovery_after_another_calls_few_functions() -> None:
    shell = measured_shell()
    calls = {"a recovery": calls_of("a recovery", shell, RECOVERY, 5)}
    assert risen(calls) == {}, calls


@alone
def test_a_cell_and_an_experiment_run_few_files() -> None:
    shell = measured_shell()
    leave_room(shell)
    for name, cell in (("a trivial cell", "1"), ("an empty experiment", EMPTY)):
        files = min((files_in(shell, cell) for _ in range(5)), key=len)  # the first one imports
        assert len(files) <= MOST_FILES[name], (name, len(files), files)


@alone
def test_an_experiment_does_not_ask_about_each_name() -> None:
    shell = measured_shell()
    asked = 0
    is_tracked = gc.is_tracked

    def counting(item: object) -> bool:
        nonlocal asked
        asked += 1
        return is_tracked(item)

    gc.is_tracked = counting  # in a process of its own
    shell.run_cell(LISTS)
    asked = 0
    shell.run_cell(EMPTY)
    # Far less than once for each of the names.
    assert asked < NUMBER_OF_NAMES / 10


@alone
def test_no_command_leaves_garbage() -> None:
    """A look collects once more after a collection that has found some."""
    shell = measured_shell()
    shell.run_cell("rows = []")
    commands = ["6 * 7", EMPTY, "%%experiment leaves\nrows.append('a' * 2 ** 22)"]
    # Not ``status``: without a card, pynvml makes a class at each try to load NVML.
    commands += [f"%gpumem {look}" for look in ("leaks", "top", "why rows", "tensors")]

    # What is imported and cached on first use is no garbage.
    for command in commands * 2:
        shell.run_cell(command)

    # Garbage is kept in a list, so that it can be counted.
    garbage = dict[str, int]()
    gc.disable()
    for command in commands:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        shell.run_cell(command)
        gc.collect()
        garbage[command] = len(gc.garbage)
        gc.set_debug(0)
        gc.garbage.clear()
    of_ipython = garbage["6 * 7"]
    assert all(number <= of_ipython for number in garbage.values()), garbage


@alone
def test_a_start_makes_the_collector_follow_each_name_once() -> None:
    shell = measured_shell()
    followed = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal followed
        if phase == "start":
            for generation in range(info["generation"] + 1):
                followed += len(gc.get_referents(*gc.get_objects(generation=generation)))

    shell.run_cell(LISTS)
    shell.run_cell(EMPTY)
    gc.collect()
    gc.callbacks.append(count)
    shell.run_cell(EMPTY)
    gc.callbacks.remove(count)
    # Once for each name; the rest is the shell's.
    assert followed < NUMBER_OF_NAMES * 1.2


@alone
def test_an_empty_experiment_takes_few_bytes_for_each_name() -> None:
    shell = measured_shell()
    shell.run_cell(EMPTY)
    peaks = list[int]()
    for number in (NUMBER_OF_NAMES, 2 * NUMBER_OF_NAMES):
        shell.user_ns.update((f"number_{number}", number) for number in range(number))
        shell.run_cell(EMPTY)
        tracemalloc.start()
        shell.run_cell(EMPTY)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Bytes for each name.
    assert (peaks[1] - peaks[0]) / NUMBER_OF_NAMES < 36


@alone
def test_an_empty_experiment_takes_few_bytes_for_each_list() -> None:
    """Fresh memory takes the system longer to clear than we take to note the list."""
    shell = measured_shell()
    peaks = list[int]()
    for number in (0, 10_000):
        shell.user_ns.update((f"name_{number}", [number]) for number in range(number))
        warm_up(shell, EMPTY)
        tracemalloc.start()
        shell.run_cell(EMPTY)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Bytes for each list.
    assert (peaks[1] - peaks[0]) / 10_000 < 160


@pytest.mark.parametrize("step", STEPS)
@alone
def test_work_does_not_call_functions_for_each_object(step: str) -> None:
    shell = measured_shell()
    leave_room(shell)
    warm_up(shell, STEPS[step])
    bare = least_calls_in(shell, STEPS[step], 5)
    calls = dict[str, float]()
    for thing, made in {"object": OBJECTS, "name": NAMES}.items():
        shell.run_cell(made)
        name = f"{step}, each {thing}"
        calls[name] = calls_of(name, shell, STEPS[step], 5, without=bare, things=NUMBER_OF_NAMES)
    assert risen(calls) == {}, calls


@alone
def test_leaks_searches_no_holder_of_the_namespace() -> None:
    """With so many names it is a large object itself."""
    shell = measured_shell()
    leaks = STEPS["%gpumem leaks"]
    name = "%gpumem leaks, each name"
    shell.run_cell(LISTS.replace(str(NUMBER_OF_NAMES), "1"))
    warm_up(shell, leaks)
    bare = least_calls_in(shell, leaks, 2)
    shell.run_cell(LISTS.replace(str(NUMBER_OF_NAMES), str(2 * NUMBER_OF_NAMES)))
    warm_up(shell, leaks)
    calls = {name: calls_of(name, shell, leaks, 2, without=bare, things=2 * NUMBER_OF_NAMES)}
    assert risen(calls) == {}, calls


@alone
def test_leaks_reads_the_storage_of_each_array_once() -> None:
    needs("numpy")
    shell = measured_shell()
    leaks = STEPS["%gpumem leaks"]
    shell.run_cell(
        """
        %%experiment leaky
        import json, numpy
        json.hidden = numpy.ones(1 << 18)
        """
    )
    name = "%gpumem leaks, each array"
    shell.run_cell(f"arrays = [numpy.ones(1) for _ in range({FEW_ARRAYS})]")
    warm_up(shell, leaks)
    few = least_calls_in(shell, leaks, 2)
    shell.run_cell(f"arrays = [numpy.ones(1) for _ in range({FEW_ARRAYS + ARRAYS})]")
    warm_up(shell, leaks)
    calls = {name: calls_of(name, shell, leaks, 2, without=few, things=ARRAYS)}
    assert risen(calls) == {}, calls


@alone
def test_top_calls_few_functions_for_each_link() -> None:
    shell = measured_shell()
    name = "%gpumem top, each link of a doubly linked list"
    warm_up(shell, TOP_COMMAND)
    bare = least_calls_in(shell, TOP_COMMAND, 2)
    shell.run_cell(LINKS)
    calls = {name: calls_of(name, shell, TOP_COMMAND, 2, without=bare, things=LINKED)}
    assert risen(calls) == {}, calls


@alone
def test_a_recovery_calls_few_functions_for_each_frame() -> None:
    shell = measured_shell()
    name = "a recovery, each frame"
    warm_up(shell, RECOVERY)
    few = least_calls_in(shell, DEEP.replace("NUMBER", str(FRAMES)))
    deeper = DEEP.replace("NUMBER", str(2 * FRAMES))
    calls = {name: calls_of(name, shell, deeper, without=few, things=FRAMES)}
    assert risen(calls) == {}, calls


@alone
def test_torch_adds_few_calls_to_cells() -> None:
    needs("torch")
    shell = measured_shell()
    for cell in ("1", EMPTY):
        least_calls_in(shell, cell, 20)
    shell.run_cell("import torch")
    leave_room(shell)
    calls = {
        "with torch, the first experiment": calls_in(shell, EMPTY),
        "with torch, an empty experiment": calls_of(
            "with torch, an empty experiment", shell, EMPTY, 20
        ),
        "with torch, a trivial cell": calls_of("with torch, a trivial cell", shell, "1"),
    }
    assert risen(calls) == {}, calls


@alone
def test_few_functions_are_called_for_each_tensor() -> None:
    needs("torch")
    shell = measured_shell()
    shell.run_cell("import torch")
    calls = dict[str, float]()
    for step, cell in TENSOR_STEPS.items():
        name = f"{step}, each tensor"
        shell.run_cell(TENSORS_KEPT.replace("NUMBER", str(FEW_ARRAYS)))
        few = least_calls_in(shell, cell, 2)
        shell.run_cell(TENSORS_KEPT.replace("NUMBER", str(FEW_ARRAYS + TENSORS)))
        calls[name] = calls_of(name, shell, cell, 2, without=few, things=TENSORS)
    assert risen(calls) == {}, calls


@pytest.mark.parametrize("place", ["in a list", "in objects"])
@alone
def test_few_functions_are_called_for_each_small_array(place: str) -> None:
    calls = calls_for_each_small_array(place)
    assert risen(calls) == {}, calls


# Marks of single cases would be data of this module, which the measured experiments read.
@pytest.mark.thorough
@pytest.mark.parametrize("place", ["as views", "in generators"])
@alone
def test_few_functions_are_called_for_each_array_elsewhere(place: str) -> None:
    calls = calls_for_each_small_array(place)
    assert risen(calls) == {}, calls


def calls_for_each_small_array(place: str) -> dict[str, float]:
    """Return the functions that an experiment and ``%gpumem leaks`` call for each array left in a
    place.
    """
    needs("numpy")
    shell = measured_shell()
    shell.run_cell("import numpy as np")
    gc.disable()  # a full collection in the experiment changes how new objects are known
    counts = list[int]()
    for number in (1_100, 1_100 + ARRAYS_MORE):
        shell.run_cell(f"keeper, number = {{}}, {number}")
        # With a name, what the experiment leaves does not depend on how the process has grown.
        left = textwrap.dedent(ARRAYS_LEFT[place])
        leaves = f"%%experiment leaves\n{left}\nkeeper['left'] = left"
        warm_up(shell, leaves)
        counts.append(calls_in(shell, leaves) + calls_in(shell, "%gpumem leaks"))
    return {f"small arrays {place}, each array": round((counts[1] - counts[0]) / ARRAYS_MORE, 3)}


@alone
def test_a_guarded_cell_calls_few_functions() -> None:
    shell = measured_shell()
    shell.run_line_magic("gpumem", "guard on")
    calls = {"a guarded cell": calls_of("a guarded cell", shell, "1")}
    assert risen(calls) == {}, calls


def test_the_line_names_the_modules_of_a_first_experiment(kernel: Kernel) -> None:
    """The cell of ``pass`` had taken 3.7 MiB."""
    first, again = (
        "\n".join(run_cells(kernel, experiment("seen = bytes(1 << 24)")).reports("cell"))
        for _ in range(2)
    )
    assert re.search(r"of it [234](\.\d)? MiB for %%experiment$", first, re.MULTILINE), first
    assert "of it" not in again


def test_the_line_names_modules_imported_by_our_own_command(kernel: Kernel) -> None:
    run_cells(kernel, "import torch")
    for command, what in (
        ("%%estimate\ntorch.ones(3)", "torch's fake tensors"),
        ("%gpumem plot\npass", "%gpumem plot"),  # a cell of our commands alone has no line
    ):
        first, again = ("\n".join(run_cells(kernel, command).reports("cell")) for _ in range(2))
        assert re.search(rf"of it \d\d(\.\d)? MiB for {what}$", first, re.MULTILINE)
        # a figure of its own may take a few
        assert not re.search(r"of it \d\d(\.\d)? MiB", again), again

"""How many Python functions our work calls, and what it leaves in the process.

Calls can be counted exactly, while times are noise.
"""

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.allowance import Allowance
from ipygpumem.introspect import is_ours
from ipygpumem.shell import recovery
from tests.alone import alone
from tests.steps import works

MOST = {
    "a trivial cell": 230,
    "an empty experiment": 1605,
    "an empty experiment, each object": 0,
    "an empty experiment, each name": 0.018,
    "%gpumem status, each object": 0.024,
    "%gpumem status, each name": 0.03,
    "%gpumem leaks, each object": 0.018,
    "%gpumem leaks, each name": 0.024,
    "%gpumem top, each object": 0.077,
    "%gpumem top, each name": 0.2,
    "%gpumem top, each link of a doubly linked list": 9,
    "a look at what grows, each object": 0.062,
    "a look at what grows, each name": 0.2,
    "a recovery, each object": 0.002,
    "a recovery, each name": 0.019,
    "a recovery, each frame": 150,
    "with torch, the first experiment": 2600,
    "with torch, an empty experiment": 2240,
    "with torch, a trivial cell": 230,
    "a guarded cell": 328,
    "%gpumem tensors, each tensor": 1.1,
    "an experiment that leaves tensors, each tensor": 10.5,
}
"""Calls of our functions, and calls that these lead to. A commit that raises a number says why."""

MOST_FILES = {"a trivial cell": 29, "an empty experiment": 64}
"""Files of ours whose code runs, which a reader of such a cell must open. A commit that raises one
says why.
"""
SLACK = 1.1
"""Python's own functions call each other in another way in each version."""
MANY = 40_000
FEW, TENSORS = 100, 1_000
FRAMES = 50
DEEP = (
    "def deep(left):\n    rows = [left] * 2000\n    if not left: raise MemoryError\n    deep(left "
    "- 1)\ndeep(NUMBER)"
)
EMPTY, RECOVERY = "%%experiment empty\npass", "raise MemoryError"
LOOK = """
from ipygpumem.meter.meter import Meter
from ipygpumem.shell import holders, trends
holders.users_modules = dict  # the tests' own
made = lambda: {name: value for name, value in globals().items() if name.startswith(("name_", "objects"))}
holders.look(trends.Growing(), made, "run", dict, bool, Meter([]))
"""  # noqa: E501
OBJECTS = f"objects = [kind() for kind in (list, dict, set, Exception) for _ in range({MANY // 4})]"
NAMES = f"""
{OBJECTS}
globals().update((f"name_{{number}}", found) for number, found in enumerate(objects))
del objects
"""
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

first = linked({MANY})
"""
LEAVES = (
    "%%experiment leaves\nleft = [torch.zeros(1) for _ in range(number)]\nkeeper['left'] = left"
)


def calls_in(shell: InteractiveShell, cell: str) -> int:
    """Return how many Python functions we call in a cell, directly or not."""
    calls = depth = 0
    ours = dict[CodeType, bool]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, depth
        code = frame.f_code
        if event == "call" and (depth or ours.setdefault(code, is_ours(code.co_filename))):
            depth += 1
            # Python 3.12 makes no frames for comprehensions
            calls += not code.co_name.endswith("comp>")
        elif event == "return" and depth:
            depth -= 1

    run_profiled(shell, cell, profile)
    return calls


def files_in(shell: InteractiveShell, cell: str) -> int:
    """Return the number of our files whose code runs in a cell."""
    files = set[str]()
    run_profiled(shell, cell, lambda frame, event, argument: files.add(frame.f_code.co_filename))
    return sum(map(is_ours, files))


def run_profiled(
    shell: InteractiveShell, cell: str, profile: Callable[[FrameType, str, object], object]
) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(profile)
        try:
            result = shell.run_cell(cell)
        finally:
            sys.setprofile(None)
    assert result.success or isinstance(result.error_in_exec, MemoryError)  # of a recovery


def least_calls_in(shell: InteractiveShell, cell: str, runs: int = 3) -> int:
    """Return the same of several runs: we do more after a cell that was slow, or in which the
    process grew.
    """
    return min(calls_in(shell, cell) for _ in range(runs))


LATE = {"difflib", "psutil", "ipygpumem.inventory", "numpy"}
"""Modules that are loaded when they are needed: psutil takes as long as a third of ours."""


@alone
def test_loading_the_extension_loads_few_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in LATE]:
        del sys.modules[name]  # the tests' own
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    assert LATE.isdisjoint(sys.modules)


@alone
def test_a_cell_without_peak_loads_nothing_of_it() -> None:
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    for cell in ("1", EMPTY, "%gpumem status"):
        files_in(shell, cell)
    assert [
        name for name in sys.modules if name.startswith(("ipygpumem.extras.peak", "memray"))
    ] == []


@alone
def test_no_work_calls_more_functions_than_before() -> None:
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    unlimited = functools.partial(Allowance, 1000)  # no call depends on how fast the machine is
    recovery.Allowance = unlimited  # type: ignore[misc, assignment]  # in a process of its own
    steps = {"an empty experiment": EMPTY, "a recovery": RECOVERY, "a look at what grows": LOOK}
    steps |= {f"%gpumem {command}": f"%gpumem {command}" for command in ("status", "leaks", "top")}
    for step in steps.values():
        calls_in(shell, step)
    bare = {name: least_calls_in(shell, step) for name, step in steps.items()}
    found: dict[str, float] = {"a trivial cell": least_calls_in(shell, "1")}
    found["an empty experiment"] = bare["an empty experiment"] = least_calls_in(shell, EMPTY, 20)
    for name, step in (("a trivial cell", "1"), ("an empty experiment", EMPTY)):
        assert files_in(shell, step) <= MOST_FILES[name], (name, files_in(shell, step))
    for thing, made in {"object": OBJECTS, "name": NAMES}.items():
        shell.run_cell(made)
        for name, step in steps.items():
            found[f"{name}, each {thing}"] = round(
                (least_calls_in(shell, step) - bare[name]) / MANY, 3
            )
    shell.run_cell("%reset -f")
    shell.run_cell(LINKS)
    more = least_calls_in(shell, steps["%gpumem top"]) - bare["%gpumem top"]
    found["%gpumem top, each link of a doubly linked list"] = round(more / MANY, 3)
    shell.run_cell("%reset -f")
    several, many = (
        least_calls_in(shell, DEEP.replace("NUMBER", str(number)))
        for number in (FRAMES, 2 * FRAMES)
    )
    found["a recovery, each frame"] = (many - several) / FRAMES
    shell.run_cell("import torch")
    found["with torch, the first experiment"] = calls_in(shell, EMPTY)
    found["with torch, an empty experiment"] = least_calls_in(shell, EMPTY, 20)
    found["with torch, a trivial cell"] = least_calls_in(shell, "1")
    for name, step in (
        ("%gpumem tensors", "%gpumem tensors"),
        ("an experiment that leaves tensors", LEAVES),
    ):
        counts = list[int]()
        for number in (FEW, FEW + TENSORS):
            shell.run_cell(
                f"keeper, number = {{}}, {number}\nkept = [torch.zeros(1) for _ in range(number)]"
            )
            counts.append(least_calls_in(shell, step))
        found[f"{name}, each tensor"] = round((counts[1] - counts[0]) / TENSORS, 3)
    shell.run_line_magic("gpumem", "guard on")
    found["a guarded cell"] = least_calls_in(shell, "1")
    risen = {name: calls for name, calls in found.items() if calls > MOST[name] * SLACK}
    assert risen == {}, found


def test_the_line_names_what_our_own_command_has_imported(kernel: Kernel) -> None:
    works(kernel, "import torch")
    for command, what in (
        ("%%estimate\ntorch.ones(3)", "torch's fake tensors"),
        ("%gpumem plot", "%gpumem plot"),
    ):
        first, again = ("\n".join(works(kernel, command).reports("cell")) for _ in range(2))
        assert re.search(rf"of it \d\d(\.\d)? MiB for {what}$", first, re.MULTILINE)
        # a figure of its own may take a few
        assert not re.search(r"of it \d\d(\.\d)? MiB", again), again

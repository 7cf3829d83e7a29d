"""Steps that most tests take with a kernel."""

import inspect
import queue
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel, Reply, plain
from ipygpumem.units import parse_bytes
from tests.waiting import announce

ANNOUNCE = "import time\n" + inspect.getsource(announce)
"""A cell that defines it: kernels of other versions do not see this folder."""

HIDE_LIBRARIES = """
def hide_libraries():
    import ctypes, gc
    gc.freeze()
    for space in (globals(), Out, get_ipython().user_ns_hidden):  # makes these visible again
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(space))
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(space))

hide_libraries()
del hide_libraries
"""
"""A cell that hides the objects of libraries from looks at the heap and from garbage collections,
which pass over them for most of a test's time.

For kernels in which the user's own objects matter: other tests of each kind see everything.
"""
SHOW_LIBRARIES = "__import__('gc').unfreeze()"
"""The opposite cell, for a test in which an object of a library is a holder."""


class SharedKernel:
    """One kernel for all tests of a module, tidied before each; one that a test
    broke is replaced.
    """

    def __init__(self, *tidy: str, timeout: float, hides_libraries: bool = False) -> None:
        """``tidy`` are the cells before each test; the kernel is well where the last one succeeds
        in time. With ``hides_libraries``, each test sees neither what libraries have made nor what
        earlier tests have imported.
        """
        self._tidy = tidy
        self._timeout = timeout
        self._hides_libraries = hides_libraries
        self._kernel: Kernel | None = None

    def get(self) -> Kernel:
        """Return the kernel, tidied, or a new one with the extension loaded."""
        if self._kernel is not None and not self._is_well(self._kernel):
            self.close()
        if self._kernel is None:
            self._kernel = Kernel()
            assert self._kernel.run("%load_ext ipygpumem").status == "ok"
            assert self._is_well(self._kernel)
        if self._hides_libraries:
            run_cells(self._kernel, HIDE_LIBRARIES)
        return self._kernel

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _is_well(self, kernel: Kernel) -> bool:
        try:
            replies = [kernel.run(cell, timeout=self._timeout) for cell in self._tidy]
        except (TimeoutError, queue.Empty, RuntimeError):  # the last one: it died
            return False
        return replies[-1].status == "ok"


def kernel_with(*cells: str) -> Any:
    """Return a fixture: one kernel for all tests of a module, in which these cells have run."""

    @pytest.fixture(scope="module")
    def fixture() -> Iterator[Kernel]:
        with Kernel() as kernel:
            for cell in cells:
                run_cells(kernel, cell)
            yield kernel

    return fixture


def tidied_kernel(
    *tidy: str, timeout: float = 60, hides_libraries: bool = False
) -> tuple[Any, Any]:
    """Return two fixtures, ``shared_kernel`` of a module and ``notebook``: its kernel after these
    cells.
    """

    @pytest.fixture(scope="module")
    def shared_kernel() -> Iterator[SharedKernel]:
        shared = SharedKernel(*tidy, timeout=timeout, hides_libraries=hides_libraries)
        yield shared
        shared.close()

    @pytest.fixture
    def notebook(shared_kernel: SharedKernel) -> Kernel:
        return shared_kernel.get()

    return shared_kernel, notebook


def pairs(longer: Iterable[Any], shorter: Sequence[Any]) -> list[Any]:
    """Return all pairs as cases of a test; `make test` runs each item of ``longer`` with one of
    ``shorter`` in turn, and `make thorough` the other pairs.
    """
    cases = []
    for number, first in enumerate(longer):
        for place, second in enumerate(shorter):
            is_daily = place == number % len(shorter)
            marks = () if is_daily else pytest.mark.thorough
            cases.append(pytest.param(first, second, marks=marks))
    return cases


def needs(library: str) -> None:
    """Skip a test whose kernel imports a library that is not installed.

    ``pytest.importorskip`` would import it into the tests' own process, too.
    """
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def run(kernel: Kernel, code: str, **options: Any) -> Reply:
    """Run a cell in which nothing of ours may fail; after an error, wait until the kernel takes
    cells again.

    ipykernel refuses what reaches it right after an error, as if it had been queued before: that is
    how an error stops "Run all", and a test is quick enough to meet it.
    """
    reply = kernel.run(code, **options)
    while reply.status == "error" and kernel.run("", silent=True).status == "aborted":
        pass
    for noise in ("is not affected", "Error in callback"):
        assert noise not in reply.stderr + reply.stdout + reply.traceback, (
            code,
            reply.stderr,
            reply.traceback,
        )
    return reply


def run_cells(kernel: Kernel, *cells: str, **options: Any) -> Reply:
    """Run cells that must succeed, in which nothing of ours may fail; return what the last one
    gave.
    """
    for cell in cells:
        reply = run(kernel, cell, **options)
        assert reply.status == "ok", (cell, reply.message, reply.stderr, plain(reply.traceback))
    return reply


def run_quietly(kernel: Kernel, *cells: str, **options: Any) -> Reply:
    """Run cells that must succeed without a warning of the extension; return what the last one
    gave.
    """
    for cell in cells:
        reply = run_cells(kernel, cell, **options)
        assert "ipygpumem:" not in reply.stderr, f"{cell}\n{reply.stderr}"
    return reply


def run_failing(kernel: Kernel, cell: str, error: str | None = "", **options: Any) -> Reply:
    """Run a cell that must end with ``error`` (None: IPython's one-line UsageError; "": any);
    return what it gave.
    """
    reply = run(kernel, cell, **options)
    assert reply.status == "error" or reply.error is not None, cell
    assert error in ("", reply.error), f"{cell}\n{plain(reply.traceback) or reply.stderr}"
    assert "ipygpumem:" not in reply.stderr, reply.stderr
    return reply


def recovery_report(kernel: Kernel, code: str, **options: Any) -> str:
    """Run a cell that runs out of memory, and return its one report."""
    (text,) = run_failing(kernel, code, **options).reports("recovery")
    return text


def assert_goes_on(kernel: Kernel) -> None:
    """The kernel's next cell runs, shows its result and its one line."""
    reply = run_cells(kernel, "6 * 7")
    assert reply.result == "42"
    assert len(reply.reports("cell")) == 1


def user_names(kernel: Kernel) -> list[str]:
    """The user's names, as %who_ls gives them."""
    listed: list[str] = kernel.value("get_ipython().run_line_magic('who_ls', '')")
    return listed


def dedented(text: str) -> str:
    """Return a block of code without its indentation, with one line break at its end."""
    return textwrap.dedent(text).strip() + "\n"


def experiment(*blocks: str, name: str = "e", options: str = "") -> str:
    """Return a cell that runs blocks of code, one after the other, in an experiment."""
    first_line = f"%%experiment {name} {options}".rstrip()
    return first_line + "\n" + "".join(map(dedented, blocks))


def existing_names(kernel: Kernel, *names: str) -> list[str]:
    """Return the items of ``names`` that are names of the notebook."""
    existing: list[str] = kernel.value(f"[name for name in {list(names)} if name in globals()]")
    return existing


def open_experiments(kernel: Kernel) -> list[str]:
    """Return the names of the experiments that ``%experiment status`` shows."""
    (text,) = run_quietly(kernel, "%experiment status").reports("note")
    return re.findall(r"^experiment (.*?) ·", text, re.MULTILINE)


def host_table(kernel: Kernel) -> tuple[str, dict[str, int]]:
    """Return the title of the host's table in ``%gpumem status``, and its rows in bytes."""
    (text,) = run_quietly(kernel, "%gpumem status").reports("status")
    title = re.search(r"^  (RAM: .+)$", text, re.MULTILINE)
    assert title is not None, text
    table = re.split(
        r"\n  (?:no experiment is open|experiment |child processes, by |your other Jupyter "
        r"kernels, by )",
        text[title.end() :],
    )[0]
    rows = re.findall(r"^ +([\d.]+ (?:[KMGTP]i)?B)  +(\S.*?)  +\S", table, re.MULTILINE)
    return title[1], {name: parse_bytes(size) for size, name in rows}


OWN_PARTS = (
    "this process",
    "arrays:",
    "Python objects",
    "data of ",
    "stacks",
    "free heap pages",
    "free blocks of Python",
    "not named",
    "printed by cells",
)
"""First words of the parts of a process's own pages."""


def mib_after(line: str, label: str) -> float:
    """Return the MiB that a report gives after ``label``."""
    match = re.search(
        rf"{re.escape(label)} ([+-]?[\d.]+)(?: (B|KiB|MiB|GiB))?",
        line.replace("\N{MINUS SIGN}", "-"),
    )
    assert match, (label, line)
    return (
        float(match[1])
        * {None: 2**-20, "B": 2**-20, "KiB": 2**-10, "MiB": 1, "GiB": 2**10}[match[2]]
    )

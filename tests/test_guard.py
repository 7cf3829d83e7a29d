"""The memory guard: its figures, and real kernels that run out of memory and go on."""

import ctypes
import functools
import os
import pkgutil
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Kernel
from ipygpumem.extras import guard as guard_package
from ipygpumem.extras.guard.guard import MemoryGuard
from ipygpumem.extras.guard.interrupt import _runs_code
from ipygpumem.extras.guard.memory_left import MemoryFigures, MemoryLeft
from ipygpumem.extras.guard.room_for_errors import shortened
from ipygpumem.heap.bulk import OBSERVERS
from ipygpumem.probes.pages import PAGE_BYTES
from ipygpumem.shell.app import app_of
from ipygpumem.shell.cell import Cell, GuardAction
from tests.control_group import v1_system, v2_system
from tests.steps import (
    dedented,
    existing_names,
    plain,
    run,
    run_cells,
    run_failing,
    run_quietly,
    tidied_kernel,
)
from tests.waiting import wait_for

MIB = 2**20
GUARD_ON = "%gpumem guard on --limit 250MiB"
FILL_MEMORY = "rows = []\nwhile True:\n    rows.append('x' * 1000 + str(len(rows)))"
DICT = """\
class P:
    def __init__(self, x): self.x = x
d = {}
while True:
    d[len(d)] = P(f'{len(d):1000}')"""
ARRAYS = """\
import numpy
arrays = []
while True:
    arrays.append(numpy.ones(2**17))"""
ERRORS = ("MemoryError", "MemoryGuardError")
SOFT_LIMIT = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits a process's data"
)
shared_kernel, notebook = tidied_kernel(
    "%gpumem guard off",
    "%reset -f",
    "import os, sys, resource, threading, time, numpy",
    hides_libraries=True,
)


@pytest.fixture(autouse=True)
def _without_polars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide polars, which another test of this process may have loaded: it takes away the limit."""
    monkeypatch.delitem(sys.modules, "polars", raising=False)


def write_memory(root: Path, *, available: int, swap: int = 0) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/statm").write_text("900 500 200 1 0 700 0\n")
    (root / "proc/meminfo").write_text(
        f"MemFree: 1 kB\nMemAvailable:  {available // 1024} kB\nSwapFree: {swap} kB\n"
    )


def test_the_tightest_of_the_groups_and_the_machine_counts(tmp_path: Path) -> None:
    # Version 1 of control groups, without a limit: the machine counts.
    system = v1_system(tmp_path / "1", "/a/b")
    write_memory(system.root, available=800 * MIB, swap=1024)
    left = MemoryLeft(system.root)
    assert left.now() == (801 * MIB, 300 * PAGE_BYTES, 700 * PAGE_BYTES)
    left.close()

    # The inner group has a limit of 500 MiB, the outer one of 400 MiB, of which 50 are left.
    system.v1(
        "a/b",
        500 * MIB,
        300 * MIB,
        f"cache 5\ntotal_inactive_file {20 * MIB}\ntotal_active_file {MIB}\n",
    )
    system.v1("a", 400 * MIB, 350 * MIB)
    left = MemoryLeft(system.root)
    assert (left.name, left.now().available_bytes) == (
        "the control group's 400 MiB",
        50 * MIB,
    )

    # The inner group has 200 MiB left, and 21 of its file cache.
    system.v1("a", 600 * MIB, 300 * MIB)
    assert left.now().available_bytes == 221 * MIB
    left.close()

    # Version 2: 100 MiB are left, and 11 that the kernel can reclaim.
    system = v2_system(tmp_path / "2", "/a")
    write_memory(system.root, available=800 * MIB)
    system.v2("a", 300 * MIB, 200 * MIB, f"inactive_file {10 * MIB}\nslab_reclaimable {MIB}\n")
    left = MemoryLeft(system.root)
    assert left.now().available_bytes == 111 * MIB
    left.close()


def test_a_group_whose_limit_is_lifted_hides_no_outer_group(tmp_path: Path) -> None:
    system = v2_system(tmp_path, "/a/b")
    write_memory(system.root, available=800 * MIB)
    system.v2("a", 400 * MIB, 350 * MIB, "")
    system.v2("a/b", 300 * MIB, 100 * MIB, "")
    left = MemoryLeft(system.root)
    assert left.now().available_bytes == 50 * MIB
    system.v2("a/b", "max", 100 * MIB, "")
    assert left.now().available_bytes == 50 * MIB
    left.close()


def test_without_linux_psutil_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = MemoryLeft(tmp_path)
    assert left.now().data_bytes is None
    assert left.total_bytes == psutil.virtual_memory().total


def test_the_guard_says_if_the_memory_left_is_unknown(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    with pytest.raises(UsageError, match="the memory left cannot be read here: "):
        loaded.run_line_magic("gpumem", "guard on")


@pytest.mark.parametrize(
    ("cell", "options", "times"),
    [(FILL_MEMORY, "", 2), (DICT, "", 1), (ARRAYS, "", 1), (FILL_MEMORY, " --touched", 1)],
)
def test_each_cell_above_the_limit_ends_in_an_error(
    cell: str, options: str, times: int, notebook: Kernel
) -> None:
    run_cells(notebook, GUARD_ON + options, "other = [1, 2]")
    name = cell[cell.rindex("    ") :].strip().partition("[")[0].partition(".")[0]
    for _ in range(times):
        reply = run_failing(notebook, cell)
        assert reply.error in ERRORS
        assert plain(reply.traceback).rstrip().splitlines()[-1].startswith(reply.error)
        assert "in CellInterrupt" not in plain(reply.traceback)
        (report,) = reply.reports("guard")
        assert "the next cell can use" in report
        assert f"del {name}" in report
        assert notebook.value(SOFT_LIMIT) == -1
        run_cells(
            notebook,
            f"assert len({name}) and other == [1, 2] and len(bytearray(2**20))",
            f"del {name}",
        )


def test_in_a_control_group_the_kernel_survives() -> None:
    with limited_group(300 * MIB) as group, Kernel() as kernel:
        move(int(kernel.value("__import__('os').getpid()")), group)
        run_cells(
            kernel, "%load_ext ipygpumem", f"{GUARD_ON}\nrows = bytearray(b'1') * (150 * 2**20)"
        )
        # OpenBLAS allocates more than is left, and uses little of it.
        run_cells(kernel, "import numpy")
        for _ in range(3):
            run_failing(
                kernel,
                """
                more = [] if 'more' not in globals() else more
                while True: more.append(b'1' * 2**18)
                """,
            )
        # OpenBLAS needs a buffer of 32 MiB
        run_cells(kernel, "square = numpy.ones((200, 200)); square.dot(square)")
        run_cells(kernel, "del rows, more", "%gpumem guard on")
        reply = run_failing(kernel, FILL_MEMORY)
        assert reply.error in ERRORS
        assert "of the control group's 300 MiB were left" in reply.reports("guard")[0]
        run_cells(kernel, "del rows", "big = bytearray(b'1') * (64 * 2**20)")


def test_a_refused_request_names_the_way_without_the_guard(notebook: Kernel) -> None:
    untouched = "import numpy\nlarge = numpy.zeros(2**29)"
    run_cells(notebook, GUARD_ON)
    (report,) = run_failing(notebook, untouched, "MemoryError").reports("guard")
    assert "the memory guard refused 4.00 GiB: " in report
    assert "%gpumem guard on --touched" in report
    assert run_failing(notebook, "1 / 0").reports("guard") == []
    run_cells(notebook, f"{GUARD_ON} --touched", untouched, "%gpumem guard off", untouched)


@pytest.mark.parametrize(
    "cell",
    [
        "import mmap\nprivate = mmap.mmap(-1, 2**32, flags=mmap.MAP_PRIVATE)",
    ],
)
def test_other_errors_of_a_refused_request_are_explained_too(cell: str, notebook: Kernel) -> None:
    run_cells(notebook, GUARD_ON)
    (report,) = run_failing(notebook, cell).reports("guard")
    assert re.search("the memory guard (perhaps )?refused a request: ", report)
    assert "%gpumem guard on --touched" in report
    run_cells(notebook, f"{GUARD_ON} --touched", cell)


@pytest.mark.parametrize("options", ["", " --touched"])
def test_code_that_handles_the_error_goes_on(options: str, notebook: Kernel) -> None:
    run_cells(notebook, GUARD_ON + options)
    reply = run_cells(
        notebook,
        """
        sizes = []
        for _ in range(2):
            rows = []
            try:
                for _ in range(1000): rows.append(bytearray(b'1') * 2**20)
            except MemoryError: sizes.append(len(rows))
        assert len(sizes) == 2
        """,
    )
    assert reply.reports("guard") == []


def test_an_error_in_an_inner_cell_ends_no_guard(notebook: Kernel) -> None:
    run_cells(notebook, GUARD_ON)
    inner = f"get_ipython().run_cell({FILL_MEMORY!r})"
    reply = run_cells(notebook, f"{inner}\ndel rows\nlimit = {SOFT_LIMIT}")
    assert len(reply.reports("guard")) == 1
    assert run_failing(notebook, f"{inner}\ndel rows\n{FILL_MEMORY}").error in ERRORS


STARTED = (
    f"{sys.executable!r}, '-c', 'import resource; "
    f"print(resource.getrlimit(resource.RLIMIT_DATA)[0])'"
)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(f"subprocess.run([{STARTED}])", id="run"),
        pytest.param(
            f"subprocess.run([{STARTED}], close_fds=False)", id="run with open descriptors"
        ),
        pytest.param(f"os.system(shlex.join([{STARTED}]))", id="os.system"),
        pytest.param(
            f"with multiprocessing.get_context('spawn').Pool(1) as pool: pool.map(os.system, "
            f"[shlex.join([{STARTED}])])",
            id="a spawned pool",
        ),
        pytest.param(
            f"os.waitpid(os.posix_spawn(sys.executable, [{STARTED}], os.environ), 0)",
            id="posix_spawn",
        ),
        pytest.param(
            """\
if (child := os.fork()) == 0:
    os.write(1, str(soft()).encode())
    os._exit(0)
os.waitpid(child, 0)""",
            id="fork",
        ),
        pytest.param(
            "with multiprocessing.get_context('fork').Pool(1) as pool: os.write(1, "
            "str(pool.apply(soft)).encode())",
            id="a forked pool",
        ),
    ],
)
def test_a_child_has_the_users_limit(start: str, notebook: Kernel, tmp_path: Path) -> None:
    run_cells(
        notebook,
        "import subprocess, shlex, multiprocessing; __spec__ = None",
        f"def soft(): return {SOFT_LIMIT}",
        GUARD_ON,
    )
    path = tmp_path / "out"
    redirect = f"""
        before = soft()
        saved = os.dup(1)
        file = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        """
    restore = """
        os.dup2(saved, 1)
        after = soft()
        """
    run_cells(notebook, "".join(map(dedented, (redirect, start, restore))))
    assert path.read_text().strip() == "-1"
    assert notebook.value("before > 0 and after > 0")


def test_cells_that_keep_memory_hardly_exceed_the_limit(loaded: InteractiveShell) -> None:
    """A cell may allocate half of what is left up to 32 MiB above the limit: at most 32 MiB, and at
    least 4. The process has 100 to 400 MiB of its own here.
    """
    loaded.run_line_magic("gpumem", "guard on --limit 250MiB")
    (guard,) = MemoryGuard._in_force
    rooms = [
        guard._memory.shares._least_room_bytes(MemoryFigures(8 << 30, size * MIB, 0)) // MIB
        for size in (100, 250, 266, 400)
    ]
    assert rooms == [32, 16, 8, 4]


def test_at_the_limit_threads_get_their_error_and_waits_end(notebook: Kernel) -> None:
    threads = """\
from concurrent.futures import ThreadPoolExecutor
parts = []
both = threading.Barrier(2)
def work():
    both.wait()
    while True: parts.append(bytearray(b'1') * 2**16)
with ThreadPoolExecutor(2) as pool: pool.submit(work); pool.submit(work).result()"""
    for options in "", " --touched":
        run_cells(notebook, GUARD_ON + options)
        assert run_failing(notebook, threads).error in ERRORS
        run_cells(notebook, "parts.clear()")
    touch = """\
data = numpy.zeros(400 * 2**20, 'u1')
def work():
    for at in range(0, len(data), 2**12): data[at] = 1
"""
    reply = run_failing(
        notebook,
        f"{touch}thread = threading.Thread(target=work); thread.start(); threading.Event().wait()",
    )
    assert reply.error == "MemoryGuardError"
    run_cells(notebook, "%gpumem guard off", "thread.join(); del data")


def test_the_guard_reports_its_own_refusals_and_no_other_errors(notebook: Kernel) -> None:
    run_cells(notebook, "import numpy", GUARD_ON)
    reply = run_failing(notebook, "found = [numpy.ones(2**21) for _ in range(60)]")
    assert re.search("the memory guard (refused 16 MiB|stopped the cell)", "".join(reply.reports()))
    assert "memory guard" not in "".join(
        run_failing(notebook, "raise MemoryError('mine')").reports()
    )
    reply = run_failing(notebook, "raise MemoryError('Unable to allocate 9.00 GiB')")
    assert "the memory guard perhaps refused 9.00 GiB" in reply.reports("guard")[0]


def test_with_polars_no_allocation_is_refused(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "polars", types.ModuleType("polars"))
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    guard = app_of(loaded).session.observers[-1]
    assert isinstance(guard, MemoryGuard)
    assert "polars ends the process" in guard.state
    before = resource.getrlimit(resource.RLIMIT_DATA)
    loaded.run_cell("import resource; inside = resource.getrlimit(resource.RLIMIT_DATA)")
    assert loaded.user_ns["inside"] == before


def test_each_guard_installs_its_signal_and_the_last_restores_it(loaded: InteractiveShell) -> None:
    """Our commands put a listener in front of the handler while they run."""
    for _ in range(2):
        loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
        (guard,) = MemoryGuard._in_force
        assert signal.getsignal(signal.SIGURG) == guard._watch.interrupt._raise
    loaded.run_line_magic("gpumem", "guard off")
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_the_guards_thread_works_without_free_memory(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    (guard,) = MemoryGuard._in_force
    now = guard._memory.left.now

    def refused_unless_raised() -> MemoryFigures:
        if not guard._memory.limit._raised.calls:
            raise MemoryError
        looks.append(1)
        return now()

    looks = list[int]()
    monkeypatch.setattr(guard._memory.left, "now", refused_unless_raised)
    pause = guard._watch._tick()
    assert pause is None or pause > 0
    assert looks
    assert guard._memory.limit._raised.calls == 0


def test_the_thread_goes_on_looking_after_an_error(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    guard = app_of(loaded).session.observers[-1]
    assert isinstance(guard, MemoryGuard)
    guard._memory.limit.begin_error()
    pause = guard._watch._tick()
    assert pause is not None
    # Seconds: after an error it looks again soon.
    assert pause < 0.1
    guard._memory.limit.end_error()
    guard._watch.interrupt.is_pending = True
    guard._watch.interrupt._raise(0, sys._getframe())  # memory has been freed meanwhile


def test_no_second_error_is_raised_while_one_is_shown(loaded: InteractiveShell) -> None:
    """The thread may check just before an error: IPython would show its own failure instead."""
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    (guard,) = MemoryGuard._in_force
    app_of(loaded).context.meter.worker.remove(guard._watch._tick)
    cell = Cell(None, is_nested=False, thread=0)
    guard._watch.begin_cell(cell)
    guard._memory.limit.begin_error()
    guard._watch._strike(cell, 0)
    assert not guard._watch.interrupt.is_pending
    guard._memory.limit.end_error()
    guard._watch._strike(cell, 0)
    assert guard._watch.interrupt.is_pending


def test_an_error_takes_back_the_interrupt_before_it(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell may run in a thread that gets no signals; its interrupt is raised later."""
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    (guard,) = MemoryGuard._in_force
    app_of(loaded).context.meter.worker.remove(guard._watch._tick)
    thread = threading.get_ident()
    raised = list[tuple[int | None, object]]()
    monkeypatch.setattr(
        ctypes.pythonapi,
        "PyThreadState_SetAsyncExc",
        lambda thread, error: raised.append((thread.value, error)),
    )
    guard._watch.begin_cell(Cell(None, is_nested=False, thread=thread))
    guard._watch.interrupt.is_pending = True
    guard._errors._make_room()
    assert raised == [(thread, None)]
    assert not guard._watch.interrupt.is_pending


def test_no_error_is_raised_inside_the_guard() -> None:
    """It would leave a limit half changed, or take the room that is made for another error."""
    modules = sorted(info.name for info in pkgutil.iter_modules(guard_package.__path__))
    assert {"allocation_limit", "room_for_errors"} <= set(modules)
    for name in modules:
        space = {"look": _runs_code_here, "__name__": f"{guard_package.__name__}.{name}"}
        exec("def lower(): return look()", space)
        cell = {"lower": space["lower"], "__name__": "__main__"}
        exec("def run_code(): return lower()", cell)
        assert not cell["run_code"](), name  # type: ignore[operator]


def _runs_code_here() -> bool:
    return _runs_code(sys._getframe(1))


def test_no_error_is_raised_while_an_isolated_cell_is_awaited() -> None:
    """It would lose a message of the child process, for which both would wait forever."""
    for module, runs in {"__main__": True, "ipygpumem.extras.isolate.packets": False}.items():
        space = {"look": _runs_code_here, "__name__": module}
        exec("def receive(): return look()\ndef run_code(): return receive()", space)
        assert space["run_code"]() == runs  # type: ignore[operator]


def test_a_cell_that_begins_during_a_look_is_watched(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded.run_line_magic("gpumem", "guard on --touched --limit 64MiB")
    (guard,) = MemoryGuard._in_force
    app_of(loaded).context.meter.worker.remove(guard._watch._tick)
    monkeypatch.setattr(guard._watch, "_strike", lambda cell, left: None)
    figures = guard._memory.left.now()

    def look() -> MemoryFigures:
        guard._watch.cell = Cell(None, is_nested=False, thread=0)
        return figures

    monkeypatch.setattr(guard._memory.left, "now", look)
    assert guard._watch._tick() is not None


def test_a_reading_that_was_due_at_off_reads_no_closed_file(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The reading is due.
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    (guard,) = MemoryGuard._in_force
    app_of(loaded).context.meter.worker.remove(guard._watch._tick)
    figures = guard._memory.left.now()
    was_locked = []

    def note_lock() -> MemoryFigures:
        was_locked.append(guard._watch.lock.locked())
        return figures

    monkeypatch.setattr(guard._memory.left, "now", note_lock)
    guard._watch._tick()
    assert was_locked == [True], "off waits until the files have been read"

    # It comes after `off`.
    monkeypatch.undo()
    loaded.run_line_magic("gpumem", "guard off")
    assert guard._watch._tick() is None
    guard._watch._strike(Cell(None, is_nested=False, thread=threading.get_ident()), 0)
    assert not guard._watch.interrupt.is_pending
    assert "failed" not in capsys.readouterr().err


def test_an_interrupt_waits_until_the_guard_is_on_or_off(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, place in {"guard on": "_switch_on", "guard off": "_code_ended"}.items():
        with monkeypatch.context() as patch:
            step = getattr(MemoryGuard, place)

            def interrupted(self: MemoryGuard, step: Any = step) -> Any:
                signal.raise_signal(signal.SIGINT)
                return step(self)

            patch.setattr(MemoryGuard, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                loaded.run_line_magic("gpumem", line)
        on = [guard for guard in app_of(loaded).session.observers if isinstance(guard, MemoryGuard)]
        assert list(MemoryGuard._in_force) == on
        assert len(on) == (line == "guard on")


def test_ipython_stores_a_cells_source_without_the_limit(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts its history thread again after a fork: the stack may be larger than what is left
    for the cell.
    """
    limits = []
    before = resource.getrlimit(resource.RLIMIT_DATA)
    loaded.user_ns["look"] = look = lambda *_: limits.append(
        resource.getrlimit(resource.RLIMIT_DATA)
    )
    monkeypatch.setattr(loaded.history_manager, "store_inputs", look)
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    loaded.run_cell("look()", store_history=True)
    stored, inside = limits
    assert stored == before != inside


def test_the_search_for_names_stops_before_memory_runs_out(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linked list takes more to measure than what is left, from free heap that counts as used for
    the limit.
    """
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    (guard,) = MemoryGuard._in_force
    app_of(loaded).context.meter.worker.remove(guard._watch._tick)
    figures, loaded.user_ns["rows"] = guard._memory.left.now(), [[]]
    for sizes, has_names in (([64, 60], True), ([64, 20], False)):
        later = iter(
            figures._replace(available_bytes=size * MIB) for size in (*sizes, *[60] * 1000)
        )
        monkeypatch.setattr(guard._memory.left, "now", functools.partial(next, later))
        guard._memory.shares.interrupt_left_bytes = 60 * MIB
        guard._causes.note(GuardAction("refused 1 MiB"))
        (report,) = guard.cell_ended(Cell(None, is_nested=False, thread=0))
        assert ("Too little memory is left to measure the names" in str(report)) != has_names


def test_long_tracebacks_are_shortened_while_they_are_shown() -> None:
    """IPython takes several MiB for a thousand frames, and each frame keeps its locals until the
    recovery.
    """

    def deep(left: int) -> int:
        return deep(left - 1) if left else 1 // left

    def lines(error: BaseException) -> list[int]:
        return [line for _, line in traceback.walk_tb(error.__traceback__)]

    with pytest.raises(ZeroDivisionError) as caught:
        deep(200)
    before = lines(caught.value)
    with shortened(caught.value):
        assert lines(caught.value) == before[:25] + before[-25:]
    assert lines(caught.value) == before


def test_a_cell_that_awaits_does_not_end_the_kernel(notebook: Kernel) -> None:
    run_cells(notebook, f"{GUARD_ON} --touched", "import asyncio")
    thread = "parts = []\ndef work(): parts.extend(bytearray(b'1') * 2**20 for _ in range(300))\n"
    start = (
        "thread = threading.Thread(target=work); thread.start()\nwhile thread.is_alive(): await "
        "asyncio.sleep(0.01)"
    )
    run(notebook, thread + start)
    run_cells(notebook, "thread.join(); parts.clear()")


def test_a_limit_of_the_user_is_kept(notebook: Kernel) -> None:
    own = "resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, -1))"
    none = "resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))"

    # A limit that was set after the guard's is in force until the user lifts it.
    run_cells(notebook, GUARD_ON, own, "1")
    assert notebook.value(SOFT_LIMIT) == 3 * 2**30
    (state,) = run_cells(notebook, "%gpumem guard").reports("note")
    assert "other code has set RLIMIT_DATA, which is kept" in state

    # So is one from before the guard.
    run_cells(notebook, "%gpumem guard off", "%gpumem guard on", "limit = " + SOFT_LIMIT)
    assert notebook.value("0 < limit <= 3 * 2**30")
    assert notebook.value(SOFT_LIMIT) == 3 * 2**30

    # A limit is set and lifted inside the same cells as the guard's.
    run_cells(notebook, none, GUARD_ON, own, none, f"limit = {SOFT_LIMIT}")
    assert notebook.value("limit > 0"), "the guard goes on"
    run_cells(notebook, "%gpumem guard off", own, GUARD_ON, none, f"limit = {SOFT_LIMIT}")
    assert notebook.value("limit > 0"), "a lifted limit is none of the user's"
    assert notebook.value(SOFT_LIMIT) == -1

    # Code saves the guard's limit, and restores it.
    run_cells(notebook, "saved = resource.getrlimit(resource.RLIMIT_DATA)")
    run_cells(notebook, "resource.setrlimit(resource.RLIMIT_DATA, saved)")
    assert notebook.value(SOFT_LIMIT) == -1, "ours, saved and restored by code, ends with the cell"
    run_cells(notebook, "%gpumem guard off")


@pytest.mark.parametrize(
    ("cell", "is_guarded"),
    [
        ("%gpumem free", False),
        ("# make room\n%gpumem free", False),
        ("gpumem free", False),
        ("%gpumem top\n%gpumem free", False),
        ("%gpumem free\ngc.collect()", True),
        ("gc.collect()", True),
        ("%gpumem why seen[gc.collect() * 0:]", True),
        ("%gpumem free\n%gpumem why gc.collect()", True),
    ],
)
def test_a_cell_without_code_of_the_user_has_no_limit(
    cell: str, is_guarded: bool, notebook: Kernel
) -> None:
    """A busy machine had stopped `%gpumem free` itself: malloc still had the pages of the lists
    that the command was to return, and the guard counted them.
    """
    cycle = f"""
class Freed:
    def __del__(self):
        seen.append({SOFT_LIMIT})
import gc, resource
gc.collect()
seen, freed = [], Freed()
freed.cycle = freed
"""
    run_cells(notebook, cycle, GUARD_ON, "gc.disable(); del freed")
    run_cells(notebook, cell, "gc.enable()")
    assert notebook.value("len(seen)") == 1
    assert notebook.value("seen[0] > 0") is is_guarded


def test_commands_look_at_memory_once_the_limit_is_reached(notebook: Kernel) -> None:
    run_cells(notebook, GUARD_ON)
    reply = run_failing(notebook, FILL_MEMORY)
    assert reply.error in ERRORS
    run_cells(notebook, "%gpumem leaks")
    status = "\n".join(run_quietly(notebook, "%gpumem status").reports())
    assert "cannot be read" not in status
    run_cells(notebook, "del rows", "%gpumem guard off")


def test_names_that_a_cell_deletes_are_watched_without_a_limit(notebook: Kernel) -> None:
    """A large dict leaves too little memory below the limit for a walk through it."""
    run_cells(
        notebook,
        f"""\
import ipygpumem.shell.searches.deleted_names
deleted, limits = ipygpumem.shell.searches.deleted_names.DeletedNames, []
watch = deleted.watch
deleted.watch = lambda self, source: (limits.append({SOFT_LIMIT}), watch(self, source))
some = 1""",
        GUARD_ON,
        "del some",
        "%gpumem guard off",
        "deleted.watch = watch",
    )
    assert set(notebook.value("limits")) == {-1}


def test_the_command_says_its_state_and_its_mistakes(notebook: Kernel) -> None:
    (state,) = run_quietly(notebook, "%gpumem guard").reports("note")
    assert state == "the guard is off: %gpumem guard on starts it"
    (state,) = run_quietly(notebook, f"{GUARD_ON}\nlimit = {SOFT_LIMIT}").reports("note")
    assert state.startswith("the guard is on: a cell can use ")
    assert (
        " of the limit of 250 MiB · allocations are limited (RLIMIT_DATA), and memory in use is "
        "watched" in state
    )
    assert notebook.value("limit > 0"), "the rest of the cell is guarded, too"
    for line, mistake in {
        "off --limit 1GiB": "off takes no limit",
        "off 1GiB": "off takes no limit",
        "on --limit 1MiB": "1 MiB is too little",
        "1MiB": "1 MiB is too little",
        "8": "'8' has no unit: write 8GiB",
        "1GiB --limit 2GiB": "two limits: 1.00 GiB and 2.00 GiB",
        "maybe": "invalid choice: 'maybe'; use on, off, or a size such as 8GiB",
    }.items():
        assert mistake in run_failing(notebook, f"%gpumem guard {line}", None).stderr
    assert existing_names(notebook, "limit") == ["limit"]


@pytest.mark.parametrize(
    "line", ["250MiB", "250 MiB", "on 250MiB", "--limit 250MiB", "--limit 250MiB on"]
)
def test_a_size_starts_the_guard_with_this_limit(notebook: Kernel, line: str) -> None:
    (state,) = run_quietly(notebook, f"%gpumem guard {line}").reports("note")
    assert state.startswith("the guard is on: a cell can use ")
    assert " of the limit of 250 MiB" in state


def test_an_option_alone_starts_the_guard(notebook: Kernel) -> None:
    (state,) = run_quietly(notebook, "%gpumem guard --touched").reports("note")
    assert state.startswith("the guard is on")
    assert "allocations are limited" not in state


def test_off_leaves_nothing_behind(loaded: InteractiveShell) -> None:
    import _imp
    import os
    import resource
    import signal
    import subprocess

    def state() -> tuple[object, ...]:
        names = ("custom_exceptions", "showtraceback")
        own = [vars(type(loaded)).get(name) for name in names] + [
            vars(loaded).get(name) for name in names
        ]
        functions = (subprocess._fork_exec, os.posix_spawn, os.system, _imp.create_dynamic)  # type: ignore[attr-defined]
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        return (*own, *functions, limit, signal.getsignal(signal.SIGURG), threading.active_count())

    # However the guard ends, nothing of it is left.
    before = state()
    for end in ("gpumem", "guard off"), ("unload_ext", "ipygpumem"):
        loaded.run_line_magic("gpumem", "guard on")
        loaded.run_cell("1")
        assert state() != before
        loaded.run_line_magic(*end)
        wait_for(lambda: state() == before)  # the thread ends


def test_a_terminal_without_zmq_is_guarded(tmp_path: Path) -> None:
    cells = f"""\
%load_ext ipygpumem
{GUARD_ON}
rows = []
while len(rows) < 2**20: rows.append("x" * 1000 + str(len(rows)))

print("error:", isinstance(_e if "_e" in globals() else sys.last_value, MemoryError))
rows.clear(); print("zmq" in sys.modules, len(bytearray(2**20)))
%gpumem guard off
%gpumem guard
"""
    options = ["--simple-prompt", "--colors=NoColor", "-i", "-c", "import sys"]
    finished = subprocess.run(
        [sys.executable, "-m", "IPython", *options],
        input=cells,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "the guard is on: a cell can use " in finished.stdout
    assert "error: True" in finished.stdout
    assert "False 1048576" in finished.stdout
    assert "the guard is off" in finished.stdout
    assert "ipygpumem: " not in finished.stdout + finished.stderr, "nothing of ours has failed"


def test_modules_loaded_after_the_guard_get_room_too(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "zmq", raising=False)
    loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    late = types.ModuleType("zmq")
    late.Socket = type("Socket", (), {"send": lambda self: None})  # type: ignore[attr-defined]
    send = late.Socket.send
    monkeypatch.setitem(sys.modules, "zmq", late)
    loaded.run_cell("1")
    assert late.Socket.send is not send
    loaded.run_line_magic("gpumem", "guard off")
    assert late.Socket.send is send


def test_a_guard_that_cannot_start_leaves_nothing_behind(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(interrupt: object) -> None:
        raise OSError("no such call")

    show = loaded.showtraceback
    observers = list(OBSERVERS)
    monkeypatch.setattr("ipygpumem.extras.guard.interrupt.CellInterrupt.listen", fail)
    with pytest.raises(UsageError, match="no such call"):
        loaded.run_line_magic("gpumem", "guard on --limit 8GiB")
    assert loaded.showtraceback == show
    assert observers == OBSERVERS
    assert not list(MemoryGuard._in_force)

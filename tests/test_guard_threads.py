"""Threads and native code at the memory guard's limit: libzmq ends the process if memory is refused
to it.
"""

import resource
import sys
import threading
from collections.abc import Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.extras.guard.allocation_limit import SMALL_BYTES, AllocationLimit
from ipygpumem.extras.guard.soft_limit import NO_LIMIT
from ipygpumem.units import MIB, TIB
from tests.steps import dedented, run_cells, run_failing, tidied_kernel
from tests.waiting import wait_for

GUARD_ON = "%gpumem guard on --limit 250MiB"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits a process's data"
)
PREPARE = """
import logging, signal, sys, threading, time, zmq
logging.basicConfig()
def filling():
    number = 0
    for frame in list(sys._current_frames().values()):
        while frame is not None:
            if frame.f_code.co_name == '_bootstrap':
                number += frame.f_locals['self'].name == 'filling'
            frame = frame.f_back
    return number
"""
shared_kernel, notebook = tidied_kernel(
    "%gpumem guard off", "%reset -f", PREPARE, hides_libraries=True
)

DEFINITIONS = """
parts, started = [], []
def fill():
    while True: parts.append(bytearray(b'1') * 2**16)
def fill_with_text():
    while True: parts.append('x' * 400 + str(len(parts)))
def fill_and_print():
    try: fill()
    except MemoryError: print('full')
def fill_and_log():
    try: fill()
    except MemoryError: logging.exception('full')
def fill_and_display():
    try: fill()
    except MemoryError: display({'full': 1})
def fill_again_and_again():
    for _ in range(20):
        try: fill()
        except MemoryError: print('full')
def start(work, count):
    for _ in range(count):
        thread = threading.Thread(target=work, name='filling')
        try: thread.start()
        except (RuntimeError, MemoryError): break  # nothing is left for its stack
        started.append(thread)
    for thread in started: thread.join()
"""


def run_threads(kernel: Kernel, work: str, count: int) -> None:
    """Run a cell whose threads fill the memory; of ours, only a hook without memory may fail.

    ``start`` of a thread that runs already may be the call that is refused, so that the cell does
    not wait for it. It may use up the memory that our hook after the cell needs.
    """
    reply = kernel.run(f"start({work}, {count})", timeout=60)
    while reply.status == "error" and kernel.run("", silent=True).status == "aborted":
        pass
    assert "Error in callback" not in reply.stderr + reply.stdout + reply.traceback
    for line in reply.stderr.splitlines():
        assert "is not affected" not in line or "failed (MemoryError: )" in line


def lives_on(kernel: Kernel) -> None:
    """Check that the kernel has kept its names and runs further cells and threads."""
    # The guard may have stopped the cell that starts its threads and waits for them, and they fill
    # memory again. ``is_alive`` is False of one whose ``join`` was interrupted (bpo-45274).
    wait_for(lambda: not kernel.value("filling()"))
    run_cells(kernel, "assert kept == [1, 2]", "parts.clear(); parts = []")
    reply = run_cells(
        kernel,
        "%gpumem free",
        "thread = threading.Thread(target=print, args=('alive',)); thread.start(); thread.join()",
    )
    assert reply.stdout == "alive\n"


WORKS = ("fill", "fill_with_text", "fill_and_print", "fill_and_log")
DAILY_WORKS = (("fill", 1), ("fill", 40), ("fill_and_print", 4), ("fill_and_log", 4))
"""Threads that ``make test`` runs. With 40 that log at once, one run of 46 on a busy machine ended
the kernel: libzmq's own thread, for which nothing raises the limit, was refused memory.
"""
THREADS = [
    (work, count)
    if (work, count) in DAILY_WORKS
    else pytest.param(work, count, marks=pytest.mark.thorough)
    for work in WORKS
    for count in (1, 4, 40)
]


@pytest.mark.parametrize(("work", "count"), THREADS)
def test_threads_that_run_out_of_memory_end_no_kernel(
    work: str, count: int, notebook: Kernel
) -> None:
    run_cells(notebook, DEFINITIONS, "kept = [1, 2]", GUARD_ON)
    run_threads(notebook, work, count)
    lives_on(notebook)


@pytest.mark.parametrize("work", ["fill_and_display", "fill_again_and_again"])
def test_threads_may_show_more_at_the_limit(work: str, notebook: Kernel) -> None:
    run_cells(notebook, DEFINITIONS, "kept = [1, 2]", GUARD_ON)
    run_threads(notebook, work, 4)
    lives_on(notebook)


def test_a_report_tells_why_a_thread_died(notebook: Kernel) -> None:
    run_cells(notebook, DEFINITIONS, GUARD_ON)
    work = """
def numbers():
    parts.append(bytes(2**30))
start(numbers, 1)
"""
    reply = run_cells(notebook, work)
    if "MemoryError" not in reply.stderr:  # nothing was left for the thread's stack
        reply = run_cells(notebook, "parts.clear()", "%gpumem free", work)
    assert "MemoryError" in reply.stderr
    (report,) = reply.reports("guard")
    assert "the memory guard perhaps refused a request" in report
    assert "%gpumem guard off" in report


def test_a_thread_may_die_without_memory_to_tell_why(notebook: Kernel) -> None:
    """Other threads may use up at once what it has freed."""
    without_memory = """
from ipygpumem.extras.guard.causes import Causes
explain = Causes.explain
def fail(self, error): raise MemoryError
Causes.explain = fail
def numbers():
    parts.append(bytes(2**30))
start(numbers, 1)
"""
    run_cells(notebook, DEFINITIONS, GUARD_ON)
    (report,) = run_cells(notebook, without_memory).reports("guard")
    assert "the memory guard perhaps refused a request of a thread" in report
    run_cells(notebook, "Causes.explain = explain")


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            """
            context = zmq.Context()
            sockets = [context.socket(zmq.PUSH) for _ in range(40)]
            """,
            id="new sockets",
        ),
        pytest.param(
            """
            for _ in range(900): push.send(b'1' * 100)
            for _ in range(900): pull.recv()
            """,
            id="messages",
        ),
        pytest.param(
            "for number in range(900): print(number, flush=number % 100 == 0)", id="prints"
        ),
    ],
)
def test_sockets_work_while_the_limit_is_reached(use: str, notebook: Kernel) -> None:
    prepare = """
        kept, parts, full = [1, 2], [], False
        pull = zmq.Context.instance().socket(zmq.PULL)
        pull.bind('inproc://test')
        push = zmq.Context.instance().socket(zmq.PUSH)
        push.connect('inproc://test')
        push.set_hwm(0)
        """
    run_cells(notebook, prepare, GUARD_ON)
    fill = """
        try:
            while True: parts.append(b'1' * 2**10 + b'')
        except MemoryError: full = True
        """
    run_cells(notebook, dedented(fill) + dedented(use))
    assert notebook.value("full")
    run_cells(notebook, "pull.close(); push.close()")
    lives_on(notebook)


def test_waiting_threads_are_no_false_alarm(notebook: Kernel) -> None:
    """Their stacks of 8 MiB are hardly used."""
    wait = """
event = threading.Event()
threads = [threading.Thread(target=event.wait) for _ in range(128)]
try:
    for thread in threads: thread.start()
finally: event.set()
for thread in threads: thread.join()
"""
    run_cells(notebook, GUARD_ON, wait)


def test_the_limit_stays_while_threads_of_the_cell_go_on(notebook: Kernel) -> None:
    soft = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"
    run_cells(
        notebook,
        GUARD_ON,
        """
        event = threading.Event()
        thread = threading.Thread(target=event.wait); thread.start()
        """,
    )
    assert notebook.value(soft) > 0
    run_cells(notebook, "event.set(); thread.join()")
    assert notebook.value(soft) == -1


def test_the_limit_stays_for_a_thread_whose_join_was_interrupted(notebook: Kernel) -> None:
    """Until Python 3.13 ``is_alive`` is False of such a thread; the guard's error does it, too."""
    interrupted = """
event = threading.Event()
thread = threading.Thread(target=event.wait); thread.start()
main = threading.main_thread().ident
threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
thread.join()
"""
    soft = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"
    run_cells(notebook, GUARD_ON)
    assert run_failing(notebook, interrupted).error == "KeyboardInterrupt"
    run_cells(notebook, "time.sleep(1)")  # the guard looks whether threads run
    assert notebook.value(soft) > 0
    run_cells(notebook, "event.set()")
    wait_for(lambda: notebook.value(soft) == -1)


def test_a_pools_workers_that_wait_keep_no_limit(notebook: Kernel) -> None:
    soft = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"
    # Without the workers of an earlier test, which were not started under this limit.
    run_cells(
        notebook,
        "import asyncio; from concurrent.futures import ThreadPoolExecutor",
        "asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())",
    )
    run_cells(notebook, GUARD_ON, "await asyncio.to_thread(len, ())")
    # A worker may still be on its way to its queue when the cell ends.
    wait_for(lambda: notebook.value(soft) == -1)
    run_cells(
        notebook,
        """
        event, started = threading.Event(), threading.Event()
        def wait():
            started.set()
            event.wait()
        """,
        """
        task = asyncio.ensure_future(asyncio.to_thread(wait))
        while not started.is_set():
            await asyncio.sleep(0.01)
        """,
    )
    assert notebook.value(soft) > 0, "this worker runs code of the cell"
    run_cells(notebook, "event.set(); await task")
    wait_for(lambda: notebook.value(soft) == -1)


@pytest.mark.parametrize("fill", ["parts.append", "[].append"])
def test_threads_that_fill_memory_leave_room_for_the_traceback(fill: str, notebook: Kernel) -> None:
    soft = "__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0]"
    definitions = f"""\
import asyncio
kept, parts = [1, 2], []
def fill(number):
    add = {fill}
    while True: add('x' * 1000 + str(number))
"""
    run_cells(notebook, definitions, GUARD_ON)
    reply = run_failing(
        notebook, "await asyncio.gather(*(asyncio.to_thread(fill, number) for number in range(6)))"
    )
    assert "Unexpected exception formatting exception" not in reply.stdout
    # The last one: no thread could be started any more, because the first ones were quicker.
    assert reply.error in ("MemoryError", "MemoryGuardError", "RuntimeError")
    wait_for(lambda: notebook.value(soft) == -1)  # until no worker fills memory any more
    # The errors of the remaining workers keep their lists, so that not every cell can run now.
    assert notebook.value("kept") == [1, 2]


LIMIT_BYTES = 8 * TIB


@pytest.fixture
def limit() -> Iterator[AllocationLimit]:
    """A limit of 8 TiB, which nothing reaches, around 7 TiB that seem to be allocated."""
    limit = AllocationLimit(lambda: LIMIT_BYTES - TIB, lambda: None)
    limit.switch_on()
    limit.set_bounds(LIMIT_BYTES, TIB)
    yield limit
    limit.switch_off()


def limit_in_force() -> int:
    """Return the soft limit, in whole MiB."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] // MIB * MIB


def test_the_limit_is_raised_only_as_long_as_needed(limit: AllocationLimit) -> None:
    assert limit_in_force() == LIMIT_BYTES
    limit._data_bytes = lambda: LIMIT_BYTES
    limit.begin_raise(SMALL_BYTES)
    assert limit_in_force() == LIMIT_BYTES + SMALL_BYTES
    limit.end_raise(renew=False)
    assert limit_in_force() == LIMIT_BYTES
    limit.set_bounds(LIMIT_BYTES, 0)
    limit.begin_raise(SMALL_BYTES)
    assert limit_in_force() == LIMIT_BYTES, (
        "a quarter of a MiB is left for native code, whatever else is used"
    )
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] > LIMIT_BYTES + MIB // 4
    limit.end_raise(renew=False)
    limit.switch_off()
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == NO_LIMIT


def test_a_blocked_call_does_not_raise_the_limit_for_long(limit: AllocationLimit) -> None:
    limit._data_bytes = lambda: LIMIT_BYTES
    limit.begin_raise(SMALL_BYTES)
    limit._raised.forget_limit()  # as a second later
    limit.set_bounds(LIMIT_BYTES, 0)
    assert limit_in_force() == LIMIT_BYTES
    limit.end_raise(renew=False)


def test_a_raised_limit_falls_with_the_memory_left(limit: AllocationLimit) -> None:
    """Calls of many threads overlap, so that the limit is never restored between them."""
    limit._data_bytes = lambda: LIMIT_BYTES
    limit.begin_raise(SMALL_BYTES)
    limit.begin_raise(SMALL_BYTES)
    limit.end_raise(renew=False)
    limit.set_bounds(LIMIT_BYTES, 0)
    assert limit_in_force() == LIMIT_BYTES
    limit.begin_raise(SMALL_BYTES)
    assert limit_in_force() == LIMIT_BYTES
    limit.end_raise(renew=False)
    limit.end_raise(renew=False)


def waiting_thread(limit: AllocationLimit, event: threading.Event) -> threading.Thread:
    """Return a thread that was started under the limit, and runs until ``event``."""

    def wait() -> None:
        limit.threads.begin()
        event.wait()
        limit.threads.end()

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(limit.threads.are_busy)
    return thread


def test_threads_count_until_they_end(limit: AllocationLimit) -> None:
    event = threading.Event()
    waiting_thread(limit, event)
    assert limit.threads.are_busy()
    event.set()
    wait_for(lambda: not limit.threads.are_busy())


def test_threads_that_allocate_are_waited_for(
    limit: AllocationLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is shown once they have ended or settled: they would use up the memory that it
    needs.
    """
    monkeypatch.setattr("ipygpumem.extras.guard.cell_threads._LONGEST_WAIT_SECONDS", 600)
    monkeypatch.setattr("ipygpumem.extras.guard.cell_threads._CHECK_SECONDS", 0)
    sizes = [1, 2, 3, 4, 5]

    def grow_until_the_last() -> int:
        return sizes.pop(0) if len(sizes) > 1 else sizes[0]

    limit.threads._data_bytes = grow_until_the_last
    limit.threads.wait()
    assert len(sizes) >= 4, "without threads there is no wait"

    # With one thread of the cell, it waits until the size stays.
    event = threading.Event()
    thread = waiting_thread(limit, event)
    limit.threads.wait()
    assert sizes == [5]
    event.set()
    thread.join()

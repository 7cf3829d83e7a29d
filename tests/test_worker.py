"""The one thread: when it runs what, when it ends, and what it must not disturb."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from ipygpumem.measuring.worker import Worker


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "ipygpumem" in thread.name]


def wait_for(condition: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)


def test_jobs_run_when_they_are_due_in_one_thread_that_ends_with_the_last_of_them() -> None:
    worker, often, seldom = Worker(), [0], [0]

    def every_millisecond() -> float:
        often[0] += 1
        return 0.001

    def every_hour() -> float:
        seldom[0] += 1
        return 3600.0

    assert threads() == []
    worker.add(every_millisecond)
    worker.add(every_hour)
    wait_for(lambda: often[0] > 20)
    assert len(threads()) == 1
    assert seldom == [1]
    worker.remove(every_millisecond)
    worker.remove(every_hour)
    wait_for(lambda: not threads())


def test_a_job_that_rests_runs_again_when_it_is_woken() -> None:
    worker, runs = Worker(), [0]

    def job() -> None:
        runs[0] += 1

    worker.add(job)
    wait_for(lambda: runs == [1])
    time.sleep(0.02)
    assert runs == [1]
    worker.wake(job)
    wait_for(lambda: runs == [2])
    worker.close()
    assert threads() == []


def test_a_wake_while_the_job_runs_is_not_lost() -> None:
    worker, runs = Worker(), [0]

    def job() -> None:
        runs[0] += 1
        if runs[0] == 1:
            worker.wake(job)

    worker.add(job)
    wait_for(lambda: runs == [2])
    worker.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks on this system")
def test_signals_are_left_to_the_main_thread() -> None:
    worker, blocked = Worker(), threading.Event()

    def job() -> None:
        if {signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            blocked.set()

    worker.add(job)
    assert blocked.wait(10)
    worker.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_an_empty_clock_that_works_even_if_the_lock_was_held() -> None:
    worker, started = Worker(), threading.Event()

    def job() -> float:
        started.set()
        return 0.001

    worker.add(job)
    assert started.wait(10)
    with worker._changed:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                again = threading.Event()
                worker.wake(job)
                worker.remove(job)
                worker.add(lambda: again.set())
                if again.wait(10) and not worker._due.keys() & {job}:
                    worker.close()
                    code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    worker.close()

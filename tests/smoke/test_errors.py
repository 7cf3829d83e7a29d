"""Memory that a traceback pins: it comes back after an out-of-memory error or an interrupt, and only then."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import ANNOUNCE, fails, ok, plain, run, sizes

_SETUP = (
    ANNOUNCE
    + """
import gc, sys, time, weakref
import numpy as np
import psutil

def resident():
    return psutil.Process().memory_info().rss >> 20

class Thing:
    pass

def step(problem):
    held = np.ones(16 << 20)  # 128 MiB
    thing = Thing()
    thing.view = held[1:]
    alive.append(weakref.ref(thing))
    return problem(held)

def too_much(batch):
    return np.ones(1 << 50)  # 8 PiB

def wrong(batch):
    raise ValueError("a mistake")

def wait(batch):
    announce()

def locals_at_the_error():
    traceback, found = sys.last_traceback, {}
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "step":
            found = {name: type(value).__name__ for name, value in traceback.tb_frame.f_locals.items()}
        traceback = traceback.tb_next
    return found

alive = []
"""
)


@pytest.fixture
def problems(notebook: Kernel) -> Kernel:
    """A kernel with functions that fail while they hold 128 MiB."""
    ok(notebook, _SETUP, "before = resident()")
    return notebook


def _dead(kernel: Kernel) -> list[bool]:
    found = kernel.value("[reference() is None for reference in alive]")
    assert isinstance(found, list)
    return found


def test_out_of_memory_gives_the_memory_back_and_the_kernel_goes_on(problems: Kernel) -> None:
    reply = fails(problems, "step(too_much)", "MemoryError")
    assert "too_much" in plain(reply.traceback)
    (text,) = reply.reports("recovery")
    assert "out of memory (MemoryError) · asked for 8" in text
    assert 112 < sizes(text, "came back: RAM") < 192  # with what the heap had spare
    rows = [line.split() for line in text.splitlines() if " held " in f" {line} "]
    assert any(row[:3] == ["128", "MiB", "step"] for row in rows), text
    assert _dead(problems) == [True]
    assert problems.value("resident() - before") < 32
    assert problems.value("locals_at_the_error()") == {}
    assert ok(problems, "step(len)").result == str(16 << 20)


def test_other_errors_keep_their_locals_until_their_scope_ends(problems: Kernel) -> None:
    ok(problems, "%experiment start a")
    fails(problems, "step(wrong)", "ValueError")
    ok(problems, "x = 1")
    assert problems.value("locals_at_the_error()['held']") == "ndarray"
    ok(problems, "%experiment end")
    assert problems.value("locals_at_the_error()") == {}
    assert _dead(problems) == [True]


def test_any_error_that_ends_an_experiment_cell_gives_its_memory_back(problems: Kernel) -> None:
    fails(problems, "%%experiment a\nbatch = np.ones(16 << 20)\nstep(wrong)", "ValueError")
    ok(problems, "gc.collect();")
    assert _dead(problems) == [True]
    assert problems.value("resident() - before") < 32


def test_an_interrupt_gives_the_memory_back(problems: Kernel) -> None:
    reply = run(problems, "step(wait)", interrupt_when="waits here")
    assert (reply.status, reply.error) == ("error", "KeyboardInterrupt")
    (text,) = reply.reports("recovery")
    assert "interrupted (KeyboardInterrupt)" in text
    assert _dead(problems) == [True]
    assert problems.value("resident() - before") < 32
    assert ok(problems, "6 * 7").result == "42"


def test_which_errors_give_their_memory_back_can_be_configured(kernel: Kernel) -> None:
    ok(kernel, _SETUP, "%config IPyGpuMem.release_frames = 'never'")
    assert fails(kernel, "step(too_much)", "MemoryError").reports("recovery") == []
    assert kernel.value("locals_at_the_error()['held']") == "ndarray"
    ok(kernel, "%config IPyGpuMem.release_frames = 'always'", "alive.clear()")
    assert len(fails(kernel, "step(wrong)", "ValueError").reports("recovery")) == 1
    assert _dead(kernel) == [True]


def test_the_free_command_lets_a_stored_traceback_go(problems: Kernel) -> None:
    fails(problems, "step(wrong)", "ValueError")
    (text,) = ok(problems, "%gpumem free").reports("note")
    assert 112 < sizes(text, "RAM") < 192
    assert _dead(problems) == [True]

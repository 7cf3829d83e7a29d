"""A Ctrl-C that strikes while objects die: CPython prints and forgets it, and our own work must not lose it."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from ipygpumem.fitting.fit import Fit, run_tries
from ipygpumem.fitting.plan import Plan
from ipygpumem.heap import interrupts
from ipygpumem.heap.garbage import Garbage
from ipygpumem.meter.meter import Meter
from ipygpumem.reclaim import reclaim
from tests.fakes import FakeProbe
from tests.kernel import Kernel
from tests.steps import tidied_kernel


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


class Plain:
    """An object that dies with its last name."""


def strike(_: object = None) -> None:
    """Be struck by a Ctrl-C in here, as whatever Python code runs first is after a long collection."""
    signal.raise_signal(signal.SIGINT)
    sum(range(3))


WATCHES: list[weakref.ref[Any]] = []


def struck_when_it_dies(kind: Callable[[], Any] = Cycle) -> Any:
    """Return an object at whose death a callback is struck by a Ctrl-C."""
    item = kind()
    WATCHES.append(weakref.ref(item, strike))
    return item


class StruckFinaliser(Cycle):
    def __del__(self) -> None:
        strike()


def test_a_ctrl_c_in_a_weak_references_callback_or_a_finaliser_goes_on_after_the_block() -> None:
    reached = []

    def block(make: Callable[[], object]) -> None:
        with interrupts.reraise_swallowed():
            make()
            gc.collect()
            reached.append(make)

    for make in (struck_when_it_dies, StruckFinaliser):
        with pytest.raises(KeyboardInterrupt):
            block(make)
        assert reached.pop() is make


def test_without_a_ctrl_c_nothing_is_raised_and_the_hook_of_others_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Fails:
        def __del__(self) -> None:
            raise ValueError

    with interrupts.reraise_swallowed():
        Fails()
    assert [item.exc_type for item in told] == [ValueError]
    assert sys.unraisablehook == told.append


class Raises:
    def __del__(self) -> None:
        raise KeyboardInterrupt


class StruckAndRaises:
    def __del__(self) -> None:
        try:
            strike()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("mine") from None


@pytest.mark.parametrize("kind", [Raises, StruckAndRaises])
def test_a_keyboard_interrupt_that_a_callback_raises_of_itself_is_no_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], object]
) -> None:
    """CPython prints it, as it does without us: a cell that is about to run must not be stopped by it."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with (
        contextlib.nullcontext() if kind is Raises else pytest.raises(KeyboardInterrupt),
        interrupts.reraise_swallowed(),
    ):
        kind()
    assert len(told) == (kind is Raises)
    monkeypatch.undo()
    # A handler of somebody else's raises it itself.
    earlier = signal.signal(signal.SIGINT, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.reraise_swallowed():
            kind()
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_an_error_of_the_block_gives_way_to_the_ctrl_c_and_a_hook_that_came_meanwhile_stays() -> None:
    earlier = sys.unraisablehook
    others = list[Any]().append

    def block() -> None:
        with interrupts.reraise_swallowed():
            struck_when_it_dies(Plain)
            sys.unraisablehook = others
            raise ValueError

    try:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert sys.unraisablehook is others
    finally:
        sys.unraisablehook = earlier


def collect(meter: Meter) -> None:
    struck_when_it_dies()
    Garbage().collect()


def give_back(meter: Meter) -> None:
    held = [struck_when_it_dies(Plain)]
    reclaim.run_steps(meter, [("names", held.clear)], [])


def release_in_a_try(meter: Meter) -> None:
    def train(n: int) -> None:
        held = struck_when_it_dies(Plain)
        if n > 2:
            raise MemoryError(len(str(held)))

    run_tries(train, Fit(Plan({"n": 8}), meter))


def drop_a_result_that_was_too_large(meter: Meter) -> None:
    probe = FakeProbe("cuda:0")
    own = Meter([probe])

    def train(n: int) -> object:
        probe.spike(n)
        return struck_when_it_dies(Plain) if n > 900 else None

    with contextlib.closing(own):
        run_tries(train, Fit(Plan({"n": 1000}, headroom=0.1), own))


PLACES = (collect, give_back, release_in_a_try, drop_a_result_that_was_too_large)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_ctrl_c_that_strikes_a_callback_in_our_own_work_is_not_lost(
    place: Callable[[Meter], None], meter: Meter
) -> None:
    with pytest.raises(KeyboardInterrupt):
        place(meter)


SETUP = """
import signal, weakref
watches, runs = [], []
def strike(_):
    signal.raise_signal(signal.SIGINT)
    sum(range(3))
class Big:
    def __init__(self): self.me = self
class Plain: pass
def struck(kind):
    item = kind()
    watches.append(weakref.ref(item, strike))
    return item
"""


shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP)


@pytest.mark.parametrize(
    ("kind", "head"),
    [("Big", ""), ("Plain", "%%capture\n")],  # which runs a cell of its own, whose events lose it
)
def test_a_ctrl_c_between_two_tries_ends_the_cell(notebook: Kernel, kind: str, head: str) -> None:
    reply = notebook.run(f"%%autofit n=8\n{head}runs.append(n)\nheld = struck({kind})\nif n > 2: raise MemoryError")
    assert (reply.error, notebook.value("runs")) == ("KeyboardInterrupt", [8])
    assert "Exception ignored" not in reply.stderr

"""What was made since a moment, its garbage, and when the collector is asked for more."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest

from ipygpumem import garbage
from ipygpumem.garbage import Garbage


def test_garbage_is_collected_until_nothing_more_dies() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    class Chained(Node):
        def __del__(self) -> None:
            found.append(weakref.ref(new := Node()))
            del new

    found: list[weakref.ref[Node]] = []
    gc.collect()
    Chained()
    assert Garbage().collect() >= 2
    assert [reference() for reference in found] == [None]
    assert gc.collect() == 0


def work(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the process have used ``seconds`` more of CPU time whenever it is asked."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(garbage.time, "process_time", lambda: next(clock))


def test_garbage_is_left_alone_where_collecting_would_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation) or 0)
    work(monkeypatch, 10_000.0)
    budget = Garbage()
    assert not budget.collect_if_cheap(0.001, 1.0)
    assert not budget.collect_if_cheap(10.0, 0.0)
    assert collected == []
    assert budget.collect_if_cheap(3600.0, 0.05)
    assert collected[-1] == 2


def test_a_cell_that_only_waited_has_made_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    work(monkeypatch, 0.001)
    assert not Garbage().collect_if_cheap(3600.0, 1.0)


def test_garbage_is_left_alone_where_the_user_switched_collection_off(monkeypatch: pytest.MonkeyPatch) -> None:
    work(monkeypatch, 10_000.0)
    gc.disable()
    try:
        assert not Garbage().collect_if_cheap(3600.0, 1.0)
    finally:
        gc.enable()


def test_the_prediction_learns_from_what_a_collection_really_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(garbage.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(garbage.sys, "getallocatedblocks", lambda: 1000)
    work(monkeypatch, 10_000.0)
    budget = Garbage()
    assert budget.collect_if_cheap(10.0, 0.05)
    assert not budget.collect_if_cheap(39.0, 0.05)  # 1000 blocks at 2 ms each are predicted to take 2 s

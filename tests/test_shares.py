"""Shares of work: they come from counts, only grow, and end at the whole."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import pytest

from ipygpumem.objects.bulk import CHUNK
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.search import Roots, explain
from ipygpumem.objects.inventory import survey
from ipygpumem.objects.progress import Progress, counted, every, part, parts
from tests.alone import in_a_process_of_its_own


def test_a_part_of_the_work_moves_the_whole_from_its_start_to_its_end() -> None:
    told: list[float] = []
    middle = part(told.append, 0.25, 0.75)
    for share in (0.0, 0.5, 1.0, 1.2):
        middle(share)
    assert told == [0.25, 0.5, 0.75, 0.75]


def test_parts_are_as_long_as_their_weights_say() -> None:
    told: list[float] = []
    for progress in parts(told.append, [1, 0, 3]):
        progress(0.0)
        progress(1.0)
    assert told == [0.0, 0.25, 0.25, 0.25, 0.25, 1.0]
    parts(told.append, [0, 0])[1](1.0)  # nothing to do at all


def test_items_are_counted_as_they_are_done() -> None:
    told: list[float] = []
    assert list(counted("abcd", 4, told.append)) == list("abcd")
    assert told == [0.25, 0.5, 0.75, 1.0]
    told.clear()
    assert list(every(2, "abcd", told.append)) == list("abcd")
    assert told == [0.5, 1.0]


def longest_stand(work: Callable[[Progress], object]) -> float:
    """Return for which share of its work, counted in calls of functions, a bar stands still; it only goes forward."""
    calls, told = 0, [(0, 0.0)]

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work(lambda share: told.append((calls, share)))
    finally:
        sys.setprofile(None)
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] <= 1.0
    moves = [at for (at, share), (_, before) in zip(told[1:], told, strict=False) if share > before]
    return max(later - earlier for earlier, later in pairwise([0, *moves, calls])) / calls


class Plain:
    def __init__(self) -> None:
        self.inside = [1]


MAKE: dict[str, Callable[[], object]] = {
    "lists": lambda: [1],
    "dicts": lambda: {"a": [1], "b": (object(),)},
    "objects": Plain,
    "arrays": lambda: importlib.import_module("numpy").ones(2),
}


@pytest.mark.parametrize("what", MAKE)
def test_the_bar_of_an_inventory_of_much_never_stands_for_long(what: str) -> None:
    pytest.importorskip("numpy")
    in_a_process_of_its_own(take_much, what)  # where much is much beside all else


def take_much(what: str) -> None:
    keep = [MAKE[what]() for _ in range(10 * CHUNK)]
    assert longest_stand(lambda progress: survey.take([("keep", keep)], progress=progress)) < 0.25


def test_a_look_at_the_heap_reports_how_much_of_it_was_seen() -> None:
    keep = [[1] for _ in range(50 * CHUNK)]
    told: list[float] = []
    heap = Heap(progress=told.append)
    assert told == sorted(told)
    assert (len(told) > 50, told[-1]) == (True, 1.0)
    heap.drop()
    assert len(keep) == 50 * CHUNK


def test_a_search_for_holders_reports_each_pass_over_the_heap() -> None:
    numpy = pytest.importorskip("numpy")
    keep = [[1] for _ in range(50 * CHUNK)]
    arrays = [numpy.ones(9) for _ in range(100)]
    deep = {"a": {"b": arrays}}
    heap, told = Heap(), list[float]()
    explain([("numpy", id(array)) for array in arrays], heap, Roots(), progress=told.append)
    assert told == sorted(told)
    assert len(told) > 50
    assert told[-1] <= 1.0
    heap.drop()
    assert (len(keep), len(deep)) == (50 * CHUNK, 1)


def test_a_search_for_the_holders_of_few_reports_each_look_although_the_collector_takes_it() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(9)
    deep = {"a": {"b": [[[array]]]}}
    heap, told = Heap(), list[float]()
    explain([("numpy", id(array))], heap, Roots(), progress=told.append)
    heap.drop()
    assert told == sorted(told)
    first = 0.6 / 2  # who refers to the array itself: it is not tracked, so all of the heap is passed over
    assert len({share for share in told if share > first}) >= 4
    assert len(deep) == 1

"""Shares of work: they only grow, and end at the whole."""

from __future__ import annotations

import pytest

from ipygpumem.objects.bulk import CHUNK
from ipygpumem.objects.heap import Heap
from ipygpumem.objects.holders.search import Roots, explain
from ipygpumem.objects.inventory import survey
from ipygpumem.objects.progress import counted, part, parts


def test_the_parts_of_the_work_move_the_whole_from_start_to_end() -> None:
    told: list[float] = []
    for progress in parts(part(told.append, 0.5, 1.0), [1, 0, 3]):
        list(counted("ab", 2, progress))
    assert told == [0.5625, 0.625, 0.625, 0.625, 0.8125, 1.0]
    parts(told.append, [0, 0])[1](1.0)  # nothing to do at all


def test_inventories_and_searches_report_how_much_is_seen() -> None:
    numpy = pytest.importorskip("numpy")
    keep = [[1] for _ in range(50 * CHUNK)]
    arrays = {"a": [{"b": numpy.ones(9)} for _ in range(100)]}
    told: list[float] = []
    survey.take([("arrays", arrays)], progress=told.append)
    assert (told == sorted(told), len(told) > 50, told[-1]) == (True, True, 1.0)
    told.clear()
    heap = Heap()
    explain([("numpy", id(item["b"])) for item in arrays["a"]], heap, Roots(), progress=told.append)
    heap.drop()
    assert (told == sorted(told), len(told) > 50, told[-1] <= 1.0) == (True, True, True)
    assert len(keep) == 50 * CHUNK

"""A search for holders asks about a limited number of objects, and visits no more than it needs."""

from __future__ import annotations

import types

import pytest

from ipygpumem.heap.holders.chains import HolderChains
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.remaining.contents import Contents
from ipygpumem.inventory.remaining.remaining import Changes, find_remaining
from ipygpumem.inventory.rows.searched_rows import MOST_SEARCHED, is_searched_together
from tests.heap_passes import Passes


def test_holders_of_many_objects_of_one_type_are_all_searched() -> None:
    lists = [[number] for number in range(500)]
    assert is_searched_together(lists, 0)
    assert not is_searched_together(lists, MOST_SEARCHED - 499)


def test_of_many_small_objects_of_several_types_one_is_searched() -> None:
    few = [[number] for number in range(50)] + [{"number": number} for number in range(50)]
    assert is_searched_together(few, 0)
    assert not is_searched_together([*few, {"one": "more"}], 0)


def test_references_of_a_long_holder_to_few_objects_are_counted() -> None:
    item = object()
    holder = [item, *range(1000), item]
    chains = object.__new__(HolderChains)
    chains._reference_counts = {}
    assert chains._number_of_references(holder, {id(item)}) == 2
    assert chains._number_of_references(holder, {id(item), *range(10_000)}) == 2


_HIDDEN = types.ModuleType("hidden")
"""Stands for a library, in which an import makes many objects."""


@pytest.mark.parametrize("modules", [0, 100])
def test_objects_that_an_import_makes_are_not_visited(modules: int) -> None:
    older = [{"number": number} for number in range(10)]
    names = {"names": [older]}
    contents = Contents(dict(names))
    _HIDDEN.objects = []  # type: ignore[attr-defined]

    # Objects that the experiment has made, and that only a hidden list leads to.
    made = [{"number": number, "older": dict(older[0])} for number in range(5000)]
    _HIDDEN.objects.append(made)
    new = {id(made), *map(id, made)}
    changes = Changes(names, contents, new, [], modules)

    # The search, and how many objects it visits.
    heap = Heap()
    with Passes() as passes:
        rows = find_remaining(heap, changes, counted=Sizes(), smallest=1 << 18, size_bytes=1 << 24)
    heap.drop()
    if modules:
        assert not rows
        assert passes.visits < len(made)
    else:
        assert sum(row.record.size_bytes for row in rows) > 1 << 20
        assert passes.visits > len(made)

"""Which objects that an experiment leaves are asked for their holders."""

from __future__ import annotations

from ipygpumem.heap.holders.backward import BackwardSearch
from ipygpumem.inventory.remaining import MOST_SEARCHED, is_searched_together


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
    search = object.__new__(BackwardSearch)
    search._reference_counts = {}
    assert search._number_of_references(holder, {id(item)}) == 2
    assert search._number_of_references(holder, {id(item), *range(10_000)}) == 2

"""Questions about many objects at once, answered by the identities of their types."""

from __future__ import annotations

import sys
from array import array

import pytest

from ipygpumem.heap.bulk import (
    AddressFilter,
    Batch,
    Kinds,
    TypesOfMany,
    by_identity,
    differences,
    ids_of,
    of_types,
    subtypes,
    without_types,
)
from ipygpumem.introspect import ID_BYTES, begins_with, identities, identities_of_list


class Untouchable(type):
    """A metaclass whose classes must not be hashed or compared."""

    def __hash__(cls) -> int:
        raise AssertionError

    def __eq__(cls, other: object) -> bool:
        raise AssertionError


class Item(metaclass=Untouchable):
    """An object of a class that must not be hashed."""


MIXED = [1, "text", Item(), [], 2, Item(), None, "more"] * 20


OF_MANY_TYPES = [type(f"Item{number}", (Item,), {})() for number in range(300)] * 2 + MIXED


@pytest.mark.parametrize(
    "items",
    [[], MIXED[:8], MIXED, ["text"] * 60, OF_MANY_TYPES],
    ids=["none", "few", "many", "of one type", "of many types"],
)
def test_a_batch_answers_like_the_functions(items: list[object]) -> None:
    batch = Batch(items)
    for wanted in (set[int](), {id(str)}, {id(Item), id(int)}, {id(dict)}):
        assert ids_of(batch.of_types(wanted)) == ids_of(of_types(wanted, items))
        assert ids_of(batch.without_types(wanted)) == ids_of(without_types(wanted, items))
    assert batch.types == set(map(id, map(type, items)))
    assert set(batch.one_of_each(batch.types)) == batch.types
    for kind in batch.types:
        assert batch.number_of(kind) == len(of_types({kind}, items))


@pytest.mark.parametrize("items", [[], MIXED[:8], MIXED * 10, [*MIXED, *[[]] * 2000, Item()]])
def test_kinds_answer_like_the_functions(items: list[object]) -> None:
    kinds = Kinds(items)
    assert kinds.examples.keys() == set(map(id, map(type, items)))
    for wanted in (set[int](), {id(str)}, {id(Item), id(int)}, {id(dict)}, {id(list)}):
        expected = [number for number, item in enumerate(items) if id(type(item)) in wanted]
        assert kinds.positions(wanted) == expected
        assert ids_of(kinds.of_types(wanted)) == ids_of(of_types(wanted, items))


@pytest.mark.parametrize("number", [0, 1, 499, 500, 4000, 4001, 9000])
def test_objects_are_compared_by_identity_alone(number: int) -> None:
    with_item = tuple([Item() for _ in range(number)])
    assert begins_with(with_item, with_item)
    assert begins_with((*with_item, Item()), with_item)
    assert not begins_with(with_item, (*with_item, Item()))
    row = identities(with_item)
    assert list(differences(row, with_item)) == []
    for position_of_other in {0, number // 2, number - 1} if number else ():
        others = list(with_item)
        others[position_of_other] = Item()
        assert not begins_with(tuple(others), with_item)
        assert list(differences(row, tuple(others))) == [position_of_other]


@pytest.mark.parametrize("number", [0, 3, 49, 50, 1000])
def test_numbers_are_the_identities(number: int) -> None:
    items = [object() for _ in range(number)]
    assert ids_of(items) == list(map(id, items))
    assert identities_of_list(items) == identities(items)
    assert list(by_identity(items)) == list(map(id, items))


def test_a_search_for_addresses_finds_whole_ones() -> None:
    # The bytes of 0x0100 are in the end of the first number and the start of the second one.
    addresses = [1 << 56, 1, 256, 7]
    row = array("Q", addresses).tobytes()
    for place, address in enumerate(addresses):
        assert list(AddressFilter({address}).positions(row)) == [place]
    assert list(AddressFilter({7, 256}).positions(row)) == [2, 3]
    shifted = int.from_bytes(row[4 : 4 + ID_BYTES], sys.byteorder)
    assert not AddressFilter({shifted}).is_in(row)
    assert not AddressFilter(()).is_in(row)


@pytest.mark.parametrize("wanted", [(str,), (dict, tuple), (Item, str), (bytes,), ()])
def test_objects_of_few_types_are_found_among_many(wanted: tuple[type, ...]) -> None:
    items = [Item(), "text", (), {}, 1, None, Item(), "text", 1.0, [], Item, *OF_MANY_TYPES]
    expected = [item for item in items if any(type(item) is kind for kind in wanted)]
    objects = TypesOfMany(items).of_types(AddressFilter(set(map(id, wanted))))
    assert list(map(id, objects)) == list(map(id, expected))


def test_subtypes_include_all_derived_classes() -> None:
    class Derived(Item):
        pass

    class Further(Derived, dict):
        pass

    assert {id(Item), id(Derived), id(Further)} <= subtypes([Item]).keys()
    assert id(dict) not in subtypes([Item])

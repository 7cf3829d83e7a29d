"""Which objects names lead to by items and attributes alone, so that they are no leaks."""

import functools
from collections import deque
from typing import Any

import pytest

from ipygpumem.inventory.unreached import led_to_by_names


class Holder:
    def __init__(self, item: object) -> None:
        self.item = item


class Slotted:
    __slots__ = ("item",)

    def __init__(self, item: object) -> None:
        self.item = item


def closing_over(item: object) -> Any:
    return lambda: item


def suspended(item: object) -> Any:
    def generate() -> Any:
        yield item

    generator = generate()
    next(generator)
    return generator


def raised(item: object) -> Any:
    error = ValueError()
    error.args = (item,)
    return error


def cached(item: object) -> Any:
    @functools.lru_cache
    def load() -> object:
        return item

    load()
    return load


@pytest.mark.parametrize(
    "made",
    [
        lambda item: [item],
        lambda item: {"key": (item,)},
        lambda item: deque([{"key": item}]),
        Holder,
        Slotted,
        lambda item: [Holder([Slotted(item)])],
    ],
    ids=["a list", "a tuple in a dict", "a deque", "an attribute", "a slot", "all of them"],
)
def test_items_and_attributes_are_led_to(made: Any) -> None:
    item = object()
    assert led_to_by_names([made(item), 1], {id(item)}) == {id(item)}


@pytest.mark.parametrize(
    "made",
    [closing_over, suspended, raised, cached, lambda item: [item].append],
    ids=["a closure", "a generator", "an error", "a cache", "a method"],
)
def test_data_of_functions_and_errors_may_be_a_leak(made: Any) -> None:
    item = object()
    assert led_to_by_names([made(item)], {id(item)}) == set()


def test_very_many_objects_are_left_to_the_search_for_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipygpumem.inventory.unreached._MOST_NAMED", 1_000)
    item = object()
    chain = [item]
    for _ in range(2_000):
        chain = [chain]
    assert led_to_by_names([chain], {id(item)}) == set()
    assert led_to_by_names([[item], [chain]], {id(item)}) == {id(item)}

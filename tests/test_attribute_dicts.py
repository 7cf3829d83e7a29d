"""Commands read attributes without giving the user's objects dicts, which would make
them larger.
"""

import gc
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import pytest

import ipygpumem
from ipygpumem.heap.walks.named_arrays import NamedArrays

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("others_out_of_sight")


class Item:
    def __init__(self, content: object) -> None:
        self.number = 1
        self.content = content


class Late:
    """Gets its only attribute later, in a dict that has the name of a property of the class."""

    @cached_property
    def table(self) -> object:
        return numpy.ones(3)


class Slotted:
    __slots__ = ("__dict__", "first")

    def __init__(self, content: object) -> None:
        self.first = [content]


MAKERS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: Item(1),
    "lists": lambda: Item([1]),
    "dicts": lambda: Item({"a": 1}),
    "objects": lambda: Item(Item(["text"])),
    "nothing": lambda: type("Empty", (), {})(),
    "slots": lambda: Slotted(2),
    "functions": lambda: lambda value=[1]: value,
    "partials": lambda: partial(print, [1]),
    "errors": lambda: ValueError([1]),
}


def dicts_of(item: Any) -> int:
    return sum(type(part) is dict for part in gc.get_referents(item))


def shape(item: Any) -> tuple[int, int]:
    """Return the numbers of dicts and of all objects to which an object refers."""
    return dicts_of(item), len(gc.get_referents(item))


@pytest.mark.parametrize("kind", MAKERS)
def test_objects_without_arrays_get_no_dict(kind: str) -> None:
    items = [MAKERS[kind]() for _ in range(100)]
    before = list(map(shape, items))
    ipygpumem.tensors()
    NamedArrays().named([("items", items)])
    assert list(map(shape, items)) == before


@pytest.mark.parametrize("command", ["tensors", "leaks", "top", "status", "why items"])
def test_no_command_gives_objects_a_dict(command: str, loaded: Any) -> None:
    items = [Item([number]) for number in range(1000)]
    loaded.user_ns["items"] = items
    before = list(map(shape, items))
    loaded.run_line_magic("gpumem", command)
    assert list(map(shape, items)) == before


def paths(**roots: object) -> list[str]:
    walk = NamedArrays()
    return sorted(walk.paths[key] for key in walk.named(roots.items()))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="attributes are always in a dict")
def test_only_objects_on_the_way_to_an_array_are_read() -> None:
    items = [Item([number]) for number in range(100)]
    items[50].content = Item({"a": [numpy.ones(3)]})
    assert paths(items=items) == ['items[50].content.content["a"][0]']
    assert sum(map(dicts_of, items)) <= 1


def test_names_are_found_with_and_without_a_dict() -> None:
    table = {"a": numpy.ones(1)}
    plain = Item(table)
    read = Item({"a": numpy.ones(2)})
    copied = Item({"a": numpy.ones(3)})
    assert vars(read)
    vars(copied).update(copied.content)  # type: ignore[call-overload]  # a dict
    assert paths(plain=plain, read=read, copied=copied) == [
        "copied.a",
        'plain.content["a"]',
        'read.content["a"]',
    ]


def test_a_cached_property_has_its_own_name() -> None:
    late = Late()
    assert late.table is not None
    assert paths(late=late) == ["late.table"]


def test_arrays_that_objects_share_are_named_after_the_nearest() -> None:
    inner = Item(numpy.ones(3))
    assert paths(outer=[Item(inner)], inner=inner) == ["inner.content"]


def test_slots_and_attributes_of_one_object_are_both_named() -> None:
    item = Slotted(numpy.ones(3))
    item.second = [numpy.ones(4)]  # type: ignore[attr-defined]  # it has a dict
    assert paths(item=item) == ["item.first[0]", "item.second[0]"]


def test_no_descriptor_runs() -> None:
    class Odd:
        def __get__(self, item: object, kind: type) -> object:
            pytest.fail("ran")

    class Owner:
        odd = Odd()

    owner = Owner()
    vars(owner)["odd"] = [numpy.ones(3)]
    assert paths(owner=owner) == ["owner.odd[0]"]

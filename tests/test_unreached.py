"""Which objects names lead to by items and attributes alone, so that they are no leaks."""

import functools
from collections import deque
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.inventory.leaks.unreached import ids_behind_names


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
    assert ids_behind_names([made(item), 1], {id(item)}) == {id(item)}


@pytest.mark.parametrize(
    "made",
    [closing_over, suspended, raised, cached, lambda item: [item].append],
    ids=["a closure", "a generator", "an error", "a cache", "a method"],
)
def test_data_of_functions_and_errors_may_be_a_leak(made: Any) -> None:
    item = object()
    assert ids_behind_names([made(item)], {id(item)}) == set()


def test_very_many_objects_are_left_to_the_search_for_holders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipygpumem.inventory.leaks.unreached._MOST_NAMED", 1_000)
    item = object()
    chain = [item]
    for _ in range(2_000):
        chain = [chain]
    assert ids_behind_names([chain], {id(item)}) == set()
    assert ids_behind_names([[item], [chain]], {id(item)}) == {id(item)}


def test_large_containers_hide_nothing_in_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.inventory.leaks.unreached._MOST_NAMED", 1_000)
    monkeypatch.setattr("ipygpumem.inventory.leaks.unreached._MOST_ITEMS_AT_ONCE", 100)
    monkeypatch.setattr("ipygpumem.inventory.leaks.unreached._MOST_TOGETHER", 150)
    item, last = object(), object()
    deep: Any = item
    for _ in range(20):
        deep = Holder([deep])
    rows = [{"id": [number]} for number in range(3_000)]
    table: dict[int, Any] = {number: {"id": [number]} for number in range(101)}
    table[7]["last"] = [last]
    batches = [[{"id": [number]} for number in range(101)] for _ in range(101)]
    names = [{"rows": rows}, batches, table, deep]
    assert ids_behind_names(names, {id(item), id(last)}) == {id(item), id(last)}


def test_an_array_that_a_cut_search_does_not_reach_is_no_leak(
    loaded: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    only_this_test: None,
) -> None:
    pytest.importorskip("numpy")
    monkeypatch.setattr("ipygpumem.inventory.leaks.unreached._MOST_NAMED", 1)
    monkeypatch.setattr("ipygpumem.heap.holders.backward.BackwardSearch._MOST_LEVELS", 4)
    loaded.run_cell(
        """
        import numpy

        class Module:
            def __init__(self, part):
                self.part = part

        model = numpy.ones(2**20)
        for _ in range(10):
            model = Module([model])

        def closing():
            kept = numpy.ones(2**19)
            return lambda: kept

        leaking = closing()
        """
    )
    capsys.readouterr()
    loaded.run_line_magic("gpumem", "leaks")
    report = capsys.readouterr().out
    assert report.startswith("1 leak · 4 MiB"), report
    assert "kept" in report
    assert (
        "1 object, 8 MiB in total: the search ended at its limits before it knew what holds it; it "
        "may be no leak"
    ) in " ".join(report.split())
    assert "free something" not in report

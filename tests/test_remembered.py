"""An object is recognised by more than its place in memory, which another one may have taken."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.kinds.arrays import described, span_of
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.heap.live.remembered import Remembered
from ipygpumem.shell.searches import deleted_names
from ipygpumem.shell.searches.baselines import Baseline
from tests.steps import HIDE_LIBRARIES, experiment, kernel_with, run_cells

kernel = kernel_with(
    "%load_ext ipygpumem",
    HIDE_LIBRARIES,
    "%config IPyGpuMem.quiet = True",
    """
class Plain:
    pass

class Slots:
    __slots__ = ("texts",)

def fill(item):
    texts = [str(number) * 100 for number in range(10 ** 5, 10 ** 5 + 13_000)]
    if type(item) is list:
        item += texts
    elif type(item) is dict:
        item["texts"] = texts
    else:
        item.texts = texts
    return item

def take_the_place(make):
    address, made = id(kept[0]), []
    kept.clear()
    while len(made) < 1000 and address not in map(id, made):
        made.append(make())
    return fill(made[-1]) if id(made[-1]) == address else None

kept = []
[fill(Plain()) for _ in range(3)]  # CPython 3.13 makes later objects of a class smaller
None
""",
)


@pytest.mark.parametrize("new", ["Plain()", "Slots()", "{}", "[]"])
def test_an_object_that_takes_the_place_of_a_leak_is_none(kernel: Kernel, new: str) -> None:
    has_taken = False
    for _ in range(20):  # another thread may take the place first
        run_cells(kernel, experiment(f"kept.append(fill({new}))"))
        (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
        assert "to free it: del kept[0]" in leaks
        run_cells(kernel, f"other = take_the_place(lambda: {new})")
        has_taken = kernel.value("other is not None")
        if has_taken:
            break
    assert has_taken
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert leaks == "no leak of at least 1 MiB was found"
    run_cells(kernel, "del other")


@pytest.mark.parametrize("new", ["Plain()", "Slots()", "{}", "[]"])
def test_a_leak_that_grows_is_still_one(kernel: Kernel, new: str) -> None:
    grow = {"[]": "kept[0] += ['more']", "{}": "kept[0]['more'] = 1"}
    run_cells(kernel, experiment(f"kept.append(fill({new}))"))
    run_cells(kernel, grow.get(new, "kept[0].texts.append('more')"))
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert "to free it: del kept[0]" in leaks
    run_cells(kernel, "kept.clear()")


def test_a_text_that_takes_the_place_of_a_leak_is_none() -> None:
    text = "leaked" * 1000
    remembered = Remembered([text])
    assert remembered.alive({id(text): text}) == [text]
    assert remembered.alive({id(text): "other" * 1200}) == []  # as at the same place in memory
    in_list = [text]
    of_list = Remembered([in_list])
    assert of_list.alive({id(in_list): in_list}) == [in_list]


@pytest.mark.parametrize(
    "change",
    [
        "del kept[0][:5000]",
        "del kept[0][2000:]",
        "kept[0].insert(0, 'first')",
        "kept[0].reverse()",
        "kept[0].append(kept[0].pop(0))",
    ],
)
def test_a_leaked_list_whose_items_move_is_still_one(kernel: Kernel, change: str) -> None:
    run_cells(kernel, experiment("kept.append(fill([]))"))
    run_cells(kernel, change)
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert "to free it: del kept[0]" in leaks
    run_cells(kernel, "kept.clear()")


def test_an_array_at_the_place_of_an_earlier_leak_is_left(kernel: Kernel) -> None:
    pytest.importorskip("numpy")
    run_cells(
        kernel,
        """
        import numpy as np
        cache = []
        """,
    )
    # The first two make glibc keep the pages; then each array is at the place of an earlier one.
    for code in ["x = np.ones(1 << 21); cache.append(x)"] * 2 + [
        "cache.append([np.ones(1 << 21)])"
    ] * 4:
        (report,) = run_cells(kernel, experiment(code)).survivors()
        assert "to free it: del cache[0]" in report
        run_cells(kernel, "cache.clear()")


def test_an_earlier_leak_s_place_is_old_until_it_is_received() -> None:
    numpy = pytest.importorskip("numpy")
    keeper = SimpleNamespace(array=numpy.ones(1 << 15))  # no name or container leads to it
    namespace: dict[str, object] = {"box": []}
    context = SimpleNamespace(namespace=namespace, garbage=Garbage())
    baseline = Baseline(context, [], [span_of(keeper.array)], ())  # type: ignore[arg-type]
    ((item, described_array),) = described([keeper.array])
    assert baseline.was_there(item, described_array)
    del baseline._received  # as of an end
    baseline.note_new_containers()
    namespace["box"].append(keeper.array)  # type: ignore[attr-defined]
    assert not baseline.was_there(item, described_array)
    # A set of a megabyte after many new objects: it was a row of the report.
    assert id(baseline._received) not in baseline.objects_since()


def test_the_last_texts_of_a_long_dict_recognise_it() -> None:
    item: dict[str, object] = {f"key {number}": f"value {number}" for number in range(50_000)}
    remembered = Remembered([item])
    for key in list(item)[:45_000]:
        del item[key]
    assert remembered.alive(by_identity([item])) == [item]
    item["key 49999"] = "other"
    item.update(dict.fromkeys(item, "other"))
    assert remembered.alive(by_identity([item])) == []


def by_identity(items: list[object]) -> dict[int, object]:
    return {id(item): item for item in items}


def test_of_many_objects_samples_decide() -> None:
    items: list[object] = [[f"text {number}"] for number in range(2000)]
    remembered = Remembered(items)
    assert remembered.alive(by_identity(items)) == items
    assert remembered.alive(by_identity(items[:1500])) == items[:1500]
    assert remembered.alive(by_identity(items[:500])) == []
    for item in items:
        item[0] = "another"  # type: ignore[index]
    assert remembered.alive(by_identity(items)) == []


def test_each_of_a_few_objects_is_recognised_alone() -> None:
    items: list[object] = [{"number": float(number)} for number in range(20)]
    remembered = Remembered(items)
    items[3]["number"] = 0.5  # type: ignore[index]
    assert remembered.alive(by_identity(items)) == [*items[:3], *items[4:]]


def test_of_very_many_deleted_names_the_last_ones_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deleted_names, "_MOST_DELETED", 2)
    names = [f"name{number}" for number in range(50)]
    namespace: dict[str, object] = {name: set[int]() for name in sorted(names)}
    context: Any = SimpleNamespace(namespace=namespace, shell=SimpleNamespace(execution_count=1))
    deleted = deleted_names.DeletedNames(context)
    deleted.watch(f"del {', '.join(names)}")
    watched = [name for name in names if deleted.of(name, None).value is not None]
    assert watched == ["name48", "name49"]
    deleted.watch("%reset_selective -f name")
    watched = [name for name in names if deleted.of(name, None).value is not None]
    assert watched == sorted(names)[-2:]

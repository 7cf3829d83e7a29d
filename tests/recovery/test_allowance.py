"""Listing what an error holds stops when its allowance is spent; freeing does not wait for it."""

import gc
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap import allowance as allowances
from ipygpumem.heap import bulk
from ipygpumem.heap.allowance import Allowance, AllowanceError
from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.heap.walks.array_search import ArraySearch
from ipygpumem.reclaim import listing
from ipygpumem.reclaim.plain_locals import plain_locals
from ipygpumem.reclaim.tracebacks import release
from ipygpumem.records import RecoveryRecord
from ipygpumem.report.recovery import recovery_reports
from ipygpumem.units import MIB
from tests.recovery.cases import report_of_recovery
from tests.steps import run_cells, run_failing

PLENTY_OF_BYTES = 1 << 40


def allowance_of(ticks: int, available: Callable[[], int] = lambda: PLENTY_OF_BYTES) -> Allowance:
    """Return an allowance whose clock advances by one with each reading."""
    clock = itertools.count()
    return Allowance(ticks, clock=lambda: next(clock), available=available)


def test_a_spent_allowance_stays_spent() -> None:
    allowance = allowance_of(2)
    assert [allowance.is_spent() for _ in range(4)] == [False, True, True, True]
    assert allowance.reason == "time"
    with pytest.raises(AllowanceError):
        allowance.check()


def test_a_share_ends_before_the_whole_and_with_it() -> None:
    whole = allowance_of(1000)
    share = whole.share(3)
    while not share.is_spent():
        pass
    assert not whole.is_spent()
    later = whole.share(1)
    while not whole.is_spent():
        pass
    assert later.is_spent()


def test_too_little_memory_ends_an_allowance_at_once_or_later() -> None:
    left = [PLENTY_OF_BYTES]
    allowance = allowance_of(1000, lambda: left[0])
    share = allowance.share(2)
    assert not share.is_spent()
    left[0] = allowances.SPARE_BYTES - 1
    assert share.is_spent()
    assert (share.reason, allowance.reason) == ("memory", "memory")
    assert allowance_of(1000, lambda: 0).is_spent()


# -- walks --------------------------------------------------------------------------------------


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value


class OwnList(list[object]):
    pass


def nested(levels: int) -> object:
    inner: object = {}
    for _ in range(levels):
        inner = {"inner": inner, "list": [[]]}
    return inner


NUMBER_OF_ITEMS = 200_000
LARGE: dict[str, Callable[[], object]] = {
    "references": lambda: [None] * (10 * NUMBER_OF_ITEMS),
    "small lists": lambda: [[] for _ in range(NUMBER_OF_ITEMS)],
    "rows": lambda: [[number] for number in range(NUMBER_OF_ITEMS)],
    "tuple": lambda: tuple([] for _ in range(NUMBER_OF_ITEMS)),
    "dict": lambda: {number: [] for number in range(NUMBER_OF_ITEMS)},
    "nested dicts": lambda: nested(NUMBER_OF_ITEMS // 4),
    "defaultdict": lambda: defaultdict(list, {number: [] for number in range(NUMBER_OF_ITEMS)}),
    "ordered dict": lambda: OrderedDict((number, []) for number in range(NUMBER_OF_ITEMS)),
    "counter": lambda: Counter(range(NUMBER_OF_ITEMS)),
    "set": lambda: {(number,) for number in range(NUMBER_OF_ITEMS)},
    "deque": lambda: deque([] for _ in range(NUMBER_OF_ITEMS)),
    "own list": lambda: OwnList([] for _ in range(NUMBER_OF_ITEMS)),
    "objects": lambda: [Plain([]) for _ in range(NUMBER_OF_ITEMS)],
    "object array": lambda: np.array(
        [[number] for number in range(NUMBER_OF_ITEMS)] + [None], dtype=object
    ),
}
WITH_LONG_CONTAINER = {name: make for name, make in LARGE.items() if name != "nested dicts"}


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Make a million objects without collections, which would pass over all of them each time."""
    gc.disable()
    yield
    gc.enable()


def failed_with(*values: object) -> BaseException:
    """Return an error of a function whose locals are the values."""

    def fail(first: object, *rest: object) -> None:
        raise MemoryError

    try:
        fail(values[0], *values[1:])
    except MemoryError as error:
        return without_this_frame(error)
    raise AssertionError


def failed_by(code: str) -> BaseException:
    """Return the error of the function ``fail`` that the code defines."""
    names: dict[str, Any] = {"np": np, "__name__": "__main__"}
    exec(compile(code, "/home/someone/notebook.py", "exec"), names)
    try:
        names["fail"]()
    except MemoryError as error:
        return without_this_frame(error)
    raise AssertionError


def without_this_frame(error: BaseException) -> BaseException:
    """Return the error without the running frame of its caller."""
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


@pytest.fixture
def steps() -> Iterator[list[None]]:
    """Count the chunks of objects that walks examine."""
    steps_taken: list[None] = []
    bulk.OBSERVERS.append(lambda: steps_taken.append(None))
    yield steps_taken
    bulk.OBSERVERS.pop()


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_a_list_of_locals_stops_when_its_time_is_over(
    make: Callable[[], object], steps: list[None]
) -> None:
    error = failed_with(*(make() for _ in range(4)))
    held_memory = listing.held_by_frames(error, {}, allowance_of(60))
    assert held_memory.cut is not None
    assert held_memory.cut.reason == "time"
    assert 1 <= held_memory.cut.uncounted <= held_memory.cut.names == 2
    # Each step checks the allowance of 60 once.
    assert len(steps) <= 60
    release(error)


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_the_notebooks_names_do_not_take_the_time_either(
    make: Callable[[], object], steps: list[None]
) -> None:
    names = {"one": make(), "other": make()}
    error = failed_with(np.ones(MIB // 2))
    held_memory = listing.held_by_frames(error, names, allowance_of(60))
    assert [(row.name, row.size_bytes) for row in held_memory.rows] == [("first", 4 * MIB)]
    assert len(steps) <= 60


@pytest.mark.parametrize("make", WITH_LONG_CONTAINER.values(), ids=WITH_LONG_CONTAINER)
@pytest.mark.parametrize(
    "search",
    [
        lambda value: list(ArraySearch().find(value)),
        lambda value: Sizes().measure(value),  # a bound method would keep all it has measured alive
    ],
    ids=["search", "measure"],
)
def test_a_walk_copies_no_long_container_as_a_whole(
    make: Callable[[], Any], search: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [0]
    read = gc.get_referents

    def noted(*items: object) -> list[object]:
        children = read(*items)
        lengths.append(len(children))
        return children

    value = make()
    monkeypatch.setattr(gc, "get_referents", noted)
    search(value)
    # Half of the items of a long container.
    assert max(lengths) <= 100_000


def test_many_frames_do_not_take_the_time(steps: list[None]) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        error = failed_by(
            """
def fail(depth=2000):
    rows = [[] for _ in range(100)]
    if depth == 0:
        raise MemoryError
    fail(depth - 1)
"""
        )
    finally:
        sys.setrecursionlimit(limit)
    held_memory = listing.held_by_frames(error, {}, allowance_of(100))
    assert held_memory.cut is not None
    # Each of the 2,001 frames has a name.
    assert held_memory.cut.names > 2001
    assert len(steps) <= 100
    assert len(plain_locals(error)) == 12
    release(error)


# -- what is still listed -----------------------------------------------------------------------


def test_local_arrays_and_containers_are_listed_without_a_walk(steps: list[None]) -> None:
    error = failed_by(
        """
def fail():
    batch = np.ones(1 << 20)
    view = batch[:10]
    text = "a" * len(view) * (1 << 18)
    lists = [None] * (1 << 20)
    raise MemoryError
"""
    )
    held_memory = listing.held_by_frames(error, {"unrelated": [1]}, allowance_of(1000, lambda: 0))
    sizes = {row.name: row.size_bytes / MIB for row in held_memory.rows}
    assert {name: round(size, 1) for name, size in sizes.items()} == {
        "batch": 8,
        "lists": 8,
        "text": 2.5,
    }
    assert held_memory.cut is not None
    assert held_memory.cut.reason == "memory"
    assert steps == []


def test_a_container_of_the_notebook_is_listed_only_after_a_walk() -> None:
    items = [None] * MIB
    error = failed_with(items)
    assert listing.held_by_frames(error, {"own": items}, allowance_of(1000, lambda: 0)).rows == ()


def test_one_heavy_local_leaves_time_for_other_locals() -> None:
    error = failed_by(
        """
def fail():
    heavy = [[] for _ in range(200_000)]
    batch = {"x": np.ones(1 << 20)}
    raise MemoryError
"""
    )
    held_memory = listing.held_by_frames(error, {}, allowance_of(400))
    assert "batch" in [row.name for row in held_memory.rows]


def test_the_locals_of_each_call_of_a_recursive_function_count() -> None:
    error = failed_by(
        """
def fail(depth=4):
    batch, texts = np.ones(1 << 20), ["a" * (2 << 20)]
    if depth:
        fail(depth - 1)
    raise MemoryError
"""
    )
    held_memory = listing.held_by_frames(error, {}, allowance_of(10_000))
    sizes = Counter[str]()
    for row in held_memory.rows:
        sizes[row.name] += row.size_bytes // MIB
    assert sizes == {"batch": 5 * 8, "texts": 5 * 2}
    assert len(held_memory.rows) == 4  # at two lines


def test_a_complete_list_says_nothing_of_a_cut() -> None:
    held_memory = listing.held_by_frames(
        failed_with(np.ones(MIB), [1, 2]), {}, allowance_of(10_000)
    )
    assert [row.name for row in held_memory.rows] == ["first"]
    assert held_memory.cut is None


# -- in a notebook ------------------------------------------------------------------------------

SPEND_ALLOWANCE = """
from ipygpumem.heap.allowance import Allowance
from ipygpumem.shell import recovery
allowance = recovery.Allowance
recovery.Allowance = lambda *_: Allowance({seconds}, available=lambda: {available})
"""
FAIL_WITH_MANY_ROWS = """
def fail():
    batch = big(16)
    rows = [None] * (4 << 17)
    raise {error}
fail()
"""


def restored(kernel: Kernel) -> None:
    run_cells(kernel, "recovery.Allowance = allowance")


def test_an_oom_is_freed_although_nothing_can_be_listed(notebook: Kernel) -> None:
    run_cells(notebook, SPEND_ALLOWANCE.format(seconds=100, available=0))
    text = report_of_recovery(notebook, FAIL_WITH_MANY_ROWS.format(error="MemoryError"))
    restored(notebook)
    assert "held by the traceback, at least" in text
    assert "16 MiB   fail" in text
    assert "4 MiB   fail" in text
    assert (
        "not everything was counted: listing stopped, because little memory was left; 2 of 2 locals"
        in text
    )
    assert "not everything" not in report_of_recovery(
        notebook, FAIL_WITH_MANY_ROWS.format(error="MemoryError")
    )


def test_the_line_of_another_error_says_at_least(notebook: Kernel) -> None:
    run_cells(notebook, SPEND_ALLOWANCE.format(seconds=100, available=0))
    line = run_failing(
        notebook, FAIL_WITH_MANY_ROWS.replace("16", "40").format(error="ValueError")
    ).reports("cell")[-1]
    restored(notebook)
    assert "still hold at least 44 MiB" in line


def test_a_cut_is_kept_in_records_and_old_records_have_none() -> None:
    data = {
        "kind": "oom",
        "error": "MemoryError",
        "message": "",
        "requested_bytes": None,
        "free": {"cpu": 1},
        "held": [],
        "frames": 1,
        "freed": {"cpu": 1},
        "now": {"cpu": 1},
    }
    assert RecoveryRecord.from_dict(data).cut is None
    record = RecoveryRecord.from_dict(
        {**data, "cut": {"reason": "objects", "uncounted": 1, "names": 3}}
    )
    assert RecoveryRecord.from_dict(record.to_dict()) == record
    (report,) = recovery_reports(record, MIB)
    assert any("too many objects; 1 of 3 locals may hold more" in line for line in report.lines)

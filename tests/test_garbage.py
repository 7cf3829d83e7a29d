"""Objects made since a moment, their garbage, and the collections that we ask for."""

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from ipygpumem.heap.live import garbage
from ipygpumem.heap.live import objects_since as objects_since_module
from ipygpumem.heap.live.garbage import Garbage, objects_since
from ipygpumem.heap.live.heap import live_instances
from ipygpumem.heap.live.objects_since import ObjectsSince, YoungSaver
from ipygpumem.interrupts import stop_listening
from tests.alone import alone
from tests.hiding import hide_existing_objects
from tests.tracing import interrupted_at


def test_garbage_is_collected_until_nothing_more_dies() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    class Chained(Node):
        def __del__(self) -> None:
            made.append(weakref.ref(new := Node()))
            del new

    made: list[weakref.ref[Node]] = []
    gc.collect()
    Chained()
    assert Garbage().collect() >= 2
    assert [reference() for reference in made] == [None]
    assert gc.collect() == 0


def work(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the process have used ``seconds`` more of CPU time whenever it is asked."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(garbage.time, "process_time", lambda: next(clock))


@alone
def test_a_full_collection_leaves_no_garbage_of_our_own() -> None:
    collector = Garbage()
    rounds = list[int]()
    for _ in range(2):
        collector.mark()
        collector.list_from_now(ObjectsSince())
    collector.collect(None, [])

    def note_collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            rounds.append(info["collected"])

    gc.callbacks.append(note_collected)
    assert [collector.collect(None, []) for _ in range(3)] == [0, 0, 0], rounds


def test_garbage_is_not_collected_if_that_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []

    def note_collection(generation: int = 2) -> int:
        collected.append(generation)
        return 0

    monkeypatch.setattr(gc, "collect", note_collection)
    work(monkeypatch, 10_000.0)
    budget = Garbage()
    assert not budget.collect_if_cheap(0.001, 1.0)
    assert not budget.collect_if_cheap(10.0, 0.0)
    assert collected == []
    assert budget.collect_if_cheap(3600.0, 0.05)
    assert collected[-1] == 2


def test_a_cell_that_only_waited_has_made_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    work(monkeypatch, 0.001)
    assert not Garbage().collect_if_cheap(3600.0, 1.0)


class Made:
    """Object that these tests make and search for."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _nothing_made() -> Iterator[None]:
    hide_existing_objects()
    yield
    gc.enable()


class Incremental:
    """The collector of CPython 3.14.0 to 3.14.4, with the interface of ``gc``: one young generation
    and increments.
    """

    def __init__(self) -> None:
        self.collections = [0, 0, 0]
        self.marked: list[object] = []
        """Young objects that an increment has made old, by following references to them."""

    def __getattr__(self, name: str) -> object:
        return getattr(gc, name)

    def collect(self, generation: int = 2) -> int:
        died = gc.collect(2 if generation == 2 else 1)
        self.marked.clear()
        self.collections[generation] += 1
        return died

    def mark(self, *reachable: object) -> None:
        """Do what the first increment does: make old what it reaches, leave other young objects,
        and count nothing.
        """
        for callback in gc.callbacks:
            callback("start", {"generation": 1})
        self.marked += reachable

    def get_objects(self, generation: int) -> list[object]:
        if generation == 0:
            young = gc.get_objects(generation=0) + gc.get_objects(generation=1)
            return [item for item in young if not any(item is marked for marked in self.marked)]
        return [] if generation == 1 else gc.get_objects(generation=2)

    def get_count(self) -> tuple[int, int, int]:
        return gc.get_count()[0], 0, 0

    def get_threshold(self) -> tuple[int, int, int]:
        return gc.get_threshold()[0], 10, 0

    def get_stats(self) -> list[dict[str, int]]:
        return [{"collections": number} for number in self.collections]


@pytest.fixture
def incremental(monkeypatch: pytest.MonkeyPatch) -> Incremental:
    collector = Incremental()
    monkeypatch.setattr(garbage, "gc", collector)
    monkeypatch.setattr(garbage, "_YOUNG", (0,))
    return collector


needs_generations = pytest.mark.skipif(
    garbage._YOUNG != (0, 1), reason="this Python has other generations"
)


def everything(generation: int) -> list[object]:
    return gc.get_objects()


def without_generations() -> list[object]:
    return gc.get_objects()


@pytest.mark.parametrize("lists", [everything, without_generations])
def test_without_generations_none_is_young(
    lists: Callable[..., list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Incremental()
    fake.get_objects = lists  # type: ignore[method-assign]  # free-threaded CPython, PyPy
    monkeypatch.setattr(garbage, "gc", fake)
    assert garbage.young_generations() == ()


@needs_generations
def test_the_young_generations_are_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    assert garbage.young_generations() == (0, 1)
    fake = Incremental()
    monkeypatch.setattr(garbage, "gc", fake)
    assert garbage.young_generations() == (0,)
    look = fake.get_objects

    def disturbed(generation: int) -> list[object]:
        fake.get_objects = look  # type: ignore[method-assign]
        fake.collect(1)
        return look(generation)

    fake.get_objects = disturbed  # type: ignore[method-assign]  # another thread collects once
    assert garbage.young_generations() == (0,)


@needs_generations
def test_the_trial_is_not_disturbed_by_automatic_collections() -> None:
    thresholds = gc.get_threshold()
    # one trial in some hundreds meets such a collection, and would find no generations
    gc.set_threshold(1)
    try:
        assert garbage.young_generations() == (0, 1)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()


@needs_generations
def test_an_object_promoted_while_the_lists_are_read_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Collecting:
        """The collector, which collects the middle generation just before it is listed."""

        def __getattr__(self, name: str) -> object:
            return getattr(gc, name)

        def get_objects(self, generation: int | None = None) -> list[object]:
            if generation == 1:
                gc.collect(1)
            return gc.get_objects(generation=generation)

    since = ObjectsSince()
    saver = YoungSaver()
    gc.collect()
    saver.add(since)
    made = Made()

    # The new object is in the middle generation when the lists are read.
    gc.collect(0)
    monkeypatch.setattr(objects_since_module, "gc", Collecting())
    identities = since.identities()
    saver.stop()
    assert id(made) in (identities or ())


@needs_generations
def test_a_collection_while_saved_objects_are_read_loses_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Collecting:
        """The collector, which collects just before it lists all objects."""

        def __getattr__(self, name: str) -> object:
            return getattr(gc, name)

        def get_objects(self, generation: int | None = None) -> list[object]:
            if generation is None:
                gc.collect(1)
            return gc.get_objects(generation=generation)

    since = ObjectsSince()
    saver = YoungSaver()
    gc.collect()
    saver.add(since)
    made = [Made()]
    gc.collect(1)  # saves it
    monkeypatch.setattr(objects_since_module, "gc", Collecting())

    # An object from before the reads, and one more between any two.
    known = list[set[int] | None]()
    for _ in range(3):
        known.append(since.identities())
        made.append(Made())
    known.append(since.identities())
    saver.stop()
    assert None not in known
    assert set(map(id, made)) <= (known[-1] or set())


@needs_generations
def test_any_incremental_collection_ends_the_knowledge_of_a_mark(incremental: Incremental) -> None:
    collector = Garbage()

    def collect_young() -> None:
        incremental.collect(0)

    def collect_a_part() -> None:
        incremental.mark(made)

    def collect_a_part_unseen() -> None:
        gc.callbacks.clear()
        incremental.mark(made)

    endings: list[Any] = [
        incremental.collect,
        collect_young,
        collect_a_part,
        collect_a_part_unseen,
    ]
    for end in endings:
        mark = collector.mark()
        made = Made()
        assert any(item is made for item in objects_since(mark) or ())
        # Afterwards the mark does not know which objects are new.
        end()
        assert objects_since(mark) is None
    collector.forget()
    assert gc.callbacks == []


@needs_generations
def test_increments_collect_garbage_since_a_mark_and_leave_older(incremental: Incremental) -> None:
    collector = Garbage()
    old = Made()
    mark = collector.mark()
    new = Made()
    alive = {name: weakref.ref(item) for name, item in (("old", old), ("new", new))}
    del old, new
    collector.cell_ended(0.0, 0.05, in_scope=True)  # must not make them old
    assert collector.collect(mark) >= 1
    assert {name for name, reference in alive.items() if reference() is not None} == {"old"}
    assert incremental.collections[2] == 0
    short = weakref.ref(Made())
    collector.cell_ended(0.0, 0.05, in_scope=False)
    assert short() is None


def collect_middle() -> None:
    gc.collect(1)


def mark_again() -> None:
    Garbage().mark()


def freeze_and_unfreeze() -> None:
    gc.freeze()
    gc.unfreeze()


def make_many_lists() -> None:
    _ = [[] for _ in range(50_000)]


@needs_generations
def test_new_objects_are_known_until_a_collection_makes_them_old() -> None:
    for end in (
        gc.collect,
        collect_middle,
        mark_again,
        gc.disable,
        freeze_and_unfreeze,
        make_many_lists,
    ):
        mark = Garbage().mark()
        made = Made()
        gc.collect(0)
        assert any(item is made for item in objects_since(mark) or ())
        end()
        assert objects_since(mark) is None
        gc.enable()
    assert objects_since(None) is None


@needs_generations
def test_garbage_since_a_mark_goes_and_older_garbage_waits() -> None:
    collector = Garbage()
    old = Made()
    mark = collector.mark()
    new = Made()
    kept = Made()
    alive = {name: weakref.ref(item) for name, item in (("old", old), ("new", new), ("kept", kept))}
    del old, new
    assert collector.collect(mark) >= 1
    assert {name for name, reference in alive.items() if reference() is not None} == {"old", "kept"}
    assert collector.collect(mark) >= 1  # the mark is over: all is looked at
    assert {name for name, reference in alive.items() if reference() is not None} == {"kept"}


@needs_generations
@pytest.mark.parametrize("how", ["finaliser", "callback", "slots"])
def test_garbage_released_by_finalisers_is_collected_too(how: str) -> None:
    class Finalised(Made):
        def __del__(self) -> None:
            holder.clear()

    class Slotted:
        __slots__ = ("me",)

        def __del__(self) -> None:
            holder.clear()

    # The object in `holder` becomes garbage only while the collection runs.
    collector = Garbage()
    holder = [Made()]
    old = weakref.ref(holder[0])
    mark = collector.mark()
    if how == "slots":
        slotted = Slotted()
        slotted.me = slotted  # type: ignore[attr-defined]  # a slot
        del slotted
    else:
        new = Finalised() if how == "finaliser" else Made()
        callback = weakref.ref(new, lambda _: holder.clear())
        del new
    collector.collect(mark)
    assert old() is None
    if how == "callback":
        assert callback() is None


class Cycle(Made):
    """An object that only a collection frees, with another one."""

    def __init__(self, other: object) -> None:
        self.me = self
        self.other = other


def finished() -> Any:
    generator = iter_once()
    next(generator)
    assert list(generator) == []
    return generator


def iter_once() -> Any:
    yield 1


@needs_generations
@pytest.mark.parametrize("how", ["finished generator", "new generator", "callback of a set"])
def test_garbage_that_runs_no_code_frees_nothing_old(how: str) -> None:
    """IPython's finished context managers made each recovery collect the whole heap twice."""
    collector = Garbage()
    watching = set[weakref.ref[Any]]()
    mark = collector.mark()
    if how == "callback of a set":
        cycle = Cycle(None)
        watching.add(weakref.ref(cycle, watching.discard))
    else:
        cycle = Cycle(finished() if how == "finished generator" else iter_once())
    reference = weakref.ref(cycle)
    del cycle
    collections = gc.get_stats()[2]["collections"]
    assert collector.collect(mark) >= 1
    assert reference() is None
    assert gc.get_stats()[2]["collections"] == collections


@needs_generations
def test_a_suspended_generator_that_dies_may_free_old_objects() -> None:
    def suspended(holder: list[object]) -> Any:
        try:
            yield 1
        finally:
            holder.clear()

    collector = Garbage()
    holder = [Made()]
    old = weakref.ref(holder[0])
    mark = collector.mark()
    generator = suspended(holder)
    next(generator)
    cycle = Cycle(generator)
    del generator, cycle
    collector.collect(mark)
    assert old() is None


def test_a_collection_in_another_thread_prevents_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seen: gc.collect() does nothing and says 0 as long as another thread collects and waits in a
    # finaliser.
    class Slow(Made):
        def __del__(self) -> None:
            begun.set()
            go_on.wait()

    begun = threading.Event()
    go_on = threading.Event()
    thread = threading.Thread(target=gc.collect)

    def let_the_other_end(_: float) -> None:
        go_on.set()
        thread.join()

    monkeypatch.setattr(garbage.time, "sleep", let_the_other_end)
    collector = Garbage()
    for since in (collector.mark, lambda: None):
        Slow()
        thread = threading.Thread(target=gc.collect)
        begun.clear()
        go_on.clear()
        thread.start()
        begun.wait()
        mark = since()
        lost = Made()
        alive = weakref.ref(lost)
        del lost
        collector.collect(mark)
        go_on.set()
        thread.join()
        assert alive() is None


@needs_generations
@alone  # it takes the more cells, the more is alive
def test_python_still_collects_everything_after_short_cells() -> None:
    # Seen: each collection after a cell began the count anew, and no full one came in 600 cells.
    collector = Garbage()
    kept = list[object]()
    old = Made()
    lost = weakref.ref(old)
    thresholds = gc.get_threshold()
    gc.collect()
    del old
    gc.set_threshold(100, 3, 3)
    quarter = len(gc.get_objects()) // 4  # so many more must there be
    try:
        while len(kept) < 2 * quarter:
            kept += [set() for _ in range(50)]
            collector.cell_ended(0.0, 0.05, in_scope=False)
    finally:
        gc.set_threshold(*thresholds)
    assert lost() is None


def walk(random: Random, collector: Garbage, held: list[Made]) -> None:
    """Do one thing that changes which objects are alive, or how old they are."""

    def make_and_hold() -> None:
        held.append(Made())

    def make_of_a_new_class() -> None:
        new_kind: type[Made] = type("Later", (Made,), {})
        held.extend(new_kind() for _ in range(3))

    def drop_last() -> None:
        if held:
            held.pop()

    def collect_since_last_mark() -> None:
        collector.collect(collector.last)

    def collect_a_generation() -> None:
        gc.collect(random.randrange(3))

    def end_cell() -> None:
        collector.cell_ended(0.0, 0.05, in_scope=random.random() < 0.5)

    def mark_without_collector() -> None:
        gc.disable()
        collector.mark()
        gc.enable()

    def list_instances() -> None:
        collector.instances(random.choice([Random, Made]))

    actions: list[Callable[[], object]] = [
        make_and_hold,
        make_of_a_new_class,
        drop_last,
        held.clear,
        Made,
        collect_a_generation,
        collector.mark,
        collect_since_last_mark,
        collector.collect,
        end_cell,
        mark_again,
        freeze_and_unfreeze,
        mark_without_collector,
        make_many_lists,
        list_instances,
        list_instances,
    ]
    random.choice(actions)()


@alone
def test_instances_match_a_walk_over_the_heap() -> None:
    compare_instances()


@alone
@needs_generations
def test_instances_match_a_walk_with_incremental_collections() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(garbage, "gc", Incremental())
        monkeypatch.setattr(garbage, "_YOUNG", (0,))
        compare_instances()


def compare_instances() -> None:
    for seed in range(10):
        random = Random(seed)
        collector = Garbage()
        made = list[Made]()
        for _ in range(15):
            for _ in range(random.randrange(5)):
                walk(random, collector, made)
            instances = collector.instances(Made)
            assert sorted(map(id, instances)) == sorted(map(id, live_instances(Made))), seed
            del instances


def test_an_interrupt_at_any_line_loses_nothing() -> None:
    """A Ctrl-C may strike wherever our own code runs: the next call finds and frees what this one
    would have.
    """
    for line in itertools.count(1):
        # Held and lost objects newer than the mark.
        gc.collect()
        collector = Garbage()
        collector.instances(Made)
        mark = collector.mark()
        held = Made()
        lost = Made()
        alive = weakref.ref(lost)
        del lost

        # The interrupted call.
        collecting = functools.partial(collector.collect, mark)
        interrupted = interrupted_at(
            line, collecting, lambda frame: frame.f_code.co_filename == garbage.__file__
        )

        # The next one.
        stop_listening()  # as a session does: the interrupt may strike at the very end of a block
        collector.collect(mark)
        assert alive() is None, line
        assert [item is held for item in collector.instances(Made)] == [True], line
        del held
        if not interrupted:
            break
    # Else hardly any line was interrupted.
    assert line > 20


def test_an_interrupted_search_for_instances_misses_none() -> None:
    """A Ctrl-C in a walk over the heap leaves no older instances with a later mark."""

    class Other(Made):
        pass

    for line in itertools.count(1):
        collector = Garbage()
        collector.instances(Made)
        held = Made()
        gc.collect()
        searching = functools.partial(collector.instances, Other)
        interrupted = interrupted_at(
            line, searching, lambda frame: frame.f_code.co_filename == garbage.__file__
        )
        stop_listening()
        assert [item is held for item in collector.instances(Made)] == [True], line
        del held
        if not interrupted:
            break
    # Else hardly any line was interrupted.
    assert line > 5


def test_instances_made_by_finalisers_are_listed() -> None:
    class Saving(Made):
        def __del__(self) -> None:
            saved.append(Made())

    saved = list[Made]()
    collector = Garbage()
    collector.instances(Made)
    Saving()
    collector.collect()
    assert [item is saved[0] for item in collector.instances(Made)] == [True]

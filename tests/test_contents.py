"""New objects since a moment: by the collector's lists, and in the objects that names hold."""

from __future__ import annotations

import array
import ctypes
import gc
import io
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec, module_from_spec
from itertools import chain, repeat
from types import FrameType, ModuleType

import pytest

from ipygpumem.heap.kinds.libraries import VISITS_BUFFER
from ipygpumem.heap.live import garbage, objects_since
from ipygpumem.heap.live.objects_since import ObjectsSince, YoungSaver
from ipygpumem.inventory.remaining.contents import Contents
from tests.hiding import hide_existing_objects


class Made:
    """An object that the collector tracks."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    hide_existing_objects()
    gc.enable()


def made_between(*steps: Callable[[], object]) -> list[Made]:
    """Return objects made before, between and after some steps."""
    made = [Made()]
    for step in steps:
        step()
        made.append(Made())
    return made


def young() -> None:
    gc.collect(1)


STEPS: dict[str, tuple[Callable[[], object], ...]] = {
    "none": (),
    "young": (young, young),
    "all": (gc.collect,),
    "all, twice": (gc.collect, gc.collect),
    "all, then young": (gc.collect, young, young),
    "young, then all": (young, gc.collect),
    "all, young, all, young": (gc.collect, young, gc.collect, young),
    "youngest": (gc.collect, lambda: gc.collect(0), young),
    "automatic ones": (lambda: [[] for _ in range(300_000)],),
}
"""Collections, most of them full or of the young objects, during which new objects are known."""
UNKNOWN: dict[str, tuple[Callable[[], object], ...]] = {
    "all": (gc.callbacks.clear, gc.collect),
    "young after all": (gc.collect, gc.callbacks.clear, young),
}
"""Collections that the saver cannot know of, because the user has removed its callbacks."""
needs_generations = pytest.mark.skipif(
    garbage._YOUNG != (0, 1), reason="this Python has other generations"
)


@pytest.fixture
def saver() -> Iterator[YoungSaver]:
    saver = YoungSaver()
    gc.collect()
    yield saver
    saver.stop()


def started(saver: YoungSaver) -> ObjectsSince:
    """Return a list that begins now."""
    since = ObjectsSince()
    gc.collect(1)
    saver.add(since)
    return since


@needs_generations
@pytest.mark.parametrize("case", STEPS)
def test_new_objects_are_known_after_collections(case: str, saver: YoungSaver) -> None:
    old = [Made() for _ in range(100)]
    since = started(saver)
    made = made_between(*STEPS[case])
    identities = since.identities()
    assert identities is not None
    assert set(map(id, made)) <= identities
    assert identities.isdisjoint(map(id, old))


@needs_generations
@pytest.mark.parametrize("case", UNKNOWN)
def test_new_objects_are_unknown_after_unseen_collections(case: str, saver: YoungSaver) -> None:
    since = started(saver)
    made_between(*UNKNOWN[case])
    assert since.identities() is None


@needs_generations
def test_freezing_makes_new_objects_unknown_or_finds_them(saver: YoungSaver) -> None:
    old = [Made() for _ in range(100)]
    since = started(saver)
    made_between(gc.freeze, gc.unfreeze)
    identities = since.identities()
    assert not identities or identities.isdisjoint(map(id, old))


@needs_generations
def test_a_second_list_keeps_the_places_of_callbacks(saver: YoungSaver) -> None:
    def note(phase: str, _: object) -> None:
        """Do nothing."""

    first = started(saver)
    gc.callbacks.append(note)
    place = gc.callbacks.index(note)

    # The first list is dropped, and the second one begins.
    saver.remove(first)
    second = started(saver)
    gc.collect()
    gc.callbacks.remove(note)
    assert len(gc.callbacks) == place
    assert second.identities() is not None
    assert len(saver.saved) > 0

    # Without lists, nothing is saved.
    saver.remove(second)
    gc.collect()
    assert len(saver.saved) == 0


@needs_generations
def test_a_stopped_saver_leaves_no_callbacks(saver: YoungSaver) -> None:
    callbacks = list(gc.callbacks)
    started(saver)
    assert len(gc.callbacks) == len(callbacks) + 2
    saver.stop()
    assert gc.callbacks == callbacks


@needs_generations
def test_an_inner_list_has_objects_made_since_its_start(saver: YoungSaver) -> None:
    outer = started(saver)
    before = made_between(gc.collect)
    inner = started(saver)
    within = made_between(gc.collect)
    of_outer, of_inner = outer.identities() or set(), inner.identities() or set()
    saver.remove(inner)
    assert {*map(id, before), *map(id, within)} <= of_outer
    assert set(map(id, within)) <= of_inner
    assert of_inner.isdisjoint(map(id, before))
    assert set(map(id, before)) <= (outer.identities() or set())


@needs_generations
def test_objects_are_unknown_beyond_the_allowance(
    saver: YoungSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_since, "_MOST_SAVED", 5_000)
    since = started(saver)
    many = [[] for _ in range(10_000)]
    gc.collect()
    assert len(many) > len(saver.saved)
    assert since.identities() is None
    saver.remove(since)
    again = started(saver)
    gc.collect()
    assert again.identities() is not None


@needs_generations
def test_a_list_that_cannot_save_is_unknown(
    saver: YoungSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[object]:
        raise MemoryError

    since = started(saver)
    sources = saver._sources[2]
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    saver._sources[2] = (fails, *sources)
    gc.collect()
    saver._sources[2] = sources
    other = started(saver)
    gc.collect()
    assert since.identities() is None
    assert other.identities() is not None


@needs_generations
def test_no_python_code_runs_in_a_collection(saver: YoungSaver) -> None:
    called = list[str]()
    since = started(saver)

    def note_calls(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note_calls)
    try:
        gc.collect()
    finally:
        sys.setprofile(None)
    assert called == []
    assert since.identities() is not None


@needs_generations
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no raise in its process")
def test_a_ctrl_c_while_c_code_makes_containers_is_raised(saver: YoungSaver) -> None:
    strike = getattr(ctypes.CDLL(None), "raise")  # calls no handler, as signal.raise_signal does
    since = started(saver)
    like_a_parser = chain(map(strike, [int(signal.SIGINT)]), map(list, repeat((), 100_000)))
    with pytest.raises(KeyboardInterrupt):
        list(like_a_parser)
    assert since.identities() is not None


class Store:
    def __init__(self) -> None:
        self.text = "old"
        self.cache = dict[str, object]()
        self.items = list[object]()


def received(change: str) -> list[tuple[str, list[str], list[object]]]:
    names: dict[str, object] = {
        "a": [1, "x", b"old"],
        "d": {},
        "deep": {"t": [], "u": {"v": []}},
        "s": Store(),
        "long": list("abc") * 100,
        "table": dict.fromkeys(range(200), b""),
        "set": {1},
        "pair": ([], []),
        "Own": type("Own", (), {"text": "old", "__module__": "__main__"}),
        "module": ModuleType("module"),
        "library": module_from_spec(find_spec("json")),  # type: ignore[arg-type]  # it exists
        "function": lambda: None,
    }
    contents = Contents(names)
    exec(change, names, names)
    names.pop("__builtins__")
    return [(row.name, steps_of(row.chain), row.items) for row in contents.received(names)]


def steps_of(chain: Sequence[object]) -> list[str]:
    """Return the types of the objects on a path, without the dict of an instance's attributes: up
    to Python 3.10 it is an object on the path, though no step of the line that is written.
    """
    steps = list[str]()
    before: object = None
    for item in chain:
        is_of_attributes = type(before) is Store and item is vars(before)
        if not is_of_attributes:
            steps.append(type(item).__name__)
        before = item
    return steps


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("a.append(b'new')", [("a", ["list"], [b"new"])]),
        ("a.insert(0, b'new')", [("a", ["list"], [b"new"])]),
        ("a[1] = 'new'; a.append(3)", [("a", ["list"], ["new"])]),
        ("d[1] = b'new'", [("d", ["dict"], [b"new"])]),
        ("set.add(b'new')", [("set", ["set"], [b"new"])]),
        ("long += ['new']", [("long", ["list"], ["new"])]),
        ("long.insert(0, 'new')", []),
        ("long.reverse(); long += ['new']", []),
        ("table[999] = b'new'", [("table", ["dict"], [b"new"])]),
        ("table[0] = table.pop(0)", []),
        ("deep['u']['v'].append(b'new')", [("deep", ["dict", "dict", "list"], [b"new"])]),
        ("s.text = b'new'", [("s", ["Store"], [b"new"])]),
        ("vars(s); s.text = 'new'", [("s", ["Store"], ["new"])]),
        ("vars(s)", []),
        ("s.cache[1] = 'new'", [("s", ["Store", "dict"], ["new"])]),
        ("pair[1].append('new')", [("pair", ["tuple", "list"], ["new"])]),
        ("b = ['new']; c = a; a = b", []),
        ("Own.text = b'new'", [("Own", ["type", "dict"], [b"new"])]),
        ("module.text = b'new'", [("module", ["module", "dict"], [b"new"])]),
        ("library.text = b'new'", [("library", ["module", "dict"], [b"new"])]),
        ("function.text = b'new'", [("function", ["function"], [b"new"])]),
    ],
)
def test_objects_added_to_old_ones_are_found(
    change: str, expected: list[tuple[str, list[str], list[object]]]
) -> None:
    assert received(change) == expected


def test_a_new_object_at_an_old_objects_address_is_new() -> None:
    kept = list[Made]()
    new = Made()
    # as if the old one had died, and this one were made there
    names: dict[str, object] = {
        "kept": kept,
        "old": new,
    }
    contents = Contents(names)
    del names["old"]
    kept.append(new)
    assert list(contents.received(names)) == []
    (row,) = contents.received(names, {id(new)})
    assert row.items == [new]


def test_a_text_in_a_long_list_is_new_if_no_list_is_read_after() -> None:
    def text(number: int) -> str:
        return f"row {number}, " * 50

    rows = list(map(text, range(200)))
    contents = Contents({"rows": rows})
    rows[3] = text(-3)  # a constant would have another holder: this code
    (row,) = contents.received({"rows": rows}, {id(Made)}, {})
    assert (row.name, row.items) == ("", [rows[3]])


def grown(change: str) -> list[tuple[str, list[str], int]]:
    """Return the containers that have grown by 100 KB, with the steps to them and their growth in
    KB.
    """
    names: dict[str, object] = {
        "buffer": bytearray(),
        "filled": bytearray(200_000),
        "numbers": [],
        "table": {},
        "unique": set(),
        "queue": deque(),
        "counter": Counter(),
        "typed": array.array("d"),
        "text": io.StringIO(),
        "bytes_": io.BytesIO(),
        "closed": io.StringIO(),
        "deep": {"t": [bytearray()]},
        "s": Store(),
        "Own": type("Own", (), {"data": bytearray(), "__module__": "__main__"}),
        "bound": list[object]().extend,
    }
    names["closed"].close()  # type: ignore[attr-defined]  # it is a stream
    contents = Contents(names)
    exec(change, names, names)
    names.pop("__builtins__")
    return [
        (row.name, [type(item).__name__ for item in row.chain], row.container.size_bytes // 1000)
        for row in contents.grown_containers(names, 100_000)
    ]


STEPS_TO_ITEMS = ["Store"] if sys.version_info >= (3, 11) else ["Store", "dict"]
KB_800 = pytest.approx(800, rel=0.15)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("buffer.extend(bytes(800_000))", [("buffer", ["bytearray"], 800)]),
        ("filled.extend(bytes(800_000))", [("filled", ["bytearray"], 800)]),
        ("filled[:] = b''; buffer += bytes(90_000)", []),
        ("numbers.extend([7] * 100_000)", [("numbers", ["list"], KB_800)]),
        ("numbers += range(1000, 23_000)", [("numbers", ["list"], KB_800)]),
        (
            "table.update(dict.fromkeys(range(15_000)))",
            [("table", ["dict"], pytest.approx(1000, rel=0.4))],
        ),
        ("unique.update(range(14_000))", [("unique", ["set"], pytest.approx(900, rel=0.2))]),
        ("queue.extend([None] * 100_000)", [("queue", ["deque"], KB_800)]),
        ("counter.update(range(15_000))", [("counter", ["Counter"], pytest.approx(1000, rel=0.4))]),
        ("typed.frombytes(bytes(800_000))", [("typed", ["array"], KB_800)]),
        ("text.write('x' * 800_000)", [("text", ["StringIO"], KB_800)]),
        (
            "bytes_.write(bytes(800_000))",
            [] if VISITS_BUFFER else [("bytes_", ["BytesIO"], KB_800)],
        ),
        ("deep['t'][0].extend(bytes(800_000))", [("deep", ["dict", "list", "bytearray"], 800)]),
        ("s.items += [7] * 100_000", [("s", [*STEPS_TO_ITEMS, "list"], KB_800)]),
        ("Own.data.extend(bytes(800_000))", [("Own", ["type", "dict", "bytearray"], 800)]),
        ("buffer = bytearray(800_000)", []),
        ("pass", []),
    ],
)
def test_old_containers_that_have_grown_are_found(
    change: str, expected: list[tuple[str, list[str], object]]
) -> None:
    assert grown(change) == expected

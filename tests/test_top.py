"""The names that hold the most memory: objects of any kind, what they consist of, and what frees
them.
"""

import collections
import functools
import gc
import mmap
import sqlite3
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy
import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import Share
from ipygpumem.inventory.names import top
from ipygpumem.inventory.names.top import LargestNames, NamedSize
from ipygpumem.report.top import content_of, top_report
from ipygpumem.shell.notebook_inventory import largest_names
from ipygpumem.units import MIB
from tests import hostile
from tests.alone import alone, printed
from tests.process_memory import linux


def take(**names: object) -> dict[str, NamedSize]:
    return {row.name: row for row in top.measure_names(names, {"cpu": 100 * MIB}).names}


def test_names_of_one_object_share_a_row_and_holders_are_named() -> None:
    data = [bytes(MIB)]
    rows = take(
        data=data, box={"data": data, "own": bytes(2 * MIB)}, again=data, number=5, text="short"
    )
    assert list(rows) == ["box", "data"]
    assert rows["data"].same == ("again",)
    assert rows["data"].held_by == ("box",)
    assert rows["data"].remedy == "del data, again"
    assert rows["box"].holds == ("data",)
    # `data` has 1 MiB; `box` has 2 MiB of its own, without those of `data`.
    assert MIB < rows["data"].size_bytes < 1.01 * MIB < rows["box"].size_bytes < 2.01 * MIB
    report = top_report(LargestNames(tuple(rows.values()), {"cpu": 100 * MIB}, 0.0))
    (table,) = report.tables
    assert [row[-1] for row in table.rows] == [
        "del box",
        "del data, again  # also held by box",
    ]


def test_remarks_are_only_about_rows_that_are_shown() -> None:
    shared = NamedSize("shared", "Tensor", {"cpu": 6 * MIB, "cuda:0": 5 * MIB}, notes=("on both",))
    larger = NamedSize("larger", "ndarray", {"cpu": 10 * MIB}, same=("again",), notes=("alone",))
    names = LargestNames((shared, larger), {"cpu": 100 * MIB}, 0.0)
    report = top_report(names, top=1)
    assert [row[0] for row in report.tables[0].rows] == ["10 MiB", "11 MiB"]
    assert "larger: alone" in report.lines
    assert "shared: on both" not in report.lines


def test_an_item_in_two_lists_of_a_name_is_freed_with_it() -> None:
    shared = bytearray(MIB)
    names: dict[str, object] = {"both": [shared, [shared]]}
    del shared
    (row,) = top.measure_names(names, {}, references={id(names["both"]): 0}).names
    assert row.freed_bytes == row.device_bytes


def test_a_function_is_listed_if_it_holds_data() -> None:
    def with_data(data: bytearray = bytearray(MIB)) -> bytearray:  # noqa: B008
        return data

    assert list(take(imported=collections.namedtuple, with_data=with_data)) == ["with_data"]


def test_any_name_is_deleted_by_its_remedy() -> None:
    names: dict[str, object] = {"class": [bytes(MIB)], "a b": [bytes(MIB)], "plain": [bytes(MIB)]}
    for row in take(**names).values():
        exec(row.remedy, names)
    assert names.keys() == {"__builtins__"}


def test_shared_memory_is_freed_by_its_remedy_after_arrays_on_it() -> None:
    numpy: Any = pytest.importorskip("numpy")
    names: dict[str, Any] = {"segment": SharedMemory(create=True, size=MIB)}
    names |= {
        "array": numpy.ndarray(MIB, "u1", names["segment"].buf),
        "box": [SharedMemory(create=True, size=MIB)],
    }
    for segment in (names["segment"], names["box"][0]):
        segment.buf[:] = bytes(MIB)

    # The remedies.
    rows = take(**names)
    assert rows["segment"].remedy == "del array; segment.close(); segment.unlink()"
    assert rows["box"].remedy == "close() and unlink() its shared memory, then del box"
    unlinked = SharedMemory(create=True, size=MIB)
    unlinked.buf[:] = bytes(MIB)
    unlinked.unlink()
    assert take(unlinked=unlinked)["unlinked"].remedy == "del unlinked"

    # They remove the segments.
    left = names["segment"].name
    inside = names["box"][0]
    exec(f"{rows['segment'].remedy}; box[0].close(); box[0].unlink()", names)
    for name in (left, inside.name):
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


def test_a_cached_function_stays_when_its_results_are_freed() -> None:
    names: dict[str, Any] = {"load": functools.lru_cache(bytes)}
    assert len(names["load"](MIB)) == MIB
    assert take(**names)["load"].remedy == "load.cache_clear()"
    exec("load.cache_clear()", names)
    assert take(load=names["load"])["load"].size_bytes < MIB // 10
    by_closure = functools.lru_cache(functools.partial(len, bytes(MIB)))
    assert by_closure() == MIB
    assert take(by_closure=by_closure)["by_closure"].remedy == "del by_closure"


def test_an_error_holds_the_locals_of_its_functions() -> None:
    def fail() -> None:
        big = bytes(MIB)
        raise ValueError(len(big))

    with pytest.raises(ValueError, match="1048576") as caught:
        fail()
    row = take(error=caught.value)["error"]
    assert row.size_bytes == pytest.approx(MIB, rel=0.01)
    assert content_of(row) == "1 variable: big 1 MiB"


def test_a_cache_shows_its_results_and_a_generator_its_locals() -> None:
    @functools.cache
    def cached(size: int) -> bytes:
        return bytes(size)

    def run(big: bytes) -> Iterator[bytes]:
        yield big

    @functools.cache
    def once() -> bytes:
        return bytes(MIB)

    running = run(bytes(MIB))
    next(running)
    results = [cached(MIB), cached(2 * MIB), once()]
    rows = take(cached=cached, once=once, running=running, results=results)
    assert content_of(rows["once"]) == "1 cached result"
    assert rows["cached"].size_bytes == pytest.approx(3 * MIB, rel=0.01)
    assert content_of(rows["cached"]) == "2 cached results"
    assert content_of(rows["running"]) == "1 variable: big 1 MiB"


def test_a_memory_map_counts_its_pages_in_ram() -> None:
    mapped = mmap.mmap(-1, 8 * MIB)
    mapped[: 2 * MIB] = bytes(2 * MIB)
    row = take(mapped=mapped, array=numpy.frombuffer(mapped, "u1"))["mapped"]
    assert row.size_bytes == pytest.approx(2 * MIB, rel=0.01)
    assert row.notes == ("the pages in RAM of a memory map of 8 MiB",)


def test_a_class_of_the_users_is_listed_with_its_attributes() -> None:
    own: Any = type("Own", (), {"table": bytes(MIB), "__module__": "__main__"})
    made: Any = type("Made", (), {"table": bytes(2 * MIB)})  # no module has it
    rows = take(own=own, made=made, of_a_library=NamedSize, instance=own())
    assert list(rows) == ["made", "own"]
    assert rows["own"].parts[0].name == ".table"


def test_the_large_name_among_very_many_is_found() -> None:
    names: dict[str, object] = {f"name_{number}": [number] for number in range(3000)}
    names["name_1500"] = [bytes(MIB)]
    largest = top.measure_names(names, {})
    assert largest.names[0].name == "name_1500"
    assert largest.small_names + len(largest.names) == 3000


LARGEST = LargestNames(
    (
        NamedSize("model", "Net", {"cpu": 10, "cuda:0": 500}),
        NamedSize("frame", "DataFrame", {"cpu": 100}),
        NamedSize("Out[5]", "list", {"cpu": 7}),
    ),
    {"cpu": 1000, "cuda:0": 600},
    0.0,
)


def selected(*arguments: Any, **options: Any) -> list[str]:
    """Return the names of the rows that are selected of LARGEST."""
    return [row.name for row in top.select(LARGEST, *arguments, **options).names]


def test_names_and_sizes_are_selected() -> None:
    assert selected(["Out[[]5]", "Out[5]"]) == ["Out[5]"]
    assert selected(min_bytes=100) == ["model", "frame"]
    assert selected(device="cpu") == ["frame", "model", "Out[5]"]


def test_rows_of_a_device_have_its_bytes_alone() -> None:
    on_card = top.select(LARGEST, device="cuda")
    assert [row.device_bytes for row in on_card.names] == [{"cuda:0": 500}]
    assert on_card.used_bytes == {"cuda:0": 600}


def test_a_record_of_names_is_restored_from_its_dict() -> None:
    assert LargestNames.from_dict(LARGEST.to_dict()) == LARGEST


def test_names_that_are_not_listed_are_counted() -> None:
    headline = "memory by name: 3 names · RAM 117 B of 1000 B · cuda:0 500 B of 600 B"
    assert top_report(LARGEST).headline == headline
    first, rest = top_report(LARGEST, top=1).tables[0].rows
    assert (first[1:4], rest[1:4]) == (("83%", "model", "cuda:0"), ("", "and 3 more", ""))


def test_del_frees_only_objects_without_another_holder(shell: InteractiveShell) -> None:
    shell.run_cell(
        """
        import numpy
        alone = [bytes(2**20)]
        twice = also = bytearray(2**20)
        part = bytes(2**20)
        box = {"part": part, "own": bytes(2**20)}
        array = numpy.zeros(2**17)
        view = array[1:]
        loop = [bytes(2**20)]
        loop.append(loop)
        """
    )
    rows = {row.name: row for row in largest_names(shell).names}
    freed = {name: round((row.freed_bytes or {}).get("cpu", 0) / MIB) for name, row in rows.items()}
    assert freed == {"alone": 1, "twice": 1, "part": 0, "box": 1, "array": 0, "loop": 1}
    assert rows["twice"].remedy == "del twice, also"


def test_a_name_with_too_many_objects_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "Region", functools.partial(Region, most=20_000))
    named = {"rows": [[str(number), [number]] for number in range(50_000)], "text": "x" * MIB}
    largest = top.measure_names(named, {})
    assert {row.name: row.is_at_least for row in largest.names} == {"rows": True, "text": False}
    (table,) = top_report(largest).tables
    assert {row[1]: row[0].startswith("at least ") for row in table.rows} == {
        "rows": True,
        "text": False,
    }
    assert [row.freed_bytes for row in top.measure_names(named, {}, references={}).names] == [
        None,
        None,
    ]


def test_memory_in_no_name_has_a_row_of_its_own() -> None:
    largest = top.measure_names({"rows": [bytes(MIB)]}, {"cpu": 100 * MIB, "cuda:0": 8 * MIB})
    (table,) = top_report(largest).tables
    contents = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))["content"]
    assert [row[0] for row in table.rows] == ["1 MiB", "99 MiB", "8 MiB"]
    assert contents == ("1 bytes", "see %gpumem status", "see %gpumem leaks")
    assert top.select(largest, ["r*"]).unnamed_bytes == {}


def test_free_heap_pages_are_named_in_the_last_row() -> None:
    names = LargestNames((), {"cpu": 100 * MIB}, 0.0, unnamed_bytes={"cpu": 60 * MIB})
    (table,) = top_report(replace(names, free_heap_bytes=40 * MIB)).tables
    (row,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert row["content"] == "40 MiB of free heap pages; see %gpumem status"
    assert row["to free it"] == "%gpumem free"


@linux
@alone  # after thousands of tests, malloc may count more memory in use than its heap has in RAM
def test_del_of_many_objects_leaves_free_heap_pages_in_top() -> None:
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.run_line_magic("load_ext", "ipygpumem")
    # Single texts stay everywhere, because malloc gives the end of its heap back at once.
    shell.run_cell("texts = [str(number) * 200 for number in range(100_000)]")
    shell.run_cell("some = texts[::1000]; del texts")
    names = largest_names(shell)
    # Most of the 100,000 texts, of about 1 kB each.
    assert names.free_heap_bytes > 50 * MIB
    assert names.unnamed_bytes["cpu"] > names.free_heap_bytes


@pytest.mark.parametrize(
    ("kind", "parts", "shown"),
    [
        (
            "columns",
            {"text": 120 * MIB, "number": 8 * MIB, "flag": 3},
            "3 columns: text 120 MiB, number 8 MiB",
        ),
        ("items", {"ndarray": 50}, "7 ndarray"),
        ("items", {"ndarray": 90, "str": 10}, "7 ndarray 90 B, 7 str 10 B"),
        ("keys", {'["a"]': 90, '["b"]': 60}, '2 DataFrame: ["a"] 90 B, ["b"] 60 B'),
        ("attributes", {".data": 90}, ".data 90 B"),
        ("attributes", dict.fromkeys("abcd", 5), "a 5 B, b 5 B, c 5 B, …"),
        ("keys", dict.fromkeys(map(str, range(150)), 5), "150 DataFrame: 0 5 B"),
        ("attributes", {}, ""),
    ],
)
def test_content_is_shown_as_the_user_knows_it(
    kind: str, parts: dict[str, int], shown: str
) -> None:
    shares = tuple(Share(name, kind, "DataFrame", 7, size) for name, size in parts.items())
    row = NamedSize("x", "X", {"cpu": sum(parts.values())}, shares, len(shares))
    assert content_of(row) == shown


def test_attributes_without_own_memory_are_not_listed_as_content() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table texts(text)")
    connection.executemany("insert into texts values(?)", [("x" * 1000,)] * 1000)
    row = take(connection=connection)["connection"]
    assert row.size_bytes > 900_000
    assert content_of(row) == ""


def test_a_hostile_object_runs_no_code_and_the_next_row_is_right() -> None:
    thing = hostile.made(hostile.Slotted, bytes(MIB))
    with hostile.untouched():
        rows = take(
            thing=thing,
            klass=hostile.Hostile,
            box=hostile.made(hostile.Container),
            next=bytes(2 * MIB),
        )
    assert list(rows) == ["next", "thing"]


CYCLES = {
    "an attribute": """
class Big:
    def __init__(self):
        self.data = bytearray(4 << 20)
x = Big()
x.rows = numpy.empty(1, object)
x.rows[0] = x
""",
    "an array in two attributes": """
class Big:
    def __init__(self):
        self.data = bytearray(4 << 20)
x = Big()
x.rows = x.first = numpy.empty(1, object)
x.options = {"rows": x.rows}
x.rows[0] = x
""",
    "an attribute behind a property": """
class Big:
    rows = property(lambda self: 1)
    def __init__(self):
        self.data = bytearray(4 << 20)
x = Big()
vars(x)["rows"] = numpy.empty(1, object)
vars(x)["rows"][0] = x
""",
    "an attribute of a class": """
class x:
    data = bytearray(4 << 20)
    rows = numpy.empty(1, object)
x.rows[0] = x
""",
    "two attributes": """
class Big:
    def __init__(self):
        self.data = bytearray(4 << 20)
x = Big()
x.rows, x.columns = numpy.empty(1, object), numpy.empty((2, 1), object)
x.rows[0] = x.columns[0, 0] = x
""",
    "the array": """
x = numpy.empty((1, 2), object)
x[0, 0] = [x, bytearray(4 << 20)]
""",
}


UNENDED = {
    "a part": """
x.part = Big()
x.part.rows = numpy.empty(1, object)
x.part.rows[0] = x
""",
    "an attribute and a part": """
x.part = Big()
x.rows = x.part.rows = numpy.empty(1, object)
x.rows[0] = x
""",
    "a read-only array": """
x = numpy.empty(2, object)
x[:] = x, bytearray(4 << 20)
x.setflags(write=False)
""",
}
"""Cycles that no line ends."""


@pytest.mark.parametrize("kind", CYCLES)
def test_the_line_ends_a_cycle_through_an_array_before_del(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    loaded.run_cell("import numpy" + CYCLES[kind])
    row = _row_of(loaded, "x")
    assert row is not None
    assert row.freed_bytes in ({}, {"cpu": 0})
    reference = weakref.ref(loaded.user_ns["x"])
    loaded.run_cell("%gpumem why x")
    ending = row.remedy.removesuffix("; del x")
    assert ending in capsys.readouterr().out
    loaded.run_cell(row.remedy)
    gc.collect()
    assert reference() is None


TIMERS = {
    "a thread's timer": "threading.Timer(600, print, [bytearray(4 << 20)])",
    "a task": "asyncio.new_event_loop().create_task(asyncio.sleep(600, bytearray(4 << 20)))",
    "an event loop's timer": "loop.call_later(600, print, bytearray(4 << 20))",
}


@pytest.mark.parametrize("make", TIMERS.values(), ids=TIMERS)
def test_the_line_cancels_a_timer_or_task(loaded: InteractiveShell, make: str) -> None:
    loaded.run_cell("import asyncio, threading; loop = asyncio.new_event_loop()")
    loaded.run_cell(f"""
    x = {make}
    if hasattr(x, 'start'): x.start()
    """)
    row = _row_of(loaded, "x")
    assert row is not None
    assert row.remedy == "x.cancel(); del x"
    loaded.run_cell("x.cancel(); loop.close(); del x, loop")


@pytest.mark.parametrize("kind", UNENDED)
def test_words_end_a_cycle_that_no_line_ends(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    loaded.run_cell("""
    import numpy
    class Big:
        def __init__(self): self.data = bytearray(4 << 20)
    x = Big()
    """)
    loaded.run_cell(UNENDED[kind])
    row = _row_of(loaded, "x")
    assert row is not None
    assert row.remedy == "set the array's elements to None before you delete it"
    loaded.run_cell("%gpumem why x")
    assert "set the array's elements to None before" in capsys.readouterr().out


QUIET = "class Quiet(list):\n    __repr__ = lambda self: 'quiet'"


def test_an_output_is_named_and_freed_by_its_line(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell(
        """
        [bytes(500_000) for _ in range(4)];
        frames = [bytes(400_000)]
        """,
        store_history=True,
    )
    loaded.run_cell(f"{QUIET}\nQuiet(bytes(500_000 + i) for i in range(4))", store_history=True)
    loaded.run_cell(
        "import ipygpumem; rows = {row.name: row for row in "
        "ipygpumem.top(min_bytes='100KiB').names}"
    )

    # The row of an output.
    row = loaded.user_ns["rows"]["Out[2]"]
    assert row.remedy == "%xdel _2"
    assert row.cell == 2
    assert row.parts[0].items == 4

    # The report of it.
    capsys.readouterr()
    loaded.run_cell("%gpumem top -n 1 --min 100KiB")
    shown = capsys.readouterr().out
    assert "Quiet" in shown
    assert "4 bytes" in shown
    assert "%xdel _2" in shown

    # Its line frees it; the output that was not shown has no row.
    loaded.run_cell("%xdel _2")
    loaded.run_cell("found = [row.name for row in ipygpumem.top(min_bytes='100KiB').names]")
    assert loaded.user_ns["found"] == ["frames"]


OTHER_PLACES = """
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt, numpy
for number in range(3):
    plt.figure().gca().imshow(numpy.ones((1000, 1000)))
print("x" * 4_000_000)
def fail():
    local = bytearray(5_000_000)
    1 / 0
"""


@pytest.fixture
def empty_places() -> Iterator[None]:
    """Drop what a test leaves in places that are those of the process."""
    yield
    sys.modules["matplotlib.pyplot"].close("all")
    for name in ("last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


@pytest.mark.usefixtures("empty_places")
@pytest.mark.parametrize(
    ("place", "least_bytes"),
    [("open figures", 3 * 8_000_000), ("printed output", 4_000_000), ("last error", 5_000_000)],
)
def test_a_place_without_a_name_has_a_row_and_its_line_frees_it(
    loaded: InteractiveShell, place: str, least_bytes: int
) -> None:
    history = loaded.history_manager
    if place == "printed output" and not hasattr(history, "outputs"):
        pytest.skip("this IPython keeps no printed output")
    loaded.run_cell(OTHER_PLACES)
    loaded.run_cell("fail()")
    row = _row_of(loaded, place)
    assert row is not None
    # What the cells have put there, and little more.
    assert least_bytes < row.size_bytes < 1.5 * least_bytes
    assert row.freed_bytes is None
    loaded.run_cell(row.remedy)
    after = _row_of(loaded, place)
    assert after is None or after.size_bytes < least_bytes / 10


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (
            """
            import contextvars
            contextvars.ContextVar('v').set(bytes(10 ** 7));
            """,
            "context variable v",
        ),
        (
            """
            import contextvars
            v = contextvars.ContextVar('w')
            v.set(bytes(10 ** 7));
            """,
            "v.get()",
        ),
    ],
    ids=["without a name", "of a name"],
)
def test_a_context_variable_has_a_name_and_a_line(
    loaded: InteractiveShell, code: str, name: str
) -> None:
    loaded.run_cell(code)
    row = _row_of(loaded, name)
    assert row is not None
    loaded.run_cell(row.remedy)
    assert _row_of(loaded, name) is None


def _row_of(shell: InteractiveShell, name: str) -> NamedSize | None:
    return next((row for row in largest_names(shell).names if row.name == name), None)


@pytest.mark.usefixtures("empty_places")
def test_a_named_figure_counts_under_its_name(loaded: InteractiveShell) -> None:
    loaded.run_cell(OTHER_PLACES + "figure = plt.gcf()")
    rows = {row.name: row.size_bytes for row in largest_names(loaded).names}
    # One of three figures, each with an array of 8 MB, has a name.
    assert rows["figure"] > 8_000_000
    assert 2 * 8_000_000 < rows["open figures"] < 3 * 8_000_000


def test_a_variable_named_underscore_is_listed(loaded: InteractiveShell) -> None:
    look = "rows = {row.name: row for row in ipygpumem.top(min_bytes='100KiB').names}"
    loaded.run_cell(f"import ipygpumem\n{QUIET}\nQuiet([bytes(400_000)])", store_history=True)
    loaded.run_cell(look)
    assert list(loaded.user_ns["rows"]) == ["Out[1]"]  # ``_`` is IPython's
    loaded.run_cell("""
    _ = [bytes(400_000) for _ in range(2)]
    cache = list(_)
    """)
    loaded.run_cell(look)
    assert loaded.user_ns["rows"]["cache"].held_by == ("_",)


def test_a_displayed_name_is_freed_by_xdel(loaded: InteractiveShell) -> None:
    loaded.run_cell(
        """
        frame = [bytes(400_000)]
        number = 1
        """,
        store_history=True,
    )
    loaded.run_cell(f"{QUIET}\nframe = Quiet(frame)\nframe", store_history=True)
    loaded.run_cell("import ipygpumem; rows = ipygpumem.top('frame').names")
    (row,) = loaded.user_ns["rows"]
    assert (row.same, row.remedy) == (("Out[2]",), "%xdel frame")
    loaded.run_cell(row.remedy)
    loaded.run_cell("rows = ipygpumem.top(min_bytes='100KiB').names")
    assert loaded.user_ns["rows"] == ()


def test_a_line_for_a_displayed_name_names_its_other_holders(loaded: InteractiveShell) -> None:
    loaded.run_cell(f"{QUIET}\nframe = Quiet([bytes(400_000)])\nframe", store_history=True)
    loaded.run_cell("other = [frame]; import ipygpumem; largest = ipygpumem.top('frame')")
    report = top_report(loaded.user_ns["largest"])
    line = report.tables[0].rows[0][-1]
    assert line.endswith("  # also held by other")
    assert loaded.run_cell(line).success
    assert "frame" not in loaded.user_ns


def test_a_displayed_part_of_a_name_has_no_row_of_its_own(loaded: InteractiveShell) -> None:
    loaded.run_cell(f"{QUIET}\nsteps = [Quiet([bytes(400_000)]) for _ in range(2)]\nkept = 1")
    loaded.run_cell("steps[0]", store_history=True)
    loaded.run_cell("(kept, Quiet([bytes(400_000), steps[0]]))[1]", store_history=True)
    rows = {row.name: row for row in largest_names(loaded).names}
    # Two objects of 400 kB; Out keeps one of them.
    assert rows["steps"].size_bytes > 800_000
    assert rows["steps"].held_by == ("Out[1]", "Out[2]")
    assert rows["steps"].freed_bytes is not None
    assert 400_000 < rows["steps"].freed_bytes["cpu"] < 500_000
    assert "Out[1]" not in rows
    assert 400_000 < rows["Out[2]"].size_bytes < 500_000  # the other part is that of the name
    loaded.run_cell("%xdel steps")
    assert {row.name: row for row in largest_names(loaded).names}["Out[1]"].size_bytes > 400_000


def test_data_of_a_run_script_does_not_count_for_its_functions(
    loaded: InteractiveShell, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"data = bytes({9 * MIB})\n\n\ndef use():\n    return len(data)\n")
    try:
        loaded.run_line_magic("run", str(script))
        del loaded.user_ns["data"]
        row = _row_of(loaded, "use")
        assert row is None or row.size_bytes < MIB  # deleting it would not free the data
    finally:
        loaded.user_ns.pop("use", None)
        loaded.clear_main_mod_cache()


def test_a_script_needs_neither_ipython_nor_numpy() -> None:
    code = """
import sys, ipygpumem
text = "x" * 1_000_000
def work():
    local = [bytes(2_000_000)]
    return ipygpumem.top(min_bytes="500KiB")
print([(row.name, row.type_name) for row in work().names], {"IPython", "numpy", "torch"} & set(sys.modules))
"""  # noqa: E501
    assert printed("-c", code).strip() == "[('local', 'list'), ('text', 'str')] set()"


def test_a_list_in_a_shared_dict_is_not_part_of_the_outer_list() -> None:
    outer = [{"inner": [bytes(MIB)]}]
    group = outer[0]
    named: dict[str, object] = {"outer": outer}
    del outer
    (row,) = top.measure_names(named, {}, references={}).names
    assert (row.freed_bytes or {})["cpu"] < 10_000 < MIB < row.size_bytes
    del group
    (row,) = top.measure_names(named, {}, references={}).names
    assert (row.freed_bytes or {})["cpu"] > MIB

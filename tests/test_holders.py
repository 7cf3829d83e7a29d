"""``%gpumem why`` names every holder, in a kernel of its own."""

import re
from dataclasses import replace

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.inventory.names.ownership import HeldPart, Ownership
from ipygpumem.records import ReferencePath
from ipygpumem.report.why import why_report
from tests.alone import alone
from tests.kernel_records import READ_WHY, lines_by_holder, number_alive, why_record
from tests.process_memory import linux
from tests.steps import experiment, run_cells, tidied_kernel

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


def test_a_dict_holds_its_text_keys(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        table = {str(number) * 20: number for number in range(50_000)}
        keys = list(table)
        """,
    )
    answer = why_record(kernel, "keys")
    ((path, line),) = lines_by_holder(answer).items()
    assert path == "notebook variable table.keys()"
    assert re.fullmatch(r"del table  # also drops [\d.]+ MiB of other data", line)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param("collections.OrderedDict((key, 0) for key in texts)", id="an OrderedDict"),
        pytest.param("collections.defaultdict(int, dict.fromkeys(texts, 0))", id="a defaultdict"),
        pytest.param("collections.Counter(texts)", id="a Counter"),
        pytest.param("dict.fromkeys(texts)", id="a dict"),
        pytest.param("types.MappingProxyType(dict.fromkeys(texts))", id="a mapping proxy"),
        pytest.param("Table(dict.fromkeys(texts))", id="a subclass"),
    ],
)
def test_keys_of_every_dict_are_held_by_it(kernel: Kernel, make: str) -> None:
    run_cells(
        kernel,
        f"""
        import collections, types
        class Table(dict): pass
        texts = [str(number) * 20 for number in range(20_000)]
        table = {make}
        """,
    )
    paths = list(lines_by_holder(why_record(kernel, "texts")))
    assert len(paths) == 1
    assert paths[0].startswith("notebook variable table")


@linux
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            "collections.OrderedDict((str(n) * 20, [n]) for n in range(20_000))",
            id="texts in an OrderedDict",
        ),
        pytest.param(
            "collections.OrderedDict((n + 1000, [n]) for n in range(20_000))",
            id="numbers in an OrderedDict",
        ),
        pytest.param(
            "collections.OrderedDict((str(n) * 9, n) for n in range(60_000))", id="short texts"
        ),
        pytest.param(
            "collections.OrderedDict((n + 1000, n) for n in range(60_000))", id="numbers alone"
        ),
        pytest.param("Ordered((str(n) * 20, [n]) for n in range(20_000))", id="a subclass"),
        pytest.param("collections.OrderedDict([('x' * 8_000_000, 1)])", id="a long text"),
        pytest.param(
            "collections.UserDict("
            "collections.OrderedDict((str(n) * 20, n) for n in range(20_000)))",
            id="a UserDict",
        ),
        pytest.param(
            "collections.Counter({str(n) * 20: n for n in range(20_000)})", id="a Counter"
        ),
    ],
)
def test_del_frees_a_dict_with_its_keys(kernel: Kernel, make: str) -> None:
    run_cells(
        kernel,
        f"""
        import collections
        class Ordered(collections.OrderedDict): pass
        table = {make}
        """,
    )
    answer = why_record(kernel, "table")
    assert lines_by_holder(answer) == {}
    # Nearly all of its keys and values.
    assert sum(answer["freed_bytes"].values()) >= 0.98 * sum(answer["device_bytes"].values())


_SHARED_DATABASE = """
import sqlite3
def connect():
    return sqlite3.connect("file:shared?mode=memory&cache=shared", uri=True)
def fill(connection):
    connection.execute("create table if not exists texts (text)")
    connection.executemany("insert into texts values (?)", [("y" * 1000,)] * 20_000)
    connection.commit()
"""


def test_connections_with_a_shared_cache_are_its_joint_holders(kernel: Kernel) -> None:
    run_cells(kernel, _SHARED_DATABASE, "first = connect(); second = connect(); fill(first)")
    answer = why_record(kernel, "first")
    # 20,000 texts of 1,000 bytes.
    assert sum(answer["device_bytes"].values()) > 19 * MIB
    assert sum(answer["freed_bytes"].values()) < MIB
    assert lines_by_holder(answer) == {"notebook variable second": "del second"}
    run_cells(kernel, "second.close(); del second")
    answer = why_record(kernel, "first")
    assert sum(answer["freed_bytes"].values()) > 19 * MIB
    run_cells(kernel, "first.close(); del first")


def test_three_connections_of_one_cache_hold_it(kernel: Kernel) -> None:
    run_cells(kernel, _SHARED_DATABASE, "first = connect(); fill(first)")
    run_cells(kernel, "several = [connect(), connect()]")
    assert set(lines_by_holder(why_record(kernel, "first")).values()) == {"del several"}
    run_cells(kernel, "for one in [first, *several]: one.close()", "del first, several, one")


def test_connections_of_two_databases_are_apart(kernel: Kernel) -> None:
    run_cells(
        kernel,
        _SHARED_DATABASE,
        "first = connect(); second = sqlite3.connect(':memory:'); fill(first); fill(second)",
    )
    for name in ("first", "second"):
        answer = why_record(kernel, name)
        assert sum(answer["freed_bytes"].values()) > 19 * MIB
        assert lines_by_holder(answer) == {}


def test_a_widget_is_closed_by_its_name(kernel: Kernel) -> None:
    run_cells(
        kernel,
        "from tests.stand_ins import install; install('ipywidgets')",
        """
        import ipywidgets, weakref
        import numpy as np
        w = ipywidgets.Image(value=np.ones(1 << 20))
        watched = weakref.ref(w)
        """,
    )
    ((path, advice),) = lines_by_holder(why_record(kernel, "w")).items()
    assert path.startswith("the registry of widgets, Image ")
    assert advice == "w.close(); del w"
    run_cells(kernel, advice, "assert watched() is None")


def test_a_reference_that_a_thread_has_removed_counts_once(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        x = [bytearray(8 << 20)]
        kept = {"a": x}
        from ipygpumem.heap.holders.chains import HolderChains
        real = HolderChains._number_of_references
        HolderChains._number_of_references = lambda *arguments: 0
        """,
    )
    line_by_path = lines_by_holder(why_record(kernel, "x"))
    run_cells(kernel, "HolderChains._number_of_references = real; del kept, x")
    assert line_by_path == {'notebook variable kept["a"]': 'del kept["a"]'}


def owned(*held: HeldPart) -> Ownership:
    """Return the record of an object of 16 MiB with some holders."""
    return Ownership("data", True, "list", {"cpu": 16 * MIB}, {"cpu": 0}, (), held)


def part(name: str, size_bytes: int, shared_bytes: int) -> HeldPart:
    """Return a holder that adds some bytes to those that earlier ones hold, too."""
    holder = ReferencePath(f"notebook variable {name}", f"del {name}")
    return HeldPart(holder, 1, {"cpu": size_bytes}, shared_bytes > 0, shared_bytes)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["model"], "model shares parts of it"),
        (["model", "optimizer"], "model, optimizer share parts of it"),
        (["model", "optimizer", "a", "b"], "model, optimizer and 2 more share parts of it"),
    ],
)
def test_holders_of_parts_stand_in_one_line(names: list[str], line: str) -> None:
    whole = part("whole", 16 * MIB, 0)
    report = why_report(owned(whole, *(part(name, 0, 4 * MIB) for name in names)))
    assert report.lines[0] == line
    assert [row[-1] for row in report.tables[0].rows] == ["del whole"]


def test_holders_of_parts_are_named_shortly() -> None:
    paths = {
        "notebook variable ax.callback: bound method delaxes, module a, and 29 more": "del ax",
        "notebook variable ax.patch": "del ax",
        "module matplotlib.cm, global viridis.colors": "",
        "module pathlib, global _cache": "",
        "matplotlib figure 2": "plt.close(2)",
    }
    shared = []
    for path, advice in paths.items():
        shared.append(HeldPart(ReferencePath(path, advice), 1, {"cpu": 0}, True, 4 * MIB))
    report = why_report(owned(part("whole", 16 * MIB, 0), *shared[:4]))
    assert report.lines[0] == "ax.callback, ax.patch and 1 more share parts of it"
    report = why_report(owned(part("whole", 16 * MIB, 0), *shared[2:]))
    assert report.lines[0] == "matplotlib figure 2, libraries share parts of it"
    report = why_report(owned(part("whole", 16 * MIB, 0), *shared[2:4]))
    assert report.lines[0] == "libraries share parts of it"


def test_an_object_that_survives_frees_no_unknown_memory() -> None:
    held = replace(owned(part("whole", 16 * MIB, 0)), is_at_least=True)
    assert why_report(held).headline.endswith("del data frees 0 B")
    partly = replace(held, freed_bytes={"cpu": MIB})
    assert why_report(partly).headline.endswith("del data frees at least 1 MiB")


@alone
def test_no_line_deletes_a_name_of_a_library() -> None:
    pandas = pytest.importorskip("pandas")
    texts = [f"text {number}" * 20 for number in range(200)]
    first = pandas.DataFrame({"text": pandas.Series(texts, dtype=object)})
    second = pandas.DataFrame(
        {"text": first["text"], "more": pandas.Series([f"{text}." for text in texts])}
    )
    del texts
    ownership = ipygpumem.why(second)
    assert [
        part.holder.advice for part in ownership.held if "del numpy" in part.holder.advice
    ] == []
    # Not a row for each text.
    assert len(ownership.held) < 5


def test_small_parts_of_an_object_are_not_listed() -> None:
    parts = (("._mgr", 16 * MIB - 240), ("._flags", 176), ("._attrs", 64))
    ownership = replace(owned(), parts=parts)
    (line,) = why_report(ownership).lines
    assert line == "consists of ._mgr 16 MiB"


def test_every_holder_of_the_whole_has_a_row() -> None:
    report = why_report(owned(part("whole", 16 * MIB, 0), part("again", 0, 16 * MIB)))
    assert [row[-1] for row in report.tables[0].rows] == ["del whole", "del again"]
    assert not any("parts of it" in line for line in report.lines)


IN_ONE_VARIABLE = {
    "attributes": (
        """
        d.a, d.b = x
        d.old = old
        """,
        "d.b = None; d.a = None",
    ),
    "a list and a dict": (
        """
        d.items = [old, *x[:3]]
        d.table = {key: x[key] for key in (3, 4)}
        """,
        "del d.items[1:]; d.table.clear()",
    ),
    "twenty keys": ("d.table = {f'k{key}': x[key] for key in range(20)}", "d.table.clear()"),
    "twenty attributes": (
        "[setattr(d, f'a{key}', x[key]) for key in range(20)];",
        "remove them from there",
    ),
    "tuples": (
        """
        d.pairs = [(0, one) for one in x]
        d.pairs.append(old)
        """,
        "del d.pairs[0:2]",
    ),
    "default arguments": (
        """
        def f(a=x[0], *, b=x[1]): pass
        d.call = f
        del f
        d.x = x
        """,
        "d.x = None; d.call = None",
    ),
}
"""Code by which a variable ``d`` holds the arrays in ``x``, with the line that frees them."""


@pytest.mark.parametrize("case", IN_ONE_VARIABLE)
def test_one_line_removes_objects_from_all_places_of_a_variable(kernel: Kernel, case: str) -> None:
    code, line = IN_ONE_VARIABLE[case]
    count = {"twenty keys": 20, "twenty attributes": 20, "a list and a dict": 5}.get(case, 2)
    run_cells(
        kernel,
        f"""
        import gc, weakref, numpy as np
        class D: pass
        d, old, x = D(), np.ones(2**16), [np.ones(2**16) for _ in range({count})]
        watched = [*map(weakref.ref, [old, *x])]
        """,
        code,
    )
    assert list(lines_by_holder(why_record(kernel, "x")).values()) == [line]
    if not line.startswith("remove"):
        run_cells(kernel, line, "del x")
        assert number_alive(kernel) == 1
        assert kernel.value("watched[0]() is old")


def test_no_line_names_data_that_another_holder_keeps(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        import numpy as np
        class App: pass
        app, x = App(), [np.ones(2**18)]
        pair = (x, np.ones(2**18))
        app.first = app.second = pair
        rows = [pair]
        del pair
        """,
    )
    lines = lines_by_holder(why_record(kernel, "x"))
    assert lines
    assert not any("also drops" in line for line in lines.values()), lines
    run_cells(kernel, "del rows[0]")
    assert lines_by_holder(why_record(kernel, "x")).popitem()[1] == (
        "app.first = None; app.second = None  # also drops 2 MiB of other data"
    )


def test_each_attribute_that_leads_to_an_object_has_a_row(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        import weakref, numpy as np
        class App: pass
        app, x = App(), [np.ones(1 << 18)]
        app.rows, app.pair, ref = x, (x, 1), weakref.ref(x[0])
        """,
    )
    (report,) = kernel.run("%gpumem why x").reports("why")
    lines = ["app.rows = None", "app.pair = None"]
    assert all(line in report for line in lines), report
    run_cells(kernel, *lines, "del x")
    assert kernel.value("ref() is None") is True


def test_a_key_with_thousands_of_digits_is_named_by_its_type(kernel: Kernel) -> None:
    run_cells(kernel, "table = {}")
    run_cells(kernel, experiment("table[10 ** 5000] = bytearray(8 << 20)"))
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert "notebook variable table (under a key of type int)" in leaks
    run_cells(kernel, "x = table[10 ** 5000]")
    assert "notebook variable table (under a key of type int)" in lines_by_holder(
        why_record(kernel, "x")
    )


_TIMERS = """
import asyncio, threading
class Box: pass
def work(data): pass
def timer(kind, data):
    if kind == "thread":
        made = threading.Timer(600, work, [data])
        made.daemon = True
        made.start()
        return made
    return asyncio.get_running_loop().call_later(600, work, data)
"""


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_timer_with_a_name_is_cancelled_by_it(kernel: Kernel, kind: str) -> None:
    run_cells(kernel, _TIMERS)
    run_cells(kernel, f"t = timer({kind!r}, bytearray(8 << 20))")
    assert set(lines_by_holder(why_record(kernel, "t")).values()) == {"t.cancel(); del t"}
    run_cells(kernel, f"t.cancel(); x = bytearray(8 << 20); t = timer({kind!r}, x)")
    lines = lines_by_holder(why_record(kernel, "x"))
    assert "t.cancel(); del t" in lines.values()
    assert "del t" not in lines.values()
    run_cells(kernel, "t.cancel(); del t, x")


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_timer_in_an_attribute_is_cancelled(kernel: Kernel, kind: str) -> None:
    run_cells(kernel, _TIMERS)
    run_cells(kernel, f"x = bytearray(8 << 20); box = Box(); box.t = timer({kind!r}, x)")
    lines = lines_by_holder(why_record(kernel, "x"))
    assert "box.t.cancel(); box.t = None" in lines.values()
    run_cells(kernel, "box.t.cancel(); del box, x")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(
            "pair = x, rest()", "del pair  # also drops 4 MiB of other data", id="a tuple"
        ),
        pytest.param(
            "d = {'t': (rest(), x)}",
            'del d["t"]  # also drops 4 MiB of other data',
            id="a tuple in a dict",
        ),
        pytest.param(
            "n = Node((x, rest()))",
            "n.data = None  # also drops 4 MiB of other data",
            id="a tuple of an object",
        ),
        pytest.param(
            "def f(a=x, b=rest()): pass",
            "del f  # also drops 4 MiB of other data",
            id="default arguments",
        ),
        pytest.param(
            """
            n = Node(Node((x, x)))
            n.rest = rest()
            """,
            "n.data.data = None",
            id="an object behind another",
        ),
        pytest.param(
            "pairs = (x, [x, rest()])",
            "del pairs  # also drops 4 MiB of other data",
            id="a list in a tuple",
        ),
        pytest.param(
            """
            named = rest()
            pair = x, named
            """,
            "del pair",
            id="data with a name",
        ),
        pytest.param("pair = x, x", "del pair", id="the same object twice"),
        pytest.param("rows = [x, rest()]", "del rows[0]", id="a list"),
        pytest.param("rows = (x,) * 100_000", "del rows", id="a long tuple"),
        pytest.param("rows = [x] * 100_000", "del rows", id="a long list"),
    ],
)
def test_a_line_names_other_data_that_it_drops(kernel: Kernel, code: str, line: str) -> None:
    run_cells(
        kernel,
        """
        import numpy as np
        class Node:
            def __init__(self, data):
                self.data = data
        def rest():
            return np.ones(2**19)
        x = np.ones(2**20)
        """,
        code,
    )
    assert list(lines_by_holder(why_record(kernel, "x")).values()) == [line]


def test_no_line_frees_all_if_a_holder_has_more_references(kernel: Kernel) -> None:
    run_cells(
        kernel, "import numpy as np; p = np.ones(2**20); views = {'a': p, 'b': p[1:], 'n': 1}"
    )
    answer = why_record(kernel, "p")
    assert lines_by_holder(answer) == {
        'notebook variable views["a"], and 1 more there': 'del views["a"]'
    }
    (report,) = run_cells(kernel, "%gpumem why p").reports()
    assert "in one line" not in report


def test_no_line_changes_the_lists_of_threads(kernel: Kernel) -> None:
    run_cells(
        kernel,
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        go_on = threading.Event()
        def work(data): go_on.wait()
        t = threading.Thread(target=work, args=[bytearray(8 << 20)], name="worker")
        t.start()
        pool = ThreadPoolExecutor(1)
        futures = [pool.submit(work, bytearray(8 << 20)) for _ in range(2)]
        """,
    )
    try:
        of_thread, of_pool = (
            lines_by_holder(why_record(kernel, "t")),
            lines_by_holder(why_record(kernel, "pool")),
        )
        assert of_thread['thread "worker"'] == "let it end, then join() it"
        assert "remove it from there" not in {*of_thread.values(), *of_pool.values()}
    finally:
        run_cells(kernel, "go_on.set(); t.join(); pool.shutdown()")

"""``%gpumem why`` names every holder, in a kernel of its own."""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.inventory.names.ownership import HeldPart, Ownership
from ipygpumem.records import ReferencePath
from ipygpumem.report.why import why_report
from tests.alone import alone
from tests.kernel_records import ASK, LEFT, alive, holders, left, left_by_experiment, why
from tests.process_memory import linux
from tests.steps import SharedKernel, kernel_with, needs, pairs, tidied_kernel, works

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", ASK, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


def test_a_dict_holds_its_text_keys(kernel: Kernel) -> None:
    works(
        kernel,
        """
        table = {str(number) * 20: number for number in range(50_000)}
        keys = list(table)
        """,
    )
    answer = why(kernel, "keys")
    ((path, line),) = holders(answer).items()
    assert path == "notebook variable table.keys()"
    assert re.fullmatch(r"del table  # also drops [\d.]+ MiB of other data", line)


@pytest.mark.parametrize(
    "make",
    [
        "collections.OrderedDict((key, 0) for key in texts)",
        "collections.defaultdict(int, dict.fromkeys(texts, 0))",
        "collections.Counter(texts)",
        "dict.fromkeys(texts)",
        "types.MappingProxyType(dict.fromkeys(texts))",
        "Table(dict.fromkeys(texts))",
    ],
)
def test_keys_of_every_dict_are_held_by_it(kernel: Kernel, make: str) -> None:
    works(
        kernel,
        f"""
        import collections, types
        class Table(dict): pass
        texts = [str(number) * 20 for number in range(20_000)]
        table = {make}
        """,
    )
    paths = list(holders(why(kernel, "texts")))
    assert len(paths) == 1
    assert paths[0].startswith("notebook variable table")


@linux
@pytest.mark.parametrize(
    "make",
    [
        "collections.OrderedDict((str(n) * 20, [n]) for n in range(20_000))",
        "collections.OrderedDict((n + 1000, [n]) for n in range(20_000))",
        "collections.OrderedDict((str(n) * 9, n) for n in range(60_000))",
        "collections.OrderedDict((n + 1000, n) for n in range(60_000))",
        "Ordered((str(n) * 20, [n]) for n in range(20_000))",
        "collections.OrderedDict([('x' * 8_000_000, 1)])",
        "collections.UserDict(collections.OrderedDict((str(n) * 20, n) for n in range(20_000)))",
        "collections.Counter({str(n) * 20: n for n in range(20_000)})",
    ],
)
def test_del_frees_a_dict_with_its_keys(kernel: Kernel, make: str) -> None:
    works(
        kernel,
        f"""
        import collections
        class Ordered(collections.OrderedDict): pass
        table = {make}
        """,
    )
    answer = why(kernel, "table")
    assert holders(answer) == {}
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
    works(kernel, _SHARED_DATABASE, "first = connect(); second = connect(); fill(first)")
    answer = why(kernel, "first")
    assert sum(answer["device_bytes"].values()) > 19 * MIB
    assert sum(answer["freed_bytes"].values()) < MIB
    assert holders(answer) == {"notebook variable second": "del second"}
    works(kernel, "second.close(); del second")
    answer = why(kernel, "first")
    assert sum(answer["freed_bytes"].values()) > 19 * MIB
    works(kernel, "first.close(); del first")


def test_three_connections_of_one_cache_hold_it(kernel: Kernel) -> None:
    works(kernel, _SHARED_DATABASE, "first = connect(); fill(first)")
    works(kernel, "several = [connect(), connect()]")
    assert set(holders(why(kernel, "first")).values()) == {"del several"}
    works(kernel, "for one in [first, *several]: one.close()", "del first, several, one")


def test_connections_of_two_databases_are_apart(kernel: Kernel) -> None:
    works(
        kernel,
        _SHARED_DATABASE,
        "first = connect(); second = sqlite3.connect(':memory:'); fill(first); fill(second)",
    )
    for name in ("first", "second"):
        answer = why(kernel, name)
        assert sum(answer["freed_bytes"].values()) > 19 * MIB
        assert holders(answer) == {}


def test_a_widget_is_closed_by_its_name(kernel: Kernel) -> None:
    works(
        kernel,
        "from tests.stand_ins import install; install('ipywidgets')",
        """
        import ipywidgets, weakref
        import numpy as np
        w = ipywidgets.Image(value=np.ones(1 << 20))
        watched = weakref.ref(w)
        """,
    )
    ((path, advice),) = holders(why(kernel, "w")).items()
    assert path.startswith("the registry of widgets, Image ")
    assert advice == "w.close(); del w"
    works(kernel, advice, "assert watched() is None")


def test_a_reference_that_a_thread_has_removed_counts_once(kernel: Kernel) -> None:
    works(
        kernel,
        """
        x = [bytearray(8 << 20)]
        kept = {"a": x}
        from ipygpumem.heap.holders.chains import HolderChains
        real = HolderChains._number_of_references
        HolderChains._number_of_references = lambda *arguments: 0
        """,
    )
    line_by_path = holders(why(kernel, "x"))
    works(kernel, "HolderChains._number_of_references = real; del kept, x")
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


# -- lines that free many objects -----------------------------------------------------------------

IN_ONE_VARIABLE = {
    "attributes": ("d.a, d.b = x; d.old = old", "d.b = None; d.a = None"),
    "a list and a dict": (
        "d.items = [old, *x[:3]]; d.table = {key: x[key] for key in (3, 4)}",
        "del d.items[1:]; d.table.clear()",
    ),
    "twenty keys": ("d.table = {f'k{key}': x[key] for key in range(20)}", "d.table.clear()"),
    "twenty attributes": (
        "[setattr(d, f'a{key}', x[key]) for key in range(20)];",
        "remove them from there",
    ),
    "tuples": ("d.pairs = [(0, one) for one in x]; d.pairs.append(old)", "del d.pairs[0:2]"),
    "default arguments": (
        "def f(a=x[0], *, b=x[1]): pass\nd.call = f; del f; d.x = x",
        "d.x = None; d.call = None",
    ),
}
"""Code by which a variable ``d`` holds the arrays in ``x``, with the line that frees them."""


@pytest.mark.parametrize("case", IN_ONE_VARIABLE)
def test_one_line_removes_objects_from_all_places_of_a_variable(kernel: Kernel, case: str) -> None:
    code, line = IN_ONE_VARIABLE[case]
    count = {"twenty keys": 20, "twenty attributes": 20, "a list and a dict": 5}.get(case, 2)
    works(
        kernel,
        f"""
        import gc, weakref, numpy as np
        class D: pass
        d, old, x = D(), np.ones(2**16), [np.ones(2**16) for _ in range({count})]
        watched = [*map(weakref.ref, [old, *x])]
        """,
        code,
    )
    assert list(holders(why(kernel, "x")).values()) == [line]
    if not line.startswith("remove"):
        works(kernel, line, "del x")
        assert alive(kernel) == 1
        assert kernel.value("watched[0]() is old")


_MANY = 200
"""Number of arrays of 80 kB: too small for rows of their own."""


def parts_at_the_end(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last experiment."""
    return dict(kernel.value("app.experiments.finished[-1].survivors[0].parts"))


def parts_later(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last ``left``."""
    return dict(kernel.value("last_rows[0].parts"))


@linux
@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        (
            "outer = {'tasks': []}",
            "outer['tasks'] += [asyncio.create_task(wait(array())) for _ in range(MANY)]",
            'while outer["tasks"]: outer["tasks"].pop().cancel()',
        ),
        (
            "outer = {}",
            "outer.update((n, asyncio.create_task(wait(array()))) for n in range(MANY))",
            "while outer: outer.popitem()[1].cancel()",
        ),
        (
            "outer = set()",
            "outer.update(asyncio.create_task(wait(array())) for _ in range(MANY))",
            "while outer: outer.pop().cancel()",
        ),
        (
            "outer = [asyncio.create_task(asyncio.sleep(1000))]",
            "outer += [asyncio.create_task(wait(array())) for _ in range(MANY)]",
            f"for _position in range({_MANY}, 0, -1): outer.pop(_position).cancel(); del _position",
        ),
        (
            "outer = []",
            "outer += [asyncio.create_task(give()) for _ in range(MANY)]",
            "outer.clear()",
        ),
        (
            "outer = []",
            """
            outer += [asyncio.get_running_loop().create_future() for _ in range(MANY)]
            for future in outer: future.set_result(array())
            """,
            "outer.clear()",
        ),
        (
            "outer = {'done': [0]}; pool = concurrent.futures.ThreadPoolExecutor(1)",
            """
            outer["done"] += [pool.submit(array) for _ in range(MANY)]
            concurrent.futures.wait(outer["done"][1:]);
            """,
            'del outer["done"][1:]',
        ),
    ],
    ids=["pending", "dict", "set", "next to an older one", "done", "futures", "pool"],
)
def test_one_line_frees_a_container_of_tasks(
    kernel: Kernel, setup: str, code: str, line: str
) -> None:
    works(kernel, LEFT, setup)
    code = "\n".join(part.strip() for part in code.replace("MANY", str(_MANY)).splitlines())
    works(kernel, f"%%experiment e\n{code}\nawait asyncio.sleep(0)\nawait asyncio.sleep(0)")
    assert alive(kernel) == _MANY
    rows = left(kernel)
    assert [advice for _, _, advice in rows] == [line]
    assert sum(size for size, _, _ in rows) >= _MANY * 80_000
    works(kernel, line)
    assert alive(kernel) == 0
    assert left(kernel) == []


@linux
@pytest.mark.parametrize("number", [1, _MANY])
def test_tasks_that_only_the_loop_keeps_are_cancelled(kernel: Kernel, number: int) -> None:
    works(
        kernel,
        LEFT,
        """
        import asyncio
        async def other():
            await asyncio.sleep(1000)
        kept = asyncio.create_task(other())
        def start(number):
            for _ in range(number):
                made = np.ones(40_000_000 // 8 // number)
                watched.append(weakref.ref(made))
                asyncio.create_task(wait(made))
        """,
        f"%%experiment e\nstart({number})\nawait asyncio.sleep(0)",
    )
    assert alive(kernel) == number
    for rows in (left_by_experiment(kernel), left(kernel)):
        assert [path.startswith("the event loop") for _, path, _ in rows] == [True]
        assert rows[0][0] == pytest.approx(40_000_000, rel=0.1)
    works(kernel, rows[0][2])
    assert alive(kernel) == 0
    assert left(kernel) == []
    assert kernel.value("kept.done()") is False


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        ("outer = np.empty(4, object)", "outer[1] = np.ones(2**18)"),
        ("outer = {}; exec('data = None', outer)", "outer['data'] = np.ones(2**18)"),
    ],
)
def test_an_array_without_a_name_is_left(kernel: Kernel, setup: str, code: str) -> None:
    works(kernel, LEFT, setup, f"%%experiment e\n{code}")
    assert [row[0] for row in left_by_experiment(kernel)] == [pytest.approx(2**21, rel=0.02)]


def test_a_task_that_waits_for_a_condition_is_cancelled(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        """
        async def work():
            data = np.ones(2**20)
            async with condition:
                await condition.wait()
            return data
        condition = asyncio.Condition()
        tasks, errors = [], []
        """,
        """%%experiment e
tasks.append(asyncio.ensure_future(work()))
tasks[0].add_done_callback(lambda task: errors.append(task.cancelled()))
await asyncio.sleep(0.01)
""",
    )
    ((_, _, line),) = left_by_experiment(kernel)
    works(kernel, line, "await asyncio.sleep(0.01)")
    assert kernel.value("errors") == [True]


@pytest.mark.parametrize(
    "kept",
    [
        "error",
        "(error, error.__cause__)",
        "{'e': [error]}['e']",
        "[{'of': {'one': error}}]",
        "Holder(error)",
        pytest.param(
            "ExceptionGroup('several', [error])",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="new in Python 3.11"),
        ),
    ],
)
def test_an_array_in_a_traceback_counts_once(kernel: Kernel, kept: str) -> None:
    works(
        kernel,
        LEFT,
        """
        def work():
            data = np.ones(2**20)
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError(1) from error
        class Holder:
            def __init__(self, value):
                self.value = [value]
        outer = []
        """,
        f"%%experiment e\ntry:\n    work()\nexcept ValueError as error:\n    outer.append({kept})",
    )
    ((at_the_end, _, _),) = left_by_experiment(kernel)
    ((later, _, line),) = left(kernel)
    assert at_the_end == pytest.approx(2**23, rel=0.02)
    assert later == pytest.approx(2**23, rel=0.02)
    works(kernel, line)
    assert left(kernel) == []


def test_one_line_frees_arrays_of_a_name_in_several_places(kernel: Kernel) -> None:
    experiment = """%%experiment e
made = [np.ones(70_000) for _ in range(4)]
Store.cache = made[0]
outer["k"] = made[1]
store.append(made[2])
other.append(made[3])
"""
    works(kernel, LEFT, "outer, store, other = {}, [], []\nclass Store: pass", experiment)
    ((size, path, line),) = left_by_experiment(kernel)
    assert size == 4 * 70_000 * 8
    assert path == "notebook variable other[0], and 3 more"
    assert left(kernel) == [(size, path, line)]
    works(kernel, line)
    assert left(kernel) == []


def test_lines_that_remove_the_same_tuple_are_one(kernel: Kernel) -> None:
    experiment = """%%experiment e
inner = [bytearray(2**20) for _ in range(3)]
made = np.ones(2**18)
outer["k"] = (made, (inner, []))
store.append(inner)
"""
    works(kernel, LEFT, "outer, store = {}, []", experiment)
    for _, _, line in left_by_experiment(kernel):
        works(kernel, line)
    assert left(kernel) == []
    assert kernel.value("[outer, store]") == [{}, []]


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        (
            "[{'id': 0}, {'id': 1}]",
            "for n in (0, 1): runs[n]['a'], runs[n]['b'] = large(), large()",
        ),
        (
            "deque([{'id': 0}, {'id': 1}, {'id': 2}])",
            "for n in (1, 2): runs[n]['a'], runs[n]['b'] = large(), large()",
        ),
    ],
)
def test_a_loop_removes_the_same_keys_of_each_item(kernel: Kernel, runs: str, code: str) -> None:
    works(kernel, LEFT, f"from collections import deque; runs = {runs}; watched = []")
    works(
        kernel,
        """
        def large():
            watched.append(weakref.ref(made := np.ones(2**18)))
            return made
        """,
    )
    works(kernel, f"%%experiment e\n{code}")
    ((_, _, line),) = left(kernel)
    assert line.startswith("for _item in ")
    works(kernel, line)
    assert alive(kernel) == 0
    assert kernel.value("[row['id'] for row in runs][:2]") == [0, 1]


@pytest.mark.parametrize(
    "code",
    [
        "store += made; store.append({'d': made}); kept = [made[1]]",
        "outer['p'] = outer['q'] = made[0]; outer['h'] = [made[1]]; kept = made",
        "store.append((made[0], {'q': [made[1]]})); kept = (made[0],)",
        "store.append(made[0]); outer['r'] = made; kept = {'x': made[1]}",
    ],
)
def test_a_line_with_a_kept_name_removes_only_its_row(kernel: Kernel, code: str) -> None:
    experiment = f"""%%experiment e --keep kept
made = [np.ones(2**18), np.ones(2**18)]
watched.extend(map(weakref.ref, made))
{code}
"""
    works(kernel, LEFT, "outer, store = {'w': 1}, [0]; watched = []")
    left(kernel)  # else a new array may be mistaken for that of an earlier case at its place
    works(kernel, experiment, "store.append(array()); store += [{'d': [array(), array()]}]")
    rows = left(kernel)
    assert [line.partition("  # and ")[2] for _, _, line in rows] == [
        "delete kept when you no longer need it"
    ]
    works(kernel, rows[0][2])
    assert left(kernel) == []
    works(kernel, "del kept")
    assert alive(kernel) == 3  # those that came later


def test_new_data_in_an_older_object_that_is_kept_is_no_leak(kernel: Kernel) -> None:
    works(kernel, LEFT, "runs = [{}, {}, {}]")
    experiment = """%%experiment e --keep kept
def fill():
    for run in runs: run["data"] = np.ones(2**20)
fill()
kept = runs[1]
"""
    (report,) = works(kernel, experiment).reports("experiment")
    assert "not named" not in report
    ((_, _, line),) = left_by_experiment(kernel)
    works(kernel, line)
    assert left(kernel) == []
    assert kernel.value("[list(run) for run in runs]") == [[], ["data"], []]


@pytest.mark.parametrize(
    ("cache", "place"),
    [("{}", "cache"), ("[]", "cache"), ("Store()", "Store.rows"), ("Store", "Store.rows")],
)
def test_data_in_a_cache_of_the_user_s_module_is_left(
    kernel: Kernel, tmp_path: Path, cache: str, place: str
) -> None:
    """The collector tracks no dict of text, and the notebook has no name of the module."""
    module = tmp_path / "tables_of_the_user.py"
    module.write_text(
        textwrap.dedent(
            f"""
            class Store:
                rows = {{}}

            cache = {cache}

            def load(number):
                rows = getattr(cache, "rows", cache)
                if type(rows) is list:
                    rows.append(bytes(1000))
                else:
                    rows[number] = bytes(1000)
            """
        )
    )
    works(
        kernel,
        LEFT,
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "sys.modules.pop('tables_of_the_user', None)",  # of another case
        "from tables_of_the_user import load",
        "%%experiment e\nfor number in range(5000): load(number)",
    )
    ((size, path, line),) = left_by_experiment(kernel)
    assert size >= 5_000_000
    assert path.startswith(f"module tables_of_the_user, global {place}")
    assert line.startswith(f"import tables_of_the_user; tables_of_the_user.{place}")
    works(kernel, line)
    assert left(kernel) == []
    works(kernel, "from tables_of_the_user import cache")
    assert kernel.value("len(getattr(cache, 'rows', cache))") == 0


def test_a_new_cache_with_many_small_items_is_cleared(kernel: Kernel) -> None:
    works(kernel, LEFT, "import functools")
    works(
        kernel,
        """
        @functools.lru_cache(None)
        def load(number):
            return bytes(1000)
        """,
        "%%experiment e\nfor number in range(5000): load(number)",
    )
    ((_, _, line),) = left_by_experiment(kernel)
    assert line == "load.cache_clear()"
    works(kernel, line)
    assert left(kernel) == []


def test_an_array_with_the_identity_of_a_freed_leak_is_a_leak(kernel: Kernel) -> None:
    """The next array often gets it: here, the record of the freed one is given that identity."""
    works(kernel, LEFT, "box = []")
    works(kernel, "%%experiment first\nmade = np.ones(2**18)\nbox.append(made)")
    experiment = """%%experiment second
made = np.ones(2**19)
box.append(made)
def give_identity(made):
    known = app.experiments.survivors.names_with_arrays
    ((is_alive, array),) = known[-1].arrays
    same = array._replace(storage=("numpy", id(made)))
    known[-1] = dataclasses.replace(known[-1], arrays=((is_alive, same),))
give_identity(made)
"""
    works(kernel, "import dataclasses; box.clear()", experiment)
    ((size_bytes, _, line),) = left(kernel)
    assert (size_bytes // MIB, line) == (4, "del box[0]")


def test_older_data_of_a_kept_name_hides_no_leak(kernel: Kernel) -> None:
    works(kernel, LEFT, "runs = [{'old': np.ones(2**20)} for _ in range(4)]")
    experiment = """%%experiment e --keep top
for number in (1, 3): runs[number]["new"] = np.ones(2**19)
top = runs[:2]
"""
    works(kernel, experiment)
    assert [line for _, _, line in left_by_experiment(kernel)] == ['del runs[3]["new"]']


OLDER_BEHIND_LINES = {
    "a tuple": ("pair = [(older,)]", "pair[0] = (*pair[0], data)", "pair[0] = None"),
    "a cached function": (
        "@functools.lru_cache\ndef load(n): return np.ones(2**20) if n else older\nload(0);",
        "data = load(1)",
        "load.cache_clear()",
    ),
}
"""Code that makes a place with older data, and code that puts new data there, with the line."""


@pytest.mark.parametrize("case", OLDER_BEHIND_LINES)
def test_a_line_says_which_other_data_it_drops(kernel: Kernel, case: str) -> None:
    make, put, line = OLDER_BEHIND_LINES[case]
    works(kernel, LEFT, f"import functools; older = np.ones(2**19)\n{make}\ndel older")
    works(kernel, f"%%experiment e --keep kept\ndata = np.ones(2**20)\n{put}\nkept = [data]")
    drops = "also drops 4 MiB of other data"
    (advice,) = holders(why(kernel, "kept")).values()
    assert advice == f"{line}  # {drops}"
    (report,) = works(kernel, "%gpumem why data").reports("why")
    assert drops in " ".join(report.split())
    ((_, _, advice),) = left(kernel)
    assert advice.startswith(f"{line}  # ")
    fields = ("arrays", "objects", "is_at_least")
    (of_row,) = kernel.value(f"[[getattr(row, name) for name in {fields}] for row in last_rows]")
    assert of_row == ([0, 2, False] if case == "a cached function" else [1, 1, False])
    drops = "also drops 4 MiB of older data"
    if case == "a cached function":  # of which ``leaks`` lists all data
        drops = "4 MiB of it may be older than the experiment"
    assert advice.endswith(drops)


def test_older_arrays_in_new_tuples_are_no_leaks(kernel: Kernel) -> None:
    works(kernel, LEFT, "runs = [{'data': np.ones(2**18)} for _ in range(3)]")
    experiment = """%%experiment e
def change():
    for run in runs: run["data"] = (run["data"], np.ones(2**19))
change()
"""
    works(kernel, experiment)
    rows = left(kernel)
    assert sum(size_bytes for size_bytes, _, _ in rows) // MIB == 3 * 4
    for _, _, line in rows:
        assert "also drops " in line


def test_the_line_for_all_holders_names_their_common_data(kernel: Kernel) -> None:
    """Each holder alone drops nothing else: the other one has it, too."""
    works(
        kernel,
        """
        import numpy as np
        rows = [{"data": np.ones(2**18)} for _ in range(6)]
        table = {number: row for number, row in enumerate(rows)}
        top = rows[:2]
        """,
    )
    assert holders(why(kernel, "top")).popitem()[1] == "del rows"
    line = one_line(kernel, "top")
    assert line == "del rows; del table; del top  # also drops 8 MiB of other data"


def test_no_line_names_data_that_another_holder_keeps(kernel: Kernel) -> None:
    works(
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
    lines = holders(why(kernel, "x"))
    assert lines
    assert not any("also drops" in line for line in lines.values()), lines
    works(kernel, "del rows[0]")
    assert holders(why(kernel, "x")).popitem()[1] == (
        "app.first = None; app.second = None  # also drops 2 MiB of other data"
    )


def test_a_line_for_tasks_says_that_some_may_be_older(kernel: Kernel) -> None:
    works(kernel, LEFT, "tasks = {asyncio.create_task(wait(np.ones(2**18)))}")
    works(kernel, "%%experiment e\ntasks.add(asyncio.create_task(wait(np.ones(2**19))))")
    ((size_bytes, _, line),) = left(kernel)
    assert size_bytes // MIB == 6
    assert line.endswith("  # 2 MiB of it may be older than the experiment")
    works(kernel, line, "await asyncio.sleep(0)")
    assert left(kernel) == []


@pytest.mark.parametrize(("line", "keeps"), [(" --keep kept", ""), ("", "global kept; ")])
def test_a_kept_name_is_a_holder_that_the_line_spares(
    kernel: Kernel, line: str, keeps: str
) -> None:
    experiment = f"""\
%%experiment e{line}
{keeps}arr = np.ones(2**20)
kept = {{"a": arr}}
box.append(arr)
"""
    works(kernel, LEFT, "box = []", experiment)
    place = 'notebook variable box[0], kept variable kept["a"]'
    advice = "del box[0]  # and delete kept when you no longer need it"
    assert left_by_experiment(kernel) == [(pytest.approx(2**23, rel=0.02), place, advice)]
    assert left(kernel) == [(pytest.approx(2**23, rel=0.02), place, advice)]
    works(kernel, advice)
    assert left(kernel) == []
    works(kernel, "kept = [kept['a'], kept]")
    ((_, place, _),) = left(kernel)
    assert place.startswith("notebook variable kept[")


@pytest.mark.parametrize(
    "made",
    [
        "np.array([f'text number {number}' for number in range(200_000)], dtype=object)",
        "{'weights': np.ones(200_000), 'words': [str(n) for n in range(100_000)]}",
        "Model()",
    ],
    ids=["an object array", "a dict", "an object"],
)
def test_an_object_and_its_arrays_are_one_row(kernel: Kernel, made: str) -> None:
    works(
        kernel,
        LEFT,
        """
        class Model:
            def __init__(self):
                self.weights = np.ones(200_000)
                self.words = [str(number) for number in range(100_000)]
        outer = {}
        """,
        f"%%experiment e\nx = {made}\nouter['a'] = x",
    )
    (at_the_end,) = left_by_experiment(kernel)
    (later,) = left(kernel)
    assert at_the_end[1:] == later[1:] == ('notebook variable outer["a"]', 'del outer["a"]')
    assert later[0] == pytest.approx(at_the_end[0], rel=0.02)
    assert later[0] > 7_000_000
    for parts in (parts_at_the_end(kernel), parts_later(kernel)):
        if "array" not in made.partition("(")[0]:  # its elements are no parts
            assert sum(parts.values()) == pytest.approx(later[0], rel=0.02)
            assert min(parts.values()) > 1_000_000
    works(kernel, later[2])
    assert left(kernel) == []


def test_a_new_frame_of_numbers_has_a_row_with_its_columns(kernel: Kernel) -> None:
    needs("pandas")
    works(kernel, LEFT, "import pandas as pd; outer = {}")
    works(kernel, "%%experiment e\nouter['f'] = pd.DataFrame({'a': np.arange(2**18), 'b': 1.5})")
    (row,) = kernel.value(
        "[(row.type_name, sorted(row.parts)) for row in app.experiments.finished[-1].survivors]"
    )
    assert row == ("DataFrame", ["a", "b", "index"])


def test_a_frame_without_a_name_is_one_row_with_its_arrays(kernel: Kernel) -> None:
    needs("pandas")
    works(
        kernel,
        LEFT,
        """
        import pandas as pd
        outer = {}
        texts = [str(number) for number in range(2**18)]
        """,
        """%%experiment e
outer["a"] = pd.DataFrame({"a": np.arange(2**18), "t": np.array(texts, dtype=object)})
""",
    )
    for rows in (left_by_experiment(kernel), left(kernel)):
        ((size, path, line),) = rows
        assert (path, line) == ('notebook variable outer["a"]', 'del outer["a"]')
        assert size > 15 << 18
        assert sum(parts_later(kernel).values()) == pytest.approx(size, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 1)]
    works(kernel, line)
    assert left(kernel) == []


def test_two_frames_are_two_objects_with_their_columns(kernel: Kernel) -> None:
    needs("pandas")
    works(
        kernel,
        LEFT,
        """
        import pandas as pd
        outer = {}
        def frame():
            texts = np.array([str(number) for number in range(2**17)], dtype=object)
            return pd.DataFrame({"a": np.arange(2**17), "t": texts, "f": np.ones(2**17)})
        """,
        "%%experiment e\nfor number in range(2): outer[number] = frame()",
    )
    for rows in (left_by_experiment(kernel), left(kernel)):
        ((size, path, line),) = rows
        assert (path, line) == ("notebook variable outer", "outer.clear()")
    for parts in (parts_at_the_end(kernel), parts_later(kernel)):
        assert parts.keys() == {"a", "t", "f"}
        assert sum(parts.values()) == pytest.approx(size, rel=0.02)
    kinds = kernel.value(
        "[(row.type_name, row.objects) for row in app.experiments.finished[-1].survivors]"
    )
    assert kinds == [("DataFrame", 2)]


@pytest.mark.parametrize(
    ("code", "expected_line"),
    [
        ("outer['a'] = x; outer['t'] = torch.from_numpy(x)", "outer.clear()"),
        (
            "outer['a'] = x; y = torch.as_tensor(x)[5:]; keep['t'] = y",
            'del outer["a"]; del keep["t"]',
        ),
        ("outer['t'] = torch.from_numpy(x)", 'del outer["t"]'),
        ("outer['t'] = torch.from_numpy(x[:9])", 'del outer["t"]'),
        (
            "outer['t'] = torch.from_numpy(x[:9]); keep['t'] = [torch.from_numpy(x[:20])]",
            'del keep["t"]; del outer["t"]',
        ),
        ("outer['a'] = x[5:9]; outer['t'] = torch.from_numpy(x[:9])", "outer.clear()"),
        (
            "outer['a'] = x[5:9]; keep['t'] = torch.from_numpy(x[20:29])",
            'del outer["a"]; del keep["t"]',
        ),
    ],
)
def test_an_array_and_a_tensor_on_its_memory_are_one_row(
    kernel: Kernel, code: str, expected_line: str
) -> None:
    needs("torch")
    works(kernel, LEFT, "import torch; outer, keep = {}, {}")
    works(kernel, f"%%experiment e\nx = np.ones(2**20); watched.append(weakref.ref(x))\n{code}")
    for rows in (left_by_experiment(kernel), left(kernel)):
        ((size, _, line),) = rows
        assert size == 8 << 20
        assert line == expected_line
    assert alive(kernel) == 1
    works(kernel, line)
    assert alive(kernel) == 0
    assert left(kernel) == []


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("outer.append(np.ones(2**20))", 8 << 20),
        ("outer.append([np.ones(2**18), np.ones(2**18)])", 4 << 20),
        ("outer.append({'data': np.ones(2**19), 'n': 1})", 4 << 20),
        ("made = np.ones(2**20); keep['k'] = made; del made", 8 << 20),
        ("for row in table.values(): row['w'] = np.ones(2**18)", 8 << 20),
        ("holder.data = np.ones(2**20)", 8 << 20),
    ],
    ids=["a list", "a list in a list", "a dict in a list", "a key", "keys of rows", "an attribute"],
)
def test_leaks_list_the_arrays_that_an_experiment_has_listed(
    kernel: Kernel, code: str, size: int
) -> None:
    works(
        kernel,
        LEFT,
        """
        class Holder:
            pass
        outer, keep, holder = ["first"], {}, Holder()
        table = {number: {"n": number} for number in range(4)}
        """,
        f"%%experiment e\n{code}",
    )
    at_the_end = left_by_experiment(kernel)
    later = left(kernel)
    assert sum(row[0] for row in at_the_end) == pytest.approx(size, rel=0.02)
    assert {row[1:] for row in later} == {row[1:] for row in at_the_end}
    assert sum(row[0] for row in later) == pytest.approx(size, rel=0.02)
    for _, _, advice in later:
        works(kernel, advice)
    assert left(kernel) == []


@pytest.mark.parametrize(
    ("setup", "code", "left_over"),
    [
        (
            """
            errors = []
            def fail(number):
                data = np.ones(number)
                raise ValueError(number)
            """,
            """
            for number in (2**18, 1, 2**18, 2):
                try:
                    fail(number)
                except ValueError as error:
                    errors.append(error)
            """,
            "[error.args[0] for error in errors] == [1, 2]",
        ),
        (
            """
            from collections import deque
            class Callback:
                def __init__(self, data):
                    self.data = data
                def call(self):
                    pass
            calls = deque(["first"])
            """,
            """
            for number in range(3):
                calls.append(Callback(np.ones(2**18)).call)
                calls.append(number)
            """,
            "list(calls) == ['first', 0, 1, 2]",
        ),
        (
            """
            import threading
            threads = []
            """,
            """
            thread = threading.Thread(target=int)
            threads.append(thread)
            thread.big = np.ones(2**18)
            thread.start()
            thread.join()
            """,
            "threads == []",
        ),
    ],
    ids=["errors", "bound methods", "a thread that has ended"],
)
def test_lines_free_all_and_nothing_else(
    kernel: Kernel, setup: str, code: str, left_over: str
) -> None:
    works(kernel, LEFT, setup, f"%%experiment e\n{textwrap.dedent(code)}")
    for _, _, advice in left(kernel):
        works(kernel, advice)
    assert left(kernel) == []
    assert kernel.value(left_over) is True


@linux
def test_lines_of_two_containers_free_both(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        "outer = [0]; table = {'kept': 1}",
        """
        def fill():
            for number in range(6):
                made = np.ones(200_000)
                watched.append(weakref.ref(made))
                outer.append(made)
                table[number] = made
        """,
        "%%experiment e\nfill()",
    )
    assert alive(kernel) == 6
    for _, _, advice in left_by_experiment(kernel):
        works(kernel, advice)
    assert alive(kernel) == 0
    assert kernel.value("(outer, table)") == ([0], {"kept": 1})


# -- figures --------------------------------------------------------------------------------------


_PYPLOT = """
import matplotlib
matplotlib.use("agg")
matplotlib.rcParams["figure.max_open_warning"] = 0
import matplotlib.pyplot as plt
plt.close("all")
plt.plot([1, 2])
plt.gcf().canvas.draw()
plt.close("all")
class Box: pass
"""
"""A cell that imports pyplot and lets it make, for a first figure, what it keeps for all."""


@pytest.fixture(scope="module")
def shared_figure_kernel() -> Iterator[SharedKernel]:
    needs("matplotlib")
    shared = SharedKernel("%reset -f", f"{LEFT}\n{_PYPLOT}", timeout=60, hides_libraries=True)
    yield shared
    shared.close()


@pytest.fixture
def figure_kernel(shared_figure_kernel: SharedKernel) -> Kernel:
    """A kernel that sees each figure of a test and pyplot's dict of them, but no other object of
    matplotlib.
    """
    kernel = shared_figure_kernel.get()
    works(kernel, "plt._pylab_helpers.Gcf.figs = type(plt._pylab_helpers.Gcf.figs)()")
    return kernel


def test_many_figures_are_one_row(figure_kernel: Kernel) -> None:
    works(
        figure_kernel,
        """
        matplotlib.rcParams["figure.max_open_warning"] = 0
        def draw(number):
            for _ in range(number):
                data = plt.figure().data = np.ones(200_000)
                watched.append(weakref.ref(data))
        """,
        "%%experiment e\ndraw(40)",
    )
    assert alive(figure_kernel) == 40
    (row,) = [row for row in left_by_experiment(figure_kernel) if "matplotlib" in row[1]]
    assert row[1:] == ("40 matplotlib figures", 'plt.close("all")')
    assert row[0] >= 40 * 1_600_000
    assert {row[1:] for row in left(figure_kernel)} == {row[1:]}
    works(figure_kernel, row[2])
    assert alive(figure_kernel) == 0


def test_drawn_figures_are_one_row(figure_kernel: Kernel) -> None:
    works(
        figure_kernel,
        """
        %%experiment e
        for _ in range(2):
            fig, ax = plt.subplots()
            ax.plot(np.linspace(0, 1, 200_000))
            watched.append(weakref.ref(fig))
            fig.canvas.draw()
        """,
    )
    assert alive(figure_kernel) == 2
    (row,) = left_by_experiment(figure_kernel)
    assert row[1:] == ("2 matplotlib figures", 'plt.close("all")')
    assert {row[1:] for row in left(figure_kernel)} == {row[1:]}
    works(figure_kernel, row[2])
    assert alive(figure_kernel) == 0


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_the_array_of_a_figure_s_axes_is_removed(
    figure_kernel: Kernel, shape: tuple[int, int]
) -> None:
    """Each of the axes leads to the whole figure."""
    works(
        figure_kernel,
        """
        kept = []
        """,
        f"""
        %%experiment e
        fig, axes = plt.subplots(*{shape})
        for ax in axes.flat:
            ax.plot(np.arange(200_000.))
        kept.append(axes)
        watched.append(weakref.ref(fig))
        """,
    )
    ((_, _, line),) = left_by_experiment(figure_kernel)
    assert line == "del kept[0]; plt.close(1)"
    assert [row[2] for row in left(figure_kernel)] == [line]
    works(figure_kernel, line)
    assert alive(figure_kernel) == 0


_AXES_KEPT = {
    "kept.extend(axes.flat)": "del kept[1:]",
    "kept += [axes[0, 1], axes[1, 0]]": "del kept[1:]",
    "kept.extend(axes)": "del kept[1:]",
    "by_number.update(enumerate(axes.flat))": "by_number.clear()",
    "box.a, box.b, _, _ = axes.flat": "box.a = None; box.b = None",
    "kept.extend(axes); box.a = axes[0, 0]": "del kept[1:]; box.a = None",
    "kept.append(axes[0]); slots[:2] = axes[1]": "del kept[1]; slots[0] = None; slots[1] = None",
    "box.a = list(axes.flat); kept.append(axes[0])": "del kept[1]; box.a.clear()",
    "grid[1] = axes[0]; grid[2, 1] = axes[1, 1]": (
        "grid[1, 0] = None; grid[1, 1] = None; grid[2, 1] = None"
    ),
    "grid[2, 0] = axes[1, 0]": "grid[2, 0] = None",
}


def test_all_attributes_of_a_librarys_objects_are_removed(kernel: Kernel) -> None:
    """Each of them leads to an array of the row, as the layers of a cache of keys and values."""
    works(kernel, LEFT, "import argparse\nkept = [{'text': 1}]")
    works(
        kernel,
        """
        %%experiment e
        parts = [np.ones(2**18) for _ in range(5)]
        watched += map(weakref.ref, parts)
        layers = [
            argparse.Namespace(keys=parts[number], values=parts[number + 1]) for number in (0, 2)
        ]
        kept[0]["logits"] = parts[4]
        kept[0]["cache"] = argparse.Namespace(layers=layers)
        """,
    )
    ((_, _, line),) = left_by_experiment(kernel)
    assert alive(kernel) == 5
    works(kernel, line)
    assert alive(kernel) == 0, line


@pytest.mark.parametrize(("keep", "is_open"), pairs(_AXES_KEPT, [True, False]))
def test_all_axes_of_a_figure_are_removed_together(
    figure_kernel: Kernel, keep: str, *, is_open: bool
) -> None:
    """Each of the axes leads to the whole figure, wherever it is kept."""
    works(
        figure_kernel,
        """
        kept, by_number, box = ["text"], {}, Box()
        slots = np.array([None, None, "text"])
        grid = np.array([["text", None], [None, None], [None, None]])
        """,
    )
    left(figure_kernel)  # else a new array may be mistaken for that of an earlier case at its place
    works(
        figure_kernel,
        f"""
        %%experiment e
        fig, axes = plt.subplots(2, 2)
        axes[0, 0].plot(np.arange(400_000.))
        watched.append(weakref.ref(fig))
        {keep}
        {"" if is_open else "plt.close(fig)"}
        """,
    )
    line = _AXES_KEPT[keep] + ("; plt.close(1)" if is_open else "")
    ((_, _, of_report),) = left_by_experiment(figure_kernel)
    assert of_report == line
    assert [row[2] for row in left(figure_kernel)] == [line]
    works(figure_kernel, line)
    assert alive(figure_kernel) == 0
    assert left(figure_kernel) == []
    assert figure_kernel.value("[kept[0], slots[2], grid[0, 0]]") == ["text"] * 3


@pytest.mark.parametrize(
    ("place", "keep"),
    [
        ("kept[0]", "box.pair = (line, kept[0])"),
        ("kept[0]", "box.pair = (line, kept[1])"),
        ("by_name['axes'][0]", "box.pair = (line, by_name['axes'][1])"),
        (
            "kept[0]",
            "figure, other = plt.subplots(); other.plot(np.arange(4e5)); box.pair = (line, other); "
            "watched.append(weakref.ref(figure)); plt.close(figure)",
        ),
    ],
)
def test_an_older_figure_stays_if_a_tuple_has_a_new_line(
    figure_kernel: Kernel, place: str, keep: str
) -> None:
    """The older axes in the tuple lead to all that their figure has."""
    works(
        figure_kernel,
        """
        box, kept, by_name = Box(), [*plt.subplots(1, 2)[1]], {"axes": plt.subplots(1, 2)[1]}
        plt.close("all")
        """,
    )
    left(figure_kernel)
    works(
        figure_kernel,
        f"""
        %%experiment e
        line, = {place}.plot(np.arange(400_000.))
        watched.append(weakref.ref(line))
        {keep}
        """,
    )
    lines = [row[2] for row in left_by_experiment(figure_kernel)]
    assert [row[2] for row in left(figure_kernel)] == lines
    works(figure_kernel, *lines)
    assert alive(figure_kernel) == 0
    figures = "[len(axes.figure.axes) for axes in (*kept, *by_name['axes'])]"
    assert figure_kernel.value(figures) == [2, 2, 2, 2]
    assert left(figure_kernel) == []


def test_a_line_is_removed_from_an_older_figure_in_a_list(figure_kernel: Kernel) -> None:
    works(
        figure_kernel,
        """
        kept = [plt.subplots(2, 2)[1], *plt.subplots(1, 2)[1]]
        figures = [weakref.ref(plt.figure(number)) for number in plt.get_fignums()]
        plt.close("all")
        """,
        """
        %%experiment e
        for ax in (kept[0][0, 0], kept[1]):
            line, = ax.plot(np.arange(400_000.))
            watched.append(weakref.ref(line))
        del ax, line
        """,
    )
    lines = [row[2] for row in left_by_experiment(figure_kernel)]
    assert [row[2] for row in left(figure_kernel)] == lines
    works(figure_kernel, *lines)
    assert alive(figure_kernel) == 0
    assert figure_kernel.value("[figure() is not None for figure in figures]") == [True, True]
    assert left(figure_kernel) == []


def test_figures_of_an_experiment_leave_older_ones_open(figure_kernel: Kernel) -> None:
    works(
        figure_kernel,
        """
        plt.figure()
        """,
        "%%experiment e\nplt.figure(); plt.plot(np.ones(400_000)); plt.figure(); "
        "plt.plot(np.ones(400_000))",
    )
    (row,) = [row for row in left_by_experiment(figure_kernel) if "matplotlib figure" in row[1]]
    works(figure_kernel, row[2])
    assert figure_kernel.value("plt.get_fignums()") == [1]
    works(figure_kernel, "plt.close('all')")


_PYPLOT_KEEPS = {
    "plt.plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.gca().plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.scatter(np.arange(2e5), np.arange(2e5))": "plt.gca().collections",
    "plt.imshow(np.ones((1000, 400)))": "plt.gca().images",
    "plt.figure(1); plt.plot(np.arange(400_000.))": "plt.gca().lines",
    "plt.errorbar(np.arange(4e5), np.arange(4e5), yerr=1, errorevery=99999)": (
        "plt.gca().containers"
    ),
}


@pytest.mark.parametrize(("draw", "older_length"), pairs(_PYPLOT_KEEPS, [9, 200_000]))
def test_an_older_figure_stays_open_without_a_new_artist(
    figure_kernel: Kernel, draw: str, older_length: int
) -> None:
    """Only pyplot keeps the figure."""
    works(
        figure_kernel,
        f"""
        for number in (1, 2):
            plt.figure(number)
            plt.plot(np.arange({older_length}.)); plt.title("older")
        """,
    )
    left(figure_kernel)
    works(
        figure_kernel,
        f"""
        %%experiment e
        {draw}
        drawn = {_PYPLOT_KEEPS[draw]}[-1]
        watched.append(weakref.ref(drawn if hasattr(drawn, "axes") else drawn[0]))
        """,
    )
    ((_, _, line),) = left_by_experiment(figure_kernel)
    assert line in [row[2] for row in left(figure_kernel)]  # next to the older data, without a name
    works(figure_kernel, line)
    assert alive(figure_kernel) == 0
    assert "also drops" not in line
    assert figure_kernel.value("plt.get_fignums()") == [1, 2]
    figures = "[[len(plt.figure(n).axes[0].lines), plt.gca().get_title()] for n in (1, 2)]"
    assert figure_kernel.value(figures) == [[1, "older"], [1, "older"]]
    works(figure_kernel, "[plt.figure(number).canvas.draw() for number in (1, 2)]")


_DRAWINGS = [
    "drawn = kept.imshow(np.random.rand(1000, 1000)); kept.figure.colorbar(drawn, ax=kept)",
    "plt.sca(kept); drawn = plt.imshow(np.random.rand(1000, 1000)); plt.colorbar()",
    "plt.sca(kept); drawn = plt.scatter(*np.random.rand(3, 100_000)); plt.colorbar(drawn)",
    "plt.sca(kept); drawn = plt.hexbin(*np.random.rand(2, 9), gridsize=300); plt.colorbar()",
    "drawn = kept.imshow(np.random.rand(1000, 1000)); kept.figure.add_subplot(222)",
    "drawn = kept.twinx().plot(np.random.rand(400_000))[0]",
]
_FIGURES_KEPT = ["figure = plt.gcf()", "kept = plt.gca()", "plt.close('all')"]


@pytest.mark.parametrize(("draw", "keeps"), pairs(_DRAWINGS, _FIGURES_KEPT))
def test_an_image_leaves_an_older_figure_with_its_colorbar(
    figure_kernel: Kernel, draw: str, keeps: str
) -> None:
    works(
        figure_kernel,
        f"""
        kept = plt.subplots(1, 2)[1][0]
        older = [weakref.ref(axes) for axes in kept.figure.axes]
        {keeps}
        """,
    )
    left(figure_kernel)
    works(
        figure_kernel,
        f"""
        %%experiment e
        {draw}
        watched.append(weakref.ref(drawn))
        """,
    )
    lines = [row[2] for row in left_by_experiment(figure_kernel)]
    assert [row[2] for row in left(figure_kernel)] == lines
    works(figure_kernel, *lines)
    assert alive(figure_kernel) == 0
    works(figure_kernel, "older[0]().figure.canvas.draw()")
    assert figure_kernel.value("all(one() in older[0]().figure.axes for one in older)") is True
    assert left(figure_kernel) == []
    works(figure_kernel, "del kept; figure = None; plt.close('all')")


# -- data frames ----------------------------------------------------------------------------------


@linux
def test_a_frame_s_older_columns_are_not_left() -> None:
    needs("pandas")
    # A kernel of its own: closed figures leave garbage with a shared one's libraries.
    with Kernel() as kernel:
        works(
            kernel,
            "%load_ext ipygpumem",
            LEFT,
            "import pandas as pd; frame = pd.DataFrame({'old': np.ones(400_000)})",
            "%%experiment e\nframe['texts'] = [str(n) * 9 for n in range(400_000)]",
        )
        rows = left_by_experiment(kernel)
    assert [row[1:] for row in rows] == [('notebook variable frame["texts"]', 'del frame["texts"]')]


@linux
def test_a_small_array_in_a_cell_of_an_older_series_is_left(kernel: Kernel) -> None:
    """Pandas gives the series a new manager, with its older block."""
    needs("pandas")
    works(
        kernel,
        LEFT,
        "import pandas as pd; outer = pd.Series([None] * 30, dtype=object)",
        "%%experiment e\nouter.iat[25] = np.ones(2**20)",
    )
    rows = left_by_experiment(kernel)
    assert [row[1:] for row in rows] == [
        ("notebook variable outer (in a column)", "outer.iat[25] = None")
    ]
    works(kernel, "del outer")


@linux
def test_an_array_with_a_new_holder_is_not_left(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        "outer = {'old': np.ones(2_000_000)}",
        """%%experiment e
outer["moved"] = (outer.pop("old"),)
outer["texts"] = [str(n) * 9 for n in range(100_000)]""",
    )
    rows = left_by_experiment(kernel)
    assert [row[1:] for row in rows] == [('notebook variable outer["texts"]', 'del outer["texts"]')]
    works(kernel, "del outer")


# -- optimizers -----------------------------------------------------------------------------------


torch_kernel = kernel_with(
    "%load_ext ipygpumem",
    LEFT,
    """
    import torch
    net = torch.nn.Linear(1, 1)
    torch.optim.Adam(net.parameters()).step()
    """,
)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize(
    ("optimizer", "is_safe"),
    [
        ("Adam(net.parameters())", True),
        ("SGD(net.parameters(), lr=0.1, momentum=0.9)", True),
        ("RMSprop(net.parameters())", True),
        ("AdamW(net.parameters(), amsgrad=True)", True),
        ("Adagrad(net.parameters())", False),
    ],
)
def test_state_of_an_optimizer_has_a_line(
    torch_kernel: Kernel, optimizer: str, is_safe: bool
) -> None:
    kernel = torch_kernel
    works(kernel, f"net = torch.nn.Linear(700, 700); opt = torch.optim.{optimizer}")
    works(kernel, "def step(): net(torch.ones(1, 700)).sum().backward(); opt.step()")
    works(kernel, "%%experiment e\nstep()")
    rows = left_by_experiment(kernel)
    lines = {advice for _, path, advice in rows if ".state" in path}
    if not is_safe:
        assert lines <= {""}
        return
    assert lines == {"opt.state.clear()  # all its averages and momentum begin again"}
    works(kernel, lines.pop(), "assert not opt.state; step(); opt.state.clear(); net.zero_grad()")


# -- cycles that Python never frees ---------------------------------------------------------------

_WATCH = "    watched.append(weakref.ref(array))"
_CYCLES = {
    "an attribute": """
        array = np.empty(1, object)
        owner = Owner()
        owner.data = np.ones(1 << 20)
        owner.array = array
        array[0] = owner
    """,
    "a list": """
        array = np.empty(1, object)
        array[0] = [np.ones(1 << 20), array]
    """,
    "a dict": """
        array = np.empty((2, 2), object)
        array[1, 1] = {"data": [np.ones(1 << 20)], "array": array}
    """,
}


@linux
def test_an_experiment_names_cycles_through_arrays(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        """
        class Owner: pass
        def make():
            for _ in range(3):
                owner = Owner()
                owner.data = b"x" * (4 << 20)
                owner.array = np.array([owner, None], dtype=object)
                watched.append(weakref.ref(owner))
        """,
        "%%experiment e\nmake()",
    )
    rows = left_by_experiment(kernel)
    assert sum(row[0] for row in rows) == pytest.approx(12 * MIB, rel=0.1)
    assert {row[1] for row in rows} == {
        "a cycle through an array of objects, which Python never frees"
    }
    works(kernel, "for owner in watched: owner().array.fill(None)\nowner = None")
    assert alive(kernel) == 0


@linux
@pytest.mark.parametrize("code", _CYCLES.values(), ids=_CYCLES)
def test_a_cycle_through_an_array_is_called_one(kernel: Kernel, code: str) -> None:
    works(kernel, LEFT, f"class Owner: pass\ndef make():{code.rstrip()}\n    {_WATCH}")
    works(kernel, "%%experiment e\nmake()")
    rows = left(kernel)
    assert len(rows) == 1, rows
    (row,) = rows
    assert row[0] == pytest.approx(8 * MIB, rel=0.1)
    assert row[1:] == (
        "a cycle through an array of objects, which Python never frees",
        "set the array's elements to None before you delete it",
    )
    works(kernel, "watched[-1]().fill(None)")
    assert left(kernel) == []


# -- the lines of all holders as one ---------------------------------------------------------------


def one_line(kernel: Kernel, name: str) -> str:
    """Return the line or the cell of ``%gpumem why`` that has the lines of all holders; empty if
    none is shown.
    """
    (report,) = kernel.run(f"%gpumem why {name}").reports("why")
    _, _, cell = report.partition("  in one cell:\n")
    if cell:
        return textwrap.dedent(cell).strip()
    lines = [line for line in report.splitlines() if "in one line: " in line]
    return lines[0].partition("in one line: ")[2] if lines else ""


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ('cache = {"first": x}', 'del cache["first"]; del x'),
        ('cache = {"first": x}; rows = [x]', 'del cache["first"]; del rows[0]; del x'),
        ("same = x", "del same; del x"),
        ("class Model: pass\nm = Model(); m.data = x", "m.data = None; del x"),
        ("def read(data=x): return data", "del read; del x"),
        ("class Model: pass\nm = Model(); Model.data = x", "Model.data = None; del x"),
        (
            textwrap.dedent(
                """\
                import functools
                @functools.cache
                def load(): return x
                load();"""
            ),
            "load.cache_clear(); del x",
        ),
    ],
)
def test_one_line_has_the_lines_of_all_holders(kernel: Kernel, code: str, line: str) -> None:
    works(
        kernel,
        "import weakref\nclass Data(bytearray): pass\nx = Data(8 << 20); ref = weakref.ref(x)",
        code,
    )
    shown = one_line(kernel, "x")
    assert shown == line
    works(kernel, shown)
    assert kernel.value("ref() is None") is True


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("x", "%xdel x"),
        ('cache = {"first": x}\nx', 'del cache["first"]\n%xdel x'),
        ("(1, x)", "del x\n%xdel _1"),
    ],
)
def test_one_line_removes_outputs_too(kernel: Kernel, code: str, line: str) -> None:
    works(
        kernel,
        """
        import weakref
        class Data(bytearray):
            def __repr__(self): return "data"
        x = Data(8 << 20); ref = weakref.ref(x)
        """,
        code,
    )
    shown = one_line(kernel, "x")
    assert re.sub(r"_\d+", "_1", shown) == line  # the number of the output's cell
    works(kernel, shown)
    assert kernel.value("ref() is None") is True


def test_the_line_for_an_output_deletes_it_once(kernel: Kernel) -> None:
    works(kernel, "import numpy, weakref", "numpy.ones(1 << 20)", "same = _; ref = weakref.ref(_)")
    number = kernel.value("max(Out)")
    shown = one_line(kernel, f"_{number}")
    assert shown == f"del same\n%xdel _{number}"
    works(kernel, shown)
    assert kernel.value("ref() is None") is True


_GROWS = """
import torch, weakref
layers = torch.nn.ModuleList([torch.nn.Linear(512, 512) for _ in range(3)])
optimizer = torch.optim.Adam(layers.parameters())
result = torch.ones(64, 512)
for layer in layers: result = layer(result).relu()
loss = result.sum(); loss.backward(); optimizer.step(); del loss
refs = [weakref.ref(parameter) for parameter in layers.parameters()]
"""


@pytest.mark.parametrize("name", ["layers", "optimizer"])
def test_the_joint_line_omits_objects_freed_by_another_deletion(kernel: Kernel, name: str) -> None:
    needs("torch")
    works(kernel, _GROWS + "del result")
    shown = one_line(kernel, name)
    assert sorted(shown.split("; ")) == ["del layer", "del layers", "del optimizer"]
    works(kernel, shown, "import gc; gc.collect();")
    assert kernel.value("[ref() for ref in refs if ref() is not None] == []") is True


SHARED_CONTAINERS = {
    "items of a dict": (
        "table = {i: np.ones(1 << 18) for i in range(4)}; app.table = table; x = [table[1]]\n"
        "ref = weakref.ref(x[0])",
        "del table[1]; del x",
    ),
    "two items of a list": (
        "rows = [np.ones(1 << 18) for _ in range(6)]; app.rows = rows; x = [rows[0], rows[4]]\n"
        "ref = weakref.ref(x[1])",
        "del rows[4]; del rows[0]; del x",
    ),
    "a list of one array alone": (
        "rows = [np.ones(1 << 18)] * 2; app.rows = rows; x = [rows[0]]; ref = weakref.ref(x[0])",
        "rows.clear(); del x",
    ),
    "a data frame": (
        "frame = pd.DataFrame(np.ones((1 << 16, 4))); app.frame = frame; x = frame[3]\n"
        "ref = weakref.ref(frame)",
        "app.frame = None; del frame; del x",
    ),
    "a tuple": (
        "pair = (np.ones(1 << 18), 1); app.pairs = [pair]; x = pair[0]; ref = weakref.ref(x)",
        "del pair; del app.pairs[0]; del x",
    ),
    "a tuple that a shared dict has twice": (
        "pair = (np.ones(1 << 18), 1); pairs = {'a': pair, 'b': pair}; app.pairs = pairs\n"
        "x = pair[0]; ref = weakref.ref(x); del pair",
        "pairs.clear(); del x",
    ),
    "an array and its view in a shared dict": (
        "x = [np.ones(1 << 18)]; table = {'a': x[0], 'b': x[0][:9]}; app.table = table\n"
        "ref = weakref.ref(x[0])",
        "table.clear(); del x",
    ),
    "a shared object in a list": (
        "x = [np.ones(1 << 18)]; part = App(); part.all = part.rows = x; whole = [part, x[0]]\n"
        "app.call = functools.partial(print, part); ref = weakref.ref(x[0]); del part",
        "whole[0].all = None; whole[0].rows = None; del whole[1]; del x",
    ),
    "keywords of a shared partial": (
        "x = [np.ones(1 << 18)]; call = functools.partial(print, key=x); calls = [call]\n"
        "app.call = call; ref = weakref.ref(x[0]); del call",
        "del calls[0]; app.call = None; del x",
    ),
}
"""Code with an object in a container that an attribute has, too, and the line that frees it."""


@pytest.mark.parametrize("case", SHARED_CONTAINERS)
def test_a_line_frees_an_object_in_a_shared_container(kernel: Kernel, case: str) -> None:
    code, line = SHARED_CONTAINERS[case]
    works(kernel, "import functools, weakref, numpy as np, pandas as pd")
    works(kernel, "class App: pass\napp = App()", code)
    assert one_line(kernel, "x") == line
    works(kernel, line)
    assert kernel.value("ref() is None") is True


def test_a_line_tells_of_no_data_that_unused_lines_drop(kernel: Kernel) -> None:
    works(
        kernel,
        """
        import numpy as np
        small = [str(number) for number in range(1000, 2000)]  # less than a hundredth
        x = [np.ones(1 << 20), small]
        whole = [x[0]]
        older = (small, np.ones(1 << 20))
        del small
        """,
    )
    assert one_line(kernel, "x") == "del whole[0]; del x"


def test_each_attribute_that_leads_to_an_object_has_a_row(kernel: Kernel) -> None:
    works(
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
    works(kernel, *lines, "del x")
    assert kernel.value("ref() is None") is True


def test_a_graph_that_holds_parameters_has_a_row(kernel: Kernel) -> None:
    needs("torch")
    works(kernel, _GROWS)
    (report,) = kernel.run("%gpumem why layers").reports("why")
    assert "notebook variable result: its autograd graph" in " ".join(report.split())
    assert one_line(kernel, "layers") == ""
    works(kernel, "del optimizer; del layer; del layers")
    assert kernel.value("refs[0]() is None") is False  # by the graph
    works(kernel, "result = result.detach()")
    assert kernel.value("refs[0]() is None") is True


def test_a_tensor_with_a_graph_has_no_line_for_all(kernel: Kernel) -> None:
    needs("torch")
    works(kernel, _GROWS + "total = result.sum()")
    assert one_line(kernel, "result") == ""  # the nodes of its graph are those of the total, too


@pytest.mark.parametrize(
    "code",
    [
        "pass",  # no other holder
        "rows = [x, 1]; other = [rows]; rows.append([x])",  # positions of one list
    ],
)
def test_no_line_is_shown_that_is_unsafe_to_paste(kernel: Kernel, code: str) -> None:
    works(kernel, "x = bytearray(8 << 20)", code)
    assert one_line(kernel, "x") == ""


def test_one_line_removes_a_part_that_a_cell_shows(kernel: Kernel) -> None:
    needs("torch")
    works(
        kernel,
        LEFT,
        "import torch; layers = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        "%%experiment e\nlayers.append(torch.nn.Linear(1024, 1024))",
    )
    ((_, _, line),) = left_by_experiment(kernel)
    assert line == "del layers[1]  # if nothing needs it"
    works(kernel, line)
    assert left(kernel) == []


def test_no_line_removes_an_older_module_with_its_new_parameter(kernel: Kernel) -> None:
    needs("torch")
    works(
        kernel,
        LEFT,
        "import torch; layers = torch.nn.Sequential(torch.nn.Linear(2, 2))",
        "%%experiment e\nlayers[0].weight = torch.nn.Parameter(torch.ones(1024, 1024))",
    )
    ((_, _, line),) = left_by_experiment(kernel)
    assert line == ""
    works(kernel, "del layers")
    assert left(kernel) == []


def test_no_line_takes_a_group_s_parameters_from_an_optimizer(kernel: Kernel) -> None:
    needs("torch")
    works(
        kernel,
        LEFT,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        """,
        """
        %%experiment e
        net = torch.nn.Linear(1024, 1024)
        optimizer.add_param_group({"params": net.parameters()})
        """,
    )
    ((_, path, line),) = left_by_experiment(kernel)
    assert path.startswith('notebook variable optimizer.param_groups[1]["params"]')
    assert line == "make the optimizer again, without it"
    works(kernel, "net = optimizer.param_groups[1]['params']; net[0].sum().backward()")
    works(kernel, "%%experiment e\noptimizer.step()\ndel net")
    lines = [line for _, path, line in left(kernel) if "param_groups" in path]
    assert set(lines) == {"make the optimizer again, without it"}


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        (
            "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]); kept = optimizer",
            "optimizer.history = [torch.zeros(2**19) for _ in range(2)]",
        ),
        (
            "weight = torch.nn.Parameter(torch.ones(1)); kept = [(0, (weight * 2).sum())]",
            "kept += [(n, (torch.ones(2**19) * weight).sum()) for n in range(3)]",
        ),
    ],
)
def test_lines_for_items_of_one_list_are_one_line(kernel: Kernel, setup: str, code: str) -> None:
    needs("torch")
    works(kernel, LEFT, f"import torch; {setup}", f"%%experiment e\n{code}")
    for rows in (left_by_experiment(kernel), left(kernel)):
        large = [row for row in rows if row[0] >= 2**20]
        assert len(large) == 1, rows
        ((_, _, line),) = large
    works(kernel, line)
    assert [row for row in left(kernel) if row[0] >= 2**20] == []
    assert kernel.value("len(kept) if type(kept) is list else 1") == 1


_LISTS_WITH_A_LENGTH = """
class Rows(list):
    def __len__(self):
        calls.append("len")
        return 1000

calls = []
rows = Rows()
"""


def test_a_list_is_not_asked_for_its_length(kernel: Kernel) -> None:
    works(kernel, _LISTS_WITH_A_LENGTH)
    works(kernel, "%%experiment e\nrows.append(bytearray(8 << 20))")
    (leaks,) = works(kernel, "%gpumem leaks").leaks()
    assert "to free it: del rows[0]" in leaks
    works(kernel, "assert calls == []")


def test_a_key_with_thousands_of_digits_is_named_by_its_type(kernel: Kernel) -> None:
    works(kernel, "table = {}")
    works(kernel, "%%experiment e\ntable[10 ** 5000] = bytearray(8 << 20)")
    (leaks,) = works(kernel, "%gpumem leaks").leaks()
    assert "notebook variable table (under a key of type int)" in leaks
    works(kernel, "x = table[10 ** 5000]")
    assert "notebook variable table (under a key of type int)" in holders(why(kernel, "x"))


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
    works(kernel, _TIMERS)
    works(kernel, f"t = timer({kind!r}, bytearray(8 << 20))")
    assert set(holders(why(kernel, "t")).values()) == {"t.cancel(); del t"}
    works(kernel, f"t.cancel(); x = bytearray(8 << 20); t = timer({kind!r}, x)")
    lines = holders(why(kernel, "x"))
    assert "t.cancel(); del t" in lines.values()
    assert "del t" not in lines.values()
    works(kernel, "t.cancel(); del t, x")


@pytest.mark.parametrize("kind", ["thread", "loop"])
def test_a_timer_in_an_attribute_is_cancelled(kernel: Kernel, kind: str) -> None:
    works(kernel, _TIMERS)
    works(kernel, f"x = bytearray(8 << 20); box = Box(); box.t = timer({kind!r}, x)")
    lines = holders(why(kernel, "x"))
    assert "box.t.cancel(); box.t = None" in lines.values()
    works(kernel, "box.t.cancel(); del box, x")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("pair = x, rest()", "del pair  # also drops 4 MiB of other data"),
        ("d = {'t': (rest(), x)}", 'del d["t"]  # also drops 4 MiB of other data'),
        ("n = Node((x, rest()))", "n.data = None  # also drops 4 MiB of other data"),
        ("def f(a=x, b=rest()): pass", "del f  # also drops 4 MiB of other data"),
        ("n = Node(Node((x, x))); n.rest = rest()", "n.data.data = None"),
        ("pairs = (x, [x, rest()])", "del pairs  # also drops 4 MiB of other data"),
        ("named = rest(); pair = x, named", "del pair"),
        ("pair = x, x", "del pair"),
        ("rows = [x, rest()]", "del rows[0]"),
        ("rows = (x,) * 100_000", "del rows"),
        ("rows = [x] * 100_000", "del rows"),
    ],
)
def test_a_line_names_other_data_that_it_drops(kernel: Kernel, code: str, line: str) -> None:
    works(
        kernel,
        f"""
        import numpy as np
        class Node:
            def __init__(self, data):
                self.data = data
        def rest():
            return np.ones(2**19)
        x = np.ones(2**20)
        {code}
        """,
    )
    assert list(holders(why(kernel, "x")).values()) == [line]


def test_no_line_frees_all_if_a_holder_has_more_references(kernel: Kernel) -> None:
    works(kernel, "import numpy as np; p = np.ones(2**20); views = {'a': p, 'b': p[1:], 'n': 1}")
    answer = why(kernel, "p")
    assert holders(answer) == {'notebook variable views["a"], and 1 more there': 'del views["a"]'}
    (report,) = works(kernel, "%gpumem why p").reports()
    assert "in one line" not in report


def test_a_leak_of_many_small_arrays_has_at_least_their_data(kernel: Kernel) -> None:
    """The objects of small arrays take more memory beside the data."""
    works(kernel, "import numpy as np\nkept = {}")
    for number, shape in ((3_000, 100), (3, 100_000)):
        leaving = f"%%experiment e\nx = [np.ones({shape}) for _ in range({number})]\nkept['x'] = x"
        (report,) = works(kernel, leaving).reports("experiment")
        assert "2.3 MiB" in report
        assert ("at least 2.3 MiB" in report) is (number == 3_000), report


IN_OLD_OBJECTS = {
    "dicts": "for each in dicts[:4000]: each['words'] = list(range(1000, 1020))",
    "few dicts": "for each in dicts[:60]: each['words'] = [str(word) for word in range(1000)]",
    "instances": "for each in instances: each.words = list(range(1000, 1020))",
}
"""Code that leaves many new objects in older ones."""


@pytest.mark.parametrize("case", IN_OLD_OBJECTS)
def test_many_new_objects_in_older_ones_are_held_by_these(kernel: Kernel, case: str) -> None:
    works(
        kernel,
        "%gpumem free",  # else the data takes the free pages of an earlier test
        """
        class Document: pass
        dicts = [{"number": number, "text": f"text {number}"} for number in range(10_000)]
        instances = [Document() for _ in range(5000)]
        """,
        f"%%experiment e\n{IN_OLD_OBJECTS[case]}",
    )
    variable = "instances" if case == "instances" else "dicts"
    number = {"dicts": "4,000", "few dicts": "60", "instances": "5,000"}[case]
    (leaks,) = works(kernel, "%gpumem leaks").leaks()
    (row,) = [row for row in leaks.splitlines() if "× list" in row]
    assert f"{number} × list" in row, leaks
    assert f"held by notebook variable {variable}" in row, row


def test_no_line_drops_many_older_dicts_with_their_new_items(kernel: Kernel) -> None:
    works(
        kernel,
        "%gpumem free",
        "docs = [{'number': number, 'text': f'text {number}'} for number in range(5_000)]",
        "%%experiment e\nfor each in docs[:1100]: each['words'] = list(range(1000, 1100))",
    )
    (leaks,) = works(kernel, "%gpumem leaks").leaks()
    (row,) = [row for row in leaks.splitlines() if "1,100 × list" in row]
    assert "docs" in row
    assert "del docs" not in row
    assert "docs.clear" not in row


def test_objects_that_imported_libraries_make_are_no_row(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"part{number}.py").write_text(
            textwrap.dedent(
                """\
                import abc
                class Part: pass
                parts = [Part() for _ in range(20)]
                for part in parts: part.numbers = list(range(1000, 1400))
                abc.table += parts
                """
            )
        )
    code = "for number in range({}, {}): importlib.import_module(f'part{{number}}')"
    with Kernel() as fresh:  # without free memory that the objects would fill
        works(
            fresh,
            "%load_ext ipygpumem",
            f"import abc, importlib, sys; abc.table = []; sys.path.insert(0, {str(tmp_path)!r})",
        )
        few, many = (
            works(fresh, f"%%experiment e\n{code.format(*numbers)}").reports("experiment")[0]
            for numbers in ((0, 10), (10, 60))
        )
    assert "objects (" in few, few
    assert "objects (" not in many
    assert "50 modules were imported" in many


def test_no_line_changes_the_lists_of_threads(kernel: Kernel) -> None:
    works(
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
        of_thread, of_pool = holders(why(kernel, "t")), holders(why(kernel, "pool"))
        assert of_thread['thread "worker"'] == "let it end, then join() it"
        assert "remove it from there" not in {*of_thread.values(), *of_pool.values()}
    finally:
        works(kernel, "go_on.set(); t.join(); pool.shutdown()")


def test_arrays_beyond_the_limit_of_a_search_have_a_holder_too(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        """
        from ipygpumem.inventory.rows import array_holders
        most = array_holders.MOST_EXPLAINED
        array_holders.MOST_EXPLAINED = 5
        hold = []
        """,
        "%%experiment e\nhold.extend(np.ones(150_000) for _ in range(8))",
    )
    rows = left_by_experiment(kernel)
    works(kernel, "array_holders.MOST_EXPLAINED = most; hold.clear()")
    assert {(path, line) for _, path, line in rows} == {
        ("notebook variable hold", "del hold[3:]"),
        (
            "something that the search did not reach within its limits",
            "free something, then ask %gpumem leaks again",
        ),
    }

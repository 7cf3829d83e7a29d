"""Memory of any kind that outlives its experiment is named, with its holder; in a real kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.units import MIB
from tests import hostile
from tests.kernel_records import survivors
from tests.process_memory import linux
from tests.steps import SHOW_LIBRARIES, experiment, needs, run_cells, run_failing, tidied_kernel

RESET = "import gc; gc.enable(); get_ipython().reset()"
DEFINE = """
import io, sys, functools
def texts(n): return [f"{i:0{1000}d}" for i in range(n)]
class Store: pass
class Corpus:
    def __init__(self, n): self.texts, self.names = texts(n), {i: f"{i:0500d}" for i in range(n)}
"""

shared_kernel, notebook = tidied_kernel(
    RESET, "%reload_ext ipygpumem", DEFINE, hides_libraries=True
)


def test_shared_memory_is_freed_by_the_advice_of_each_report(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        from multiprocessing.shared_memory import SharedMemory
        import numpy as np
        segments = []
        """,
    )
    (text,) = run_cells(
        notebook,
        """
        %%experiment x
        segment = SharedMemory(create=True, size=9 << 20); segment.buf[:] = bytes(9 << 20)
        segments.append(segment)
        """,
    ).survivors()
    advice = "segments[0].close(); segments[0].unlink()"
    assert f"segments[0] · to free it: {advice}" in text
    run_cells(notebook, "view = np.ndarray(9 << 20, 'u1', segments[0].buf)")
    (text,) = run_cells(notebook, "%gpumem why segments").reports("why")
    assert re.search(r"RAM 9 MiB · del segments frees \d+ B", text), text
    assert f"del view; {advice}" in text
    (text,) = run_cells(notebook, "del view", "%gpumem why segments").reports("why")
    assert advice in text
    run_cells(notebook, f"name = segments[0].name; {advice}")
    run_failing(notebook, "SharedMemory(name)", "FileNotFoundError")


def test_shared_memory_without_a_name_is_freed_by_its_line(notebook: Kernel) -> None:
    (text,) = run_cells(
        notebook,
        "from multiprocessing.shared_memory import SharedMemory",
        """
        %%experiment y --keep name
        lost = SharedMemory(create=True, size=9 << 20)
        lost.buf[:] = bytes(9 << 20)
        name = lost.name
        """,
    ).reports("experiment")
    stays = r"^ *shared memory: 9 MiB stay until you unlink them: (.+)$"
    for report in [text, *run_cells(notebook, "%gpumem leaks").leaks()]:
        assert re.search(stays, report, re.MULTILINE), report
    run_cells(notebook, re.search(stays, text, re.MULTILINE)[1])
    run_failing(notebook, "SharedMemory(name)", "FileNotFoundError")


@linux
def test_free_heap_pages_hide_no_shared_memory(kernel: Kernel) -> None:
    run_cells(
        kernel,
        "%load_ext ipygpumem",
        """
        from multiprocessing.shared_memory import SharedMemory
        segments = []
        older = [bytes(2000) for _ in range(10_000)]
        pins = [bytes(600) for _ in range(10)]  # above the older pages in malloc's heap
        del older
        """,
    )
    (text,) = run_cells(
        kernel,
        """
        %%experiment x
        segments.append(SharedMemory(create=True, size=9 << 20))
        segments[0].buf[:] = bytes(9 << 20)
        """,
    ).survivors()
    assert "to free it: segments[0].close(); segments[0].unlink()" in text
    run_cells(kernel, "segments[0].close(); segments[0].unlink()")


OLD = """
old_texts = texts(4 << 10); old_index = {"a": {"b": {"c": {"blob": bytes(6 << 20)}}}}; old_list = texts(2 << 10)
class Deep: pass
deep = Deep(); deep.inner = Deep(); deep.inner.inner = Deep(); deep.inner.inner.inner = Deep()
deep.inner.inner.inner.blob = bytes(5 << 20); deep.inner.inner.inner.cache = {"old": bytes(4 << 20)}
deep.inner.inner.inner.items = [bytes(3 << 20)]; results = []
"""  # noqa: E501
AROUND = """
index = {text: number for number, text in enumerate(old_texts)}
results.append(index); results.append(old_texts[:]); results.append([deep]); vars(deep); vars(deep.inner.inner.inner)
old_index["a"]["b"]["c"]["new"] = [1]; deep.inner.inner.inner.cache["new"] = []; old_list.sort(reverse=True)
best = deep.inner.inner.inner; results.append(best); copy = dict(old_index); results.append(copy)
results.append(bytes(8 << 20))
"""  # noqa: E501


def test_memory_from_before_an_experiment_is_never_blamed(notebook: Kernel) -> None:
    run_cells(notebook, OLD)
    run_cells(notebook, experiment(AROUND, name="a"))
    (row,) = survivors(notebook)
    assert (row.type_name, row.size_bytes >> 20) == ("bytes", 8)
    assert row.path == "notebook variable results[5]"


ELSEWHERE = {
    "deep.inner.inner.inner.items": "deep.inner.inner.inner.items.append([texts(9000)])",
    "closure of function add": "add([texts(9000)])",
    "default argument of function memo": "memo([texts(9000)])",
    "lru_cache of function load": "load(9000)",
    "Registry": "Registry.items.append(Corpus(6000))",
}


def test_new_objects_are_named_in_each_kind_of_holder(notebook: Kernel) -> None:
    run_cells(
        notebook,
        OLD,
        """
        class Registry: items = []
        def make():
            seen = []
            def add(x): seen.append(x)
            return add
        add = make()
        def memo(x, known=[]): known.append(x)
        @functools.lru_cache(None)
        def load(n): return texts(n)
        """,
    )
    run_cells(notebook, "%%experiment a\n" + "\n".join(ELSEWHERE.values()))
    rows = survivors(notebook)
    sizes = {place: sum(row.size_bytes for row in rows if place in row.path) for place in ELSEWHERE}
    # Each place keeps 9 MiB.
    assert min(sizes.values()) >= 0.95 * 9 * MIB, sizes


LEAKS = """
@functools.lru_cache(maxsize=None)
def load(n): return bytes(n)
load(8 << 20)
def make():
    seen = texts(7000)
    def f(x): seen.append(x)
    return f
f = make()
def rows():
    some = texts(6000)
    for row in some: yield row
g = rows(); next(g)
def memo(x, known={}): known[x] = texts(5000)
memo(1)
class Config: table = texts(4000)
def bad():
    local = texts(3000)
    raise ValueError
try: bad()
except ValueError as error: kept_error = error
plain = {"a": texts(3000), "b": [bytes(5 << 20)]}
"""


def test_leaks_lists_memory_of_any_kind_that_no_name_leads_to(notebook: Kernel) -> None:
    run_cells(notebook, LEAKS)
    (text,) = run_cells(notebook, "%gpumem leaks").leaks()
    lines = text.splitlines()
    assert lines[0].startswith("5 leaks")
    for line, (size, words) in zip(
        lines[1:],
        [
            ("8 MiB", "lru_cache of function load"),
            (r"7\.[12] MiB", "closure of function f"),
            (r"6\.[12] MiB", "suspended generator rows"),
            (r"5\.[12] MiB", "default argument of function memo"),
            (r"3(\.1)? MiB", "saved traceback, bad"),
        ],
        strict=True,
    ):
        assert re.match(size, line.strip())
        assert words in line
    run_cells(
        notebook, "load.cache_clear(); f = memo = kept_error = error = None; g.close(); g = None"
    )
    (text,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert text == "no leak of at least 1 MiB was found"


def test_the_locals_of_a_running_thread_are_named_in_each_report(notebook: Kernel) -> None:
    run_cells(notebook, "import threading, numpy as np")
    run_cells(
        notebook, "older, go_on, ready = bytes(9 << 20), threading.Event(), threading.Event()"
    )
    run_cells(
        notebook,
        """
        %%experiment x
        def work(given):
            text, rows, array = 'ab' * (5 << 20), [texts(7000)], np.ones(1 << 20)
            ready.set(); go_on.wait()
        threading.Thread(target=work, args=(older,), name='worker').start(); ready.wait()
        """,
    )

    # The experiment's end names what the thread's cell has made.
    local = 'thread "worker": running work() line 4, local '
    try:
        mib_by_path = {row.path: row.size_bytes >> 20 for row in survivors(notebook)}
        assert mib_by_path == {f"{local}text": 10, f"{local}array": 8, f"{local}rows": 7}

        # The other reports name what it was given, too.
        run_cells(notebook, "del older")
        (text,) = run_cells(notebook, "%gpumem leaks").leaks()
        for name in ("text", "array", "rows", "given"):
            assert f"{local}{name}" in text
        (text,) = run_cells(notebook, "%gpumem top").reports("top")
        for size, name in (
            ("10 MiB", "text"),
            ("9 MiB", "given"),
            ("8 MiB", "array"),
            (r"7\.[12] MiB", "rows"),
        ):
            assert re.search(rf"{size} .*{name}", text), text
        assert text.count("let the function return") == 4
    finally:
        run_cells(notebook, "go_on.set()")


def test_the_content_of_a_cache_is_listed_once(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        @functools.lru_cache
        def parts(n): return [bytes(2 << 20) for _ in range(n)]
        @functools.lru_cache(None)
        def text(n): return 'x' * (n << 20)
        """,
        experiment("whole = parts(4); blob = text(5)", name="x"),
        "part = parts(4)[0]",
    )
    (report,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert report.splitlines()[0] == "2 leaks · 11 MiB"  # ``part`` keeps 2 MiB more
    assert report.count("lru_cache of function") == 2


def test_an_output_held_only_by_ipython_is_listed_with_a_remedy(notebook: Kernel) -> None:
    number = notebook.value("get_ipython().execution_count")
    run_cells(
        notebook,
        """
        class Quiet(list):
            def __repr__(self): return 'quiet'
        Quiet(texts(5000))
        """,
    )
    (text,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert f"Out[{number}]: Quiet that only IPython holds" in text
    run_cells(notebook, f"%xdel _{number}")
    (text,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert text == "no leak of at least 1 MiB was found"


def test_an_error_says_how_much_memory_its_frames_hold(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        shared = texts(9000)
        def f(error):
            own, blob = texts(8000), {'k': bytes(40 << 20)}
            g(own, shared, error)
        """,
    )
    run_cells(
        notebook,
        """
        def g(a, b, error):
            raise error
        """,
    )
    report = run_failing(notebook, "f(ValueError())", "ValueError").reports("cell")[0]
    assert re.search(
        r"the traceback's frames still hold 48\.[12] MiB: %gpumem free frees it", report
    )
    (text,) = run_failing(notebook, "f(MemoryError())", "MemoryError").reports("recovery")
    assert re.search(r"40 MiB +f +4 +blob +dict +\[\"k\"\] 40 MiB", text), text
    assert re.search(r"8.[12] MiB +f +4 +own +list +str 8.[12] MiB", text), text
    assert "shared" not in text


def test_a_list_with_two_names_counts_once_and_kept_names_do_not(notebook: Kernel) -> None:
    run_cells(notebook, "a = b = []")
    run_cells(
        notebook,
        experiment(
            "c = texts(7000); a.append(c); b += [texts(6000), bytes(3 << 20)]",
            name="x",
            options="--keep c",
        ),
    )
    assert [(row.type_name, row.size_bytes >> 20) for row in survivors(notebook)] == [("object", 9)]


@pytest.mark.parametrize("make", ["texts(9000)", "[np.ones(1 << 20)]", "'x' * (9 << 20)"])
def test_names_bound_by_global_belong_to_the_notebook(notebook: Kernel, make: str) -> None:
    run_cells(notebook, "import numpy as np")
    reply = run_cells(
        notebook,
        f"""
        %%experiment x
        global made, odd
        made = {make}; odd = 1
        """,
    )
    (text,) = reply.reports("experiment")
    assert "not named" not in text
    assert "kept: made, odd" in text
    assert survivors(notebook) == []
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="3.10 does not enter the frame of a coroutine: docs/memory-reference.md",
)
@pytest.mark.xfail(
    version("ipykernel").startswith("6.17."),
    reason="its event loop has further callbacks, and is not always found",
    strict=False,
)
def test_no_other_task_is_blamed_for_a_new_one(notebook: Kernel) -> None:
    run_cells(
        notebook,
        SHOW_LIBRARIES,
        """
        import asyncio
        async def wait(*kept): await asyncio.sleep(1000)
        poller = asyncio.create_task(wait())
        """,
    )
    (text,) = run_cells(
        notebook,
        experiment("task = asyncio.create_task(wait(bytearray(b'1') * (9 << 20)))", name="tasks"),
    ).survivors()
    assert re.search(r'held by the event loop(\["_ready"\])?\[0\]', text), text
    assert "poller" not in text
    run_cells(
        notebook,
        """
        for one in asyncio.all_tasks():
            if 'wait' in repr(one.get_coro()): one.cancel()
        """,
    )


_WITH_FRAMES_OF_COROUTINES = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="3.10 does not enter the frame of a coroutine: docs/memory-reference.md",
)
_TASKS_AND_VARIABLES = """
import asyncio, contextvars, re, weakref
class Big(bytearray): pass
made = weakref.WeakValueDictionary()
def big(name): return made.setdefault(name, Big(9 << 20))
async def sleep(x): await asyncio.sleep(1000)
async def wait(x): await asyncio.Event().wait()
slept = asyncio.create_task(sleep(big('slept')))
waits = asyncio.create_task(wait(big('waits')))
group = [asyncio.create_task(sleep(big('group')))]
new = contextvars.ContextVar('new')
token = new.set(big('new'))
inner = contextvars.ContextVar('inner')
inner.set({'k': [big('inner')]});
"""
"""Tasks and context variables that have 9 MiB each."""


@pytest.fixture
def with_tasks(notebook: Kernel) -> Iterator[Kernel]:
    """A kernel with tasks and context variables, which are gone after the test."""
    run_cells(notebook, SHOW_LIBRARIES, _TASKS_AND_VARIABLES, "await asyncio.sleep(0)")
    assert notebook.value("sorted(made)") == ["group", "inner", "new", "slept", "waits"]
    yield notebook
    run_cells(
        notebook,
        """
        for task in asyncio.all_tasks():
            if task.get_coro().__name__ in ("sleep", "wait"): task.cancel()
        """,
        "new.set(None); inner.set(None);",
        "await asyncio.sleep(0)",
    )


@_WITH_FRAMES_OF_COROUTINES
def test_top_has_lines_for_tasks_and_context_variables(with_tasks: Kernel) -> None:
    (top,) = run_cells(with_tasks, "%gpumem top").reports("top")
    rows = with_tasks.value(
        "{row.name: (row.size_bytes >> 20, row.remedy) for row in "
        "__import__('ipygpumem').top().names}"
    )
    for name, remedy in (
        ("slept", "slept.cancel(); del slept"),
        ("waits", "waits.cancel(); del waits"),
        ("group", "cancel its tasks, then del group"),
        ("new.get()", "new.set(None);"),
        ("inner.get()", "inner.set(None);"),
    ):
        assert rows[name] == (9, remedy)
    assert "token" not in top


@_WITH_FRAMES_OF_COROUTINES
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("slept", r"9 MiB +the event loop.* slept.cancel\(\); del slept$"),
        ("waits", r"del waits frees (9 MiB|all of it)"),
        ("group", "let its tasks end, or cancel them"),
        ("token", r"del token frees \d+ B"),
        (
            'inner.get()["k"][0]',
            r'context variable inner\["k"\]\[0\] +del inner.get\(\)\["k"\]\[0\]',
        ),
    ],
)
def test_why_has_a_line_for_data_of_a_task_or_variable(
    with_tasks: Kernel, name: str, pattern: str
) -> None:
    (why,) = run_cells(with_tasks, f"%gpumem why {name}").reports("why")
    assert re.search(pattern, why, re.MULTILINE), why


@_WITH_FRAMES_OF_COROUTINES
def test_leaks_name_the_context_variables_that_hold_data(with_tasks: Kernel) -> None:
    (leaks,) = run_cells(with_tasks, "%gpumem leaks").leaks()
    for name in ("new", "inner"):
        assert f"held by context variable {name} · to free it: {name}.set(None);" in leaks


@_WITH_FRAMES_OF_COROUTINES
def test_advice_about_tasks_and_context_variables_frees_them(with_tasks: Kernel) -> None:
    run_cells(
        with_tasks,
        "slept.cancel(); del slept",
        "waits.cancel(); del waits",
        "new.set(None);",
        'del inner.get()["k"][0]',
        "for task in group: task.cancel()",
        "await asyncio.sleep(0)",
        "del group, task; import gc; gc.collect();",
    )
    assert with_tasks.value("sorted(made)") == []


def test_an_object_keeps_the_name_that_the_experiment_gave_it(notebook: Kernel) -> None:
    needs("pandas")
    run_cells(notebook, "import pandas; store = Store()")
    run_cells(
        notebook,
        """
        %%experiment x
        frame = pandas.DataFrame({'t': texts(9000), 'n': [.5] * 9000})
        store.f = frame
        """,
    )
    text = run_cells(notebook, "%gpumem leaks").leaks()[0]
    assert re.search(
        r"frame: DataFrame with t [89].. MiB · cell \d+ · held by notebook variable store.f",
        text,
    )
    run_cells(notebook, "del store.f")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_no_code_of_an_object_runs_that_outlives_an_experiment(notebook: Kernel) -> None:
    run_cells(
        notebook,
        hostile.SOURCE,
        """
        store, cache = Store(), []
        @functools.lru_cache
        def load(n): return things()
        """,
    )
    run_cells(
        notebook,
        """
        def things():
            kinds = Hostile, Container, Sequence, Slotted, Lazy
            contents = [{1: texts(500)} if kind is Container else texts(500) for kind in kinds]
            return [made(kind, content) for kind, content in zip(kinds, contents)]
        """,
    )
    run_cells(notebook, "touched.clear()")
    run_cells(
        notebook,
        experiment("loaded = load(1); store.things = things(); cache.extend(things())", name="x"),
    )
    run_cells(notebook, "%gpumem leaks")
    run_failing(
        notebook,
        """
        def f():
            mine = things(); raise MemoryError
        f()
        """,
        "MemoryError",
    )
    assert notebook.value("touched") == []
    assert len(survivors(notebook)) > 0


def test_the_report_says_when_memory_may_be_older(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import ipygpumem.shell.searches.survivor_search as module
        most, module._MOST_OLD = module._MOST_OLD, 3
        """,
        OLD,
    )
    run_cells(notebook, experiment("results.append(bytes(8 << 20))", name="a"))
    run_cells(notebook, "module._MOST_OLD = most")
    (row,) = survivors(notebook)
    assert row.type_name == "bytes"
    assert row.path == "notebook variable results[0], possibly allocated before the experiment"


def test_dead_frames_are_not_named_if_polars_keeps_their_pages(notebook: Kernel) -> None:
    """As in polars#23128, the allocator keeps pages for a while: nothing of the user's is alive."""
    needs("polars")
    run_cells(notebook, "import polars; results = []")
    run_cells(
        notebook,
        """
        %%experiment x
        frame = polars.DataFrame({'t': texts(16 << 10), 'n': range(16 << 10)})
        results.append(frame.group_by('t').agg(polars.col('n').sum()).sort('n').height)
        """,
    )
    assert survivors(notebook) == []


def test_text_next_to_an_unnamed_array_is_in_the_arrays_row(notebook: Kernel) -> None:
    pytest.importorskip("numpy")
    run_cells(
        notebook,
        """
        import numpy
        cache = {}
        """,
    )
    made = '{"text": ["row %d " % i * 20 for i in range(100_000)], "x": numpy.ones(1 << 22)}'
    run_cells(notebook, experiment(f'cache["run"] = {made}', name="a"))
    # Two rows would have lines of which the first makes the second fail.
    (row,) = survivors(notebook)
    assert row.size_bytes > 44 << 20


KINDS: dict[str, tuple[str, float]] = {
    "text": ("'x' * (16 << 20)", 16),
    "bytes": ("bytes(16 << 20)", 16),
    "a list of text": ("texts(16 << 10)", 16),
    "a dict of bytes": ("{i: bytes(1 << 20) for i in range(16)}", 16),
    "a dict of numbers": ("{i: i * 1.5 for i in range(200_000)}", 200_000 * 64 / MIB + 8),
    "lists of numbers": ("[[i, i + 1.5] for i in range(150_000)]", 150_000 * 128 / MIB),
    "a BytesIO": ("io.BytesIO(bytes(16 << 20))", 16),
    "a user's class": ("Corpus(10_000)", 15),
    "a pandas object column": (
        "__import__('pandas').DataFrame({'t': texts(16 << 10)}, dtype=object)",
        16,
    ),
    "a pandas str column": ("__import__('pandas').DataFrame({'t': texts(16 << 10)})", 16),
    "a polars frame": ("__import__('polars').DataFrame({'t': texts(16 << 10)})", 16),
    "a pyarrow table": ("__import__('pyarrow').table({'t': texts(16 << 10)})", 16),
    "a PIL image": ("__import__('PIL.Image').Image.new('RGB', (2048, 2048))", 16),
    "a SciPy matrix": ("__import__('scipy.sparse').sparse.eye(1 << 20, format='csr')", 16),
    "a scikit-learn forest": (
        "__import__('sklearn.ensemble').ensemble.RandomForestRegressor(20, n_jobs=1).fit(*"
        "(lambda r: (r.rand(4000, 2), r.rand(4000)))(__import__('numpy').random.RandomState(0)))",
        6.9,
    ),
}
PLACES = {
    "kept[-1]": ("kept = [b'old']", "kept.append({})"),
    'kept["new"]': ("kept = {'old': 1}", "kept['new'] = {}"),
    "store.content": ("store = Store(); store.content = None", "store.content = {}"),
    'history["runs"][0]': ("history = {'runs': []}", "history['runs'].append({})"),
}


def needed(kind: str) -> None:
    for library, word in (
        ("pandas", "pandas"),
        ("polars", "polars"),
        ("pyarrow", "arrow"),
        ("PIL", "PIL"),
    ):
        if word in kind:
            needs(library)
    for library, word in (("scipy", "SciPy"), ("sklearn", "scikit")):
        if word in kind:
            needs(library)


SAMPLE = (
    "text",
    "a dict of numbers",
    "a user's class",
    "a pandas str column",
    "a polars frame",
    "a PIL image",
)
REST = [pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS if kind not in SAMPLE]


@pytest.mark.parametrize("kind", [*SAMPLE, *REST])
def test_each_kind_that_outlives_its_experiment_is_named(notebook: Kernel, kind: str) -> None:
    needed(kind)
    make, mib = KINDS[kind]
    before, keep = list(PLACES.values())[list(KINDS).index(kind) % len(PLACES)]
    libraries = "".join(
        f"import {name}\n" for name in re.findall(r"__import__\('([\w.]+)'\)", make)
    )
    run_cells(notebook, f"{libraries}from array import array", before)
    run_cells(notebook, "%%experiment a\n" + keep.format(make))
    rows = survivors(notebook)
    size_bytes = sum(row.size_bytes for row in rows)
    assert 0.95 * mib * MIB <= size_bytes <= 1.6 * mib * MIB, rows
    for row in rows:
        assert row.path.startswith("notebook variable "), rows

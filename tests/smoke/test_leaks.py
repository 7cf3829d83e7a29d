"""``%gpumem leaks`` and the survivors at an experiment's end, in a real kernel."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import survivors
from tests.steps import experiment, needs, run_cells, tidied_kernel

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

BIG = "numpy.zeros(1 << 20)"
"""8 MiB."""


shared_kernel, notebook = tidied_kernel(
    "import gc, sys; gc.enable(); sys.modules.pop('mine', None); sys.modules.pop('other', None)\n"
    "get_ipython().reset()",
    "%reload_ext ipygpumem",
    "import numpy",
    hides_libraries=True,
)


def next_cell(kernel: Kernel) -> int:
    """Return the number of the next cell; after ``reset`` the versions of IPython count on
    differently.
    """
    number: int = kernel.value("get_ipython().execution_count")
    return number


def leaks(kernel: Kernel, options: str = "") -> str:
    (report,) = run_cells(kernel, f"%gpumem leaks {options}").leaks()
    return report


def test_a_leak_is_reported_at_its_experiments_end_and_later(notebook: Kernel) -> None:
    run_cells(notebook, "cache = {}", "%experiment start a")
    cell = next_cell(notebook)
    run_cells(notebook, f"x = {BIG}; cache['run3'] = [x]")
    (report,) = run_cells(notebook, "%experiment end").survivors()
    line = (
        f"8 MiB · x: ndarray float64 1048576 · cell {cell} · held by notebook variable "
        'cache["run3"] · to free it: del cache["run3"]'
    )
    assert line in report
    assert leaks(notebook).splitlines() == ["1 leak · 8 MiB", "  " + line]
    run_cells(notebook, "cache.clear()")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_the_notes_of_a_search_are_no_leak(notebook: Kernel) -> None:
    run_cells(notebook, "records = [{'id': i, 'vector': numpy.ones(9)} for i in range(30_000)]")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"
    run_cells(notebook, "del records")


def test_objects_that_only_kept_names_hold_are_no_leak(notebook: Kernel) -> None:
    run_cells(notebook, "cache = []")
    make = f"%%experiment a --keep best\nm1 = [{BIG}, {BIG}]\nbest = m1"
    assert "still alive" not in run_cells(notebook, make).reports("experiment")[0]
    assert leaks(notebook) == "no leak of at least 1 MiB was found"
    for also, ending in (
        (f"{make}\ncache.append(m1)", "  # and delete best when you no longer need it"),
        (f"{make}[0]\ncache.append(m1[1])", ""),
    ):
        run_cells(notebook, "cache.clear()")
        (report,) = run_cells(notebook, also).survivors()
        assert "held by notebook variable cache" in report
        assert re.search(r"to free it: (.*)$", report, re.MULTILINE)[1] == f"del cache[0]{ending}"


def test_an_older_name_to_keep_that_a_function_binds_is_no_leak(notebook: Kernel) -> None:
    """The line was ``del best``."""
    run_cells(notebook, "best = None")
    experiment_cell = f"""
    %%experiment a --keep best
    def train():
        global best
        best = {BIG}
    train()
    """
    assert "still alive" not in run_cells(notebook, experiment_cell).reports("experiment")[0]
    assert leaks(notebook) == "no leak of at least 1 MiB was found"
    run_cells(notebook, "del best")


_KEEPERS = """
def f():
    big = numpy.ones(1 << 23)
    raise ValueError
def g():
    big = numpy.ones(1 << 23)
    return lambda: big
class h:
    def keep():
        big = numpy.ones(1 << 23); kept.append(big)
"""
"""Functions that make an array for a place without a name."""


@pytest.mark.parametrize(
    ("code", "path"),
    [
        pytest.param(
            """
            try: f()
            except ValueError as e: kept.append(e)
            """,
            "kept[0]: saved traceback, f (cell {}) line 4, local big",
            id="an error",
        ),
        pytest.param(
            "kept.append(g())",
            "kept[0]: closure of function <lambda> (cell {}), variable big",
            id="a closure",
        ),
        pytest.param("h.keep()", "kept[0]", id="an attribute of a class"),
    ],
)
def test_a_surviving_array_without_a_name_is_reported_once(
    notebook: Kernel, code: str, path: str
) -> None:
    run_cells(
        notebook, f"kept = []\nold = [{BIG}]\nhidden = (lambda old: lambda: old)(old); del old"
    )
    # The first is what IPython 7 knows code by after ``reset``.
    numbers = (notebook.value("len(In)"), next_cell(notebook))
    (report,) = run_cells(notebook, experiment(_KEEPERS, code, name="a")).survivors()
    lines = [line for line in report.splitlines() if "held by" in line]
    assert len(lines) == 1
    start = "64 MiB · ndarray float64 8388608 · held by notebook variable"
    assert any(f"{start} {path.format(number)} · " in lines[0] for number in numbers)
    (report,) = run_cells(notebook, experiment("x = 1", name="b")).reports("experiment")
    assert "held by" not in report


HIDDEN = "_ = __ = ___ = 1", "del Out[{0}]; del _{0}", "IPython's hidden copy of _"
PLACES = [
    ("1", "2", "Out[{0}]"),
    ("1", "", "Out[{0}]"),
    ("1", "del Out[{0}]", "IPython's output _"),
    HIDDEN,
]


@pytest.mark.parametrize(("make", "tidy", "holder"), PLACES)
def test_the_advice_about_an_output_frees_it(
    notebook: Kernel, make: str, tidy: str, holder: str
) -> None:
    """IPython keeps copies of an output in up to seven places, and some of them only for the latest
    ones.
    """
    run_cells(
        notebook,
        """
        import weakref
        class Data(numpy.ndarray): pass
        """,
    )
    number = next_cell(notebook)
    run_cells(
        notebook,
        "made = [numpy.zeros(1 << 20).view(Data)]; alive = weakref.ref(made[0].base); "
        "made.pop().base",
    )
    run_cells(notebook, f"{make};", tidy.format(number))
    (line,) = [line for line in leaks(notebook).splitlines() if "held by" in line]
    path, advice = line.split("held by ")[1].split(" · to free it: ")
    assert path.startswith(holder.format(number))
    assert notebook.value("alive() is not None")
    run_cells(notebook, advice.split("; ")[0])
    assert notebook.value("alive()") is None
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_values_to_be_restored_are_explained_during_a_scope(notebook: Kernel) -> None:
    run_cells(notebook, f"model = {BIG}", "%experiment start a", "model = 1")
    assert "held by experiment a, which restores model at its end" in leaks(notebook)
    run_cells(notebook, "%experiment end")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


@pytest.mark.parametrize(
    ("work", "holder"),
    [
        (f"z = show({BIG}); wait()", 'thread "worker": running work() line 3, local z'),
        (
            f"kept = {{'a': show({BIG})}}; wait()",
            'thread "worker": running work() line 3, local kept["a"]',
        ),
        (
            f"(show({BIG}), wait())",
            "something that cannot be seen from Python: a running function or compiled code",
        ),
    ],
)
def test_an_array_of_a_running_function_is_not_blamed_on_cpp(
    notebook: Kernel, work: str, holder: str
) -> None:
    run_cells(notebook, "import threading; go_on, ready = threading.Event(), threading.Event()")
    run_cells(notebook, "def wait(): ready.set(); go_on.wait()")
    run_cells(
        notebook,
        f"""
        %%experiment a
        def show(z): global sent; sent = [z[:1]]; return z
        def work(): {work}
        thread = threading.Thread(target=work, name='worker'); thread.start(); ready.wait()
        """,
    )
    try:
        assert f"sent: list with 1 array float64 · held by {holder}" in leaks(notebook)
    finally:
        run_cells(notebook, "go_on.set()")


@pytest.mark.parametrize("name", ["mine.HID[0]", "mine.BOX['a: b'].x[0]", "mine.other.HID[0]"])
def test_an_attribute_of_a_users_module_is_no_leak(
    notebook: Kernel, tmp_path: Path, name: str
) -> None:
    box = "class Box: pass\n"
    (tmp_path / "other.py").write_text("HID = [0]")
    (tmp_path / "mine.py").write_text(
        f"import other\n{box}HID = [0]; BOX = {{'a: b': Box()}}; BOX['a: b'].x = [0]"
    )
    run_cells(
        notebook, f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine\n{name} = {BIG}"
    )
    assert leaks(notebook) == "no leak of at least 1 MiB was found"
    run_cells(notebook, "del mine")
    assert leaks(notebook).startswith("1 leak")


PASTED = {
    "fs = {'a b': functools.lru_cache(big)}; fs['a b']();": 'fs["a b"].cache_clear()',
    "def make(x): return lambda: x\nclosures = [make(big())]": (
        "del closures[0]  # when you no longer need the function"
    ),
    "def f(x=big()): pass": "del f  # when you no longer need the function",
    "class Trainer:\n    def __init__(self): self.x = big()\nends = {'end': Trainer().__init__}": 'del ends["end"]',  # noqa: E501
    "def steps(x): yield x\ng = steps(big()); next(g);": "g.close()",
    "async def turns(x): yield x\nag = turns(big()); await ag.asend(None);": "await ag.aclose()",
    'async def load(x): await asyncio.sleep(1)\nloads = {"it\'s": load(big())}': """del loads["it's"]""",  # noqa: E501
    "try: fails(big())\nexcept Exception as e: error = e": "error = None  # once you have read it",
    "try: fails(big())\nexcept Exception as e: errors = ['', {1: e}]": "del errors[1][1]  # once you have read it",  # noqa: E501
    "import one; one.HIDDEN = {3: big()}; del one": "import one; del one.HIDDEN[3]",
    "import two as m; m.Files = Files; m.Files.load(1 << 20); del Files;": "m.Files.load.cache_clear()",  # noqa: E501
    "%run -n three.py\ndel KEPT": "get_ipython()._main_mod_cache['{folder}/three.py'].KEPT = None",
    "async def work(x): await asyncio.Queue().get()\nt = asyncio.create_task(work(big()))": "t.cancel(); t = None",  # noqa: E501
    "async def wait(x, q): await q.get()\nq = asyncio.Queue(); asyncio.create_task(wait(big(), q));": "",  # noqa: E501
    "async def fail(x): fails(x)\nfailed = [asyncio.create_task(fail(big()))]": "del failed[0]",
    textwrap.dedent(
        """\
        async def stop(x):
            e.cancel(); await asyncio.sleep(9)
        e = asyncio.create_task(stop(big()))"""
    ): "e = None",
    "plt.imshow(big().reshape(1024, -1));": "plt.close(1)",
}
"""Cells that leave 8 MiB each, and what frees them; of a task without a name only that there is
something.
"""


def test_arrays_in_two_places_make_two_rows(notebook: Kernel) -> None:
    run_cells(notebook, "import numpy; first, second = {}, {'runs': []}")
    run_cells(
        notebook,
        """
        %%experiment x
        xs = [numpy.ones(1 << 18) for _ in range(9)]
        first['a'] = xs[0]
        second['runs'].append({'data': xs[1:]})
        """,
    )
    assert [(row.size_bytes, row.path) for row in survivors(notebook)] == [
        (16 << 20, 'notebook variable second["runs"][0]'),
        (2 << 20, 'notebook variable first["a"]'),
    ]
    lines = leaks(notebook).splitlines()
    assert lines[0] == "2 leaks · 18 MiB"
    assert "16 MiB · xs: list with 8 arrays" in lines[1]
    assert 'held by notebook variable second["runs"][0] ·' in lines[1]
    assert 'held by notebook variable first["a"] ·' in lines[2]
    run_cells(notebook, 'del second["runs"][0]')
    assert leaks(notebook).splitlines()[0] == "1 leak · 2 MiB"
    run_cells(notebook, 'del first["a"]')
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


def test_arrays_under_several_keys_are_held_by_the_dict(notebook: Kernel) -> None:
    run_cells(notebook, "import numpy; outer = {'older': 1}")
    run_cells(
        notebook,
        """
        %%experiment x
        xs = [numpy.ones(1 << 18) for _ in range(3)]
        outer.update(enumerate(xs))
        """,
    )
    assert [row.path for row in survivors(notebook)] == ["notebook variable outer"]
    line = "for _key in list(outer)[1:]: del outer[_key], _key"
    assert f"held by notebook variable outer · to free it: {line}" in leaks(notebook)
    run_cells(notebook, "del outer")


def test_unmeasured_memory_gets_advice_that_can_be_pasted(notebook: Kernel, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.py").write_text(
            "import numpy; KEPT = numpy.ones(1 << 20)" if name == "three" else ""
        )
    run_cells(
        notebook,
        f"import asyncio, functools, os, sys; sys.path.insert(0, {str(tmp_path)!r}); "
        f"os.chdir(sys.path[0])",
    )

    # Leaks that each need another line.
    cached = """\
class Files:
    @staticmethod
    @functools.lru_cache
    def load(n): return numpy.zeros(n)"""
    run_cells(notebook, f"def big(): return {BIG}\ndef fails(x): 1 / 0\n{cached}")
    cases = dict(PASTED)
    if importlib.util.find_spec("matplotlib") is None:
        cases.popitem()
    else:
        run_cells(
            notebook,
            """
            %matplotlib agg
            import matplotlib.pyplot as plt
            """,
        )

    # Each line of the report is one of the expected, and together they free all.
    run_cells(notebook, *cases, "await asyncio.sleep(0)")
    told = [line.partition(" · to free it: ")[2] for line in leaks(notebook).splitlines()[1:]]
    expected = {advice.replace("{folder}", str(tmp_path)) for advice in cases.values() if advice}
    assert (expected - set(told), len(told)) == (set(), len(cases)), told
    run_cells(notebook, *told, "await asyncio.sleep(0)")
    assert leaks(notebook) == "no leak of at least 1 MiB was found"


SEVERAL = {
    "for n in range(10): outer['runs'].append({'n': n, 'data': numpy.ones(1 << 20)})": (
        'outer["runs"].clear()'
    ),
    "for n in range(9): runs[n]['data'] = numpy.ones(1 << 20)": (
        'for _item in runs: del _item["data"]; del _item'
    ),
    "for n in range(9): outer[n] = {'data': [numpy.ones(1 << 20)], 'small': numpy.ones(9)}": (
        "for _key in list(outer)[1:]: del outer[_key], _key"
    ),
    "for n in range(10): outer['runs'].append(numpy.ones(1 << 20))": 'outer["runs"].clear()',
    "x = numpy.ones(1 << 20); y = numpy.ones((1 << 20, 2)); mixed += [x, y]": "del mixed[3:]",
    "x = numpy.ones(1 << 20); outer['x'] = x; second['x'] = x": 'del outer["x"]; del second["x"]',
}
"""Code that leaves several arrays, or one in several places, and the line that frees the one row of
it.
"""


@pytest.mark.parametrize(("code", "line"), SEVERAL.items())
def test_the_rows_of_one_container_have_one_line(notebook: Kernel, code: str, line: str) -> None:
    run_cells(notebook, "outer, second, mixed = {'runs': []}, {}, [1, 2, 3]")
    run_cells(notebook, "runs = [{'n': n} for n in range(9)]", experiment(code, name="a"))
    report = leaks(notebook).splitlines()
    assert report[0].startswith("1 leak")
    assert report[1].endswith(f"to free it: {line}")
    run_cells(notebook, line)
    assert leaks(notebook) == "no leak of at least 1 MiB was found"
    assert notebook.value("mixed") == [1, 2, 3]


def test_a_groupby_is_removed_as_a_whole(notebook: Kernel) -> None:
    needs("pandas")
    run_cells(notebook, "import pandas; outer = {}")
    make = (
        "frame = pandas.DataFrame({'a': numpy.arange(1 << 20), 'b': 1.5}); outer['g'] = "
        "frame.groupby('a')"
    )
    run_cells(notebook, experiment(make, name="a"))
    text = leaks(notebook)
    assert 'held by notebook variable outer["g"]' in text
    assert text.endswith('to free it: del outer["g"]')
    run_cells(notebook, 'del outer["g"]')
    assert leaks(notebook) == "no leak of at least 1 MiB was found"

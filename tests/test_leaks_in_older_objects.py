"""New data in older objects has lines that remove it without the older data."""

import textwrap
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import (
    READ_LEAKS,
    READ_WHY,
    leak_rows,
    lines_by_holder,
    number_alive,
    survivor_rows,
    why_record,
)
from tests.process_memory import linux
from tests.steps import experiment, run_cells, tidied_kernel

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            """
            store += made
            store.append({'d': made})
            kept = [made[1]]
            """,
            id="a list and a dict in it",
        ),
        pytest.param(
            """
            outer['p'] = outer['q'] = made[0]
            outer['h'] = [made[1]]
            kept = made
            """,
            id="keys of a dict",
        ),
        pytest.param(
            """
            store.append((made[0], {'q': [made[1]]}))
            kept = (made[0],)
            """,
            id="a tuple with a dict",
        ),
        pytest.param(
            """
            store.append(made[0])
            outer['r'] = made
            kept = {'x': made[1]}
            """,
            id="a list and a key",
        ),
    ],
)
def test_a_line_with_a_kept_name_removes_only_its_row(kernel: Kernel, code: str) -> None:
    made = """
        made = [np.ones(2**18), np.ones(2**18)]
        watched.extend(map(weakref.ref, made))
        """
    run_cells(kernel, READ_LEAKS, "outer, store = {'w': 1}, [0]; watched = []")
    leak_rows(kernel)  # else a new array may be mistaken for that of an earlier case at its place
    run_cells(
        kernel,
        experiment(made, code, options="--keep kept"),
        "store.append(array()); store += [{'d': [array(), array()]}]",
    )
    rows = leak_rows(kernel)
    assert [row.line.partition("  # and ")[2] for row in rows] == [
        "delete kept when you no longer need it"
    ]
    run_cells(kernel, rows[0].line)
    assert leak_rows(kernel) == []
    run_cells(kernel, "del kept")
    assert number_alive(kernel) == 3  # those that came later


def test_new_data_in_an_older_object_that_is_kept_is_no_leak(kernel: Kernel) -> None:
    run_cells(kernel, READ_LEAKS, "runs = [{}, {}, {}]")
    experiment_cell = """
    %%experiment e --keep kept
    def fill():
        for run in runs: run["data"] = np.ones(2**20)
    fill()
    kept = runs[1]
    """
    (report,) = run_cells(kernel, experiment_cell).reports("experiment")
    assert "not named" not in report
    (row,) = survivor_rows(kernel)
    run_cells(kernel, row.line)
    assert leak_rows(kernel) == []
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
    run_cells(
        kernel,
        READ_LEAKS,
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "sys.modules.pop('tables_of_the_user', None)",  # of another case
        "from tables_of_the_user import load",
        experiment("for number in range(5000): load(number)"),
    )
    (row,) = survivor_rows(kernel)
    assert row.size_bytes >= 5_000_000
    assert row.path.startswith(f"module tables_of_the_user, global {place}")
    assert row.line.startswith(f"import tables_of_the_user; tables_of_the_user.{place}")
    run_cells(kernel, row.line)
    assert leak_rows(kernel) == []
    run_cells(kernel, "from tables_of_the_user import cache")
    assert kernel.value("len(getattr(cache, 'rows', cache))") == 0


def test_an_array_with_the_identity_of_a_freed_leak_is_a_leak(kernel: Kernel) -> None:
    """The next array often gets it: here, the record of the freed one is given that identity."""
    run_cells(kernel, READ_LEAKS, "box = []")
    run_cells(
        kernel,
        """
        %%experiment first
        made = np.ones(2**18)
        box.append(made)
        """,
    )
    experiment_cell = """
    %%experiment second
    made = np.ones(2**19)
    box.append(made)
    def give_identity(made):
        known = app.experiments.survivors.names_with_arrays
        ((is_alive, array),) = known[-1].arrays
        same = array._replace(storage=("numpy", id(made)))
        known[-1] = dataclasses.replace(known[-1], arrays=((is_alive, same),))
    give_identity(made)
    """
    run_cells(kernel, "import dataclasses; box.clear()", experiment_cell)
    (row,) = leak_rows(kernel)
    assert (row.size_bytes // MIB, row.line) == (4, "del box[0]")


def test_older_data_of_a_kept_name_hides_no_leak(kernel: Kernel) -> None:
    run_cells(kernel, READ_LEAKS, "runs = [{'old': np.ones(2**20)} for _ in range(4)]")
    experiment_cell = """
    %%experiment e --keep top
    for number in (1, 3): runs[number]["new"] = np.ones(2**19)
    top = runs[:2]
    """
    run_cells(kernel, experiment_cell)
    assert [row.line for row in survivor_rows(kernel)] == ['del runs[3]["new"]']


OLDER_BEHIND_LINES = {
    "a tuple": ("pair = [(older,)]", "pair[0] = (*pair[0], data)", "pair[0] = None"),
    "a cached function": (
        """
        @functools.lru_cache
        def load(n): return np.ones(2**20) if n else older
        load(0);
        """,
        "data = load(1)",
        "load.cache_clear()",
    ),
}
"""Code that makes a place with older data, and code that puts new data there, with the line."""


@pytest.mark.parametrize("case", OLDER_BEHIND_LINES)
def test_a_line_says_which_other_data_it_drops(kernel: Kernel, case: str) -> None:
    make, put, line = OLDER_BEHIND_LINES[case]
    run_cells(kernel, READ_LEAKS, "import functools; older = np.ones(2**19)", make, "del older")
    run_cells(
        kernel,
        experiment("data = np.ones(2**20)", put, "kept = [data]", options="--keep kept"),
    )

    # The line of the kept name, and of `why`.
    drops = "also drops 4 MiB of other data"
    (advice,) = lines_by_holder(why_record(kernel, "kept")).values()
    assert advice == f"{line}  # {drops}"
    (report,) = run_cells(kernel, "%gpumem why data").reports("why")
    assert drops in " ".join(report.split())

    # The line of the leak: counts before they are measured, then the whole remark.
    (row,) = leak_rows(kernel)
    assert row.line.startswith(f"{line}  # ")
    counts = kernel.value("[(row.arrays, row.objects, row.is_at_least) for row in last_rows]")
    assert counts == ([(0, 2, False)] if case == "a cached function" else [(1, 1, False)])
    drops = "also drops 4 MiB of older data"
    if case == "a cached function":  # of which ``leaks`` lists all data
        drops = "4 MiB of it may be older than the experiment"
    assert row.line.endswith(drops)


def test_older_arrays_in_new_tuples_are_no_leaks(kernel: Kernel) -> None:
    run_cells(kernel, READ_LEAKS, "runs = [{'data': np.ones(2**18)} for _ in range(3)]")
    experiment_cell = """
    %%experiment e
    def change():
        for run in runs: run["data"] = (run["data"], np.ones(2**19))
    change()
    """
    run_cells(kernel, experiment_cell)
    rows = leak_rows(kernel)
    assert sum(row.size_bytes for row in rows) // MIB == 3 * 4
    for row in rows:
        assert "also drops " in row.line


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        pytest.param(" --keep kept", "", id="kept by an option"),
        pytest.param("", "global kept; ", id="kept as a global"),
    ],
)
def test_a_kept_name_is_a_holder_that_the_line_spares(
    kernel: Kernel, options: str, keeps: str
) -> None:
    experiment_cell = f"""
    %%experiment e{options}
    {keeps}arr = np.ones(2**20)
    kept = {{"a": arr}}
    box.append(arr)
    """
    run_cells(kernel, READ_LEAKS, "box = []", experiment_cell)
    place = 'notebook variable box[0], kept variable kept["a"]'
    advice = "del box[0]  # and delete kept when you no longer need it"
    assert survivor_rows(kernel) == [(pytest.approx(2**23, rel=0.02), place, advice)]
    assert leak_rows(kernel) == [(pytest.approx(2**23, rel=0.02), place, advice)]
    run_cells(kernel, advice)
    assert leak_rows(kernel) == []
    run_cells(kernel, "kept = [kept['a'], kept]")
    (row,) = leak_rows(kernel)
    assert row.path.startswith("notebook variable kept[")


@linux
def test_an_array_with_a_new_holder_is_not_left(kernel: Kernel) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        "outer = {'old': np.ones(2_000_000)}",
        """
        %%experiment e
        outer["moved"] = (outer.pop("old"),)
        outer["texts"] = [str(n) * 9 for n in range(100_000)]
        """,
    )
    rows = survivor_rows(kernel)
    assert [(row.path, row.line) for row in rows] == [
        ('notebook variable outer["texts"]', 'del outer["texts"]')
    ]
    run_cells(kernel, "del outer")


IN_OLD_OBJECTS = {
    "dicts": "for each in dicts[:4000]: each['words'] = list(range(1000, 1020))",
    "few dicts": "for each in dicts[:60]: each['words'] = [str(word) for word in range(1000)]",
    "instances": "for each in instances: each.words = list(range(1000, 1020))",
}
"""Code that leaves many new objects in older ones."""


@pytest.mark.parametrize("case", IN_OLD_OBJECTS)
def test_many_new_objects_in_older_ones_are_held_by_these(kernel: Kernel, case: str) -> None:
    run_cells(
        kernel,
        "%gpumem free",  # else the data takes the free pages of an earlier test
        """
        class Document: pass
        dicts = [{"number": number, "text": f"text {number}"} for number in range(10_000)]
        instances = [Document() for _ in range(5000)]
        """,
        experiment(IN_OLD_OBJECTS[case]),
    )
    variable = "instances" if case == "instances" else "dicts"
    number = {"dicts": "4,000", "few dicts": "60", "instances": "5,000"}[case]
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    (row,) = [row for row in leaks.splitlines() if "× list" in row]
    assert f"{number} × list" in row, leaks
    assert f"held by notebook variable {variable}" in row, row


def test_no_line_drops_many_older_dicts_with_their_new_items(kernel: Kernel) -> None:
    run_cells(
        kernel,
        "%gpumem free",
        "docs = [{'number': number, 'text': f'text {number}'} for number in range(5_000)]",
        experiment("for each in docs[:1100]: each['words'] = list(range(1000, 1100))"),
    )
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    (row,) = [row for row in leaks.splitlines() if "1,100 × list" in row]
    assert "docs" in row
    assert "del docs" not in row
    assert "docs.clear" not in row

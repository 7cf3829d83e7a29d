"""Data that an experiment leaves in containers has one row, and its line frees all of it."""

import sys
from pathlib import Path

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import (
    READ_LEAKS,
    READ_WHY,
    assert_lines_free_all,
    leak_parts,
    leak_rows,
    number_alive,
    survivor_parts,
    survivor_rows,
)
from tests.process_memory import linux
from tests.steps import experiment, needs, run_cells, tidied_kernel

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        pytest.param(
            "outer = np.empty(4, object)", "outer[1] = np.ones(2**18)", id="an array of objects"
        ),
        pytest.param(
            """
            outer = {}
            exec('data = None', outer)
            """,
            "outer['data'] = np.ones(2**18)",
            id="a namespace of exec",
        ),
    ],
)
def test_an_array_without_a_name_is_left(kernel: Kernel, setup: str, code: str) -> None:
    run_cells(kernel, READ_LEAKS, setup, experiment(code))
    assert [row.size_bytes for row in survivor_rows(kernel)] == [pytest.approx(2**21, rel=0.02)]


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
    run_cells(
        kernel,
        READ_LEAKS,
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
        f"""
        %%experiment e
        try:
            work()
        except ValueError as error:
            outer.append({kept})
        """,
    )
    (row,) = survivor_rows(kernel)
    (leak,) = leak_rows(kernel)
    assert row.size_bytes == pytest.approx(2**23, rel=0.02)
    assert leak.size_bytes == pytest.approx(2**23, rel=0.02)
    assert_lines_free_all(kernel, [leak])


def test_one_line_frees_arrays_of_a_name_in_several_places(kernel: Kernel) -> None:
    experiment_cell = """
    %%experiment e
    made = [np.ones(70_000) for _ in range(4)]
    Store.cache = made[0]
    outer["k"] = made[1]
    store.append(made[2])
    other.append(made[3])
    """
    run_cells(
        kernel,
        READ_LEAKS,
        """
        outer, store, other = {}, [], []
        class Store: pass
        """,
        experiment_cell,
    )
    (row,) = survivor_rows(kernel)
    # Four arrays of 70,000 numbers of 8 bytes.
    assert row.size_bytes == 4 * 70_000 * 8
    assert row.path == "notebook variable other[0], and 3 more"
    assert leak_rows(kernel) == [row]
    assert_lines_free_all(kernel, [row])


def test_lines_that_remove_the_same_tuple_are_one(kernel: Kernel) -> None:
    experiment_cell = """
    %%experiment e
    inner = [bytearray(2**20) for _ in range(3)]
    made = np.ones(2**18)
    outer["k"] = (made, (inner, []))
    store.append(inner)
    """
    run_cells(kernel, READ_LEAKS, "outer, store = {}, []", experiment_cell)
    assert_lines_free_all(kernel, survivor_rows(kernel))
    assert kernel.value("[outer, store]") == [{}, []]


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        pytest.param(
            "[{'id': 0}, {'id': 1}]",
            "for n in (0, 1): runs[n]['a'], runs[n]['b'] = large(), large()",
            id="a list",
        ),
        pytest.param(
            "deque([{'id': 0}, {'id': 1}, {'id': 2}])",
            "for n in (1, 2): runs[n]['a'], runs[n]['b'] = large(), large()",
            id="a deque with a first item that stays",
        ),
    ],
)
def test_a_loop_removes_the_same_keys_of_each_item(kernel: Kernel, runs: str, code: str) -> None:
    run_cells(kernel, READ_LEAKS, f"from collections import deque; runs = {runs}; watched = []")
    run_cells(
        kernel,
        """
        def large():
            watched.append(weakref.ref(made := np.ones(2**18)))
            return made
        """,
    )
    run_cells(kernel, experiment(code))
    (row,) = leak_rows(kernel)
    assert row.line.startswith("for _item in ")
    run_cells(kernel, row.line)
    assert number_alive(kernel) == 0
    assert kernel.value("[row['id'] for row in runs][:2]") == [0, 1]


def test_a_new_cache_with_many_small_items_is_cleared(kernel: Kernel) -> None:
    run_cells(kernel, READ_LEAKS, "import functools")
    run_cells(
        kernel,
        """
        @functools.lru_cache(None)
        def load(number):
            return bytes(1000)
        """,
        experiment("for number in range(5000): load(number)"),
    )
    (row,) = survivor_rows(kernel)
    assert row.line == "load.cache_clear()"
    assert_lines_free_all(kernel, [row])


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
    run_cells(
        kernel,
        READ_LEAKS,
        """
        class Model:
            def __init__(self):
                self.weights = np.ones(200_000)
                self.words = [str(number) for number in range(100_000)]
        outer = {}
        """,
        f"""
        %%experiment e
        x = {made}
        outer['a'] = x
        """,
    )
    (at_the_end,) = survivor_rows(kernel)
    (later,) = leak_rows(kernel)
    for row in (at_the_end, later):
        assert row.path == 'notebook variable outer["a"]'
        assert row.line == 'del outer["a"]'
    assert later.size_bytes == pytest.approx(at_the_end.size_bytes, rel=0.02)
    # 1.6 MB of weights and 100,000 texts of more than 50 bytes.
    assert later.size_bytes > 7_000_000
    for parts in (survivor_parts(kernel), leak_parts(kernel)):
        if "array" not in made.partition("(")[0]:  # its elements are no parts
            assert sum(parts.values()) == pytest.approx(later.size_bytes, rel=0.02)
            assert min(parts.values()) > 1_000_000
    assert_lines_free_all(kernel, [later])


@pytest.mark.parametrize(
    ("code", "expected_line"),
    [
        pytest.param(
            """
            outer['a'] = x
            outer['t'] = torch.from_numpy(x)
            """,
            "outer.clear()",
            id="an array and a tensor",
        ),
        pytest.param(
            """
            outer['a'] = x
            y = torch.as_tensor(x)[5:]
            keep['t'] = y
            """,
            'del outer["a"]; del keep["t"]',
            id="an array and a part as a tensor",
        ),
        pytest.param("outer['t'] = torch.from_numpy(x)", 'del outer["t"]', id="a tensor alone"),
        pytest.param(
            "outer['t'] = torch.from_numpy(x[:9])", 'del outer["t"]', id="a tensor of a part"
        ),
        pytest.param(
            """
            outer['t'] = torch.from_numpy(x[:9])
            keep['t'] = [torch.from_numpy(x[:20])]
            """,
            'del keep["t"]; del outer["t"]',
            id="two tensors of parts",
        ),
        pytest.param(
            """
            outer['a'] = x[5:9]
            outer['t'] = torch.from_numpy(x[:9])
            """,
            "outer.clear()",
            id="a view and a tensor in it",
        ),
        pytest.param(
            """
            outer['a'] = x[5:9]
            keep['t'] = torch.from_numpy(x[20:29])
            """,
            'del outer["a"]; del keep["t"]',
            id="a view and a tensor elsewhere",
        ),
    ],
)
def test_an_array_and_a_tensor_on_its_memory_are_one_row(
    kernel: Kernel, code: str, expected_line: str
) -> None:
    needs("torch")
    run_cells(kernel, READ_LEAKS, "import torch; outer, keep = {}, {}")
    run_cells(kernel, experiment("x = np.ones(2**20)", "watched.append(weakref.ref(x))", code))
    for rows in (survivor_rows(kernel), leak_rows(kernel)):
        (row,) = rows
        assert row.size_bytes == 8 << 20
        assert row.line == expected_line
    assert number_alive(kernel) == 1
    run_cells(kernel, row.line)
    assert number_alive(kernel) == 0
    assert leak_rows(kernel) == []


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("outer.append(np.ones(2**20))", 8 << 20),
        ("outer.append([np.ones(2**18), np.ones(2**18)])", 4 << 20),
        ("outer.append({'data': np.ones(2**19), 'n': 1})", 4 << 20),
        (
            """
            made = np.ones(2**20)
            keep['k'] = made
            del made
            """,
            8 << 20,
        ),
        ("for row in table.values(): row['w'] = np.ones(2**18)", 8 << 20),
        ("holder.data = np.ones(2**20)", 8 << 20),
    ],
    ids=["a list", "a list in a list", "a dict in a list", "a key", "keys of rows", "an attribute"],
)
def test_leaks_list_the_arrays_that_an_experiment_has_listed(
    kernel: Kernel, code: str, size: int
) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        """
        class Holder:
            pass
        outer, keep, holder = ["first"], {}, Holder()
        table = {number: {"n": number} for number in range(4)}
        """,
        experiment(code),
    )
    at_the_end = survivor_rows(kernel)
    later = leak_rows(kernel)
    assert sum(row.size_bytes for row in at_the_end) == pytest.approx(size, rel=0.02)
    assert {(row.path, row.line) for row in later} == {(row.path, row.line) for row in at_the_end}
    assert sum(row.size_bytes for row in later) == pytest.approx(size, rel=0.02)
    assert_lines_free_all(kernel, later)


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
    run_cells(kernel, READ_LEAKS, setup, experiment(code))
    assert_lines_free_all(kernel, leak_rows(kernel))
    assert kernel.value(left_over) is True


@linux
def test_lines_of_two_containers_free_both(kernel: Kernel) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        "outer = [0]; table = {'kept': 1}",
        """
        def fill():
            for number in range(6):
                made = np.ones(200_000)
                watched.append(weakref.ref(made))
                outer.append(made)
                table[number] = made
        """,
        experiment("fill()"),
    )
    assert number_alive(kernel) == 6
    for row in survivor_rows(kernel):
        run_cells(kernel, row.line)
    assert number_alive(kernel) == 0
    assert kernel.value("(outer, table)") == ([0], {"kept": 1})


def test_all_attributes_of_a_librarys_objects_are_removed(kernel: Kernel) -> None:
    """Each of them leads to an array of the row, as the layers of a cache of keys and values."""
    run_cells(
        kernel,
        READ_LEAKS,
        """
        import argparse
        kept = [{'text': 1}]
        """,
    )
    run_cells(
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
    (row,) = survivor_rows(kernel)
    assert number_alive(kernel) == 5
    run_cells(kernel, row.line)
    assert number_alive(kernel) == 0, row.line


@pytest.mark.parametrize(
    ("setup", "code"),
    [
        pytest.param(
            """
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
            kept = optimizer
            """,
            "optimizer.history = [torch.zeros(2**19) for _ in range(2)]",
            id="tensors of an optimizer",
        ),
        pytest.param(
            """
            weight = torch.nn.Parameter(torch.ones(1))
            kept = [(0, (weight * 2).sum())]
            """,
            "kept += [(n, (torch.ones(2**19) * weight).sum()) for n in range(3)]",
            id="losses in a list",
        ),
    ],
)
def test_lines_for_items_of_one_list_are_one_line(kernel: Kernel, setup: str, code: str) -> None:
    needs("torch")
    run_cells(kernel, READ_LEAKS, "import torch", setup, experiment(code))
    for rows in (survivor_rows(kernel), leak_rows(kernel)):
        large = [row for row in rows if row.size_bytes >= 2**20]
        assert len(large) == 1, rows
    run_cells(kernel, large[0].line)
    assert [row for row in leak_rows(kernel) if row.size_bytes >= 2**20] == []
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
    run_cells(kernel, _LISTS_WITH_A_LENGTH)
    run_cells(kernel, experiment("rows.append(bytearray(8 << 20))"))
    (leaks,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert "to free it: del rows[0]" in leaks
    run_cells(kernel, "assert calls == []")


def test_a_leak_of_many_small_arrays_has_at_least_their_data(kernel: Kernel) -> None:
    """The objects of small arrays take more memory beside the data."""
    run_cells(
        kernel,
        """
        import numpy as np
        kept = {}
        """,
    )
    for number, shape in ((3_000, 100), (3, 100_000)):
        cell = experiment(f"x = [np.ones({shape}) for _ in range({number})]", "kept['x'] = x")
        (report,) = run_cells(kernel, cell).reports("experiment")
        assert "2.3 MiB" in report
        assert ("at least 2.3 MiB" in report) is (number == 3_000), report


_MODULE_WITH_OBJECTS = """
import abc
class Part: pass
parts = [Part() for _ in range(20)]
for part in parts: part.numbers = list(range(1000, 1400))
abc.table += parts
"""


def test_objects_that_imported_libraries_make_are_no_row(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"part{number}.py").write_text(_MODULE_WITH_OBJECTS)
    code = "for number in range({}, {}): importlib.import_module(f'part{{number}}')"
    with Kernel() as fresh:  # without free memory that the objects would fill
        run_cells(
            fresh,
            "%load_ext ipygpumem",
            f"import abc, importlib, sys; abc.table = []; sys.path.insert(0, {str(tmp_path)!r})",
        )
        (report_of_10,) = run_cells(fresh, experiment(code.format(0, 10))).reports("experiment")
        (report_of_50,) = run_cells(fresh, experiment(code.format(10, 60))).reports("experiment")
    assert "objects (" in report_of_10, report_of_10
    assert "objects (" not in report_of_50
    assert "50 modules were imported" in report_of_50


def test_arrays_beyond_the_limit_of_a_search_have_a_holder_too(kernel: Kernel) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        """
        from ipygpumem.inventory.rows import array_holders
        most = array_holders.MOST_EXPLAINED
        array_holders.MOST_EXPLAINED = 5
        hold = []
        """,
        experiment("hold.extend(np.ones(150_000) for _ in range(8))"),
    )
    rows = survivor_rows(kernel)
    run_cells(kernel, "array_holders.MOST_EXPLAINED = most; hold.clear()")
    assert {(row.path, row.line) for row in rows} == {
        ("notebook variable hold", "del hold[3:]"),
        (
            "something that the search did not reach within its limits",
            "free something, then ask %gpumem leaks again",
        ),
    }


_CYCLES = {
    "an attribute": """
        class Owner: pass
        def make():
            array = np.empty(1, object)
            owner = Owner()
            owner.data = np.ones(1 << 20)
            owner.array = array
            array[0] = owner
            watched.append(weakref.ref(array))
        """,
    "a list": """
        def make():
            array = np.empty(1, object)
            array[0] = [np.ones(1 << 20), array]
            watched.append(weakref.ref(array))
        """,
    "a dict": """
        def make():
            array = np.empty((2, 2), object)
            array[1, 1] = {"data": [np.ones(1 << 20)], "array": array}
            watched.append(weakref.ref(array))
        """,
}
"""Functions that make a cycle through an array of objects."""


@linux
def test_an_experiment_names_cycles_through_arrays(kernel: Kernel) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        """
        class Owner: pass
        def make():
            for _ in range(3):
                owner = Owner()
                owner.data = b"x" * (4 << 20)
                owner.array = np.array([owner, None], dtype=object)
                watched.append(weakref.ref(owner))
        """,
        experiment("make()"),
    )
    rows = survivor_rows(kernel)
    assert sum(row.size_bytes for row in rows) == pytest.approx(12 * MIB, rel=0.1)
    assert {row.path for row in rows} == {
        "a cycle through an array of objects, which Python never frees"
    }
    run_cells(
        kernel,
        """
        for owner in watched: owner().array.fill(None)
        owner = None
        """,
    )
    assert number_alive(kernel) == 0


@linux
@pytest.mark.parametrize("code", _CYCLES.values(), ids=_CYCLES)
def test_a_cycle_through_an_array_is_called_one(kernel: Kernel, code: str) -> None:
    run_cells(kernel, READ_LEAKS, code, experiment("make()"))
    (row,) = leak_rows(kernel)
    assert row.size_bytes == pytest.approx(8 * MIB, rel=0.1)
    assert (row.path, row.line) == (
        "a cycle through an array of objects, which Python never frees",
        "set the array's elements to None before you delete it",
    )
    run_cells(kernel, "watched[-1]().fill(None)")
    assert leak_rows(kernel) == []

"""A printed line frees the row's memory, and leaves alone what else its holder has."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_LEAKS, READ_WHY, number_alive, survivor_rows
from tests.steps import SHOW_LIBRARIES, experiment, needs, run_cells, tidied_kernel

shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", READ_WHY, hides_libraries=True)

HOLDERS = {
    "a namespace": (
        """
        import types
        outer = types.SimpleNamespace(rate=1)
        """,
        "outer.buffer = np.ones(2**20); keep(outer.buffer)",
        "vars(outer) == {'rate': 1}",
    ),
    "an attribute with a blank": (
        """
        class Outer:
            pass
        outer = Outer()
        outer.rate = 1
        """,
        "vars(outer)['a b'] = np.ones(2**20); keep(vars(outer)['a b'])",
        "vars(outer) == {'rate': 1}",
    ),
    "an attribute of a list": (
        """
        class Outer(list):
            pass
        outer = Outer([np.ones(2**19), 2])
        """,
        "outer.last = np.ones(2**20); keep(outer.last)",
        "len(outer) == 2",
    ),
    "a dict in an attribute of a list": (
        """
        class Outer(list):
            pass
        outer = Outer([{"x": np.ones(2**19)}])
        outer.meta = {}
        """,
        "outer.meta['x'] = np.ones(2**20); keep(outer.meta['x'])",
        "list(outer[0]) == ['x']",
    ),
    "an attribute of a tuple": (
        """
        class Outer(tuple):
            pass
        outer = Outer([{"x": 1}])
        """,
        "outer.last = np.ones(2**20); keep(outer.last)",
        "outer[0] == {'x': 1}",
    ),
    "an attribute of a set": (
        """
        class Outer(set):
            pass
        outer = Outer([1, 2])
        """,
        "outer.last = [np.ones(2**20)]; keep(outer.last[0])",
        "outer == {1, 2}",
    ),
    "an attribute of a dict": (
        """
        class Outer(dict):
            pass
        outer = Outer(a=1)
        """,
        "outer.last = np.ones(2**20); keep(outer.last)",
        "outer == {'a': 1}",
    ),
    "an attribute of a cached function": (
        """
        import functools
        @functools.lru_cache
        def outer(number):
            return np.ones(2**15) * number
        outer(1), outer(2);
        """,
        "outer.last = np.ones(2**20); keep(outer.last)",
        "outer.cache_info().currsize == 2",
    ),
    "a timer at the time of another": (
        """
        import asyncio
        loop = asyncio.get_running_loop()
        at = loop.time() + 600
        other = loop.call_at(at, print, 1)
        """,
        "data = np.ones(2**20); keep(data); loop.call_at(at, len, data);",
        "not other.cancelled()",
    ),
    "a finalizer next to another": (
        """
        import weakref
        class Owner:
            pass
        owner, outer = Owner(), []
        other = weakref.finalize(owner, print, 1)
        """,
        """
        data = np.ones(2**20); keep(data)
        outer.append(weakref.finalize(owner, len, data)); outer[0].atexit = False
        """,
        "other.alive",
    ),
    "frames in an array of objects": (
        """
        import pandas
        outer = np.array(["text", None, None, None])
        """,
        """
        data = np.ones(2**20); keep(data)
        outer[1] = pandas.DataFrame({"a": data}, copy=False); outer[3] = outer[1].copy(deep=False)
        """,
        "outer[0] == 'text'",
    ),
    "an array and a frame in an array of objects": (
        """
        import pandas
        class Outer:
            pass
        outer = Outer()
        outer.grid = np.array([["text", None], [None, None]])
        """,
        """
        data = np.ones(2**20); keep(data)
        outer.grid[1, 0] = data; outer.grid[1, 1] = pandas.DataFrame({"a": data}, copy=False)
        """,
        "outer.grid[0, 0] == 'text'",
    ),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_line_frees_its_row_and_nothing_else(notebook: Kernel, holder: str) -> None:
    before, leave, is_whole = HOLDERS[holder]
    if holder == "a finalizer next to another":  # the module weakref has it
        run_cells(notebook, SHOW_LIBRARIES)
    if "pandas" in before:
        needs("pandas")
    run_cells(notebook, READ_LEAKS, "def keep(data): watched.append(weakref.ref(data))", before)
    run_cells(notebook, experiment(leave))
    assert number_alive(notebook) == 1
    (row,) = survivor_rows(notebook)
    run_cells(notebook, row[2])
    assert number_alive(notebook) == 0
    assert notebook.value(is_whole) is True

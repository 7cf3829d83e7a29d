"""No code of the user runs, and no report is lost, while holders of memory are searched."""

import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import kernel_with, run_quietly

HOSTILE = {
    "a metaclass of an attribute": """
        class Meta(type):
            def __getattr__(cls, name):
                calls.append(name)
                raise RuntimeError("hostile")
            def __eq__(cls, other):
                calls.append("==")
                return cls is other
            __hash__ = type.__hash__
        class Part(metaclass=Meta):
            pass
        class Owner:
            pass
        owner = Owner()
        owner.part = Part()
        def keep(data):
            vars(owner.part)["data"] = data
    """,
    "a property of a connection": """
        import sqlite3
        class Connection(sqlite3.Connection):
            @property
            def row_factory(self):
                calls.append("row_factory")
                raise RuntimeError("hostile")
        connection = Connection(":memory:")
        def keep(data):
            connection.data = [data]
    """,
    "the keys of an OrderedDict": """
        import collections
        class Key:
            def __hash__(self):
                calls.append("hash")
                return 5
        outer = collections.OrderedDict({1: 2})
        def keep(data):
            outer[Key()] = data
            outer.move_to_end(1)
            calls.clear()
    """,
    "a key that the user adds to the outputs": """
        class Key:
            def __format__(self, spec):
                calls.append("format")
                return "1"
            __repr__ = __str__ = lambda self: format(self)
        key = Key()
        def keep(data):
            Out[key] = data
    """,
    "the keys of a subclass of OrderedDict": """
        import collections
        class Key:
            def __hash__(self):
                calls.append("hash")
                return 5
        class Ordered(collections.OrderedDict):
            def __iter__(self):
                calls.append("iter")
                return super().__iter__()
        outer = Ordered({1: 2})
        def keep(data):
            outer[Key()] = [data]
            outer.move_to_end(1)
            calls.clear()
    """,
    "the handlers of a logger": """
        import logging
        class Handlers(list):
            def __iter__(self):
                calls.append("iter")
                raise RuntimeError("hostile")
        logger = logging.getLogger("hostile handlers")
        logger.handlers = Handlers(logger.handlers)
        def keep(data):
            logger.data = [data]
    """,
}


notebook = kernel_with("%load_ext ipygpumem", "import numpy as np")
SIZES_OF_SURVIVORS = """[
    row.size_bytes for row in app_of(get_ipython()).experiments.finished[-1].survivors
]"""


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_holder_is_named_and_none_of_its_code_runs(notebook: Kernel, kind: str) -> None:
    run_quietly(notebook, "from ipygpumem.shell.app import app_of", "calls = []")
    run_quietly(notebook, textwrap.dedent(HOSTILE[kind]))
    experiment = run_quietly(
        notebook,
        """
        %%experiment e
        keep(np.ones(1 << 22))
        """,
    )
    leaks = run_quietly(notebook, "%gpumem leaks")
    (size,) = notebook.value(SIZES_OF_SURVIVORS)
    assert size == pytest.approx(1 << 25, rel=0.01)  # with the array's own object
    for result in (experiment, leaks):
        shown = result.leaks() or result.reports()
        said = result.stdout + result.stderr + "".join(shown)
        assert "hostile" not in said.replace("hostile handlers", "")
    assert notebook.value("calls") == []
    run_quietly(notebook, "import logging; logging.getLogger('hostile handlers').handlers = []")


STAND_IN = """
import sys
class Lazy:
    def __getattr__(self, name):
        calls.append(name)
        raise RuntimeError("hostile")
stand_ins = "h5py torch numpy array pyarrow polars jax._src.xla_bridge sqlite3".split()
before = {name: sys.modules.get(name) for name in stand_ins}
for name in stand_ins:
    if before[name] is None:
        sys.modules[name] = Lazy()
"""
GLOBALS = """
import types
class Globals(dict):
    def get(self, *arguments):
        calls.append("get")
        raise RuntimeError("hostile")
function = types.FunctionType((lambda: 1).__code__, Globals(t=[1]))
"""
LOOKS = ("%gpumem", "%gpumem top", "%gpumem why data", "%gpumem leaks", "%gpumem status")


@pytest.mark.parametrize("code", [STAND_IN, GLOBALS], ids=["a module's stand-in", "globals"])
def test_no_search_runs_code_of_a_module_or_of_globals(kernel: Kernel, code: str) -> None:
    run_quietly(kernel, "calls = []; data = bytearray(1 << 22)", code)
    for line in (*LOOKS, "%%experiment e\nmore = bytearray(1 << 22)"):
        assert run_quietly(kernel, line).reports()
        assert run_quietly(kernel, "print(calls)").stdout == "[]\n", line

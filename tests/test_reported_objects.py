"""Objects that public reports describe, in a real kernel: ``top`` and ``why`` against the process's
memory before they are made and after ``del``, and the lines that free those that experiments leave.
"""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import (
    READ_LEAKS,
    READ_WHY,
    RSS,
    leak_rows,
    survivor_rows,
    total,
    why_record,
)
from tests.steps import experiment, needs, run_cells, run_quietly, tidied_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", READ_WHY, hides_libraries=True)

MIB = 1 << 20
WITHIN = 0.1
_SCRIPT = '''
import pathlib, tempfile
script = pathlib.Path(tempfile.mkdtemp(), "other_script.py")
script.write_text("""
DATA = b"x" * (24 << 20)
def load(): return DATA
def predict(): return len(load())
class Model:
    def predict(self): return len(load())
""");
'''

ROWS: dict[str, tuple[str, str]] = {
    "a StringIO": ("import io", "x = io.StringIO(); x.write('x' * 2**24);"),
    "a database in memory": (
        "import sqlite3",
        """
        x = sqlite3.connect(":memory:")
        x.execute("create table t (text)")
        x.executemany("insert into t values (?)", (("y" * 1000,) for _ in range(30_000)));
        """,
    ),
    "an array of texts": (
        "import numpy as np; texts = [f'some longer text {n:050d}' for n in range(200_000)]",
        "x = np.array(texts, dtype=np.dtypes.StringDType())",
    ),
    "a structured array": (
        """
        import numpy as np
        class Big:
            def __init__(self):
                self.data = bytearray(24 << 20)
        """,
        "x = np.array([(Big(),)], dtype=[('f', object)])",
    ),
    "a class with arrays": (
        "import numpy as np",
        """
        class x:
            data = [np.ones(2**20) for _ in range(4)]
        """,
    ),
    "a property that closes over data": (
        """
        import numpy as np
        def make():
            data = np.ones(2**22)
            class Lazy:
                @property
                def data(self):
                    return data
            return Lazy()
        """,
        "x = make()",
    ),
    "a function of runpy": (
        f"import runpy{_SCRIPT}",
        "x = runpy.run_path(str(script))['predict']",
    ),
    "a class of runpy": (f"import runpy{_SCRIPT}", "x = runpy.run_path(str(script))['Model']"),
    "a function of exec": (
        _SCRIPT,
        "space = {}; exec(script.read_text(), space); x = space['predict']; del space",
    ),
    "many lists": ("", "x = [['v%d' % i, 'w%d' % i] for i in range(200_000)]"),
    "frames": (
        """
        import sys
        def frame():
            data = b"x" * (8 << 20)
            return sys._getframe()
        """,
        "x = [frame() for _ in range(4)]",
    ),
    "the stack": (
        """
        import inspect
        def stack():
            data = b"x" * (24 << 20)
            return inspect.stack()
        """,
        "x = stack()",
    ),
    "HTML": ("from IPython.display import HTML", "x = HTML('x' * 2**25)"),
    "an image": (
        "from IPython.display import Image",
        "x = Image(data=b'\\x89PNG' + b'x' * 2**25, format='png')",
    ),
    "a trainer": (
        """
        import numpy as np
        class Connector:
            def __init__(self, trainer):
                self.trainer = trainer
        class Trainer:
            def __init__(self):
                self.connector = Connector(self)
                self.results = [np.ones(2**22)]
        """,
        "x = Trainer()",
    ),
    "a shared array": (
        "import ctypes, multiprocessing",
        """
        x = multiprocessing.RawArray("d", 3_000_000)
        ctypes.memset(ctypes.addressof(x), 1, 24_000_000);
        """,
    ),
}
"""Cells that run before, and cells that make ``x``."""


@pytest.mark.parametrize("row", ROWS)
def test_del_frees_the_size_that_top_and_why_name(
    notebook: Kernel, request: pytest.FixtureRequest, row: str
) -> None:
    if row == "many lists":  # in a kernel of its own: they would fill what earlier rows have left
        notebook = request.getfixturevalue("kernel")
        run_cells(notebook, READ_WHY)
    setup, make = map(textwrap.dedent, ROWS[row])
    if row == "an array of texts":
        needs("numpy")
        if notebook.value("__import__('numpy').__version__") < "2":
            pytest.skip("NumPy 1 has no StringDType")

    # What a look imports is not counted below.
    run_cells(
        notebook, setup, "import ipygpumem; y = [bytes(2**20)]; ipygpumem.top()", "%gpumem why y"
    )
    before = notebook.value(RSS)
    run_cells(notebook, make)
    grown = notebook.value(RSS) - before
    # Else there is too little to compare.
    assert grown > 14 * MIB

    # What both reports say.
    (of_top,) = notebook.value(
        "[(row.size_bytes, row.is_at_least) for row in ipygpumem.top('x').names]"
    )
    of_why = why_record(notebook, "x")

    # What it frees.
    with_x = notebook.value(RSS)
    run_cells(notebook, "del x")
    freed = with_x - notebook.value(RSS)
    assert of_top == (pytest.approx(grown, rel=WITHIN), False)
    assert total(of_why["device_bytes"]) == pytest.approx(grown, rel=WITHIN)
    # Python returns no arena in which a small object is alive.
    assert total(of_why["freed_bytes"]) == pytest.approx(freed, rel=1.5 * WITHIN)
    if row == "a trainer":
        assert of_why["parts"][0][0] == ".results"


LEFT_ROWS: dict[str, tuple[str, str, int, list[str]]] = {
    "two arrays in two dicts": (
        "outer = {}; keepers = {}",
        """
        xs = [array(), array()]
        outer["a"] = xs[0]; keepers["b"] = xs[1]
        """,
        2,
        ['del keepers["b"]', 'del outer["a"]'],
    ),
    "arrays in a dict of a list": (
        'outer = {"runs": []}',
        """
        xs = [array() for _ in range(12)]
        outer["runs"].append({"data": xs})
        """,
        12,
        ['del outer["runs"][0]'],
    ),
    "a groupby of a deleted frame": (
        """
        import pandas as pd
        outer = {}
        %gpumem leaks
        pd.DataFrame({"a": [1.0], "b": 1.5}, copy=False).groupby("a").mean();
        """,
        """
        frame = pd.DataFrame({"a": array(), "b": 1.5}, copy=False)
        outer["g"] = frame.groupby("a")
        """,
        1,
        ['del outer["g"]'],
    ),
    "an object in a cycle through an array": (
        """
        class Owner:
            pass
        outer = {}
        """,
        """
        x = Owner()
        x.data = [array() for _ in range(3)]
        x.rows = np.empty(1, object)
        x.rows[0] = x
        outer["x"] = x
        """,
        3,
        ['del outer["x"]'],
    ),
    "objects in cycles in a list": (
        """
        class Owner:
            pass
        outer = {}
        """,
        """
        xs = []
        for _ in range(2):
            x = Owner()
            x.data = [array(), array()]
            x.rows = np.empty(1, object)
            x.rows[0] = x
            xs.append(x)
        outer["xs"] = xs
        """,
        4,
        ['del outer["xs"]'],
    ),
    "objects in cycles, each with its own key": (
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Owner:
            data: object
            rows: object
        outer = {}
        """,
        """
        for number in range(2):
            x = Owner([array(), array()], np.empty(1, object))
            x.rows[0] = x
            outer[number] = x
        """,
        4,
        ["outer.clear()"],
    ),
}
"""Cells before, the code of the experiment, the arrays that it leaves, and the lines that free
them.
"""


_OF_MODULES = 5 * MIB
"""Bytes that the first experiment and the first report take for modules."""


@pytest.mark.parametrize("row", LEFT_ROWS)
def test_the_printed_lines_free_an_experiments_leaks(notebook: Kernel, row: str) -> None:
    setup, code, number, lines = LEFT_ROWS[row]
    if "pandas" in setup:
        needs("pandas")
    run_cells(
        notebook, READ_LEAKS.replace("np.ones(10_000)", "np.ones(2**20)"), textwrap.dedent(setup)
    )

    # What the experiment leaves.
    before = notebook.value(RSS)
    run_cells(notebook, experiment(code))
    grown = notebook.value(RSS) - before
    # Else the tolerance below is too large.
    assert grown > 3 * _OF_MODULES

    # What both reports say of it.
    for rows in (survivor_rows(notebook), leak_rows(notebook)):
        # The line may empty lists inside the object, too, before it deletes the object.
        assert sorted(row.line.rpartition("; ")[2] for row in rows) == sorted(lines)
        assert sum(row.size_bytes for row in rows) == pytest.approx(grown, abs=_OF_MODULES)
    assert notebook.value("sum(one() is not None for one in watched)") == number

    # The lines free it.
    run_cells(notebook, *[row.line for row in rows], "import gc; gc.collect();")
    assert notebook.value("sum(one() is not None for one in watched)") == 0
    assert notebook.value(RSS) - before < _OF_MODULES
    assert leak_rows(notebook) == []


def test_the_worker_that_keeps_data_is_named_with_its_pool(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        import multiprocessing
        kept = []
        def work(number):
            kept.append(bytearray(20 << 20))
        pool = multiprocessing.get_context("fork").Pool(1)
        """,
    )
    (text,) = run_quietly(
        notebook, experiment("for n in range(5): pool.apply(work, (n,))")
    ).reports("experiment")
    assert re.search(r"child processes have 1\d\d(\.\d)? MiB more", text), text
    (text,) = run_quietly(notebook, "%gpumem status").reports("status")
    assert "pool.terminate()" in text, text
    run_quietly(notebook, "pool.terminate(); pool.join()")

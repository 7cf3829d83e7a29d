"""No code of the user runs, and no report is lost, while holders of memory are searched."""

import textwrap

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import kernel_with, ok

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
LEFT = """[
    row.size_bytes for row in app_of(get_ipython()).experiments.finished[-1].survivors
]"""


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_holder_is_named_and_none_of_its_code_runs(notebook: Kernel, kind: str) -> None:
    ok(notebook, "from ipygpumem.shell.app import app_of", "calls = []")
    ok(notebook, textwrap.dedent(HOSTILE[kind]))
    experiment = ok(notebook, "%%experiment e\nkeep(np.ones(1 << 22))")
    leaks = ok(notebook, "%gpumem leaks")
    assert notebook.value(LEFT) == [1 << 25]
    for result in (experiment, leaks):
        said = result.stdout + result.stderr + "".join(result.reports())
        assert "hostile" not in said.replace("hostile handlers", "")
    assert notebook.value("calls") == []
    ok(notebook, "import logging; logging.getLogger('hostile handlers').handlers = []")

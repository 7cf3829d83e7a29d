"""No code of the user runs, and no report is lost, while holders of memory are searched."""

import textwrap

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.shell.app import app_of

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


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_holder_is_named_and_none_of_its_code_runs(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    shell.run_cell("%load_ext ipygpumem\nimport numpy as np\ncalls = []")
    assert shell.run_cell(textwrap.dedent(HOSTILE[kind])).success
    assert shell.run_cell("%%experiment e\nkeep(np.ones(1 << 22))").success
    before = len(shell.user_ns["calls"])
    shell.run_cell("%gpumem leaks")
    (row,) = app_of(shell).experiments.finished[-1].survivors
    assert row.size_bytes == 1 << 25
    text = "".join(capsys.readouterr())
    assert "hostile" not in text.replace("hostile handlers", "")
    assert before == len(shell.user_ns["calls"]) == 0
    shell.run_cell("import logging; logging.getLogger('hostile handlers').handlers = []")

"""Objects whose methods raise: none is called, and finalisers stop nothing."""

from __future__ import annotations

import contextlib

import pytest

from tests import hostile
from tests.hostile import SOURCE
from tests.kernel import Kernel
from tests.steps import goes_on, names, open_now, recovery, works


@pytest.mark.parametrize("kind", ["Hostile", "Container", "Sequence", "Slotted", "Lazy", "Oom", "Function"])
def test_whoever_of_us_asks_is_found_out(kind: str) -> None:
    """The tests below mean something."""
    ours = {"__name__": "ipygpumem.somewhere", "thing": hostile.made(getattr(hostile, kind))}
    with pytest.raises(AssertionError), hostile.untouched(), contextlib.suppress(RuntimeError):
        exec("thing.name", ours)
    with hostile.untouched(), pytest.raises(RuntimeError, match="hands off"):
        exec("thing.name", {**ours, "__name__": "IPython.core"})


def test_no_method_of_a_users_object_is_called_at_exit_in_status_or_in_reports(notebook: Kernel) -> None:
    works(
        notebook,
        SOURCE,
        "import numpy as np\nold = made(Hostile)",
        "%experiment start a --keep kept",
        "a = made(Hostile)\n"
        "b = made(Container, {'k': np.ones(1 << 19)})\n"
        "c = made(Sequence, [a])\n"
        "old = made(Hostile)\n"
        "kept = made(Hostile)\n"
        "d = [a, {'x': (a, b)}, Function()]\n"
        "Array = type('Array', (np.ndarray,), body)\n"
        "e = np.ndarray.__new__(Array, 1 << 19)\n"
        "f = Hostile",
        "%experiment status",
        "%gpumem status",
    )
    reply = works(notebook, "%experiment end")
    assert "deleted: " in reply.reports("experiment")[0]
    assert notebook.value("touched") == []
    assert not {"a", "b", "c", "d", "e", "f"} & set(names(notebook))
    assert notebook.value("type.__subclasscheck__(Hostile, type(old))") is True
    goes_on(notebook)


def test_no_method_of_a_users_object_is_called_after_an_oom(notebook: Kernel) -> None:
    works(
        notebook,
        SOURCE + "\nimport numpy as np",
        "def fail():\n"
        "    Array = type('Array', (np.ndarray,), body)\n"
        "    array = np.ndarray.__new__(Array, 1 << 20)\n"
        "    thing = made(Hostile); box = made(Container); row = made(Sequence, [thing])\n"
        "    error = MemoryError.__new__(Oom, (1, 2), thing)\n"
        "    BaseException.__setattr__(error, 'thing', thing)\n"
        "    raise error",
    )
    text = recovery(notebook, "fail()")
    assert "array" in text
    assert "Array" in text
    assert notebook.value("touched") == []
    goes_on(notebook)


def test_finalisers_that_raise_or_replace_names_do_not_stop_an_exit(notebook: Kernel) -> None:
    works(
        notebook,
        "class Raises:\n    def __del__(self): raise ValueError('from __del__')\n"
        "class Exits:\n    def __del__(self): raise SystemExit(4)\n"
        "class Deletes:\n    def __del__(self): globals().pop('zz', None); globals().pop('old2', None)\n"
        "class Adds:\n    def __del__(self): globals()['late'] = 1\n"
        "old, old2 = 'old', 'old2'",
        "%experiment start a",
        "a, b, c, d = Raises(), Exits(), Deletes(), Adds()\nzz = 1\nold = 'new'",
    )
    notebook.run("%experiment end")
    assert (notebook.value("old"), open_now(notebook)) == ("old", [])
    assert not {"a", "b", "c", "d", "zz"} & set(names(notebook))
    goes_on(notebook)

"""``%%experiment`` feels like no wrapper at all."""

from __future__ import annotations

import re

from tests.kernel import Kernel
from tests.smoke.steps import exist, fails, ok, plain


def test_the_last_expression_is_displayed(notebook: Kernel) -> None:
    reply = ok(notebook, "%%experiment a\nx = 6\nx * 7")
    assert reply.result == "42"
    assert len(reply.reports("experiment")) == 1
    assert exist(notebook, "x") == []


def test_prints_and_magics_inside_work(notebook: Kernel) -> None:
    reply = ok(notebook, "%%experiment a\nprint('one')\nx = %pwd\n!echo two\n%time y = 3\nprint(y)")
    assert reply.stdout.startswith("one\n")
    assert "two" in reply.stdout
    assert reply.stdout.endswith("3\n")
    assert exist(notebook, "x", "y") == []


def test_the_traceback_shows_the_right_lines(notebook: Kernel) -> None:
    cell = "%%experiment a\n\ndef half(x):\n    return 1 / x\n\nhalf(0)"
    text = plain(fails(notebook, cell, "ZeroDivisionError").traceback)
    assert re.search(r"-> *6 half\(0\)", text)
    assert re.search(r"-> *4 +return 1 / x", text)


def test_options_are_read_from_the_first_line(notebook: Kernel) -> None:
    reply = ok(
        notebook, "%%experiment two words --keep x,y --report compact --seed 7\nimport random\nx = random.random()"
    )
    (text,) = reply.reports("experiment")
    assert "experiment two words · " in text
    assert "keep: no name matches 'y'" in text
    ok(notebook, "import random\nrandom.seed(7)")
    assert notebook.value("x == random.random()") is True
    assert ok(notebook, "%%experiment quiet --report none\n1").reports("experiment") == []


def test_help_and_completion_know_the_magic(notebook: Kernel) -> None:
    ok(notebook, "%%experiment?", "%experiment?")
    assert {"%experiment", "%%experiment"} <= {match.strip() for match in notebook.complete("%experi")}
    assert "--drop-imports" in notebook.complete("%%experiment a --d")
    ok(notebook, "loss_of_a = loss_of_b = 1")
    assert "loss_of_b" in notebook.complete("%%experiment a --keep loss_of_a lo")
    assert "--drop-imports" in notebook.complete("%%experiment a --keep loss_of_a --d")


def test_the_python_interface_makes_the_same_scope(notebook: Kernel) -> None:
    ok(notebook, "import ipygpumem\nold = 1")
    ok(notebook, "with ipygpumem.experiment('a', keep='best') as done:\n    old = 2\n    new = 3\n    best = 4")
    assert notebook.value("(old, best, done.record.deleted, done.record.restored)") == (1, 4, ("new",), ("old",))
    ok(notebook, "running = ipygpumem.experiment('b').start()", "old = 5\nmore = 6", "record = running.finish()")
    assert notebook.value("(old, 'more' in globals())") == (1, False)

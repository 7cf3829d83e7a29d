"""``%%experiment`` feels like no wrapper at all."""

from __future__ import annotations

import re

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import exist, fails, ok, open_experiments, plain


def test_the_last_expression_is_displayed(notebook: Kernel) -> None:
    reply = ok(notebook, "%%experiment a\nx = 6\nx * 7")
    assert reply.result == "42"
    assert len(reply.reports("experiment")) == 1
    assert exist(notebook, "x") == []


def test_top_level_await_works(notebook: Kernel) -> None:
    reply = ok(notebook, "%%experiment a\nimport asyncio\nawait asyncio.sleep(0)\nx = 1\nawait asyncio.sleep(0, x + 1)")
    assert reply.result == "2"
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


def test_a_syntax_error_shows_the_right_line(notebook: Kernel) -> None:
    text = plain(fails(notebook, "%%experiment a\nx = 1\ny = = 2", "SyntaxError").traceback)
    assert re.search(r"line 3\b|, 3\)", text)
    assert open_experiments(notebook) == []
    assert exist(notebook, "x") == []


def test_an_error_gives_the_status_that_stops_run_all_and_ends_the_experiment(notebook: Kernel) -> None:
    reply = fails(notebook, "%%experiment a\nx = 1\n1 / 0", "ZeroDivisionError")
    assert len(reply.reports("experiment")) == 1
    assert exist(notebook, "x") == []
    assert open_experiments(notebook) == []


@pytest.mark.parametrize("magic", ["%%time", "%%capture", "%%capture printed", "%%prun -q", "%%timeit -n1 -r1"])
def test_a_body_may_be_a_cell_magic_itself(notebook: Kernel, magic: str) -> None:
    ok(notebook, "x = 1", f"%%experiment a\n{magic}\nnew = 2\nnew")
    assert exist(notebook, "x", "new", "printed") == ["x"]
    assert open_experiments(notebook) == []


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


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("%%experiment", "name"),
        ("%%experiment a --nonsense", "--nonsense"),
        ("%%experiment a --seed x", "seed"),
        ("%%experiment a --report loud", "report"),
        ("%%experiment a --keep 'a b'", "a b"),
    ],
)
def test_a_mistake_in_the_first_line_is_one_line_and_runs_nothing(notebook: Kernel, line: str, mistake: str) -> None:
    reply = fails(notebook, f"{line}\nx = 1", None)
    assert reply.stderr.startswith("UsageError: ")
    assert mistake in reply.stderr
    assert len(reply.stderr.strip().splitlines()) == 1
    assert exist(notebook, "x") == []
    assert open_experiments(notebook) == []


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

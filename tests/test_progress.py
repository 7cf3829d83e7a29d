"""Our own long work: the live line says how much of it is done, one line and not two, nowhere where nobody looks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipygpumem.reports.live import Work, work_html, work_text
from tests.kernel import Kernel, Reply
from tests.steps import kernel_with

SLOW = """
import time, sys, ipygpumem
from ipygpumem.notebook import live
from ipygpumem.notebook.commands import tensors
from ipygpumem.notebook.experiments import survivors
from tests.waiting import ticks
live._WORK_SECONDS = live._WORK_EVERY_SECONDS = 0.1
real = tensors.survey.take
def slow(*arguments, **options):
    options["progress"](0.25)
    ticks(4)
    options["progress"](0.5)
    ticks(2)
    return real(*arguments, **options)
def slow_search(progress):
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.5:
        progress(0.125)
        time.sleep(0.01)
"""


def test_the_line_has_what_is_done_and_the_share_on_a_bar() -> None:
    work = Work("leaks", 0.25)
    assert work_text(work, width=80) == "ipygpumem: leaks 25% █████░░░░░░░░░░░░░░░"
    assert work_text(work, width=80, ascii_only=True) == "ipygpumem: leaks 25% #####---------------"
    assert "ipygpumem: leaks 25%" in work_html(work)
    assert "width: 25%" in work_html(work)


def test_a_narrow_terminal_gets_no_bar_then_less_words() -> None:
    assert work_text(Work("leaks", 1.0), width=25) == "ipygpumem: leaks 100%"
    assert work_text(Work("leaks", 1.0), width=10) == "ipygpumem:"
    assert work_text(Work("leaks", 1.0), width=10, ascii_only=True) == "ipygpumem:"


notebook = kernel_with("from tests.waiting import tick_often\ntick_often()\n%load_ext ipygpumem\n" + SLOW)


@pytest.fixture
def slow_tensors(notebook: Kernel) -> Iterator[None]:
    notebook.run("tensors.survey.take = slow")
    yield
    notebook.run("tensors.survey.take = real")


def lines(reply: Reply) -> list[str]:
    """Return what the live line has said, as text."""
    return [re.sub("<[^>]*>", "", item["data"].get("text/html", "")) for item in reply.updates]


@pytest.mark.usefixtures("slow_tensors")
@pytest.mark.parametrize(("code", "reports"), [("%gpumem tensors", 1), ("ipygpumem.tensors();", 0)])
def test_a_notebook_shows_the_share_on_its_one_line_which_leaves_nothing(
    notebook: Kernel, code: str, reports: int
) -> None:
    reply = notebook.run(code, browser=True)
    said = [line for line in lines(reply) if line.startswith("ipygpumem: tensors and arrays ")]
    assert {"ipygpumem: tensors and arrays 25%", "ipygpumem: tensors and arrays 50%"} <= set(said)
    assert reply.kinds == ["display"] * (1 + reports)
    assert (reply.stderr, len(reply.reports("tensors"))) == ("", reports)


@pytest.mark.usefixtures("slow_tensors")
def test_before_and_after_our_own_work_the_line_is_that_of_the_cell(notebook: Kernel) -> None:
    said = lines(notebook.run("ticks(2); ipygpumem.tensors(); ticks(2)", browser=True))
    work = [line.startswith("ipygpumem") for line in said]
    assert (work[0], work[-1], any(work)) == (False, False, True)
    assert all("RAM" in line for line, is_work in zip(said, work, strict=True) if not is_work)


@pytest.mark.usefixtures("slow_tensors")
@pytest.mark.parametrize("how", ["captured", "nobody looks", "off", "after output"])
def test_there_is_no_line_where_it_is_not_wanted(notebook: Kernel, how: str) -> None:
    if how == "off":
        notebook.run("%config IPyGpuMem.live = False")
    code = {"captured": "%%capture\n", "after output": "print('some text', end='')\n"}.get(how, "") + "%gpumem tensors"
    reply = (
        notebook.run(code, browser=how != "nobody looks")
        if how != "nobody looks"
        else notebook.run(code, allow_stdin=False)
    )
    notebook.run("%config IPyGpuMem.live = True")
    assert (reply.status, reply.updates, reply.stderr) == ("ok", [], "")


@pytest.mark.parametrize("prints", [False, True])
def test_work_at_the_end_of_a_cell_is_shown_where_its_report_will_be(notebook: Kernel, prints: bool) -> None:
    notebook.run(
        "real_heap = survivors.Heap\ndef heap_slowly(beside, progress):\n    slow_search(progress)\n"
        "    return real_heap(beside, progress)\nsurvivors.Heap = heap_slowly\nimport numpy\nkept = []"
    )
    code = "print('text', end='')\n" * prints + "part = numpy.ones(2**20); kept.append(part)"
    reply = notebook.run(f"%%experiment trial\n{code}", browser=True)
    notebook.run("survivors.Heap = real_heap")
    assert "ipygpumem: who holds what is still alive 6%" in lines(reply)
    assert reply.kinds == ["stdout"] * prints + ["display"]
    assert len(reply.reports("experiment")) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no pty on this system")
def test_a_terminal_shows_the_share_in_its_lowest_row(tmp_path: Path) -> None:
    pytest.importorskip("pyte")
    from tests.terminal import Terminal

    terminal = Terminal(tmp_path)
    terminal.run("from tests.waiting import until; from ipygpumem.notebook.commands import tensors")
    terminal.run("real = tensors.survey.take")
    terminal.run(f"tensors.survey.take = lambda *a, **k: (until({str(tmp_path / 'seen')!r}), real(*a, **k))[1]")
    terminal.type("%gpumem tensors")
    terminal.watch(lambda: terminal.rows[-1].startswith("ipygpumem: tensors and arrays 0%"))
    assert not any("RAM" in row for row in terminal.rows[-3:])
    (tmp_path / "seen").touch()
    terminal._await_prompt()
    assert not any(row.startswith("ipygpumem: tensors and arrays") for row in terminal.everything)
    terminal.close()

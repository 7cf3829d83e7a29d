"""The bar of our own long work: from one second on, gone afterwards, nowhere where nobody looks."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipygpumem.notebook import progress as module
from ipygpumem.notebook.progress import Progress
from tests.kernel import Kernel

SLOW = """
import time, sys
from ipygpumem.notebook import tensors
from tests.waiting import ticks
real = tensors.survey.take
def slow(*arguments, **options):
    ticks(4)
    return real(*arguments, **options)
tensors.survey.take = slow
"""


class Screen(io.StringIO):
    """A terminal."""

    encoding = "utf-8"  # type: ignore[assignment]  # a property in the base class

    def isatty(self) -> bool:
        return True


def test_work_of_less_than_a_second_shows_nothing_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_make_bar", lambda **options: pytest.fail("a bar was made"))
    screen = Screen()
    work = Progress("tests", screen)
    work(1, 3)
    work.close()
    assert screen.getvalue() == ""


def test_longer_work_shows_its_share_and_leaves_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY_SECONDS", 0.0)
    screen = Screen()
    before = threading.active_count()
    work = Progress("tests", screen)
    work(1, 4)
    assert screen.getvalue().rpartition("\r")[2].startswith("ipygpumem: tests:  25%|")
    assert "1/4" in screen.getvalue()
    work.close()
    assert screen.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""
    work.refresh()  # too late, from another thread
    assert screen.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""
    assert threading.active_count() == before


def test_a_bar_of_the_users_own_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(module, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    theirs, ours = Screen(), Screen()
    with tqdm(total=2, file=theirs):
        work = Progress("tests", ours)
        work(1, 2)
        work.close()
    assert "\n" not in ours.getvalue()
    assert "\x1b[A" not in ours.getvalue()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    kernel = Kernel()
    reply = kernel.run("%load_ext ipygpumem\n" + SLOW)
    assert reply.status == "ok", reply.traceback
    yield kernel
    kernel.close()


@pytest.mark.parametrize(("code", "reports"), [("%gpumem tensors", 1), ("import ipygpumem; ipygpumem.tensors();", 0)])
def test_a_notebook_shows_the_bar_as_a_display_that_vanishes(notebook: Kernel, code: str, reports: int) -> None:
    reply = notebook.run(code, browser=True)
    bars = [item for item in reply.updates if item["metadata"] == {"ipygpumem": {"reports": ["progress"]}}]
    assert "ipygpumem: tensors and arrays:" in bars[-1]["data"]["text/html"]
    assert [item["data"] for item in reply.displays if not item["metadata"]] == [{}]
    assert (reply.stderr, len(reply.reports("tensors"))) == ("", reports)


@pytest.mark.parametrize("how", ["captured", "nobody looks", "off"])
def test_there_is_no_bar_where_it_is_not_wanted(notebook: Kernel, how: str) -> None:
    if how == "off":
        notebook.run("%config IPyGpuMem.live = False")
    reply = notebook.run("%%capture\n" * (how == "captured") + "%gpumem tensors", allow_stdin=how != "nobody looks")
    notebook.run("%config IPyGpuMem.live = True")
    assert (reply.status, reply.updates, reply.stderr) == ("ok", [], "")


@pytest.mark.skipif(sys.platform == "win32", reason="no pty on this system")
def test_a_terminal_shows_the_bar_above_the_live_line(tmp_path: Path) -> None:
    pytest.importorskip("pyte")
    from tests.terminal import Terminal

    terminal = Terminal(tmp_path)
    terminal.run("from tests.waiting import until; from ipygpumem.notebook import tensors")
    terminal.run("real = tensors.survey.take")
    terminal.run(f"tensors.survey.take = lambda *a, **k: (until({str(tmp_path / 'seen')!r}), real(*a, **k))[1]")
    terminal.type("%gpumem tensors")
    terminal.watch(lambda: any(row.startswith("ipygpumem: tensors and arrays:") for row in terminal.rows))
    (tmp_path / "seen").touch()
    terminal._await_prompt()
    assert not any(row.startswith("ipygpumem: tensors and arrays:") for row in terminal.everything)
    terminal.close()

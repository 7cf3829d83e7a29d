"""The line after each cell, in a real kernel."""

from __future__ import annotations

import re

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import fails, ok, sizes


def test_the_line_tells_what_a_cell_kept_and_its_peak(notebook: Kernel) -> None:
    (line,) = ok(notebook, "size = len(b'x' * (256 << 20))").reports("cell")
    assert abs(sizes(line, "RAM")) < 16
    assert abs(sizes(line, "peak") - 256) < 16
    ok(notebook, "block = bytearray(128 << 20)")
    (line,) = ok(notebook, "del block").reports("cell")
    assert abs(sizes(line, "RAM") + 128) < 16


def test_the_line_of_a_cell_that_moves_nothing_is_short_and_quiet_hides_it(notebook: Kernel) -> None:
    (line,) = ok(notebook, "y = 1").reports("cell")
    assert re.fullmatch(r"cell \d+ · [\d.]+ ms · RAM [\d.]+ MiB", line)
    ok(notebook, "%config IPyGpuMem.quiet = True")
    assert ok(notebook, "y = 2").displays == []
    assert len(ok(notebook, "z = bytearray(9 << 20)").reports("cell")) == 1
    assert len(fails(notebook, "1 / 0", "ZeroDivisionError").reports("cell")) == 1
    assert "reports on, quiet" in ok(notebook, "%gpumem status").reports("status")[0]
    ok(notebook, "del z", "%config IPyGpuMem.quiet = False")


def test_a_failed_cell_has_its_line_with_the_error(notebook: Kernel) -> None:
    (line,) = fails(notebook, "1 / 0", "ZeroDivisionError").reports("cell")
    assert " · ZeroDivisionError · RAM" in line


@pytest.mark.parametrize("magic", ["%%time", "%%capture", "%%capture out", "%%prun -q", "%%timeit -n1 -r1"])
def test_a_cell_magic_changes_nothing_about_the_line(notebook: Kernel, magic: str) -> None:
    """Also where the magic runs its body as a cell of its own, so that events nest."""
    reply = ok(notebook, f"{magic}\nx = 1")
    assert len(reply.reports("cell")) == 1
    assert len(ok(notebook, "x = 1").reports("cell")) == 1


def test_blank_and_silent_cells_have_no_line(notebook: Kernel) -> None:
    assert ok(notebook, "").displays == []
    assert ok(notebook, "\n  \n").displays == []
    reply = notebook.run("silently = 1", silent=True)
    assert reply.displays == []
    assert len(ok(notebook, "x = 1").reports("cell")) == 1


def test_reports_can_be_switched_off_and_on(kernel: Kernel) -> None:
    ok(kernel, "%gpumem off")
    assert ok(kernel, "x = 1").displays == []
    ok(kernel, "%gpumem on")
    assert len(ok(kernel, "x = 1").reports("cell")) == 1
    ok(kernel, "%config IPyGpuMem.min_cell_seconds = 60")
    assert ok(kernel, "x = 1").displays == []


def test_the_last_record_tells_about_the_cell(notebook: Kernel) -> None:
    ok(notebook, "import ipygpumem", "block = bytearray(64 << 20)")
    assert notebook.value("ipygpumem.last().usages[0].delta_bytes >> 20") in (63, 64, 65)
    assert notebook.value("(ipygpumem.last().success, len(ipygpumem.history()) > 1)") == (True, True)

"""What people do in JupyterLab, by keyboard and mouse."""

import re

import pytest

from tests.frontends.lab import Notebook
from tests.notebooks import notebook

pytestmark = pytest.mark.frontends

LOAD = "%load_ext ipygpumem"
FIGURES = r"RAM [+-][\d.]+ MiB, peak \+[\d.]+ MiB, [\d.]+ MiB now"


def test_a_cell_run_by_keyboard_shows_its_line_once_below_its_own_output(lab: Notebook) -> None:
    lab.open(notebook(LOAD, "block = bytearray(50 * 2**20)\nlen(block)"))
    lab.run(0, 1)
    assert lab.outputs(1).count() == 2
    assert lab.outputs(1).first.inner_text().strip().endswith("52428800")
    (line,) = lab.reports(1).all_inner_texts()
    assert re.match(rf"cell 2 · [\d.]+ m?s · {FIGURES}", " ".join(line.split()))


def test_reports_are_saved_and_still_there_after_the_page_is_reloaded(lab: Notebook) -> None:
    lab.open(notebook(LOAD, "%%experiment trial\npart = 1"))
    lab.run(0, 1)
    before = lab.reports(1).all_inner_texts()
    with lab.page.expect_response(lambda reply: reply.request.method == "PUT" and "/api/contents/" in reply.url):
        lab.command("docmanager:save")
    lab.reload()
    assert "deleted: part" in "".join(before)
    assert lab.reports(1).all_inner_texts() == before

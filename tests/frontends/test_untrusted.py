"""Saved reports in a notebook from elsewhere, which JupyterLab and Notebook 7 do not trust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ipygpumem.report import html
from ipygpumem.report.cells import cell_report
from tests.frontends.conftest import needs
from tests.frontends.lab import Notebook, Server
from tests.notebooks import Node, code, node, notebook
from tests.report_samples import RAM, cell, every_report

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]


def saved() -> Node:
    """Return a notebook with each kind of report as a saved output; nobody has run it here."""
    cells = []
    for report in (cell_report(cell(usages=(RAM,))), *every_report()):
        data = {"text/html": html.render([report]), "text/plain": "the plain text"}
        made = code("1")
        made.outputs = [node(output_type="display_data", data=data, metadata={})]
        made.execution_count = 1
        cells.append(made)
    return notebook(*cells)


@pytest.fixture(params=["jupyterlab", "notebook"])
def page(
    request: pytest.FixtureRequest, browser: BrowserContext, tmp_path: Path
) -> Iterator[Notebook]:
    needs(request.param)
    server = Server(tmp_path, request.param)
    page = Notebook(server, browser)
    yield page
    page.close()
    server.close()


def test_an_untrusted_notebook_shows_words_tables_and_bars(page: Notebook) -> None:
    content_of_page = saved()
    page.open(content_of_page)
    is_trusted = page.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets[0].model.trusted"
    )
    assert not is_trusted
    for index, made in enumerate(content_of_page.cells):
        page.cell(index).scroll_into_view_if_needed()
        output = page.outputs(index).locator(".jp-OutputArea-output").first
        output.wait_for()
        before = page.page.evaluate(
            """source => {
                const parsed = new DOMParser().parseFromString(source, 'text/html');
                const count = name => parsed.querySelectorAll(name).length;
                return [parsed.body.textContent.trim(), count('table'), count('details')];
            }""",
            made.outputs[0].data["text/html"],
        )
        after = output.evaluate(
            """output => {
                const count = name => output.querySelectorAll(name).length;
                return [output.textContent.trim(), count('table'), count('details')];
            }"""
        )
        assert after == before
    widths = page.outputs(0).evaluate(
        """output => [...output.querySelectorAll('[title] span')]
            .map(piece => Math.round(piece.getBoundingClientRect().width))"""
    )
    assert len(widths) >= 3
    assert all(widths)

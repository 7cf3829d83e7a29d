"""Saved reports in a notebook from elsewhere, which JupyterLab and Notebook 7 do not trust."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.frontends.conftest import needs
from tests.frontends.lab import Notebook, Server
from tests.frontends.saved_reports import saved

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]


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
    # Each bar has several pieces.
    assert len(widths) >= 3
    assert all(widths)

"""The classic Notebook, version 7."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.frontends.conftest import needs
from tests.frontends.lab import Notebook, Server
from tests.notebooks import notebook

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = pytest.mark.frontends


@pytest.fixture
def classic(browser: BrowserContext, tmp_path: Path) -> Iterator[Notebook]:
    needs("notebook")
    server = Server(tmp_path, "notebook")
    page = Notebook(server, browser)
    yield page
    page.close()
    server.close()


def test_an_experiment_and_an_error_in_the_classic_notebook(classic: Notebook) -> None:
    fails = "%%experiment second\npart = [0] * 2**20\npart[2**21]"
    classic.open(notebook("%load_ext ipygpumem", "x = [0]", "%%experiment first\nx = 1", fails))
    classic.complaints.clear()  # Notebook 7.6 stumbles over its own settings while it starts
    classic.run(0, 1)
    classic.reports(1).get_by_text("cell 2", exact=True).wait_for()
    assert classic.outputs(1).count() == 1
    classic.run(2, 3)
    assert "restored: x" in classic.reports(2).last.inner_text()
    assert "IndexError" in classic.cell(3).inner_text()
    assert "deleted: part" in classic.reports(3).last.inner_text()
    assert classic.complaints == []

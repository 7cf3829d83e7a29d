"""What people do in JupyterLab and in the classic Notebook, version 7; the picture at the top of README.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.frontends.conftest import needs
from tests.frontends.lab import Notebook, Server
from tests.frontends.looks import Pictures, misfits
from tests.notebooks import notebook

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

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


if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext


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


CELLS = (
    "%load_ext ipygpumem",
    "import torch\nfrom torch import nn\n\nimages, labels = torch.rand(2048, 3, 128, 128), torch.randint(10, (2048,))",
    """%%experiment baseline --keep loss --note lr=1e-3 bs=512
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 128 * 128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch, truth in zip(images.split(512), labels.split(512)):
    loss = nn.functional.cross_entropy(model(batch), truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = loss.item()""",
    """def similarity(images):
    flat = images.flatten(1) - images.mean()
    return (flat[:, None] - flat).square().sum(2)

similarity(images)""",
)


def test_the_window_of_the_readme(lab: Notebook, pictures: Pictures) -> None:
    lab.page.set_viewport_size({"width": 1000, "height": 1090})
    lab.open(notebook(*CELLS), "training.ipynb")
    lab.command("application:toggle-left-area")
    lab.run(*range(len(CELLS)), seconds=200)
    experiment, failure = lab.reports(2).last.inner_text(), lab.reports(3).last.inner_text()
    assert "deleted: model, optimizer, batch, truth" in experiment
    assert "flat" in failure
    assert misfits(lab.reports(2).last) == misfits(lab.reports(3).last) == []
    lab.cell(2).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    pictures.take(lab.page.locator("body > .lm-Widget, #main").first, "report")

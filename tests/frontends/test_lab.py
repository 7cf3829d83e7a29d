"""Usual actions in JupyterLab and in the classic Notebook, version 7; the film at the top of
README.md.
"""

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


def test_a_cell_run_by_keyboard_shows_one_line_below_its_output(lab: Notebook) -> None:
    lab.open(notebook(LOAD, "block = bytearray(50 * 2**20)\nlen(block)"))
    lab.run(0, 1)
    assert lab.outputs(1).count() == 2
    assert lab.outputs(1).first.inner_text().strip().endswith("52428800")
    (line,) = lab.reports(1).all_inner_texts()
    assert re.match(rf"cell 2 · [\d.]+ m?s · {FIGURES}", " ".join(line.split()))


def test_reports_are_saved_and_survive_a_page_reload(lab: Notebook) -> None:
    lab.open(notebook(LOAD, "%%experiment trial\npart = 1"))
    lab.run(0, 1)
    before = lab.reports(1).all_inner_texts()
    with lab.page.expect_response(
        lambda reply: reply.request.method == "PUT" and "/api/contents/" in reply.url
    ):
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
    classic.open(
        notebook("%load_ext ipygpumem", "x = bytearray(2**24)", "%%experiment first\nx = 1", fails)
    )
    classic.complaints.clear()  # Notebook 7.6 stumbles over its own settings while it starts
    classic.run(0, 1)
    classic.reports(1).get_by_text("cell 2", exact=True).wait_for()
    assert classic.outputs(1).count() == 1
    classic.run(2, 3)
    assert "restored: x" in classic.reports(2).last.inner_text()
    assert "IndexError" in classic.cell(3).inner_text()
    assert "deleted: part" in classic.reports(3).last.inner_text()
    assert classic.complaints == []


STORY = (
    "%load_ext ipygpumem",
    "import numpy as np\n\nimages = np.random.rand(2000, 128, 128)",
    """def similarity(images):
    centred = images.reshape(2000, -1) - images.mean()
    return (centred[:, None] * centred).sum(axis=2)

similarity(images)""",
    """%%experiment contrast --keep score
sharp = np.clip(images * 2 - 0.5, 0, 1)
score = float(sharp.std())
score""",
)
"""The cells of the film at the top of README.md."""


def test_the_film_of_the_readme(lab: Notebook, pictures: Pictures) -> None:
    lab.page.set_viewport_size({"width": 900, "height": 780})
    lab.open(notebook(""), "session.ipynb")
    lab.command("application:toggle-left-area")
    lab.command("statusbar:toggle")
    film = pictures.film(lab.page)

    # Each cell is typed line by line, then run.
    for index, source in enumerate(STORY):
        lab.enter(index)
        lines = source.splitlines()
        for end in range(1, len(lines) + 1):
            lab.write(index, "\n".join(lines[:end]))
            film.take(0.25)
        film.take(0.4)
        lab.press()
        film.take(0.5)
        while not lab.is_idle():
            film.take(0.2, longer=False)
        lab.wait(index)
        seen, edge = (index, "start") if index == 2 else (index + 1, "end")
        lab.cell(seen).evaluate(f"cell => cell.scrollIntoView({{block: '{edge}'}})")
        film.take((1, 2.5, 4, 4.5)[index])

    # The film is of reports without overlaps.
    failure = lab.reports(2).last
    experiment = lab.reports(3).last
    assert "centred" in failure.inner_text()
    assert "deleted: sharp" in experiment.inner_text()
    assert misfits(failure) == misfits(experiment) == []
    film.save("demo")

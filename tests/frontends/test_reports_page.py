"""The cells of docs/README.md in JupyterLab: every report in both themes and at narrow widths, and
its picture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ipygpumem.units import MIB
from tests.frontends.lab import DARK, LIGHT, Notebook, Server
from tests.frontends.looks import Pictures, contrasts, misfits
from tests.notebooks import notebook

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

WCAG_AA = 4.5
TALL = 4000
"""Pixels, so that every cell is in the window as a whole."""
RUNS = {"growth": 4}
"""Number of runs of the cell of a picture."""


PAGE = Path(__file__).parents[2] / "docs/README.md"

_PART = re.compile(
    r"^```python\n(?P<cell>.*?)^```$|^!\[[^]]+\]\(img/(?P<picture>[\w-]+)\.png\)", re.M | re.DOTALL
)


@dataclass
class Shown:
    """A cell of the page and the names of its pictures; those that end in ``-dark`` are taken in
    the dark theme.
    """

    source: str
    pictures: list[str]


def gallery(*, died: bool = False) -> list[Shown]:
    """Return the cells of the page, or those of its last section, where the kernel ``died``."""
    text = PAGE.read_text("utf-8").split("\n### When the kernel died\n")[died]
    shown_reports: list[Shown] = []
    for part in _PART.finditer(text):
        if part["cell"] is not None:
            shown_reports.append(Shown(part["cell"].rstrip("\n"), []))
        else:
            shown_reports[-1].pictures.append(part["picture"])
    return shown_reports


@pytest.fixture(scope="module")
def page(server: Server, browser: BrowserContext, pictures: Pictures) -> Iterator[Notebook]:
    lab = Notebook(server, browser, height=TALL)
    cells = gallery()
    lab.open(notebook(*(shown.source for shown in cells)), "reports.ipynb")
    lab.command("application:toggle-left-area")
    for index, shown in enumerate(cells):
        for _ in range(RUNS.get("".join(shown.pictures), 1)):
            lab.enter(index)
            lab.press()
            lab.wait(index)
    yield lab
    lab.close()


def reports(page: Notebook) -> list[tuple[int, int]]:
    """The place of every report: cell, and which of its reports."""
    return [
        (cell, at) for cell in range(len(gallery())) for at in range(page.reports(cell).count())
    ]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_every_text_of_a_report_has_the_contrast_of_wcag_aa(page: Notebook, theme: str) -> None:
    page.theme(theme)
    texts = [text for cell, at in reports(page) for text in contrasts(page.reports(cell).nth(at))]
    # Else hardly a report was found.
    assert len(texts) > 50
    assert [text for text in texts if text["contrast"] < WCAG_AA] == []


@pytest.mark.parametrize("width", [900, 520, 380, 330])
def test_reports_fit_the_width_of_the_page(page: Notebook, width: int) -> None:
    page.resize(width, TALL)
    try:
        assert [
            text for cell, at in reports(page) for text in misfits(page.reports(cell).nth(at))
        ] == []
    finally:
        page.resize(900, TALL)


def test_the_pictures_of_the_page_are_taken(page: Notebook, pictures: Pictures) -> None:
    for theme in (LIGHT, DARK):
        page.theme(theme)
        for index, shown in enumerate(gallery()):
            for name in shown.pictures:
                if name.endswith("-dark") == (theme == DARK):
                    pictures.take(page.cell(index), name)


def test_the_page_of_all_reports_logs_no_browser_errors(page: Notebook) -> None:
    assert page.complaints == []


def test_lab_explains_that_a_kernel_was_killed_for_memory(
    lab: Notebook, pictures: Pictures
) -> None:
    from benchmarks.harness.control_group import (  # needs a Linux with control groups
        limited_group,
        move,
    )

    fatal, told = gallery(died=True)
    before = ("%load_ext ipygpumem", "%gpumem recorder on", "import time\n\nimport numpy as np")

    # The kernel records in a small group, until a cell uses it up.
    with limited_group(600 * MIB) as group:
        lab.open(
            notebook("import os\nos.getpid()", *before, fatal.source, before[0], told.source),
            "died.ipynb",
        )
        lab.command("application:toggle-left-area")
        lab.run(0)
        move(int(lab.outputs(0).inner_text().split()[-1]), group)
        lab.run(1, 2, 3)
        lab.enter(4)

        # The next kernel knows the reason.
        lab.press()
        lab.page.get_by_text(re.compile("appears to have died")).wait_for(timeout=90_000)
        lab.page.get_by_role("button", name="Ok", exact=True).click()
        lab.run(5, 6)
    report = lab.reports(6).first
    assert "died in cell 5" in " ".join(report.inner_text().split())
    assert "OOM killer" in report.inner_text()
    assert [text for text in contrasts(report) if text["contrast"] < WCAG_AA] == []
    pictures.take(lab.cell(6), "postmortem")

"""A notebook that was executed elsewhere: JupyterLab does not trust its outputs and cleans their HTML."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.frontends.lab import DARK, LIGHT, Notebook
from tests.frontends.looks import contrasts, rows_of
from tests.frontends.pictures import Pictures
from tests.notebooks import Node, notebook, read, write

pytestmark = pytest.mark.frontends

CELLS = (
    "%load_ext ipygpumem",
    "import numpy as np\nblock = np.ones(2**23)",
    "%%experiment trial --keep total\nhits = block[block > 0]\ntotal = hits.size",
    "def fill(size):\n    part = np.ones(2**23)\n    return part[:, None] - part\nfill(1)",
    "%gpumem status",
)
FAILS, STATUS = 3, 4


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """The notebook after nbclient has run it, with nobody's signature."""
    folder = tmp_path_factory.mktemp("executed")
    made = notebook(*CELLS)
    made.cells[FAILS].metadata.tags = ["raises-exception"]
    write(made, folder / "made.ipynb")
    subprocess.run(
        [sys.executable, "-m", "jupyter", "execute", "--inplace", "made.ipynb"], cwd=folder, timeout=200, check=True
    )
    return read(folder / "made.ipynb")


def test_reports_that_lab_does_not_trust_say_all_that_the_trusted_ones_say(
    lab: Notebook, executed: Node, pictures: Pictures
) -> None:
    lab.open(executed, "elsewhere.ipynb")
    for index, cell in enumerate(executed.cells):
        htmls = [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]
        assert lab.reports(index).count() == len(htmls)
        for at, html in enumerate(htmls):
            shown = lab.reports(index).nth(at)
            whole = lab.page.evaluate(
                "html => new DOMParser().parseFromString(html, 'text/html').body.textContent", html
            )
            assert shown.evaluate("element => element.textContent").split() == whole.split()
            assert shown.locator("style, script, iframe, link").count() == 0
    table = lab.reports(STATUS).locator("table").last
    parts, box = rows_of(table), table.bounding_box()
    assert box is not None
    assert len(parts) > 4
    for row in parts:
        assert row["lefts"] == pytest.approx(parts[0]["lefts"], abs=1)
        assert row["lefts"][0] == pytest.approx(box["x"], abs=2)
    for theme in (LIGHT, DARK):
        lab.theme(theme)
        texts = [text for index in range(len(executed.cells)) for at in range(lab.reports(index).count())
                 for text in contrasts(lab.reports(index).nth(at))]  # fmt: skip
        assert [text for text in texts if text["contrast"] < 4.5] == []
        pictures.take(lab.page.locator(".jp-Notebook"), f"untrusted-{theme.split()[1].lower()}")

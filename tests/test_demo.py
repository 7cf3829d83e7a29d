"""``make demo``: the quickstart in a real kernel."""

import re
from pathlib import Path

import pytest

from tests.alone import printed
from tests.notebooks import read

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the demo wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, printed(EXAMPLES / "run_demo.py", folder)


def test_the_summary_names_the_page_and_what_each_cell_and_experiment_cost(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    assert str(folder / "quickstart.html") in printed
    assert printed.index(">>> import torch ...\n") < printed.index("\ncell 2 · ")
    assert len(re.findall(r"^(?:cell )?\d+ · .*RAM", printed, re.MULTILINE)) in range(12, 15)
    assert re.findall(r"^experiment (\w+) ·", printed, re.MULTILINE) == ["small", "large"]
    assert len(re.findall("^out of memory", printed, re.MULTILINE)) == 1


def test_the_page_holds_the_reports_and_needs_no_network(demo: tuple[Path, str]) -> None:
    page = (demo[0] / "quickstart.html").read_text("utf-8")
    words = re.sub(r"<[^>]+>", "", page)
    assert "experiment small · 1 cell" in words
    assert "experiment large · 3 cells" in words
    assert "held by the traceback" in page
    assert not re.findall(r"<script|<link|\bsrc=|@import", page)


def test_notebooks_are_committed_without_outputs() -> None:
    cells = [(path.name, cell) for path in EXAMPLES.glob("*.ipynb") for cell in read(path).cells]
    assert len({name for name, _ in cells}) > 4
    assert [(name, cell.id) for name, cell in cells if cell.get("outputs") or cell.get("execution_count")] == []

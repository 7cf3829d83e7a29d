"""``make demo``: the quickstart in a real kernel; the outputs that are committed."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.alone import EXAMPLES, printed
from tests.notebooks import read


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the demo wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, printed(EXAMPLES / "run_demo.py", folder)


def test_the_summary_names_the_page_and_the_cost_of_each_cell(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    assert str(folder / "quickstart.html") in printed
    assert printed.index(">>> import torch ...\n") < printed.index("\ncell 2 · ")
    assert len(re.findall(r"^cell \d+ · .*RAM", printed, re.MULTILINE)) in range(12, 15)
    assert re.findall(r"^experiment (\w+) ·", printed, re.MULTILINE) == ["small", "large"]
    assert len(re.findall("^out of memory", printed, re.MULTILINE)) == 1


def test_the_page_holds_the_reports_and_needs_no_network(demo: tuple[Path, str]) -> None:
    page = (demo[0] / "quickstart.html").read_text("utf-8")
    words = re.sub(r"<[^>]+>", "", page)
    assert "experiment small · 1 cell" in words
    assert "experiment large · 3 cells" in words
    assert "held by the traceback" in page
    assert not re.findall(r"<script|<link|\bsrc=|@import", page)


# `make notebooks` writes will_it_fit only where peft is installed.
@pytest.mark.parametrize("path", [*EXAMPLES.glob("*.ipynb")], ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_the_outputs_of_its_code(path: Path) -> None:
    content = read(path)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    shown = [cell for cell in cells if cell.outputs]
    if path.stem == "will_it_fit" and not shown:
        return
    code = "\n\n".join(cell.source for cell in cells)
    assert content.metadata["outputs_of"] == hashlib.sha256(code.encode()).hexdigest()[:16], (
        "run `make notebooks`"
    )
    # Some cells show nothing, but not most.
    assert len(shown) >= 0.7 * len(cells)
    text = path.read_text("utf-8")
    assert (
        re.findall(r"/(?:home|root|tmp|usr|work|Users|opt)/|ipykernel_\d|iopub\.execute", text)
        == []
    )

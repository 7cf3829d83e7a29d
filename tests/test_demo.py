"""``make demo``: the quickstart in a real kernel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks import Node, read

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the demo wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    run = subprocess.run(
        [sys.executable, EXAMPLES / "run_demo.py", folder], capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


@pytest.fixture(scope="module")
def notebook(demo: tuple[Path, str]) -> Node:
    """The executed notebook."""
    return read(demo[0] / "quickstart.ipynb")


def outputs(notebook: Node, cell_id: str) -> str:
    """All that a cell shows as text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    return "\n".join(
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
        if output.output_type != "error"
    )


def test_the_summary_names_the_page_and_what_each_cell_and_experiment_cost(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    assert str(folder / "quickstart.html") in printed
    assert printed.index(">>> import torch ...\n") < printed.index("\ncell 2 · ")
    assert len(re.findall(r"^cell \d+ · .*RAM", printed, re.MULTILINE)) == 14
    assert re.findall(r"^experiment (\w+) ·", printed, re.MULTILINE) == ["small", "large"]
    assert len(re.findall("^out of memory", printed, re.MULTILINE)) == 1


def test_the_page_holds_the_reports_and_needs_no_network(demo: tuple[Path, str]) -> None:
    page = (demo[0] / "quickstart.html").read_text("utf-8")
    words = re.sub(r"<[^>]+>", "", page)
    assert "experiment small · 1 cell" in words
    assert "experiment large · 3 cells" in words
    assert "held by the traceback" in page
    assert not re.findall(r"<script|<link|\bsrc=|@import", page)


def test_the_recovery_lists_what_the_frames_held_and_brings_it_back(notebook: Node) -> None:
    text = outputs(notebook, "oom")
    assert "asked for 1.00 PiB" in text
    assert re.search(r"256 MiB +closest_pair +8 +points +Tensor +16777216 × 4 +float32 +\S+$", text, re.MULTILINE)
    assert re.search(r" 64 MiB +similarities +3 +lengths +Tensor +16777216 × 1 +float32 +\S+$", text, re.MULTILINE)
    (freed,) = re.findall(r"freed: .*\b(?:RAM|cuda:0) ([\d.]+) MiB$", text, re.MULTILINE)
    assert float(freed) > 300
    figures = r"(\d+) MiB before, (\d+) MiB at its peak, (\d+) MiB after the recovery, which freed (\d+) MiB"
    before, peak, after, freed = map(int, re.findall(figures, outputs(notebook, "recovered"))[-1])
    assert peak - before > 300
    assert after - before < 60
    assert freed > 300


def test_notebooks_are_committed_without_outputs() -> None:
    cells = [(path.name, cell) for path in EXAMPLES.glob("*.ipynb") for cell in read(path).cells]
    assert len({name for name, _ in cells}) > 4
    assert [(name, cell.id) for name, cell in cells if cell.get("outputs") or cell.get("execution_count")] == []

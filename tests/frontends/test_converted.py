"""nbconvert and papermill: notebooks that run with nobody before them, and pages made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks import notebook, read, write

pytestmark = pytest.mark.thorough

GOOD = (
    "%load_ext ipygpumem",
    "import time\ntime.sleep(2.5)\nprint('done')",
    "%%experiment trial --keep size\nblock = bytearray(2**26)\nsize = len(block)\nsize",
)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = {name: str(folder / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def test_nbconvert_writes_a_page_with_the_reports_and_nothing_else_of_ours(tmp_path: Path) -> None:
    write(notebook(*GOOD), tmp_path / "good.ipynb")
    # The template without scripts: what is left of them would be ours.
    done = run(tmp_path, "nbconvert", "--execute", "--to", "html", "--template", "basic", "good.ipynb")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "good.html").read_text("utf-8")
    assert not re.findall(r"<script|<iframe|\son\w+=|javascript:|@import", page)
    assert page.count('class="output_area"') == 4  # what was printed, a value, two reports
    text = text_of(page)
    assert len(re.findall(r"cell \d+ ·", text)) == 2
    assert "experiment trial · 1 cell" in text
    assert "deleted: block" in text


def test_parameters_of_papermill_are_of_the_notebook_and_not_of_an_experiment(tmp_path: Path) -> None:
    cells = notebook("%load_ext ipygpumem", "rate = 1", "%%experiment trial --keep used\nused = rate * 2", "used, rate")
    cells.cells[1].metadata.tags = ["parameters"]
    write(cells, tmp_path / "with.ipynb")
    done = run(tmp_path, "papermill", "with.ipynb", "out.ipynb", "-p", "rate", "21", "--no-progress-bar")
    assert done.returncode == 0, done.stderr
    executed = read(tmp_path / "out.ipynb")
    assert executed.cells[-1].outputs[0].data["text/plain"] == "(42, 21)"

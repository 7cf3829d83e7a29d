"""nbconvert and papermill: notebooks that run with nobody before them, and pages made of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks import notebook, read, write

pytestmark = pytest.mark.thorough


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = {
        name: str(folder / name.lower())
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    }
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_papermill_parameters_belong_to_no_experiment(tmp_path: Path) -> None:
    cells = notebook(
        "%load_ext ipygpumem",
        "rate = 1",
        "%%experiment trial --keep used\nused = rate * 2",
        "used, rate",
    )
    cells.cells[1].metadata.tags = ["parameters"]
    write(cells, tmp_path / "with.ipynb")
    done = run(
        tmp_path, "papermill", "with.ipynb", "out.ipynb", "-p", "rate", "21", "--no-progress-bar"
    )
    assert done.returncode == 0, done.stderr
    executed = read(tmp_path / "out.ipynb")
    assert executed.cells[-1].outputs[0].data["text/plain"] == "(42, 21)"

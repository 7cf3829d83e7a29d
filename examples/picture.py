"""Makes the README's picture: ``python examples/picture.py build/demo docs/img/report.png``.

It shows two cells of the quickstart that ``make demo`` has executed, with the traceback shortened to its last line.
Needs ``chromium``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from run_demo import write_page

CELLS = ("small", "oom")
WIDTH = 900
_STYLE = "<style>body {margin: 0; padding: 0 !important} .jp-Notebook {padding: 8px 12px 8px 0 !important}</style>"
_HEIGHT = "<script>document.title = Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)</script>"


def shorten(notebook: NotebookNode) -> None:
    """Keep the cells of the picture, and of a traceback its last line."""
    notebook.cells = [cell for cell in notebook.cells if cell.id in CELLS]
    for cell in notebook.cells:
        for output in cell.outputs:
            if output.output_type == "error":
                output.traceback = output.traceback[-1:]


def chromium(page: Path, *options: str) -> str:
    """Open ``page`` without a window and return what chromium prints."""
    program = shutil.which("chromium")
    if program is None:
        sys.exit("examples/picture.py needs chromium")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    with tempfile.TemporaryDirectory() as profile:
        fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", f"--user-data-dir={profile}")
        command = [program, *fixed, *quiet, *options, page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(executed: Path, picture: Path) -> None:
    notebook = nbformat.read(executed / "quickstart.ipynb", as_version=4)
    shorten(notebook)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "picture.html"
        write_page(notebook, page)
        page.write_text(page.read_text("utf-8").replace("</body>", f"{_STYLE}{_HEIGHT}</body>"), "utf-8")
        found = re.search(r"<title>(\d+)</title>", chromium(page, f"--window-size={WIDTH},2000", "--dump-dom"))
        assert found is not None
        size = f"--window-size={WIDTH},{found[1]}"
        chromium(
            page, size, "--hide-scrollbars", "--force-device-scale-factor=1.25", f"--screenshot={picture.resolve()}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Runs a notebook in a real kernel and writes it as a page: ``python examples/run_demo.py OUT_DIR
[NOTEBOOK]``.

The notebook is one of this folder, by name: ``quickstart``, which is taken if none is named, or
``calibrate``.

Each cell is named as it begins, and what ipygpumem reported on it follows. The kernel is the
interpreter that runs this script, and nothing comes from or goes to the network. The exit code is 1
if a cell fails, and also if the cell that is meant to fail (tag ``raises-exception``) does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parent

_PAGE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
"""
"""nbconvert's page without the scripts that it would load from the network."""


class ThisInterpreter(KernelSpecManager):
    """Knows one kernel: the interpreter that runs this script."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
            "--log-level=ERROR",
        ]
        return KernelSpec(argv=command, display_name="Python", language="python")


def execute(notebook: NotebookNode) -> str | None:
    """Run all cells in place; return what failed, or None."""
    manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter())
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=600,
        resources={"metadata": {"path": str(EXAMPLES)}},
        on_cell_execute=announce,
        on_cell_executed=print_reports,
    )
    with tempfile.TemporaryDirectory() as profile:
        # A profile of its own: no start-up file or option of the user's can change what the page
        # shows; nor can the warnings of a library's version.
        env = {"IPYTHONDIR": profile, "PYTHONWARNINGS": "ignore"}
        try:
            client.execute(env=os.environ | env)
        except CellExecutionError as error:
            return f"a cell failed:\n{error}"
    for cell in notebook.cells:
        if "raises-exception" in cell.metadata.get("tags", ()) and not _failed(cell):
            return f"this cell should have failed, and did not:\n{cell.source}"
    return None


def _failed(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


def announce(cell: NotebookNode, **event: object) -> None:
    """Print a cell's first line as it begins."""
    first, *more = cell.source.splitlines() or [""]
    print(f">>> {first}{' ...' if more else ''}", flush=True)


def print_reports(cell: NotebookNode, **event: object) -> None:
    """Print the texts of ipygpumem's reports on a cell."""
    for output in cell.outputs:
        if output.output_type == "display_data" and "ipygpumem" in output.metadata:
            print(output.data["text/plain"], flush=True)


def as_page(notebook: NotebookNode, name: str) -> str:
    """Return a notebook as HTML that needs nothing else."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"page.html.j2": _PAGE})], template_file="page.html.j2"
    )
    return str(
        exporter.from_notebook_node(notebook, {"metadata": {"name": f"ipygpumem: {name}"}})[0]
    )


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python examples/run_demo.py OUT_DIR [NOTEBOOK]", file=sys.stderr)
        return 2
    out_dir = Path(arguments[0])
    name = (arguments[1:] or ["quickstart"])[0]
    out_dir.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    problem = execute(notebook)
    page = out_dir / f"{name}.html"
    page.write_text(as_page(notebook, name), encoding="utf-8")
    nbformat.write(notebook, out_dir / f"{name}.ipynb")
    if problem is not None:
        print(problem, file=sys.stderr)
    print(f"the page with code, outputs and reports: {page}")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Runs notebooks of this folder and saves them with their outputs: ``python
examples/write_outputs.py NAME ...``.

A rerun changes few lines: an output stays if it shows the same words and nearly the same sizes as
before. Nothing of the machine is saved but what the reports measure: paths, its name, times of
execution and versions are removed. A notebook that needs a module which is missing here is left
alone.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from run_demo import EXAMPLES, execute

_PRIVATE = {
    str(EXAMPLES.parent): "ipygpumem",
    f"{sys.prefix}/": "",
    f"{sys.base_prefix}/": "",
    str(Path.home()): "~",
}
_HOST = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_CELL_FILE = re.compile(r"[\w/]*/ipykernel_\d+/\d+\.py")
_TAG = re.compile("<[^>]+>")
_DURATION = re.compile(r"(?:\d[\d.]*\s(?:ns|µs|ms|s|min|h)\b\s?)+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
TOLERANCE = 0.01
"""Share by which sizes may differ from those of the last run."""
SLACK = 4
"""The same for small numbers, in their unit."""


def digest(cells: list[Any]) -> str:
    """Return a hash of all code cells, which says what outputs were made of."""
    code = "\n\n".join(cell["source"] for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def clean(value: Any) -> Any:
    """Return an output, or a part of it, without traces of this machine."""
    if isinstance(value, dict):  # the records in the metadata of a report have times
        return NotebookNode(
            {key: clean(entry) for key, entry in value.items() if key not in ("schema", "records")}
        )
    if isinstance(value, list):
        return [clean(entry) for entry in value]
    if isinstance(value, str):
        for private, public in _PRIVATE.items():
            value = value.replace(private, public)
        return _HOST.sub(
            "localhost", _ADDRESS.sub("0x7f0000000000", _CELL_FILE.sub("cell.py", value))
        )
    return value


def words(outputs: list[Any]) -> str:
    """Return what a reader sees, without colours, markup and durations."""
    parts = []
    for output in outputs:
        data = output.get("data", {})
        parts += [
            output.output_type,
            *sorted(data),
            output.get("text", ""),
            output.get("evalue", ""),
        ]
        parts += [data.get("text/plain", ""), _TAG.sub(" ", data.get("text/html", ""))]
    return _DURATION.sub("0 s", "\n".join(parts))


def are_alike(old: list[Any], new: list[Any]) -> bool:
    """Return True if two runs of a cell show the same words and nearly the same numbers."""
    before = words(old)
    now = words(new)
    if "".join(_NUMBER.sub("0", before).split()) != "".join(_NUMBER.sub("0", now).split()):
        return False
    numbers = [
        [float(number.replace(",", "")) for number in _NUMBER.findall(text)]
        for text in (before, now)
    ]
    return all(
        abs(one - other) <= max(SLACK, TOLERANCE * one) for one, other in zip(*numbers, strict=True)
    )


def write(name: str) -> str | None:
    """Run a notebook and save it; return what failed, or None."""
    path = EXAMPLES / f"{name}.ipynb"
    old, new = (nbformat.read(path, as_version=4) for _ in range(2))
    problem = execute(new)
    if problem is not None:
        missing = re.search(r"No module named '([\w.]+)'", problem)
        if missing is None:
            return f"{name}: {problem}"
        print(f"{name}: left alone, because {missing[1]} is not installed")
        return None
    before = {cell.id: cell for cell in old.cells}
    for cell in new.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = clean(cell.outputs)
            last = before[cell.id]
            if are_alike(last.outputs, cell.outputs):
                cell.outputs = last.outputs
    new.metadata = old.metadata
    new.metadata["outputs_of"] = digest(new.cells)
    nbformat.write(new, path)
    return None


def main(names: list[str]) -> int:
    problems = [problem for problem in map(write, names) if problem is not None]
    for problem in problems:
        print(problem, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

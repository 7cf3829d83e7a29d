"""Notebooks as files. The package nbformat would bring 140,000 objects, which each look at the heap
goes over.
"""

import json
from pathlib import Path
from typing import Any


class Node(dict[str, Any]):
    """A part of a notebook; its entries are attributes, too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def node(**entries: Any) -> Node:
    """Return a part as nbformat would read it: text that is a list of lines is whole."""
    for name, value in entries.items():
        if name in ("source", "text") or "/" in name:
            entries[name] = "".join(value) if isinstance(value, list) else value
    return Node(entries)


def code(source: str, *tags: str) -> Node:
    """A code cell that has not been run."""
    return node(
        cell_type="code",
        source=source,
        metadata=node(tags=list(tags)),
        outputs=[],
        execution_count=None,
    )


def notebook(*cells: str | Node) -> Node:
    made = [cell if isinstance(cell, Node) else code(cell) for cell in cells]
    for number, cell in enumerate(made):
        cell.id = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    return node(cells=made, metadata=node(kernelspec=kernel), nbformat=4, nbformat_minor=5)


def read(path: Path) -> Node:
    notebook: Node = json.loads(
        path.read_text("utf-8"), object_hook=lambda entries: node(**entries)
    )
    return notebook


def write(content: Node, path: Path) -> None:
    path.write_text(json.dumps(content), "utf-8")

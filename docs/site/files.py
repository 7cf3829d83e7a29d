"""Lists the files of the package, each with the first sentence of its docstring: ``make files``.

``python docs/site/files.py heap/holders`` lists the files of one folder; it needs only Python.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ipygpumem"
_WIDTH = 116
_INDENT = 30
"""Columns of a file's name, before its sentence."""


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring, on one line; empty without a docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    first_paragraph = docstring.partition("\n\n")[0]
    return " ".join(first_paragraph.split())


def lines_of(folder: Path) -> list[str]:
    """Return a line for a folder, and one for each of its files; then those of the folders in
    it.
    """
    lines = [f"{folder.relative_to(PACKAGE.parent)}/", ""]
    inner_folders = list[Path]()
    for path in sorted(folder.iterdir()):
        if (path / "__init__.py").exists():
            inner_folders.append(path)
        elif path.suffix == ".py":
            name = f"  {path.name} ".ljust(_INDENT)
            text = name + first_sentence(path)
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * _INDENT)
    for inner_folder in inner_folders:
        lines += ["", *lines_of(inner_folder)]
    return lines


def main(room: str = "") -> None:
    """Print the lines of a room, such as ``heap/holders``, or of the whole package."""
    folder = PACKAGE / room
    if not folder.is_dir():
        raise SystemExit(f"there is no folder ipygpumem/{room}")
    sys.stdout.write("\n".join(lines_of(folder)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

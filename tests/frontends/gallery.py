"""docs/reports.md as a notebook: its cells, and the pictures that stand below each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reports.md"

_PART = re.compile(
    r"^```python\n(?P<cell>.*?)^```$|^!\[.+?\]\(img/(?P<picture>[\w-]+)\.png\)", re.MULTILINE | re.DOTALL
)


@dataclass
class Shown:
    """A cell of the page and the names of its pictures; those that end in ``-dark`` are taken in the dark theme."""

    source: str
    pictures: list[str]


def shown(*, died: bool = False) -> list[Shown]:
    """Return the cells of the page, or those of its last section, where the kernel ``died``."""
    text = PAGE.read_text("utf-8").split("\n## When the kernel died\n")[died]
    found: list[Shown] = []
    for part in _PART.finditer(text):
        if part["cell"] is not None:
            found.append(Shown(part["cell"].rstrip("\n"), []))
        else:
            found[-1].pictures.append(part["picture"])
    return found

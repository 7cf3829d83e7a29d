"""Plain English: no summary in the package is a clause, things are not people. The counts may only
fall.
"""

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import ipygpumem
from tests.alone import ROOT
from tests.notebooks import read

PACKAGE = Path(ipygpumem.__file__).parent

CLAUSE = re.compile(
    r"(Return )?(what|those|that|who|whose|whether|whatever|of|by|so)\b", re.IGNORECASE
)
WORDS = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|whatever|meanwhile|anew|so long as|beside|lets? "
    r"go|others"
    r"|no more(?! than)|of (yours|ours|the user's)(?! [\w`]))\b",
    re.IGNORECASE,
)
MOST_CLAUSES: dict[str, int] = {}
MOST_WORDS = {"report": 1}


def test_no_room_gets_more_clauses_or_people() -> None:
    clauses = Counter[str]()
    words = Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and type(node.value.value) is str
            ):
                clauses[room] += bool(CLAUSE.match(inspect.cleandoc(node.value.value)))
        words[room] += len(WORDS.findall(source))
    assert {
        room: number for room, number in clauses.items() if number > MOST_CLAUSES.get(room, 0)
    } == {}
    assert {
        room: number for room, number in words.items() if number > MOST_WORDS.get(room, 0)
    } == {}


def prose(path: Path) -> str:
    """Return a page's text, or the text cells of a notebook."""
    if path.suffix == ".md":
        return path.read_text("utf-8")
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("pages", ["*.md", "docs/*.md", "examples/*.ipynb", "tests/*/README.md"])
def test_no_page_has_people_or_translated_particles(pages: str) -> None:
    texts = {path.name: prose(path) for path in ROOT.glob(pages)}
    assert texts
    assert [
        (name, match[0]) for name, text in texts.items() for match in WORDS.finditer(text)
    ] == []

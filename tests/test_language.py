"""Plain English in the package: no summary is a clause, things are not people. The counts may only fall."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import ipygpumem

ROOT = Path(ipygpumem.__file__).parent

CLAUSE = re.compile(r"(Return )?(what|those|that|who|whose|whether|whatever|of|by|so)\b", re.IGNORECASE)
WORDS = re.compile(r"\b(nobody|somebody|whatever|meanwhile|anew|lets go|beside|others)\b", re.IGNORECASE)
MOST_CLAUSES: dict[str, int] = {}
MOST_WORDS = {"report": 1}


def test_no_room_gets_more_clauses_or_people() -> None:
    clauses, words = Counter[str](), Counter[str]()
    for path in sorted(ROOT.rglob("*.py")):
        room, source = path.relative_to(ROOT).parts[0], path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str:
                clauses[room] += bool(CLAUSE.match(inspect.cleandoc(node.value.value)))
        words[room] += len(WORDS.findall(source))
    assert {room: number for room, number in clauses.items() if number > MOST_CLAUSES.get(room, 0)} == {}
    assert {room: number for room, number in words.items() if number > MOST_WORDS.get(room, 0)} == {}

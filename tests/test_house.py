"""The package as a house: no import circles, few imports inside functions, and a size for each room."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipygpumem

ROOT = Path(ipygpumem.__file__).parent
MOST_LATE_IMPORTS = 16
BUDGET = {
    "__init__": 84,
    "api": 922,
    "errors": 96,
    "estimating": 4193,
    "extras/__init__": 1,
    "extras/cluster": 728,
    "extras/expectations": 128,
    "extras/guard": 680,
    "extras/fit": 946,
    "extras/isolate": 836,
    "extras/lines": 667,
    "extras/moving": 634,
    "extras/panel": 357,
    "extras/peak": 1303,
    "extras/pictures": 355,
    "extras/recorder": 594,
    "extras/tracker": 200,
    "extras/trainers": 202,
    "fitting": 956,
    "heap": 4855,
    "introspect": 214,
    "inventory": 3215,
    "magics": 1385,
    "meter": 444,
    "probes": 2098,
    "reclaim": 791,
    "records": 583,
    "report": 2109,
    "scope": 761,
    "shell": 4022,
    "units": 143,
}
"""Maximum number of lines of each room. A number goes up only in a commit that says for which users."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES: dict[str, ast.Module] = {}
"""There while these tests run: a quarter of a million objects, which each look at the heap would pass over."""


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> Iterator[None]:
    TREES.update((name, ast.parse(source)) for name, source in SOURCES.items())
    yield
    TREES.clear()


def imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in SOURCES else node.module for name in names]
    else:
        names = []
    yield from (name for name in names if name in SOURCES)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def late_imports(module: str) -> set[int]:
    """Return the lines inside functions that import from the package."""
    tree = TREES[module]
    return {node.lineno for function in functions(tree) for node in ast.walk(function) if any(imported(node))}


def reaches(knows: dict[str, set[str]], start: str) -> set[str]:
    """Return all that ``start`` knows, directly or not."""
    seen, waiting = set[str](), [start]
    while waiting:
        new = knows[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_module_knows_what_knows_it_by_any_kind_of_import() -> None:
    knows = {name: {one for node in ast.walk(tree) for one in imported(node)} - {name} for name, tree in TREES.items()}
    knows["ipygpumem"] = set()  # loads by name what users ask for; nothing imports it but for its sub-packages
    circles = {name for name in knows if name in reaches(knows, name)}
    assert circles == set()


def test_few_functions_import_and_each_says_why() -> None:
    late = {(module, line) for module in TREES for line in late_imports(module)}
    assert len(late) <= MOST_LATE_IMPORTS
    bare = []
    for module, line in late:
        text = SOURCES[module].splitlines()
        is_first = "import" not in text[line - 2]  # one reason for several in a row
        if is_first and "#" not in text[line - 1]:
            bare.append(f"{module}:{line}")
    assert bare == []


def test_no_room_grows_beyond_its_budget() -> None:
    sizes: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        room = "/".join(parts[: 2 if parts[0] == "extras" else 1])
        sizes[room.removesuffix(".py")] += len(path.read_text().splitlines())
    assert {room: lines for room, lines in sizes.items() if lines > BUDGET.get(room, 0)} == {}

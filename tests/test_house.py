"""The structure of the repository: no import circles, and a reason for each import inside a
function; benchmarks import no tests.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipygpumem
from tests import hiding, rooms

ROOT = Path(ipygpumem.__file__).parent
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
IN_TESTS = re.compile(r"tests\.(\w+\.)*test_")
"""The name of a module of tests."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
TREES: dict[str, ast.Module] = {}
"""There while these tests run: a quarter of a million objects, which each look at the heap would
pass over.
"""


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> Iterator[None]:
    TREES.update((name, ast.parse(source)) for name, source in SOURCES.items())
    yield
    TREES.clear()


def modules_of(place: str) -> set[str]:
    """Return the modules of the package that a dotted name leads to: itself, or that of its last
    part.
    """
    return {name for name in (place, place.rpartition(".")[0]) if name in SOURCES}


def imported(node: ast.AST, importer: str = "") -> Iterator[str]:
    """Yield the modules of the package that an import statement of ``importer`` names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in SOURCES)
    elif isinstance(node, ast.ImportFrom):
        place = node.module or ""
        if node.level:
            levels = node.level - is_package(importer)
            folder = importer.rsplit(".", levels)[0]
            place = f"{folder}.{place}".rstrip(".")
        for alias in node.names:
            whole = f"{place}.{alias.name}"
            yield from (name for name in (whole, place) if name in SOURCES)


def is_package(name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in SOURCES)


def arguments_of_imports(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the names of modules that are passed to ``import_module`` and ``__import__``."""
    functions = {"import_module", "__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            functions.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in functions:
            named = [word.value for word in node.keywords if word.arg == "name"]
            yield from (node.args[:1] or named)


def named_in_texts(tree: ast.AST) -> set[str]:
    """Return the modules that texts name for an import.

    Such a text is an argument of a call, a key as in ``sys.modules["ipygpumem.report"]``, or names
    a module without the package, as in ``"report.why.why_report"``. Whole names elsewhere are
    compared with those of frames, unless the file imports names from a table.
    """
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    used = set[int]()
    for node in nodes:
        if isinstance(node, ast.Call):
            used.update(map(id, node.args))
            used.update(id(word.value) for word in node.keywords)
        elif isinstance(node, ast.Subscript):
            used.add(id(node.slice))
    has_table = any(isinstance(value, ast.Name) for value in arguments_of_imports(tree))
    modules = set[str]()
    for node in nodes:
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        text = node.value
        if not isinstance(text, str) or not re.fullmatch(r"\w+(\.\w+)+(:\w+)?", text):
            continue
        if text.startswith("ipygpumem.") and not has_table and id(node) not in used:
            continue
        place = text.removeprefix("ipygpumem.").replace(":", ".")
        modules |= modules_of(f"ipygpumem.{place}")
    return modules


def is_made_at_run_time(name: ast.expr, tree: ast.AST) -> bool:
    """Return True if the name of a module is put together: by itself, or in a variable."""
    if isinstance(name, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and any(getattr(target, "id", "") == name.id for target in node.targets)
        ]
        return not all(isinstance(value, ast.Constant | ast.Tuple | ast.Name) for value in assigned)
    return not isinstance(name, ast.Constant) or str(name.value).startswith(".")


def put_together(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that import a module whose name is put together at run time."""
    for name in arguments_of_imports(tree):
        if is_made_at_run_time(name, tree):
            yield name.lineno


def modules_known_to(name: str, tree: ast.AST) -> set[str]:
    """Return the other modules that a module imports, or names in a text for an import."""
    statements = {module for node in ast.walk(tree) for module in imported(node, name)}
    return (statements | named_in_texts(tree)) - {name}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def late_imports(module: str) -> set[int]:
    """Return the lines inside functions that import from the package."""
    tree = TREES[module]
    return {
        node.lineno
        for function in functions(tree)
        for node in ast.walk(function)
        if any(imported(node, module))
    }


def in_circles(knows: dict[str, set[str]]) -> set[str]:
    """Return the modules that know themselves, directly or not, or lie between two that do.

    A module that knows none of the rest is in no circle, and neither is one that none of the rest
    knows.
    """
    rest = set(knows)
    while rest:
        known = set[str]().union(*(knows[name] for name in rest))
        in_the_middle = {name for name in rest & known if not knows[name].isdisjoint(rest)}
        if in_the_middle == rest:
            break
        rest = in_the_middle
    return rest


@pytest.mark.parametrize(
    "code",
    [
        "import ipygpumem.report.html",
        "from ipygpumem.report import html",
        "from ipygpumem.report.html import with_text",
        "from ..report import html",
        "from ..report.html import with_text",
        "if TYPE_CHECKING:\n    from ipygpumem.report import html",
        "def show():\n    from ipygpumem.report import html",
        "import_module('ipygpumem.report.html')",
        "importlib.import_module(name='ipygpumem.report.html')",
        "__import__('ipygpumem.report.html')",
        "sys.modules['ipygpumem.report.html']",
        "pkgutil.resolve_name('ipygpumem.report.html:with_text')",
        "TABLE = {'html': 'report.html.with_text'}",
    ],
)
def test_each_kind_of_import_is_seen(code: str) -> None:
    known = modules_known_to("ipygpumem.heap.bulk", ast.parse(code))
    assert "ipygpumem.report.html" in known


@pytest.mark.parametrize(
    "code",
    [
        "import_module('ipygpumem.' + name)",
        "import_module(f'ipygpumem.{name}')",
        "import_module('.html', 'ipygpumem.report')",
        "place = f'ipygpumem.{name}'\nimport_module(place)",
        "from importlib import import_module as load\nload(PLACES[name])",
    ],
)
def test_an_import_of_a_name_made_at_run_time_is_seen(code: str) -> None:
    assert list(put_together(ast.parse(code))) != []


def test_no_modules_import_each_other_by_any_kind_of_import() -> None:
    knows = {name: modules_known_to(name, tree) for name, tree in TREES.items()}
    # It loads by name what users ask for; nothing imports it but for its sub-packages.
    knows["ipygpumem"] = set()
    assert in_circles(knows) == set()


def test_no_import_is_chosen_by_a_text_made_at_run_time() -> None:
    lines = [f"{name}:{line}" for name, tree in TREES.items() for line in put_together(tree)]
    # The package itself imports what users ask for; it lists the same for type checkers.
    assert [line for line in lines if not line.startswith("ipygpumem:")] == []


def is_truth_value(node: ast.expr) -> bool:
    """Return True for an expression that is True or False, such as ``bool(rows)`` or ``n == 1``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "isinstance", "any")
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare | ast.BoolOp)


def test_no_value_is_multiplied_by_a_truth_value() -> None:
    """An ``if`` statement says the same to a reader."""
    lines = list[str]()
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
            if is_product and any(map(is_truth_value, (node.left, node.right))):
                lines.append(f"{name}:{node.lineno}")
    assert lines == []


def test_no_private_function_shares_its_name_with_two() -> None:
    """Else a search for its name finds little else than functions that do something different."""
    modules_by_name: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
                modules_by_name.setdefault(node.name, []).append(module)
    repeated = {name: modules for name, modules in modules_by_name.items() if len(modules) > 2}
    assert {name for name in repeated if not name.startswith("__")} == set(), repeated


def names_called(tree: ast.AST) -> set[str]:
    """Return the names of the functions that a file calls."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in functions if isinstance(function, ast.Name)}


def test_tests_choose_users_modules_for_every_search() -> None:
    searches = {name for name, tree in TREES.items() if "users_modules" in names_called(tree)}
    assert searches == {search.__name__ for search in hiding.SEARCHES}


def test_each_import_inside_a_function_says_why() -> None:
    without_reason = []
    for module in TREES:
        lines = SOURCES[module].splitlines()
        for number in late_imports(module):
            import_line = lines[number - 1]
            line_above = lines[number - 2]
            follows_another = "import" in line_above  # one reason for several in a row
            if not follows_another and "#" not in import_line:
                without_reason.append(f"{module}:{number}")
    assert without_reason == []


def names_imported(path: Path) -> Iterator[str]:
    """Yield the dotted names that the import statements of a file name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_benchmark_imports_a_test() -> None:
    importers = [
        path.name
        for path in BENCHMARKS.rglob("*.py")
        if any(name.split(".")[0] == "tests" for name in names_imported(path))
    ]
    assert importers == []  # what both need is in benchmarks/harness


def test_no_module_of_tests_imports_another_one() -> None:
    importers = dict[str, list[str]]()
    for path in Path(rooms.__file__).parent.rglob("test_*.py"):
        names = [name for name in names_imported(path) if IN_TESTS.match(name)]
        if names:
            importers[path.name] = names
    assert importers == {}  # what several need has a file of its own in tests/


def test_a_commit_is_checked_by_the_commands_of_lint() -> None:
    """They build no site, so that a commit takes seconds."""
    hooks = (ROOT.parent / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT.parent / "Makefile").read_text()
    recipe = re.search(r"^lint: .*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    commands = re.findall(r"^\t\$\(BIN\)/(.+?)(?: \.)?$", recipe[1], re.MULTILINE)
    assert re.findall(r"entry: \.venv/bin/(.+)", hooks) == commands != []


def test_every_file_of_tests_belongs_to_a_room_or_to_the_whole() -> None:
    tests = Path(rooms.__file__).parent
    files = {str(path.relative_to(tests).with_suffix("")) for path in tests.rglob("test_*.py")}
    of_folders = {name for name in files if name.split("/")[0] in rooms.FOLDERS_OF_THE_WHOLE}
    named = {*rooms.ALWAYS, *rooms.OF_THE_WHOLE}
    for table in (rooms.ROOMS, rooms.LONGER):
        named.update(name for names in table.values() for name in names)
    assert files - of_folders - named == set()
    assert named - files == set()
    assert rooms.LONGER.keys() <= rooms.ROOMS.keys()

"""Plain English: no summary in the package is a clause, things are not people. The counts may only
fall.
"""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
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
CLAUSE_OR_ADVERB = re.compile(CLAUSE.pattern + r"|(Return )?(where|how|when)\b", re.IGNORECASE)
MOST_CLAUSES: dict[str, int] = {}
MOST_WORDS = {"report": 1}


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if type(node.value.value) is str:
            yield inspect.cleandoc(node.value.value)


def test_no_room_gets_more_clauses_or_people() -> None:
    clauses = Counter[str]()
    words = Counter[str]()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        source = path.read_text()
        for docstring in docstrings(source):
            clauses[room] += bool(CLAUSE.match(docstring))
        words[room] += len(WORDS.findall(source))
    assert {
        room: number for room, number in clauses.items() if number > MOST_CLAUSES.get(room, 0)
    } == {}
    assert {
        room: number for room, number in words.items() if number > MOST_WORDS.get(room, 0)
    } == {}


@pytest.mark.parametrize("folder", ["tests", "benchmarks"])
def test_docstrings_of_tests_begin_with_a_noun_or_a_verb(folder: str) -> None:
    clauses = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        texts = docstrings(path.read_text("utf-8"))
        clauses[str(path.relative_to(ROOT))] = [
            text for text in texts if CLAUSE_OR_ADVERB.match(text)
        ]
    assert {name: texts for name, texts in clauses.items() if texts} == {}


TESTS = ROOT / "tests"
LONGEST_TEST_NAME = 60
WORDS_OF_RIDDLES = re.compile(
    r"_(what|nobody|somebody|anybody|everybody|whoever|whatever|wherever|who|those|meanwhile"
    r"|anew|beside|others)(_|$)"
)


def names_of_tests() -> list[str]:
    """Return the names of all test functions, with those that only ``make gpu-sim`` runs."""
    names = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and node.name.startswith("test_"):
                names.append(node.name)
    return names


def test_a_tests_name_says_the_behaviour_in_few_words() -> None:
    names = names_of_tests()
    # Else most tests were not found.
    assert len(names) > 1_000
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []
    assert [name for name in names if WORDS_OF_RIDDLES.search(name)] == []


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


MOST_WORDS_BY_HAND = 20_000
"""Maximum number of words of all pages that are written by hand."""
WRITTEN_BY_PROGRAMS = {"python.md", "measured"}
"""Pages and folders of docs/ that programs write."""


def pages_by_hand() -> list[Path]:
    """Return the pages of docs/, without those that programs write."""
    docs = ROOT / "docs"
    pages = sorted(docs.rglob("*.md"))
    return [page for page in pages if page.relative_to(docs).parts[0] not in WRITTEN_BY_PROGRAMS]


def test_the_documentation_can_be_read_in_an_afternoon() -> None:
    words = {page.name: len(page.read_text("utf-8").split()) for page in pages_by_hand()}
    assert words["memory.md"] < 2_000  # guides; their details are on pages of reference
    assert words["will-it-fit.md"] < 2_000
    assert sum(words.values()) <= MOST_WORDS_BY_HAND, words


OLD_WORDS = {
    r"set aside for": "headroom for, or CUDA context",
    r"gaps that the allocator": "fragmentation",
    r"pools' cache": "cache of private pools",
    r"held by C\+\+": "autograd or C++ code",
    r"\bother rows?\b(?= ·)|and \d+ other rows?\b": "reclaimable items, unexamined storages",
    r"(?:device|cells?) (?:has |that )?moved (?:by|less|no)|moved (?:a|no) device": "changed",
    r"\(as a key\)|\(one of its keys\)": ".keys() after the dict's path",
    r"New View for Output": "Create New View for Cell Output, JupyterLab's menu entry",
    r"no device is named; write": "name a device, such as",
}
"""Phrases that were used in more than one meaning, and what says it now: the words of
docs/how-it-works.md.
"""


def texts_of_users() -> dict[str, str]:
    """Return all texts that users may read: the package, the pages, and the notebooks."""
    paths = [*PACKAGE.rglob("*.py"), *pages_by_hand(), ROOT / "README.md", ROOT / "docs/python.md"]
    paths += [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.ipynb")]
    texts = dict[str, str]()
    for path in paths:
        text = prose(path) if path.suffix == ".ipynb" else path.read_text("utf-8")
        texts[path.name] = " ".join(text.split())  # a phrase may be broken over two lines
    return texts


def test_a_word_of_a_report_has_one_meaning() -> None:
    faults = []
    for name, text in texts_of_users().items():
        for phrase, instead in OLD_WORDS.items():
            if re.search(phrase, text):
                faults.append(f"{name}: {phrase}: write {instead}")
    assert faults == []


WORDS_OF_REPORTS = (
    *("allocator cache", "cache of private pools", "fragmentation", "headroom", "CUDA context"),
    *("autograd or C++ code", ".keys()", "reclaimable item", "at least", "gap"),
)


def test_the_words_of_reports_are_explained() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text("utf-8")
    words = re.findall(r"^\| ([^|]+) \|", page.partition("## Words")[2], re.MULTILINE)
    assert set(WORDS_OF_REPORTS) <= set(words)

"""README.md and docs/: their examples run, their links lead somewhere, their tables
are complete.
"""

import fnmatch
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

import ipygpumem
from benchmarks.harness.kernel import Kernel, Reply
from ipygpumem.shell.commands.declarations import Command
from ipygpumem.shell.config import IPyGpuMem
from tests import rooms as rooms_of_tests
from tests.alone import ROOT
from tests.declared_commands import all_commands
from tests.first_change import blocks

_DOCS = [f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *_DOCS)

_CELL = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
_SESSION = re.compile(
    r"^<!-- session(?:: (\w+))? -->$(.*?)(?=^<!-- (?:end of )?session|\Z)", re.MULTILINE | re.DOTALL
)
_FIGURE = re.compile(r"[+-]?[\d.]+ (?:[KMGTP]iB|B|ms|µs|s)\b|\+0\b|\d+%")
_LINE = re.compile(r"^(?:cell )?(\d+) · (?:# · )?RAM #(?:, peak #, # now)?$", re.MULTILINE)
"""The line of a cell, which is short if no device changed by a MiB, as small cells do on some
machines.
"""
_CELL_LINE = re.compile(r"(?:cell )?\d+(?: ·|$)")
_SMALL_STEPS = re.compile(r", (?:garbage|free heap pages|smaller steps) \(RAM #\)")
_VARYING = re.compile("freed by:|garbage and caches")
"""Lines that depend on how much garbage there was, or on which steps freed enough to be listed."""
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_DOTTED = re.compile(r"\bipygpumem(?:\.[A-Za-z_]\w*)+")
_FILE = re.compile(
    r"(?<![\w./-])(?:benchmarks|docs|examples|ipygpumem|tests)/(?:[\w-]+/)*[\w-]+(?:\.\w+)?\b(?!\()"
)


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def without_figures(text: str) -> list[str]:
    """The lines of a report as words; which steps gave enough to be listed differs
    from run to run.
    """
    lines = (
        _SMALL_STEPS.sub("", _LINE.sub(r"\1", _FIGURE.sub("#", text))).replace("─", "").splitlines()
    )
    words = [" ".join(line.split()) for line in lines if line.strip() and not _VARYING.search(line)]
    # what a command imported, unless it was before
    return [line for line in words if not line.startswith("of it ")]


def check(reply: Reply, cell: str, shown: str) -> None:
    """Hold what a cell gave against the page: its last line's comment, and the reports below it."""
    last = cell.rstrip().splitlines()[-1]
    _, _, expected = last.partition("  # → ")
    _, _, error = last.partition("  # raises ")
    if error == "UsageError":  # a magic's error is one line on stderr
        assert reply.stderr == shown, cell
        return
    assert reply.error == (error or None), (cell, reply.message)
    assert not reply.stderr, cell
    if expected:
        assert reply.result == expected, cell
    if shown:
        expected_lines = without_figures(shown)
        given = without_figures("\n".join([reply.result or "", *reply.reports()]))
        if not any(_CELL_LINE.match(text) for text in expected_lines):  # the page leaves it out
            given = [text for text in given if not _CELL_LINE.match(text)]
        if cell.startswith("%gpumem"):  # only if it moved memory, a line follows its report
            expected_lines, given = (
                [text for text in lines if not text.isdigit()] for lines in (expected_lines, given)
            )
        assert given[-len(expected_lines) :] == expected_lines


_MARKS = {
    "linux": (pytest.mark.skipif(sys.platform != "linux", reason="of limits, fork and /dev/shm"),),
    "thorough": (pytest.mark.thorough,),
    "": (),
}


def sessions() -> Iterator[ParameterSet]:
    """Yield the cells of each session: README.md, and the part of a page from ``<!-- session -->``
    to the next mark.
    """
    yield pytest.param(read("README.md"), id="README.md")
    for page in _DOCS:
        for kind, text in _SESSION.findall(read(page)):
            heading = (_HEADING.search(text) or _HEADING.search(read(page)) or [""])[0]
            yield pytest.param(text, id=f"{page}: {heading.strip('# ')}", marks=_MARKS[kind])


@pytest.mark.parametrize("session", [*sessions()])
def test_examples_of_a_session_run_with_the_output_of_the_page(
    session: str, bare_kernel: Kernel
) -> None:
    cells = _CELL.findall(session)
    assert cells
    if "pip install memray" in session:  # the page's machine has none
        bare_kernel.value("__import__('sys').modules.update(memray=None)")
    for cell, shown in cells:
        check(bare_kernel.run(cell), cell, shown)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = _HEADING.findall(_CODE_BLOCK.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_to_its_heading(page: str) -> None:
    place = ROOT / page
    text = _CODE_BLOCK.sub("", read(page))
    assert [link for link in _LINK.findall(text) if not (place.parent / link).exists()] == []
    links = [
        (place.parent / target if target else place, anchor)
        for target, anchor in _ANCHOR.findall(text)
    ]
    assert [anchor for target, anchor in links if anchor not in anchors(target)] == []


def exists(name: str) -> bool:
    """Return True if a dotted name is a module's, or an attribute of a module."""
    names = name.split(".")
    # Its modules import libraries of trainers, and torch.
    if name.startswith("ipygpumem.extras.trainers."):
        source = ROOT.joinpath(*names[:4]).with_suffix(".py")
        return source.exists() and all(
            f"\nclass {part}" in source.read_text() for part in names[4:]
        )
    for length in range(len(names), 0, -1):
        if _finds(".".join(names[:length])):
            module = importlib.import_module(".".join(names[:length]))
            return (
                reduce(
                    lambda owner, part: owner and getattr(owner, part, None), names[length:], module
                )
                is not None
            )
    return False


def _finds(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what stands before the last dot is no package
        return False


@pytest.mark.parametrize("page", PAGES)
def test_modules_functions_and_files_that_a_page_names_are_there(page: str) -> None:
    text = read(page)
    assert sorted(name for name in set(_DOTTED.findall(text)) if not exists(name)) == []
    assert sorted(name for name in set(_FILE.findall(text)) if not (ROOT / name).exists()) == []


def test_the_index_of_the_documentation_has_every_page_in_order() -> None:
    pages = re.findall(r"^\| \[.+?\]\(([\w-]+\.md)\) \|", read("docs/README.md"), re.MULTILINE)
    assert {*pages, "README.md"} == {path.name for path in ROOT.glob("docs/*.md")}
    assert len(pages) <= 16
    assert re.findall(r"^  - (?:.+: )?([\w-]+\.md)$", read("mkdocs.yml"), re.MULTILINE) == [
        "README.md",
        *pages,
    ]


def test_the_front_page_has_no_links_that_break_on_pypi() -> None:
    assert "](" not in read(".github/description.md")


def tool(name: str) -> Any:
    """Return one of the modules in docs/site, which belong to no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/site/{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files_and_folders(folder: str) -> set[str]:
    """Return the names of a folder's modules and packages."""
    names = {path.name for path in (ROOT / folder).iterdir()}
    return names - {"__init__.py", "py.typed", "__pycache__"}


def matched(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Return the names that match one of several patterns, such as ``*_steps.py``."""
    return {name for pattern in patterns for name in fnmatch.filter(names, pattern)}


_FOLDERS_OF_ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for path in (ROOT / "ipygpumem").glob("*/*/__init__.py")
)


@pytest.mark.parametrize("folder", _FOLDERS_OF_ROOMS)
def test_a_folder_of_many_files_lists_them_with_their_purpose(folder: str) -> None:
    files = {name for name in files_and_folders(folder) if "." in name}
    listed = set(re.findall(r"(?<![\w/])([\w*]+\.(?:py|js|css))\b", read(f"{folder}/__init__.py")))
    if len(files) > 3 or listed:
        assert [name for name in listed if not fnmatch.filter(files, name)] == []
        assert files - matched(files, listed) == set()


def in_column(column: int, head: str) -> list[str]:
    """Return the files and folders in a column of the table of CONTRIBUTING.md with this head."""
    _, table = read("CONTRIBUTING.md").split(f"| {head} |\n| --- | --- |\n")
    names = list[str]()
    for row in table.partition("\n\n")[0].splitlines():
        names += re.findall(r"`([\w./]+?)/?`", row.split(" | ")[column])
    return names


@pytest.mark.parametrize(
    ("folder", "head"),
    [
        ("ipygpumem", "room of `ipygpumem/` | does"),
        ("ipygpumem/extras", "folder of `ipygpumem/extras/` | does"),
    ],
)
def test_the_rooms_and_optional_features_are_listed(folder: str, head: str) -> None:
    names = {path.name for path in (ROOT / folder).iterdir()}
    ignored = {"__init__.py", "__pycache__", "py.typed"}
    assert set(in_column(0, head)) - ignored == names - ignored


def test_the_places_where_changes_begin_exist() -> None:
    names = in_column(1, "a change of | begins in")
    places = [name for name in names if "/" in name or name.endswith(".py")]
    rooms = (ROOT / "ipygpumem", ROOT / "ipygpumem" / "heap")
    # Else the table has another form.
    assert len(places) > 20
    assert [name for name in places if not any((room / name).exists() for room in rooms)] == []


def test_every_file_is_described_in_a_sentence() -> None:
    files = tool("files")
    modules = list(files.PACKAGE.rglob("*.py"))
    assert [path for path in modules if len(files.first_sentence(path).split()) < 2] == []
    listed = "\n".join(files.lines_of(files.PACKAGE))
    assert [path.name for path in modules if path.name not in listed] == []


def test_every_room_of_the_package_has_tests_for_a_quick_run() -> None:
    folder = ROOT / "ipygpumem"
    rooms = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__", "py"}
    keys = set(rooms_of_tests.ROOMS)
    assert {key for key in keys if "/" not in key} == rooms
    assert [key for key in keys if "/" in key and not (folder / key).is_dir()] == []
    named = {name for key in keys for name in rooms_of_tests.files(key, has_longer=True)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def git_applies(change: str, *options: str) -> bool:
    """Return True if git could apply a change to the files here."""
    command = ["git", "apply", "--check", *options, "-"]
    return subprocess.run(command, cwd=ROOT, input=change, text=True).returncode == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the change")
def test_the_first_change_of_a_contributor_can_be_applied() -> None:
    (change,) = [text for kind, text in blocks(read("CONTRIBUTING.md")) if kind == "diff"]
    # The contributor has applied it when this test runs as one of their room.
    assert git_applies(change) or git_applies(change, "--reverse")


def test_every_option_is_listed_with_its_default() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \| `(.+?)` \| ", read("docs/configuration.md"), re.MULTILINE)
    )
    options = IPyGpuMem.class_traits(config=True)
    defaults = {
        name: repr(trait.default_value)
        for name, trait in options.items()
        if name in vars(IPyGpuMem)
    }
    assert rows == defaults


def sections() -> list[str]:
    """Return the text below each heading of the documentation."""
    return [
        part
        for page in ("README.md", *_DOCS)
        for part in re.split(r"^#+ ", read(page), flags=re.MULTILINE)
    ]


def pieces(section: str) -> list[str]:
    """Return the rows of tables, the paragraphs and the blocks of a section."""
    texts = []
    for part in section.split("\n\n"):
        lines = part.splitlines()
        is_table = all(line.startswith("|") for line in lines)
        texts += lines if is_table else [part]
    return texts


def undocumented(command: Command, texts: list[str]) -> list[str]:
    """Return the options of a command that no section about the command names: in a text that names
    the command, too, or in a row of their own.
    """
    words = command.name.replace("%%", "%").split()  # %experiment has the options of %%experiment

    def is_about_it(text: str) -> bool:
        return all(word in text.replace("%%", "%") for word in words)

    candidates = [piece for text in texts if is_about_it(text) for piece in pieces(text)]
    missing = []
    for option in command.options:
        name = re.compile(rf"(?<![\w-]){re.escape(option)}\b")
        if not any(
            name.search(piece) and (is_about_it(piece) or piece.startswith(f"| `{option}"))
            for piece in candidates
        ):
            missing.append(f"{command.name} {option}")
    return missing


def test_the_documentation_lists_each_option_of_each_command() -> None:
    texts = sections()
    missing = []
    for command in all_commands():
        missing += undocumented(command, texts)
    assert missing == []


def test_the_reference_of_the_api_is_made_of_its_docstrings() -> None:
    api = tool("api")
    assert read("docs/python.md").partition(api.MARK)[2] == api.reference(), "run docs/site/api.py"
    named = {name for names in api.FUNCTIONS.values() for name in names.split()}
    assert named == {name for name in ipygpumem.__all__ if not name.endswith("_ipython_extension")}


def test_the_front_page_is_short() -> None:
    page = read("README.md")
    assert len(page.split()) <= 750
    assert len(re.findall(r"(?<!!)\[[^]]*\]\(", page)) <= 15  # pictures are no links

"""The files of a release, and the commands of the GitHub workflow."""

import re
from pathlib import Path

import pytest

from tests.distribution import PLACEHOLDER, minimums, problems_of_metadata, problems_of_sdist

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "checks.yml"


def test_minimums_pin_the_oldest_version_of_each_requirement() -> None:
    requirements = [
        "ipython>=7.34",
        'nvidia-ml-py>=12.535.77; platform_system != "Darwin"',
        'memray>=1.8; sys_platform != "win32" and extra == "all"',
        'torch>=2.0; extra == "torch"',
    ]
    assert minimums(requirements) == ["ipython==7.34", "nvidia-ml-py==12.535.77", "memray==1.8"]
    with pytest.raises(ValueError, match="declares no minimum"):
        minimums(["tqdm"])


def test_a_source_distribution_has_no_metadata_of_a_build() -> None:
    names = [
        "a-1/README.md",
        "a-1/CHANGELOG.md",
        "a-1/RELEASING.md",
        "a-1/tests/smoke/test_cells.py",
    ]
    assert problems_of_sdist(names) == []
    assert problems_of_sdist([*names, "a-1/a.egg-info/SOURCES.txt"]) != []
    assert problems_of_sdist(names[1:]) == ["README.md is missing"]


def test_a_wheel_names_its_author_and_its_addresses() -> None:
    labels = ("Homepage", "Documentation", "Changelog", "Issues")
    urls = [f"{label}, https://example.org" for label in labels]
    assert problems_of_metadata({"Project-URL": urls, "Author": ["us"]}) == []
    assert len(problems_of_metadata({"Project-URL": urls[1:]})) == 2


def test_releasing_names_the_placeholder_of_each_address() -> None:
    urls = re.findall(r"^ +(\w+) = (https://.*)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert urls
    releasing = (ROOT / "RELEASING.md").read_text("utf-8")
    if any(PLACEHOLDER in url for _, url in urls):
        assert f"`{PLACEHOLDER}`" in releasing


def test_a_release_replaces_the_placeholder_in_each_file() -> None:
    address = f"github.com/{PLACEHOLDER}/"
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "setup.cfg"]
    pages += [ROOT / ".github" / "description.md", ROOT / "mkdocs.yml", ROOT / "CITATION.cff"]
    with_placeholder = {
        str(page.relative_to(ROOT)) for page in pages if address in page.read_text("utf-8")
    }
    releasing = (ROOT / "RELEASING.md").read_text("utf-8")
    (command,) = re.findall(r"^sed -i .*$", releasing, re.MULTILINE)
    assert with_placeholder - {"RELEASING.md"} == set(command.split()[3:])


def test_the_front_pages_say_where_to_clone_from() -> None:
    homepage = re.search(r"Homepage = (.*)", (ROOT / "setup.cfg").read_text("utf-8"))
    assert homepage is not None
    for page in ("README.md", "docs/README.md"):
        assert f"git clone {homepage[1]} " in (ROOT / page).read_text("utf-8")


def test_make_runs_each_command_of_the_workflow() -> None:
    recipes = (ROOT / "Makefile").read_text().replace("build/smoke/bin/python", "python")
    commands = re.findall(r"^ +- run: (.*)$", WORKFLOW.read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        # .ci/run is what runs make
        assert command == ".ci/run" or f"\t{command}\n" in recipes

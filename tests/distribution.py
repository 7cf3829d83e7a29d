"""Checks the files of a release, and lists the oldest version of each dependency that it allows.

Run by ``make dist`` as ``python -m tests.distribution check|minimums FOLDER``.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

PLACEHOLDER = "OWNER"
"""Stands in the project's addresses until the owner writes the name of the repository's account."""
_MINIMUM = re.compile(r"^([\w.-]+)(?:\[.*?\])?\s*>=\s*([\w.]+)")
_EXTRA = re.compile(r"""extra == ["'](\w+)["']""")


def metadata_of(wheel: Path) -> dict[str, list[str]]:
    """Return the fields of a wheel's metadata, each with all of its values."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    return {key: message.get_all(key, []) for key in message}


def minimums(requirements: Iterable[str], extra: str = "all") -> list[str]:
    """Return pins such as ``ipython==7.34`` of the requirements, and of those of an extra."""
    pins = []
    for requirement in requirements:
        of_extra = _EXTRA.search(requirement)
        if of_extra is not None and of_extra[1] != extra:
            continue
        match = _MINIMUM.match(requirement)
        if match is None:
            raise ValueError(f"{requirement} declares no minimum")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def problems_of_sdist(names: Iterable[str]) -> list[str]:
    """Return the mistakes in the files of a source distribution."""
    files = {name.partition("/")[2] for name in names}
    problems = [f"{name} is a build's own" for name in sorted(files) if ".egg-info" in name]
    missing = {"README.md", "CHANGELOG.md", "RELEASING.md", "tests/smoke/test_cells.py"} - files
    return problems + [f"{name} is missing" for name in sorted(missing)]


def problems_of_metadata(metadata: dict[str, list[str]]) -> list[str]:
    """Return the mistakes in the metadata of a wheel, apart from the placeholder."""
    labels = {url.partition(",")[0] for url in metadata.get("Project-URL", [])}
    needed = {"Homepage", "Documentation", "Changelog", "Issues"}
    problems = [f"the address {label} is missing" for label in sorted(needed - labels)]
    if not metadata.get("Author"):
        problems.append("the author is missing")
    return problems


def main(command: str, folder: str) -> int:
    """Return 0 if the files of a release are right."""
    (wheel,) = Path(folder).glob("*.whl")
    metadata = metadata_of(wheel)
    if command == "minimums":
        print("\n".join(minimums(metadata["Requires-Dist"])))
        return 0
    (sdist,) = Path(folder).glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        problems = problems_of_sdist(archive.getnames())
    problems += problems_of_metadata(metadata)
    for problem in problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    if any(PLACEHOLDER in url for url in metadata["Project-URL"]):
        print(f"not to be published: the addresses still contain {PLACEHOLDER} (RELEASING.md)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

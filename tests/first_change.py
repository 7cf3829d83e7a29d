"""Carries out "Your first change in ten minutes" of CONTRIBUTING.md in a fresh clone, as printed.

Run as ``python -m tests.first_change`` by ``make first-change``. It needs the package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SECTION = re.compile(r"^## Your first change in ten minutes\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```(bash|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the commands ("bash") and the changes ("diff") of the section, in their order."""
    section = _SECTION.search(page)
    assert section is not None
    return _BLOCK.findall(section[1])


def main() -> int:
    """Return 0 if all commands succeed in a clone of the last commit."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for kind, text in blocks((clone / "CONTRIBUTING.md").read_text("utf-8")):
            command = ["bash", "-euxc", text] if kind == "bash" else ["git", "apply", "-"]
            done = subprocess.run(command, cwd=clone, input=text, text=True, check=False)
            if done.returncode:
                print(f"this failed in a fresh clone:\n{text}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The virtual environment of each Python: the package from the checkout, torch, and what the scenarios need."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.matrix.run import PYTHONS, Python, find_pythons, run

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "torture"
_NEEDED = ("pandas", "ipyexperiments==0.1.29", "-e", f"{ROOT}[torch,notebook,plot]")


def chosen_pythons(versions: Sequence[str] | None) -> list[Python]:
    """Return the interpreters found here, or those of the named versions (``3.12``).

    Raises:
        SystemExit: a named version is not found here.
    """
    found = find_pythons([])
    if not versions:
        return found
    chosen = [python for python in found if _minor(python) in versions]
    missing = set(versions) - {_minor(python) for python in chosen}
    if missing:
        names = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        sys.exit(f"no Python {', '.join(sorted(missing))} found here (supported: {names})")
    return chosen


def interpreter_for(python: Python) -> Path:
    """Return the interpreter of the environment for ``python``, which is made unless it is there already.

    Raises:
        RuntimeError: pip could not install what is needed; the message is the end of what it wrote.
    """
    folder = BUILD / _minor(python)
    interpreter = folder / "venv" / "bin" / "python"
    constraints = os.environ.get("CONSTRAINTS") or str(ROOT / "constraints.txt")
    files = [ROOT / "setup.cfg", Path(constraints)]  # what the package itself needs, and in which versions
    wanted = "\n".join([python.name, *_NEEDED, *(file.read_text() for file in files)])
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return interpreter
    folder.mkdir(parents=True, exist_ok=True)
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints]
    for command in ([python.path, "-m", "venv", folder / "venv"], [*pip, *_NEEDED]):
        done = run(command)
        if done.returncode != 0:
            raise RuntimeError(done.stdout.strip()[-2000:])
    stamp.write_text(wanted)
    return interpreter


def _minor(python: Python) -> str:
    return "{}.{}".format(*python.version)

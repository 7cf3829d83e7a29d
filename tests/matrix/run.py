"""Runs tests/smoke on every supported IPython and Python found here, and writes docs/measured/compatibility.md.

    python tests/matrix/run.py [--corners] [--ipython VERSION] [PYTHON ...]

Each combination gets a virtual environment of its own under build/matrix/, with a wheel of the package, NumPy and
pytest in it; pip picks the ipykernel. PYTHON names interpreters; by default those of pyenv and the PATH are taken.
Needs nothing beyond the standard library. The exit code is 0 only if everything that ran has passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "measured" / "compatibility.md"
KNOWN = Path(__file__).with_name("known.md")

PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
IPYTHONS = {
    "7.34": ("ipython==7.34.*",),
    "8.12": ("ipython==8.12.*",),
    "last 8.x": ("ipython>=8,<9",),
    "last 9.x": ("ipython>=9",),
    # https://github.com/googlecolab/colabtools/blob/main/setup.py; its notebook 6.5.7 asks for jupyter_client < 8.
    "7.34 as in Colab": ("ipython==7.34.0", "ipykernel==6.17.1", "jupyter_client<8"),
}
"""What pip is asked for. None but Colab's needs a pin: today's ipykernel, traitlets and jedi still serve 7.34."""

COLAB_PYTHON = (3, 12)
TOOLS = ("ipykernel>=6", "numpy", "pytest", "pytest-timeout")
AT_ONCE = 2
_ASK = "import ensurepip, json, sys; print(json.dumps([list(sys.version_info[:3]), sys.executable]))"
_REFUSAL = re.compile(r"Package 'ipython' requires a different Python: [\d.]+ not in '([^']+)'")
_VERSIONS = """import importlib.metadata as m, json
print(json.dumps({name: m.version(name) for name in ("ipython", "ipykernel", "traitlets")}))"""


class Python(NamedTuple):
    """One interpreter."""

    version: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


@dataclass
class Outcome:
    """What one combination gave."""

    python: Python
    ipython: str
    versions: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    missing: str = ""
    """Why the combination does not exist."""
    broken: str = ""
    """Why the tests did not run or did not end."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return bool(self.missing) or (self.passed > 0 and not self.failed and not self.broken)


def run(command: Iterable[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result with all it has written."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.run([str(part) for part in command], text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def find_pythons(named: list[str]) -> list[Python]:
    """Return the newest interpreter of each supported version, oldest version first."""
    candidates = named or [
        sys.executable,
        *map(str, Path.home().glob(".pyenv/versions/*/bin/python")),
        *(shutil.which(f"python{major}.{minor}") or "" for major, minor in PYTHONS),
    ]
    asked = {candidate: _ask(candidate) for candidate in candidates if candidate}
    fit = sorted(python for python in asked.values() if python is not None and python.version[:2] in PYTHONS)
    if not fit or (named and len(fit) < len(asked)):
        sys.exit(f"no working Python 3.10 to 3.13 with ensurepip among {', '.join(asked)}: name one as an argument")
    return list({python.version[:2]: python for python in fit}.values())


def _ask(path: str) -> Python | None:
    try:
        answer = run([path, "-c", _ASK], stderr=subprocess.DEVNULL, timeout=60)
        version, executable = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):  # a pyenv shim without a version, an old Python
        return None
    return Python(tuple(version), executable)


def build_wheel(python: Python) -> Path:
    """Return a wheel of the working tree: what is tested is what would be installed."""
    folder = BUILD / "wheel"
    for old in (folder, ROOT / "build" / "lib"):  # setuptools would pack modules that are gone by now
        shutil.rmtree(old, ignore_errors=True)
    done = run([python.path, "-m", "venv", folder / "venv"])
    if done.returncode == 0:
        pip = [folder / "venv" / "bin" / "python", "-m", "pip"]
        done = run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        sys.exit(f"building the package failed:\n{done.stdout}")
    return wheels[0]


def try_one(python: Python, ipython: str, wheel: Path) -> Outcome:
    """Install one combination, run the tests in it and return what came out."""
    outcome = Outcome(python, ipython)
    started = time.monotonic()
    folder = BUILD / f"{python.version[0]}.{python.version[1]}-ipython-{ipython.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    if _install(outcome, folder, wheel):
        _test(outcome, folder)
    outcome.seconds = time.monotonic() - started
    print(_progress(outcome), flush=True)
    return outcome


def _install(outcome: Outcome, folder: Path, wheel: Path) -> bool:
    done = run([outcome.python.path, "-m", "venv", folder / "venv"])
    if done.returncode != 0:
        outcome.broken = f"no virtual environment: {_last_line(done.stdout)}"
        return False
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = run([*pip, *IPYTHONS[outcome.ipython], *TOOLS, wheel])
    (folder / "install.log").write_text(done.stdout)
    if done.returncode == 0:
        outcome.versions = json.loads(run([python, "-c", _VERSIONS]).stdout)
    elif refusal := _REFUSAL.search(done.stdout):
        outcome.missing = f"it needs Python {refusal[1]}"
    else:
        outcome.broken = f"pip: {_last_line(done.stdout)}"
    return done.returncode == 0


def _test(outcome: Outcome, folder: Path) -> None:
    # The tests start in a folder of their own, so that kernels import the installed wheel and not the checkout.
    results, place = folder / "results.xml", folder / "run"
    place.mkdir()
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"--junitxml={results}", "--timeout=120"]
    command = [folder.resolve() / "venv" / "bin" / "python", "-m", "pytest", *options, ROOT / "tests" / "smoke"]
    try:
        done = run(command, cwd=place, env=clean, timeout=900)
    except subprocess.TimeoutExpired:
        outcome.broken = "the tests did not end within 15 minutes"
        return
    (folder / "tests.log").write_text(done.stdout)
    if not results.exists():
        outcome.broken = f"pytest: {_last_line(done.stdout)}"
        return
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed.append(f"{(case.get('classname') or '').rpartition('.')[2]}::{case.get('name')}")
        elif case.find("skipped") is None:
            outcome.passed += 1


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].replace(str(ROOT), ".") if lines else "no output"


def _progress(outcome: Outcome) -> str:
    head = f"Python {outcome.python}, IPython {outcome.versions.get('ipython', outcome.ipython)}"
    if outcome.missing or outcome.broken:
        return f"{head}: {outcome.missing or 'BROKEN'}, {outcome.broken}"
    figures = f"{outcome.passed} passed, {len(outcome.failed)} failed, {outcome.seconds:.0f} s"
    return "\n    ".join([f"{head}, ipykernel {outcome.versions['ipykernel']}: {figures}", *outcome.failed])


def page(outcomes: list[Outcome], date: str) -> str:
    """Return docs/measured/compatibility.md."""
    lines = [
        "# Compatibility",
        "",
        "Written by `make matrix` (`tests/matrix/run.py`): `tests/smoke` in real kernels, with the package installed",
        "from a wheel, and the ipykernel and traitlets that pip picks for each IPython; IPython 7.34 with ipykernel",
        f"6.17 is what Google Colab has. {platform.system()} on {platform.machine()}.",
        "",
        "| Python | IPython | ipykernel | traitlets | result | passed | failed | date |",
        "| --- | --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    ran = [o for o in outcomes if not o.missing]
    for o in ran:
        versions = [
            o.versions.get("ipython", o.ipython),
            o.versions.get("ipykernel", ""),
            o.versions.get("traitlets", ""),
        ]
        result = ["passes" if o.good else "fails", o.passed, len(o.failed), date]
        lines.append(f"| {' | '.join(map(str, [o.python, *versions, *result]))} |")
    if len(ran) < len(outcomes):
        lines += ["", "Combinations that do not exist:", ""]
        lines += [f"- Python {o.python} with the {o.ipython} of IPython: {o.missing}." for o in outcomes if o.missing]
    wrong = [o for o in ran if not o.good]
    if wrong:
        lines += ["", "Failures:", ""]
    for o in wrong:
        title = f"Python {o.python} with IPython {o.versions.get('ipython', o.ipython)}"
        lines.append(f"- {title}: {o.broken or ', '.join(f'`{name}`' for name in o.failed)}")
    return "\n".join([*lines, "", KNOWN.read_text()])


def combinations(pythons: list[Python], ipythons: list[str]) -> list[tuple[Python, str]]:
    """Return each Python with each IPython; Colab's versions with Colab's Python only."""
    pairs = [(python, ipython) for python in pythons for ipython in ipythons]
    return [(p, ipython) for p, ipython in pairs if "Colab" not in ipython or p.version[:2] == COLAB_PYTHON]


def corners(pythons: list[Python]) -> list[tuple[Python, str]]:
    """Return the oldest Python with the oldest IPython, and the newest Python with the newest that it allows."""
    newest = pythons[-1]
    return [(pythons[0], "7.34"), (newest, "last 9.x" if newest.version >= (3, 11) else "last 8.x")]


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters to test with")
    parser.add_argument("--corners", action="store_true", help="only two combinations, and no page")
    parser.add_argument("--ipython", choices=IPYTHONS, action="append", help="only this IPython, and no page")
    options = parser.parse_args()
    pythons = find_pythons(options.pythons)
    print("Pythons:", ", ".join(str(python) for python in pythons), flush=True)
    wanted = corners(pythons) if options.corners else combinations(pythons, options.ipython or list(IPYTHONS))
    wheel = build_wheel(pythons[-1])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda pair: try_one(*pair, wheel), wanted))
    if not (options.corners or options.ipython or options.pythons):
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        PAGE.write_text(page(outcomes, today))
        print(f"written: {PAGE.relative_to(ROOT)}")
    enough = all if options.corners else any  # a corner that does not exist is none
    good = all(outcome.good for outcome in outcomes) and enough(outcome.passed for outcome in outcomes)
    print("all good" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Runs tests/smoke on every supported IPython and Python found here, and writes
docs/measured/compatibility.md.

    python benchmarks/compatibility.py [--corners]

Each combination gets a virtual environment of its own under build/matrix/, with a wheel of the
package, NumPy and pytest in it; pip picks the ipykernel. The interpreters are those of pyenv and
the PATH. Needs nothing beyond the standard library. The exit code is 0 only if everything that ran
has passed.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "measured" / "compatibility.md"
KNOWN = Path(__file__).with_name("compatibility_known.md")
HEAD = f"""# Compatibility

Written by `make matrix` (`benchmarks/compatibility.py`): `tests/smoke` in real kernels, with the package installed
from a wheel, and the ipykernel and traitlets that pip picks for each IPython; IPython 7.34 with ipykernel
6.17 is what Google Colab has. IPython 9 needs Python 3.11. {platform.system()} on {platform.machine()}.

| Python | IPython | ipykernel | traitlets | result | passed | failed | date |
| --- | --- | --- | --- | --- | ---: | ---: | --- |
"""  # noqa: E501

PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
IPYTHONS = {
    "7.34": ("ipython==7.34.*",),
    "8.12": ("ipython==8.12.*",),
    "last 8.x": ("ipython>=8,<9",),
    "last 9.x": ("ipython>=9",),
    # https://github.com/googlecolab/colabtools/blob/main/setup.py; its notebook 6.5.7 asks for
    # jupyter_client < 8.
    "7.34 as in Colab": ("ipython==7.34.0", "ipykernel==6.17.1", "jupyter_client<8"),
}
"""Requirements for pip. None but Colab's needs a pin: today's ipykernel, traitlets and jedi still
serve 7.34.
"""

COLAB_PYTHON = (3, 12)
TOOLS = ("ipykernel>=6", "numpy", "pytest", "pytest-timeout")
AT_ONCE = 2
_ASK = (
    "import ensurepip, json, sys; print(json.dumps([list(sys.version_info[:3]), sys.executable]))"
)
_VERSIONS = """import importlib.metadata as m, json
print(json.dumps({name: m.version(name) for name in ("ipython", "ipykernel", "traitlets")}))"""


class Python(NamedTuple):
    """An interpreter of this machine, such as ``(3, 12, 4)`` with the path of its executable."""

    version: tuple[int, ...]
    path: str

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


class Outcome(NamedTuple):
    """Result of one combination; ``broken`` says why the tests did not run or did not end."""

    python: Python
    ipython: str
    versions: dict[str, str]
    passed: int = 0
    failed: tuple[str, ...] = ()
    broken: str = ""

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.broken

    def __str__(self) -> str:
        ipython = self.versions.get("ipython", self.ipython)
        result = self.broken or f"{self.passed} passed"
        parts = [f"Python {self.python} with IPython {ipython}: {result}"]
        parts += [f"`{name}`" for name in self.failed]
        return " ".join(parts)


def run(command: Iterable[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result with all it has written."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.run([str(part) for part in command], text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def find_pythons() -> list[Python]:
    """Return the newest interpreter of each supported version, oldest version first."""
    candidates = [sys.executable, *map(str, Path.home().glob(".pyenv/versions/*/bin/python"))]
    candidates += [shutil.which(f"python{major}.{minor}") or "" for major, minor in PYTHONS]
    interpreters = {_ask(candidate) for candidate in candidates if candidate}
    supported = [python for python in interpreters if python and python.version[:2] in PYTHONS]
    # Of each minor version, the newest micro version comes last and replaces the older ones.
    newest = {python.version[:2]: python for python in sorted(supported)}
    return list(newest.values())


def _ask(path: str) -> Python | None:
    """Return an interpreter's version and executable; None if it does not start or has no pip."""
    try:
        answer = run([path, "-c", _ASK], stderr=subprocess.DEVNULL, timeout=60)
        version, executable = json.loads(answer.stdout)
    # A pyenv shim without a version, or an old Python.
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Python(tuple(version), executable)


def build_wheel(python: Python) -> Path:
    """Return a wheel of the working tree: what is tested is what would be installed."""
    folder = BUILD / "wheel"
    # setuptools would pack modules that are gone by now.
    for old in (folder, ROOT / "build" / "lib"):
        shutil.rmtree(old, ignore_errors=True)
    run([python.path, "-m", "venv", folder / "venv"])
    pip = [folder / "venv" / "bin" / "python", "-m", "pip"]
    done = run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT])
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        sys.exit(f"building the package failed:\n{done.stdout}")
    return wheels[0]


def try_one(python: Python, ipython: str, wheel: Path) -> Outcome:
    """Install one combination, run the tests in it and return their result."""
    folder = BUILD / f"{python.version[0]}.{python.version[1]}-ipython-{ipython.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    run([python.path, "-m", "venv", folder / "venv"])
    interpreter = folder.resolve() / "venv" / "bin" / "python"
    pip = [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = run([*pip, *IPYTHONS[ipython], *TOOLS, wheel])
    if installed.returncode != 0:
        return Outcome(python, ipython, {}, broken=f"pip: {_last_line(installed.stdout)}")
    versions = json.loads(run([interpreter, "-c", _VERSIONS]).stdout)
    try:
        output = _output_of_tests(interpreter, folder)
    except subprocess.TimeoutExpired:
        return Outcome(python, ipython, versions, broken="the tests did not end within 15 minutes")
    (folder / "tests.log").write_text(output)
    return _outcome(python, ipython, versions, output)


def _outcome(python: Python, ipython: str, versions: dict[str, str], output: str) -> Outcome:
    """Return the outcome that pytest's output states."""
    failed = re.findall(r"^(?:FAILED|ERROR) .*?(\w+::\S+)", output.replace(".py", ""), re.MULTILINE)
    last_line = _last_line(output)
    passed = re.search(r"(\d+) passed", last_line)
    if passed is None:
        broken = f"pytest: {last_line}"
        return Outcome(python, ipython, versions, failed=tuple(failed), broken=broken)
    return Outcome(python, ipython, versions, int(passed[1]), tuple(failed))


def _output_of_tests(interpreter: Path, folder: Path) -> str:
    """Return pytest's output for tests/smoke, run by an environment's interpreter."""
    # The tests start in a folder of their own, so that kernels import the installed wheel and not
    # the checkout.
    place = folder / "run"
    place.mkdir()
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME"):
        environment.pop(name, None)
    options = ["-q", "-rfE", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--timeout=120"]
    command = [interpreter, "-m", "pytest", *options, ROOT / "tests" / "smoke"]
    return run(command, cwd=place, env=environment, timeout=900).stdout


def _last_line(text: str) -> str:
    """Return the last line that is not blank, without this machine's folder."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return "no output"
    return lines[-1].replace(str(ROOT), ".")


def page(outcomes: list[Outcome]) -> str:
    """Return the page: a row for each combination, and the failed tests."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    lines = []
    for outcome in outcomes:
        versions = [
            outcome.versions.get(name, "") for name in ("ipython", "ipykernel", "traitlets")
        ]
        result = "passes" if outcome.good else "fails"
        cells = [outcome.python, *versions, result, outcome.passed, len(outcome.failed), date]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    failures = [f"- {outcome}" for outcome in outcomes if not outcome.good]
    if failures:
        lines += ["", "Failures:", "", *failures]
    lines += ["", KNOWN.read_text()]
    return HEAD + "\n".join(lines)


def combinations(pythons: list[Python], *, corners: bool) -> list[tuple[Python, str]]:
    """Return each Python with each IPython that it can have; for ``corners``, the first pair and
    the newest Python with the newest IPython.
    """
    pairs = []
    for python in pythons:
        pairs += [(python, ipython) for ipython in IPYTHONS if _can_have(python, ipython)]
    if not corners:
        return pairs
    newest = [pair for pair in pairs if "last" in pair[1]][-1]
    return [pairs[0], newest]


def _can_have(python: Python, ipython: str) -> bool:
    """Return True if an IPython supports a Python; Colab's is only for Colab's Python."""
    if "Colab" in ipython and python.version[:2] != COLAB_PYTHON:
        return False
    return "9" not in ipython or python.version >= (3, 11)


def main() -> int:
    """Test the combinations and write the page; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corners", action="store_true", help="only two combinations, and no page")
    options = parser.parse_args()
    pythons = find_pythons()
    print("Pythons:", ", ".join(str(python) for python in pythons), flush=True)
    wheel = build_wheel(pythons[-1])
    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = combinations(pythons, corners=options.corners)
        for outcome in pool.map(lambda pair: try_one(*pair, wheel), pairs):
            print(outcome, flush=True)
            outcomes.append(outcome)
    if not options.corners:
        PAGE.write_text(page(outcomes))
        print(f"written: {PAGE.relative_to(ROOT)}")
    good = all(outcome.good for outcome in outcomes)
    print("all good" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

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
        head = f"Python {self.python} with IPython {self.versions.get('ipython', self.ipython)}"
        return " ".join(
            [
                f"{head}: {self.broken or f'{self.passed} passed'}",
                *(f"`{name}`" for name in self.failed),
            ]
        )


def run(command: Iterable[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result with all it has written."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.run([str(part) for part in command], text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


def find_pythons() -> list[Python]:
    """Return the newest interpreter of each supported version, oldest version first."""
    candidates = [sys.executable, *map(str, Path.home().glob(".pyenv/versions/*/bin/python"))]
    candidates += [shutil.which(f"python{major}.{minor}") or "" for major, minor in PYTHONS]
    found = {_ask(candidate) for candidate in candidates if candidate}
    fit = sorted(python for python in found if python is not None and python.version[:2] in PYTHONS)
    return list({python.version[:2]: python for python in fit}.values())


def _ask(path: str) -> Python | None:
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
    """Install one combination, run the tests in it and return what came out."""
    folder = BUILD / f"{python.version[0]}.{python.version[1]}-ipython-{ipython.replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    run([python.path, "-m", "venv", folder / "venv"])
    own = folder.resolve() / "venv" / "bin" / "python"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = run([*pip, *IPYTHONS[ipython], *TOOLS, wheel])
    if installed.returncode != 0:
        return Outcome(python, ipython, {}, broken=f"pip: {_last_line(installed.stdout)}")
    versions = json.loads(run([own, "-c", _VERSIONS]).stdout)
    # The tests start in a folder of their own, so that kernels import the installed wheel and not
    # the checkout.
    place = folder / "run"
    place.mkdir()
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    options = ["-q", "-rfE", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--timeout=120"]
    try:
        done = run(
            [own, "-m", "pytest", *options, ROOT / "tests" / "smoke"],
            cwd=place,
            env=clean,
            timeout=900,
        )
    except subprocess.TimeoutExpired:
        return Outcome(python, ipython, versions, broken="the tests did not end within 15 minutes")
    (folder / "tests.log").write_text(done.stdout)
    passed = re.search(r"(\d+) passed", _last_line(done.stdout))
    failed = tuple(
        re.findall(r"^(?:FAILED|ERROR) .*?(\w+::\S+)", done.stdout.replace(".py", ""), re.MULTILINE)
    )
    broken = "" if passed else f"pytest: {_last_line(done.stdout)}"
    return Outcome(python, ipython, versions, int(passed[1]) if passed else 0, failed, broken)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].replace(str(ROOT), ".") if lines else "no output"


def page(outcomes: list[Outcome]) -> str:
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    lines = []
    for each in outcomes:
        versions = [each.versions.get(name, "") for name in ("ipython", "ipykernel", "traitlets")]
        result = ["passes" if each.good else "fails", each.passed, len(each.failed), date]
        lines.append(f"| {' | '.join(map(str, [each.python, *versions, *result]))} |")
    wrong = [f"- {each}" for each in outcomes if not each.good]
    return HEAD + "\n".join(
        [*lines, *(["", "Failures:", "", *wrong] if wrong else []), "", KNOWN.read_text()]
    )


def combinations(pythons: list[Python], *, corners: bool) -> list[tuple[Python, str]]:
    """Return each Python with each IPython that it can have, Colab's with Colab's Python; or the
    oldest and newest.
    """
    pairs = [(python, ipython) for python in pythons for ipython in IPYTHONS]
    pairs = [
        (p, ipython)
        for p, ipython in pairs
        if "Colab" not in ipython or p.version[:2] == COLAB_PYTHON
    ]
    pairs = [(p, ipython) for p, ipython in pairs if "9" not in ipython or p.version >= (3, 11)]
    return [pairs[0], [pair for pair in pairs if "last" in pair[1]][-1]] if corners else pairs


def main() -> int:
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

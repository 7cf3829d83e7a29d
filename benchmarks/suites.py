"""Runs the tests of other projects with and without the extension, and writes
docs/measured/suites.md.

    python benchmarks/suites.py [NAME ...]

Each suite gets a virtual environment under build/suites with the project and this package, and its
tests from the project's source distribution. A configuration file of that environment loads the
extension into every kernel that the tests start, in whatever folder they keep their settings. The
suite runs without the extension, with it, and with its reports off. Tests whose outcome differs run
once more, because tests of kernels fail now and then. Needs nothing beyond the standard library.

With names, only these suites run; the page keeps what the earlier ones gave.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "suites"
PAGE = ROOT / "docs" / "measured" / "suites.md"
RESULTS = Path(__file__).with_name("suites.json")
PLUGIN = Path(__file__).parent / "suite_plugin"
"""A folder with one module, because it is in the path of all that the tests start."""
SECONDS = 560
"""Maximum time of one run of a suite."""
AGAIN = 1
"""Further runs of tests whose outcome differs."""

WITHOUT = "without"
SILENT = "reports off"
CONFIGURATIONS = {
    WITHOUT: "",
    "with reports": 'c.InteractiveShellApp.extensions = ["ipygpumem"]\n',
    SILENT: ('c.InteractiveShellApp.extensions = ["ipygpumem"]\nc.IPyGpuMem.report = False\n'),
}
"""Texts of the environment's IPython configuration file."""
WITH_EXTENSION = [name for name in CONFIGURATIONS if name != WITHOUT]

HEAD = f"""# Other projects' tests

Written by `make suites` (`benchmarks/suites.py`): the tests of other projects, which start kernels or run cells in
their own process, without the extension, with it, and with its reports off. A test counts as different only if its
outcome differs in {AGAIN + 1} runs out of {AGAIN + 1}. With reports, tests differ that compare all outputs of a cell:
the line is one more. With reports off, none should differ; those that do are listed below the table. {platform.system()} on {platform.machine()}.

| project | version | Python | passed | failed | not run | different with reports | different with reports off | date |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- |
"""  # noqa: E501


@dataclass(frozen=True)
class Suite:
    """The tests of one project."""

    name: str
    requirement: str
    """Requirement for pip, such as ``ipykernel==6.29.5``."""
    tests: tuple[str, ...]
    """Files and folders below the unpacked source distribution."""
    needs: tuple[str, ...] = ()
    """Further packages of its tests."""
    options: tuple[str, ...] = ()
    """Further arguments of pytest."""
    is_in_process: bool = False
    """True if its tests run cells in their own process, in IPython's shell for tests."""

    @property
    def folder(self) -> Path:
        """The folder of its environment and of its sources."""
        return BUILD / self.name.replace(" ", "-")

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder / "venv" / "bin" / "python"


SUITES = (
    Suite("nbclient", "nbclient[test]", ("tests",)),
    Suite("ipykernel 6.29", "ipykernel[test]==6.29.5", ("tests",)),
    Suite("ipykernel 7", "ipykernel[test]>=7", ("tests",), needs=("pytest-asyncio", "flaky")),
    Suite(
        "nbconvert",
        "nbconvert[test]",
        ("tests/preprocessors/test_execute.py",),
        needs=("ipykernel", "ipywidgets"),
    ),
    Suite(
        "papermill",
        "papermill[test]",
        ("papermill/tests/test_execute.py", "papermill/tests/test_engines.py"),
        needs=("ipykernel", "ipywidgets"),
    ),
    Suite("ipywidgets", "ipywidgets", ("ipywidgets",), needs=("ipykernel", "jsonschema", "pytz")),
    Suite("ipyparallel", "ipyparallel[test]", ("ipyparallel/tests",)),
    Suite("IPython", "ipython[test]", ("tests",), needs=("pytest-asyncio",), is_in_process=True),
)


@dataclass
class Outcome:
    """Result of one suite."""

    version: str = ""
    python: str = ""
    date: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of tests by outcome, without the extension."""
    different: dict[str, dict[str, str]] = field(default_factory=dict)
    """Outcomes of tests that differ, by configuration, such as "passed, then failed"."""
    broken: str = ""
    """Why the suite did not run, or did not end."""


def run(*command: object, cwd: Path = ROOT, seconds: float = SECONDS, **variables: str) -> str:
    """Return the output of a command on stdout and stderr together."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.stdout


def install(suite: Suite) -> Path:
    """Create a suite's environment, and return the folder of its unpacked sources."""
    suite.folder.mkdir(parents=True, exist_ok=True)
    if not suite.python.exists():
        run(sys.executable, "-m", "venv", suite.folder / "venv")
    pip = (suite.python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    tests = ("pytest", "pytest-timeout")
    output = run(*pip, "install", ROOT, suite.requirement, *suite.needs, *tests)
    project = re.split(r"[\[=>]", suite.requirement)[0]
    version = version_of(suite, project)
    pattern = f"{project}-{version}/"
    unpacked = list(suite.folder.glob(pattern))
    if not unpacked:
        output += run(*pip, "install", "hatchling", "setuptools", "jupyter_packaging", "versioneer")
        output += download(suite, project, version)
        unpacked = list(suite.folder.glob(pattern))
    if not unpacked:
        raise RuntimeError(f"its sources cannot be had: {output[-300:]}")
    return unpacked[0]


def download(suite: Suite, project: str, version: str) -> str:
    """Unpack a project's source distribution into a suite's folder, and return pip's output."""
    pip = (suite.python, "-m", "pip", "--disable-pip-version-check", "--quiet")
    options = ("--no-deps", "--no-binary", project, "--no-build-isolation")
    source = f"{project}=={version}"
    output = run(*pip, "download", *options, "--dest", suite.folder, source)
    for archive in suite.folder.glob("*.tar.gz"):
        run("tar", "-xzf", archive, "-C", suite.folder)
    return output


def version_of(suite: Suite, project: str) -> str:
    """Return the version of a project in a suite's environment."""
    ask = f"import importlib.metadata as m; print(m.version({project!r}))"
    return run(suite.python, "-c", ask).strip().splitlines()[-1]


def configure(suite: Suite, configuration: str) -> None:
    """Let the kernels of a suite's environment load the extension, or not."""
    folder = suite.folder / "venv" / "etc" / "ipython"
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIGURATIONS[configuration]
    (folder / "ipython_config.py").write_text(f"c = get_config()\n{text}")


def outcomes(
    suite: Suite, sources: Path, configuration: str, tests: Sequence[str]
) -> dict[str, str]:
    """Run tests in one configuration; return each test's outcome by the test's name."""
    configure(suite, configuration)
    results = suite.folder / "outcomes.json"
    results.unlink(missing_ok=True)
    variables = {"SUITES_OUTCOMES": str(results)}
    if suite.is_in_process and configuration != WITHOUT:
        variables["SUITES_EXTENSION"] = configuration
    output = run_pytest(suite, sources, tests, variables)
    name = configuration.replace(" ", "-")
    if tests != suite.tests:
        name = f"{name}-again"
    (suite.folder / f"{name}.log").write_text(output)
    if not results.exists():
        raise RuntimeError(output[-300:])
    by_test: dict[str, str] = json.loads(results.read_text())
    return by_test


def run_pytest(suite: Suite, sources: Path, tests: Sequence[str], variables: dict[str, str]) -> str:
    """Return pytest's output for tests in a suite's environment; ``variables`` are the plugin's."""
    path = f"{suite.python.parent}{os.pathsep}{os.environ['PATH']}"
    plugins = ("-p", "suite_plugin", "-p", "no:ipygpumem", "-p", "no:cacheprovider")
    options = ("--timeout", "120", "-W", "default", *suite.options)
    command = (suite.python, "-m", "pytest", "-q", *plugins, *options, *tests)
    try:
        return run(*command, cwd=sources, PYTHONPATH=str(PLUGIN), PATH=path, **variables)
    except subprocess.TimeoutExpired:
        return f"it took longer than {SECONDS} s"


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return the tests whose outcome differs, with both outcomes."""
    different = dict[str, str]()
    for test in sorted({*before, *after}):
        outcome = before.get(test, "not run")
        other = after.get(test, "not run")
        if outcome != other:
            different[test] = f"{outcome}, then {other}"
    return different


def measured(suite: Suite) -> Outcome:
    """Run a suite in all configurations."""
    outcome = Outcome(python=platform.python_version(), date=str(datetime.date.today()))
    try:
        sources = install(suite)
        outcome.version = sources.name.rpartition("-")[2]
        before = outcomes(suite, sources, WITHOUT, suite.tests)
        for result in before.values():
            outcome.counts[result] = outcome.counts.get(result, 0) + 1
        for configuration in WITH_EXTENSION:
            after = outcomes(suite, sources, configuration, suite.tests)
            different = differences(before, after)
            for _ in range(AGAIN):
                if different:
                    tests = list(different)
                    without = outcomes(suite, sources, WITHOUT, tests)
                    with_extension = outcomes(suite, sources, configuration, tests)
                    different = differences(without, with_extension)
            outcome.different[configuration] = different
    except (RuntimeError, OSError) as error:
        text = str(error).replace(f"{BUILD}{os.sep}", "")  # no path of this machine
        outcome.broken = " ".join(text.split())[-200:]
    return outcome


def page(results: dict[str, dict[str, object]]) -> str:
    """Return the page with a row for each suite, and the tests that differ.

    Args:
        results: the fields of each suite's ``Outcome``, by the suite's name.
    """
    rows = []
    remarks = []
    for suite in SUITES:
        if suite.name not in results:
            continue
        outcome = Outcome(**results[suite.name])  # type: ignore[arg-type]
        cells = [suite.name, outcome.version, outcome.python, *numbers(outcome), outcome.date]
        rows.append(f"| {' | '.join(cells)} |")
        if outcome.broken:
            remarks.append(f"- {suite.name}: {outcome.broken}")
        for test, both_outcomes in outcome.different.get(SILENT, {}).items():
            remarks.append(f"- {suite.name}, {SILENT}: `{test}` {both_outcomes}")
    row_lines = "\n".join(rows)
    remark_lines = "\n".join(remarks)
    return f"{HEAD}{row_lines}\n\n{remark_lines}\n".rstrip() + "\n"


def numbers(outcome: Outcome) -> list[str]:
    """Return a suite's tests that passed, failed, did not run, and differ in each configuration."""
    if outcome.broken:
        return ["did not run", "", "", "", ""]
    passed = outcome.counts.get("passed", 0)
    failed = outcome.counts.get("failed", 0) + outcome.counts.get("error", 0)
    not_run = sum(outcome.counts.values()) - passed - failed
    different = [len(outcome.different[name]) for name in WITH_EXTENSION]
    return [str(count) for count in (passed, failed, not_run, *different)]


def main(names: Iterable[str]) -> int:
    """Run suites, and write the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = [suite for suite in SUITES if not names or suite.name in names]
    for suite in chosen:
        results[suite.name] = vars(measured(suite))
        print(suite.name, results[suite.name], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    sys.exit(main(parser.parse_args().names))

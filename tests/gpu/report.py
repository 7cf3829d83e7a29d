"""Writes docs/measured/gpu-verification.md: each statement of the GPU suite and its outcome.

run.sh gives it the results of one run. They are kept in tests/gpu/outcomes, a file for each kind of card, so that the
page always has the last run of both. Without ``--results`` the page is written from what is kept. It needs nothing
but the standard library, and shows no figure that no run has given.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
OUTCOMES = HERE / "outcomes"
KINDS = {"simulated": "simulated card", "hardware": "hardware"}
"""Each kind of card, and its column's title."""
NOT_YET = "not run yet"
_WORST_FIRST = ("failed", "passed", "skipped")
_LINES_SHOWN = 30


@dataclass
class Statement:
    """One test function: what it states, and the one kind of card that it can run on, if there is but one."""

    file: str
    test: str
    text: str
    only: str | None


@dataclass
class Section:
    """One test module."""

    title: str
    statements: list[Statement]


@dataclass
class Run:
    """One run of run.sh on one kind of card, as it is kept."""

    where: list[list[str]]
    suite_exit: int
    quickstart: str
    quickstart_printed: str
    results: list[dict[str, Any]] = field(default_factory=list)
    """Of each test: file, test, outcome, figures, reason."""

    def of(self, item: Statement) -> list[dict[str, Any]]:
        """Return the results of a statement, one for each of its parameters."""
        return [
            result
            for result in self.results
            if (result["file"], result["test"].partition("[")[0]) == (item.file, item.test)
        ]

    def outcome(self, item: Statement) -> str | None:
        """Return the worst outcome of a statement; None where it has no result."""
        found = {result["outcome"] for result in self.of(item)}
        return next((outcome for outcome in _WORST_FIRST if outcome in found), None)


# -- statements, from the source: the tests need not be importable here ---------------------------------------------


def sections() -> list[Section]:
    """Return all statements."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        everywhere = next((_only([node.value]) for node in module.body if _is_mark(node)), None)
        title = _one_line(ast.get_docstring(module) or path.stem).rstrip(".")
        found.append(Section(title, [_statement(path.name, test, everywhere) for test in tests]))
    return found


def _statement(file: str, test: ast.FunctionDef, everywhere: str | None) -> Statement:
    """Return what a test states: its docstring, or else its name as a sentence."""
    name = test.name.removeprefix("test_").replace("_", " ")
    text = _one_line(ast.get_docstring(test) or f"{name[0].upper()}{name[1:]}.")
    return Statement(file, test.name, text, _only(test.decorator_list) or everywhere)


def _is_mark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def _only(marks: list[ast.expr]) -> str | None:
    found = re.search(r"pytest\.mark\.(simulated|hardware)\b", " ".join(map(ast.unparse, marks)))
    return found[1] if found else None


# -- the page -------------------------------------------------------------------------------------------------------


def page(found: list[Section], runs: dict[str, Run]) -> str:
    """Return the page's text."""
    parts = ["# GPU verification", _INTRODUCTION, *(_headline(kind, found, runs.get(kind)) for kind in KINDS)]
    for section in found:
        rows = [(item.text, *(_cell_of(item, kind, runs.get(kind)) for kind in KINDS)) for item in section.statements]
        parts += [f"## {section.title}", _table(("statement", *KINDS.values()), rows)]
    parts.append("## The quickstart")
    parts += [_quickstart(kind, runs.get(kind)) for kind in KINDS]
    for kind, run in runs.items():
        parts += [f"## Where it ran: {KINDS[kind]}", _table(("what", "here"), [tuple(row) for row in run.where])]
        parts += _failures(found, kind, run)
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
What ipygpumem promises about GPUs, checked against torch's own counters and NVML: on simulated cards and on hardware.
The simulated card runs torch's CUDA build and its real caching allocator over stand-ins for NVIDIA's libraries: memory,
limits, errors and snapshots are torch's own, and kernels compute nothing
([how](../../tests/simulated_gpu/README.md)). No figure of it is one of a GPU.

This page is written by `tests/gpu/report.py`, which `tests/gpu/run.sh` calls; the statements are the tests'
docstrings, and no figure stands here that a run has not given. `make gpu-sim OUT=` writes the simulated card's
column. The other one comes from a machine with a GPU, which needs no network: `tests/gpu/fetch_wheels.sh WHEELS` where
there is a network, then `tests/gpu/run.sh WHEELS` there."""


def _headline(kind: str, found: list[Section], run: Run | None) -> str:
    if run is None:
        return f"**{KINDS[kind].capitalize()}: the suite has not run on it yet.**"
    counts = Counter(_short(run, item, kind) for section in found for item in section.statements)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    facts = dict(row for row in run.where if row[0] in ("torch", "date"))
    broken = " The run broke off before its end." if run.suite_exit not in (0, 1) else ""
    return f"**{KINDS[kind].capitalize()} (torch {facts['torch']}, {facts['date']}): {text}.**{broken}"


def _short(run: Run, item: Statement, kind: str) -> str:
    if item.only not in (None, kind):
        return f"for {_other(kind)} only"
    return run.outcome(item) or NOT_YET


def _other(kind: str) -> str:
    return next(title for other, title in KINDS.items() if other != kind)


def _cell_of(item: Statement, kind: str, run: Run | None) -> str:
    """Return what came of a statement on one kind of card, with its figures."""
    outcome = run.outcome(item) if run else None
    if outcome == "skipped" and run is not None:
        return "not run: " + "; ".join(dict.fromkeys(result["reason"] for result in run.of(item)))
    if item.only not in (None, kind):
        return f"for {_other(kind)} only"
    if run is None or (outcome is None and run.suite_exit in (0, 1)):
        return NOT_YET  # the statement is newer than the run
    if outcome is None:
        return f"no result: the suite ended with exit code {run.suite_exit}"
    text = f"**{outcome}**" if outcome == "failed" else outcome
    return ": ".join(filter(None, (text, "; ".join(_figures(run.of(item)))))) + _left_out(run.of(item))


def _left_out(results: list[dict[str, Any]]) -> str:
    """Return how many of a statement's parameters have no outcome, and why; nothing where each has one."""
    reasons = [result["reason"] for result in results if result["outcome"] == "skipped"]
    return f" ({len(reasons)} of {len(results)} not run: {'; '.join(dict.fromkeys(reasons))})" if reasons else ""


def _figures(results: list[dict[str, Any]]) -> Iterator[str]:
    for result in results:
        parameter = re.search(r"\[(.*)\]$", result["test"])
        yield from (f"{parameter[1]}: {figure}" if parameter else figure for figure in result["figures"])


def _quickstart(kind: str, run: Run | None) -> str:
    outcome = run.quickstart if run is not None else NOT_YET
    log = _block(_shortened(run.quickstart_printed)) if run is not None and run.quickstart_printed else ""
    title = KINDS[kind].capitalize()
    sentence = f"{title}: `examples/quickstart.ipynb` runs to its end in a real kernel, on the GPU: {outcome}."
    return sentence + (f" What it printed:\n\n{log}" if log else "")


def _failures(found: list[Section], kind: str, run: Run) -> list[str]:
    parts = []
    if run.suite_exit not in (0, 1):
        parts.append(f"The suite broke off (exit code {run.suite_exit}): what has no result above may have failed.")
    for item in (item for section in found for item in section.statements):
        for result in run.of(item):
            if result["outcome"] == "failed":
                parts.append(f"### {item.text}\n\n`{item.file}`, `{result['test']}`:")
                parts.append(_block(_shortened(result["reason"])))
    return parts or [f"What failed on the {KINDS[kind]}: nothing."]


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return _one_line(_without_paths(text)).replace("|", "\\|")


def _block(text: str) -> str:
    return f"```text\n{text.replace('```', '` ` `')}\n```"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shortened(text: str) -> str:
    """Return the end of ``text``, which says what went wrong, without colours and without this machine's folders."""
    lines = _without_paths(re.sub(r"\x1b\[[0-9;]*m", "", text)).rstrip().splitlines()
    return "\n".join(["..."] * (len(lines) > _LINES_SHOWN) + lines[-_LINES_SHOWN:])


def _without_paths(text: str) -> str:
    text = text.replace(str(ROOT) + os.sep, "")
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", ".../", text)


# -- one run ---------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> Run:
    results = []
    for line in _text(options.results).splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last one, of a run that was killed
            result = json.loads(line)
            results.append({**result, "reason": _shortened(result["reason"])})
    printed = _text(options.quickstart_log)
    quickstart = quickstart_outcome(options.quickstart_exit, printed)
    return Run(_surroundings(options.seconds), options.suite_exit, quickstart, _shortened(printed), results)


def quickstart_outcome(code: str, printed: str) -> str:
    """Return what came of the notebook, in a few words."""
    if not code.isdecimal():
        return f"not run: {code}"
    if code == "124":
        return "**failed**: stopped, since it took too long"
    if code != "0":
        return f"**failed** with exit code {code}"
    return "passed" if "cuda:0" in printed else "**failed**: it ran, but its reports show no cuda:0"


def _surroundings(seconds: int) -> list[list[str]]:
    packages = ("torch", "IPython", "ipykernel", "nvidia-ml-py", "psutil", "pytest")
    return [
        ["date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")],
        ["commit", _commit()],
        ["system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPU cores"],
        *_cards(),
        ["Python", platform.python_version()],
        *([name, _version(name)] for name in packages),
        ["time in all", f"{seconds} s"],
    ]


def _cards() -> list[list[str]]:
    """Return the cards, the driver and CUDA, each as far as it can be told."""
    rows = []
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = nvml.nvmlDeviceGetMemoryInfo(handle).total
            rows.append([f"GPU {index}", f"{nvml.nvmlDeviceGetName(handle)}, {total / 2**30:.2f} GiB"])
        rows.append(["driver", str(nvml.nvmlSystemGetDriverVersion())])
    except Exception as error:  # whatever is missing, the page says so
        rows.append(["GPU", f"none found ({type(error).__name__}: {error})"])
    with contextlib.suppress(ImportError):
        rows.append(["CUDA", f"{importlib.import_module('torch').version.cuda} (torch's)"])
    return rows


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT") or "unknown: no git where it ran"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _text(path: Path | None) -> str:
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""


# -- what is kept ----------------------------------------------------------------------------------------------------


def kept(folders: list[Path]) -> dict[str, Run]:
    """Return the last run on each kind of card; a later folder's counts."""
    found = {}
    for kind in KINDS:
        for path in (folder / f"{kind}.json" for folder in folders):
            if path.is_file():
                found[kind] = Run(**json.loads(path.read_text(encoding="utf-8")))
    return found


def _keep(run: Run, folder: Path) -> None:
    simulated = any("simulated" in value.lower() for what, value in run.where if what.startswith(("GPU", "driver")))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("simulated.json" if simulated else "hardware.json")
    path.write_text(json.dumps(asdict(run), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help="where to keep the run")
    parser.add_argument("--results", type=Path, help="a line of JSON per result, as conftest.py writes it")
    parser.add_argument("--suite-exit", type=int, default=0, help="pytest's exit code")
    parser.add_argument("--quickstart-exit", default="left out", help="run_demo.py's exit code, or why it was not run")
    parser.add_argument("--quickstart-log", type=Path, help="what run_demo.py printed")
    parser.add_argument("--seconds", type=int, default=0, help="how long all of it took")
    return parser.parse_args()


def main() -> int:
    """Write the page; return 1 if anything failed, broke off, or nothing could run."""
    options = _arguments()
    code = 0
    if options.results is not None:
        run = _run(options)
        if not any(result["outcome"] in ("passed", "failed") for result in run.results):
            print("report.py: this run could check nothing, for want of a GPU or of something to use it with")
            return 1
        _keep(run, options.outcomes)
        code = int(run.suite_exit != 0 or "failed" in run.quickstart)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(sections(), kept([OUTCOMES, options.outcomes])), encoding="utf-8")
    print(f"report.py: wrote {options.page.name}")
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Writes docs/gpu-verification.md: where the GPU suite ran, each of its statements with outcome and figure, failures.

``python tests/gpu/report.py PAGE`` writes the page as it is before any run: each statement "not run yet".
run.sh gives it the results. It needs nothing but the standard library, and shows no figure that no run has given.
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
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RAN = "<!-- from a run on a GPU -->"
NOT_YET = "not run yet"
_WORST_FIRST = ("failed", "passed", "skipped")
_LINES_SHOWN = 30


@dataclass
class Statement:
    """One test function: what it states, and what came of it."""

    file: str
    test: str
    text: str
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def outcome(self) -> str | None:
        """The worst outcome of all its parameters; None where it has not run."""
        found = {result["outcome"] for result in self.results}
        return next((outcome for outcome in _WORST_FIRST if outcome in found), None)


@dataclass
class Section:
    """One test module."""

    title: str
    statements: list[Statement]


@dataclass
class Run:
    """One run of run.sh."""

    results: list[dict[str, Any]]
    suite_exit: int
    quickstart_exit: str
    quickstart_printed: str
    seconds: int

    @property
    def on_gpu(self) -> bool:
        """Whether any test really ran."""
        return any(result["outcome"] in ("passed", "failed") for result in self.results)


def sections() -> list[Section]:
    """Return all statements, from the source: the tests need not be importable here."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        title = _one_line(ast.get_docstring(module) or path.stem).rstrip(".")
        found.append(Section(title, [Statement(path.name, test.name, _statement(test)) for test in tests]))
    return found


def _statement(test: ast.FunctionDef) -> str:
    """Return what a test states: its docstring, or else its name as a sentence."""
    name = test.name.removeprefix("test_").replace("_", " ")
    return _one_line(ast.get_docstring(test) or f"{name[0].upper()}{name[1:]}.")


def assign(results: list[dict[str, Any]], found: list[Section]) -> None:
    """Give each statement its results."""
    statements = {(item.file, item.test): item for section in found for item in section.statements}
    for result in results:
        statement = statements.get((result["file"], result["test"].partition("[")[0]))
        if statement is not None:
            statement.results.append(result)


def page(found: list[Section], run: Run | None) -> str:
    """Return the page's text."""
    ran = run is not None and run.on_gpu
    parts = [RAN] if ran else []
    parts += ["# GPU verification", _introduction(), _headline(found, run)]
    if run is not None:
        parts += ["## Where it ran", _table(("what", "here"), _surroundings(run))]
    for section in found:
        rows = [(item.text, _outcome(item, run), _figures(item)) for item in section.statements]
        parts += [f"## {section.title}", _table(("statement", "outcome", "figure"), rows)]
    parts += ["## The quickstart", _quickstart(run)]
    if ran:
        parts += ["## What failed", *_failures(found, run)]
    return "\n\n".join(parts) + "\n"


def _introduction() -> str:
    return (
        "What ipygpumem promises about GPUs, checked on a real one against torch's own counters and NVML.\n"
        "This page is written by `tests/gpu/report.py`, which `tests/gpu/run.sh` calls; the statements are the tests'\n"
        "docstrings, and no figure stands here that a run has not given. To run it on a machine with a GPU and no\n"
        "network: `tests/gpu/fetch_wheels.sh WHEELS` where there is a network, then `tests/gpu/run.sh WHEELS` there."
    )


def _headline(found: list[Section], run: Run | None) -> str:
    if run is None:
        return "**The suite has not run on a GPU yet.**"
    if not run.on_gpu:
        return "**The last run could check nothing: there was no GPU, or nothing to use it with.**"
    counts = Counter(item.outcome or "without a result" for section in found for item in section.statements)
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    broken = " The run broke off before its end." if run.suite_exit not in (0, 1) else ""
    return f"**Of {sum(counts.values())} statements: {text}.**{broken}"


def _outcome(item: Statement, run: Run | None) -> str:
    if run is None:
        return NOT_YET
    if item.outcome is None:
        return f"no result: the suite ended with exit code {run.suite_exit}"
    if item.outcome == "skipped":
        return "not run: " + "; ".join(dict.fromkeys(result["reason"] for result in item.results))
    return f"**{item.outcome}**" if item.outcome == "failed" else item.outcome


def _figures(item: Statement) -> str:
    texts = []
    for result in item.results:
        parameter = re.search(r"\[(.*)\]$", result["test"])
        label = f"{parameter[1]}: " if parameter else ""
        texts += [label + figure for figure in result["figures"]]
    return "; ".join(texts)


def _quickstart(run: Run | None) -> str:
    statement = "`examples/quickstart.ipynb` runs to its end in a real kernel, on the GPU"
    if run is None:
        return f"{statement}: {NOT_YET}."
    log = _shortened(run.quickstart_printed)
    return f"{statement}: {quickstart_outcome(run)}." + (f" What it printed:\n\n{_block(log)}" if log else "")


def quickstart_outcome(run: Run) -> str:
    """Return what came of the notebook, in a few words."""
    code = run.quickstart_exit
    if not code.isdecimal():
        return f"not run: {code}"
    if code == "124":
        return "**failed**: stopped, since it took too long"
    if code != "0":
        return f"**failed** with exit code {code}"
    if not run.on_gpu:
        return "not run with a GPU (without one it passed)"
    return "passed" if "cuda:0" in run.quickstart_printed else "**failed**: it ran, but its reports show no cuda:0"


def _failures(found: list[Section], run: Run) -> list[str]:
    parts = []
    if run.suite_exit not in (0, 1):
        parts.append(f"The suite broke off (exit code {run.suite_exit}): what has no result above may have failed.")
    for section in found:
        for item in section.statements:
            for result in item.results:
                if result["outcome"] == "failed":
                    parts.append(f"### {item.text}\n\n`{item.file}`, `{result['test']}`:")
                    parts.append(_block(_shortened(result["reason"])))
    return parts or ["Nothing."]


def _surroundings(run: Run) -> list[tuple[str, str]]:
    return [
        ("date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
        ("commit", _commit()),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPU cores"),
        *_hardware(),
        ("Python", platform.python_version()),
        *((name, _version(name)) for name in ("torch", "IPython", "ipykernel", "nvidia-ml-py", "psutil", "pytest")),
        ("time in all", f"{run.seconds} s"),
    ]


def _hardware() -> list[tuple[str, str]]:
    """Return device, driver and CUDA, each as far as it can be told."""
    rows = []
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = nvml.nvmlDeviceGetMemoryInfo(handle).total
            rows.append((f"GPU {index}", f"{nvml.nvmlDeviceGetName(handle)}, {total / 2**30:.2f} GiB"))
        rows.append(("driver", str(nvml.nvmlSystemGetDriverVersion())))
    except Exception as error:  # whatever is missing, the page says so
        rows.append(("GPU", f"none found ({type(error).__name__}: {error})"))
    with contextlib.suppress(ImportError):
        rows.append(("CUDA", f"{importlib.import_module('torch').version.cuda} (torch's)"))
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--results", type=Path, help="a line of JSON per result, as conftest.py writes it")
    parser.add_argument("--suite-exit", type=int, default=0, help="pytest's exit code")
    parser.add_argument("--quickstart-exit", default="left out", help="run_demo.py's exit code, or why it was not run")
    parser.add_argument("--quickstart-log", type=Path, help="what run_demo.py printed")
    parser.add_argument("--seconds", type=int, default=0, help="how long all of it took")
    return parser.parse_args()


def main() -> int:
    """Write the page; return 1 if anything failed or broke off."""
    options = _arguments()
    run = None if options.results is None else _run(options)
    found = sections()
    assign(run.results if run else [], found)
    _write(options.page, page(found, run))
    return int(run is not None and (run.suite_exit != 0 or "failed" in quickstart_outcome(run)))


def _run(options: argparse.Namespace) -> Run:
    results = []
    for line in _text(options.results).splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last one, of a run that was killed
            results.append(json.loads(line))
    printed = _text(options.quickstart_log)
    return Run(results, options.suite_exit, options.quickstart_exit, printed, options.seconds)


def _text(path: Path | None) -> str:
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""


def _write(path: Path, text: str) -> None:
    if RAN not in text and path.is_file() and RAN in path.read_text(encoding="utf-8"):
        print(f"report.py: {path.name} holds the results of a real run, and this one had no GPU: left as it is")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"report.py: wrote {path.name}")


if __name__ == "__main__":
    sys.exit(main())

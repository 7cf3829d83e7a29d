"""Writes docs/measured/gpu-verification.md: each statement of the GPU suite and its outcome.

run.sh passes the results of one run. They are kept in tests/gpu/outcomes, one file for each kind of
card, so that the page always has the last run on both. It needs only the standard library, and
shows no figure that no run has given.
"""

import argparse
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTCOMES = ROOT / "tests" / "gpu" / "outcomes"
KINDS = {"simulated": "simulated card", "hardware": "hardware"}
"""Each kind of card, and its column's title."""
_LINES_SHOWN = 30
"""Maximum number of lines shown of a failed test's reason."""
_Results = list[dict[str, Any]]
_Statements = dict[str, dict[str, _Results]]
"""A statement's results on each kind of card, by the statement and the kind."""

_INTRODUCTION = """\
# GPU verification

What ipygpumem promises about GPUs, checked against torch's own counters and NVML: on simulated cards and on hardware.
The simulated card runs torch's CUDA build and its real caching allocator over stand-ins for NVIDIA's libraries: memory,
limits, errors and snapshots are torch's own, and kernels compute nothing
([how](../../tests/simulated_gpu/README.md)). No figure of it is one of a GPU.

`tests/gpu/run.sh` writes this page; the statements are the tests' docstrings. `make gpu-sim OUT=` writes the simulated
card's column. The other one comes from a machine with a GPU, which needs no network: `tests/gpu/fetch_wheels.sh WHEELS`
where there is a network, then `tests/gpu/run.sh WHEELS` there."""  # noqa: E501


def page(runs: dict[str, dict[str, Any]]) -> str:
    """Return the page's text: each statement of the runs, and its outcome in each run."""
    statements_by_title = _statements_by_title(runs)
    parts = [_INTRODUCTION]
    parts += [_summary(kind, runs, statements_by_title) for kind in KINDS]
    for title, statements in sorted(statements_by_title.items()):
        parts.append(f"## {title}")
        parts.append(_outcome_table(statements))
    for kind, run in runs.items():
        parts += _run_parts(kind, run)
    return "\n\n".join(parts) + "\n"


def _statements_by_title(runs: dict[str, dict[str, Any]]) -> dict[str, _Statements]:
    """Return all runs' results, by title, statement and kind of card."""
    statements_by_title: dict[str, _Statements] = {}
    for kind, run in runs.items():
        for result in run["results"]:
            statements = statements_by_title.setdefault(result["title"], {})
            no_results: dict[str, _Results] = {name: [] for name in KINDS}
            results_by_kind = statements.setdefault(result["statement"], no_results)
            results_by_kind[kind].append(result)
    return statements_by_title


def _summary(
    kind: str, runs: dict[str, dict[str, Any]], statements_by_title: dict[str, _Statements]
) -> str:
    """Return the line that says how many statements have each outcome on one kind of card."""
    head = KINDS[kind].capitalize()
    if kind in runs:
        where = dict(runs[kind]["where"])
        head = f"{head} (torch {where['torch']}, {where['date']})"
    counts = Counter[str]()
    for statements in statements_by_title.values():
        for results_by_kind in statements.values():
            name, _ = outcome(results_by_kind[kind])
            counts[name] += 1
    listed = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"**{head}: {listed}.**"


def _outcome_table(statements: _Statements) -> str:
    """Return a table with a row for each statement and a column for each kind of card."""
    rows = []
    for statement, results_by_kind in statements.items():
        row = [statement]
        for results in results_by_kind.values():
            name, remarks = outcome(results)
            if remarks:
                name = f"{name}: {remarks}"
            row.append(name)
        rows.append(row)
    return _table(("statement", *KINDS.values()), rows)


def _run_parts(kind: str, run: dict[str, Any]) -> list[str]:
    """Return the paragraphs on one run: its machine, the notebook's outcome, and the failures."""
    parts = [
        f"## Where it ran: {KINDS[kind]}",
        _table(("what", "here"), run["where"]),
        f"`examples/quickstart.ipynb` in a real kernel: {run['quickstart']}.",
    ]
    failed = [result for result in run["results"] if result["outcome"] == "failed"]
    parts += [f"`{result['test']}`:\n\n```text\n{result['reason']}\n```" for result in failed]
    return parts


def outcome(results: _Results) -> tuple[str, str]:
    """Return the worst outcome of a statement's parameters on one kind of card, and its figures or
    reasons.
    """
    if not results:
        return "not run yet", ""
    skipped = [result["reason"] for result in results if result["outcome"] == "skipped"]
    reasons = "; ".join(dict.fromkeys(skipped))
    if len(skipped) == len(results):
        return "not run", reasons
    figures = []
    for result in results:
        figures += result["figures"]
    if skipped:
        figures.append(f"{len(skipped)} of {len(results)} not run: {reasons}")
    remarks = "; ".join(figures)
    if any(result["outcome"] == "failed" for result in results):
        return "failed", remarks
    return "passed", remarks


def _table(columns: tuple[str, ...], rows: list[Any]) -> str:
    """Return a Markdown table, each cell cleaned and on one line."""
    lines = []
    for row in [columns, ["---"] * len(columns), *rows]:
        cells = [_cell(text) for text in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a cell's text on one line, with its bars escaped."""
    words = _clean(text).split()
    return " ".join(words).replace("|", "\\|")


def _clean(text: str) -> str:
    """Return ``text`` without colours and without this machine's folders."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(ROOT) + os.sep, "")
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", ".../", text)


def _surroundings(seconds: int) -> list[list[str]]:
    """Return the machine of a run of ``seconds``: names and values, such as date and driver."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    versions = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    rows = [
        ["date", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")],
        ["commit", _commit()],
        ["system", f"{system}, {os.cpu_count()} CPU cores"],
        *_gpu_rows(),
        ["Python", platform.python_version()],
    ]
    packages = ("torch", "ipython", "ipykernel", "nvidia-ml-py", "psutil", "pytest")
    rows += [[name, versions.get(name, "not installed")] for name in packages]
    rows.append(["total time", f"{seconds} s"])
    return rows


def _gpu_rows() -> list[list[str]]:
    """Return each GPU's name and memory, and the driver's version; at an error, its text."""
    rows = []
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = nvml.nvmlDeviceGetMemoryInfo(handle).total
            name = nvml.nvmlDeviceGetName(handle)
            rows.append([f"GPU {index}", f"{name}, {total / 2**30:.2f} GiB"])
        rows.append(["driver", str(nvml.nvmlSystemGetDriverVersion())])
    except Exception as error:  # the page says what is missing
        rows.append(["GPU", f"none found ({type(error).__name__}: {error})"])
    return rows


def _commit() -> str:
    """Return the checkout's commit, or the one that the environment names."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty= with changes"]
    try:
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT") or "unknown: no git where it ran"


def _results(path: Path) -> _Results:
    """Return the results in a file of JSON lines, with the last lines of each reason."""
    results: _Results = []
    if not path.is_file():
        return results
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            result = json.loads(line)
            reason = _clean(result["reason"]).replace("```", "` ` `")
            last_lines = reason.rstrip().splitlines()[-_LINES_SHOWN:]
            results.append({**result, "reason": "\n".join(last_lines)})
    return results


def _quickstart_outcome(exit_code: str, log: Path) -> str:
    """Return the outcome of the example notebook.

    Args:
        exit_code: run_demo.py's exit code, or why it was not run.
        log: the notebook's printed reports, which must name the GPU.
    """
    if not exit_code.isdecimal():
        return f"not run: {exit_code}"
    if exit_code != "0":
        return f"**failed**, exit code {exit_code}"
    if not log.exists() or "cuda:0" not in log.read_text(encoding="utf-8"):
        return "**failed**: it ran, but its reports show no cuda:0"
    return "passed"


def _is_simulated(where: list[list[str]]) -> bool:
    """Return True if a GPU or the driver says that it is simulated."""
    for name, value in where:
        if name.startswith(("GPU", "driver")) and "simulated" in value.lower():
            return True
    return False


def _kept_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last run on each kind of card: this checkout's, or the one in ``folder``."""
    runs = {}
    for kind in KINDS:
        # The second one has this run's counts.
        for path in (OUTCOMES / f"{kind}.json", folder / f"{kind}.json"):
            if path.is_file():
                runs[kind] = json.loads(path.read_text(encoding="utf-8"))
    return runs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--outcomes", type=Path, default=OUTCOMES, help="where to keep the run")
    parser.add_argument(
        "--results",
        type=Path,
        required=True,
        help="a line of JSON per result, as conftest.py has it",
    )
    parser.add_argument("--suite-exit", type=int, default=0, help="pytest's exit code")
    parser.add_argument(
        "--quickstart-exit",
        default="left out",
        help="run_demo.py's exit code, or why it was not run",
    )
    parser.add_argument(
        "--quickstart-log", type=Path, default=Path(os.devnull), help="what run_demo.py printed"
    )
    parser.add_argument("--seconds", type=int, default=0, help="how long all of it took")
    return parser.parse_args()


def main() -> int:
    """Write the page; return 1 if anything failed, broke off, or nothing could run."""
    options = _options()
    results = _results(options.results)
    if all(result["outcome"] == "skipped" for result in results):
        print(
            "gpu_report.py: this run could check nothing, for want of a GPU or of something to use "
            "it with"
        )
        return 1
    quickstart = _quickstart_outcome(options.quickstart_exit, options.quickstart_log)
    run = {"where": _surroundings(options.seconds), "quickstart": quickstart, "results": results}
    kind = "simulated" if _is_simulated(run["where"]) else "hardware"
    options.outcomes.mkdir(parents=True, exist_ok=True)
    run_text = json.dumps(run, indent=1, ensure_ascii=False)
    (options.outcomes / f"{kind}.json").write_text(f"{run_text}\n", encoding="utf-8")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(_kept_runs(options.outcomes)), encoding="utf-8")
    print(f"gpu_report.py: wrote {options.page.name}")
    return int(options.suite_exit != 0 or "failed" in quickstart)


if __name__ == "__main__":
    sys.exit(main())

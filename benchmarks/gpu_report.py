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
    """Return the page's text: what each run has stated, and its outcome in each."""
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}  # by title, statement and kind of card
    for kind, run in runs.items():
        for result in run["results"]:
            statements = found.setdefault(result["title"], {})
            statements.setdefault(result["statement"], {name: [] for name in KINDS})[kind].append(
                result
            )
    parts = [_INTRODUCTION]
    for kind, title in KINDS.items():
        counts = Counter(
            outcome(by_kind[kind])[0] for rows in found.values() for by_kind in rows.values()
        )
        where = dict(runs[kind]["where"]) if kind in runs else {}
        head = (
            f"{title.capitalize()} (torch {where['torch']}, {where['date']})"
            if where
            else title.capitalize()
        )
        parts.append(
            f"**{head}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}.**"
        )
    for title, rows in sorted(found.items()):
        told = [
            (text, *(": ".join(filter(None, outcome(r))) for r in kinds.values()))
            for text, kinds in rows.items()
        ]
        parts += [f"## {title}", _table(("statement", *KINDS.values()), told)]
    for kind, run in runs.items():
        parts += [f"## Where it ran: {KINDS[kind]}", _table(("what", "here"), run["where"])]
        parts.append(f"`examples/quickstart.ipynb` in a real kernel: {run['quickstart']}.")
        for result in run["results"]:
            if result["outcome"] == "failed":
                parts.append(f"`{result['test']}`:\n\n```text\n{result['reason']}\n```")
    return "\n\n".join(parts) + "\n"


def outcome(results: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the worst outcome of a statement's parameters on one kind of card, and its figures or
    reasons.
    """
    if not results:
        return "not run yet", ""
    skipped = [result["reason"] for result in results if result["outcome"] == "skipped"]
    reasons = "; ".join(dict.fromkeys(skipped))
    if len(skipped) == len(results):
        return "not run", reasons
    figures = [figure for result in results for figure in result["figures"]]
    if skipped:
        figures.append(f"{len(skipped)} of {len(results)} not run: {reasons}")
    failed = any(result["outcome"] == "failed" for result in results)
    return "failed" if failed else "passed", "; ".join(figures)


def _table(columns: tuple[str, ...], rows: list[Any]) -> str:
    rows = [columns, ["---"] * len(columns), *rows]
    cells = [[" ".join(_clean(text).split()).replace("|", "\\|") for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _clean(text: str) -> str:
    """Return ``text`` without colours and without this machine's folders."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(ROOT) + os.sep, "")
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@-]+/)+", ".../", text)


def _surroundings(seconds: int) -> list[list[str]]:
    system = (
        f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPU "
        f"cores"
    )
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    found = [["date", date], ["commit", _commit()], ["system", system]]
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            total = nvml.nvmlDeviceGetMemoryInfo(handle).total
            found.append(
                [f"GPU {index}", f"{nvml.nvmlDeviceGetName(handle)}, {total / 2**30:.2f} GiB"]
            )
        found.append(["driver", str(nvml.nvmlSystemGetDriverVersion())])
    except Exception as error:  # the page says what is missing
        found.append(["GPU", f"none found ({type(error).__name__}: {error})"])
    versions = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    names = ("torch", "ipython", "ipykernel", "nvidia-ml-py", "psutil", "pytest")
    found += [
        ["Python", platform.python_version()],
        *([name, versions.get(name, "not installed")] for name in names),
    ]
    return [*found, ["total time", f"{seconds} s"]]


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty= with changes"]
    try:
        return subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT") or "unknown: no git where it ran"


def _results(path: Path) -> list[dict[str, Any]]:
    results = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
            result = json.loads(line)
            shown = (
                _clean(result["reason"])
                .replace("```", "` ` `")
                .rstrip()
                .splitlines()[-_LINES_SHOWN:]
            )
            results.append({**result, "reason": "\n".join(shown)})
    return results


def main() -> int:
    """Write the page; return 1 if anything failed, broke off, or nothing could run."""
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
    options = parser.parse_args()
    results = _results(options.results)
    if all(result["outcome"] == "skipped" for result in results):
        print(
            "gpu_report.py: this run could check nothing, for want of a GPU or of something to use "
            "it with"
        )
        return 1
    code = options.quickstart_exit
    log = options.quickstart_log
    quickstart = f"**failed**, exit code {code}" if code.isdecimal() else f"not run: {code}"
    quickstart = "passed" if code == "0" else quickstart
    if code == "0" and not (log.exists() and "cuda:0" in log.read_text(encoding="utf-8")):
        quickstart = "**failed**: it ran, but its reports show no cuda:0"
    run = {"where": _surroundings(options.seconds), "quickstart": quickstart, "results": results}
    simulated = any(
        "simulated" in value.lower()
        for what, value in run["where"]
        if what.startswith(("GPU", "driver"))
    )
    options.outcomes.mkdir(parents=True, exist_ok=True)
    kept = options.outcomes / ("simulated.json" if simulated else "hardware.json")
    kept.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    runs = {}
    for kind in KINDS:
        # The second one has this run's counts.
        for path in (OUTCOMES / f"{kind}.json", options.outcomes / f"{kind}.json"):
            if path.is_file():
                runs[kind] = json.loads(path.read_text(encoding="utf-8"))
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(runs), encoding="utf-8")
    print(f"gpu_report.py: wrote {options.page.name}")
    return int(options.suite_exit != 0 or "failed" in quickstart)


if __name__ == "__main__":
    sys.exit(main())

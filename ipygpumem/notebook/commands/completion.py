"""Tab completion for the magics' subcommands, options and names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from ipygpumem.introspect import instance_dict, is_instance
from ipygpumem.scopes.scope import is_ownable

if TYPE_CHECKING:
    from ipygpumem.notebook.notebook import Notebook

_EXPERIMENT_OPTIONS = ["--keep", "--drop-imports", "--seed", "--report", "--note", "--budget", "--record"]
_TENSOR_OPTIONS = ("--device", "--min", "--kind", "--by", "--top")
_TENSOR_VALUES = {
    "--kind": ["parameter", "gradient", "optimizer", "buffer", "other"],
    "--by": ["name", "shape", "kind", "cell", "device"],
    "--device": ["cpu", "cuda"],
}
_PLOT_OPTIONS = ("--device", "-n", "--save", "--dark", "--force")
_PLOT_VALUES = {"plot": ["session", "cells", "devices", "experiments", *_PLOT_OPTIONS], "--device": ["RAM", "cuda"]}
_NUMBERS = (int, float)
_AUTOFIT_OPTIONS = ["--min", "--step", "--headroom", "--max-tries"]
_STYLES = ["full", "compact", "none"]
_COMMANDS = [
    "on",
    "off",
    "status",
    "preload",
    "free",
    "leaks",
    "tensors",
    "history",
    "plot",
    "export",
    "record",
    "postmortem",
]


def complete_experiment(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%experiment`` or ``%%experiment``."""
    words = line.split()
    done = words if line.endswith(" ") else words[:-1]
    if done[-1:] == ["--report"]:
        return _STYLES
    if done[-1:] == ["--keep"] or done[1:2] == ["keep"]:
        return _names(notebook)
    if next((word for word in reversed(done) if word.startswith("--")), None) == "--keep":
        return [*_names(notebook), *_EXPERIMENT_OPTIONS]
    if done[1:2] == ["end"]:
        return [experiment.name for experiment in notebook.experiments.open]
    if done[1:2] == ["compare"]:
        return _finished(notebook)
    if line.startswith("%%") or done[1:2] == ["start"]:
        return _EXPERIMENT_OPTIONS
    return ["start", "end", "keep", "status", "list", "compare"] if len(done) <= 1 else []


def _finished(notebook: Notebook) -> list[str]:
    from ipygpumem.notebook.commands.history import names_of  # loading the extension must stay fast

    return names_of(notebook)


def complete_autofit(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%%autofit``."""
    done = line.split() if line.endswith(" ") else line.split()[:-1]
    if done[-1:] == ["--step"]:
        return ["halve", "search", "0.9"]
    numbers = [
        name for name, value in list(notebook.tools.namespace.items()) if is_ownable(name) and type(value) in _NUMBERS
    ]
    return [*sorted(name for name in numbers if not name.startswith("_")), *_AUTOFIT_OPTIONS]


def complete_estimate(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%%estimate``."""
    done = line.split() if line.endswith(" ") else line.split()[:-1]
    return {"--device": ["cpu", "cuda:0"], "--device-memory": [], "--timeout": []}.get(
        done[-1], ["--device-memory", "--device", "--timeout"]
    )


def complete_gpumemit(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%gpumemit``: options, and names for the statement."""
    done = line.split() if line.endswith(" ") else line.split()[:-1]
    return [] if done[-1] in ("-r", "-s") else ["-r", "-s", *_names(notebook)]


def complete_memlines(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%%memlines``."""
    done = line.split() if line.endswith(" ") else line.split()[:-1]
    if done[-1] == "--sort":
        from ipygpumem.reports.lines import ORDERS  # loading the extension must stay fast

        return list(ORDERS)
    following = "-f" in done and "--sort" not in done[done.index("-f") :]
    return ["-f", "--sort", *(_functions(notebook) if following else ())]


def _functions(notebook: Notebook) -> list[str]:
    """Return the functions of the notebook, and the methods of its classes."""
    found = []
    for name in _names(notebook):
        value = notebook.tools.namespace.get(name)
        if type(value) is FunctionType:
            found.append(name)
        elif is_instance(value, type):
            members = (instance_dict(value) or {}).items()
            found += [f"{name}.{member}" for member, method in members if type(method) is FunctionType]
    return found


def _names(notebook: Notebook) -> list[str]:
    return sorted(name for name in list(notebook.tools.namespace) if is_ownable(name) and not name.startswith("_"))


def complete_gpumem(notebook: Notebook, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%gpumem``."""
    words = line.split()
    done = words if line.endswith(" ") else words[:-1]
    if done[1:2] == ["tensors"]:
        return _TENSOR_VALUES.get(done[-1], list(_TENSOR_OPTIONS))
    if done[1:2] == ["history"]:
        return _finished(notebook) if done[-1] == "--experiment" else ["-n", "--experiment"]
    if done[1:2] == ["export"]:
        from ipygpumem.reports.export.formats import SUFFIXES  # loading the extension must stay fast

        return ["--force", *_files("" if line.endswith(" ") else words[-1], SUFFIXES)]
    if done[1:2] == ["plot"]:
        if done[-1] == "--save":
            from ipygpumem.notebook.commands.plot import SUFFIXES as PICTURES  # as above

            return _files("" if line.endswith(" ") else words[-1], PICTURES)
        return [] if done[-1] == "-n" else _PLOT_VALUES.get(done[-1], list(_PLOT_OPTIONS))
    if done[1:2] == ["record"]:
        return ["--delete"] if done[2:] == ["off"] else ["on", "off", "status"] if len(done) == 2 else []
    if done[1:2] == ["postmortem"]:
        return ["--all", *notebook.recorder.names()]
    return _COMMANDS if len(done) <= 1 else []


def _files(start: str, suffixes: Sequence[str]) -> list[str]:
    """Return the folders and the files with one of ``suffixes`` that a path may go on with."""
    folder = start[: start.rfind("/") + 1]
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
        shown = [entry for entry in entries if entry.is_dir() or entry.suffix.lower() in suffixes]
        return [folder + entry.name + "/" * entry.is_dir() for entry in shown if not entry.name.startswith(".")]
    except (OSError, RuntimeError):  # no such folder, no such user
        return []

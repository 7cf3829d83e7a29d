"""Functions that list completions: names of the notebook, experiments, files.

Each takes the beginning of the word; the caller leaves out completions with another beginning.
"""

from __future__ import annotations

from glob import escape, glob
from pathlib import Path
from types import FunctionType

from ipygpumem.introspect import is_instance
from ipygpumem.scope.ownable import ownable_objects
from ipygpumem.shell.app import App


def names(app: App, begun: str = "") -> list[str]:
    """Return the notebook's names."""
    return list(_values(app))


def numbers(app: App, begun: str = "") -> list[str]:
    """Return the notebook's names of numbers."""
    return [name for name, value in _values(app).items() if type(value) in (int, float)]


def functions(app: App, begun: str = "") -> list[str]:
    """Return the notebook's names of functions and classes."""
    callables = []
    for name, value in _values(app).items():
        if type(value) is FunctionType or is_instance(value, type):
            callables.append(name)
    return callables


def open_experiments(app: App, begun: str = "") -> list[str]:
    """Return the names of open experiments."""
    return [experiment.name for experiment in app.experiments.open]


def finished_experiments(app: App, begun: str = "") -> list[str]:
    """Return the names of finished experiments."""
    return sorted({experiment.name for experiment in app.experiments.finished})


def files(app: App, begun: str) -> list[str]:
    """Return the files and folders whose paths begin with a text."""
    paths = sorted(glob(f"{escape(begun)}*"))  # noqa: PTH207  # keeps the typed form
    return [_with_slash(path) for path in paths]


def _with_slash(path: str) -> str:
    """Return a path, with a slash at its end if it is a folder, so that Tab goes on in it."""
    if Path(path).is_dir():
        return f"{path}/"
    return path


def _values(app: App) -> dict[str, object]:
    """Return the notebook's names in order, with their values."""
    objects = ownable_objects(app.context.namespace)
    return {name: objects[name] for name in sorted(objects) if not name.startswith("_")}

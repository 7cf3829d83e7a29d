"""Completes the lines of magics when Tab is pressed: commands, options, and what stands for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from ipygpumem.introspect import instance_dict, is_instance
from ipygpumem.notebook.commands.gpumem import SUFFIXES
from ipygpumem.notebook.notebook import Notebook
from ipygpumem.notebook.registry import Argument, Command, Magic
from ipygpumem.reports import export
from ipygpumem.scopes.scope import is_ownable


def complete(notebook: Notebook, magic: Magic, event: Any) -> list[str]:
    """Return what may stand at the cursor in a magic's line."""
    line = event.text_until_cursor
    if line.split()[:1] != event.line.split()[:1]:  # somebody asks by the old way, without a cursor
        line = event.line
    words = line.split()
    begun = "" if line[-1:].isspace() else words.pop()
    if not words or words[0] in notebook.context.namespace:  # its name is being typed, or it is a variable's
        return []
    command = magic.cell if words.pop(0).startswith("%%") else magic.line
    while command is not None and command.commands:
        if not words:
            return [below.name for below in command.commands]
        name = words.pop(0)
        command = next((below for below in command.commands if below.name == name), None)
    return [] if command is None else _arguments(notebook, command, words, begun)


def _arguments(notebook: Notebook, command: Command, words: Iterable[str], begun: str) -> list[str]:
    """Return what may follow ``words`` of a command."""
    options = {item.name: item for item in command.arguments if item.name}
    places = [item for item in command.arguments if not item.name]
    option: Argument | None = None
    needs_value = False
    for word in words:
        if word in options:
            option = options[word] if options[word].value else None
            needs_value = option is not None
        elif option is not None:
            option, needs_value = option if option.is_many else None, False
        elif places and not places[0].takes_several:
            places.pop(0)
    if option is not None and needs_value:
        return _offers(notebook, option, begun)
    place = option or next(iter(places), None)
    return [*(_offers(notebook, place, begun) if place is not None else ()), *options]


def _offers(notebook: Notebook, argument: Argument, begun: str) -> list[str]:
    offers = argument.offers or argument.choices
    return SOURCES[offers](notebook, begun) if isinstance(offers, str) else list(offers)


def _names(notebook: Notebook, begun: str = "") -> list[str]:
    return sorted(name for name in list(notebook.context.namespace) if is_ownable(name) and not name.startswith("_"))


def _numbers(notebook: Notebook, begun: str) -> list[str]:
    """Return the notebook's names of numbers."""
    return [name for name in _names(notebook) if type(notebook.context.namespace.get(name)) in (int, float)]


def _functions(notebook: Notebook, begun: str) -> list[str]:
    """Return the functions of the notebook, and the methods of its classes."""
    found = []
    for name in _names(notebook):
        value = notebook.context.namespace.get(name)
        if type(value) is FunctionType:
            found.append(name)
        elif is_instance(value, type):
            members = (instance_dict(value) or {}).items()
            found += [f"{name}.{member}" for member, method in members if type(method) is FunctionType]
    return found


def _files(begun: str, suffixes: Sequence[str]) -> list[str]:
    """Return the folders and the files with one of ``suffixes`` that a path may go on with."""
    folder = begun[: begun.rfind("/") + 1]
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
        shown = [entry for entry in entries if entry.is_dir() or entry.suffix.lower() in suffixes]
        return [folder + entry.name + "/" * entry.is_dir() for entry in shown if not entry.name.startswith(".")]
    except (OSError, RuntimeError):  # no such folder, no such user
        return []


SOURCES: dict[str, Callable[[Notebook, str], list[str]]] = {
    "names": _names,
    "numbers": _numbers,
    "functions": _functions,
    "open": lambda notebook, _: [experiment.name for experiment in notebook.experiments.open],
    "finished": lambda notebook, _: sorted({experiment.name for experiment in notebook.experiments.finished}),
    "recordings": lambda notebook, _: notebook.recorder.names(),
    "exports": lambda _, begun: _files(begun, export.SUFFIXES),
    "pictures": lambda _, begun: _files(begun, SUFFIXES),
}
"""What Tab offers that the notebook or a folder knows."""

"""Parses and completes the lines of magics according to their help texts; a mistake is a one-line
error.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

from IPython.core.error import UsageError

from ipygpumem.errors import UnitError, ellipsize, quoted
from ipygpumem.introspect import is_instance
from ipygpumem.report.layout import clean
from ipygpumem.scope.scope import is_ownable
from ipygpumem.shell.app import App
from ipygpumem.shell.registry import EXTRAS, MAGICS
from ipygpumem.units import MIB, UNIT, checked_bytes, finite, number_in, whole

Options = argparse.Namespace
"""The words and options of a line, each as an attribute."""


def _checked(check: Callable[..., object], **bounds: int) -> Callable[[str], object]:
    """Return a parser of an option's text that uses the same check as Python functions and the
    configuration.
    """

    def of(text: str) -> object:
        try:
            return check(text if check is checked_bytes else number_in(text), **bounds)
        except UnitError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return of


_count = _checked(whole)

_DETAILS: dict[str, dict[str, Any]] = {
    "--device D": {"offers": ("RAM", "cuda")},
    "--device-memory SIZE": {"of": _checked(checked_bytes, least=MIB)},
    "--batch NAME": {"offers": "numbers"},
    "--experiment NAME": {"offers": "finished"},
    "--keep NAME...": {"offers": "names"},
    "--limit SIZE": {"of": _checked(checked_bytes, least=64 * MIB)},
    "--max-tries 10": {"of": _checked(whole, least=0)},
    "--memory SIZE": {"of": _checked(checked_bytes, least=64 * MIB)},
    "--min SIZE": {"of": _checked(checked_bytes)},
    "--on ENGINES": {"offers": ("all",)},
    "--seed N": {"of": _checked(whole, least=-(2**63), most=2**64 - 1)},
    "--sort line|kept|peak|time|hits": {"default": "line"},
    "--step STEP": {"offers": ("halve", "search", "0.9")},
    "--time SECONDS": {"of": _checked(finite)},
    "--timeout SECONDS": {"of": _checked(finite)},
    "--top N": {"of": _count, "default": 20, "also": ("-n",)},
    "-f FUNCTION...": {"offers": "functions"},
    "-n 20": {"of": _count, "default": 20},
    "-n N": {"of": _count},
    "-r RUNS": {"of": _checked(whole, most=10_000), "default": 5},
    "-s 'SETUP'": {"default": ""},
    "NAME=VALUE...": {"to": "variables", "offers": "numbers"},
    "STATEMENT": {"to": "code", "offers": "names"},
    "EXPRESSION": {"offers": "names"},
    "on|off": {"to": "state"},
    "session|devices|experiments": {"to": "picture", "default": "session"},
    "%%estimate --device D": {"offers": ("RAM", "cuda:0")},
    "%experiment end NAME": {"offers": "open"},
    "%experiment keep NAME...": {"offers": "names"},
    "%experiment compare NAME...": {"offers": "finished"},
    "--save FILE": {"offers": "files"},
    "%gpumem export FILE": {"offers": "files"},
    "%gpumem postmortem FILE": {"offers": "recordings"},
}
"""Details of arguments beyond the help texts: conversion, default, and completions."""

_MISSING = {
    "%experiment start": "which name? Write it before the options: NAME --keep x",
    "%%experiment": "which name? Write it before the options: NAME --keep x",
    "%experiment keep": "which names? For instance: %experiment keep model 'loss*'",
    "%gpumem export": "which file? Its suffix selects the format",
    "%gpumem why": "which name? For instance: %gpumem why model",
    "%gpumemit": "which statement? For instance: %gpumemit -r 3 torch.relu(x)",
    "%%autofit": "which variable? For instance: %%autofit batch_size=1024",
}
"""Commands → question to ask if the required argument is missing."""


class Argument:
    """An argument of a command: an option (``--seed N``), a switch, or positional words; ``...``
    means several.
    """

    def __init__(self, command: str, usage: str) -> None:
        details = {**_DETAILS.get(usage, {}), **_DETAILS.get(f"{command} {usage}", {})}
        self.usage = usage
        self.name = usage.partition(" ")[0] if usage.startswith("-") else ""
        value = usage.removeprefix(self.name).strip()
        self.is_many, self.value = value.endswith("..."), value.removesuffix("...")
        self.is_text = not self.name and value in ("NAME", "STATEMENT")
        """True if all words are joined into one text."""
        self.choices = tuple(value.split("|")) if "|" in value else ()
        plain = self.name.lstrip("-").replace("-", "_") or self.value.lower() + "s" * self.is_many
        self.attribute: str = details.get("to", plain)
        self.also: tuple[str, ...] = details.get("also", ())
        """Alternative names, not offered as completions."""
        self.of: Callable[[str], object] = details.get("of", self._choice if self.choices else str)
        self.default: object = details.get("default")
        self.offers: str | tuple[str, ...] = details.get("offers", self.choices)

    def _choice(self, text: str) -> str:
        """Return a choice that a user has written."""
        word = text.removesuffix(" state")  # of a kind of tensors, as reports show it
        if word not in self.choices:
            hint = f"{_meant(word, self.choices)}; use {', '.join(self.choices)}"
            raise argparse.ArgumentTypeError(f"invalid choice: {quoted(text)}{hint}")
        return word


class Command(NamedTuple):
    """A magic or a command of a magic, as defined by a row of a help text."""

    name: str
    run: str
    """Path of the function in the package; it takes the ``App``, the options and, for a cell magic,
    the cell.
    """
    arguments: tuple[Argument, ...]
    needed: str
    """Attribute of the required argument; empty if there is none."""
    commands: tuple[str, ...]
    """The subcommands."""

    @property
    def ends_in_code(self) -> bool:
        """True if Python code follows the options; it is passed on unparsed as ``code``."""
        return self.name.endswith("gpumemit")


_OTHERWISE = {
    "experiment.list": "experiment.list_",
    "gpumem.leaks": "leaks.leaks",
    "gpumem.tensors": "tensors.tensors",
    "gpumem.why": "why.why",
    "gpumem.top": "tensors.top",
}
"""Functions in ``magics`` whose path differs from the command's name."""


def _place_of(magic: str, words: list[str]) -> str:
    """Return the path of a command's function."""
    name, function = (
        magic.lstrip("%"),
        "_".join(words) or ("of_cell" if magic.startswith("%%") else "of_line"),
    )
    for key in (name, f"{name} {words[0]}" if words else ""):
        if key in EXTRAS:
            return f"extras.{EXTRAS[key]}.{function}"
    run = f"{name}.{function}"
    return f"magics.{_OTHERWISE.get(run, run)}"


def command_of(magic: str, words: Iterable[str] = ()) -> Command:
    """Return the command named by a magic's first words, or the magic's own."""
    rows = re.findall(rf"^    {magic} (.*(?:\n {{9,}}.*)*)", MAGICS[magic], re.MULTILINE)
    below = {row.split()[0]: row for row in rows if row[0].islower()}
    usage, names = "" if below else " ".join(rows[0].split()), [magic]
    for word in words:
        if word not in below:
            break
        names.append(word)
        head, text = re.split(r"  +|\n +", below[word].removeprefix(word), maxsplit=1)
        nested = re.search(r"\w+(?: \| \w+)+$", text)
        below = {} if nested is None else dict.fromkeys(nested[0].split(" | "), "  ")
        usage = " ".join([head, *re.findall(r"\[[^\]]+\]", text)])
    name = " ".join(names)
    found = [
        (Argument(name, optional or needed), needed)
        for optional, needed in re.findall(r"\[(.+?)\]|(\S+)", usage)
    ]
    return Command(
        name,
        _place_of(magic, names[1:]),
        tuple(argument for argument, _ in found),
        next((argument.attribute for argument, is_needed in found if is_needed), ""),
        tuple(below),
    )


# -- a line that is run -------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise IPython's error instead of exiting the process."""
        raise UsageError(clean(f"{self.prog}: {ellipsize(message, 600)}"))


def parse(magic: str, line: str) -> tuple[Command, Options]:
    """Return the command named in a magic's line, or the magic's own, and its options."""
    command = command_of(magic, line.split())
    if command.ends_in_code:
        options = _options_and_code(command, line)
    elif command.needed == "expression":  # not split: it may have quotes
        options = Options(expression=line.strip().partition(" ")[2].strip())
    else:
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"{magic}: {error}") from None
        command = command_of(magic, words)
        words = words[command.name.count(" ") :]
        if command.commands and (words or command.name != "%gpumem"):
            given = "a command is missing"
            if words:
                given = f"no such command {quoted(words[0])}{_meant(words[0], command.commands)}"
            raise UsageError(clean(f"{command.name}: {given}; use {', '.join(command.commands)}"))
        options = _options(command, words)
    if command.needed and not getattr(options, command.needed):
        raise UsageError(f"{command.name}: {_MISSING[command.name]}")
    return command, options


def _meant(word: str, known: Iterable[str]) -> str:
    """Return a suggestion of the known word most similar to an unknown one, or an empty text."""
    import difflib  # takes long

    like = difflib.get_close_matches(word[:40].lower(), known, 1)
    return f" (did you mean {like[0]}?)" if like else ""


def _options(command: Command, words: list[str]) -> Options:
    if words and not command.arguments:
        raise UsageError(
            clean(f"{command.name}: {quoted(words[0])} is not an option; this command takes none")
        )
    if command.name not in _PARSERS:
        _PARSERS[command.name] = _parser_of(command)
    options, unknown = _PARSERS[command.name].parse_known_args(_with_joined_sizes(command, words))
    if unknown:
        there_are = [argument.name for argument in command.arguments if argument.name]
        hint = f"use {', '.join(there_are)}" if there_are else "this command has no options"
        meant = _meant(unknown[0], there_are)
        raise UsageError(
            clean(f"{command.name}: {quoted(unknown[0])} is not an option{meant}; {hint}")
        )
    for argument in command.arguments:
        if argument.is_text:
            setattr(options, argument.attribute, " ".join(getattr(options, argument.attribute)))
    return options


def _with_joined_sizes(command: Command, words: list[str]) -> list[str]:
    """Return the words with each size as one: ``8 GiB`` is two words, and argparse takes ``-8GiB``
    for an option.
    """
    sizes = {
        argument.name
        for argument in command.arguments
        if argument.name and "SIZE" in argument.value
    }
    joined, option = list[str](), ""
    for word in words:
        last = joined[-1] if joined else ""
        if option in sizes and last == option and re.match(r"-[0-9.]", word):
            joined[-1] += f"={word}"
        elif (
            option in sizes
            and re.search(r"(^|=)-?[0-9.]*[1-9][0-9.]*$", last)
            and re.fullmatch(UNIT, word, re.I)
        ):
            joined[-1] += word
        else:
            option = word.partition("=")[0] if word.startswith("-") else option
            joined.append(word)
    return joined


_PARSERS: dict[str, _Parser] = {}
"""Parsers in use, by command: making one calls 250 functions."""


def _parser_of(command: Command) -> _Parser:
    parser = _Parser(prog=command.name, add_help=False, allow_abbrev=False)
    for argument in command.arguments:
        if argument.name and not argument.value:
            parser.add_argument(argument.name, action="store_true")
        elif argument.name and argument.is_many:
            parser.add_argument(argument.name, nargs="+", action="extend", default=[])
        else:
            parser.add_argument(
                argument.name or argument.attribute,
                *argument.also,
                nargs=None
                if argument.name
                else "*"
                if argument.is_many or argument.is_text
                else "?",
                type=argument.of,
                default=argument.default,
            )
    return parser


def _options_and_code(command: Command, line: str) -> Options:
    """Return the options at the start of a line, with the rest as ``code``."""
    found = Options(**{item.attribute: item.default for item in command.arguments})
    arguments = {item.name: item for item in command.arguments if item.name}
    option = re.compile(
        rf"""\s*(?P<name>{"|".join(arguments)})[\s=]*(?P<value>'[^']*'|"[^"]*"|\S+)(?:\s+|$)"""
    )
    while match := option.match(line):
        name, value, line = match["name"], match["value"], line[match.end() :]
        if value[0] in "'\"":
            value = value[1:-1]
        try:
            setattr(found, arguments[name].attribute, arguments[name].of(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(clean(f"{command.name}: {name} {ellipsize(value)}: {error}")) from None
    if re.match(r"\s*--?[a-zA-Z]", line):
        there_are = " or ".join(item.usage for item in arguments.values())
        hint = ", or put (...) around the statement" if command.needed else ""
        raise UsageError(
            f"{command.name}: {quoted(clean(line.split()[0]))} is not an option; use "
            f"{there_are}{hint}"
        )
    found.code = line.strip()
    return found


# -- a line that is typed -----------------------------------------------------------------------


def complete(app: App, magic: str, event: Any) -> list[str]:
    """Return completions at the cursor in the line of ``magic``, a name without ``%``."""
    line = event.text_until_cursor
    if line.split()[:1] != event.line.split()[:1]:  # the old API passes no cursor
        line = event.line
    words = line.split()
    begun = "" if line[-1:].isspace() else words.pop()
    if (
        not words or words[0] in app.context.namespace
    ):  # the magic's name is being typed, or a variable has it
        return []
    name = ("%%" if words.pop(0).startswith("%%") else "%") + magic
    if name not in MAGICS:
        return []
    command = command_of(name, words)
    words = words[command.name.count(" ") :]
    if command.commands:
        return [] if words else list(command.commands)
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
        elif places and not (places[0].is_many or places[0].is_text):
            places.pop(0)
    place = option or next(iter(places), None)
    offers = () if place is None else place.offers
    found = SOURCES[offers](app, begun) if isinstance(offers, str) else offers
    return [*found, *(() if needs_value else options)]


def _values(app: App) -> dict[str, object]:
    names = sorted(
        name
        for name in list(app.context.namespace)
        if is_ownable(name) and not name.startswith("_")
    )
    return {name: app.context.namespace.get(name) for name in names}


def _files(app: App, begun: str) -> list[str]:
    return [found + "/" * Path(found).is_dir() for found in sorted(glob(f"{begun}*"))]  # noqa: PTH207  # keeps the typed form


SOURCES: dict[str, Callable[[App, str], list[str]]] = {
    "names": lambda app, _: list(_values(app)),
    "numbers": lambda app, _: [
        name for name, it in _values(app).items() if type(it) in (int, float)
    ],
    "functions": lambda app, _: [
        name
        for name, it in _values(app).items()
        if type(it) is FunctionType or is_instance(it, type)
    ],
    "open": lambda app, _: [experiment.name for experiment in app.experiments.open],
    "finished": lambda app, _: sorted({experiment.name for experiment in app.experiments.finished}),
    "recordings": lambda app, _: app.recorder.names(),
    "files": _files,
}
"""Kinds of completions → function that lists them from the ``App`` or a folder."""

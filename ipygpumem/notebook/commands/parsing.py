"""Parses the lines of magics as the registry describes them; a mistake is an error of one line."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from typing import NoReturn

from IPython.core.error import UsageError

from ipygpumem.errors import UnitError, quoted, short
from ipygpumem.notebook.registry import Argument, Command
from ipygpumem.reports.layout import clean
from ipygpumem.units import parse_bytes

Options = argparse.Namespace
"""The words and options of a line, each as an attribute."""

_MOST_RUNS = 10_000


def _size(text: str) -> int:
    """Return the bytes of an option such as ``64MiB``."""
    try:
        return parse_bytes(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on; write one such as 20")
    return int(text)


def _runs(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= _MOST_RUNS:
        raise argparse.ArgumentTypeError(f"write a number of runs from 1 to {_MOST_RUNS}")
    return int(text)


def _kind(text: str) -> str:
    return text.removesuffix(" state")  # as records say it


TYPES: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "size": _size,
    "count": _count,
    "runs": _runs,
    "kind": _kind,
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are IPython's: one line."""

    def error(self, message: str) -> NoReturn:
        """Raise IPython's error instead of leaving the process."""
        raise UsageError(clean(f"{self.prog}: {short(message, 600)}"))


def parse(command: Command, line: str) -> tuple[Command, Options]:
    """Return the command that a magic's line names, the magic's own if it has none, and the options."""
    if command.ends_in_code:
        return command, _options_and_code(command, line)
    prog, words = command.name, _split(command.name, line)
    while command.commands:
        names = [below.name for below in command.commands]
        if not words or words[0] not in names:
            given = f"no such command {quoted(words[0])}" if words else "a command is missing"
            raise UsageError(clean(f"{prog}: {given}; use {', '.join(names)}"))
        prog, command = f"{prog} {words[0]}", command.commands[names.index(words.pop(0))]
    return command, _options(command, prog, words)


def _split(prog: str, line: str) -> list[str]:
    """Return the words of a line, quotes taken off."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{prog}: {error}") from None


def _options(command: Command, prog: str, words: list[str]) -> Options:
    if words and not command.arguments:
        raise UsageError(clean(f"{prog}: {quoted(words[0])} is not an option; this command takes none"))
    parser = Parser(prog=prog, add_help=False, allow_abbrev=False)
    for argument in command.arguments:
        _add(parser, argument)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        there_are = ", ".join(argument.name for argument in command.arguments if argument.name)
        hint = f"use {there_are}" if there_are else "this command has no options"
        raise UsageError(clean(f"{prog}: {quoted(unknown[0])} is not an option; {hint}"))
    for argument in command.arguments:
        if argument.type == "line":
            setattr(options, argument.attribute, " ".join(getattr(options, argument.attribute)))
    _check(command, prog, options)
    return options


def _check(command: Command, prog: str, options: Options) -> None:
    for argument in command.arguments:
        if argument.missing and not getattr(options, argument.attribute):
            raise UsageError(f"{prog}: {argument.missing}")


def _add(parser: Parser, argument: Argument) -> None:
    if argument.name and not argument.value:
        parser.add_argument(argument.name, action="store_true")
    elif argument.name and argument.is_many:
        parser.add_argument(argument.name, nargs="+", action="extend", default=[])
    else:
        parser.add_argument(
            argument.name or argument.attribute,
            nargs=None if argument.name else "*" if argument.takes_several else "?",
            type=TYPES.get(argument.type, str),
            choices=argument.choices or None,
            default=argument.default,
        )


def _options_and_code(command: Command, line: str) -> Options:
    """Return the options at the head of a line, and as ``code`` what follows them."""
    found = Options(**{item.attribute: item.default for item in command.arguments})
    arguments = {item.name: item for item in command.arguments if item.name}
    names = "|".join(map(re.escape, arguments))
    option = re.compile(rf"""\s*(?P<name>{names})[\s=]*(?P<value>'[^']*'|"[^"]*"|\S+)(?:\s+|$)""")
    while match := option.match(line):
        name, value, line = match["name"], match["value"], line[match.end() :]
        if value[0] in "'\"":
            value = value[1:-1]
        try:
            setattr(found, arguments[name].attribute, TYPES.get(arguments[name].type, str)(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(clean(f"{command.name}: {name} {short(value)}: {error}")) from None
    if re.match(r"\s*--?[a-zA-Z]", line):
        there_are = " or ".join(item.usage for item in arguments.values())
        hint = ", or put (...) around the statement" if len(arguments) < len(command.arguments) else ""
        raise UsageError(f"{command.name}: {quoted(clean(line.split()[0]))} is not an option; use {there_are}{hint}")
    found.code = line.strip()
    _check(command, command.name, found)
    return found

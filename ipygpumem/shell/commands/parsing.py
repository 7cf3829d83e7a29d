"""Parses the lines of magics according to their declarations; a mistake is an error of one line."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Collection
from typing import NoReturn

from IPython.core.error import UsageError

from ipygpumem.errors import ellipsize, quoted
from ipygpumem.report.words import clean
from ipygpumem.shell.commands.declarations import (
    Argument,
    Command,
    CommandGroup,
    CommandTable,
    Options,
    WrongValue,
    did_you_mean,
)
from ipygpumem.units import UNIT


def parse(table: CommandTable, magic: str, line: str) -> tuple[Command, Options]:
    """Return the command that a magic's line names, and its options.

    Raises:
        UsageError: the line is wrong; its message names the first mistake.
    """
    command = table.find(magic, line.split())
    if isinstance(command, Command) and command.code is not None:
        text = _without_first_words(line, _words_after_magic(command))
        options = _options_and_code(command, command.code, text)
    else:
        command, options = _command_and_options(table, magic, line)
    for argument in command.arguments:
        if argument.missing and not getattr(options, argument.attribute):
            raise UsageError(f"{command.name}: {argument.missing}")
    return command, options


def _without_first_words(line: str, number: int) -> str:
    """Return a line without its first words, of which there are ``number``."""
    parts = line.split(None, number)
    if len(parts) > number:
        return parts[number]
    return ""


def _command_and_options(table: CommandTable, magic: str, line: str) -> tuple[Command, Options]:
    """Return the command and the options of a line of words."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{magic}: {error}") from None
    named = table.find(magic, words)
    words = words[_words_after_magic(named) :]
    if isinstance(named, Command):
        return named, _options(named, words)
    if words or named.alone is None:
        raise UsageError(clean(_message_without_command(table, named, words)))
    command = named.alone()
    return command, _options(command, words)


def _words_after_magic(named: Command | CommandGroup) -> int:
    """Return the number of words that name a command after its magic: 1 for ``%gpumem top``."""
    return named.name.count(" ")


def _message_without_command(table: CommandTable, group: CommandGroup, words: list[str]) -> str:
    """Return the message on a line that names no command of a group.

    Args:
        table: all magics.
        group: the group, such as ``%gpumem``.
        words: the words after the group's name.
    """
    names = ", ".join(group.names)
    if not words:
        hint = ""
        if f"%{group.name}" in table.magics:
            hint = f", or write %{group.name} as the first line of a cell"
        return f"{group.name}: a command is missing; use {names}{hint}"
    word = words[0]
    right_form = _right_form(table, word)
    if right_form:
        return f"{group.name}: write {right_form}"
    problem = f"no such command {quoted(word)}"
    suggestion = _suggestion(word, [*group.names, "help"])
    if suggestion:
        return f"{group.name}: {problem}{suggestion}: {group.name} help lists the commands"
    hint = ""
    if group.name == "%experiment":
        hint = f"; to open one of this name: %experiment start {word}"
    return f"{group.name}: {problem}; use {names}{hint}"


_MEANINGS = {
    "status": ("memory", "mem", "usage", "info", "show", "report", "ram", "gpu", "devices"),
    "top": ("list", "names", "variables", "vars", "who", "whos", "largest", "biggest", "objects"),
    "free": ("clear", "clean", "cleanup", "empty", "gc", "collect", "release", "reset"),
    "tensors": ("arrays", "ls"),
    "history": ("cells", "log"),
    "export": ("save", "dump", "write", "csv", "json"),
    "guard": ("limit", "cap", "protect"),
    "why": ("explain", "refs", "referrers", "holders"),
    "plot": ("graph", "picture", "chart"),
    "panel": ("live", "watch", "monitor", "dashboard"),
    "end": ("stop", "finish", "close"),
    "start": ("begin", "new", "open", "run"),
}
"""Words that users try for commands whose names are not similar."""


def _suggestion(word: str, names: Collection[str]) -> str:
    """Return a suggestion such as `` (did you mean top?)``, of the command that a word means or
    resembles; empty if there is none.
    """
    for name, words in _MEANINGS.items():
        if name in names and word.lower() in words:
            return f" (did you mean {name}?)"
    return did_you_mean(word, names)


FUNCTIONS = (
    "budget",
    "diff",
    "expect",
    "last",
    "load",
    "offload",
    "purge",
    "release",
    "summary",
    "trace",
    "traces",
    "track",
    "tracker",
)
"""Functions that have no command; a test compares them with the package's."""
_WORDS_FOR_CONFIG = ("config", "configure", "options", "option", "set", "settings")
"""Words that users try for ``%config IPyGpuMem``."""
_WORDS_FOR_DEL = ("del", "delete", "rm", "remove")
"""Words that users try for ``del``, to delete a variable."""


def _right_form(table: CommandTable, word: str) -> str:
    """Return the right form of a word that a line took for a command of a group: ``%%peak`` for
    ``%gpumem peak``, or a function, a statement or the options; empty for any other word.
    """
    if word in _WORDS_FOR_CONFIG:
        return "%config IPyGpuMem"
    if word in _WORDS_FOR_DEL:
        return "del NAME in Python, or %gpumem why NAME for what it frees"
    if word == "experiments":
        return "%experiment list"
    if word in FUNCTIONS:
        return f"ipygpumem.{word}(...) in Python, after import ipygpumem"
    forms = []
    if f"%{word}" in table.magics:
        forms.append(f"%{word}")
    if f"%%{word}" in table.magics:
        forms.append(f"%%{word} as the first line of a cell")
    return " or ".join(forms)


def _options(command: Command, words: list[str]) -> Options:
    """Return the options in the words of a line; a ``UsageError`` names the first mistake."""
    if words and not command.arguments:
        problem = f"{quoted(words[0])} is not an option; this command takes none"
        raise UsageError(clean(f"{command.name}: {problem}"))
    words = _with_joined_sizes(command, words)
    options, unknown_words = _parser_of(command).parse_known_args(words)
    is_number = len(unknown_words) == 1 and NUMBER_OF_ROWS.fullmatch(unknown_words[0])
    if is_number and "-n" in command.options:
        options.n = int(unknown_words.pop())
    if unknown_words:
        message = _message_on_unknown_word(command, unknown_words[0])
        raise UsageError(clean(f"{command.name}: {message}"))
    for argument in command.arguments:
        if argument.is_joined:
            setattr(options, argument.attribute, " ".join(getattr(options, argument.attribute)))
    return options


NUMBER_OF_ROWS = re.compile("[1-9][0-9]{0,8}")
"""A number alone, such as that of ``history 5``: many users leave the name of the option out."""


def _message_on_unknown_word(command: Command, word: str) -> str:
    """Return the message on a word that is no option of a command, or that cannot stand alone."""
    names = list(command.options)
    hint = f"use {', '.join(names)}" if names else "this command has no options"
    if word.partition("=")[0] == "--name" and command.positional:  # ``%experiment start --name x``
        return f"{quoted(word)} is not an option: the name stands alone, as in {command.name} x"
    similar = did_you_mean(word, names)
    if similar or word.startswith("-"):
        return f"{quoted(word)} is not an option{similar}; {hint}"
    return f"{quoted(word)} cannot stand alone{_with_option(command, word)}; {hint}"


_DEVICE = re.compile(r"(?:cpu|ram|cuda|mps|xpu)(?::\d+)?", re.IGNORECASE)
_SIZE = re.compile(rf"[\d.]+{UNIT}", re.IGNORECASE)


def _with_option(command: Command, word: str) -> str:
    """Return a suggestion of the option whose value a word looks like, or an empty text."""
    for name, item in command.options.items():
        is_device = item.value == "D" and _DEVICE.fullmatch(word)
        is_size = item.value == "SIZE" and _SIZE.fullmatch(word)
        if is_device or is_size:
            return f" (did you mean {name} {word}?)"
    return ""


def device_hint(word: str) -> str:
    """Return a suggestion such as `` (did you mean --device cuda?)`` if a word looks like a device,
    or an empty text.
    """
    if _DEVICE.fullmatch(word):
        return f" (did you mean --device {word}?)"
    return ""


_SIZE_BEFORE_UNIT = re.compile(r"(^|=)-?[0-9.]*[1-9][0-9.]*$")
"""Matches a number, or an option with one such as ``--min=8``, to which the next word may be the
unit; not 0, which needs none.
"""


def _with_joined_sizes(command: Command, words: list[str]) -> list[str]:
    """Return the words with each size of an option as one word.

    ``--min 8 GiB`` becomes ``--min 8GiB``; and ``--min -8GiB``, which argparse takes
    for two options, ``--min=-8GiB``.
    """
    options_of_sizes = {name for name, item in command.options.items() if "SIZE" in item.value}
    joined = list[str]()
    last_option = ""
    for word in words:
        previous = joined[-1] if joined else ""
        is_negative = previous == last_option and re.match(r"-[0-9.]", word)
        is_unit = _SIZE_BEFORE_UNIT.search(previous) and re.fullmatch(UNIT, word, re.IGNORECASE)
        if last_option in options_of_sizes and is_negative:
            joined[-1] += f"={word}"
        elif last_option in options_of_sizes and is_unit:
            joined[-1] += word
        else:
            if word.startswith("-"):
                last_option, _, _ = word.partition("=")
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    """The parser of a command, whose errors are one line."""

    def __init__(self, command: Command) -> None:
        super().__init__(prog=command.name, add_help=False, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        """Raise IPython's error instead of exiting the process."""
        text = message.removeprefix("argument ")
        names, _, problem = text.partition(": ")
        if _NO_VALUE.fullmatch(problem):
            name = names.partition("/")[0]
            text = f"{name} needs a value: {self._command.options[name].usage}"
        raise UsageError(clean(f"{self.prog}: {ellipsize(text, 600)}"))


_NO_VALUE = re.compile("expected (one|at least one) argument")
"""Matches argparse's words for an option without its value."""


@functools.cache  # making one calls 250 functions
def _parser_of(command: Command) -> _Parser:
    """Return the parser of a command's words."""
    parser = _Parser(command)
    for argument in command.arguments:
        _add_argument(parser, argument)
    return parser


def _add_argument(parser: _Parser, argument: Argument) -> None:
    """Add a command's argument to argparse's parser."""
    if not argument.name:
        number = "*" if argument.many or argument.is_joined else "?"
        parser.add_argument(
            argument.attribute, nargs=number, type=argument.to, default=argument.default
        )
    elif not argument.value:
        parser.add_argument(argument.name, action="store_true")
    elif argument.many:
        parser.add_argument(argument.name, nargs="+", action="extend", default=[])
    else:
        names = (argument.name, *argument.also)
        parser.add_argument(*names, type=argument.to, default=argument.default)


def _options_and_code(command: Command, code: Argument, line: str) -> Options:
    """Return the options of a line such as ``--min 1MiB x = f(y)``, which ends with Python code.

    Args:
        command: the command.
        code: its argument that gets the code.
        line: the line after the command's name.
    """
    options = Options(**{item.attribute: item.default for item in command.arguments})
    if command.options:
        line = _set_options(command, options, line)
        if re.match(r"\s*--?[a-zA-Z]", line):
            usages = " or ".join(item.usage for item in command.options.values())
            hint = ", or put (...) around the statement" if code.missing else ""
            word = quoted(clean(line.split()[0]))
            raise UsageError(f"{command.name}: {word} is not an option; use {usages}{hint}")
    setattr(options, code.attribute, line.strip())
    return options


def _set_options(command: Command, options: Options, line: str) -> str:
    """Set the options at the start of a line, and return the line without them."""
    names = "|".join(command.options)
    option = re.compile(rf"""\s*(?P<name>{names})[\s=]*(?P<value>'[^']*'|"[^"]*"|\S+)(?:\s+|$)""")
    while match := option.match(line):
        argument = command.options[match["name"]]
        value = match["value"]
        line = line[match.end() :]
        if value[0] in "'\"":
            value = value[1:-1]
        try:
            setattr(options, argument.attribute, argument.to(value))
        except WrongValue as error:
            problem = f"{argument.name} {ellipsize(value)}: {error}"
            raise UsageError(clean(f"{command.name}: {problem}")) from None
    return line

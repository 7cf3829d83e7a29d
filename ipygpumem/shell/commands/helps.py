"""Makes the help texts of magics, shown by ``?``, from their declarations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ipygpumem.shell.commands.declarations import Argument, Command, CommandGroup, CommandTable

_WIDTH = 116
"""Maximum length of a line."""
_INDENT = "    "
_WIDEST_COLUMN = 32
"""Maximum letters of a first column; a longer text has a line of its own."""


_BLOCK = "::"
"""Marks in a docstring that lines follow which keep their layout."""


def help_of(
    table: CommandTable, magic: str, words: Iterable[str] = (), columns: int = _WIDTH
) -> str:
    """Return the help text of a magic, or of the command that its first words name, as a
    docstring.
    """
    named = table.find(magic, words)
    if isinstance(named, CommandGroup):
        lines = _lines_of_group(table, named, columns)
    else:
        lines = _lines_of_command(named, columns)
    block = "\n".join(lines)
    summary = named.summary[:1].upper() + named.summary[1:]
    paragraphs = [f"{summary}.", _BLOCK, block]
    if named.details:
        paragraphs.append(named.details)
    return "\n\n".join(paragraphs) + "\n"


def help_asked_for(table: CommandTable, magic: str, line: str, columns: int | None) -> str:
    """Return the help text if a line asks for it, such as ``%gpumem help``, ``%gpumem help top``
    or ``%gpumem top -h``; empty for other lines.
    """
    *words, last = line.split() or [""]
    if words[:1] == ["help"]:
        words = [*words[1:], last]
        last = "--help"
    if last == "?" and not words:
        last = "help"
    if magic not in table.magics or last not in ("help", "--help", "-h"):
        return ""
    named = table.find(magic, words)
    if words != named.name.split()[1:]:  # more than the command's name: an argument
        return ""
    if last == "help" and isinstance(named, Command):  # may be a name of the user
        return ""
    return printed_help(table, magic, words, columns)


def printed_help(
    table: CommandTable, magic: str, words: Iterable[str] = (), columns: int | None = None
) -> str:
    """Return the help text of a magic or a command as it is printed; ``columns`` is the width of
    the terminal.
    """
    width = min(_WIDTH, columns or _WIDTH)
    docstring = help_of(table, magic, words, width)
    lines = docstring.replace(f"{_BLOCK}\n\n", "", 1).replace("``", "").splitlines()
    printed_lines = list[str]()
    for line in lines:
        is_prose = not line.startswith(" ")
        printed_lines += textwrap.wrap(line, width) if line and is_prose else [line]
    return "\n".join(printed_lines) + "\n"


def _lines_of_command(command: Command, columns: int) -> list[str]:
    """Return a command's usage, and a row for each of its arguments."""
    usages = [usage_of(item) for item in command.arguments if item.usage]
    start = f"{_INDENT}{command.name} "
    lines = _wrapped(usages, start, " " * len(start), columns)
    rows = [(item.usage, item.description.split()) for item in command.arguments if item.help]
    return [*lines, *_aligned(rows, columns)]


def _lines_of_group(table: CommandTable, group: CommandGroup, columns: int) -> list[str]:
    """Return a row for each command of a group, then one for each of their options."""
    rows = list[Row]()
    descriptions: dict[str, list[str]] = {}
    for command in _commands(table, group):
        usage = [command.name, *(usage_of(item) for item in command.positional)]
        option_usages = [usage_of(item) for item in command.options.values()]
        rows.append((" ".join(usage), [*command.summary.split(), *option_usages]))
        name = command.name.removeprefix(f"{group.name} ")
        for item in command.options.values():
            of_option = descriptions.setdefault(item.usage, [])
            _add_description(of_option, item.description, name)
    option_rows = [(usage, "; ".join(texts).split()) for usage, texts in descriptions.items()]
    return [*_aligned(rows, columns), "", *_aligned(option_rows, columns)]


def _add_description(descriptions: list[str], description: str, command: str) -> None:
    """Add the description that a command has of an option to the descriptions of this option,
    unless it is the first command's, which most commands share.
    """
    if not descriptions:
        descriptions.append(description)
    elif description != descriptions[0]:
        descriptions.append(f"of {command}: {description}")


def _commands(table: CommandTable, group: CommandGroup) -> Iterator[Command]:
    """Yield all commands of a group, including the commands of the groups inside it."""
    for name in group.names:
        named = group.load(name)
        if isinstance(named, CommandGroup):
            yield from _commands(table, named)
        else:
            yield table.with_further_options(named)


def usage_of(argument: Argument) -> str:
    """Return an argument as a usage line writes it, such as ``[--seed N]``: in brackets if it is
    optional.
    """
    if argument.missing:
        return argument.usage
    return f"[{argument.usage}]"


Row = tuple[str, list[str]]
"""The first column, and the pieces of the second: words, and usages that are not broken."""


def _aligned(rows: Iterable[Row], columns: int) -> list[str]:
    """Return the lines of a table with two columns, none longer than ``columns`` characters."""
    rows = list(rows)
    widths = [len(first) for first, _ in rows if len(first) <= _WIDEST_COLUMN]
    width = max(widths, default=0)
    indent = " " * (len(_INDENT) + width + 2)
    lines = list[str]()
    for first, pieces in rows:
        if len(first) > width:
            lines += [f"{_INDENT}{first}", *_wrapped(pieces, indent, indent, columns)]
        else:
            lines += _wrapped(pieces, f"{_INDENT}{first:{width}}  ", indent, columns)
    return lines


def _wrapped(pieces: list[str], start: str, indent: str, columns: int) -> list[str]:
    """Return pieces, separated by blanks, in lines of at most ``columns`` characters: the first
    line begins with ``start``, further ones with ``indent``.
    """
    lines = list[str]()
    line = start
    is_empty = True
    for piece in pieces:
        if not is_empty and len(line) + 1 + len(piece) > columns:
            lines.append(line)
            line = indent
            is_empty = True
        if not is_empty:
            line += " "
        line += piece
        is_empty = False
    return [*lines, line.rstrip()]

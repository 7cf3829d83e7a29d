"""Writes a magic's help, which ``?`` shows, from the registry."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from ipygpumem.notebook.registry import Argument, Command

_WIDTH = 112
_WIDEST_HEAD = 32
_NO_BREAK = "\xa0"


def help_of(command: Command) -> str:
    """Return a magic's docstring: what it does, how its line is written, and its commands or options."""
    if command.commands:
        rows = [_command_row(command.name, below) for below in command.commands]
    else:
        rows = [(argument.usage, argument.help) for argument in command.arguments if argument.help]
        usage = f"{command.name} {_usage(command.arguments)}"
        rows.insert(0, ("", usage))
    width = max(len(head) for head, _ in rows if len(head) <= _WIDEST_HEAD) + 2
    body = "\n".join(_row(head, text, width) for head, text in rows)
    parts = [command.help, "::", textwrap.indent(body, "    "), command.notes]
    return "\n\n".join(part for part in parts if part)


def _command_row(magic: str, command: Command) -> tuple[str, str]:
    """Return how a command is written, and what it does, with its options."""
    words = [item for item in command.arguments if not item.name and not item.choices]
    others = [item for item in command.arguments if item not in words]
    below = " | ".join(f"{item.name} {_usage(item.arguments)}".strip() for item in command.commands)
    head = " ".join(filter(None, (magic, command.name, _usage(words))))
    return head, " ".join(filter(None, (command.help, below, _usage(others))))


def _usage(arguments: Iterable[Argument]) -> str:
    usages = [item.usage if item.missing else f"[{item.usage}]" for item in arguments]
    return " ".join(usage.replace(" ", _NO_BREAK) for usage in usages)


def _row(head: str, text: str, width: int) -> str:
    """Return a head with its text beside it, wrapped; beside no head stands how the whole line is written."""
    inset = " " * (width if head else text.index(" ") + 1)
    lines = textwrap.wrap(text, _WIDTH - len(inset), break_long_words=False, break_on_hyphens=False)
    first = f"{head:<{width}}" if len(head) < width else f"{head}\n{inset}"
    return (first if head else "") + f"\n{inset}".join(lines).replace(_NO_BREAK, " ")

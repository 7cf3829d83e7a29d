"""Completes the lines of magics according to their declarations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from ipygpumem.shell.commands.declarations import Argument, Command, CommandGroup, CommandTable


def complete(
    table: CommandTable, app: Any, namespace: Container[str], magic: str, event: Any
) -> list[str]:
    """Return completions at the cursor in the line of a magic.

    Args:
        table: all magics.
        app: the services of the shell.
        namespace: the notebook's names.
        magic: the magic's name without ``%``.
        event: IPython's event, with the line and the text until the cursor.
    """
    line = event.text_until_cursor
    if line.split()[:1] != event.line.split()[:1]:  # the old API passes no cursor
        line = event.line
    words = line.split()
    begun_word = "" if line[-1:].isspace() else words.pop()
    if not words or words[0] in namespace:  # the magic's name is being typed, or a variable has it
        return []
    signs = "%%" if words.pop(0).startswith("%%") else "%"
    if signs + magic not in table.magics:
        return []
    named = table.find(signs + magic, words)
    words = words[named.name.count(" ") :]
    if isinstance(named, CommandGroup):
        return [] if words else named.names
    argument, needs_value = _argument_of_next_word(named, words)
    completions = _completions_of(argument, app, begun_word)
    if needs_value:
        return completions
    return [*completions, *named.options]


def _argument_of_next_word(command: Command, words: Iterable[str]) -> tuple[Argument | None, bool]:
    """Return the argument to which the word after ``words`` belongs, unless it is an option's name;
    and True if it must be that argument's value, as after ``--seed``.
    """
    options = command.options
    positional = command.positional
    option: Argument | None = None
    needs_value = False
    for word in words:
        if word in options:
            needs_value = options[word].value != ""
            option = options[word] if needs_value else None
        elif option is not None:
            needs_value = False
            if not option.many:
                option = None
        elif positional and not (positional[0].many or positional[0].is_joined):
            positional.pop(0)
    if option is None and positional:
        option = positional[0]
    return option, needs_value


def _completions_of(argument: Argument | None, app: Any, begun: str) -> list[str]:
    """Return the completions that an argument declares, of a word that begins with ``begun``."""
    if argument is None:
        return []
    if callable(argument.offers):
        return list(argument.offers(app, begun))
    return list(argument.offers)

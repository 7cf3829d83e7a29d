"""Completes the lines of magics according to their declarations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from ipygpumem.shell.commands.declarations import Argument, Command, CommandGroup, CommandTable


def complete(
    table: CommandTable, app: Any, namespace: Container[str], magic: str, event: Any
) -> list[str]:
    """Return completions at the cursor in the line of ``magic``, a name without ``%``."""
    line = event.text_until_cursor
    if line.split()[:1] != event.line.split()[:1]:  # the old API passes no cursor
        line = event.line
    words = line.split()
    begun = "" if line[-1:].isspace() else words.pop()
    if not words or words[0] in namespace:  # the magic's name is being typed, or a variable has it
        return []
    signs = "%%" if words.pop(0).startswith("%%") else "%"
    if signs + magic not in table.magics:
        return []
    place = table.find(signs + magic, words)
    words = words[place.name.count(" ") :]
    if isinstance(place, CommandGroup):
        return [] if words else place.names
    argument, needs_value = _argument_at_end(place, words)
    offered = _offered(argument, app, begun)
    if needs_value:
        return offered
    return [*offered, *place.options]


def _argument_at_end(command: Command, words: Iterable[str]) -> tuple[Argument | None, bool]:
    """Return the argument to which a next word would belong, and whether it must be its value."""
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


def _offered(argument: Argument | None, app: Any, begun: str) -> list[str]:
    """Return the completions that an argument declares."""
    if argument is None:
        return []
    if callable(argument.offers):
        return list(argument.offers(app, begun))
    return list(argument.offers)

"""Completes the lines of magics according to their declarations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

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
    words_of_name = named.name.count(" ")  # without the magic itself
    words = words[words_of_name:]
    if isinstance(named, CommandGroup):
        return [] if words else named.names
    next_word = _next_word(named, words)
    completions = _completions_of(next_word.argument, app, begun_word)
    if next_word.must_be_value:
        return completions
    return [*completions, *named.options]


class _NextWord(NamedTuple):
    """The possible meaning of the next word of a line, apart from the name of an option."""

    argument: Argument | None
    """The argument to which the word belongs; None if the command takes no further one."""
    must_be_value: bool
    """True if it cannot be the name of an option, as after ``--seed``."""


def _next_word(command: Command, words: Iterable[str]) -> _NextWord:
    """Return the possible meaning of the word after ``words``, which follow the command's name."""
    options = command.options
    positional = command.positional
    open_option: Argument | None = None
    """The last option, as long as it takes words: after ``--keep``, any number."""
    must_be_value = False
    for word in words:
        if word in options:
            must_be_value = options[word].value != ""
            open_option = options[word] if must_be_value else None
        elif open_option is not None:
            must_be_value = False
            if not open_option.many:
                open_option = None
        elif positional:
            takes_further_words = positional[0].many or positional[0].is_joined
            if not takes_further_words:
                positional.pop(0)
    if open_option is None and positional:
        return _NextWord(positional[0], must_be_value)
    return _NextWord(open_option, must_be_value)


def _completions_of(argument: Argument | None, app: Any, begun: str) -> list[str]:
    """Return the completions that an argument declares, of a word that begins with ``begun``."""
    if argument is None:
        return []
    if callable(argument.offers):
        return list(argument.offers(app, begun))
    return list(argument.offers)

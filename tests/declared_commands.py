"""All commands that are declared."""

from __future__ import annotations

from collections.abc import Iterator

from ipygpumem.features import all_features
from ipygpumem.shell.commands.declarations import Command, CommandGroup

TABLE = all_features().commands


def all_commands() -> Iterator[Command]:
    """Yield every command that is declared, with the options of optional features."""
    for magic in TABLE.magics:
        yield from commands_in(TABLE.find(magic))


def commands_in(place: Command | CommandGroup) -> Iterator[Command]:
    if isinstance(place, Command):
        yield TABLE.with_further_options(place)
        return
    for name in place.names:
        member = place.load(name)
        assert member.name == f"{place.name} {name}"  # the table and the declaration agree
        yield from commands_in(member)

"""The commands and parts that the rooms above bring: see ``ipygpumem/features.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import NotLoadedError
from ipygpumem.shell.commands.declarations import CommandTable

if TYPE_CHECKING:
    from ipygpumem.shell.context import ShellContext  # needed from the first cell on


def _no_recorder(context: ShellContext) -> Any:
    raise NotLoadedError("there is no flight recorder here")


@dataclass(frozen=True)
class Features:
    """Commands and parts of the rooms above."""

    commands: CommandTable = field(default_factory=CommandTable)
    recorder: Callable[[ShellContext], Any] = _no_recorder
    """Makes the flight recorder."""

"""Declares commands: the name, arguments, help and completions stand above the function that runs.

::

    @command(
        "%gpumem top",
        "list the names that hold the most memory, of any kind",
        argument("names", "NAME", "only these names, or globs such as 'x*'", many=True),
        option("--min", "SIZE", "only names that hold at least this much", to=byte_size()),
        option("-n", "N", "number of rows", to=at_least_one, default=20),
    )
    def top(app: App, options: Options) -> list[Report]: ...

Parsing, ``?``, Tab and the errors of one line all read these declarations. A ``CommandGroup`` has
the commands below one word, and a ``Magic`` is what IPython knows: both import the declarations
when they are used for the first time, so that loading the extension stays fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ipygpumem.errors import NotLoadedError, UnitError, quoted
from ipygpumem.units import checked_bytes, checked_integer, checked_number, number_in

if TYPE_CHECKING:
    from ipygpumem.report.layout import Report  # the first command imports it
    from ipygpumem.shell.context import ShellContext  # needed from the first cell on

Options = argparse.Namespace
"""The words and options of a line, each as an attribute."""

Run = Callable[..., "list[Report]"]
"""Function of a command; it takes the ``App``, the options and, for a cell magic, the cell."""

Offers = Callable[[Any, str], Iterable[str]]
"""Function that returns completions from the ``App`` and the beginning of the word."""


class WrongValue(argparse.ArgumentTypeError):
    """A value that an argument does not accept; argparse adds the argument's name."""


@dataclass(frozen=True, eq=False)
class Argument:
    """An argument of a command: made by ``argument``, ``option`` or ``switch``."""

    attribute: str
    """Attribute of the options that gets the value."""
    name: str = ""
    """``--seed``; empty for a positional argument."""
    value: str = ""
    """Word for the value in help texts, such as ``SIZE``; empty for a switch."""
    help: str = ""
    to: Callable[[str], object] = str
    """Converts the text; raises ``WrongValue``."""
    default: object = None
    choices: tuple[str, ...] = ()
    """The only values that it accepts; empty if there is no such list."""
    offers: Offers | tuple[str, ...] = ()
    """Completions."""
    also: tuple[str, ...] = ()
    """Alternative names, which Tab does not offer."""
    many: bool = False
    """True for a list of words."""
    is_joined: bool = False
    """True if all words are one text: the function names the words that should not be there."""
    is_code: bool = False
    """True if it is the rest of the line, with its quotes and blanks."""
    missing: str = ""
    """Question to ask if a required argument is missing; empty for an optional one."""
    run: Run | None = None
    """Function that runs instead of the command's own if this option is given.

    It takes a ``Call``, because it may send the line to another process.
    """

    @property
    def usage(self) -> str:
        """The argument as help texts write it, such as ``--keep NAME...``."""
        value = f"{self.value}..." if self.many else self.value
        return f"{self.name} {value}".strip()

    @property
    def description(self) -> str:
        """Its help with the default value."""
        if self.default is None or self.default is False or self.default == "":
            return self.help
        return f"{self.help} ({self.default})"


def argument(
    attribute: str,
    value: str,
    help: str = "",  # noqa: A002  # as in argparse
    *,
    default: object = None,
    choices: tuple[str, ...] = (),
    offers: Offers | tuple[str, ...] = (),
    many: bool = False,
    is_joined: bool = False,
    is_code: bool = False,
    missing: str = "",
) -> Argument:
    """Declare a positional argument; it is required if ``missing`` has a question."""
    return Argument(
        attribute,
        value=value or "|".join(choices),
        help=help,
        to=one_of(*choices) if choices else str,
        default=default,
        choices=choices,
        offers=offers or choices,
        many=many,
        is_joined=is_joined,
        is_code=is_code,
        missing=missing,
    )


def option(
    name: str,
    value: str,
    help: str,  # noqa: A002  # as in argparse
    *,
    to: Callable[[str], object] = str,
    default: object = None,
    choices: tuple[str, ...] = (),
    offers: Offers | tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    many: bool = False,
    run: Run | None = None,
) -> Argument:
    """Declare an option with a value, such as ``--seed N`` or ``--report full|none``."""
    return Argument(
        _attribute_of(name),
        name,
        value or "|".join(choices),
        help,
        to=one_of(*choices) if choices and to is str else to,
        default=default,
        choices=choices,
        offers=offers or choices,
        also=also,
        many=many,
        run=run,
    )


def switch(name: str, help: str) -> Argument:  # noqa: A002  # as in argparse
    """Declare an option without a value, such as ``--force``."""
    return Argument(_attribute_of(name), name, help=help, default=False)


def _attribute_of(name: str) -> str:
    """Return ``drop_imports`` for ``--drop-imports``."""
    return name.lstrip("-").replace("-", "_")


# -- values ----------------------------------------------------------------------------------------


def _converter(check: Callable[..., object], **bounds: int) -> Callable[[str], object]:
    """Return a converter for ``Argument.to``.

    Args:
        check: converts and checks a text, as for Python functions and the configuration.
        bounds: further arguments of ``check``.
    """

    def convert(text: str) -> object:
        try:
            return check(text, **bounds)
        except UnitError as error:
            raise WrongValue(str(error)) from None

    return convert


def byte_size(minimum: int = 0) -> Callable[[str], object]:
    """Return a converter of sizes such as ``8GiB`` to bytes; fewer than ``minimum`` are an
    error.
    """
    return _converter(checked_bytes, minimum=minimum)


def integer(minimum: int = 1, maximum: int | None = None) -> Callable[[str], object]:
    """Return a converter of whole numbers within bounds."""
    bounds = {"minimum": minimum}
    if maximum is not None:
        bounds["maximum"] = maximum
    return _converter(lambda text, **limits: checked_integer(number_in(text), **limits), **bounds)


at_least_one = integer()
"""Converter of whole numbers from 1 on."""


duration = _converter(lambda text: checked_number(number_in(text)))
"""Converter of durations."""


def one_of(*choices: str) -> Callable[[str], object]:
    """Return a converter that accepts only the words given, such as ``full`` and ``none``."""

    def choose(text: str) -> object:
        if text not in choices:
            hint = f"{did_you_mean(text, choices)}; use {', '.join(choices)}"
            raise WrongValue(f"invalid choice: {quoted(text)}{hint}")
        return text

    return choose


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a suggestion such as `` (did you mean top?)``, of the word most similar to an unknown
    one; empty if none is similar.
    """
    import difflib  # takes long

    similar = difflib.get_close_matches(word[:40].lower(), words, 1)
    return f" (did you mean {similar[0]}?)" if similar else ""


# -- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Command:
    """A command: a magic such as ``%%peak``, or one of a magic's such as ``%gpumem top``."""

    name: str
    """The words that users write, such as ``%gpumem top``."""
    summary: str
    arguments: tuple[Argument, ...]
    run: Run
    details: str = ""
    """Further paragraphs of a magic's help."""

    def __call__(self, app: Any, options: Options, *cell: str) -> list[Report]:
        """Run the command's function."""
        return self.run(app, options, *cell)

    @property
    def options(self) -> dict[str, Argument]:
        """The arguments that have a name, by name."""
        return {item.name: item for item in self.arguments if item.name}

    @property
    def code(self) -> Argument | None:
        """The argument that takes the end of the line as Python code, such as ``x = f(y)``; None if
        the command has none.
        """
        return next((item for item in self.arguments if item.is_code), None)

    @property
    def positional(self) -> list[Argument]:
        """The arguments without a name."""
        return [item for item in self.arguments if not item.name]


def command(
    name: str, summary: str, *arguments: Argument, details: str = ""
) -> Callable[[Run], Command]:
    """Declare the decorated function as a command.

    Args:
        name: the words that users write, such as ``%gpumem top``.
        summary: a phrase that begins with a verb, for its help.
        arguments: its arguments and options.
        details: further paragraphs of a magic's help.
    """

    def declare(run: Run) -> Command:
        return Command(name, summary, arguments, run, details)

    return declare


@dataclass(frozen=True)
class CommandModule:
    """The commands of a group that one module declares; it is imported when one is used."""

    names: tuple[str, ...]
    load: Callable[[], tuple[Command | CommandGroup, ...]]
    """Imports the module and returns the commands, in the order of ``names``."""


@dataclass(frozen=True)
class CommandGroup:
    """Commands below one word, such as ``%gpumem`` or ``%gpumem recorder``."""

    name: str
    summary: str
    modules: tuple[CommandModule, ...]
    alone: Callable[[], Command] | None = None
    """Imports the command that runs if no other word follows."""
    details: str = ""

    @property
    def names(self) -> list[str]:
        """The words that may follow the group's name."""
        names = list[str]()
        for module in self.modules:
            names += module.names
        return names

    def load(self, name: str) -> Command | CommandGroup:
        """Return the command with one of the ``names``; only its module is imported."""
        module = next(module for module in self.modules if name in module.names)
        return module.load()[module.names.index(name)]


@dataclass(frozen=True)
class Magic:
    """A magic as IPython knows it."""

    name: str
    """With its signs, such as ``%%peak``."""
    load: Callable[[], Command | CommandGroup]
    """Imports and returns the declaration."""
    runs_line: bool = False
    """True if the rest of the line is Python code."""


@dataclass(frozen=True)
class Call:
    """A parsed line, for an option with its own ``run``."""

    command: Command
    line: str
    options: Options
    cell: tuple[str, ...] = ()
    """The cell of a cell magic, else empty."""


class CommandTable:
    """All magics, with the options that optional features add to commands of the core.

    Args:
        magics: the magics.
        further_options: functions that return the options of optional features, by command.
    """

    def __init__(
        self,
        magics: Iterable[Magic] = (),
        further_options: Mapping[str, Callable[[], tuple[Argument, ...]]] | None = None,
    ) -> None:
        self.magics = {magic.name: magic for magic in magics}
        self._further_options = further_options or {}
        self._loaded: dict[str, Command | CommandGroup] = {}
        """Declarations of magics that have been used."""
        self._extended: dict[str, Command] = {}
        """The commands that have further options, with these, by name."""

    @property
    def names(self) -> list[str]:
        """The names of the magics, without ``%``, each once."""
        return list(dict.fromkeys(name.lstrip("%") for name in self.magics))

    def find(self, magic: str, words: Iterable[str] = ()) -> Command | CommandGroup:
        """Return the command that a magic's first words name, or the group of commands if they name
        none: for ``%gpumem``, ``top x`` names ``%gpumem top``.
        """
        if magic not in self._loaded:
            self._loaded[magic] = self.magics[magic].load()
        named = self._loaded[magic]
        for word in words:
            if not isinstance(named, CommandGroup) or word not in named.names:
                break
            named = named.load(word)
        if isinstance(named, Command):
            return self.with_further_options(named)
        return named

    def with_further_options(self, command: Command) -> Command:
        """Return a command with the options that optional features add."""
        if command.name not in self._further_options:
            return command
        if command.name not in self._extended:
            arguments = (*command.arguments, *self._further_options[command.name]())
            self._extended[command.name] = replace(command, arguments=arguments)
        return self._extended[command.name]


# -- the rooms above -------------------------------------------------------------------------------


def _no_recorder(context: ShellContext) -> Any:
    """Raise the error of a shell without a flight recorder."""
    raise NotLoadedError("there is no flight recorder here")


@dataclass(frozen=True)
class Features:
    """The commands of ``magics/`` and ``extras/``, and the flight recorder, which the shell starts.

    ``ipygpumem/features.py`` makes one, because the shell imports neither room.
    """

    commands: CommandTable = field(default_factory=CommandTable)
    recorder: Callable[[ShellContext], Any] = _no_recorder
    """Makes the flight recorder."""

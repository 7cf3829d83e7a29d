"""What Tab offers after our magics, however a front-end asks, and that it never fails."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.notebook.commands import parsing
from ipygpumem.notebook.commands.completion import SOURCES, complete
from ipygpumem.notebook.notebook import notebook_of
from ipygpumem.notebook.registry import MAGICS, Argument, Command
from ipygpumem.objects.inventory import records
from ipygpumem.reports import profiling

NAMES = [magic.name for magic in MAGICS]
LINES = ("", " ", "  ", " x", " -", " --", " on ", " end ", " start", " start a ", " plot", "\t")


def commands_in(command: Command) -> Iterator[Command]:
    """Yield a command and all below it."""
    yield command
    for below in command.commands:
        yield from commands_in(below)


@pytest.fixture
def loaded(shell: InteractiveShell) -> InteractiveShell:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.Completer.use_jedi = False  # its trees would stay: as many objects as all the rest of the process
    return shell


def offered(shell: Any, line: str, until: int | None = None) -> set[str]:
    """Return what is offered for a line and a cursor in it, as kernels ask and as terminals do."""
    place = len(line) if until is None else until
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the newer way is called provisional
        newer = {item.text for item in shell.Completer.completions(line, place)}
    _, older = shell.complete(None, line, place)
    return newer | set(older)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", ["", "%", "%%"])
def test_tab_never_fails(loaded: InteractiveShell, prefix: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    completers = loaded.strdispatchers["complete_command"]
    assert list(completers.s_matches(f"%{name}"))
    for rest in LINES:
        offered(loaded, f"{prefix}{name}{rest}")
        offered(loaded, f"{prefix}{name}{rest}\nx = 1", len(f"{prefix}{name}{rest}"))
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "Error" not in shown.out + shown.err


def test_only_what_stands_before_the_cursor_counts(loaded: InteractiveShell) -> None:
    line = "%gpumem plot --device  --save x.png"
    assert "RAM" in offered(loaded, line, len("%gpumem plot --device "))


def test_the_old_way_of_asking_has_no_cursor(loaded: InteractiveShell) -> None:
    assert loaded.complete("st", "%gpumem st")[1] == ["status"]
    assert "devices" in loaded.complete("", "%gpumem plot ")[1]


def test_a_variable_named_as_a_magic_is_no_magic(loaded: InteractiveShell) -> None:
    loaded.run_cell("estimate = 5; experiment = 6")
    for line in ("estimate --", "experiment st"):
        assert not {"--device", "start"} & offered(loaded, line)


def test_commands_options_and_names_are_offered(loaded: InteractiveShell) -> None:
    notebook = notebook_of(loaded)

    def after(line: str) -> list[str]:
        (magic,) = [magic for magic in MAGICS if magic.name == line.split()[0].strip("%")]
        return complete(notebook, magic, SimpleNamespace(line=line, text_until_cursor=line))

    loaded.run_cell("%experiment start alpha\nweights = 1; _hidden = 2")
    assert after("%experiment ") == ["start", "end", "keep", "status", "list", "compare"]
    assert after("%experiment st") == ["start", "end", "keep", "status", "list", "compare"]
    assert "--seed" in after("%experiment start run --")
    assert "--keep" in after("%%experiment run --k")
    assert after("%%experiment run --report ") == ["full", "compact", "none"]
    assert "weights" in after("%experiment keep ")
    assert after("%experiment end ") == ["alpha", "--on"]
    assert after("%experiment end --on ") == ["all"]
    assert "_hidden" not in after("%%experiment b --keep ")
    assert {"on", "off", "status", "tensors", "history", "export"} <= set(after("%gpumem "))
    assert after("%gpumem on ") == []
    assert after("%gpumem record ") == ["on", "off", "status"]
    assert after("%gpumem record on ") == []
    assert after("%gpumem plot devices --") == ["--device", "-n", "--save", "--force"]
    assert after("%gpumem plot --force ") == [*after("%gpumem plot ")]


def test_the_registry_is_true() -> None:
    """What it names is there: functions, types, words to offer; and what it offers is what can be asked for."""
    for magic in MAGICS:
        for root in filter(None, (magic.line, magic.cell)):
            for command in commands_in(root):
                assert command.help
                if not command.commands:
                    module, _, function = command.run.partition(".")
                    found = importlib.import_module(f"ipygpumem.notebook.commands.{module}")
                    assert callable(getattr(found, function)), command
                for argument in command.arguments:
                    assert argument.type in {"text", "line", *parsing.TYPES}, argument
                    assert isinstance(argument.offers, tuple) or argument.offers in SOURCES, argument
    choices = {item.name: item.choices for item in of("%gpumem tensors") + of("%%memlines")}
    assert choices["--by"] == records.GROUPS
    assert choices["--kind"] == tuple(kind.removesuffix(" state") for kind in records.KINDS)
    assert choices["--sort"] == profiling.ORDERS


def of(prog: str) -> tuple[Argument, ...]:
    """Return what a command takes."""
    name, *below = prog.split()
    command = next(root for magic in MAGICS for root in (magic.line, magic.cell) if root and root.name == name)
    for word in below:
        command = next(item for item in command.commands if item.name == word)
    return command.arguments


@pytest.mark.parametrize("name", NAMES)
def test_help_tells_every_command_and_option(loaded: InteractiveShell, name: str) -> None:
    for magic in (magic for magic in MAGICS if magic.name == name):
        for kind in magic.kinds:
            text = loaded.magics_manager.magics[kind][name].__doc__
            root = magic.line if kind == "line" and magic.line else magic.cell
            assert root is not None
            assert text.startswith(root.help)
            assert max(map(len, text.splitlines())) <= 120
            for command in commands_in(root):
                assert command.name in text
                assert all(item.usage in text for item in command.arguments), command

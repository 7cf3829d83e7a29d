"""The rules by which pages of shared notebooks keep or drop HTML, as data.

GitHub: the allowlist of html-pipeline (gjtorikian/html-pipeline,
lib/html_pipeline/sanitization_filter.rb, ``DEFAULT_CONFIG``), which GitHub published. It drops
``style`` and ``class`` and keeps the text of elements that it drops. How github.com shows notebooks
today is not published.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser

GITHUB_ELEMENTS = frozenset(
    [
        "a",
        "abbr",
        "b",
        "bdo",
        "blockquote",
        "br",
        "caption",
        "cite",
        "code",
        "dd",
        "del",
        "details",
        "dfn",
        "div",
        "dl",
        "dt",
        "em",
        "figcaption",
        "figure",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
        "i",
        "img",
        "ins",
        "kbd",
        "li",
        "mark",
        "ol",
        "p",
        "pre",
        "q",
        "rp",
        "rt",
        "ruby",
        "s",
        "samp",
        "small",
        "span",
        "strike",
        "strong",
        "sub",
        "summary",
        "sup",
        "table",
        "tbody",
        "td",
        "tfoot",
        "th",
        "thead",
        "time",
        "tr",
        "tt",
        "ul",
        "var",
        "wbr",
    ]
)
GITHUB_ATTRIBUTES = frozenset(
    [
        "abbr",
        "accept",
        "accept-charset",
        "accesskey",
        "action",
        "align",
        "alt",
        "aria-describedby",
        "aria-hidden",
        "aria-label",
        "aria-labelledby",
        "axis",
        "border",
        "cellpadding",
        "cellspacing",
        "char",
        "charoff",
        "charset",
        "checked",
        "clear",
        "color",
        "cols",
        "colspan",
        "compact",
        "coords",
        "datetime",
        "dir",
        "disabled",
        "enctype",
        "for",
        "frame",
        "headers",
        "height",
        "hreflang",
        "hspace",
        "id",
        "ismap",
        "itemprop",
        "label",
        "lang",
        "maxlength",
        "media",
        "method",
        "multiple",
        "name",
        "nohref",
        "noshade",
        "nowrap",
        "open",
        "progress",
        "prompt",
        "readonly",
        "rel",
        "rev",
        "role",
        "rows",
        "rowspan",
        "rules",
        "scope",
        "selected",
        "shape",
        "size",
        "span",
        "start",
        "summary",
        "tabindex",
        "title",
        "type",
        "usemap",
        "valign",
        "value",
        "width",
    ]
)
"""Attributes of all elements. Those of links, images and quotations are not among them: reports
have none.
"""
BLOCKS = frozenset(
    ["details", "div", "li", "p", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"]
)
"""Elements that a browser sets apart from the text around them without any style."""


class Sanitized(HTMLParser):
    """A page without the elements and attributes that are not allowed."""

    def __init__(self, page: str, elements: frozenset[str], attributes: frozenset[str]) -> None:
        super().__init__()
        self._elements = elements
        self._attributes = attributes
        self.page = ""
        self.words = ""
        """The text as a browser shows it without styles: blocks stand apart."""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self.words += "\n"
        if tag not in self._elements:
            return
        kept = [(name, value) for name, value in attributes if name in self._attributes]
        texts = [f" {name}={json.dumps(value or '')}" for name, value in kept]
        self.page += f"<{tag}{''.join(texts)}>"

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self.words += "\n"
        if tag in self._elements:
            self.page += f"</{tag}>"

    def handle_data(self, data: str) -> None:
        self.page += data
        self.words += data

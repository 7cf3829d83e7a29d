"""Bars and sparklines: what they show, and that nothing breaks them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.model import Usage
from ipygpumem.reports.bars import Bar, bar_of, html_bar, html_spark, text_bar, text_spark
from ipygpumem.units import GIB

SIZES = st.integers(-(2**50), 2**50)
BAR = Bar("cuda:0: half", 16, 6, 4, 2)


def cuda(before: int, after: int, peak: int, reserved: int, used: int) -> Usage:
    sizes = (before * GIB, after * GIB, peak * GIB)
    return Usage("cuda:0", *sizes, 80 * GIB, "allocator", reserved_bytes=reserved * GIB, used_bytes=used * GIB)


def gib(bar: Bar | None) -> tuple[int, ...]:
    assert bar is not None
    return tuple(size // GIB for size in (bar.used_bytes, bar.kept_bytes, bar.peak_bytes))


def test_in_use_kept_peak_and_free_have_their_own_characters() -> None:
    assert text_bar(BAR) == "▕▒▒▒██░  ▏"
    assert text_bar(BAR, ascii_only=True) == "[===##-  ]"
    assert text_bar(BAR, cells=16) == "▕▒▒▒▒▒▒████░░    ▏"


def test_colours_change_no_character() -> None:
    coloured = text_bar(BAR, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == text_bar(BAR)


def test_the_least_use_is_one_character_and_an_empty_device_none() -> None:
    assert text_bar(Bar("", 1000, 1)) == "▕▒       ▏"
    assert text_bar(Bar("", 1000, 1, 2)) == "▕█       ▏"
    assert text_bar(Bar("", 1000, 0)) == "▕        ▏"


def test_a_usage_becomes_what_the_whole_device_has_in_use_at_the_peak() -> None:
    # 5 GiB are others', 30 reserved, of which 10 were in use before, 12 after and 25 at the peak
    assert gib(bar_of("cuda:0", cuda(10, 12, 25, 30, 35))) == (20, 2, 13)
    # the cache was given back within the cell
    assert gib(bar_of("cuda:0", cuda(10, 12, 25, 12, 17))) == (15, 2, 13)
    # memory that was freed lies between what is left and the peak
    assert gib(bar_of("cuda:0", cuda(10, 2, 11, 2, 7))) == (7, 0, 9)


def test_without_the_devices_use_the_processs_own_is_shown_and_without_a_total_nothing() -> None:
    assert gib(bar_of("RAM", Usage("cpu", 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB, "kernel"))) == (2, 1, 1)
    assert bar_of("RAM", Usage("cpu", 2, 3, 4, None, "kernel")) is None
    assert bar_of("RAM", Usage("cpu", 2, 3, 4, 0, "kernel")) is None


def test_the_label_says_what_the_bar_shows() -> None:
    bar = bar_of("RAM", Usage("cpu", 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB, "kernel"))
    assert bar is not None
    assert bar.label == "RAM: 3.00 GiB of 8.00 GiB in use"
    assert f'aria-label="{bar.label}"' in html_bar(bar)


@given(st.integers(1, 2**50), SIZES, SIZES, SIZES, st.integers(1, 40))
def test_a_bar_is_never_longer_than_its_cells(total: int, used: int, kept: int, peak: int, cells: int) -> None:
    bar = Bar("", total, used, kept, peak)
    assert sum(bar.pieces) <= total
    assert len(text_bar(bar, cells=cells)) == cells + 2
    assert sum(map(float, re.findall(r" width: ([\d.]+)%", html_bar(bar)))) <= 100.2


def test_a_sparkline_has_one_column_for_each_value() -> None:
    assert text_spark([0, 4, 8, 99, -1], 8) == "▁▅██▁"
    assert text_spark([0, 8], 8, ascii_only=True) == "_@"
    assert text_spark([1, 2], 0) == "▁▁"
    assert html_spark([0, 4, 8], 8, "x").count("width: 3px") == 3


@pytest.mark.parametrize("drawn", [html_bar(Bar('"><b>&', 2, 1)), html_spark([1], 1, '"><b>&')])
def test_a_label_is_escaped_and_the_html_balanced(drawn: str) -> None:
    opened: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attributes: object) -> None:
            opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            opened.append(f"/{tag}")

    Parser().feed(drawn)
    assert set(opened) == {"span", "/span"}
    assert opened.count("span") == opened.count("/span")

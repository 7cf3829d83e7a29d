"""Bars and sparklines: what they show, and that nothing breaks them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.model import Usage
from ipygpumem.reports.bars import BAR_COLUMNS, Scales, curve_of, html_bar, html_spark, text_bar, text_spark
from ipygpumem.reports.layout import Bar, Curve
from ipygpumem.reports.text import ASCII
from ipygpumem.units import GIB, MIB

SIZES = st.integers(-(2**50), 2**50)
BAR = Bar("cuda:0: half", 16, 6, 4, 2)


def cuda(before: int, after: int, peak: int, reserved: int, used: int) -> Usage:
    sizes = (before * GIB, after * GIB, peak * GIB)
    return Usage("cuda:0", *sizes, 80 * GIB, "allocator", reserved_bytes=reserved * GIB, used_bytes=used * GIB)


def ram(before: int, after: int, peak: int, total: int = 64 * GIB) -> Usage:
    return Usage("cpu", before * MIB, after * MIB, peak * MIB, total, "kernel")


def gib(bar: Bar | None) -> tuple[int, ...]:
    assert bar is not None
    return tuple(size // GIB for size in (bar.used_bytes, bar.kept_bytes, bar.peak_bytes))


def test_in_use_kept_peak_and_free_have_their_own_characters() -> None:
    assert text_bar(BAR) == "▕▒▒▒██░  ┃"
    assert text_bar(BAR).translate(ASCII) == "[===##-  |"


def test_colours_change_no_character() -> None:
    coloured = text_bar(BAR, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == text_bar(BAR)


def test_a_piece_of_one_percent_is_one_character_and_a_smaller_one_is_none() -> None:
    assert text_bar(Bar("", 1000, 9)) == text_bar(Bar("", 1000, 0)) == "▕        ┃"
    assert text_bar(Bar("", 1000, 10)) == "▕▒       ┃"
    assert text_bar(Bar("", 1000, 500, 10, 9)) == "▕▒▒▒▒█   ┃"
    assert text_bar(Bar("", 1000, 980, 10, 10)) == "▕▒▒▒▒▒▒█░┃"
    assert html_bar(Bar("", 1000, 500, 9, 9)).count("min-width") == 1


def test_a_bar_is_as_long_as_the_sessions_highest_use_rounded_up() -> None:
    scales = Scales()
    change = ram(1000, 1080, 1080)
    bar = scales.bar("RAM", change)
    assert bar is not None
    assert (bar.length_bytes, bar.is_whole) == (1536 * MIB, False)
    assert bar.label == "RAM: 1.05 GiB of 64.00 GiB in use; the bar ends at 1.50 GiB"
    scales.note([ram(1000, 1000, 3900)])
    bar = scales.bar("RAM", change)
    assert bar is not None
    assert bar.length_bytes == 4 * GIB
    scales.note([ram(0, 0, 4090)])  # so near to 4 GiB that the bar would look full
    bar = scales.bar("RAM", change)
    assert bar is not None
    assert bar.length_bytes == 6 * GIB
    scales.note([ram(0, 0, 8000)])
    assert scales.bar("RAM", change) is None  # 80 MiB are below 1 % of 12 GiB
    scales.note([Usage("cuda:0", 0, 0, GIB, 8 * GIB, "allocator")])
    assert scales.bar("RAM", ram(1000, 1150, 1150)) is not None


def test_a_change_is_seen_beside_a_large_total() -> None:
    bar = Scales().bar("RAM", ram(400, 464, 464, 1024 * GIB))
    assert bar is not None
    assert text_bar(bar) == "▕▒▒▒▒▒▒█ ▏"


def test_a_tick_is_at_the_end_of_a_bar_that_ends_at_the_devices_total() -> None:
    scales = Scales()
    small, large = scales.bar("RAM", ram(100, 200, 200)), scales.bar("RAM", ram(100, 200, 50 * 1024))
    assert small is not None
    assert large is not None
    assert (small.is_whole, large.is_whole) == (False, True)
    assert large.length_bytes == 64 * GIB
    assert text_bar(large).endswith("┃")
    assert "border-right" in html_bar(large)
    assert "border-right" not in html_bar(small)
    assert "ends at" not in large.label


def test_a_change_below_one_percent_of_the_length_draws_no_bar() -> None:
    assert Scales().bar("RAM", ram(900, 905, 905)) is None
    assert Scales().bar("RAM", ram(900, 905, 920)) is not None
    assert Scales().bar("RAM", ram(905, 890, 905)) is not None  # given back


def test_a_usage_becomes_what_the_whole_device_has_in_use_at_the_peak() -> None:
    scales = Scales()
    # 5 GiB are others', 30 reserved, of which 10 were in use before, 12 after and 25 at the peak
    assert gib(scales.bar("cuda:0", cuda(10, 12, 25, 30, 35))) == (20, 2, 13)
    # the cache was given back within the cell
    assert gib(scales.bar("cuda:0", cuda(10, 12, 25, 12, 17))) == (15, 2, 13)
    # memory that was freed lies between what is left and the peak
    assert gib(scales.bar("cuda:0", cuda(10, 2, 11, 2, 7))) == (7, 0, 9)


def test_without_the_devices_use_the_processs_own_is_shown_and_without_a_total_nothing() -> None:
    assert gib(Scales().bar("RAM", Usage("cpu", 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB, "kernel"))) == (2, 1, 1)
    assert Scales().bar("RAM", Usage("cpu", 2, 3, 4, None, "kernel")) is None
    assert Scales().bar("RAM", Usage("cpu", 2, 3, 4, 0, "kernel")) is None


def test_the_label_says_what_the_bar_shows() -> None:
    bar = Scales().bar("RAM", Usage("cpu", 2 * GIB, 3 * GIB, 6 * GIB, 8 * GIB, "kernel"))
    assert bar is not None
    assert bar.label == "RAM: 3.00 GiB of 8.00 GiB in use"
    assert f'aria-label="{bar.label}"' in html_bar(bar)


@given(SIZES, SIZES, SIZES, st.integers(1, 2**50))
def test_whatever_happened_a_bar_holds_the_peak_and_is_not_longer_than_the_device(
    before: int, after: int, peak: int, total: int
) -> None:
    bar = Scales().bar("x", Usage("x", before, after, peak, total, "kernel"))
    if bar is not None:
        assert bar.length_bytes <= total
        assert max(bar.pieces[1:]) * 100 >= bar.length_bytes or bar.is_whole
        assert len(text_bar(bar)) == 10


@given(st.integers(1, 2**50), SIZES, SIZES, SIZES)
def test_a_bar_is_never_longer_than_its_cells(total: int, used: int, kept: int, peak: int) -> None:
    bar = Bar("", total, used, kept, peak)
    assert sum(bar.pieces) <= total
    assert all(piece == 0 or piece * 100 >= total for piece in bar.pieces) or sum(bar.pieces) == total
    assert len(text_bar(bar)) == BAR_COLUMNS
    assert sum(map(float, re.findall(r" width: ([\d.]+)%", html_bar(bar)))) <= 100.2


def test_a_curve_has_one_column_for_each_value() -> None:
    assert text_spark(Curve("", (0, 4, 8, 99, -1), 8)) == "▁▅██▁"
    assert text_spark(Curve("", (0, 8), 8)).translate(ASCII) == "_#"
    assert html_spark(Curve("x", (0, 4, 8), 8)).count("width: 3px") == 3


def test_a_curve_begins_at_its_lowest_and_stays_low_where_little_moves() -> None:
    assert text_spark(curve_of("", [500, 504, 508], None)) == "▁▅█"
    assert text_spark(curve_of("", [500, 504, 508], 1000)) == "▁▂▄"
    assert text_spark(curve_of("", [500, 500], 100_000)) == text_spark(curve_of("", [7, 7], None)) == "▁▁"


@pytest.mark.parametrize("drawn", [html_bar(Bar('"><b>&', 2, 1)), html_spark(Curve('"><b>&', (1,), 1))])
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

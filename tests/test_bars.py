"""Bars: what they show, and that nothing breaks them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.model import Usage
from ipygpumem.reports.html import html_bar
from ipygpumem.reports.layout import Bar, Scales
from ipygpumem.reports.text import ASCII, BAR_COLUMNS, text_bar
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


def test_a_piece_of_one_percent_is_one_character_and_a_smaller_one_is_none() -> None:
    assert text_bar(Bar("", 1000, 9)) == text_bar(Bar("", 1000, 0)) == "▕        ┃"
    assert text_bar(Bar("", 1000, 10)) == "▕▒       ┃"
    assert text_bar(Bar("", 1000, 500, 10, 9)) == "▕▒▒▒▒█   ┃"
    assert text_bar(Bar("", 1000, 980, 10, 10)) == "▕▒▒▒▒▒▒█░┃"
    assert html_bar(Bar("", 1000, 500, 9, 9)).count("min-width") == 1


def test_a_bar_is_as_long_as_the_sessions_highest_use_rounded_up() -> None:
    scales = Scales()
    change = ram(1000, 1080, 1080)
    bar = scales.bar(change)
    assert bar is not None
    assert (bar.length_bytes, bar.is_whole) == (1536 * MIB, False)
    assert bar.label == "RAM: 1.05 GiB of 64.00 GiB in use; the bar ends at 1.50 GiB"
    for highest, length in ((3900, 4), (4090, 6)):  # 4090 is so near to 4 GiB that the bar would look full
        scales.note([ram(1000, 1000, highest)])
        bar = scales.bar(change)
        assert bar is not None
        assert bar.length_bytes == length * GIB
    scales.note([ram(0, 0, 8000)])
    assert scales.bar(change) is None  # 80 MiB are below 1 % of 12 GiB
    assert scales.bar(ram(1150, 1000, 1150)) is not None  # given back
    scales.note([Usage("cuda:0", 0, 0, GIB, 8 * GIB, "allocator")])
    assert scales.bar(ram(1000, 1150, 1150)) is not None


def test_a_usage_becomes_what_the_whole_device_has_in_use_at_the_peak() -> None:
    scales = Scales()
    # 5 GiB are others', 30 reserved, of which 10 were in use before, 12 after and 25 at the peak
    assert gib(scales.bar(cuda(10, 12, 25, 30, 35))) == (20, 2, 13)
    # the cache was given back within the cell
    assert gib(scales.bar(cuda(10, 12, 25, 12, 17))) == (15, 2, 13)
    # memory that was freed lies between what is left and the peak
    assert gib(scales.bar(cuda(10, 2, 11, 2, 7))) == (7, 0, 9)
    # where the device's use is not known, the process's own is shown, and without a total nothing
    assert gib(Scales().bar(Usage("cpu", 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB, "kernel"))) == (2, 1, 1)
    assert Scales().bar(Usage("cpu", 2, 3, 4, None, "kernel")) is None
    assert Scales().bar(Usage("cpu", 2, 3, 4, 0, "kernel")) is None


@given(st.integers(1, 2**50), SIZES, SIZES, SIZES)
def test_a_bar_is_never_longer_than_its_cells(total: int, used: int, kept: int, peak: int) -> None:
    bar = Bar("", total, used, kept, peak)
    assert sum(bar.pieces) <= total
    assert all(piece == 0 or piece * 100 >= total for piece in bar.pieces) or sum(bar.pieces) == total
    assert len(text_bar(bar)) == BAR_COLUMNS
    assert sum(map(float, re.findall(r" width: ([\d.]+)%", html_bar(bar)))) <= 100.2

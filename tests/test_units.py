"""Sizes and durations as text and back."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.errors import GpuMemError, UnitError
from ipygpumem.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    bytes_in_message,
    checked_bytes,
    checked_integer,
    checked_number,
    format_bytes,
    format_change,
    format_in,
    format_seconds,
    format_share,
    number_in,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (12 * KIB, "12 KiB"),
        (MIB // 2, "512 KiB"),
        (400_000_000, "381.5 MiB"),
        (GIB - 1, "1.00 GiB"),
        (4 * GIB + 200 * MIB, "4.20 GiB"),
        (3 * TIB, "3.00 TiB"),
        (-512 * MIB, "-512 MiB"),
    ],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "size", "text"),
    [
        (24 * 10**9, "24GB", "24.00 GB"),
        (24 * GIB, "24G", "24.00 GiB"),
        (2200 * MIB, "2200MiB", "2200 MiB"),
        (2200 * MIB + MIB // 2, "2200 mib", "2200.5 MiB"),
        (1500 * 10**6, "2200 MB", "1500 MB"),
        (300 * 10**6, "24GB", "0.30 GB"),
        (99 * 10**6, "24GB", "99 MB"),
        (5, "24GB", "5 B"),
        (3 * GIB, "9 bytes", "3.00 GiB"),
        (3 * GIB, "cuda:0", "3.00 GiB"),
        (3 * GIB, "", "3.00 GiB"),
    ],
)
def test_bytes_in_the_unit_of_a_size(count: int, size: str, text: str) -> None:
    assert format_in(count, size) == text


def test_changes_carry_their_sign_and_a_share_has_one_unit() -> None:
    assert [format_change(count) for count in (0, MIB, -MIB)] == ["+0", "+1 MiB", "-1 MiB"]
    assert format_share(8 * GIB + 400 * MIB, 140 * GIB) == "8.39/140.00 GiB"
    assert format_share(100 * MIB, 512 * MIB) == "100.00/512.00 MiB"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("1.5 MiB", 3 * MIB // 2),
        ("24 gib", 24 * GIB),
        ("24G", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5 kB", 1500),
        ("0", 0),
        ("7 bytes", 7),
        ("3 b", 3),
    ],
)
def test_text_as_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 lightyear", "1..5 GiB", "1,5 GiB", "9" * 101 + "B"])
def test_a_text_that_is_no_size_says_so(text: str) -> None:
    with pytest.raises(UnitError, match="is not a size"):
        parse_bytes(text)
    assert issubclass(UnitError, GpuMemError)


@pytest.mark.parametrize("text", ["24", " 4096 ", "0.5"])
def test_a_bare_number_is_no_size(text: str) -> None:
    with pytest.raises(UnitError, match="has no unit"):
        parse_bytes(text)


def test_sizes_in_libraries_messages_are_binary_with_any_unit() -> None:
    texts = ["2.00 GB", "2.00 GiB", "4096", "512. MiB"]  # NumPy writes the last one
    assert list(map(bytes_in_message, texts)) == [2 * GIB, 2 * GIB, 4096, GIB // 2]


NONE_OF_THEM = [True, None, "x", "3", -1, 0, 10**400, 2**63, float("nan"), float("inf"), [1]]


@pytest.mark.parametrize(
    ("check", "more", "part"),
    [
        (
            functools.partial(checked_integer, maximum=100),
            [1.0],
            "is not a whole number from 1 to 100",
        ),
        (checked_number, [], r"is not a number from 0\.001 to 1e"),
        (functools.partial(checked_bytes, minimum=1), [1.5, "1" * 90 + "GiB"], r"size|unit"),
    ],
)
def test_wrong_numbers_are_refused_in_a_short_line(
    check: Callable[[Any], object], more: list[Any], part: str
) -> None:
    for value in (*NONE_OF_THEM, *more):
        with pytest.raises(UnitError, match=part) as caught:
            check(value)
        assert len(str(caught.value)) < 160, value


def test_numbers_of_numpy_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    assert checked_bytes(numpy.prod([4, 8])) == checked_bytes(numpy.float64(32.0)) == 32
    assert checked_integer(numpy.int64(3)) == 3


def test_numbers_within_their_bounds_are_taken() -> None:
    assert [checked_integer(1), checked_integer(-3, minimum=-5)] == [1, -3]
    assert [checked_number(1), checked_number(2.5), checked_number(0, minimum=0)] == [1.0, 2.5, 0.0]
    assert [checked_bytes(7), checked_bytes(8e9), checked_bytes("1KiB", minimum=KIB)] == [
        7,
        8 * 10**9,
        KIB,
    ]
    assert list(map(number_in, ["-7", " 20 ", "1e3", "x"])) == [-7, 20, 1000.0, "x"]


@given(st.integers(0, 2**60))
def test_a_size_survives_its_text_within_the_digits_shown(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)


DURATIONS = {0.0004: "0.4 ms", 0.012: "12 ms", 0.9999: "1.00 s"}
DURATIONS |= {59.999: "1 min 0 s", 125: "2 min 5 s", 3840: "1 h 4 min"}


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

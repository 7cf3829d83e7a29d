"""Sizes and durations as text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.errors import GpuMemError, UnitError
from ipygpumem.units import GIB, KIB, MIB, TIB, format_bytes, format_change, format_seconds, format_share, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (12 * KIB, "12 KiB"),
        (512 * MIB, "512 MiB"),
        (MIB // 2, "512 KiB"),
        (400_000_000, "381.5 MiB"),
        (GIB - 1, "1.00 GiB"),
        (1023 * MIB, "1023 MiB"),
        (4 * GIB + 200 * MIB, "4.20 GiB"),
        (3 * TIB, "3.00 TiB"),
        (-512 * MIB, "-512 MiB"),
    ],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_changes_carry_their_sign_and_a_share_has_one_unit() -> None:
    assert [format_change(count) for count in (0, MIB, -MIB)] == ["+0", "+1 MiB", "-1 MiB"]
    assert format_share(8 * GIB + 400 * MIB, 140 * GIB) == "8.39/140.00 GiB"
    assert format_share(100 * MIB, 512 * MIB) == "100.00/512.00 MiB"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("1.5 MiB", 3 * MIB // 2),
        ("20.00 GB", 20 * GIB),
        ("4096", 4096),
        ("7 bytes", 7),
        ("3 b", 3),
    ],
)
def test_text_as_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1 lightyear", "1..5 GiB", "1,5 GiB"])
def test_a_text_that_is_no_size_says_so(text: str) -> None:
    with pytest.raises(UnitError, match="is not a size"):
        parse_bytes(text)
    assert issubclass(UnitError, GpuMemError)


@given(st.integers(0, 2**60))
def test_a_size_survives_its_text_within_the_digits_shown(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (0.9999, "1.00 s"),
        (3.21, "3.21 s"),
        (59.999, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3840, "1 h 4 min"),
    ],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

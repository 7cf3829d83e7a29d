"""Defines the parts of a report: plain text that ``text`` and ``html`` lay out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ipygpumem.records import OUTSIDE, Record, Usage
from ipygpumem.units import MIB, format_bytes, format_change

SEPARATOR = " · "
NAMES_SHOWN = 40
_LEAST_SHARE = 0.01
"""Smallest share of a bar's length to draw as a piece; smaller changes draw no bar."""
_LONGEST_TEXT = 4000
_LONGEST_NAME = 80


# -- the parts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A device's memory as pieces of a length: in use before, kept in addition, the peak above, the
    rest.

    ``label`` is the text version; ``is_whole`` if the bar ends at the device's total memory, which
    a tick shows.
    """

    label: str
    length_bytes: int
    used_bytes: int
    kept_bytes: int = 0
    peak_bytes: int = 0
    is_whole: bool = True

    @property
    def pieces(self) -> list[int]:
        """Bytes of the pieces: none negative or below 1 % of the length, their sum at most the
        length.
        """
        pieces: list[int] = []
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            room = self.length_bytes - sum(pieces)
            is_visible = size >= _LEAST_SHARE * self.length_bytes
            pieces.append(min(size, room) if is_visible else 0)
        return pieces


class LineSegment(NamedTuple):
    """One part of a headline, with its bar."""

    text: str
    bar: Bar | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; columns named in ``numbers`` are right-aligned, those in
    ``code`` monospaced.

    Columns named in ``whole``, such as code to paste, are broken last. There is a bar for each row,
    or none at all. A ``folded`` table shows only its title where the front-end can fold.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    code: Collection[str] = ()
    bars: Sequence[Bar | None] = ()
    folded: bool = False
    whole: Collection[str] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, str]],
        numbers: Collection[str] = (),
        title: str = "",
        **more: Any,
    ) -> Table:
        """Return a table of rows that have texts by heading, without columns that are empty in
        every row.
        """
        names = dict.fromkeys(name for row in rows for name in row)
        columns = tuple(name for name in names if any(row.get(name) for row in rows))
        texts = tuple(tuple(row.get(name, "") for name in columns) for row in rows)
        return cls(title, columns, texts, numbers, **more)

    def split(self) -> tuple[Table, str]:
        """Return the table without columns of texts that are equal in all rows, and these texts in
        one line.
        """
        places = list[int]()
        equal_texts = list[str]()
        for place, name in enumerate(self.columns):
            texts = {row[place] for row in self.rows}
            if name in self.numbers or len(self.rows) < 2 or len(texts) > 1:
                places.append(place)
            else:
                equal_texts.append(f"{name} {self.rows[0][place]}")
        if not places or not equal_texts:
            return self, ""
        columns = [self.columns[place] for place in places]
        rows = [[row[place] for place in places] for row in self.rows]
        return replace(self, columns=columns, rows=rows), f"in every row: {', '.join(equal_texts)}"


@dataclass(frozen=True)
class Fact:
    """``title: value, value``, up to ``most``; names and code are monospaced."""

    title: str
    values: Sequence[str]
    code: bool = False
    most: int = NAMES_SHOWN


@dataclass(frozen=True)
class Listing:
    """Lines under a title, which a front-end may fold; ``code`` is monospaced, and not counted in
    the title.
    """

    title: str
    lines: Sequence[str]
    code: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Report:
    """One report: a headline, whole or in parts, and its details; tables, facts and listings
    without content drop out.

    ``kind`` identifies the report for front-ends and tests. ``is_trouble`` gives it a border in
    another colour. ``records`` have its figures, and are saved with the notebook.
    """

    kind: str
    head: str | Sequence[LineSegment | str]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[Fact] = ()
    listings: Sequence[Listing] = ()
    is_trouble: bool = False
    records: Sequence[Record] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", [table for table in self.tables if table.rows])
        object.__setattr__(self, "facts", [fact for fact in self.facts if fact.values])
        object.__setattr__(
            self, "listings", [listing for listing in self.listings if listing.lines]
        )

    @property
    def segments(self) -> list[LineSegment]:
        """The headline in parts, at least one."""
        parts = [self.head] if isinstance(self.head, str) else self.head
        return [LineSegment(part) if isinstance(part, str) else part for part in parts]

    @property
    def headline(self) -> str:
        """The headline as a text."""
        return SEPARATOR.join([segment.text for segment in self.segments])


# -- bars ---------------------------------------------------------------------------------------


class Scales:
    """Lengths of the devices' bars: the session's highest use, so that changes are visible."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def note(self, usages: Iterable[Usage]) -> None:
        """Lengthen the bars for ``usages``."""
        for usage in usages:
            highest = self._highest.get(usage.device, 0)
            self._highest[usage.device] = max(highest, sum(_sizes(usage)))

    def bar(self, usage: Usage) -> Bar | None:
        """Return the bar of ``usage``.

        It is as long as the highest use, rounded up so that it seldom changes (..., 1, 1.5, 2, 3,
        4, 6 GiB, ...), or as the device's total, if that is less. None if the total is unknown, or
        if less than 1 % of the length was kept, freed or needed temporarily.
        """
        total = usage.total_bytes
        if not total:
            return None
        used, kept, peak = _sizes(usage)
        highest = max(self._highest.get(usage.device, 0), used + kept + peak)
        wanted = highest + highest // 20
        step = 1 << max(0, wanted.bit_length() - 2)
        length = min(total, _rounded_up(wanted, step) or 1)
        if max(kept, peak) < _LEAST_SHARE * length:
            return None
        in_use_now = f"{format_bytes(used + kept)} of {format_bytes(total)} in use"
        label = f"{device_label(usage.device)}: {in_use_now}"
        if length < total:
            label += f"; the bar ends at {format_bytes(length)}"
        grain = _rounded_up(length, 1024) // 1024  # so that equal-looking bars are equal
        return Bar(
            label,
            length,
            _rounded_up(used, grain),
            _rounded_up(kept, grain),
            _rounded_up(peak, grain),
            is_whole=length == total,
        )


def _rounded_up(size: int, step: int) -> int:
    """Return the next multiple of ``step``."""
    return -(-size // step) * step


def _sizes(usage: Usage) -> tuple[int, int, int]:
    """Return the bytes in use since before, the bytes kept in addition, and the peak above both.

    If known, other processes, the context and the allocator's cache count as in use before: the sum
    is the use of the whole device at the peak.
    """
    kept = max(0, usage.delta_bytes)
    peak = max(0, usage.peak_bytes - usage.after_bytes)
    used = usage.after_bytes - kept
    if usage.used_bytes is not None:
        mine = usage.after_bytes if usage.reserved_bytes is None else usage.reserved_bytes
        # The peak lay in the allocator's cache, unless that has been freed.
        used = max(usage.used_bytes - kept - peak, usage.used_bytes - mine + used)
    return used, kept, peak


# -- texts --------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return ``text`` on one line, cut if it is huge, without control characters, which could
    change a terminal.
    """
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    if text.isprintable():
        return text
    return "".join(
        [letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text]
    )


def shorten(text: str, letters: int) -> str:
    """Return ``text`` as ``clean`` does, shortened in the middle, because the ends distinguish
    names.
    """
    text = clean(text)
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def clean_name(text: str) -> str:
    """Return a name, a type or the like, shortened to leave room for its neighbours."""
    return shorten(text, _LONGEST_NAME)


def note(text: str) -> Report:
    """Return a report of one line."""
    return Report("note", clean(text))


def listed(values: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Return values with commas, and the number of those that are too many to show."""
    shown = ", ".join(values[:most])
    hidden = len(values) - most
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def count(number: int, thing: str) -> str:
    """Return ``1 cell``, ``2 cells``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def number_text(number: int | None) -> str:
    """Return a number such as that of a cell; an empty text for None, which leaves its place in a
    table empty.
    """
    return "" if number is None else str(number)


def size_text(size: int | None) -> str:
    """Return bytes with their unit; an empty text if they are unknown."""
    return "" if size is None else format_bytes(size)


def sizes(by_device: Mapping[str, int], form: Callable[[int], str] = format_bytes) -> list[str]:
    """Return ``RAM 1 MiB`` for each device."""
    return [f"{device_label(device)} {form(size)}" for device, size in by_device.items()]


def shape_label(shape: Sequence[int]) -> str:
    """Return a shape as reports show it, ``512 × 1024``; empty for a scalar."""
    return " × ".join(map(str, shape)) or "scalar"


def peak_label(usage: Usage) -> str:
    """Return a peak above the start; sampled ones are marked, because they may miss the highest
    point.
    """
    return format_change(usage.peak_delta_bytes) + sampled_mark(usage)


def sampled_mark(usage: Usage) -> str:
    """Return the mark of a sampled peak; empty for an exact one."""
    return " (sampled)" if usage.method == "sampled" else ""


def in_use(usage: Usage) -> bool:
    """Return True for a device worth reporting: the host, and any other that is or was in use.

    Semaphores of libraries take a few KiB of shared memory, which no user asks about.
    """
    if usage.device in OUTSIDE:
        return max(usage.peak_bytes, usage.before_bytes) >= MIB
    return usage.device == "cpu" or bool(
        usage.peak_bytes or usage.before_bytes or usage.reserved_bytes
    )


def device_label(device: str) -> str:
    """Return the display name of a device: the host is ``RAM``."""
    return _LABELS.get(device, device)


_LABELS = {"cpu": "RAM", "shm": "shared memory", "children": "child processes"}

"""Defines the parts of a report: plain text that ``text`` and ``html`` lay out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ipygpumem.records import OUTSIDE, Record, Usage
from ipygpumem.units import MIB, format_bytes, format_change, format_shape, rounded_up

SEPARATOR = " · "
NAMES_SHOWN = 40
VALUE_SHOWN = 24
"""Most letters of a parameter's name and value."""
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
        room = self.length_bytes
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            piece = 0
            if size >= _LEAST_SHARE * self.length_bytes:
                piece = min(size, room)
            pieces.append(piece)
            room -= piece
        return pieces


class LineSegment(NamedTuple):
    """One part of a headline, with its bar."""

    text: str
    bar: Bar | None = None


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; columns named in ``numbers`` are right-aligned, those in
    ``code`` monospaced.

    Columns named in ``whole``, such as code to paste, are broken last. Text that is too narrow for
    the table has no ``expendable`` columns, the first of which are left out first. There is a bar
    for each row, or none at all. A collapsed table shows only its title where the front-end can
    collapse it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    code: Collection[str] = ()
    bars: Sequence[Bar | None] = ()
    is_collapsed: bool = False
    whole: Collection[str] = ()
    expendable: Sequence[str] = ()

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
        is_filled: dict[str, bool] = {}
        for row in rows:
            for name, text in row.items():
                is_filled[name] = bool(text) or is_filled.get(name, False)
        columns = tuple(name for name in is_filled if is_filled[name])
        texts = []
        for row in rows:
            cells = [row.get(name, "") for name in columns]
            texts.append(tuple(cells))
        return cls(title, columns, tuple(texts), numbers, **more)

    def without_equal_columns(self) -> tuple[Table, str]:
        """Return the table without columns of texts that are equal in all rows, and these texts in
        one line.

        Columns of code to paste stay in the table.
        """
        places = list[int]()
        equal_texts = list[str]()
        for place, name in enumerate(self.columns):
            texts = {row[place] for row in self.rows}
            stays = name in self.numbers or name in self.whole
            if stays or len(self.rows) < 2 or len(texts) > 1:
                places.append(place)
            else:
                equal_texts.append(f"{name} {self.rows[0][place]}")
        if not places or not equal_texts:
            return self, ""
        return self._with_columns_at(places), f"in every row: {', '.join(equal_texts)}"

    def without(self, column: str) -> Table:
        """Return the table without a column."""
        places = [place for place, name in enumerate(self.columns) if name != column]
        return self._with_columns_at(places)

    def _with_columns_at(self, places: Sequence[int]) -> Table:
        """Return the table with its columns at some places only."""
        columns = [self.columns[place] for place in places]
        rows = [[row[place] for place in places] for row in self.rows]
        return replace(self, columns=columns, rows=rows)


@dataclass(frozen=True)
class Fact:
    """``title: value, value``, up to ``most``; names and code are monospaced."""

    title: str
    values: Sequence[str]
    code: bool = False
    most: int = NAMES_SHOWN


@dataclass(frozen=True)
class Listing:
    """Lines under a title, which a front-end may collapse; ``code`` is monospaced, not counted in
    the title.
    """

    title: str
    lines: Sequence[str]
    code: bool = False
    is_collapsed: bool = False


@dataclass(frozen=True)
class Report:
    """One report: a headline, whole or in parts, and its details; tables, facts and listings
    without content drop out.

    ``kind`` identifies the report for front-ends and tests. ``is_trouble`` gives it a border in
    another colour. ``records`` have its figures, and are saved with the notebook. ``advised`` are
    statements that only its words name, such as the ``del x`` of "del x frees 1 MiB".
    """

    kind: str
    head: str | Sequence[LineSegment | str]
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[Fact] = ()
    listings: Sequence[Listing] = ()
    is_trouble: bool = False
    records: Sequence[Record] = ()
    advised: Sequence[str] = ()

    def __post_init__(self) -> None:
        tables = [table for table in self.tables if table.rows]
        facts = [fact for fact in self.facts if fact.values]
        listings = [listing for listing in self.listings if listing.lines]
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "listings", listings)

    @property
    def segments(self) -> list[LineSegment]:
        """The headline in parts, at least one."""
        if isinstance(self.head, str):
            return [LineSegment(self.head)]
        segments = []
        for part in self.head:
            segment = LineSegment(part) if isinstance(part, str) else part
            segments.append(segment)
        return segments

    @property
    def headline(self) -> str:
        """The headline as a text."""
        return SEPARATOR.join([segment.text for segment in self.segments])

    @property
    def advised_lines(self) -> list[str]:
        """The lines to paste, and words between them."""
        lines = list(self.advised)
        for table in self.tables:
            places = [place for place, name in enumerate(table.columns) if name in table.whole]
            for row in table.rows:
                lines += [row[place] for place in places]
        for listing in self.listings:
            if listing.code:
                lines += listing.lines
        for text in self.lines:
            for words in (IN_ONE_LINE, f"{TO_FREE}: "):
                _, is_there, line = text.partition(words)
                if is_there:
                    lines.append(line)
        return lines


# -- bars ---------------------------------------------------------------------------------------


class Scales:
    """Lengths of the devices' bars: the session's highest use, so that changes are visible."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def lengthen_for(self, usages: Iterable[Usage]) -> None:
        """Lengthen the bars so that ``usages`` fit."""
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
        now = _sizes(usage)
        length = min(total, self._length(usage.device, sum(now)))
        if max(now.more, now.peak) < _LEAST_SHARE * length:
            return None
        use = format_bytes(now.before + now.more)
        label = f"{device_label(usage.device)}: {use} of {format_bytes(total)} in use"
        if length < total:
            label += f"; the bar ends at {format_bytes(length)}"
        grain = rounded_up(length, 1024) // 1024  # so that equal-looking bars are equal
        before, more, peak = [rounded_up(size, grain) for size in now]
        return Bar(label, length, before, more, peak, is_whole=length == total)

    def _length(self, device: str, size: int) -> int:
        """Return the length of a device's bar for ``size`` bytes, or for its highest use."""
        highest = max(size, self._highest.get(device, 0))
        wanted = highest + highest // 20
        step = 1 << max(0, wanted.bit_length() - 2)
        return rounded_up(wanted, step) or 1


class _Sizes(NamedTuple):
    """Bytes in use since before, bytes kept in addition, and the peak above both."""

    before: int
    more: int
    peak: int


def _sizes(usage: Usage) -> _Sizes:
    """Return the sizes of a device's bar.

    If known, other processes, the context and the allocator's cache count as in use before: the sum
    is the use of the whole device at the peak.
    """
    more = max(0, usage.delta_bytes)
    peak = max(0, usage.peak_bytes - usage.after_bytes)
    before = usage.after_bytes - more
    if usage.used_bytes is not None:
        mine = usage.reserved_bytes
        if mine is None:
            mine = usage.after_bytes
        not_ours = usage.used_bytes - mine
        # The peak lay in the allocator's cache, unless that has been freed.
        before = max(usage.used_bytes - more - peak, not_ours + before)
    return _Sizes(before, more, peak)


# -- texts --------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return ``text`` on one line, cut if it is huge, without control characters, which could
    change a terminal.
    """
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    if text.isprintable():
        return text
    letters = []
    for letter in text:
        if not letter.isprintable():
            letter = "\N{REPLACEMENT CHARACTER}"
        letters.append(letter)
    return "".join(letters)


def shorten(text: str, letters: int) -> str:
    """Return ``text`` as ``clean`` does, shortened in the middle, because the ends distinguish
    names.
    """
    text = clean(text)
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    head = letters - 1 - tail
    return f"{text[:head]}…{text[len(text) - tail :]}"


def clean_name(text: str) -> str:
    """Return a name, a type or the like, shortened to leave room for its neighbours."""
    return shorten(text, _LONGEST_NAME)


def accelerator(device: str) -> str:
    """Return a device's name; an empty text for the host, where most objects are."""
    return "" if device == "cpu" else clean_name(device)


def note(text: str) -> Report:
    """Return a report of one line."""
    return Report("note", clean(text))


def and_more(number: int) -> str:
    """Return the name of a last row, which sums up what has no row of its own."""
    return f"and {number:,} more"


def row_of_more(number: int, size_bytes: int, column: str) -> dict[str, str]:
    """Return a last row, which sums up what has no row of its own; the number is in ``column``."""
    return {"size": format_bytes(size_bytes), column: and_more(number)}


TO_FREE = "to free it"
"""Heading of the column with the lines that free memory."""
IN_ONE_LINE = "in one line: "
"""Begins a line with the code that frees all of an object."""


def listed(values: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Return values with commas, and the number of those that are too many to show."""
    shown = ", ".join(values[:most])
    hidden = len(values) - most
    if hidden > 0:
        return f"{shown} and {hidden} more"
    return shown


def count(number: int, thing: str) -> str:
    """Return ``1 cell``, ``2,000 cells``."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}s"


def number_text(number: int | None) -> str:
    """Return a number such as that of a cell; an empty text for None, which leaves its place in a
    table empty.
    """
    if number is None:
        return ""
    return str(number)


def size_text(size: int | None) -> str:
    """Return bytes with their unit; an empty text if they are unknown."""
    if size is None:
        return ""
    return format_bytes(size)


def size_or_unknown(size: int | None) -> str:
    """Return bytes with their unit, or "unknown"."""
    return size_text(size) or "unknown"


def value_text(value: object) -> str:
    """Return the value of a parameter; a long text is shortened."""
    if type(value) is str:
        return shorten(value, VALUE_SHOWN)
    if type(value) is float:
        return f"{value:g}"
    return str(value)


def sizes(by_device: Mapping[str, int], form: Callable[[int], str] = format_bytes) -> list[str]:
    """Return ``RAM 1 MiB`` for each device."""
    texts = []
    for device, size in by_device.items():
        if is_worth_a_row(device, size):
            texts.append(f"{device_label(device)} {form(size)}")
    return texts


def shape_label(shape: Sequence[int]) -> str:
    """Return a shape as reports show it: ``512 × 1024``, or ``scalar``."""
    return format_shape(shape) or "scalar"


def peak_label(usage: Usage) -> str:
    """Return a peak above the start; sampled ones are marked, because they may miss the highest
    point.
    """
    return format_change(usage.peak_delta_bytes) + sampled_mark(usage)


def sampled_mark(usage: Usage) -> str:
    """Return the mark of a sampled peak; empty for an exact one."""
    if usage.method == "sampled":
        return " (sampled)"
    return ""


def is_worth_a_row(device: str, size_bytes: int) -> bool:
    """Return False for less than a MiB of shared memory or of child processes.

    Semaphores of libraries take a few KiB of shared memory, which no user asks about.
    """
    return device not in OUTSIDE or abs(size_bytes) >= MIB


def is_worth_reporting(usage: Usage) -> bool:
    """Return True for a device worth reporting: the host, and any other that is or was in use."""
    most_bytes = max(usage.peak_bytes, usage.before_bytes)
    if usage.device in OUTSIDE:
        return is_worth_a_row(usage.device, most_bytes)
    return usage.device == "cpu" or most_bytes > 0 or bool(usage.reserved_bytes)


def device_label(device: str) -> str:
    """Return the display name of a device: the host is ``RAM``."""
    return _LABELS.get(device, device)


_LABELS = {"cpu": "RAM", "shm": "shared memory", "children": "child processes"}

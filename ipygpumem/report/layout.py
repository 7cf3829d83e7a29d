"""Defines the parts of a report: a headline, tables, facts, listings and lines.

They are plain text. ``text.py`` lays them out for terminals, ``html.py`` for notebooks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ipygpumem.records import Record
from ipygpumem.report.words import NAMES_SHOWN, clean
from ipygpumem.units import format_bytes

SEPARATOR = " · "
"""Stands between the parts of a line."""
TO_FREE = "to free it"
"""Heading of the column with the lines that free memory."""
IN_ONE_LINE = "in one line: "
"""Begins a line with the code that frees all of an object."""
LEAST_SHARE = 0.01
"""Smallest share of a bar's length to draw as a piece; smaller changes draw no bar."""


@dataclass(frozen=True)
class Bar:
    """The bar of a device's memory, drawn as three pieces and a free part."""

    label: str
    """The same in words."""
    length_bytes: int
    """The memory for which the whole bar stands."""
    used_bytes: int
    """The first piece: in use before."""
    kept_bytes: int = 0
    """The second piece: kept in addition."""
    peak_bytes: int = 0
    """The third piece: the peak above both."""
    is_whole: bool = True
    """True if the bar ends at the device's total memory, which a tick shows."""

    @property
    def pieces(self) -> list[int]:
        """The bytes of the three pieces as they are drawn: a piece of less than 1 % of the length
        is 0, and together they are at most as long as the bar.
        """
        pieces: list[int] = []
        room = self.length_bytes
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            piece = 0
            if size >= LEAST_SHARE * self.length_bytes:
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
    """Rows of text under headings, by which columns are named."""

    title: str
    columns: Sequence[str]
    """The headings."""
    rows: Sequence[Sequence[str]]
    """The texts of each row, one for each column."""
    numbers: Collection[str] = ()
    """The columns that are right-aligned."""
    code: Collection[str] = ()
    """The columns that are monospaced."""
    bars: Sequence[Bar | None] = ()
    """The bar of each row, or none at all."""
    is_collapsed: bool = False
    """True to show only the title where the front-end can collapse the table."""
    whole: Collection[str] = ()
    """The columns that are broken last, such as code to paste."""
    expendable: Sequence[str] = ()
    """The columns that are left out where there is no room for all, the first ones first."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, str]],
        numbers: Collection[str] = (),
        title: str = "",
        **more: Any,
    ) -> Table:
        """Return a table of rows, without columns that are empty in every row.

        Args:
            rows: for each row, its texts by heading.
            numbers: the columns that are right-aligned.
            title: the title.
            more: further fields of the table.
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
        """Return a narrower table, and a line with the texts that it no longer has:
        ``in every row: device cuda:0``. These are columns with the same text in all rows, except
        numbers and code to paste.

        If there are no such columns, return the table unchanged and an empty line.
        """
        places_that_stay = list[int]()
        equal_texts = list[str]()
        for place, name in enumerate(self.columns):
            texts = {row[place] for row in self.rows}
            always_stays = name in self.numbers or name in self.whole
            if always_stays or len(self.rows) < 2 or len(texts) > 1:
                places_that_stay.append(place)
            else:
                equal_texts.append(f"{name} {self.rows[0][place]}")
        if not places_that_stay or not equal_texts:
            return self, ""
        smaller = self._with_columns_at(places_that_stay)
        return smaller, f"in every row: {', '.join(equal_texts)}"

    def without(self, column: str) -> Table:
        """Return the table without a column."""
        places = [place for place, name in enumerate(self.columns) if name != column]
        return self._with_columns_at(places)

    def _with_columns_at(self, places: Sequence[int]) -> Table:
        """Return the table with some of its columns.

        Args:
            places: the places of these columns.
        """
        columns = [self.columns[place] for place in places]
        rows = [[row[place] for place in places] for row in self.rows]
        return replace(self, columns=columns, rows=rows)


@dataclass(frozen=True)
class Fact:
    """A line ``title: value, value``."""

    title: str
    values: Sequence[str]
    code: bool = False
    """True if the values are names or code, which are monospaced."""
    most: int = NAMES_SHOWN
    """Maximum number of values to show."""


@dataclass(frozen=True)
class Listing:
    """Lines under a title, which a front-end may collapse."""

    title: str
    lines: Sequence[str]
    code: bool = False
    """True if the lines are code: monospaced, and without their number in the title."""
    is_collapsed: bool = False
    """True to show only the title where the front-end can collapse the listing."""


@dataclass(frozen=True)
class Report:
    """One report: a headline and its details."""

    kind: str
    """Identifies the report for front-ends and tests, such as ``cell``."""
    head: str | Sequence[LineSegment | str]
    """The headline, whole or in parts."""
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[Fact] = ()
    listings: Sequence[Listing] = ()
    is_trouble: bool = False
    """True for a border in another colour."""
    records: Sequence[Record] = ()
    """Records with its figures, which are saved with the notebook."""
    advised: Sequence[str] = ()
    """Statements that only its words name, such as the ``del x`` of "del x frees 1 MiB"."""

    def __post_init__(self) -> None:
        """Drop tables, facts and listings without content."""
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
        """The lines of code that the report advises. Some of them are words, and no code, because a
        table has both in one column.
        """
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


def note(text: str) -> Report:
    """Return a report of one line."""
    return Report("note", clean(text))


def and_more(number: int) -> str:
    """Return the name of a table's last row, such as ``and 12 more``, which sums up the rows that
    are not shown.
    """
    return f"and {number:,} more"


def row_of_more(number: int, size_bytes: int, column: str) -> dict[str, str]:
    """Return a table's last row, which sums up the rows that are not shown.

    Args:
        number: the number of these rows, which is written in ``column``.
        size_bytes: the bytes of these rows together.
        column: a heading.
    """
    return {"size": format_bytes(size_bytes), column: and_more(number)}

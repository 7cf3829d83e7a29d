"""Defines the parts of a report: plain text that ``text`` and ``html`` lay out, each in its own way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ipygpumem.model import Usage
from ipygpumem.units import format_change

SEPARATOR = " · "
NAMES_SHOWN = 40
LEAST_SHARE = 0.01
"""A smaller part of a bar's length is no piece, and a smaller change no bar."""
_LONGEST_TEXT = 4000
_LONGEST_NAME = 80


# -- the parts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A device's memory as pieces of a length: in use before, kept on top of that, the peak above, the rest.

    ``label`` says in words what the bar shows.
    """

    label: str
    length_bytes: int
    used_bytes: int
    kept_bytes: int = 0
    peak_bytes: int = 0
    is_whole: bool = True
    """Whether it ends where the device's memory does, which a tick shows."""

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The bytes of the pieces: none negative or below 1 % of the length, together not above it."""
        rest = self.length_bytes
        found = []
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            found.append(min(size, rest) if size >= LEAST_SHARE * self.length_bytes else 0)
            rest -= found[-1]
        return (found[0], found[1], found[2])


class Segment(NamedTuple):
    """One part of a headline, with the bar that belongs to it."""

    text: str
    bar: Bar | None = None
    tabled: bool = False
    """Whether a table of the report says the same, so that the part is left out where that table is shown."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; columns named in ``numbers`` are set to the right, those in ``code`` monospaced."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    code: frozenset[str] = frozenset()
    bars: tuple[Bar | None, ...] = ()
    """One for each row, or none at all."""
    folded: bool = False
    """Whether a front-end that can fold shows the title only, at first."""
    echo: bool = False
    """Whether it says what the headline's ``tabled`` segments say: text leaves it out."""

    def without_empty(self) -> Table:
        """Return the table without the columns that are empty in every row; without rows it stays as it is."""
        filled = [place for place in range(len(self.columns)) if not self.rows or any(row[place] for row in self.rows)]
        rows = tuple(tuple(row[place] for place in filled) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in filled), rows=rows)


@dataclass(frozen=True)
class Fact:
    """``title: value, value``; values that are names or code are monospaced."""

    title: str
    values: tuple[str, ...]
    code: bool = False
    most: int = NAMES_SHOWN
    """How many of the values are listed; the others are counted."""

    @property
    def text(self) -> str:
        """The fact as one line."""
        return f"{self.title}: {listed(self.values, self.most)}"


@dataclass(frozen=True)
class Listing:
    """Lines under a title, which a front-end may fold."""

    title: str
    lines: tuple[str, ...]
    code: bool = False
    """Whether they are source: monospaced, with their indentation, and not counted in the title."""
    folded: bool = False
    """Whether a front-end that can fold shows the title only, at first."""


@dataclass(frozen=True)
class Report:
    """One report. ``kind`` travels with it, so that front-ends and tests can tell reports apart."""

    kind: str
    headline: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    facts: tuple[Fact, ...] = ()
    listings: tuple[Listing, ...] = ()
    segments: tuple[Segment, ...] = ()
    """The headline in parts; empty where it is one."""
    is_trouble: bool = False
    """Whether it reports something that went wrong, which a border in another colour shows."""

    @classmethod
    def of(
        cls,
        kind: str,
        segments: Iterable[Segment],
        lines: Iterable[str] = (),
        tables: Iterable[Table] = (),
        facts: tuple[Fact, ...] = (),
        listings: tuple[Listing, ...] = (),
        *,
        is_trouble: bool = False,
    ) -> Report:
        """Return a report whose headline has parts."""
        parts = tuple(segments)
        headline = SEPARATOR.join([segment.text for segment in parts])
        return cls(kind, headline, tuple(lines), tuple(tables), facts, listings, parts, is_trouble)

    @property
    def head(self) -> tuple[Segment, ...]:
        """The headline in parts, one at least."""
        return self.segments or (Segment(self.headline),)


# -- texts ----------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return ``text`` on one line without control characters, which could write over a terminal; cut if it is huge."""
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}…"
    if text.isprintable():
        return text
    return "".join([letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text])


def shorten(text: str, letters: int) -> str:
    """Return ``text`` as ``clean`` does, but shorter: the middle gives way, since ends tell names apart."""
    text = clean(text)
    if len(text) <= letters:
        return text
    tail = (letters - 1) // 3
    return f"{text[: letters - 1 - tail]}…{text[len(text) - tail :]}"


def clean_name(text: str) -> str:
    """Return a name, a type or the like in a length that leaves room for what stands beside it."""
    return shorten(text, _LONGEST_NAME)


def note(text: str) -> Report:
    """Return a report of one line."""
    return Report("note", clean(text))


def listed(values: Sequence[str], most: int = NAMES_SHOWN) -> str:
    """Return values with commas, and how many more there are where they are too many."""
    rest = len(values) - most
    return ", ".join(values[:most]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, thing: str) -> str:
    """Return ``1 cell``, ``2 cells``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def shape_label(shape: Sequence[int]) -> str:
    """Return a shape as reports show it, ``512 × 1024``; none is that of a scalar."""
    return " × ".join(map(str, shape)) or "scalar"


def peak_label(usage: Usage) -> str:
    """Return how far a device rose above its start; samples are marked, since they may miss the highest point."""
    return format_change(usage.peak_delta_bytes) + sampled_mark(usage)


def sampled_mark(usage: Usage) -> str:
    """Return what stands behind a peak: nothing where it is exact."""
    return " (sampled)" if usage.method == "sampled" else ""


def in_use(usage: Usage) -> bool:
    """Whether a device is worth a word: the host is, and an accelerator that holds or held something."""
    return usage.device == "cpu" or bool(usage.peak_bytes or usage.before_bytes or usage.reserved_bytes)


def device_label(device: str) -> str:
    """Return how a device is called in reports: the host is ``RAM``."""
    return "RAM" if device == "cpu" else device

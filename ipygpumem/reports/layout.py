"""Defines the parts of a report: plain text that ``text`` and ``html`` lay out, each in its own way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

    ``label`` says so in words; ``is_whole`` if it ends where the device's memory does, which a tick shows.
    """

    label: str
    length_bytes: int
    used_bytes: int
    kept_bytes: int = 0
    peak_bytes: int = 0
    is_whole: bool = True

    @property
    def pieces(self) -> list[int]:
        """The bytes of the pieces: none negative or below 1 % of the length, together not above it."""
        found: list[int] = []
        for size in (self.used_bytes, self.kept_bytes, self.peak_bytes):
            rest = self.length_bytes - sum(found)
            found.append(min(size, rest) if size >= LEAST_SHARE * self.length_bytes else 0)
        return found


class Segment(NamedTuple):
    """One part of a headline, with its bar; ``tabled`` if a table says the same: it is left out above that."""

    text: str
    bar: Bar | None = None
    tabled: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text under headings; columns named in ``numbers`` are set to the right, those in ``code`` monospaced.

    There is a bar for each row, or none at all. Where a front-end can fold, a ``folded`` one shows its title first.
    Text leaves an ``echo`` out: it says what the headline's ``tabled`` segments say.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Collection[str] = ()
    code: Collection[str] = ()
    bars: Sequence[Bar | None] = ()
    folded: bool = False
    echo: bool = False

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[str, str]], numbers: Collection[str] = (), title: str = "", **more: Any
    ) -> Table:
        """Return a table of rows, at least one, that have a text for each heading."""
        return cls(title, tuple(rows[0]), tuple(tuple(row.values()) for row in rows), numbers, **more)

    def without_empty(self) -> Table:
        """Return the table without the columns that are empty in every row; without rows it stays as it is."""
        filled = [place for place in range(len(self.columns)) if not self.rows or any(row[place] for row in self.rows)]
        rows = tuple(tuple(row[place] for place in filled) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in filled), rows=rows)


@dataclass(frozen=True)
class Fact:
    """``title: value, value``, up to ``most``; values that are names or code are monospaced."""

    title: str
    values: Sequence[str]
    code: bool = False
    most: int = NAMES_SHOWN


@dataclass(frozen=True)
class Listing:
    """Lines under a title, which a front-end may fold; ``code`` is monospaced, and not counted in the title."""

    title: str
    lines: Sequence[str]
    code: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Report:
    """One report. ``kind`` travels with it, so that front-ends and tests can tell reports apart.

    ``segments`` are the headline in parts, if it has some. A border in another colour shows ``is_trouble``.
    """

    kind: str
    headline: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    facts: Sequence[Fact] = ()
    listings: Sequence[Listing] = ()
    segments: Sequence[Segment] = ()
    is_trouble: bool = False

    @classmethod
    def of(cls, kind: str, segments: Iterable[Segment | str], *parts: Any, is_trouble: bool = False) -> Report:
        """Return a report whose headline has parts; ``parts`` are its lines, tables, facts and listings."""
        head = [Segment(part) if isinstance(part, str) else part for part in segments]
        headline = SEPARATOR.join([segment.text for segment in head])
        return replace(cls(kind, headline, *parts), segments=head, is_trouble=is_trouble)

    @property
    def head(self) -> Sequence[Segment]:
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

"""Very many things side by side: lists of the same length instead of a million small objects.

A loop in C (``map``, ``compress``) takes 0.05 to 0.1 s for a million items, one in Python several times that.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, islice, repeat
from operator import eq, is_, rshift
from typing import Any, Generic, TypeVar, final, overload

T = TypeVar("T")
Other = TypeVar("Other")
Items = TypeVar("Items", list[Any], "Column[Any]")
Row = TypeVar("Row", bound=tuple[Any, ...])

CHUNK = 4000
"""So many things are looked at from all sides before the next are: they stay in the processor's cache meanwhile."""
_SPACING_BITS = 4 if sys.maxsize > 2**32 else 3
"""No two objects are closer to each other: each has a count of its references and a type."""


def chunks(items: Sequence[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Yield ``size`` items at a time."""
    parts = (items[start : start + size] for start in range(0, len(items), size))
    return (part if isinstance(part, list) else list(part) for part in parts)


def chunks_of(items: Sequence[object]) -> int:
    """Return how many ``chunks`` there are."""
    return -(-len(items) // CHUNK)


def identities(items: Iterable[object]) -> Iterator[int]:
    """Yield a number for each object that no other has; a set of them is three times as fast as one of ``id``'s.

    Addresses are multiples of 16, which fill a hash table badly.
    """
    return map(rshift, map(id, items), repeat(_SPACING_BITS))


def all_different(numbers: Iterable[int]) -> bool:
    """Whether no number comes twice; takes less time and memory than a set of them if they are nearly in order."""
    ordered = sorted(numbers)
    return not any(map(eq, ordered, islice(ordered, 1, None)))


@final
class Column(Sequence[T]):
    """Plain values side by side; many in a row that are equal take the place of one.

    Args:
        values: those that it begins with.
    """

    def __init__(self, values: Sequence[T] = ()) -> None:
        self._starts: list[int] = []
        self._parts: list[tuple[Sequence[T], int]] = []
        """Values, and how many times they come: several once, or one several times."""
        self._length = 0
        self.extend(values)

    @classmethod
    def same(cls, value: T, count: int) -> Column[T]:
        """Return a column of one value, ``count`` times."""
        return cls()._add([value], count) if count else cls()

    @classmethod
    def joined(cls, *columns: Column[T]) -> Column[T]:
        """Return columns, one below the other."""
        found = cls()
        for column in columns:
            found.extend(column)
        return found

    def extend(self, values: Sequence[T]) -> None:
        """Add values; a list is kept, so it must not change any more."""
        if isinstance(values, Column):
            for some, times in values._parts:
                self._add(some, times)
        elif values:
            alike = values.count(values[0]) == len(values)
            self._add(values[:1] if alike else values, len(values) if alike else 1)

    def join(self, values: Sequence[T]) -> None:
        """Add values that are made when they are looked at."""
        if len(values):
            self._add(values, 1)

    def map(self, function: Callable[[T], Other]) -> Column[Other]:
        """Return what ``function`` gives for each value."""
        found: Column[Other] = Column()
        for values, times in self._parts:
            found._add(list(map(function, values)), times)
        return found

    def _add(self, values: Sequence[T], times: int) -> Column[T]:
        last, before = self._parts[-1] if self._parts else ((), 0)
        if len(values) == len(last) == 1 and values[0] == last[0]:
            self._parts[-1] = last, before + times
        else:
            self._starts.append(self._length)
            self._parts.append((values, times))
        self._length += len(values) * times
        return self

    def different(self) -> set[T]:
        """Return each value once."""
        return set().union(*(values for values, _ in self._parts))

    def first(self, value: T) -> int:
        """Return the first place of a value that is there."""
        places = zip(self._starts, self._parts, strict=True)
        return next(start + values.index(value) for start, (values, _) in places if value in values)

    def __contains__(self, value: object) -> bool:
        return any(value in values for values, _ in self._parts)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: int) -> T:  # type: ignore[override]  # one at a time
        run = bisect_right(self._starts, place) - 1
        values, _ = self._parts[run]
        return values[(place - self._starts[run]) % len(values)]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(repeat(values[0], times) if times > 1 else values for values, times in self._parts)


def type_identities(items: Sequence[object]) -> Column[int]:
    """Return the identity of each item's type."""
    if items and all(map(is_, map(type, items), repeat(type(items[0])))):  # often so, and twice as fast to see
        return Column.same(id(type(items[0])), len(items))
    return Column(list(map(id, map(type, items))))


def types_of(items: Sequence[object]) -> set[int]:
    """Return the identities of the items' types."""
    if items and all(map(is_, map(type, items), repeat(type(items[0])))):  # often so, and twice as fast to see
        return {id(type(items[0]))}
    return set(map(id, map(type, items)))


def of_types(wanted: Collection[int], items: Sequence[T]) -> list[T]:
    """Return the items whose types are among ``wanted``, the types' identities."""
    return list(compress(items, map(wanted.__contains__, map(id, map(type, items)))))


def one_of_each(items: Sequence[T]) -> dict[int, T]:
    """Return one item of each type, by the type's identity."""
    return dict(zip(map(id, map(type, items)), items, strict=True))


def by_identity(items: Sequence[T]) -> dict[int, T]:
    """Return each item once, by its number as ``identities`` gives it."""
    return dict(zip(identities(items), items, strict=True))


def places_of(wanted: Collection[int], kinds: Column[int]) -> Sequence[int]:
    """Return at which places of ``kinds`` there is one of ``wanted``, in order."""
    different = kinds.different()
    if not different.isdisjoint(wanted) and not different.issubset(wanted):
        return list(compress(range(len(kinds)), map(wanted.__contains__, kinds)))
    return range(0 if different.isdisjoint(wanted) else len(kinds))


def at(places: Sequence[int], items: Items) -> Items:
    """Return the items at ``places``, which are different ones in order; all of them without a copy."""
    if len(places) == len(items):
        return items
    if isinstance(items, Column):
        return Column(at(places, list(items)))
    return list(map(items.__getitem__, places))


class Picked(Sequence[T]):
    """The items of a sequence at some places, read from it when they are looked at."""

    def __init__(self, items: Sequence[T], places: Sequence[int]) -> None:
        self._items, self._places = items, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # one at a time
        return self._items[self._places[index]]

    def __iter__(self) -> Iterator[T]:
        return map(list(self._items).__getitem__, self._places)


class Rows(Sequence[Row], Generic[Row]):
    """Records of one kind (a ``NamedTuple``), kept as columns, and made when they are looked at.

    Args:
        kind: the class of the records.
        columns: the values of each field.
        places: which records, in which order; all unless told.
    """

    def __init__(self, kind: type[Row], columns: Sequence[Sequence[Any]], places: Sequence[int] | None = None) -> None:
        self._kind = kind
        self._columns = columns
        self._places = range(len(columns[0])) if places is None else places

    @classmethod
    def of(cls, kind: type[Row], records: Iterable[Row]) -> Rows[Row]:
        """Return ``records`` as rows."""
        if isinstance(records, Rows):
            return records
        return cls(kind, list(zip(*records, strict=True)) or [()] * len(_fields(kind)))

    def column(self, field: str) -> list[Any]:
        """Return one field of all records."""
        column = self._columns[_fields(self._kind).index(field)]
        values = column if isinstance(column, (list, tuple)) else list(column)
        return list(map(values.__getitem__, self._places))

    def where(self, wanted: Iterable[object]) -> Rows[Row]:
        """Return the records for which ``wanted``, one value for each, is true."""
        return Rows(self._kind, self._columns, list(compress(self._places, wanted)))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Rows[Row]:
        if isinstance(index, slice):
            return Rows(self._kind, self._columns, self._places[index])
        place = self._places[index]
        return tuple.__new__(self._kind, [column[place] for column in self._columns])

    def __iter__(self) -> Iterator[Row]:
        if len(self) < len(self._columns[0]) // 2:  # a part: the other values need not be looked at
            return map(self.__getitem__, range(len(self)))
        columns = [self.column(field) for field in _fields(self._kind)]
        return map(tuple.__new__, repeat(self._kind), zip(*columns, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Rows, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def _fields(kind: type[Any]) -> tuple[str, ...]:
    return kind._fields  # type: ignore[no-any-return]  # a NamedTuple has it

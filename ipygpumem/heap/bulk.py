"""Classifies many objects at once by the identities of their types: loops in C, ten times as fast
as in Python.

Types are compared by identity, because hashing one may run its metaclass's code.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections import OrderedDict
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from itertools import compress, count, islice, repeat
from operator import ne, not_
from typing import Any, Generic, TypeVar

from ipygpumem.heap.containers import CONTAINER_TYPES, CONTAINERS
from ipygpumem.introspect import (
    ID_BYTES,
    identities,
    identities_of_list,
    identities_of_part,
    mro_of,
    type_name,
)

T = TypeVar("T")
Progress = Callable[[float], None]
"""Called with the finished share of the work."""

ROWS: set[int] = set()
"""Identities of our own types of rows, which refer only to numbers and text; an inventory may have
a million rows.
"""

OBSERVERS: list[Callable[[], object]] = []
"""Called again and again while objects are followed: the memory guard raises ``MemoryError`` there.
"""

CHUNK = 4000
"""Chunk size; keeps a chunk in the processor's cache."""


def no_progress(share: float) -> None:
    """No-op progress callback."""


def chunks(items: Sequence[T], size: int = CHUNK) -> Iterator[Sequence[T]]:
    """Yield ``size`` items at a time."""
    starts = range(0, len(items), size)
    ends = range(size, len(items) + size, size)
    return map(items.__getitem__, map(slice, starts, ends))


def types_of(items: Sequence[object]) -> set[int]:
    """Return the identities of the items' types."""
    return set(map(id, map(type, items)))


def of_types(wanted: Collection[int], items: Sequence[T]) -> list[T]:
    """Return the items whose types are among ``wanted``."""
    is_wanted = map(wanted.__contains__, map(id, map(type, items)))
    return list(compress(items, is_wanted))


def without_types(unwanted: Collection[int], items: Sequence[T]) -> Sequence[T]:
    """Return the items whose types are not among ``unwanted``."""
    if not unwanted:
        return items
    is_unwanted = map(unwanted.__contains__, map(id, map(type, items)))
    return list(compress(items, map(not_, is_unwanted)))


def with_ids(wanted: Container[int], items: Sequence[T]) -> list[T]:
    """Return the items whose identities are among ``wanted``; a loop in C."""
    return list(compress(items, map(wanted.__contains__, map(id, items))))


def without_ids(unwanted: Container[int], items: Sequence[T]) -> list[T]:
    """Return the items whose identities are not among ``unwanted``; a loop in C."""
    are_unwanted = map(unwanted.__contains__, map(id, items))
    return list(compress(items, map(not_, are_unwanted)))


def not_among(by_key: Mapping[int, T], seen: Set[int]) -> list[T]:
    """Return the values of a dict whose keys are not in ``seen``; a loop in C."""
    if seen.isdisjoint(by_key):  # often, and it takes less time than to look at each result
        return list(by_key.values())
    are_seen = map(seen.__contains__, by_key)
    return list(compress(by_key.values(), map(not_, are_seen)))


def without_objects(unwanted: Iterable[object], items: Iterable[T]) -> list[T]:
    """Return the items that are none of some objects."""
    unwanted_ids = set(map(id, unwanted))
    return [item for item in items if id(item) not in unwanted_ids]


def one_of_each(items: Sequence[T]) -> dict[int, T]:
    """Return one item of each type, by the type's identity."""
    return dict(zip(map(id, map(type, items)), items, strict=True))


class Batch(Generic[T]):
    """Some objects with the identities of their types, which are read once for all questions.

    Reading them takes 80 ns an object. The first question numbers the types, in 50 ns an object,
    and each question takes 30 ns, because it translates the numbers of all objects at once; looking
    up the identity of each type takes 100 ns. The functions above read the types for each question.

    Attributes:
        items: the objects.
        types: identities of their types.
    """

    def __init__(self, items: Sequence[T]) -> None:
        self.items = items
        self._type_of_each = ids_of_own(list(map(type, items)))
        self.types = set(self._type_of_each)
        self._numbers: dict[int, int] = {}
        """A number for each type, by its identity; empty before the first question."""
        self._number_of_each = b""
        """The number of each object's type."""

    def one_of_each(self, wanted: Collection[int]) -> dict[int, T]:
        """Return one object of each of the ``wanted`` types, by the type's identity.

        Few types of a batch are new, so that asking for all of them would take four times as long.
        """
        return one_of_each(self.of_types(wanted))

    def of_types(self, wanted: Collection[int]) -> list[T]:
        """Return the objects whose types are among ``wanted``."""
        kinds = self.types.intersection(wanted)
        if not kinds:
            return []
        return list(compress(self.items, self._are_of(kinds)))

    def without_types(self, unwanted: Collection[int]) -> Sequence[T]:
        """Return the objects whose types are not among ``unwanted``."""
        kinds = self.types.difference(unwanted)
        if not kinds:
            return []
        if len(kinds) == len(self.types):
            return self.items
        return list(compress(self.items, self._are_of(kinds)))

    def _are_of(self, kinds: Set[int]) -> Iterable[object]:
        """Return for each object a value that is true if its type is among ``kinds``, some of
        ``types``.
        """
        if len(kinds) == len(self.types):
            return repeat(True)
        if len(self.types) > _MOST_NUMBERED:
            return map(kinds.__contains__, self._type_of_each)
        self._number_types()
        is_wanted = bytearray(_MOST_NUMBERED)
        for kind in kinds:
            is_wanted[self._numbers[kind]] = True
        return self._number_of_each.translate(is_wanted)

    def number_of(self, kind: int) -> int:
        """Return the number of objects of one of the ``types``."""
        if len(self.types) > _MOST_NUMBERED:
            return self._type_of_each.count(kind)
        self._number_types()
        return self._number_of_each.count(self._numbers[kind])

    def _number_types(self) -> None:
        """Give each type a number that fits into a byte; there must not be too many types."""
        if not self._numbers:
            self._numbers = dict(zip(self.types, count(), strict=False))
            self._number_of_each = bytes(map(self._numbers.__getitem__, self._type_of_each))


_MOST_NUMBERED = 256
"""Maximum number of types with numbers that fit into a byte."""


class AddressFilter:
    """Some addresses to search among very many: those of types, or of objects.

    Comparing one byte of all addresses at a time takes 10 ns an address for any number of wanted
    ones; looking each up in a set takes 50.

    Args:
        wanted: the addresses, which are identities. Of more than ``MOST``, it finds too many that
            are similar.
    """

    MOST = 60

    def __init__(self, wanted: Collection[int]) -> None:
        self.wanted = frozenset(wanted)
        python = _region(id(object))
        of_python = {identity for identity in wanted if _region(identity) == python}
        self._tables: list[list[tuple[int, bytes]]] = []
        """For Python's own types, and for all other addresses, the ``_COLUMNS``, each with a
        table: 1 for the bytes that the addresses have there.
        """
        # Two groups, because a byte of one address next to a byte of another one is similar, too:
        # in one group there would be many more such pairs.
        for identities_of_group in (of_python, self.wanted - of_python):
            if identities_of_group:
                columns = (
                    _COLUMNS if len(identities_of_group) > _MOST_IN_TWO_COLUMNS else _COLUMNS[:2]
                )
                tables = [
                    (column, _mask_of_bytes(column, identities_of_group)) for column in columns
                ]
                self._tables.append(tables)

    def similar(self, row: bytes) -> bytes:
        """Return a byte for each address in a row of ``identities``: 1 for the wanted addresses,
        and for a few similar ones, else 0. An empty result if all bytes would be 0.
        """
        are_similar = 0
        for columns in self._tables:
            are_of_group = -1
            for column, table in columns:
                bytes_of_column = row[column::ID_BYTES]
                are_of_group &= int.from_bytes(bytes_of_column.translate(table), sys.byteorder)
            are_similar |= are_of_group
        if not are_similar:
            return b""
        return are_similar.to_bytes(len(row) // ID_BYTES, sys.byteorder)

    def positions(self, row: bytes) -> Iterator[int]:
        """Yield the positions of the wanted addresses in a row of ``identities``."""
        are_similar = self.similar(row)
        position = are_similar.find(1)
        while position >= 0:
            address = row[position * ID_BYTES : (position + 1) * ID_BYTES]
            if int.from_bytes(address, sys.byteorder) in self.wanted:
                yield position
            position = are_similar.find(1, position + 1)

    def is_in(self, row: bytes) -> bool:
        """Return True if one of the wanted addresses is in a row of ``identities``."""
        return next(self.positions(row), None) is not None


_COLUMNS = (1, 2, 3)
if sys.byteorder == "big":
    _COLUMNS = (6, 5, 4)
"""The bytes in which most addresses differ, from the lowest on; all are multiples of 16."""
_MOST_IN_TWO_COLUMNS = 4
"""For so many addresses, two columns suffice: hardly any other address is similar in two bytes."""


def _region(identity: int) -> int:
    """Return the part of an address above the ``_COLUMNS``: that of Python's own types is alike."""
    return identity >> 32


def _mask_of_bytes(column: int, addresses: Collection[int]) -> bytes:
    """Return 1 at the positions that are bytes of the addresses in a column, else 0."""
    table = bytearray(256)
    for address in addresses:
        table[address.to_bytes(ID_BYTES, sys.byteorder)[column]] = 1
    return bytes(table)


class TypesOfMany(Generic[T]):
    """Finds the objects of few types among very many objects.

    A ``Batch`` takes 130 ns an object before its first answer. This reads the addresses of the
    types in 20 ns, and a search takes 10: it compares one byte of all addresses at a time.
    """

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._type_ids = identities_of_list(list(map(type, items)))

    def of_types(self, types: AddressFilter) -> list[T]:
        """Return the objects of some types."""
        are_similar = types.similar(self._type_ids)
        if not are_similar:
            return []
        similar = list(compress(self._items, are_similar))
        if are_of_one_type(similar, types.wanted):
            return similar
        return of_types(types.wanted, similar)


def are_of_one_type(items: list[Any], wanted: Collection[int]) -> bool:
    """Return True if there is one ``wanted`` type, and all items are of it.

    Comparing all addresses at once takes a fifth of the time that looking up each of them takes.
    """
    if len(wanted) > 1:
        return False
    (kind,) = wanted
    type_ids = identities_of_list(list(map(type, items)))
    return type_ids == kind.to_bytes(ID_BYTES, sys.byteorder) * len(items)


def ids_of(items: Sequence[object]) -> list[int]:
    """Return the identity of each object, in half of the time that ``map(id, items)`` takes."""
    if len(items) < _READ_ONE_BY_ONE:
        return list(map(id, items))
    return memoryview(identities(items)).cast("Q").tolist()


def ids_of_own(items: list[Any]) -> list[int]:
    """Return the ``ids_of`` a list that no other thread changes."""
    if len(items) < _READ_ONE_BY_ONE:
        return list(map(id, items))
    return memoryview(identities_of_list(items)).cast("Q").tolist()


_READ_ONE_BY_ONE = 50
"""Fewer identities than these are read one by one."""


class IdentityTable(Generic[T]):
    """A value for each of very many objects, by identity; keeps none of the objects alive.

    Until the first question an object takes 8 bytes. Its entry in a dict takes more than 100, in
    fresh memory, which the system has to clear: a start of an experiment records 50,000 objects,
    and few ends ask for any of them.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, Iterable[T]]] = []
        """Identities with their values that are not yet in the dict."""
        self._by_identity: dict[int, T] = {}

    def add(self, items: list[Any], values: Iterable[T]) -> None:
        """Add some objects with their values.

        Args:
            items: a list that no other thread changes.
            values: as many of them, or more; later ones replace earlier ones. Of a list, the
                collector would follow each.
        """
        if len(items) < _READ_ONE_BY_ONE:
            self._rows.append((array("Q", map(id, items)).tobytes(), values))
        else:
            self._rows.append((identities_of_list(items), values))

    def by_identity(self) -> dict[int, T]:
        """Return the values by identity; the first call makes the dict."""
        for row, values in self._rows:
            self._by_identity.update(zip(memoryview(row).cast("Q"), values, strict=False))
        self._rows.clear()
        return self._by_identity

    def has_at_least(self, number: int) -> bool:
        """Return True if the table has at least ``number`` different objects."""
        in_rows = sum(len(row) for row, _ in self._rows) // ID_BYTES
        if len(self._by_identity) + in_rows < number:
            return False
        return len(self.by_identity()) >= number


class Kinds:
    """The types of very many objects, of which most have the type of their neighbours: reading them
    takes less than half of the time of a ``Batch``.

    Attributes:
        items: the objects.
        examples: one object of each type, by the type's identity.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.examples = dict[int, Any]()
        self._of_parts = list[set[int]]()
        """The identities of the types in each part."""
        if 0 < len(items) < _READ_ONE_BY_ONE:
            self.examples = one_of_each(items)
            self._of_parts.append(set(self.examples))
            return
        types = map(type, items)
        for start in range(0, len(items), _PART_LENGTH):
            type_ids = identities(islice(types, _PART_LENGTH))
            if type_ids == type_ids[:ID_BYTES] * (len(type_ids) // ID_BYTES):  # all are alike
                examples = one_of_each(items[start : start + 1])
            else:
                examples = one_of_each(items[start : start + _PART_LENGTH])
            self.examples.update(examples)
            self._of_parts.append(set(examples))

    def positions(self, kinds: Set[int]) -> list[int]:
        """Return the positions of the objects whose types are among ``kinds``."""
        positions = list[int]()
        for start, type_ids in self.parts():
            if not type_ids.isdisjoint(kinds):
                part = self.part(start)
                is_wanted = map(kinds.__contains__, map(id, map(type, part)))
                positions += compress(count(start), is_wanted)
        return positions

    def of_types(self, wanted: Set[int]) -> list[Any]:
        """Return the objects whose types are among ``wanted``."""
        if self.examples.keys() <= wanted:
            return list(self.items)
        if self.examples.keys().isdisjoint(wanted):
            return []
        if len(self._of_parts) == 1:
            return of_types(wanted, self.items)
        objects = list[Any]()
        for start, type_ids in self.parts():
            if type_ids <= wanted:
                objects += self.part(start)
            elif not type_ids.isdisjoint(wanted):
                objects += of_types(wanted, self.part(start))
        return objects

    def derived_from(self, *bases: type) -> set[int]:
        """Return the identities of the types that derive from a class."""
        return kinds_of(list(self.examples.values()), *bases)

    def instances(self, *bases: type) -> list[Any]:
        """Return the objects that are instances of a class, or of its subclasses."""
        return self.of_types(self.derived_from(*bases))

    def parts(self) -> Iterator[tuple[int, set[int]]]:
        """Yield the position of each part's first object, and the types of the part."""
        starts = range(0, len(self.items), _PART_LENGTH)
        return zip(starts, self._of_parts, strict=True)

    def part(self, start: int) -> Sequence[Any]:
        """Return the objects of the part that begins at a position."""
        return self.items[start : start + _PART_LENGTH]


_PART_LENGTH = 2000
"""Number of identities to compare at once."""


def differences(row: bytes, objects: tuple[object, ...]) -> Iterator[int]:
    """Yield the positions at which objects differ from earlier objects; few do, so their identities
    are compared in parts.

    Args:
        row: the ``identities`` of the earlier objects.
        objects: as many objects.
    """
    for start in range(0, len(objects), _PART_LENGTH):
        before = row[start * ID_BYTES : (start + _PART_LENGTH) * ID_BYTES]
        after = identities_of_part(objects, start, len(before) // ID_BYTES)
        if before != after:
            are_different = map(ne, memoryview(before).cast("Q"), memoryview(after).cast("Q"))
            yield from compress(count(start), are_different)


def type_names(items: Sequence[object]) -> list[str]:
    """Return the name of each item's type."""
    examples = Kinds(items).examples
    names = {type_id: type_name(example) for type_id, example in examples.items()}
    if len(names) == 1:
        return [*names.values()] * len(items)
    return list(map(names.__getitem__, map(id, map(type, items))))


def kinds_of(items: Sequence[object], *bases: type) -> set[int]:
    """Return the identities of the items' types that derive from a base; calls no Python function
    for each type.
    """
    base_ids = set(map(id, bases))
    derived = set[int]()
    for type_id, example in one_of_each(items).items():
        if not base_ids.isdisjoint(map(id, mro_of(type(example)))):
            derived.add(type_id)
    return derived


def instances_among(items: Sequence[T], *bases: type) -> list[T]:
    """Return the items that are instances of a class, or of its subclasses."""
    return of_types(kinds_of(items, *bases), items)


def subtypes(bases: Iterable[type]) -> dict[int, type]:
    """Return classes, and all classes that derive from them, by identity."""
    classes = list(bases)
    by_key = by_identity(classes)
    for base in classes:  # the list grows
        below: list[type] = type.__subclasses__(base)
        for kind in below:
            if id(kind) not in by_key:
                by_key[id(kind)] = kind
                classes.append(kind)
    return by_key


def held_once() -> int:
    """Return the reference count of an object to which one object refers, while it is in a list of
    referents and in a chunk of that list.
    """
    holder = [object()]
    referents = gc.get_referents(holder)
    (part,) = chunks(referents)
    return next(map(sys.getrefcount, part))


def _counts_of_one_holder() -> tuple[int, int]:
    """Return the reference counts of an object with one holder, in a list of referents: by ``map``,
    and by index.
    """
    holder = [object()]
    references = gc.get_referents(holder)
    by_map = next(map(sys.getrefcount, references))
    by_index = sys.getrefcount(references[0])
    return by_map, by_index


ONCE_IN_LIST, ONCE_BY_INDEX = _counts_of_one_holder()
"""Maximum reference counts of an object to which only one object refers, while it is in a list of
referents: read by ``map(sys.getrefcount, list)``, and by ``sys.getrefcount(list[0])``.
"""


def linked_to(item: object) -> list[Any]:
    """Return the objects of its own type to which an object refers, as a node of a linked list
    refers to the next one: directly, or by the dict of its attributes.
    """
    kind = type(item)
    referents = gc.get_referents(item)
    same = of_types({id(kind)}, referents)
    if same or kind is dict:
        return same
    # A dict with other holders may be a namespace, which leads to everything.
    counts = list(map(sys.getrefcount, referents))
    unshared = list(compress(referents, map(ONCE_IN_LIST.__ge__, counts)))
    attributes = of_types({id(dict)}, unshared)
    return of_types({id(kind)}, gc.get_referents(*attributes))


def by_identity(items: Sequence[T]) -> dict[int, T]:
    """Return the items without duplicates, by identity."""
    return dict(zip(ids_of(items), items, strict=True))


def container_base(kind: type) -> Any:
    """Return the built-in container from which a type derives; None if it derives from none."""
    for base in CONTAINERS:
        if type.__subclasscheck__(base, kind):
            return base
    return None


def container_bases(examples: Mapping[int, object]) -> dict[int, Any]:
    """Return the built-in container from which each type of containers derives, by the type's
    identity, like ``examples``; calls no Python function for each type.
    """
    bases = dict[int, Any]()
    for type_id, example in examples.items():
        for base in CONTAINERS:
            if type.__subclasscheck__(base, type(example)):
                bases[type_id] = base
    return bases


def lengths_of(containers: Sequence[Any], bases: Mapping[int, Any]) -> list[int]:
    """Return the number of items of each container; in C if all are plain, because there may be a
    million.

    Args:
        containers: the containers.
        bases: the built-in type from which each of their types derives, by the type's identity.
    """
    if types_of(containers) <= CONTAINER_TYPES:
        return list(map(len, containers))
    return [bases[id(type(item))].__len__(item) for item in containers]


def parts_of_container(container: Any, base: Any, step: int = CHUNK) -> Iterator[Sequence[Any]]:
    """Yield the items of a container, the values and keys of a dict, in chunks that begin ``step``
    items apart.

    A list of all items, as from ``gc.get_referents``, would take 800 MiB for a hundred million of
    them.

    Raises:
        RuntimeError: a thread changes the container.
    """
    length = base.__len__(container)
    if base is list or base is tuple:
        for start in range(0, length, step):
            yield base.__getitem__(container, slice(start, start + CHUNK))
        return
    iterators = [base.__iter__(container)]
    if base is dict:
        iterators.insert(0, iter(dict.values(container)))
    if issubclass(type(container), OrderedDict):
        iterators.append(base.__iter__(container))  # its list of keys refers to each of them, too
    for items in iterators:
        # No variable for a chunk, which would count as another reference to its items.
        for _ in range(0, length, step):
            yield list(islice(items, CHUNK))
            next(islice(items, step - CHUNK, step - CHUNK), None)  # skips items in C

"""Records the contents of named objects, a few references deep, to find later which new objects
they hold.

The collector tells the age of neither text nor frames of other libraries, but the containers that
keep them are known.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from itertools import compress, filterfalse, islice, repeat
from operator import not_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.arrays import (
    flat_elements,
    has_objects,
    holding_objects,
    is_array,
    library_type,
    read_array,
)
from ipygpumem.heap.bulk import (
    ONCE_IN_LIST,
    IdentityTable,
    Kinds,
    by_identity,
    chunks,
    container_bases,
    ids_of,
    of_types,
    one_of_each,
    types_of,
    without_types,
)
from ipygpumem.heap.containers import APPENDED, CONTAINER_TYPES, UNTRACKED_TYPES
from ipygpumem.heap.knowledge.barriers import globals_among, types_not_entered
from ipygpumem.heap.paths.data_frame_steps import arrays_of_cells, labels_of_columns
from ipygpumem.introspect import (
    ATOMS,
    HEAP_TYPE,
    NUMBERS,
    class_dict,
    flags_of,
    instance_dict,
    is_instance,
    is_users_class,
    is_users_module,
    module_dict,
)
from ipygpumem.inventory.earlier_data import EarlierData
from ipygpumem.inventory.growth import Extents, Grown
from ipygpumem.scope.ownable import ownable, ownable_objects

_LEVELS = 3
"""Steps from a name: an object, the dict of its attributes, and a container among them."""
_MOST = 50_000
"""Number of objects from which no further contents are recorded."""
_MOST_NAMES = 10_000
"""Maximum number of names, the latest first."""
_SHORT = 100
"""Maximum length of containers with known items; of longer ones, the length and the last item are
recorded.
"""
_LONG_TEXT = 1 << 10
"""Minimum length of a dict's key that counts as data."""
_AT_ONCE = 500
"""Number of objects whose contents are listed at once."""
_LONG_AT_ONCE = 20
"""Number of long containers whose items are listed at once: a million at most."""
_APPENDED = set(map(id, APPENDED))
_RECORDS = {id(kind) for kind in (tuple, list, dict)}
"""Types of the items of a long container in which untracked data is recorded."""


Chain = tuple[object, ...]
"""A named object, and the objects from there to another one: each refers to the next."""


class Received(NamedTuple):
    """New objects in an old one."""

    name: str
    chain: Chain
    """The objects from the named one to the holder of the new ones."""
    items: list[object]


class GrownContainer(NamedTuple):
    """An old container that has grown, which may keep only numbers or bytes."""

    name: str
    chain: Chain
    """The objects from the named one to the container."""
    grown: Grown


class Contents:
    """The objects within a few steps of a notebook's names, by identity; keeps none of them alive.

    An object is *known* if it was within these steps. A *parent* is a known object that was short:
    all objects in it are known, and a further one is new. A *long* container has known
    ends alone: new are the objects added to its end, and the untracked data in it.

    An object that takes the place of a dead one counts as old, unless the collector's lists tell
    that it is new. An old object that was deeper inside, or had no name, counts as new once it is
    within reach.

    Args:
        namespace: the notebook's names.
        modules: names of modules whose contents are recorded, too.

    Attributes:
        earlier: the data among these objects that the collector does not track.
    """

    def __init__(self, namespace: dict[str, Any], modules: Iterable[str] = ()) -> None:
        self._modules = tuple(modules)
        self._within_reach = IdentityTable[None]()
        self._read = IdentityTable[None]()
        """Objects within reach whose contents are known."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Length, and identity of the last item or key, of each long container."""
        self._with_records = dict[int, None]()
        """Long containers with known data in their items, by identity."""
        self._labels = dict[int, list[str]]()
        """The labels of the columns of data frames, by identity."""
        self._extents = Extents()
        self.earlier = EarlierData()
        self._older = max(0, len(namespace) - _MOST_NAMES)
        # From the end, so that the older ones are not touched.
        newest_first = list(islice(reversed(namespace.values()), _MOST_NAMES))
        values = newest_first[::-1]
        kinds = Kinds(values)
        self._within_reach.add(values, repeat(None))
        self._extents.add(kinds, has_short=True)
        self.earlier.add(kinds)
        level = _leading(kinds) + self._record_namespaces(kinds)
        level = self._record_contents(level) + self._record_modules()
        for _ in range(_LEVELS - 1):
            level = self._record_contents(level)

    @property
    def _known(self) -> Mapping[int, None]:
        """The objects within reach, by identity."""
        return self._within_reach.by_identity()

    @property
    def _parents(self) -> Mapping[int, None]:
        """The objects within reach whose contents are known, by identity."""
        return self._read.by_identity()

    def _record_namespaces(self, kinds: Kinds) -> list[object]:
        """Record the namespaces of named modules and classes; return the user's namespaces, whose
        contents are recorded, too. A library's leads to everything.
        """
        of_user = list[object]()
        for owner, space in _modules_and_classes(kinds):
            self._within_reach.add([space], repeat(None))
            if is_users_module(owner) or is_users_class(owner):
                of_user.append(space)
            else:
                (self._ends[id(space)],) = _ends_of([space])
        return of_user

    def _record_modules(self) -> list[object]:
        """Record the modules, their classes, and the contents of both; return the contents that may
        refer to more, but for functions, of which there are thousands.
        """
        modules = list(self._live_modules().values())
        spaces = list(map(module_dict, modules))
        classes = [space for *_, space in self._classes_of(modules)]
        self._within_reach.add([*modules, *spaces, *classes], repeat(None))
        contents = self._record_contents(spaces) + self._record_contents(classes)
        return list(without_types({id(FunctionType)}, contents))

    def _classes_of(
        self, modules: Iterable[ModuleType]
    ) -> Iterator[tuple[ModuleType, dict[str, Any], type, dict[str, object]]]:
        """Yield the classes that some modules define: each module with its namespace, the class,
        and the namespace of this.
        """
        for module in modules:
            space = module_dict(module)
            name = space.get("__name__")
            kinds = of_types({id(type)}, list(space.values()))
            for kind in kinds:
                names = gc.get_referents(class_dict(kind))[0]
                if names.get("__module__") is name:
                    yield module, space, kind, names

    def _record_contents(self, level: Sequence[object]) -> list[object]:
        """Record the contents of short containers and other objects, and the ends of long
        containers; return the contents that may refer to more.
        """
        kinds_of_level = Kinds(level)
        arrays = _arrays_of_objects(kinds_of_level)
        short, long = _by_length(kinds_of_level, arrays)
        self._record_long(long)
        contents = list[object]()
        for part in chunks(short, _AT_ONCE):
            if self._within_reach.has_at_least(_MOST):
                break
            contents += self._record(gc.get_referents(*part))
            self._read.add(list(part), repeat(None))
        frames = _frames_among(kinds_of_level)
        for frame in frames:
            self._labels[id(frame)] = labels_of_columns(frame)
        in_arrays = _contents_of_arrays(arrays, frames)
        if in_arrays:
            contents += self._record(in_arrays)
        if not contents:
            return contents
        parents = self._parents
        return [item for key, item in by_identity(contents).items() if key not in parents]

    def _record_long(self, containers: Sequence[Any]) -> None:
        """Record the ends of long containers, and the data and lengths of the items of those that
        are not too long.
        """
        self._ends.update(zip(map(id, containers), _ends_of(containers), strict=True))
        counted = of_types(CONTAINER_TYPES, containers)
        with_records = [item for item in counted if len(item) <= _MOST]
        self._with_records.update(dict.fromkeys(ids_of(with_records)))
        for part in chunks(with_records, _LONG_AT_ONCE):
            items = gc.get_referents(*part)
            for objects in (items, _contents_of_records(items)):
                kinds = Kinds(objects)
                self._extents.add(kinds)
                self.earlier.add(kinds)

    def _record(self, contents: list[object]) -> list[object]:
        """Record some objects; return those that may refer to more."""
        kinds = Kinds(contents)
        self._within_reach.add(contents, repeat(None))
        self._extents.add(kinds)
        self.earlier.add(kinds)
        return _leading(kinds)

    def _live_modules(self) -> dict[str, ModuleType]:
        """Return the recorded modules, each under a name that no object of the notebook has."""
        modules = dict[str, ModuleType]()
        for name in self._modules:
            module = sys.modules.get(name)
            if module is not None:
                modules[f"module {name}"] = module
        return modules

    def unknown(self, namespace: dict[str, Any]) -> list[object]:
        """Return the objects of names that were not within reach."""
        now = dict(namespace)
        values = [now[name] for name in ownable(islice(now, self._older, None))]
        return list(compress(values, map(not_, self._are_known(values))))

    def length_of(self, item: object) -> int | None:
        """Return the length that a container within reach had; None if it is unknown."""
        return self._extents.length_of(item)

    def columns_of(self, frame: object) -> Sequence[str]:
        """Return the code of the label of each column that a data frame within reach had."""
        return self._labels.get(id(frame), ())

    def knows(self, item: object) -> bool:
        """Return True if an object was within reach."""
        return id(item) in self._known

    def _are_known(self, items: Sequence[object]) -> Iterator[bool]:
        """Return for each item if it was within reach."""
        return map(self._known.__contains__, map(id, items))

    def received(
        self,
        namespace: dict[str, Any],
        made: Set[int] = frozenset(),
        own_references: Mapping[int, int] | None = None,
        is_older_array: Callable[[object], bool] | None = None,
        *,
        has_containers: bool = False,
    ) -> Iterator[Received]:
        """Yield the new objects in each object that was within reach, each once; at the end the new
        data in long containers and in their items, which has no name.

        Args:
            namespace: the names now.
            made: identities of the tracked objects made since, as far as the collector's lists
                tell.
            own_references: the number of our references to untracked objects, by identity.
            is_older_array: returns True for a NumPy array that may be older; without it, arrays in
                long containers and their items are left out.
            has_containers: True for the new containers in these, too, as far as all of their older
                data is known.
        """
        now = {**namespace, **self._live_modules()}
        names = _names_by_identity(now)
        chains = self._chains_from(list(map(now.get, names.values())))
        long = yield from self._received_in_each(names, chains, made)
        new_data = self._new_data_in_long(long, made, own_references or {})
        if is_older_array is not None:
            # Modules have arrays that no snapshot has seen.
            of_names = [item for item in long if not is_instance(chains[id(item)][0], ModuleType)]
            new_data += self._new_arrays_in_long(of_names, made, is_older_array)
        if has_containers:
            new_data += self._new_containers_in_long(long, made)
        if new_data:
            yield Received("", (), list(by_identity(new_data).values()))

    def _received_in_each(
        self, names: Mapping[int, str], chains: dict[int, Chain], made: Set[int]
    ) -> Generator[Received, None, list[object]]:
        """Yield the new objects in each object that was within reach; return the long containers.

        Its variables, such as the contents of the last object, end with it: objects to which they
        still refer would seem to have further holders.

        Args:
            names: the names of the named objects, by identity.
            chains: as for ``_older_with_contents``.
            made: as for ``received``.
        """
        long = list[object]()
        for item, children in self._older_with_contents(chains, made):
            chain = chains[id(item)]
            if id(item) in self._ends:
                long.append(item)
            new = self._new_in(item, children, made)
            if new:
                yield Received(names[id(chain[0])], chain, new)
        return long

    def _older_with_contents(
        self, chains: dict[int, Chain], made: Set[int]
    ) -> Iterator[tuple[object, list[object]]]:
        """Yield the parents and long containers, level by level from the names, each with its
        contents now; those of parents lead to the next level.

        Args:
            chains: the chains from the names, by the identity of the object at the end; those to
                the yielded objects are added.
            made: as for ``received``.
        """
        known = self._known
        parents = self._parents
        level = [chain[-1] for key, chain in chains.items() if key in known]
        for _ in range(_LEVELS):
            following = dict[int, object]()
            kinds = Kinds(level)
            arrays = by_identity(_arrays_of_objects(kinds))
            frames = by_identity(_frames_among(kinds))
            for item in level:
                is_parent = id(item) in parents
                if not is_parent and id(item) not in self._ends:
                    continue
                children = self._contents(item)
                if id(item) in arrays and is_parent:
                    children += _elements(item)
                yield item, children
                if id(item) in frames:
                    children = [*children, *arrays_of_cells(item)]
                if not is_parent or not children:
                    continue
                for child in self._old_among(leading_objects(children), made):
                    if id(child) not in chains:
                        chains[id(child)] = (*chains[id(item)], child)
                        following[id(child)] = child
            level = list(following.values())

    def _chains_from(self, values: Sequence[object]) -> dict[int, Chain]:
        """Return the chains from named objects, and those to the namespaces of the recorded
        modules' classes, by the identity of the object at the end.
        """
        chains = _first_chains(values)
        for chain_to_class in self._classes_of(self._live_modules().values()):
            chains.setdefault(id(chain_to_class[-1]), chain_to_class)
        return chains

    def grown(
        self, namespace: dict[str, Any], smallest: int, made: Set[int] = frozenset()
    ) -> Iterator[GrownContainer]:
        """Yield the containers within reach that have grown by at least ``smallest`` bytes since,
        each once, and those whose items have grown by that together.

        Args:
            namespace: the names now.
            smallest: the bytes.
            made: as for ``received``.
        """
        now = {**namespace, **self._live_modules()}
        names = _names_by_identity(now)
        values = list(map(now.get, names.values()))
        spaces = [
            (owner, space)
            for owner, space in _modules_and_classes(Kinds(values))
            if id(space) in self._parents
        ]
        levels: list[list[Any]] = [values]
        listed = set[int]()
        for number in range(_LEVELS + 1):
            level = levels[-1]
            grown_here = self._grown_in(level, listed)
            large = [grown for grown in grown_here if grown.size_bytes >= smallest]
            small = [grown for grown in grown_here if grown.size_bytes < smallest]
            large += self._long_with_grown_items(level, smallest, made)
            yield from _with_chains(large, levels, spaces, names)
            if number > 0:
                with_small = _with_grown_items(small, levels[-2], smallest, made)
                yield from _with_chains(with_small, levels[:-1], spaces, names)
            if number == _LEVELS:
                return
            children = self._recorded_children(level)
            if number == 0:
                for _, space in spaces:
                    children[id(space)] = space
            levels.append(list(children.values()))

    def _grown_in(self, level: Sequence[Any], listed: set[int]) -> list[Grown]:
        """Return the objects of a level that were within reach and have grown, except those whose
        identities are ``listed``; the new ones are added to these.
        """
        within_reach = list(compress(level, self._are_known(level)))
        new_rows = list[Grown]()
        for grown in self._extents.grown(within_reach, 1):
            if id(grown.item) not in listed:
                listed.add(id(grown.item))
                new_rows.append(grown)
        return new_rows

    def _long_with_grown_items(
        self, level: Sequence[Any], smallest: int, made: Set[int]
    ) -> Iterator[Grown]:
        """Yield the long containers whose items, or records among these, have grown, as far as they
        were no short ones.
        """
        for container in by_identity(of_types(CONTAINER_TYPES, level)).values():
            is_new = id(container) in made and type(container) is not dict
            if id(container) not in self._ends or is_new or len(container) > _MOST:
                continue
            items = gc.get_referents(container)
            grown_items = self._grown_among(items)
            in_records = self._grown_among(_contents_of_records(items))
            grown_items += _with_grown_items(in_records, items, 1, made)
            yield from _with_grown_items(grown_items, [container], smallest, made)

    def _grown_among(self, items: Sequence[object]) -> list[Grown]:
        """Return the containers among some items that were long, and have grown."""
        return list(self._extents.grown(self._extents.long_among(items), 1))

    def _recorded_children(self, level: Sequence[Any]) -> dict[int, Any]:
        """Return the objects to which some objects refer whose contents were recorded, by
        identity; their attributes may be in a dict since, because code has read ``__dict__``.
        """
        parents = [item for item in leading_objects(level) if id(item) in self._parents]
        kinds = Kinds(parents)
        arrays = _arrays_of_objects(kinds)
        short, _ = _by_length(kinds, arrays)
        children = gc.get_referents(*short)
        children += _contents_of_arrays(arrays, _frames_among(kinds))
        new_dicts = [item for item in of_types({id(dict)}, children) if id(item) not in self._known]
        return by_identity([*children, *gc.get_referents(*new_dicts)])

    def _contents(self, item: object) -> list[object]:
        """Return the objects in another one; the dict of its attributes may be newer than these."""
        children = gc.get_referents(item)
        if type(item) is dict and len(children) > len(item):
            children = [*_keys_with_data(item), *item.values()]
        dicts = of_types({id(dict)}, children)
        if not all(self._are_known(dicts)):
            attributes = instance_dict(item)
            children = [child for child in children if child is not attributes]
            if attributes is not None:
                children += attributes.values()
        wanted = types_of(children) - NUMBERS
        return of_types(wanted, children)

    def _old_among(self, items: Sequence[object], made: Set[int]) -> list[object]:
        """Return the items that were within reach and are not new; a dict's age is uncertain."""
        known = list(compress(items, self._are_known(items)))
        return [item for item in known if id(item) not in made or type(item) is dict]

    def _new_in(self, item: Any, children: list[object], made: Set[int]) -> list[object]:
        """Return the new objects in an object, or the items added to the end of a long one."""
        new = self._added_to(item)
        if id(item) in self._parents:
            old = by_identity(self._old_among(children, made))
            new = [child for child in children if id(child) not in old]
        if made:  # a tracked object that is not among them is older, however deep inside it was
            new = [child for child in new if id(child) in made or not gc.is_tracked(child)]
        earlier = by_identity(self.earlier.possibly_among(new))
        return [child for child in new if id(child) not in earlier]

    def _items_and_contents(self, container: Any, made: Set[int]) -> list[object]:
        """Return the items of a container that was long, with the contents of the older records
        among them; nothing if they were not recorded.
        """
        if not made:
            return []
        if has_objects(container):
            items = _elements(container)
        elif id(container) in self._with_records and _has_records(container):
            items = gc.get_referents(container)
        else:
            return []
        tracked = by_identity(list(filter(gc.is_tracked, items)))
        records = {key: tracked[key] for key in tracked.keys() - made}
        # A dict is tracked once it gets a container, so that an older one may seem new.
        records.update(by_identity(self.earlier.possibly_among(items)))
        return [*items, *_contents_of_records(list(records.values()))]

    def _new_data_in_long(
        self, containers: Iterable[Any], made: Set[int], own_references: Mapping[int, int]
    ) -> list[object]:
        """Return the new untracked data in containers that were long, and in their older items.

        Data with further holders is left out: it may be older, such as the texts of a data frame.
        So is that in arrays, whose earlier texts are too many to be known.
        """
        new = list[object]()
        for container in filterfalse(is_array, containers):
            inside = self._items_and_contents(container, made)
            new += self.earlier.added_to(_without_shared(inside, own_references))
        return new

    def _new_arrays_in_long(
        self, containers: Iterable[Any], made: Set[int], is_older: Callable[[object], bool]
    ) -> list[object]:
        """Return the new NumPy arrays in containers that were long, and in their older items."""
        array_type = library_type("numpy", "ndarray")
        new = list[object]()
        for container in containers if array_type is not None else ():
            inside = self._items_and_contents(container, made)
            arrays = by_identity(of_types({id(array_type)}, inside))
            new += filterfalse(is_older, arrays.values())
        return new

    def _new_containers_in_long(self, containers: Iterable[Any], made: Set[int]) -> list[object]:
        """Return the new containers in containers that were long, and in their older items.

        A new list or dict is in ``made``; a tuple of data may be untracked, and ``earlier`` tells.
        """
        new = list[object]()
        for container in containers:
            inside = self._items_and_contents(container, made)
            inner = of_types(CONTAINER_TYPES, inside)
            tracked = [item for item in inner if id(item) in made]
            if is_array(container):
                new += without_types({id(dict)}, tracked)
                continue
            # A dict is tracked once it gets a container, so that an older one may seem new.
            new += self.earlier.unknown_among(tracked)
            new += of_types(UNTRACKED_TYPES, self.earlier.added_to(inside))
        return new

    def _added_to(self, item: Any) -> list[object]:
        """Return the items added to the end of a container that was long."""
        length, last = self._ends.get(id(item), (0, 0))
        if not length or not _APPENDED.issuperset(types_of([item])) or len(item) <= length:
            return []
        last_before, *added = islice(item, length - 1, None)
        if id(last_before) != last:
            return []
        if type(item) is dict:
            return list(islice(item.values(), length, None))
        return added


def _keys_with_data(items: dict[Any, Any]) -> list[object]:
    """Return the keys of a dict, without short texts.

    The collector lists no texts among the keys of a dict that has no other keys: an older one would
    seem new once the dict gets a number as a key.
    """
    texts = of_types({id(str)}, list(items))
    long = compress(texts, map(_LONG_TEXT.__le__, map(len, texts)))
    return [*without_types({id(str)}, list(items)), *long]


def _has_records(container: Any) -> bool:
    """Return False for another object in the place of a dead container, and if it is too long."""
    return id(type(container)) in CONTAINER_TYPES and len(container) <= _MOST


def _contents_of_arrays(arrays: Sequence[Any], frames: Sequence[object]) -> list[object]:
    """Return the elements of short arrays of objects, and the arrays of data frames' cells."""
    contents = list[object]()
    for array in arrays:
        if read_array("size", array) <= _SHORT:
            contents += _elements(array)
    for frame in frames:
        contents += arrays_of_cells(frame)
    return contents


def _arrays_of_objects(kinds: Kinds) -> list[Any]:
    """Return the arrays of objects among some objects."""
    array_type = library_type("numpy", "ndarray")
    if array_type is None:
        return []
    arrays = kinds.instances(array_type)
    return list(compress(arrays, holding_objects(arrays)))


def _frames_among(kinds: Kinds) -> list[Any]:
    """Return the data frames and series among some objects."""
    frame_type, series_type = library_type("pandas", "DataFrame"), library_type("pandas", "Series")
    if frame_type is None or series_type is None:
        return []
    return kinds.instances(frame_type, series_type)


def _elements(array: Any) -> list[Any]:
    """Return the elements of an array of objects; none if they are too many."""
    if read_array("size", array) > _MOST:
        return []
    return flat_elements(array) or []


def _contents_of_records(items: Sequence[object]) -> list[object]:
    """Return the contents of the records among the items of a long container: of dicts, lists and
    tuples, and of instances of the user's classes, without the dicts of their attributes.
    """
    contents = gc.get_referents(*of_types(_RECORDS, items))
    examples = one_of_each(items)
    users = set[int]()
    for key, example in examples.items():
        kind = type(example)
        if flags_of(kind) & HEAP_TYPE and is_users_class(kind):
            users.add(key)
    attributes = gc.get_referents(*of_types(users, items))
    contents += gc.get_referents(*of_types({id(dict)}, attributes))
    contents += without_types({id(dict)}, attributes)
    return contents


def _without_shared(
    references: Sequence[object], own_references: Mapping[int, int]
) -> list[object]:
    """Return the objects to which nothing else refers.

    Args:
        references: an object for each reference to it; no other variable may have this list.
        own_references: the number of our further references to objects, by identity.
    """
    counts = list(map(sys.getrefcount, references))
    occurrences = Counter(map(id, references))
    unshared = list[object]()
    for item, count in zip(references, counts, strict=True):
        # Each occurrence stands for two references: that of a holder, and that of the list.
        # ONCE_IN_LIST counts those of the first occurrence.
        of_further_occurrences = 2 * (occurrences[id(item)] - 1)
        known_references = ONCE_IN_LIST + of_further_occurrences + own_references.get(id(item), 0)
        if count <= known_references:
            unshared.append(item)
    return unshared


def _with_grown_items(
    grown_items: Sequence[Grown], parents: Sequence[object], smallest: int, made: Set[int]
) -> Iterator[Grown]:
    """Yield the objects in which several items have grown by ``smallest`` bytes together.

    Args:
        grown_items: the items that have grown.
        parents: the objects that may refer to them.
        smallest: the bytes.
        made: identities of the tracked objects made since: these have not grown.
    """
    sizes = {id(grown.item): grown.size_bytes for grown in grown_items}
    if sum(sizes.values()) < smallest:
        return
    for parent in parents:
        if id(parent) in made and type(parent) is not dict:  # a dict's age is uncertain
            continue
        inside = sizes.keys() & set(map(id, gc.get_referents(parent)))
        size_bytes = sum(map(sizes.__getitem__, inside))
        if size_bytes >= smallest:
            yield Grown(parent, size_bytes, 0, 0, len(inside))


def _with_chains(
    found: Iterable[Grown],
    levels: Sequence[Sequence[object]],
    spaces: Sequence[tuple[object, dict[str, object]]],
    names: Mapping[int, str],
) -> Iterator[GrownContainer]:
    """Yield objects of the last level with their names and chains; ``names`` are those of the
    objects of the first level, by identity.
    """
    for grown in found:
        chain = _chain_to(grown.item, levels, spaces)
        yield GrownContainer(names[id(chain[0])], chain, grown)


def _chain_to(
    item: object,
    levels: Sequence[Sequence[object]],
    spaces: Sequence[tuple[object, dict[str, object]]],
) -> Chain:
    """Return the objects from a named one to ``item``, which is in the last of some levels of
    references.
    """
    chain = [item]
    owners = {id(space): owner for owner, space in spaces}
    for level in levels[-2::-1]:
        child = chain[0]
        parent = owners.get(id(child))
        if parent is None:
            parent = _parent_of(child, level)
        chain.insert(0, parent)
    return tuple(chain)


def _parent_of(child: object, level: Sequence[object]) -> object:
    """Return the object in ``level`` that refers to ``child``, perhaps through the dict of its
    attributes.
    """
    for references_of in (gc.get_referents, _through_dicts):
        for part in chunks(level, 500):
            if id(child) not in by_identity(references_of(*part)):
                continue
            for item in part:
                if id(child) in map(id, references_of(item)):
                    return item
    return child  # a thread has removed it since


def _through_dicts(*items: object) -> list[object]:
    """Return the objects to which dicts among the references of some objects refer."""
    return gc.get_referents(*of_types({id(dict)}, gc.get_referents(*items)))


def _names_by_identity(namespace: dict[str, Any]) -> dict[int, str]:
    """Return the first of the names of each object, by its identity."""
    objects = ownable_objects(namespace)
    return {id(objects[name]): name for name in reversed(objects)}


def _first_chains(values: Sequence[Any]) -> dict[int, Chain]:
    """Return the chain to each named object that may refer to more, and to the namespace of each
    named module and class, by identity.
    """
    chains: dict[int, Chain] = {}
    kinds = Kinds(values)
    for item in _leading(kinds):
        chains[id(item)] = (item,)
    for owner, space in _modules_and_classes(kinds):
        chains[id(space)] = (owner, space)
    return chains


def _modules_and_classes(kinds: Kinds) -> Iterator[tuple[Any, dict[str, object]]]:
    """Yield the modules and classes among some objects with their namespaces."""
    for module in kinds.instances(ModuleType):
        yield module, module_dict(module)
    for kind in kinds.instances(type):
        yield kind, gc.get_referents(class_dict(kind))[0]


def leading_objects(items: Sequence[Any]) -> list[Any]:
    """Return the items, each once, that may refer to more and do not lead to everything."""
    return _leading(Kinds(items))


def _leading(kinds: Kinds) -> list[Any]:
    """Return the ``leading_objects`` among some objects."""
    types = kinds.examples.keys() - ATOMS
    if not types:
        return []
    # Only the attributes of named modules and classes are recorded.
    types -= kinds.derived_from(ModuleType, type, *types_not_entered())
    leading = by_identity(kinds.of_types(types))
    if id(dict) in types:
        for item in globals_among(list(leading.values())):
            del leading[id(item)]
    return list(leading.values())


def _by_length(kinds: Kinds, arrays_of_objects: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Return some objects without the long containers and arrays of objects, and these."""
    items = kinds.items
    kinds_of_base: dict[Any, set[int]] = {}
    for key, base in container_bases(kinds.examples).items():
        kinds_of_base.setdefault(base, set()).add(key)
    long = dict[int, object]()
    for array in arrays_of_objects:
        if read_array("size", array) > _SHORT:
            long[id(array)] = array
    for base, container_kinds in kinds_of_base.items():
        sized = kinds.of_types(container_kinds)
        if max(map(base.__len__, sized)) <= _SHORT:
            continue
        is_long = map(_SHORT.__lt__, map(base.__len__, sized))
        for item in compress(sized, is_long):
            long[id(item)] = item
    if not long:
        return list(items), []
    is_short = map(not_, map(long.__contains__, map(id, items)))
    return list(compress(items, is_short)), list(long.values())


def _ends_of(containers: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Return for each container its length and the identity of its last item or key, by which a
    replaced end is seen; the identity of None for a container without order, such as a set.
    """
    ordered = by_identity(of_types(_APPENDED, containers))
    lists = [item if id(item) in ordered else () for item in containers]
    last_items = map(next, map(reversed, lists), repeat(None))
    return zip(map(len, lists), map(id, last_items), strict=True)

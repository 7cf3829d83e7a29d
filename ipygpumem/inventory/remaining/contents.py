"""Records the contents of named objects, a few references deep, to find later the new objects in
them.

The collector tells the age of neither text nor frames of other libraries, but the containers that
keep them are known: after ``settings["log"] = text``, the old dict has an item that it had not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from itertools import compress, islice, repeat
from operator import not_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import (
    IdentityTable,
    Kinds,
    by_identity,
    chunks,
    of_types,
    types_of,
    without_types,
)
from ipygpumem.heap.paths.data_frame_steps import arrays_of_cells, labels_of_columns
from ipygpumem.introspect import (
    NUMBERS,
    class_dict,
    instance_dict,
    is_instance,
    is_users_class,
    is_users_module,
    module_dict,
)
from ipygpumem.inventory.remaining.earlier_data import EarlierData
from ipygpumem.inventory.remaining.growth import Extents, GrownContainer
from ipygpumem.inventory.remaining.leading import (
    arrays_of_objects,
    data_frames,
    elements_and_cells,
    elements_of,
    leading_among,
    leading_objects,
    modules_and_classes,
    short_and_long,
)
from ipygpumem.inventory.remaining.levels_from_names import Chain, LevelsFromNames, NamedContainer
from ipygpumem.inventory.remaining.long_containers import LongContainers, with_grown_items
from ipygpumem.scope.ownable import ownable, ownable_objects

_LEVELS = 3
"""Steps from a name: an object, the dict of its attributes, and a container among them."""
_MOST_OBJECTS = 50_000
"""Number of objects from which no further contents are recorded."""
_MOST_NAMES = 10_000
"""Maximum number of names, the latest first."""
_LONG_TEXT = 1 << 10
"""Minimum length of a dict's key that counts as data."""
_PARENTS_AT_ONCE = 500
"""Number of objects whose contents are listed at once."""


class Received(NamedTuple):
    """New objects in an old one: after ``model.history["loss"] = losses``, the list ``losses``."""

    name: str
    """The name that leads to the old object, such as ``model``; empty if it is unknown."""
    chain: Chain
    """The objects from the named one to the old one: the model, and the dict ``history``."""
    items: list[object]
    """The new objects."""


class _NamedObjects(NamedTuple):
    """Objects with names, each once."""

    names: dict[int, str]
    """The first name of each object, by its identity."""
    objects: list[Any]
    """The objects in the order of ``names``."""


_OldObject = tuple[Any, list[object], list[object]]
"""An object that was within reach; the objects in it now, but none of a long container, whose items
are not listed one by one; and the arrays that the cells of a data frame are in, to which the frame
has no reference. (A plain tuple, because there may be 50,000 of them in one search.)
"""


class Contents:
    """The objects within a few steps of a notebook's names, by identity; keeps none of them alive.

    An object is *recorded* if it was within these steps. A *parent* is a recorded object that was
    short: all objects in it are recorded, and a further one is new. Of a *long* container, only the
    end and the untracked data in it are recorded.

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
        self.earlier = EarlierData()
        self._modules = tuple(modules)
        self._recorded_table = IdentityTable[None]()
        self._parents_table = IdentityTable[None]()
        self._extents = Extents()
        """The lengths of recorded containers, and of the containers in long ones."""
        self._long = LongContainers(self._extents, self.earlier)
        self._column_labels = dict[int, list[str]]()
        """The labels of the columns of data frames, by the frame's identity."""
        self._number_of_older_names = max(0, len(namespace) - _MOST_NAMES)
        # From the end, so that the older ones are not touched.
        newest_first = list(islice(reversed(namespace.values()), _MOST_NAMES))
        named = newest_first[::-1]
        kinds = Kinds(named)
        self._recorded_table.add(named, repeat(None))
        self._extents.add(kinds, has_short=True)
        self.earlier.add(kinds)
        level = leading_among(kinds) + self._record_namespaces(kinds)
        level = self._record_contents(level) + self._record_modules()
        for _ in range(_LEVELS - 1):
            level = self._record_contents(level)

    @property
    def _recorded(self) -> Mapping[int, None]:
        """The objects within reach, by identity."""
        return self._recorded_table.by_identity()

    @property
    def _parents(self) -> Mapping[int, None]:
        """The objects within reach whose contents are all recorded, by identity."""
        return self._parents_table.by_identity()

    # -- recording -------------------------------------------------------------------------------

    def _record_namespaces(self, kinds: Kinds) -> list[object]:
        """Record the namespaces of named modules and classes. Return those of the user's own: their
        contents are recorded, too. A library's namespace leads to everything.
        """
        namespaces_of_user = list[object]()
        for owner, namespace in modules_and_classes(kinds):
            self._recorded_table.add([namespace], repeat(None))
            if is_users_module(owner) or is_users_class(owner):
                namespaces_of_user.append(namespace)
            else:
                self._long.record_end(namespace)
        return namespaces_of_user

    def _record_modules(self) -> list[object]:
        """Record the modules, their classes, and the contents of both. Return the contents that may
        refer to more, without functions, of which there are thousands.
        """
        modules = list(self._live_modules().values())
        of_modules = list(map(module_dict, modules))
        of_classes = [chain[-1] for chain in _chains_to_classes(modules)]
        self._recorded_table.add([*modules, *of_modules, *of_classes], repeat(None))
        contents = self._record_contents(of_modules) + self._record_contents(of_classes)
        return list(without_types({id(FunctionType)}, contents))

    def _live_modules(self) -> dict[str, ModuleType]:
        """Return the recorded modules that are still loaded, each under a text such as ``module
        train``, which is no name of the notebook.
        """
        modules = dict[str, ModuleType]()
        for name in self._modules:
            module = sys.modules.get(name)
            if module is not None:
                modules[f"module {name}"] = module
        return modules

    def _record_contents(self, level: Sequence[object]) -> list[object]:
        """Record the contents of short containers and other objects, and of long containers the
        end. Return the contents that may refer to more: the next level.
        """
        kinds_of_level = Kinds(level)
        arrays = arrays_of_objects(kinds_of_level)
        short, long = short_and_long(kinds_of_level, arrays)
        if long:
            self._long.record(long)
        leading = list[object]()
        for part in chunks(short, _PARENTS_AT_ONCE):
            if self._recorded_table.has_at_least(_MOST_OBJECTS):
                break
            leading += self._record(gc.get_referents(*part))
            self._parents_table.add(list(part), repeat(None))
        frames = data_frames(kinds_of_level)
        for frame in frames:
            self._column_labels[id(frame)] = labels_of_columns(frame)
        if arrays or frames:
            leading += self._record(elements_and_cells(arrays, frames))
        if not leading:
            return leading
        parents = self._parents
        return [item for key, item in by_identity(leading).items() if key not in parents]

    def _record(self, objects: list[object]) -> list[object]:
        """Record objects, with the lengths of containers and the data among them. Return those from
        which the search goes on.
        """
        kinds = Kinds(objects)
        self._recorded_table.add(objects, repeat(None))
        self._extents.add(kinds)
        self.earlier.add(kinds)
        return leading_among(kinds)

    # -- questions about one object --------------------------------------------------------------

    def unrecorded_objects(self, namespace: dict[str, Any]) -> list[object]:
        """Return the objects that the user's names have now and that were not within reach."""
        objects = dict(namespace)
        latest_names = islice(objects, self._number_of_older_names, None)
        named = [objects[name] for name in ownable(latest_names)]
        return list(compress(named, map(not_, self._were_recorded(named))))

    def length_of(self, item: object) -> int | None:
        """Return the length that a container within reach had; None if it is unknown."""
        return self._extents.length_of(item)

    def columns_of(self, frame: object) -> Sequence[str]:
        """Return the code of the label of each column that a data frame within reach had."""
        return self._column_labels.get(id(frame), ())

    def has_recorded(self, item: object) -> bool:
        """Return True if an object was within reach."""
        return id(item) in self._recorded

    def _were_recorded(self, items: Sequence[object]) -> Iterator[bool]:
        """Return for each item True if it was within reach."""
        return map(self._recorded.__contains__, map(id, items))

    # -- new objects -----------------------------------------------------------------------------

    def received(
        self,
        namespace: dict[str, Any],
        new_ids: Set[int] = frozenset(),
        own_references: Mapping[int, int] | None = None,
        is_older_array: Callable[[object], bool] | None = None,
        *,
        has_containers: bool = False,
    ) -> Iterator[Received]:
        """Yield the new objects in each object that was within reach, each once. Last come the new
        data in long containers, and in their items, which have no name.

        Args:
            namespace: the names now.
            new_ids: identities of the tracked objects made since, as far as the collector's lists
                tell.
            own_references: the number of our references to untracked objects, by identity.
            is_older_array: returns True for a NumPy array that may be older; without it, arrays in
                long containers and their items are left out.
            has_containers: True for the new containers in these, too, as far as all of their older
                data is known.
        """
        long_chains = yield from self._received_in_each(namespace, new_ids)
        long = [chain[-1] for chain in long_chains]
        new_data = self._long.new_data(long, new_ids, own_references or {})
        if is_older_array is not None:
            # Modules have arrays that no snapshot has seen.
            of_names = [chain[-1] for chain in long_chains if not is_instance(chain[0], ModuleType)]
            new_data += self._long.new_arrays(of_names, new_ids, is_older_array)
        if has_containers:
            new_data += self._long.new_containers(long, new_ids)
        if new_data:
            yield Received(name="", chain=(), items=list(by_identity(new_data).values()))

    def _received_in_each(
        self, namespace: dict[str, Any], new_ids: Set[int]
    ) -> Generator[Received, None, list[Chain]]:
        """Yield the new objects in each object that was within reach, level by level from names.
        Return the chains to the long containers, from which the search does not go on.

        It is a function of its own so that its variables end before ``LongContainers.new_data``
        counts references: an object in ``contents`` would seem to have a further holder.

        Args:
            namespace: the names now.
            new_ids: as for ``received``.
        """
        named = self._named_now(namespace)
        long_chains = list[Chain]()
        chains = self._chains_from(named.objects)
        level = [chain[-1] for key, chain in chains.items() if key in self._recorded]
        for _ in range(_LEVELS):
            next_level = list[object]()
            for item, contents, cells in self._old_objects(level):
                chain = chains[id(item)]
                if id(item) in self._long.ends:
                    long_chains.append(chain)
                new_objects = self._new_in(item, contents, new_ids)
                if new_objects:
                    yield Received(named.names[id(chain[0])], chain, new_objects)
                if not contents:
                    continue
                leading = leading_objects([*contents, *cells] if cells else contents)
                for child in self._old_among(leading, new_ids):
                    if id(child) not in chains:
                        chains[id(child)] = (*chain, child)
                        next_level.append(child)
            level = next_level
        return long_chains

    def _old_objects(self, level: Sequence[object]) -> Iterator[_OldObject]:
        """Yield each parent and each long container of a level.

        Args:
            level: objects that are equally far from names.
        """
        parents = self._parents
        kinds = Kinds(level)
        arrays = by_identity(arrays_of_objects(kinds))
        frames = by_identity(data_frames(kinds))
        for item in level:
            if id(item) not in parents:
                if id(item) in self._long.ends:
                    yield item, [], []
                continue
            contents = self._contents_of(item)
            if id(item) in arrays:
                contents += elements_of(item)
            cells = arrays_of_cells(item) if id(item) in frames else []
            yield item, contents, cells

    def _chains_from(self, named: Sequence[object]) -> dict[int, Chain]:
        """Return the chains at which a search for old objects begins, by the identity of the last
        object: one for each named object that may refer to more, and one for each namespace of a
        named module or class, and of the recorded modules' classes.
        """
        chains: dict[int, Chain] = {}
        kinds = Kinds(named)
        for item in leading_among(kinds):
            chains[id(item)] = (item,)
        for owner, namespace in modules_and_classes(kinds):
            chains[id(namespace)] = (owner, namespace)
        for chain in _chains_to_classes(self._live_modules().values()):
            chains.setdefault(id(chain[-1]), chain)
        return chains

    def _contents_of(self, item: object) -> list[object]:
        """Return the objects in another one, without numbers.

        Code that has read ``__dict__`` since the start has made the dict of the object's
        attributes. That dict is not new data, so its values are returned instead of it.
        """
        contents = gc.get_referents(item)
        if type(item) is dict and len(contents) > len(item):  # the collector lists its keys, too
            contents = [*_keys_with_data(item), *item.values()]
        dicts = of_types({id(dict)}, contents)
        has_unrecorded_dict = not all(self._were_recorded(dicts))
        if has_unrecorded_dict:
            attributes = instance_dict(item)
            contents = [child for child in contents if child is not attributes]
            if attributes is not None:
                contents += attributes.values()
        types_to_return = types_of(contents) - NUMBERS
        return of_types(types_to_return, contents)

    def _old_among(self, items: Sequence[object], new_ids: Set[int]) -> list[object]:
        """Return the items that were within reach and are not new.

        A dict counts as old even if it is in ``new_ids``: the collector begins to track an older
        one when it gets its first container.
        """
        recorded = list(compress(items, self._were_recorded(items)))
        return [item for item in recorded if id(item) not in new_ids or type(item) is dict]

    def _new_in(self, item: Any, contents: list[object], new_ids: Set[int]) -> list[object]:
        """Return the new objects among the contents of a parent, or the items added to the end of a
        long container.

        Args:
            item: the parent or the long container.
            contents: the objects in the parent.
            new_ids: as for ``received``.
        """
        if id(item) in self._parents:
            old = by_identity(self._old_among(contents, new_ids))
            candidates = [child for child in contents if id(child) not in old]
        else:
            candidates = self._long.added_to_end_of(item)
        if new_ids:
            # Any other tracked object is older: it was too deep inside to be recorded.
            candidates = [
                child for child in candidates if id(child) in new_ids or not gc.is_tracked(child)
            ]
        earlier = by_identity(self.earlier.possibly_earlier_among(candidates))
        return [child for child in candidates if id(child) not in earlier]

    # -- old containers that have grown ----------------------------------------------------------

    def grown_containers(
        self, namespace: dict[str, Any], smallest: int, new_ids: Set[int] = frozenset()
    ) -> Iterator[NamedContainer]:
        """Yield the containers within reach that have grown by at least ``smallest`` bytes since,
        each once; and the objects whose items have grown by that together.

        Args:
            namespace: the names now.
            smallest: the bytes.
            new_ids: as for ``received``.
        """
        named = self._named_now(namespace)
        namespaces = dict[int, dict[str, object]]()
        owners = dict[int, object]()
        for owner, space in modules_and_classes(Kinds(named.objects)):
            if id(space) in self._parents:
                namespaces[id(space)] = space
                owners[id(space)] = owner
        levels = LevelsFromNames(named.names, named.objects, owners)
        listed_ids = set[int]()
        yield from self._grown_at_last_level(levels, smallest, new_ids, listed_ids)
        for number in range(_LEVELS):
            children = self._recorded_children(levels.last)
            if number == 0:
                children.update(namespaces)
            levels.add(list(children.values()))
            yield from self._grown_at_last_level(levels, smallest, new_ids, listed_ids)

    def _grown_at_last_level(
        self, levels: LevelsFromNames, smallest: int, new_ids: Set[int], listed_ids: set[int]
    ) -> Iterator[NamedContainer]:
        """Yield the containers of the last level that have grown by at least ``smallest`` bytes;
        and the objects of the level before whose items have grown by that together, such as
        ``table`` with 1,000 lists that have each got a few numbers.

        Args:
            levels: the levels so far.
            smallest: the bytes.
            new_ids: as for ``received``.
            listed_ids: identities of the containers that earlier levels had; gets further ones.
        """
        grown_here = self._grown_containers_in(levels.last, listed_ids)
        large = [container for container in grown_here if container.size_bytes >= smallest]
        small = [container for container in grown_here if container.size_bytes < smallest]
        large += self._long.with_grown_items(levels.last, smallest, new_ids)
        yield from levels.containers_in_last(large)
        with_small = with_grown_items(small, levels.before_last, smallest, new_ids)
        yield from levels.containers_in_before_last(with_small)

    def _grown_containers_in(
        self, level: Sequence[Any], listed_ids: set[int]
    ) -> list[GrownContainer]:
        """Return the objects of a level that were within reach and have grown, except those that an
        earlier level had.

        Args:
            level: the objects.
            listed_ids: identities of the objects that earlier levels had; gets further ones.
        """
        recorded = list(compress(level, self._were_recorded(level)))
        unlisted = list[GrownContainer]()
        for container in self._extents.grown_containers(recorded, smallest=1):
            if id(container.item) not in listed_ids:
                listed_ids.add(id(container.item))
                unlisted.append(container)
        return unlisted

    def _recorded_children(self, level: Sequence[Any]) -> dict[int, Any]:
        """Return the objects to which the parents of a level refer, by identity. Attributes may be
        in a dict that is not recorded, because code has read ``__dict__`` since: then they are
        returned, too.
        """
        parents = [item for item in leading_objects(level) if id(item) in self._parents]
        kinds = Kinds(parents)
        arrays = arrays_of_objects(kinds)
        short, _ = short_and_long(kinds, arrays)
        children = gc.get_referents(*short)
        children += elements_and_cells(arrays, data_frames(kinds))
        dicts = of_types({id(dict)}, children)
        dicts_of_attributes = [item for item in dicts if id(item) not in self._recorded]
        return by_identity([*children, *gc.get_referents(*dicts_of_attributes)])

    def _named_now(self, namespace: dict[str, Any]) -> _NamedObjects:
        """Return the user's named objects now, and the recorded modules."""
        objects = ownable_objects({**namespace, **self._live_modules()})
        names = {id(objects[name]): name for name in reversed(objects)}
        return _NamedObjects(names, [objects[name] for name in names.values()])


def _chains_to_classes(
    modules: Iterable[ModuleType],
) -> Iterator[tuple[ModuleType, dict[str, Any], type, dict[str, object]]]:
    """Yield a chain to the namespace of each class that a module defines: the module, its
    namespace, the class, and the namespace of the class. Classes that it has imported are left out.
    """
    for module in modules:
        in_module = module_dict(module)
        name = in_module.get("__name__")
        classes = of_types({id(type)}, list(in_module.values()))
        for defined in classes:
            in_class = gc.get_referents(class_dict(defined))[0]
            if in_class.get("__module__") is name:
                yield module, in_module, defined, in_class


def _keys_with_data(items: dict[Any, Any]) -> list[object]:
    """Return the keys of a dict that may be data: no short texts.

    The collector lists no texts among the keys of a dict that has only such keys. Once the dict
    gets a number as a key, it lists all keys, so that an older text would seem new.
    """
    texts = of_types({id(str)}, list(items))
    long = compress(texts, map(_LONG_TEXT.__le__, map(len, texts)))
    return [*without_types({id(str)}, list(items)), *long]

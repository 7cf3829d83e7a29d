"""Records the tensors and arrays that exist when an experiment begins: their memory is not the
experiment's.
"""

from __future__ import annotations

import gc
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import not_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import Kinds, by_identity, of_types, without_types
from ipygpumem.heap.containers import CONTAINER_TYPES
from ipygpumem.heap.holders.registries import figures_and_widgets
from ipygpumem.heap.kinds.arrays import (
    Array,
    ArraySpan,
    is_array,
    is_of_library,
    library_type,
    owner_of,
    span_of,
)
from ipygpumem.heap.kinds.tensors import Reader, Storages
from ipygpumem.heap.knowledge.frames import users_locals
from ipygpumem.heap.live.garbage import Garbage
from ipygpumem.heap.live.live_tensors import live_tensors
from ipygpumem.heap.walks.walk import MOST_AT_START, Walk
from ipygpumem.introspect import ATOMS, is_instance, module_dict, named_objects, users_modules

_MOST_BYTES_OF_SMALL = 1 << 16
"""Arrays with more bytes are *large*: each is recorded by its place, in an entry that the garbage
collector has to examine.
"""

_LONGEST_SHORT = 50
"""Maximum length of named containers, on average, to look into at once."""
_MOST_SHOWN = 50_000
"""Maximum number of objects to enter in open figures and widgets."""
_MOST_LOCAL = 1_000
"""Maximum number of objects to enter in the containers of running functions."""
_MOST_INSTALLED = 300
"""Maximum number of objects to enter in an installed module, whose data is at the top level, not in
functions.
"""


class ArraysWithinReach(NamedTuple):
    """The NumPy arrays that users can reach from their names, and if these are surely all."""

    arrays: list[Any]
    """The arrays without duplicates."""
    is_complete: bool
    """True if all objects behind names and modules of the user were seen."""


def arrays_within_reach(namespace: dict[str, Any]) -> ArraysWithinReach:
    """Return the NumPy arrays that users can reach: from the notebook's names, the user's modules
    and running functions, open figures and widgets.

    The collector does not list arrays, and searching behind all objects that it lists takes three
    times as long. Each kind of place has a limit of objects of its own.
    """
    modules = users_modules()
    namespaces = by_identity(list(map(module_dict, modules.values())))
    namespaces.pop(id(namespace), None)  # ``__main__`` is the notebook itself
    walk = Walk(MOST_AT_START, ("ndarray",), {"__main__", *modules}, is_hasty=True)
    # The walk begins at the objects in the namespaces, and does not enter these from functions.
    walk.pass_over(namespace, *namespaces.values())
    # The notebook's names, and those of the user's modules.
    named = Kinds(tuple(namespace.values()))
    values = _objects_before_arrays(named)
    for names in namespaces.values():
        values += [value for _, value in named_objects(names)]
    arrays = _arrays_behind(values, walk)
    is_complete = walk.complete  # the places below are searched only up to a limit
    arrays += _arrays_of_installed_modules(named, walk)
    arrays += _arrays_of_running_functions(walk)
    arrays += _large_arrays_shown(namespace, walk)
    walk.drop()
    return ArraysWithinReach(arrays, is_complete)


def _arrays_of_installed_modules(named: Kinds, walk: Walk) -> list[Any]:
    """Return the arrays in the data of installed modules that have a name in the notebook, such as
    ``config.table`` after ``import config``.

    Args:
        named: the notebook's objects.
        walk: has passed the user's objects.
    """
    arrays = list[Any]()
    for module in by_identity(named.instances(ModuleType)).values():
        walk.left = _MOST_INSTALLED
        in_module = list(module_dict(module).values())
        data = [item for item in in_module if type(item) is not FunctionType]
        arrays += _arrays_behind(data, walk)
    return arrays


def _arrays_of_running_functions(walk: Walk) -> list[Any]:
    """Return the arrays in the local variables of the user's running functions."""
    walk.left = _MOST_LOCAL
    data_types = {*CONTAINER_TYPES, id(library_type("numpy", "ndarray"))}
    return _arrays_behind(of_types(data_types, list(users_locals())), walk)


def _large_arrays_shown(namespace: dict[str, Any], walk: Walk) -> list[Any]:
    """Return the large arrays in open figures and widgets. Small ones are left out: libraries
    replace them all the time, and a new array may get the identity of one that has died.
    """
    walk.left = _MOST_SHOWN
    arrays_shown = _arrays_behind(figures_and_widgets(namespace), walk)
    return list(compress(arrays_shown, map(_MOST_BYTES_OF_SMALL.__lt__, _bytes_of(arrays_shown))))


def arrays_behind(objects: Sequence[object]) -> list[Any]:
    """Return the NumPy arrays to which some objects lead, as far as the limit of objects allows."""
    walk = Walk(MOST_AT_START, ("ndarray",), {"__main__"}, is_hasty=True)
    arrays = _arrays_behind(list(objects), walk)
    walk.drop()
    return arrays


def _bytes_of(arrays: Iterable[Any]) -> Iterator[int]:
    """Return the bytes of each NumPy array."""
    array_type: Any = library_type("numpy", "ndarray")
    return map(array_type.__dict__["nbytes"].__get__, arrays)


def _arrays_behind(values: list[object], walk: Walk) -> list[Any]:
    """Return the NumPy arrays behind some objects, without those that the walk has passed
    before.
    """
    return list(chain.from_iterable(walk.walk_from([(values, None)])))


def _objects_before_arrays(named: Kinds) -> list[object]:
    """Return the named objects behind which arrays may be: no numbers, and no short containers of
    numbers and text, for each of which a walk takes half a microsecond.
    """
    leading = list[object]()
    for start, type_ids in named.parts():
        if type_ids <= ATOMS:
            continue
        part = named.part(start)
        if not type_ids.isdisjoint(ATOMS):
            part = without_types(ATOMS, part)
        are_containers = type_ids - ATOMS <= CONTAINER_TYPES
        if not are_containers or not _hold_only_atoms(part):
            leading += part
    return leading


def _hold_only_atoms(containers: Sequence[Any]) -> bool:
    """Return True if containers are short and have nothing in them but numbers and text."""
    if sum(map(len, containers)) > len(containers) * _LONGEST_SHORT:
        return False
    return Kinds(gc.get_referents(*containers)).examples.keys() <= ATOMS


def _owning_array(view: Any) -> Any:
    """Return the array that owns the memory of a view; the view itself if it is on a tensor's
    memory.
    """
    owner = owner_of(view)
    return owner if is_array(owner) else view


class BaselineSnapshot:
    """The memory of all tensors at some moment, and of the arrays behind a notebook's names.

    It keeps no object alive. Torch storages are referenced weakly, so that their identities are not
    used again. Arrays are recognised by their places in memory.

    Attributes:
        complete: False if there was too much to follow, so that some old arrays may be unknown.
    """

    def __init__(
        self, namespace: dict[str, Any], garbage: Garbage, known: Iterable[ArraySpan] = ()
    ) -> None:
        self._storages = Storages.with_sizes()
        self._objects: dict[int, weakref.ref[Any]] = {}
        """Tensors without a storage, by identity."""
        self._unreached = set(known)
        """Places of arrays that earlier experiments have left; some may have died since."""
        self._large = set[ArraySpan]()
        """Places of large arrays that own their memory; no weak references, because NumPy would not
        resize the arrays.

        A new array at the place of an old one counts as old, and an old one that has moved counts
        as new.
        """
        self._spans: list[tuple[int, int]] = []
        """Start and end of the memory of each large array, by address."""
        self._small: set[int] = set()
        """Identities of small arrays. A new array that reuses one counts as old."""
        self.complete = True
        if library_type("torch", "Tensor") is not None:
            self._add_tensors(sys.modules["torch"], live_tensors(garbage))
        array_type = library_type("numpy", "ndarray")
        if array_type is not None:
            arrays, self.complete = arrays_within_reach(namespace)
            self._add_arrays(array_type, arrays)

    def _add_tensors(self, torch: Any, tensors: Sequence[Any]) -> None:
        """Record the storages of tensors, and the tensors without one."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            reader = Reader(torch)
            without_storage = self._storages.add_of(reader, tensors)
            for tensor in without_storage:
                self._objects[id(tensor)] = weakref.ref(tensor)
                self._storages.add_of(reader, list(reader.inside(tensor)))

    def _add_arrays(self, array_type: Any, arrays: Sequence[Any]) -> None:
        """Record the places of large arrays, and the identities of small ones. A view counts as the
        array that owns its memory.
        """
        base_of = array_type.__dict__["base"].__get__
        owners = [array if base_of(array) is None else _owning_array(array) for array in arrays]
        are_large = list(map(_MOST_BYTES_OF_SMALL.__lt__, _bytes_of(owners)))
        self._large.update(map(span_of, compress(owners, are_large)))
        self._unreached -= self._large
        self._large |= self._unreached
        self._spans = sorted((start, end) for _, start, end in self._large)
        small = compress(owners, map(not_, are_large))
        self._small = set(map(id, small))

    def has(self, item: object, array: Array) -> bool:
        """Return True if the memory of a tensor or array existed before.

        Args:
            item: the tensor or array.
            array: its description.
        """
        library, key = array.storage
        if library == "torch":
            was_there = key in self._storages and not self._has_grown(array)
            return was_there or self._shows_old_array(item)
        if is_array(item):
            return self._has_array(item, array)
        tensor_without_storage = self._objects.get(key)
        if tensor_without_storage is not None and tensor_without_storage() is not None:
            return True
        return self._consists_of_old_tensors(item)

    def _has_array(self, item: Any, array: Array) -> bool:
        """Return True if the memory of a NumPy array existed before. A large array is recognised by
        its place, a small one by its identity.
        """
        owner = owner_of(item)
        if is_array(owner) and array.size_bytes > _MOST_BYTES_OF_SMALL:
            return span_of(owner) in self._large
        _, key = array.storage
        return key in self._small and array.size_bytes <= _MOST_BYTES_OF_SMALL

    def _consists_of_old_tensors(self, item: object) -> bool:
        """Return True if most memory of a tensor without a storage of its own is in old tensors: a
        new sparse tensor may share the values of an old one.
        """
        if not is_of_library(item, "torch", "Tensor"):
            return False
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunction():
            sizes = Reader(torch).memory(item).storages
        old_bytes = sum(size for key, size in sizes.items() if key in self._storages)
        return 2 * old_bytes > sum(sizes.values())

    def _has_grown(self, array: Array) -> bool:
        """Return True if most of a torch storage is new memory, as after ``tensor.resize_()``. A
        storage that had no memory at the start does not count: it had been emptied for a while, as
        FSDP does.
        """
        size_before = self._storages.size(array.storage[1])
        return 0 < 2 * size_before < array.size_bytes

    def had_other_size(self, array: Array) -> bool:
        """Return True if an array of another size had this array's identity at the start: either
        this array has got new memory since, as by ``array.resize(...)``, or the old one has died.
        """
        _, key = array.storage
        sizes = [end - start for identity, start, end in self._large if identity == key]
        if key in self._small:
            return array.size_bytes > _MOST_BYTES_OF_SMALL
        return bool(sizes) and array.size_bytes not in sizes

    @property
    def is_certain(self) -> bool:
        """True if all old NumPy arrays are recorded, so that any other array is new. A new array
        may still count as old, if it lies in the memory of one that has died.
        """
        return self.complete and not self._unreached

    def may_have_died(self, item: object) -> bool:
        """Return True if an array is known only because an earlier experiment has left an array at
        this place: that one may have died since, and this one may be new.
        """
        if not self._unreached or not is_array(item):
            return False
        owner = owner_of(item)
        return is_array(owner) and span_of(owner) in self._unreached

    def _shows_old_array(self, item: Any) -> bool:
        """Return True if a tensor shares the memory of an old array, as after
        ``torch.from_numpy``.
        """
        base: Any = library_type("torch", "Tensor")
        if not self._spans or not is_instance(item, base):
            return False
        with sys.modules["torch"]._C.DisableTorchFunction():
            storage = base.untyped_storage(item)
            if storage.device.type != "cpu" or storage.resizable():
                return False  # torch has allocated the memory itself
            address = storage.data_ptr()
        place = bisect_right(self._spans, address, key=lambda span: span[0]) - 1
        return place >= 0 and address < self._spans[place][1]

    def close(self) -> None:
        """Forget everything."""
        self._storages.close()
        self._objects.clear()
        self._large.clear()
        self._unreached.clear()
        self._small.clear()
        self._spans.clear()

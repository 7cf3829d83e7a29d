"""Reads the objects to which objects refer: those that the collector reports, and those that it
does not.

The collector reports each reference of a container once. It leaves out the text keys of dicts, the
elements of object arrays, the array behind a view or a row, the bytes in a ``BytesIO`` up to Python
3.11, the memoryviews of Cython's slices, and all that torch keeps in C++. It reports too much where
a future wakes a task: the future does not own the task.
"""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple

from ipygpumem.heap.bulk import kinds_of, of_types, one_of_each, types_of, without_types
from ipygpumem.heap.kinds.arrays import (
    STRING_KIND,
    flat_elements,
    inside_row,
    is_of_library,
    library_type,
    read_array,
)
from ipygpumem.heap.kinds.libraries import bytes_of
from ipygpumem.heap.knowledge.barriers import Barriers
from ipygpumem.heap.knowledge.frames import SUSPENDED
from ipygpumem.heap.knowledge.graphs import gradient_of, saved_by
from ipygpumem.heap.knowledge.nodes import Nodes
from ipygpumem.heap.knowledge.slices import Slices, may_have_slices
from ipygpumem.heap.knowledge.tasks import (
    BUILTIN,
    CONTEXT_NODES,
    own_references_of_contexts,
    without_wakeups,
)
from ipygpumem.heap.knowledge.text_keys import COMMON_REFERENCES, text_keys
from ipygpumem.introspect import instance_dict, is_instance

_SUSPENDED = set(map(id, SUSPENDED))
_REFERS_TO_FRAME = sys.version_info < (3, 11)
"""True if generators refer to their frames, and not to the objects in them."""

Owner = int | tuple[object, ...]
"""A tensor, by identity, or a node of an autograd graph."""


class References(NamedTuple):
    """The objects to which some objects refer, once for each reference, without those behind
    barriers.
    """

    of_python: Sequence[Any]
    """Objects to which Python's objects refer: each of these references is part of the reference
    count of the object.
    """
    of_torch: Sequence[tuple[Owner, Any]] = ()
    """Tensors that torch's C++ code refers to, each with its owner: a tensor or a node of a graph.
    """
    of_graphs: Sequence[tuple[Owner, Owner]] = ()
    """Owners, each with a node of a graph to which it leads."""
    waking: Sequence[Any] = ()
    """Tasks that a future wakes. The reference counts, but the future does not own the task."""
    is_complete: bool = True
    """False if an object array was too long to read."""


class ReferenceReader:
    """Reads references, many objects at a time. No user code runs.

    Args:
        has_text_keys: True to report the text keys of dicts that no other object refers to. They
            hold no other objects, but may take more memory than the values.
    """

    def __init__(self, barriers: Barriers, *, has_text_keys: bool = True) -> None:
        self._barriers = barriers
        self._has_text_keys = has_text_keys
        self._nodes = Nodes()
        self._classified_types: set[int] = set()
        """Identities of the types that ``_classify`` has met."""
        self._dicts: set[int] = set()
        """Types that derive from ``dict``."""
        self._arrays: set[int] = set()
        """Types of NumPy arrays."""
        self._rows: set[int] = set()
        """Types of rows of structured arrays."""
        self._tensors: set[int] = set()
        """Types of torch tensors."""
        self._streams: set[int] = set()
        """Types of ``BytesIO``."""
        self._with_slices: set[int] = set()
        """Types of Cython's objects that may have slices of memoryviews."""
        self._slices = Slices()

    def of(self, objects: Sequence[Any], type_ids: set[int] | None = None) -> References:
        """Return the references of objects.

        Args:
            objects: the objects.
            type_ids: the identities of their types, and possibly further ones, if the caller has
                them.
        """
        if type_ids is None:
            type_ids = types_of(objects)
        if not type_ids <= self._classified_types:
            self._classify(objects)
            type_ids = types_of(objects)
        if _REFERS_TO_FRAME and not _SUSPENDED.isdisjoint(type_ids):
            self._barriers.open_suspended(of_types(_SUSPENDED, objects))
        owners = objects
        wakeups = list[Any]()
        if not BUILTIN.isdisjoint(type_ids):
            owners, wakeups = without_wakeups(objects)
        of_python = _reported(owners, type_ids)
        if self._has_text_keys and not self._dicts.isdisjoint(type_ids):
            of_python += self._text_keys(owners, self._dicts & type_ids)
        unreported, is_complete = self._unreported(objects, type_ids)
        of_python += unreported
        graphs = _TorchReferences([], [])
        if not self._tensors.isdisjoint(type_ids):
            self._read_tensors(of_types(self._tensors, objects), graphs)
        waking = [wakeup.__self__ for wakeup in wakeups]
        return References(
            self._barriers.enterable(of_python), graphs.tensors, graphs.nodes, waking, is_complete
        )

    @property
    def is_full(self) -> bool:
        """True if graphs had too many nodes to read all of them."""
        return self._nodes.is_full

    def drop(self) -> None:
        """Drop the nodes of graphs and the memoryviews, whose references would count."""
        self._nodes = Nodes()
        self._slices = Slices()

    def _classify(self, objects: Sequence[object]) -> None:
        """Sort new types by the references of their objects that the collector does not report."""
        self._dicts |= kinds_of(objects, dict)
        bases = (
            (self._arrays, library_type("numpy", "ndarray")),
            (self._rows, library_type("numpy", "void")),
            (self._tensors, library_type("torch", "Tensor")),
            (self._streams, io.BytesIO),
        )
        for type_id, example in one_of_each(objects).items():
            if type_id in self._classified_types:
                continue
            self._classified_types.add(type_id)
            if may_have_slices(type(example)):
                self._with_slices.add(type_id)
            for types, base in bases:
                if base is not None and is_instance(example, base):
                    types.add(type_id)

    def _unreported(self, objects: Sequence[Any], type_ids: set[int]) -> tuple[list[Any], bool]:
        """Return the objects to which streams, slices, arrays and rows of arrays refer, and whether
        these are all: not if an array was too long to read.
        """
        unreported = list[Any]()
        is_complete = True
        if not self._with_slices.isdisjoint(type_ids):
            unreported += self._slices.of(of_types(self._with_slices, objects))
        if not self._streams.isdisjoint(type_ids):
            for stream in of_types(self._streams, objects):
                unreported += bytes_of(stream)
        if not self._rows.isdisjoint(type_ids):
            for row in of_types(self._rows, objects):
                unreported += inside_row(row)
        if not self._arrays.isdisjoint(type_ids):
            for array in of_types(self._arrays, objects):
                objects_in_array = _objects_in_array(array)
                if objects_in_array is None:
                    is_complete = False
                else:
                    unreported += objects_in_array
        return unreported, is_complete

    def _text_keys(self, objects: Sequence[Any], dicts: set[int]) -> list[Any]:
        """Return the text keys of the dicts among objects, without those that many objects share.

        Args:
            objects: the objects.
            dicts: the types among theirs that derive from ``dict``, by identity.
        """
        keys = text_keys(objects, dicts)
        are_rare = map(COMMON_REFERENCES.__gt__, map(sys.getrefcount, keys))
        return list(compress(keys, are_rare))

    def _read_tensors(self, tensors: Sequence[Any], graphs: _TorchReferences) -> None:
        """Add the references of tensors to graphs: to their gradients, to the tensors in their
        graphs, and to the tensors of which they are views.
        """
        base: Any = library_type("torch", "Tensor")
        with sys.modules["torch"]._C.DisableTorchFunction():
            for tensor in tensors:
                owner = id(tensor)
                graphs.add_tensors(owner, gradient_of(tensor))
                viewed = base._base.__get__(tensor)
                if viewed is not None:
                    graphs.add_tensors(owner, [viewed])
                if is_of_library(tensor, *_JAGGED):
                    graphs.add_tensors(owner, _parts_of_jagged(tensor, viewed))
                first_node = self._nodes.first(tensor)
                if first_node is not None:
                    graphs.add_nodes(owner, [first_node])
                for node in self._nodes.of(tensor):
                    graphs.add_tensors(_key_of_node(node), saved_by(node))
                    graphs.add_nodes(_key_of_node(node), self._nodes.following(node))


def _reported(objects: Sequence[Any], type_ids: set[int]) -> list[Any]:
    """Return the references that the collector reports, without the values that contexts only
    share.
    """
    if CONTEXT_NODES.isdisjoint(type_ids):
        return gc.get_referents(*objects)
    of_contexts = own_references_of_contexts(of_types(CONTEXT_NODES, objects))
    return gc.get_referents(*without_types(CONTEXT_NODES, objects)) + of_contexts


_JAGGED = ("torch.nested._internal.nested_tensor", "NestedTensor")
"""Module and name of the class of jagged tensors: ``torch.nested.nested_tensor(...)``."""


def _parts_of_jagged(tensor: Any, viewed: Any) -> list[Any]:
    """Return the tensors to which torch's C++ code refers for a jagged tensor, besides the one of
    which it is a view.

    ``_nested_view_from_jagged`` records the view twice, for backward and for forward gradients, and
    keeps the offsets and lengths to make the view again.
    """
    attributes = instance_dict(tensor) or {}
    parts = [viewed, attributes.get("_offsets"), attributes.get("_lengths")]
    return [part for part in parts if part is not None]


class _TorchReferences(NamedTuple):
    """The references of torch's C++ code, as in ``References``."""

    tensors: list[tuple[Owner, Any]]
    nodes: list[tuple[Owner, Owner]]

    def add_tensors(self, owner: Owner, tensors: Iterable[Any]) -> None:
        """Add the references from an owner to tensors."""
        self.tensors.extend(zip(repeat(owner), tensors))

    def add_nodes(self, owner: Owner, nodes: Iterable[object]) -> None:
        """Add the references from an owner to nodes."""
        self.nodes.extend(zip(repeat(owner), map(_key_of_node, nodes)))


def _key_of_node(node: object) -> Owner:
    """Return the key of a node, which differs from the identity of each tensor."""
    return "graph", id(node)


def _objects_in_array(array: Any) -> list[Any] | None:
    """Return the objects to which an array refers: the base of a view, the elements of an array of
    objects, or the dtype with the texts of an array of texts. None if there are too many.

    NumPy gives each array of texts a dtype of its own.
    """
    viewed = read_array("base", array)
    dtype = read_array("dtype", array)
    if viewed is not None:
        if dtype.kind == STRING_KIND:
            return [viewed, dtype]
        return [viewed]
    if dtype.kind == STRING_KIND:
        return [dtype]
    if not dtype.hasobject:
        return []
    return flat_elements(array)

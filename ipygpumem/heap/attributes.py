"""Reads the attributes of objects without giving them a dict.

CPython 3.11 and later store the attributes of an instance outside a dict, and older versions give
an instance without attributes none. Reading ``__dict__`` creates it for good: 180 bytes for each
instance. The collector reports a dict that is there, but not which one of the dicts it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FunctionType, MemberDescriptorType
from typing import Any

from ipygpumem.introspect import (
    MANAGED_DICT,
    class_dict,
    flags_of,
    instance_dict,
    is_descriptor,
    mro_of,
)

MODULE_PARTS = ("_parameters", "_buffers", "_modules")
"""Attributes in which a torch module has its parts by name; users write ``model.weight`` for
``model._parameters["weight"]``.
"""
_MOST_KEYS_TRIED = 10
"""Number of keys of a dict that are compared with attributes."""
MISSING = object()
"""Stands for the value of an attribute that an object has not."""


def has_nameless_attributes(item: object) -> bool:
    """Return True if an object may store attributes outside a dict, so that the collector reports
    their values, and nothing tells their names without creating the dict.
    """
    return bool(flags_of(type(item)) & MANAGED_DICT)


def attributes_in_dict(item: object, referents: Sequence[object]) -> dict[str, Any]:
    """Return the dict of an object's attributes if it has one already, else an empty dict.

    Args:
        item: an object that is no class.
        referents: the objects to which it refers.
    """
    # A dict has the attributes if its first entries are attributes of the object, with the same
    # values. It is unclear if none of its keys can be read without running code.
    is_unclear = False
    for candidate in referents:
        if type(candidate) is dict and candidate:
            are_attributes = set(islice(_are_attributes(item, candidate), _MOST_KEYS_TRIED))
            if are_attributes == {True}:
                return candidate
            is_unclear = is_unclear or not are_attributes
    if is_unclear and not has_nameless_attributes(item) and type(item) is not FunctionType:
        return instance_dict(item) or {}
    return {}


def attribute_name(item: object, value: object, known: Sequence[str] = ()) -> str | None:
    """Return the name of an object's attribute; None if it has none with this value.

    Args:
        item: the object, which gets a dict if no known name is right.
        value: the value of the attribute.
        known: names to try first, such as those of attributes of other objects of the same class:
            reading them creates no dict.
    """
    for name in known:
        if _is_readable(type(item), name) and _read(item, name) is value:
            return name
    attributes = instance_dict(item) or {}
    if attributes is value:
        return "__dict__"
    for name, value_of_name in list(attributes.items()):
        if value_of_name is value and type(name) is str:
            return name
    return None


def reader_of(kind: type, name: str) -> Callable[[object], object] | None:
    """Return a function that reads the attribute ``name`` of instances of a class, and returns
    ``MISSING`` for an instance without it; None if reading it runs code.
    """
    slot = slot_descriptors(kind).get(name)
    if slot is not None:
        return lambda item: slots(item, {name: slot}).get(name, MISSING)
    if not _is_readable(kind, name):
        return None
    return lambda item: _read(item, name)


def _are_attributes(item: object, names: dict[Any, Any]) -> Iterator[bool]:
    """Yield for each entry of a dict whether the object has an attribute of this name with the same
    value. Names that cannot be read without running code are left out.
    """
    for name, value in list(names.items()):
        if type(name) is str and _is_readable(type(item), name):
            yield _read(item, name) is value


def _read(item: object, name: str) -> object:
    """Return an attribute for which ``_is_readable`` is True; ``MISSING`` if the object does not
    have it.
    """
    try:
        return object.__getattribute__(item, name)  # finds it without creating the dict
    except (AttributeError, TypeError):
        return MISSING


def _is_readable(kind: type, name: str) -> bool:
    """Return True if reading the attribute ``name`` of an instance of ``kind`` runs no code: the
    class has no property or other descriptor of this name.
    """
    for base in mro_of(kind):
        value_in_class = class_dict(base).get(name, MISSING)
        if value_in_class is not MISSING:
            return not is_descriptor(value_in_class)
    return True


def slot_descriptors(kind: type) -> dict[str, Any]:
    """Return the descriptors of the slots of a class and its bases, by name; of slots with one name
    that of the nearest class.
    """
    descriptors: dict[str, Any] = {}
    for base in reversed(type.mro(kind)):
        members = list(class_dict(base).items())
        descriptors.update(
            (name, member) for name, member in members if type(member) is MemberDescriptorType
        )
    descriptors.pop("__dict__", None)  # some C classes list it as a slot; see ``instance_dict``
    return descriptors


def slots(item: object, descriptors: dict[str, Any] | None = None) -> dict[str, object]:
    """Return the values of an object's slots by name, without slots that are not set.

    Args:
        item: the object.
        descriptors: the ``slot_descriptors`` of its class; None to read them.
    """
    if descriptors is None:
        descriptors = slot_descriptors(type(item))
    values: dict[str, object] = {}
    for name, slot in descriptors.items():
        with contextlib.suppress(AttributeError, TypeError):
            values[name] = slot.__get__(item)
    return values

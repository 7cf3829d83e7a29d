"""What a user's object is, without asking the object: its type is looked at, never itself or its metaclass."""

from __future__ import annotations

# By identity: comparing or hashing a type may run its metaclass's code.
_ATOMS = {id(kind) for kind in (int, float, complex, bool, str, bytes, bytearray, type(None))}


def is_kind(value: object, base: type) -> bool:
    """Whether the type of ``value`` is ``base`` or derives from it."""
    return type.__subclasscheck__(base, type(value))


def is_atom(value: object) -> bool:
    """Whether ``value`` is a plain number, text or None, which holds nothing else."""
    return id(type(value)) in _ATOMS


def type_name(value: object) -> str:
    """Return the name of the type of ``value``."""
    return name_of(type(value))


def name_of(kind: type) -> str:
    """Return the name of a type."""
    return str(type.__dict__["__name__"].__get__(kind))

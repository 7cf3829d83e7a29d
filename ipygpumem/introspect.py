"""Examines the type and origin of user objects without running their code, or that of their
metaclass.
"""

from __future__ import annotations

import ctypes
import functools
import keyword
import re
import site
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress, repeat
from operator import is_
from pathlib import Path
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any
from unicodedata import normalize

from ipygpumem.errors import OUR_FOLDER

ATOMS = frozenset(
    id(kind) for kind in (int, float, complex, bool, str, bytes, bytearray, type(None))
)
"""Types of plain numbers, text and None, by identity: comparing or hashing a type may run its
metaclass's code.
"""
NUMBERS = frozenset(id(kind) for kind in (int, float, complex, bool, type(None)))
"""Types of plain numbers and None, by identity."""

HEAP_TYPE = 1 << 9
"""CPython's flag of classes created at run time."""
_POINTER_BYTES = 8
"""Size of a slot; a ``class`` statement may add two more, for attributes and weak references."""


def loaded(name: str) -> Any:
    """Return a library if the user's code has imported it completely; else None, also for an object
    that a test has put into ``sys.modules`` in its place.
    """
    module = sys.modules.get(name)
    if not is_instance(module, ModuleType):
        return None
    is_being_imported = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_being_imported else module


def loaded_object(module: str, name: str) -> Any:
    """Return a global of a loaded module; None if there is none. No code of the module runs."""
    loaded_module: Any = sys.modules.get(module)
    if not is_instance(loaded_module, ModuleType):
        return None
    return module_dict(loaded_module).get(name)


def is_instance(value: object, base: type) -> bool:
    """Return True if the type of ``value`` is ``base`` or derives from it."""
    return type.__subclasscheck__(base, type(value))


def is_exactly(value: object, *kinds: type) -> bool:
    """Return True if the type of ``value`` is exactly one of ``kinds``; ``in`` would run a
    metaclass's code.
    """
    return any(map(is_, kinds, repeat(type(value))))


def is_descriptor(value: object) -> bool:
    """Return True if ``value`` is a descriptor, such as a property or a function: stored in a
    class, reading it from an instance returns another object. Runs no code of a metaclass.
    """
    return any("__get__" in class_dict(kind) for kind in mro_of(type(value)))


def is_atom(value: object) -> bool:
    """Return True for a plain number, text or None, which refers to nothing else."""
    return id(type(value)) in ATOMS


ID_BYTES = 8
"""Bytes of an identity."""


def identities(items: Iterable[object]) -> bytes:
    """Return the identities of many objects, ``ID_BYTES`` each, to be compared later at once.

    CPython keeps the addresses of a tuple's items behind its header, and an address is the
    identity. Copying them takes 0.7 ms for 100,000 objects, where ``id`` takes 6 ms: it makes a
    number for each.
    """
    if not _TUPLES_ARE_PLAIN:
        return array("Q", map(id, items)).tobytes()
    copy = tuple(items)
    return ctypes.string_at(id(copy) + tuple.__basicsize__, ID_BYTES * len(copy))


def identities_of_list(items: list[Any]) -> bytes:
    """Return the ``identities`` of the items of a list that no other thread changes.

    It takes a tenth of the time, because no tuple counts another reference to each item. A list
    keeps the address of its items behind their number.
    """
    if not _LISTS_ARE_PLAIN:
        return identities(items)
    place = id(items) + object.__basicsize__ + _NUMBER_BYTES
    address = ctypes.c_void_p.from_address(place).value
    return ctypes.string_at(address or 0, ID_BYTES * len(items))


def begins_with(objects: tuple[object, ...], first: tuple[object, ...]) -> bool:
    """Return True if the first of some ``objects`` are exactly the objects in ``first``.

    Nothing is compared but identities. Copying all of 100,000 at once would take ten times as long:
    the system has to clear fresh memory for the copies.
    """
    if len(objects) < len(first):
        return False
    for start in range(0, len(first), _IDENTITIES_AT_ONCE):
        count = min(_IDENTITIES_AT_ONCE, len(first) - start)
        if identities_of_part(objects, start, count) != identities_of_part(first, start, count):
            return False
    return True


def identities_of_part(items: tuple[object, ...], start: int, count: int) -> bytes:
    """Return the ``identities`` of ``count`` items, which must exist, from position ``start`` on.

    No other tuple is made, which would have to count another reference to each item.
    """
    if not _TUPLES_ARE_PLAIN:
        return identities(items[start : start + count])
    first = id(items) + tuple.__basicsize__ + ID_BYTES * start
    return ctypes.string_at(first, ID_BYTES * count)


_IDENTITIES_AT_ONCE = 4000
"""Number of identities to compare at once: few enough for the processor's cache."""


_NUMBER_BYTES = 8
"""Size of the number of a list's items."""
_TUPLES_ARE_PLAIN = (
    sys.implementation.name == "cpython" and ctypes.sizeof(ctypes.c_void_p) == ID_BYTES
)
_LISTS_ARE_PLAIN = (
    _TUPLES_ARE_PLAIN and list.__basicsize__ == object.__basicsize__ + 3 * _NUMBER_BYTES
)
"""A list has the number of its items, their address, and the number of its places."""
# Tried, because no version of Python promises it.
_TRIED = array("Q", [id(None), id(int)]).tobytes()
_TUPLES_ARE_PLAIN = _TUPLES_ARE_PLAIN and identities((None, int)) == _TRIED
_LISTS_ARE_PLAIN = _LISTS_ARE_PLAIN and identities_of_list([None, int]) == _TRIED


_NAMES_AT_ONCE = 1000
"""Number of names that are skipped together if all their objects are plain ones of one type."""


def named_objects(namespace: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the names whose objects are not plain numbers, text or None, with these objects.

    A namespace of very many names has mostly plain ones, which are skipped together.
    """
    # Copied, because other threads may bind names: a dict is one object, where a list of pairs
    # would be one per name.
    now = dict(namespace)
    names = list(now)
    values = list(now.values())
    for start in range(0, len(values), _NAMES_AT_ONCE):
        part = values[start : start + _NAMES_AT_ONCE]
        first_type = type(part[0])
        if id(first_type) in ATOMS and all(map(is_, map(type, part), repeat(first_type))):
            continue
        for name, value in zip(names[start : start + _NAMES_AT_ONCE], part, strict=True):
            if id(type(value)) not in ATOMS:
                yield name, value


HAS_REFERENCES = 1 << 14
"""Flag in a type's ``__flags__`` (Py_TPFLAGS_HAVE_GC); objects of types without it refer to
nothing.
"""
MANAGED_DICT = 1 << 4
"""Flag of classes whose instances may have attributes outside a dict, from Python 3.11 on."""


class_dict: Callable[[Any], Mapping[str, Any]] = vars(type)["__dict__"].__get__
"""Returns the attributes of a class itself, bypassing its metaclass."""
mro_of: Callable[[Any], tuple[type, ...]] = vars(type)["__mro__"].__get__
"""Returns a class and its bases in the order of look-up, also bypassing it."""
flags_of: Callable[[Any], int] = vars(type)["__flags__"].__get__
"""Returns a class's flags, such as ``HEAP_TYPE`` and ``HAS_REFERENCES``, also bypassing it."""


def type_name(value: object) -> str:
    """Return the name of the type of ``value``."""
    return name_of(type(value))


def name_of(kind: type) -> str:
    """Return the name of a type."""
    return str(type.__dict__["__name__"].__get__(kind))


def text_of(value: object) -> str:
    """Return ``value`` if it is plain text, else an empty text."""
    return value if type(value) is str else ""


def is_name(name: str) -> bool:
    """Return True if code can contain ``name`` as it stands."""
    return name.isidentifier() and not keyword.iskeyword(name) and normalize("NFKC", name) == name


def target_of(name: str) -> str:
    """Return the code of a global name, as in a ``del`` statement: ``x``, or ``globals()['a b']``
    for a name that is no identifier.
    """
    if is_name(name):
        return name
    return f"globals()[{name!r}]"


module_dict: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__
"""Returns a module's namespace; ``module.__dict__`` would load a lazy one. It is written in C,
because it is called for each of many objects.
"""


def loaded_modules() -> list[ModuleType]:
    """Return the modules in ``sys.modules``, which may have anything else, too; in C, because there
    are thousands.
    """
    loaded = list(sys.modules.values())
    are_modules = map(functools.partial(type.__subclasscheck__, ModuleType), map(type, loaded))
    return list(compress(loaded, are_modules))


def module_dicts(modules: Iterable[ModuleType]) -> list[dict[str, Any]]:
    """Return the modules' namespaces."""
    return list(map(module_dict, modules))


def instance_dict(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object or class that are stored in a dict, bypassing any property
    of that name.
    """
    if is_instance(value, type):
        return dict(class_dict(value))
    for kind in mro_of(type(value)):
        descriptor = class_dict(kind).get("__dict__")
        if type(descriptor) is GetSetDescriptorType or type(descriptor) is MemberDescriptorType:
            attributes = descriptor.__get__(value)
            return attributes if type(attributes) is dict else None
    return None


def attribute_of(value: object, name: str) -> Any:
    """Return an attribute that an object stores; None if there is none.

    It makes no dict of the attributes, as reading ``__dict__`` may: a search that began before
    would not find the object behind a new dict.
    """
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def module_of(value: object) -> str:
    """Return the name of the module in which the type of ``value`` claims to be defined."""
    name = class_dict(type(value)).get("__module__")
    return name if type(name) is str else ""


def module_attribute(kind: type) -> str:
    """Return the ``__module__`` of a class, also of one of C: "builtins" if it names no module.

    Empty for a class that was made by code without a module.
    """
    try:
        return text_of(type.__dict__["__module__"].__get__(kind))
    except AttributeError:
        return ""


_LONGEST_KEY_TEXT = 60
"""Maximum number of characters of a key in a path."""
_MOST_BITS = 1000
"""Maximum number of bits of a number whose digits are written: Python refuses to convert longer
numbers to text (``sys.set_int_max_str_digits``).
"""


def key_text(key: object) -> str | None:
    """Return the text of a dict's key in a path, shortened if it is long: ``"loss"`` or ``3``.

    None for a key of any other type, whose text would be made by the user's code, and for a number
    of hundreds of digits.
    """
    kind = type(key)
    if kind is int and key.bit_length() > _MOST_BITS:  # type: ignore[attr-defined]  # kind says so
        return None
    if kind is str:
        shown = key.replace('"', "'")  # type: ignore[attr-defined]  # kind says so
        if len(shown) > _LONGEST_KEY_TEXT:
            shown = f"{shown[:_LONGEST_KEY_TEXT]}…"
        return f'"{shown}"'
    if kind is int or kind is float or kind is bool or kind is bytes or key is None:
        return repr(key)[:_LONGEST_KEY_TEXT]
    return None


_LINE_END = re.compile("\r\n|\r|\n")


def code_lines(source: str) -> list[str]:
    """Return the lines of Python code, numbered as Python does.

    ``splitlines`` also ends a line at a form feed, or at a line separator within a text.
    """
    return _LINE_END.split(source)


# -- origin of code: the user's, a library's, or ours, by its file ------------------------------


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the beginnings of the file names of code that is no user's: the folders of installed
    packages, and names that Python gives to code without a file.
    """
    torch = loaded_object("torch", "__file__")  # may be a source checkout
    paths = list(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
    paths += site.getsitepackages()
    if torch:
        paths.append(str(Path(torch).parent))
    folders = filter(None, paths)
    return (*folders, OUR_FOLDER, "<frozen", "<string", "<__array_function__")


@functools.lru_cache(maxsize=10_000)
def is_users(filename: str) -> bool:
    """Return True for a file that belongs neither to the standard library, nor to an installed
    package, nor to us.
    """
    installed = "site-packages" in filename or "dist-packages" in filename
    return bool(filename) and not installed and not filename.startswith(_libraries())


def is_ours(filename: str) -> bool:
    """Return True for a file of this package."""
    return filename.startswith(OUR_FOLDER)


def is_users_module(module: Any) -> bool:
    """Return True for a module from a user's file, or created by hand."""
    if not is_instance(module, ModuleType):
        return False
    names = module_dict(module)
    file = text_of(names.get("__file__"))
    if file:
        return is_users(file)
    return names.get("__spec__") is None and "." not in text_of(names.get("__name__"))


def is_users_class(kind: Any) -> bool:
    """Return True for a class of the notebook, a script, or a user's module."""
    module = ""
    if is_instance(kind, type):
        module = text_of(class_dict(kind).get("__module__"))
    return module == "__main__" or is_users_module(sys.modules.get(module))


def users_modules() -> dict[str, ModuleType]:
    """Return the modules from the user's files by name.

    A module belongs to the owner of its package, because checking each of thousands of modules
    takes longer.
    """
    every: dict[str, Any] = dict(sys.modules)
    are_modules = map(
        functools.partial(type.__subclasscheck__, ModuleType), map(type, every.values())
    )
    modules = dict(compress(every.items(), are_modules))
    is_users_root: dict[str, bool | None] = {}
    """True for a top-level module of the user, and all below it; None if each module below it must
    be checked, as in a package of several folders, which has no file.
    """
    of_user: dict[str, ModuleType] = {}
    main = modules.get("__main__")
    for name, module in modules.items():
        is_main = module is main and name != "__main__"
        if is_main or name == "__mp_main__":  # multiprocessing adds it, also without a __main__
            continue
        root, dot, _ = name.partition(".")
        if root not in is_users_root:  # no function of its own: there are hundreds
            top = modules.get(root)
            names = {} if top is None else module_dict(top)
            file = names.get("__file__")
            if type(file) is str and file:
                is_users_root[root] = is_users(file)
            elif top is None or names.get("__spec__") is not None:  # such as a built-in module
                is_users_root[root] = None
            else:  # made by hand: ``types.ModuleType("helpers")``
                is_users_root[root] = is_users_module(top) or None
        is_users_own = is_users_root[root]
        if is_users_own is None and dot:  # below that module
            is_users_own = is_users_module(module)
        if is_users_own:
            of_user[name] = module
    return of_user


def solid_base(kind: type) -> Any:
    """Return the first base of a class that is written in C, which creates the instances: ``dict``
    for ``class Cache(dict): ...``.
    """
    return next(base for base in type.mro(kind) if not is_made_by_statement(base))


def is_made_by_statement(kind: type) -> bool:
    """Return True for a class made by a ``class`` statement.

    The flag of classes made at run time is not enough, because some classes of C have it, too. But
    these add fields to the structs of their instances, where a ``class`` statement adds slots.
    """
    if not flags_of(kind) & HEAP_TYPE:
        return False
    added_bytes = _instance_bytes(kind) - _instance_bytes(_base_of(kind) or object)
    slots = sum(type(item) is MemberDescriptorType for item in class_dict(kind).values())
    return added_bytes <= _POINTER_BYTES * (slots + 2)


_instance_bytes: Callable[[Any], int] = vars(type)["__basicsize__"].__get__
_base_of: Callable[[Any], type | None] = vars(type)["__base__"].__get__
"""Read the size of a class's instances and its base, bypassing its metaclass."""

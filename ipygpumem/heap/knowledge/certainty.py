"""Finds types whose objects keep memory that nothing counts, such as an index of faiss: reports
say "at least" of their size.

A C library says nowhere how much memory its objects keep. So each of its types counts as one that
keeps more than its size, unless something is known about it:

- a table has a function that reads its memory, or it has a ``__sizeof__`` of its own;
- its library keeps data in arrays, containers and other objects that are followed, as pandas does;
- it is a value, such as a date, an error or a class;
- it was compiled from Python, so that its attributes are Python objects.

The standard library is the other way round: its types refer to objects that are followed, except a
few.
"""

from __future__ import annotations

import datetime
import gc
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

from ipygpumem.heap.kinds import structs
from ipygpumem.heap.kinds.arrays import library_type
from ipygpumem.heap.knowledge.size_methods import size_method
from ipygpumem.introspect import (
    HEAP_TYPE,
    class_dict,
    flags_of,
    is_instance,
    is_made_by_statement,
    is_users_class,
    module_attribute,
    module_dict,
    mro_of,
    name_of,
)


def _words(text: str) -> list[str]:
    """Return the words of a text: a table of names fits into few lines."""
    return text.split()


_VALUE_TYPES: tuple[type, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    tuple,
    list,
    dict,
    set,
    frozenset,
    BaseException,
    type,
    ModuleType,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
)
"""Built-in types whose C subclasses are values, too, such as pandas' ``Timestamp``."""

_UNCOUNTED_IN_STANDARD_LIBRARY: dict[str, tuple[str, ...]] = {
    "_bz2": ("BZ2Compressor", "BZ2Decompressor"),
    "_dbm": ("dbm",),
    "_gdbm": ("gdbm",),
    "_lzma": ("LZMACompressor", "LZMADecompressor"),
    "_ssl": ("MemoryBIO",),
    "_tkinter": ("tkapp",),
    "_zstd": ("ZstdCompressor", "ZstdDecompressor", "ZstdDict"),
    "compression.zstd": ("ZstdCompressor", "ZstdDecompressor", "ZstdDict"),
    "pyexpat": ("xmlparser",),
    "xml.etree.ElementTree": ("XMLParser",),
    "zlib": ("Compress", "Decompress", "_ZlibDecompressor"),
}
"""Types of the standard library that keep memory in C, by module."""

_COUNTED_LIBRARIES = {
    *_words("aiohttp contourpy frozenlist h5py kiwisolver matplotlib multidict numpy pandas"),
    *_words("propcache psutil pydantic_core sklearn torch torchvision uarray xxhash yarl zmq"),
    # by way of a pool of cymem
    *_words("blis cymem murmurhash preshed spacy srsly thinc"),
    "_cyutility",  # Cython's views of memory that belongs to other objects
    "_dynfunc",  # numba's functions
    "_nrt_python",  # numba's owners of arrays' memory, which the arrays show
    "nanobind",
    "pybind11_builtins",  # bases of all classes that these have made
    *_words("ipygpumem IPython ipykernel debugpy _pydevd_bundle _pydev_bundle pydevd"),
}
"""Libraries whose C types refer to objects that are followed, are small, or are read by a function
in a table.
"""

_UNCOUNTED_TYPES: dict[str, tuple[str, ...]] = {
    "pandas": ("pandas._libs.parsers",),
    "torch": (
        "torch._C._distributed",
        "torch._C.ScriptFunction",
        "torch._C.ScriptObject",
        "torch.jit.ScriptFunction",
    ),
    "zmq": ("zmq.backend.cython._zmq.Frame",),
}
"""Exceptions to ``_COUNTED_LIBRARIES``: the starts of the names of types that keep memory which
nothing counts, by library.
"""

_SMALL_TYPES: dict[str, tuple[str, ...]] = {
    "cftime": ("datetime",),
    "charset_normalizer": ("",),
    "protobuf": ("Descriptor", "EnumDescriptor", "FieldDescriptor", "FileDescriptor"),
    "jaxlib": (
        *_words("Array Client Config Device DeviceList Layout Memory Mesh Sharding"),
        *_words("PyTreeDef PyTreeRegistry"),
    ),
    "jax": ("Sharding",),
    "lxml": ("QName", "ClassLookup", "ErrorLog", "Resolver"),
    "netCDF4": ("Dimension",),
    "polars": ("PyDataFrame", "DataType", "Selector", "When", "Then"),
    "pyarrow": (
        *_words("DataType Type Field Schema KeyValueMetadata MemoryPool Function FunctionRegistry"),
        *_words("FunctionOptions Options Kernel Expression FileSystem FileSelector FileInfo Codec"),
        *_words("BooleanScalar FloatScalar DoubleScalar HalfFloatScalar DurationScalar NullScalar"),
        *_words("Int8Scalar Int16Scalar Int32Scalar Int64Scalar TimestampScalar"),
        *_words("MonthDayNanoIntervalScalar Date32Scalar Date64Scalar Time32Scalar Time64Scalar"),
        *_words("Decimal128Scalar Decimal256Scalar"),
    ),
    "regex": ("",),
    "_regex": ("",),
    "tokenizers": ("AddedToken", "Regex"),
    "yaml": ("Mark",),
}
"""Ends of the names of types that are small values, or that other types hold, by library."""

_LIBRARY_OF_PACKAGE = {
    "_box": "numba",
    "_cffi_backend": "cffi",
    "_dispatcher": "numba",
    "_polars_runtime_32": "polars",
    "_polars_runtime_64": "polars",
    "_polars_runtime_compat": "polars",
    "google": "protobuf",
}
"""Names of libraries as users know them, by the first part of the names of their modules, where
these differ.
"""


class UncountedLibraries:
    """Finds the library that keeps memory for the instances of a type which nothing counts.

    Args:
        is_read: returns True for a type whose memory is counted.
    """

    def __init__(self, is_read: Callable[[type], bool]) -> None:
        self._is_read = is_read

    def library_of(self, kind: type, example: object = None) -> str:
        """Return the name of the library, such as ``faiss``; empty if all memory of the instances
        is counted.

        Args:
            kind: the type.
            example: an instance: a class written in Python may keep memory behind a pointer of
                ctypes.
        """
        if _is_unreadable(kind):
            return _name_of_library(kind)
        if self._is_read(kind):
            return ""
        # The nearest base with fields in C decides: only it can have a pointer to memory.
        for base in mro_of(kind):
            if base is object:
                break
            if _is_handle_of_swig(base):
                return _name_of_library(kind)
            if _has_fields_in_c(base):
                if not _keeps_memory(base):
                    return ""
                return _name_of_library(kind) or _name_of_library(base)
        if _keeps_address_as_int(kind):
            return _name_of_library(kind)
        if example is not None and _has_pointer(kind, example):
            return _name_of_library(kind) or "ctypes"
        return ""


def _has_fields_in_c(kind: type) -> bool:
    """Return True if the C struct of a class has fields that its base does not have, so that it may
    have a pointer to uncounted memory.

    A class statement adds at most a dict, weak references and slots, all of which the class then
    names. A library may add as little to a class that it creates at run time, but names none of
    them.
    """
    if name_of(type(kind)) in _METACLASSES_OF_C:
        return True
    if not is_made_by_statement(kind):
        return True
    base = type.__dict__["__base__"].__get__(kind) or object
    if _basic_size(kind) <= _basic_size(base):
        return False
    attributes = class_dict(kind)
    return not any(name in attributes for name in ("__dict__", "__weakref__", "__slots__"))


_METACLASSES_OF_C = {"pybind11_type", "nb_type", "nb_type_0"}
"""Metaclasses of classes whose instances have an object of C++; the classes themselves add no
fields.
"""


def _basic_size(kind: type) -> int:
    """Return the bytes of the C struct of a class's instances."""
    size: int = type.__dict__["__basicsize__"].__get__(kind)
    return size


def _is_handle_of_swig(kind: type) -> bool:
    """Return True for a class that SWIG has written: its instances own an object of C++."""
    return "thisown" in class_dict(kind)


_CLASSES_WITH_ADDRESSES: tuple[tuple[str, str], ...] = (("rtree.index", "Handle"),)
"""Modules and names of classes written in Python that keep the address of an object in C as an int.
"""


def _keeps_address_as_int(kind: type) -> bool:
    """Return True for a class whose instances keep the address of an object in C as an int."""
    for module, name in _CLASSES_WITH_ADDRESSES:
        base = library_type(module, name)
        if base is not None and type.__subclasscheck__(base, kind):
            return True
    return False


def _keeps_memory(kind: type) -> bool:
    """Return True if instances of a C class may keep memory that nothing counts."""
    if any(type.__subclasscheck__(value_type, kind) for value_type in _VALUE_TYPES):
        return False
    module = _module_of(kind)
    name = name_of(kind)
    package, _, _ = module.partition(".")
    library = _LIBRARY_OF_PACKAGE.get(package, package)
    if library in ("", "builtins"):  # functions and generators of Cython
        return False
    if library.startswith("swig_runtime_data"):  # handles of objects whose classes are known
        return False
    if package in sys.stdlib_module_names:
        return name in _UNCOUNTED_IN_STANDARD_LIBRARY.get(module, ())
    if name.startswith("__pyx_"):  # closures and default arguments of Cython
        return False
    if _has_size_or_is_compiled(kind) or _is_enumeration(kind):
        return False
    if library in _COUNTED_LIBRARIES:
        return f"{module}.{name}".startswith(_UNCOUNTED_TYPES.get(library, ()))
    endings_of_small = _SMALL_TYPES.get(library, ())
    names = map(name_of, mro_of(kind))
    return not any(name.endswith(endings_of_small) for name in names)


def _has_size_or_is_compiled(kind: type) -> bool:
    """Return True for a class with a ``__sizeof__`` of its own, and for one that mypyc has compiled
    from Python.
    """
    if not size_method(kind).is_of_object:
        return True
    return any("__mypyc_attrs__" in class_dict(base) for base in mro_of(kind))


def _is_enumeration(kind: type) -> bool:
    """Return True for an enumeration of pybind11."""
    attributes = class_dict(kind)
    return "__members__" in attributes and "__entries" in attributes


def _is_unreadable(kind: type) -> bool:
    """Return True for a type whose C struct is read by a function in a table, if the struct of this
    version of the library is unknown.
    """
    for module, name, can_read in _READ_FROM_STRUCTS:
        base = library_type(module, name)
        if base is not None and type.__subclasscheck__(base, kind):
            return not can_read()
    return False


_READ_FROM_STRUCTS: tuple[tuple[str, str, Callable[[], bool]], ...] = (
    ("io", "StringIO", lambda: structs.can_read_text_streams()),
    ("numpy.dtypes", "StringDType", lambda: structs.can_read_texts()),
    ("sqlite3", "Connection", lambda: structs.can_read_databases()),
)
"""Modules and names of such types, and the function that tries whether the struct is known."""


def _has_pointer(kind: type, example: object) -> bool:
    """Return True if an object of a library's class written in Python has an attribute that is a
    pointer of ctypes.
    """
    library = _name_of_library(kind)
    if library in _COUNTED_LIBRARIES or library in sys.stdlib_module_names:
        return False
    pointers = [library_type("ctypes", "c_void_p"), library_type("_ctypes", "_Pointer")]
    for value in _values_of_attributes(example):
        for pointer in pointers:
            if pointer is not None and type.__subclasscheck__(pointer, type(value)):
                return True
    return False


def _values_of_attributes(item: object) -> Iterator[object]:
    """Yield the values of an object's attributes, and its class; creates no dict of attributes."""
    for value in gc.get_referents(item):
        if type(value) is dict:
            yield from list(value.values())
        else:
            yield value


def _name_of_library(kind: type) -> str:
    """Return the name of the library that has defined a class, or the nearest of its bases that is
    not the user's.
    """
    for base in mro_of(kind):
        package, _, _ = _module_of(base).partition(".")
        if package in ("", "builtins") or is_users_class(base):
            continue
        return _LIBRARY_OF_PACKAGE.get(package, package.lstrip("_"))
    return ""


def _module_of(kind: type) -> str:
    """Return the name of the module of a class.

    A class of C that names no module seems to be of ``builtins``: then all modules are searched for
    it.
    """
    module = module_attribute(kind)
    if module != "builtins":
        return module
    if not _is_static(kind):
        return _module_that_has(kind)
    key = id(kind)
    if key not in _MODULES_OF_STATIC_TYPES:
        _MODULES_OF_STATIC_TYPES[key] = _module_that_has(kind)
    return _MODULES_OF_STATIC_TYPES[key]


_MODULES_OF_STATIC_TYPES: dict[int, str] = {}
"""Modules of static types, which are never freed, by the type's identity: a search through 2,700
modules takes 2 ms.
"""


def _is_static(kind: type) -> bool:
    """Return True for a type that is a variable of C, so that it is never freed."""
    return not flags_of(kind) & HEAP_TYPE


def _module_that_has(kind: type) -> str:
    """Return the name of a module that has a class under its name; ``builtins`` if it seems to be
    CPython's own.

    The standard library's modules come first, because other modules import its classes. All classes
    of CPython that are in no module, such as the type of an iterator, are static.
    """
    name = name_of(kind)
    module_of_library = ""
    for module_name, module in list(sys.modules.items()):
        if not is_instance(module, ModuleType):
            continue
        if module_dict(module).get(name) is not kind:
            continue
        package, _, _ = module_name.partition(".")
        if package in sys.stdlib_module_names:
            return module_name
        module_of_library = module_of_library or module_name
    if module_of_library:
        return module_of_library
    if _is_static(kind):
        return "builtins"
    return name

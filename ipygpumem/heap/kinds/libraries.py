"""Finds the memory behind objects of known libraries: one short function per library.

Most libraries keep their data in arrays and containers, which every reader follows by itself. Only
objects with memory to which no Python object refers need a function here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from ipygpumem.heap.attributes import slots
from ipygpumem.heap.bulk import instances_among, kinds_of, of_types, subtypes, types_of
from ipygpumem.heap.kinds import structs
from ipygpumem.heap.kinds.arrays import (
    is_array,
    is_of_library,
    library_type,
    map_bytes,
    object_key,
    owner_of,
    read_array,
    span_of,
)
from ipygpumem.heap.kinds.arrow import buffers
from ipygpumem.heap.kinds.mapped import MappedFiles, note_on_pages
from ipygpumem.heap.kinds.tensors import Reader, each, tensors_of_script
from ipygpumem.interrupts import is_from_signal
from ipygpumem.introspect import (
    instance_dict,
    is_instance,
    module_attribute,
    module_dict,
    mro_of,
    name_of,
    solid_base,
    text_of,
    type_name,
)
from ipygpumem.probes.pages import resident_bytes
from ipygpumem.probes.pools import name_of_jax_device
from ipygpumem.probes.segments import linked_bytes

PieceKey = tuple[object, ...]
"""Identity of a piece of memory while it is alive. It begins with the library that has allocated
the memory, or with ``"object"`` or ``"memory"`` and the identity of a Python object that has it:
``("torch", address)``, ``("polars", address, size)``, ``("object", id(item))``.
"""


class MemoryPiece(NamedTuple):
    """Memory to which no Python object refers."""

    key: PieceKey
    size_bytes: int
    device: str = "cpu"
    address: int = 0
    """Start of host memory that objects of several libraries may share; 0 if unknown."""
    note: str = ""
    """Says that the size is an estimate, or not all in RAM."""


PieceReader = Callable[[Any], Iterable[object]]
"""Returns the pieces of memory behind an object of its class, and other objects to follow."""

_SAVED = "estimated by the size of the saved model"
_BY_VALUES = "estimated by its number of values"
_BY_CATEGORIES = "estimated by its number of categories"
_CATEGORY_BYTES = 100
"""Bytes that polars needs for a category besides a long text."""
UNREAD = "not all of it can be read"
"""Note of a piece that has more memory than its size."""
MAY_BE_SLICE = "a small column of polars may keep a larger one alive"
MAY_HAVE_DRAWN_MUCH = "matplotlib may keep more after drawing many points"
"""Notes of a piece that may have more memory than its size."""
AT_LEAST = frozenset((UNREAD, MAY_BE_SLICE, MAY_HAVE_DRAWN_MUCH))
"""All notes of a piece whose size is a lower bound."""
_SMALL_COLUMN_BYTES = 64 * 1024
"""A smaller column of polars may show a few rows of a large one, which it keeps alive: polars does
not say how much, and users slice frames with ``head()``.
"""
_MAPPED = "a memory map: only its used pages are in RAM"


def _piece_of(value: object, size_bytes: int, note: str = "") -> MemoryPiece:
    """Return the memory that only one object shows, whose identity is the key."""
    return MemoryPiece(object_key(value), size_bytes, note=note)


def native(value: object, kind: str, *attributes: str) -> Any:
    """Return the object of a library's core behind an object of its Python layer, such as the
    ``PyDataFrame`` of a frame of polars.

    Args:
        value: the object of the Python layer.
        kind: the name of the core's class.
        attributes: names of the attribute that may have the core's object; the first one that
            ``value`` has is read.

    Returns:
        None if there is no such attribute, or its value is of another class, or of a Python
        subclass, whose methods may be the user's.
    """
    values = slots(value) | (instance_dict(value) or {})
    names = [name for name in attributes if name in values]
    if not names:
        return None
    inner = values[names[0]]
    if type_name(inner) != kind:
        return None
    is_class_of_c = solid_base(type(inner)) is type(inner)
    if not is_class_of_c:
        return None
    return inner


# -- memory, by library -------------------------------------------------------------------------
#
# Each function below yields the memory behind an object of the class that stands next to it in
# ``_BY_INSTANCE`` or ``_BY_METHOD``, and Python objects to which only the library refers.


def _arrow_array(array: Any) -> Iterator[object]:
    """Yield the buffers of an Arrow array, and the array of its categories if it has any."""
    arrow: Any = sys.modules["pyarrow"]
    for buffer in arrow.Array.buffers(array):
        if buffer is not None:
            yield buffer
    if is_instance(array, arrow.DictionaryArray):
        yield arrow.DictionaryArray.dictionary.__get__(array)


def _arrow_buffer(buffer: Any) -> Iterator[object]:
    """Yield the host memory of an Arrow buffer, or that of the buffer of which it is a slice."""
    while buffer.parent is not None:  # a slice keeps the whole alive
        buffer = buffer.parent
    if buffer.is_cpu:
        address = buffer.address
        yield MemoryPiece(("arrow", address), buffer.size, address=address)


def _arrow_binary(scalar: Any) -> Iterator[object]:
    """Yield the buffer of one text or binary value."""
    buffer = scalar.as_buffer()
    if buffer:
        yield buffer


def _arrow_list(scalar: Any) -> Iterator[object]:
    """Yield the array of one value that is a list."""
    if scalar.values is not None:
        yield scalar.values


def bytes_of(stream: Any) -> Iterator[object]:
    """Yield the bytes from which a ``BytesIO`` was made, while it shares them."""
    kind = io.BytesIO
    if VISITS_BUFFER or kind.closed.__get__(stream):
        return
    is_shared = kind.__sizeof__(stream) == kind.__sizeof__(io.BytesIO())
    if is_shared:
        yield kind.getvalue(stream)  # no copy


VISITS_BUFFER = len(gc.get_referents(io.BytesIO(b"text"))) > 1
"""True if the collector visits the bytes in a ``BytesIO``, as from Python 3.12 on."""


def _ctypes_data(data: Any) -> Iterator[object]:
    """Yield the memory of an array of ctypes that owns it."""
    ctypes = sys.modules["_ctypes"]
    # An array made by ``from_buffer`` or ``from_address`` shows another object's memory, such as
    # that of a memory map.
    is_owner = ctypes.Array._b_needsfree_.__get__(data)
    is_part = ctypes.Array._b_base_.__get__(data) is not None
    if is_owner and not is_part:
        piece = _piece_of(data, ctypes.sizeof(data))
        yield piece._replace(address=ctypes.addressof(data))


def _cymem_pool(pool: Any) -> Iterator[object]:
    """Yield the memory that a pool of spaCy's ``cymem`` has allocated."""
    headers_bytes = 8 * len(pool.addresses)  # malloc's
    yield _piece_of(pool, pool.size + headers_bytes)


def _h5py_file(item: Any) -> Iterator[object]:
    """Yield the memory of the file of a group or data set, if that file is only in memory."""
    h5py: Any = sys.modules["h5py"]
    if not item:  # closed
        return
    file = h5py.h5i.get_file_id(item.id)
    driver = file.get_access_plist().get_driver()
    if driver == h5py.h5fd.CORE:  # in memory
        number = h5py.h5o.get_info(item.id).fileno
        yield MemoryPiece(("h5py", number), file.get_filesize())


def _jax_array(array: Any) -> Iterator[object]:
    """Yield the memory of an array of JAX; with an address if all of it is in one block."""
    if array.is_deleted():
        return
    devices = sorted(array.devices(), key=_number_of_device)
    device = name_of_jax_device(devices[0])
    address = 0
    if array.is_ready() and len(devices) == 1:
        address = int(array.unsafe_buffer_pointer())
    key: PieceKey = object_key(array)
    if address:
        key = ("jax", device, address)
    if device != "cpu":
        address = 0
    size = int(array.on_device_size_in_bytes())
    yield MemoryPiece(key, size, device, address)


def _number_of_device(device: Any) -> int:
    return int(device.id)


def _lightgbm_booster(booster: Any) -> Iterator[object]:
    """Yield the memory of a LightGBM model."""
    rounds = booster.current_iteration()
    sampled_rounds = min(rounds, 20)  # writing all of a large model would take seconds
    text = booster.model_to_string(num_iteration=sampled_rounds)
    size = len(text) * rounds // max(sampled_rounds, 1)
    yield _piece_of(booster, size, _SAVED)


def _matplotlib_renderer(renderer: Any) -> Iterator[object]:
    """Yield the picture of a figure that was drawn."""
    # The outline of what it has drawn: 45 MiB for 100,000 points of ``scatter``.
    yield _piece_of(renderer, memoryview(renderer).nbytes, MAY_HAVE_DRAWN_MUCH)


def _memory_map(mapped: Any) -> Iterator[object]:
    """Yield the memory of an ``mmap``: the pages in RAM if they can be counted."""
    size = map_bytes(mapped)
    if not size:
        return
    note = _MAPPED
    with contextlib.suppress(structs.UnknownLayoutError, OSError):
        address = structs.address_of_map(mapped)
        resident = resident_bytes(address, size)
        is_file = MappedFiles().contain(address, size)
        note = ""
        if is_file or resident < size:
            note = note_on_pages(size, is_file=is_file)
        size = resident
    yield _piece_of(mapped, size, note)


def _numba_list(items: Any) -> Iterator[object]:
    """Yield the items of a typed list of numba."""
    attributes = instance_dict(items) or {}
    memory = attributes.get("_opaque")
    if memory is None:  # a list without a type has none yet
        return
    kind = attributes["_list_type"].item_type
    size = structs.bytes_of_typed_list(memory.data)
    yield _piece_of(memory, size, _note_on_numba([kind]))


def _numba_dict(items: Any) -> Iterator[object]:
    """Yield the table of a typed dict of numba."""
    attributes = instance_dict(items) or {}
    memory = attributes.get("_opaque")
    if memory is None:
        return
    kind = attributes["_dict_type"]
    note = _note_on_numba([kind.key_type, kind.value_type])
    size = structs.bytes_of_typed_dict(memory.data)
    yield _piece_of(memory, size, note)


def _note_on_numba(kinds: Sequence[object]) -> str:
    """Return the note of one of numba's containers: its items may have memory of their own, unless
    all of them are numbers.

    Args:
        kinds: numba's types of the items.
    """
    number = library_type("numba.core.types", "Number")
    boolean = library_type("numba.core.types", "Boolean")
    bases = [base for base in (number, boolean) if base is not None]
    for kind in kinds:
        if not any(is_instance(kind, base) for base in bases):
            return UNREAD
    return ""


def _numpy_row(row: Any) -> Iterable[object]:
    """Return nothing: a row of a structured array has no memory besides the array, to which it
    refers (``inside_row``). The entry makes it an object that is read, because the collector
    reports no reference of it.
    """
    return ()


def texts_of_numpy(dtype: Any) -> Iterator[object]:
    """Yield the memory of the texts that a ``StringDType`` keeps."""
    address, size = structs.memory_of_texts(dtype)
    if size:
        yield MemoryPiece(("texts", address), size)


def _pandas_engine(engine: Any) -> Iterator[object]:
    """Yield the hash table of a pandas index."""
    yield _piece_of(engine, engine.sizeof())


_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes of a pixel by an image's mode; every other mode has four."""


def _pillow_image(image: Any) -> Iterator[object]:
    """Yield the pixels of an image."""
    pixels = native(image, "ImagingCore", "_im", "im")
    if pixels is None:
        return
    width, height = pixels.size
    row_bytes = width * _PIXEL_BYTES.get(pixels.mode, 4)
    pointer_bytes = 8  # to each row
    yield _piece_of(pixels, height * (row_bytes + pointer_bytes))


def _polars_frame(frame: Any) -> Iterator[object]:
    """Yield the memory of all columns of a frame of polars."""
    for column, key in polars_columns(frame):
        yield from polars_column(column, *key)


def polars_columns(frame: Any) -> Iterator[tuple[Any, PieceKey]]:
    """Yield the columns of a frame of polars, each with its identity while the frame is alive."""
    inner = native(frame, "PyDataFrame", "_df")
    if inner is not None:
        for position, column in enumerate(inner.get_columns()):
            yield column, ("polars", id(inner), position)


def _polars_series(series: Any) -> Iterable[object]:
    """Yield the memory of a series of polars."""
    column = native(series, "PySeries", "_s")
    if column is None:
        return ()
    return polars_column(column)


def polars_column(column: Any, *key: object) -> Iterator[object]:
    """Yield the memory of a column of polars.

    Args:
        column: the object of polars' core.
        key: the column's identity while its frame is alive; empty for that of the object.
    """
    kind = column.dtype()
    with contextlib.suppress(AttributeError):  # another version of polars
        yield from _polars_categories(column, kind.categories)
    if str(kind) == "Object":
        yield from column.to_list()  # no copies
    if "Object" not in str(kind):  # these have no buffers, and polars would print an error
        with contextlib.suppress(AttributeError, KeyError):  # another version of polars
            # The size is part of the key, because the start of a column, as from ``head()``, is at
            # the same address and shorter.
            spans = _spans_of_polars(column)
            is_small = sum(size for _, size in spans) < _SMALL_COLUMN_BYTES
            note = MAY_BE_SLICE if is_small else ""
            for address, size in spans:
                yield MemoryPiece(("polars", address, size), size, address=address, note=note)
            return
    identity = key or object_key(column)  # a column without addresses
    yield MemoryPiece(identity, column.estimated_size())


def _polars_categories(column: Any, categories: Any) -> Iterator[object]:
    """Yield the memory of the texts of a Categorical or Enum, and of the index from texts to
    codes.
    """
    series = sys.modules["polars.series.series"].Series
    identity: tuple[object, ...]
    if is_instance(categories, series):  # of an Enum
        texts = native(categories, "PySeries", "_s")
        yield texts
        identity = tuple(_spans_of_polars(texts)[:1])
        number = texts.len()
    else:
        identity = categories.name(), categories.namespace()
        codes = series._from_pyseries(column).to_physical()
        largest_code = codes.max() or 0
        number = largest_code + 1  # the column uses at least as many
    size = number * _CATEGORY_BYTES
    yield MemoryPiece(("polars", *identity), size, note=_BY_CATEGORIES)


def _spans_of_polars(column: Any) -> list[tuple[int, int]]:
    """Return the address and the bytes of each buffer of a column."""
    spans = list[tuple[int, int]]()
    for chunk in column.get_chunks():
        inner = native(chunk, "PySeries", "_s")
        spans += buffers(inner._export_arrow_to_c)
    return spans


def _sklearn_tree(tree: Any) -> Iterator[object]:
    """Yield the nodes and values of a decision tree."""
    node_bytes = sys.modules["sklearn.tree._tree"].NODE_DTYPE.itemsize
    count = max(tree.node_count, 1)
    values_bytes = tree.value.nbytes // count
    yield _piece_of(tree, tree.capacity * (node_bytes + values_bytes))


def _shared_block(block: Any) -> Iterator[object]:
    """Yield the memory map in which a ``RawArray`` or a ``Value`` of multiprocessing has a block.

    The heap of multiprocessing keeps the map, too, and unmaps it once all its blocks are freed.
    """
    attributes = instance_dict(block) or {}
    (arena, _, _), _ = attributes["_state"]
    attributes_of_arena = instance_dict(arena) or {}
    yield attributes_of_arena["buffer"]


_SEGMENT = ("multiprocessing.shared_memory", "SharedMemory")
OUTLIVES = "shared memory, which only close() and unlink() free"


def _shared_memory(segment: Any) -> Iterator[object]:
    """Yield shared memory that this process has created."""
    if not is_segment(segment):
        return
    attributes: dict[str, Any] = instance_dict(segment) or {}
    mapped = attributes["_mmap"]
    # The size of the segment itself: this process need not have touched all of its pages.
    size = linked_bytes(_segment_name(attributes))
    if size is None:
        size = map_bytes(mapped)
    yield _piece_of(mapped, size, OUTLIVES)


def is_segment(item: object) -> bool:
    """Return True for shared memory that this process has created: it outlives its object until it
    is unlinked.
    """
    if not is_of_library(item, *_SEGMENT):
        return False
    attributes = instance_dict(item) or {}
    flags = attributes.get("_flags")
    if type(flags) is not int or not flags & os.O_CREAT:
        return False
    return linked_bytes(_segment_name(attributes)) != 0


def _segment_name(attributes: Mapping[str, object]) -> str:
    """Return the name of shared memory, as the file system has it, from its object's attributes."""
    return text_of(attributes.get("_name")).lstrip("/")


def segments(items: Sequence[object]) -> list[object]:
    """Return the ``items`` that are shared memory as in ``is_segment``."""
    base = library_type(*_SEGMENT)
    if base is None:
        return []
    candidates = instances_among(items, base)
    return list(filter(is_segment, candidates))


def _sqlite_connection(connection: Any) -> Iterator[object]:
    """Yield the memory of a connection, and a cache that it shares with other ones."""
    for address, size in structs.memory_of_database(connection):
        if address:
            yield MemoryPiece(("sqlite", address), size)
        else:
            yield _piece_of(connection, size)


def _text_stream(stream: Any) -> Iterator[object]:
    """Yield the text of a ``StringIO``."""
    if not io.StringIO.closed.__get__(stream):
        yield _piece_of(stream, structs.bytes_of_text_stream(stream))


def _torch_storage(storage: Any) -> Iterator[object]:
    """Yield the memory of a torch storage; none if it is on ``meta``."""
    device = str(storage.device)
    address = size = 0
    if device == "cpu":
        address = storage.data_ptr()
    if device != "meta":
        size = storage.nbytes()
    yield MemoryPiece(("torch", storage._cdata), size, device, address)


def _xgboost_booster(booster: Any) -> Iterator[object]:
    """Yield the memory of an XGBoost model."""
    saved = booster.save_raw("ubj")
    yield _piece_of(booster, len(saved), _SAVED)


def _xgboost_matrix(matrix: Any) -> Iterator[object]:
    """Yield the memory of XGBoost's data."""
    yield _piece_of(matrix, matrix.num_nonmissing() * 8, _BY_VALUES)  # each value has an index


_BY_INSTANCE: tuple[tuple[str, str, PieceReader], ...] = (
    ("PIL.Image", "Image", _pillow_image),
    ("_ctypes", "Array", _ctypes_data),
    ("io", "BytesIO", bytes_of),
    ("io", "StringIO", _text_stream),
    ("jax._src.array", "ArrayImpl", _jax_array),
    ("mmap", "mmap", _memory_map),
    ("multiprocessing.heap", "BufferWrapper", _shared_block),
    (*_SEGMENT, _shared_memory),
    ("numba.typed.typeddict", "Dict", _numba_dict),
    ("numba.typed.typedlist", "List", _numba_list),
    ("numpy", "void", _numpy_row),
    ("numpy.dtypes", "StringDType", texts_of_numpy),
    ("polars._plr", "PySeries", polars_column),
    ("polars.dataframe.frame", "DataFrame", _polars_frame),
    ("polars.series.series", "Series", _polars_series),
    ("pyarrow", "Array", _arrow_array),
    ("sqlite3", "Connection", _sqlite_connection),
    ("torch.jit", "ScriptModule", tensors_of_script),
)
"""Functions that read an instance of any subclass without running the subclass's code."""
_BY_METHOD: tuple[tuple[str, str, PieceReader], ...] = (
    ("cymem.cymem", "Pool", _cymem_pool),
    ("h5py", "Dataset", _h5py_file),
    ("h5py", "Group", _h5py_file),
    ("lightgbm", "Booster", _lightgbm_booster),
    ("matplotlib.backends._backend_agg", "RendererAgg", _matplotlib_renderer),
    ("pandas._libs.index", "IndexEngine", _pandas_engine),
    ("pyarrow", "BinaryScalar", _arrow_binary),
    ("pyarrow", "Buffer", _arrow_buffer),
    ("pyarrow", "ChunkedArray", attrgetter("chunks")),
    ("pyarrow", "ListScalar", _arrow_list),
    ("pyarrow", "RecordBatch", attrgetter("columns")),
    ("pyarrow", "Table", attrgetter("columns")),
    ("sklearn.tree._tree", "Tree", _sklearn_tree),
    ("torch", "UntypedStorage", _torch_storage),
    ("xgboost", "Booster", _xgboost_booster),
    ("xgboost", "DMatrix", _xgboost_matrix),
)
"""Functions that call an instance's methods: for the library's own classes only."""


def _shapely_bytes(geometries: Sequence[Any]) -> int:
    """Return the bytes of GEOS's objects, as measured with GEOS 3.14: one for each part, and 24 for
    each coordinate.
    """
    numpy: Any = sys.modules["numpy"]
    shapely: Any = sys.modules["shapely.lib"]
    array = numpy.empty(len(geometries), object)
    array[:] = geometries
    # A geometry that was never completed has the type -1.
    kinds = numpy.maximum(shapely.get_type_id(array), 0)
    parts = numpy.maximum(shapely.get_num_geometries(array), 1)
    rings = shapely.get_num_interior_rings(array)
    of_parts = parts * numpy.array(_BYTES_OF_PART)[kinds]
    of_collections = numpy.where(kinds >= _FIRST_COLLECTION, _BYTES_OF_COLLECTION, 0)
    of_rings = rings * _BYTES_OF_RING
    of_coordinates = shapely.get_num_coordinates(array) * 24
    sizes = of_parts + of_collections + of_rings + of_coordinates
    return int(sizes.sum())


_BYTES_OF_PART = (114, 137, 137, 200, 114, 137, 200, 137)
"""Bytes without coordinates: a point, line, ring, polygon, and each part of a collection of points,
lines, polygons, or of all of these.
"""
_FIRST_COLLECTION = 4
_BYTES_OF_COLLECTION = 235
_BYTES_OF_RING = 140

_IN_BULK: tuple[tuple[str, str, Callable[[Sequence[Any]], int]], ...] = (
    ("shapely.lib", "Geometry", _shapely_bytes),
)
"""Functions that return the memory in C of many small objects at once. No two of these objects
share memory.
"""


def bulk_reader(kind: type) -> Callable[[Sequence[Any]], int] | None:
    """Return the function in ``_IN_BULK`` that returns the bytes in C of many instances of a class
    at once; None if there is none.
    """
    for module, name, function in _IN_BULK:
        base = library_type(module, name)
        if base is not None and type.__subclasscheck__(base, kind):
            return function
    return None


class LoadedReader(NamedTuple):
    """A function that reads the memory behind the instances of a loaded class."""

    base: type
    function: PieceReader
    library: str
    """Only this library's own classes can be read; empty if instances of any subclass can."""


_class_of_reader = attrgetter("base")


def loaded_readers() -> list[LoadedReader]:
    """Return the functions for the classes of loaded libraries."""
    readers = []
    for module, name, function in _BY_INSTANCE:
        base = library_type(module, name)
        if base is not None:
            readers.append(LoadedReader(base, function, library=""))
    for module, name, function in _BY_METHOD:
        base = library_type(module, name)
        if base is not None:
            library, _, _ = module.partition(".")
            readers.append(LoadedReader(base, function, library))
    return readers


def reader_for(kind: type, readers: Sequence[LoadedReader] | None = None) -> PieceReader | None:
    """Return the function that reads the memory behind instances of ``kind``; None if none is
    known.

    Args:
        kind: any type.
        readers: the result of ``loaded_readers``, which saves the search for each of many types.
    """
    if readers is None:
        readers = loaded_readers()
    bases = set(map(id, mro_of(kind)))
    # First a check of all readers at once, because hardly any of thousands of types has one.
    if bases.isdisjoint(map(id, map(_class_of_reader, readers))):
        return None
    for reader in readers:
        if id(reader.base) not in bases:
            continue
        if reader.library and library_of(kind) != reader.library:
            return None
        return reader.function
    return None


def sharing_kinds() -> set[int]:
    """Return the identities of all types whose instances may share memory with objects to which
    they do not refer.
    """
    kinds = list[type]()
    for module, name, _ in (*_BY_INSTANCE, *_BY_METHOD):
        library, _, _ = module.partition(".")
        if library not in _SHARING:
            continue
        base = library_type(module, name)
        if base is not None:
            kinds.append(base)
    return set(subtypes(kinds))


_SHARING = {"_ctypes", "h5py", "io", "jax", "polars", "pyarrow", "sqlite3", "torch"}
"""Libraries whose objects may show the memory of other objects."""
_SMALLEST_BUFFER_BYTES = 512
"""Smaller plain bytes are constants, or not worth a search."""


def with_memory(items: Sequence[Any]) -> list[tuple[Any, MemoryPiece]]:
    """Return the items with memory that other objects may share, each with a piece of it.

    An item with several pieces stands there several times. Views of arrays among the items are left
    out.
    """
    items_with_pieces = list[tuple[Any, MemoryPiece]]()
    for item in of_types(sharing_kinds(), items):
        items_with_pieces += [(item, piece) for piece in pieces_behind(item)]
    if library_type("numpy", "ndarray") is not None:
        items_with_pieces += _memory_of_arrays(items)
        items_with_pieces += _memory_of_buffers(items)
    if library_type("torch", "Tensor") is not None:
        items_with_pieces += _memory_of_tensors(items)
    return items_with_pieces


def _memory_of_arrays(items: Sequence[Any]) -> Iterator[tuple[Any, MemoryPiece]]:
    """Yield each NumPy array with its memory, without views of arrays among the items."""
    array_type: Any = library_type("numpy", "ndarray")
    arrays = instances_among(items, array_type)
    identities = set(map(id, arrays))
    for array in arrays:
        viewed = read_array("base", array)
        if is_array(viewed) and id(viewed) in identities:
            continue
        owner = owner_of(array)
        if is_array(owner):
            _, start, end = span_of(owner)
        else:
            _, start, end = span_of(array)
        yield array, MemoryPiece(("numpy", id(owner)), end - start, address=start)


def _memory_of_buffers(items: Sequence[Any]) -> Iterator[tuple[Any, MemoryPiece]]:
    """Yield the ``bytes`` and ``bytearray`` objects that are not small, with their memory, which an
    object of a library may show.
    """
    for data, start, end in spans_of_buffers(items, _SMALLEST_BUFFER_BYTES):
        yield data, MemoryPiece(object_key(data), end - start, address=start)


def spans_of_buffers(items: Sequence[Any], smallest: int) -> Iterator[tuple[Any, int, int]]:
    """Yield the ``bytes`` and ``bytearray`` objects of at least ``smallest`` bytes, with the
    addresses where their content starts and ends.
    """
    numpy: Any = sys.modules["numpy"]
    for data in of_types(BUFFERS, items):
        if sys.getsizeof(data) >= smallest:
            _, start, end = span_of(numpy.frombuffer(data, "u1"))
            yield data, start, end


def _memory_of_tensors(items: Sequence[Any]) -> Iterator[tuple[Any, MemoryPiece]]:
    """Yield each tensor with a piece for each of its storages."""
    base: Any = library_type("torch", "Tensor")
    tensors = instances_among(items, base)
    if not tensors:
        return
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunction():
        reader = Reader(torch)
        plain, wrappers = reader.plain(tensors)
        addresses = each(torch.UntypedStorage.data_ptr, plain.storages)
        columns = (plain.tensors, plain.keys, plain.sizes, plain.devices, addresses)
        for tensor, key, size, device, address in zip(*columns, strict=True):
            if device != "cpu":
                address = 0
            yield tensor, MemoryPiece(("torch", key), size, device, address)
        for tensor in wrappers:
            memory = reader.memory(tensor)
            for key, size in memory.storages.items():
                yield tensor, MemoryPiece(("torch", key), size, memory.device)


BUFFERS = {id(bytes), id(bytearray)}
"""Types whose memory an object of a library may show."""


class LibraryMemory(NamedTuple):
    """The memory behind an object of a library."""

    pieces: list[MemoryPiece]
    objects: list[object]
    """Python objects that only the library refers to, and that are no memory themselves."""
    is_complete: bool
    """False if the object could not be read: it is closed, or of an unknown version of the library.
    """


def read_behind(item: Any, read: PieceReader) -> LibraryMemory:
    """Return the memory behind an object.

    Args:
        item: the object.
        read: the function for its class, from ``reader_for``.
    """
    try:
        parts = list(read(item))
    except Exception as error:  # closed, or an unknown version of the library
        if is_from_signal(error):
            raise
        return LibraryMemory([], [], is_complete=False)
    pieces = list[MemoryPiece]()
    objects = list[object]()
    # A column of polars may have a million lists.
    types_with_memory = _types_with_memory(parts)
    for part in parts:
        if type(part) is MemoryPiece:
            pieces.append(part)
            continue
        if id(type(part)) not in types_with_memory:
            objects.append(part)
            continue
        pieces_of_part = [piece for _, piece in with_memory([part])]
        if pieces_of_part:
            pieces += pieces_of_part
        else:
            objects.append(part)
    return LibraryMemory(pieces, objects, is_complete=True)


def _types_with_memory(items: Sequence[object]) -> set[int]:
    """Return the identities of the items' types for which ``with_memory`` may find memory."""
    types = types_of(items) - {id(MemoryPiece)}
    if not types:
        return types
    bases = (library_type("numpy", "ndarray"), library_type("torch", "Tensor"))
    arrays = kinds_of(items, *(base for base in bases if base is not None))
    return types & (sharing_kinds() | BUFFERS | arrays)


def pieces_behind(item: Any) -> list[MemoryPiece]:
    """Return the pieces of memory behind an object; none if no function reads its class."""
    read = reader_for(type(item))
    if read is None:
        return []
    return read_behind(item, read).pieces


def library_of(kind: type) -> str:
    """Return the library that has defined a class, such as ``pandas``; empty for a class that the
    module which it names does not have.
    """
    name = module_attribute(kind)  # empty for some classes of ctypes
    module: Any = sys.modules.get(name)
    if not is_instance(module, ModuleType):
        return ""
    # A user's class may name any module, and is not found there.
    if module_dict(module).get(name_of(kind)) is not kind:
        return ""
    library, _, _ = name.partition(".")
    return library


def loaded_classes() -> list[type]:
    """Return the classes of loaded libraries whose objects have memory to which no Python object
    refers.
    """
    return [reader.base for reader in loaded_readers()]

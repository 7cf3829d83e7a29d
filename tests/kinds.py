"""Makes objects of many kinds and any size, to compare what reports name with the growth of the
process.

Run by test_sizes in processes of their own: ``python -m tests.kinds each LIBRARY ...`` or ``mixed
SEED ...``. Each measurement has a process to itself, so that no object leaves gaps for the next
one.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import datetime
import gc
import importlib
import io
import itertools
import json
import mmap
import multiprocessing
import os
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ipygpumem.heap.sizes.sizes import Sizes
from ipygpumem.inventory.names import top
from ipygpumem.probes.mappings import own_pages

MIB = 1 << 20
MIXED = "numpy", "pandas", "pyarrow", "polars", "PIL.Image", "scipy.sparse", "xarray"
lib: dict[str, Any] = {}
"""The libraries to try."""


class User:
    def __init__(self, number: int) -> None:
        self.number, self.text, self.pair = number, str(number), [number, None]


class Empty:
    pass


class Words(list):  # type: ignore[type-arg]  # of anything
    pass


class Table(dict):  # type: ignore[type-arg]  # of anything
    pass


class Slotted:
    __slots__ = ("number", "text")

    def __init__(self, number: int) -> None:
        self.number, self.text = number, str(number)


Point = collections.namedtuple("Point", "x y")  # the plain one is meant


def texts(count: int, length: int = 30) -> list[str]:
    """Return different texts; their lengths differ by up to 3."""
    return [f"{number * 7919:0{length + number % 4}d}" for number in range(count)]


HAS_TEXTS = find_spec("numpy") is not None and version("numpy") >= "2"


KINDS: dict[str, dict[str, Callable[[int], object]]] = {}
"""Functions that make an object of about as many bytes, by library."""


def kind(
    library: str, name: str, *, is_available: bool = True
) -> Callable[[Callable[[int], object]], Callable[[int], object]]:
    """Return a decorator for a function that makes objects of a kind, of a size in bytes."""

    def add(make: Callable[[int], object]) -> Callable[[int], object]:
        if is_available:
            KINDS.setdefault(library, {})[name] = make
        return make

    return add


@kind("", "texts")
def plain_texts(size: int) -> object:
    return texts(size // 90)


@kind("", "long texts")
def plain_long_texts(size: int) -> object:
    return texts(size // 5000, 5000)


@kind("", "wide texts")
def wide_texts(size: int) -> object:
    return [f"{'☃' * 40}{number:030d}" for number in range(size // 230)]


@kind("", "a text")
def plain_text(size: int) -> object:
    return "x" * size


@kind("", "numbers")
def numbers(size: int) -> object:
    return list(range(10**6, 10**6 + size // 40))


@kind("", "floats")
def floats(size: int) -> object:
    return [float(number) for number in range(size // 40)]


@kind("", "times")
def times(size: int) -> object:
    return [datetime.datetime.fromtimestamp(number) for number in range(size // 56)]


@kind("", "bytes")
def plain_bytes(size: int) -> object:
    return [bytes(3000) for _ in range(size // 3048)]


@kind("", "a bytearray")
def plain_bytearray(size: int) -> object:
    return bytearray(b"x") * size


@kind("", "dicts")
def dicts(size: int) -> object:
    return [{"number": number, "text": str(number)} for number in range(size // 300)]


@kind("", "a dict")
def plain_dict(size: int) -> object:
    return {number: str(number) for number in range(size // 130)}


@kind("", "texts as keys")
def texts_as_keys(size: int) -> object:
    return [{text: None} for text in texts(size // 400, 100)]


@kind("", "a counter")
def counter(size: int) -> object:
    return collections.Counter(texts(size // 170))


@kind("", "groups")
def groups(size: int) -> object:
    lists = {number: [number] * 99 for number in range(size // 1000)}
    return collections.defaultdict(list, lists)


@kind("", "a tree")
def tree(size: int) -> object:
    text = json.dumps([{"a": [n, {"b": str(n)}], "c": n} for n in range(size // 700)])
    return json.loads(text)


@kind("", "lists")
def lists(size: int) -> object:
    return [[number, None, number] for number in range(size // 120)]


@kind("", "tuples")
def tuples(size: int) -> object:
    return [(number, str(number)) for number in range(size // 150)]


@kind("", "sets")
def sets(size: int) -> object:
    return [{number, -number} for number in range(size // 300)]


@kind("", "a set")
def plain_set(size: int) -> object:
    return set(texts(size // 130))


@kind("", "named tuples")
def named_tuples(size: int) -> object:
    return [Point(number, None) for number in range(size // 110)]


@kind("", "user's objects")
def users_objects(size: int) -> object:
    return [User(number) for number in range(size // 280)]


@kind("", "user's empty objects")
def users_empty_objects(size: int) -> object:
    return [Empty() for _ in range(size // 90)]


@kind("", "user's lists")
def users_lists(size: int) -> object:
    return [Words((number,)) for number in range(size // 130)]


@kind("", "user's dicts")
def users_dicts(size: int) -> object:
    return [Table(number=number) for number in range(size // 260)]


@kind("", "user's objects with slots")
def users_objects_with_slots(size: int) -> object:
    return [Slotted(number) for number in range(size // 140)]


@kind("", "a deque")
def deque(size: int) -> object:
    return collections.deque(float(number) for number in range(size // 42))


@kind("", "an array.array")
def array_array(size: int) -> object:
    return array.array("d", [1.0]) * (size // 8)


@kind("", "a BytesIO")
def bytesio(size: int) -> object:
    return io.BytesIO(b"x" * size)


@kind("", "a written BytesIO")
def written(size: int) -> io.BytesIO:
    stream = io.BytesIO()
    stream.write(b"x" * size)
    return stream


@kind("", "a StringIO")
def stringio(size: int) -> object:
    return io.StringIO("x" * (size // 4))


@kind("", "a written StringIO")
def written_text(size: int) -> io.StringIO:
    stream = io.StringIO()
    for number in range(size // 10_050):
        stream.write(f"{number:05d}" * 2000)
    return stream


@kind("", "a StringIO that was read")
def read_text(size: int) -> io.StringIO:
    """Return a stream that keeps four bytes for each character, because it was read."""
    stream = io.StringIO()
    stream.write("x" * (size // 4))
    stream.seek(0)
    stream.read(1)
    return stream


@kind("", "a database in memory")
def database(size: int, *, place: str = ":memory:") -> sqlite3.Connection:
    connection = sqlite3.connect(place)
    connection.execute("pragma cache_size=-1000000")
    connection.execute("create table t (text text)")
    connection.executemany("insert into t values (?)", (("x" * 1000,) for _ in range(size // 1100)))
    return connection


@kind("", "a database of a file")
def database_of_a_file(size: int) -> object:
    return database(size, place="")


@kind("", "a deserialized database", is_available=sys.version_info >= (3, 11))
def deserialized(size: int) -> sqlite3.Connection:
    with contextlib.closing(database(size)) as original:
        original.commit()
        data = original.serialize()
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    return connection


@kind("", "a memory map")
def mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    return memory


@kind("", "a ctypes array")
def ctypes_array(size: int) -> object:
    return (ctypes.c_char * size).from_buffer_copy(b"x" * size)


@kind("", "a ctypes array of a buffer")
def ctypes_array_of_a_buffer(size: int) -> object:
    return (ctypes.c_char * size).from_buffer(bytearray(b"x") * size)


@kind("", "a shared array")
def shared_array(size: int) -> Any:
    """Return an array of a pool's workers, whose memory multiprocessing has mapped."""
    array = multiprocessing.Array("d", size // 8)
    ctypes.memset(ctypes.addressof(array.get_obj()), 1, size)
    return array


@kind("", "a memoryview")
def plain_memoryview(size: int) -> object:
    return memoryview(b"x" * size)[10:20]


@kind("", "a closure")
def closure(size: int) -> object:
    content = texts(size // 90)
    return lambda: content


@kind("", "a generator")
def plain_generator(size: int) -> object:
    lengths = map(len, itertools.cycle(texts(size // 90)))
    next(lengths)
    return lengths


@kind("numpy", "an array")
def numpy_array(size: int) -> object:
    return lib["numpy"].ones(size // 8)


@kind("numpy", "a view")
def view(size: int) -> object:
    return lib["numpy"].ones(size // 8)[5:10]


@kind("numpy", "views")
def views(size: int) -> object:
    base = lib["numpy"].ones(size // 8)
    return [base[start::7] for start in range(7)]


@kind("numpy", "many arrays")
def many_arrays(size: int) -> object:
    return [lib["numpy"].ones(20 + number % 180) for number in range(size // 1100)]


@kind("numpy", "objects")
def objects(size: int) -> object:
    return lib["numpy"].array(texts(size // 90), dtype=object)


@kind("numpy", "texts")
def numpy_texts(size: int) -> object:
    return lib["numpy"].arange(size // 132).astype("U33")


@kind("numpy", "rows")
def rows(size: int) -> object:
    """Return rows of structured arrays: one that shows its array's memory, and one
    that is a copy.
    """
    array = lib["numpy"].zeros(2, [("name", object), ("parts", object, (2,)), ("number", int)])
    for row in array:
        row["name"] = b"x" * (size // 8)
        row["parts"][:] = [[b"x" * (size // 8)], None]
    return [
        array[1],
        array[0].copy(),
        lib["numpy"].array([([b"x" * (size // 2)],)], [("deep", [("data", object)])])[0],
    ]


@kind("numpy", "structured objects")
def structured(size: int) -> object:
    array = lib["numpy"].zeros(size // 95, [("text", object), ("number", "i4")])
    array["text"] = texts(size // 95)
    return array


@kind("numpy", "short texts of StringDType", is_available=HAS_TEXTS)
def short_texts(size: int) -> object:
    return lib["numpy"].array(
        [f"{number:07d}" for number in range(size // 16)], lib["numpy"].dtypes.StringDType()
    )


@kind("numpy", "texts of StringDType", is_available=HAS_TEXTS)
def long_texts(size: int) -> object:
    array = lib["numpy"].array(texts(size // 130, 100), lib["numpy"].dtypes.StringDType())
    return [array, array[5:10]]


@kind("pandas", "objects")
def pandas_objects(size: int) -> object:
    return lib["pandas"].DataFrame({"text": texts(size // 90), "n": 1.5}, dtype=object)


@kind("pandas", "texts")
def pandas_texts(size: int) -> object:
    return lib["pandas"].DataFrame(
        {"text": ["some longer text than usual"] * (size // 40)}, dtype="string[pyarrow]"
    )


@kind("pandas", "a frame")
def pandas_frame(size: int) -> object:
    return lib["pandas"].DataFrame({name: lib["numpy"].ones(size // 32) for name in "abcd"})


@kind("pandas", "parts")
def parts(size: int) -> object:
    frame = lib["pandas"].DataFrame({"n": lib["numpy"].arange(size // 24) % 9, "v": 1.5})
    return dict(tuple(frame.groupby("n")))


@kind("pandas", "merged objects")
def merged_objects(size: int) -> object:
    frame = lib["pandas"].DataFrame(
        {"n": range(size // 220), "text": texts(size // 220)}, dtype=object
    )
    return frame.merge(frame, on="n")


@kind("pandas", "a categorical")
def categorical(size: int) -> object:
    pandas = lib["pandas"]
    return pandas.Series(pandas.Categorical.from_codes(lib["numpy"].zeros(size, "i1"), ["a"]))


@kind("pandas", "an index that was searched")
def index_that_was_searched(size: int) -> object:
    index = lib["pandas"].Index(lib["numpy"].arange(size // 28)[::-1] * 7)
    assert (5 in index) is False
    return index


@kind("pyarrow", "texts")
def pyarrow_texts(size: int) -> object:
    return lib["pyarrow"].array(lib["numpy"].full(size // 30, "some longer text than usual"))


@kind("pyarrow", "a table")
def table(size: int) -> object:
    return lib["pyarrow"].table({name: lib["numpy"].ones(size // 16) for name in "ab"})


@kind("pyarrow", "a slice")
def pyarrow_slice(size: int) -> object:
    return lib["pyarrow"].array(lib["numpy"].ones(size // 8)).slice(5, 5)


@kind("pyarrow", "categories")
def categories(size: int) -> object:
    return lib["pyarrow"].array(lib["numpy"].full(size // 4, "a text")).dictionary_encode()


@kind("polars", "texts")
def polars_texts(size: int) -> object:
    polars = lib["polars"]
    return polars.select(polars.int_range(size // 1020).cast(str) + "x" * 1000)


@kind("polars", "short texts")
def polars_short_texts(size: int) -> object:
    polars = lib["polars"]
    return polars.select(polars.int_range(size // 16).cast(str))


@kind("polars", "a frame")
def polars_frame(size: int) -> object:
    return lib["polars"].DataFrame({"a": lib["numpy"].ones(size // 8)})


@kind("polars", "a series")
def series(size: int) -> object:
    return lib["polars"].int_range(size // 8, eager=True)


@kind("polars", "lists")
def polars_lists(size: int) -> object:
    polars = lib["polars"]
    return polars.select(polars.int_range(size // 24).repeat_by(2))


@kind("polars", "shared columns")
def shared(size: int) -> object:
    polars, rows = lib["polars"], lib["polars"].int_range(size // 132)
    frame = polars.select(a=rows, text=rows.cast(str) + "x" * 100)
    return [
        frame,
        frame.head(9),
        frame.rename({"a": "b"}),
        frame["text"],
        frame.filter(polars.col("a") > 0),
    ]


@kind("polars", "objects")
def polars_objects(size: int) -> object:
    polars = lib["polars"]
    return polars.Series([[number] for number in range(size // 136)], dtype=polars.Object)


@kind("polars.datatypes", "an Enum")
def enum(size: int) -> object:
    polars = lib["polars"]
    return polars.Series(["x"], dtype=polars.Enum(["x", *texts(size // 170, 100)]))


@kind("polars.datatypes", "a Categorical")
def polars_categorical(size: int) -> object:
    polars = lib["polars"]
    return polars.int_range(size // 100, eager=True).cast(str).cast(polars.Categorical)


@kind("PIL.Image", "an image")
def image(size: int) -> object:
    return lib["PIL.Image"].new("RGB", (1000, size // 4000), "red")


@kind("PIL.Image", "images")
def images(size: int) -> object:
    return [lib["PIL.Image"].new("L", (128, 128)) for _ in range(size // 17_500)]


@kind("scipy.sparse", "a matrix")
def scipy_matrix(size: int) -> object:
    return lib["scipy.sparse"].random(1000, size // 3600, 0.3, "csr", random_state=0)


@kind("xarray", "a dataset")
def dataset(size: int) -> object:
    return lib["xarray"].Dataset({"a": ("x", lib["numpy"].ones(size // 8))})


@kind("zarr", "an array")
def in_memory_store(size: int) -> object:
    zarr = lib["zarr"]
    return zarr.create_array(
        zarr.storage.MemoryStore(), data=lib["numpy"].ones(size // 8), compressors=None
    )


@kind("h5py", "a file")
def in_memory_file(size: int) -> Any:
    file = lib["h5py"].File("none.h5", "w", driver="core", backing_store=False)
    file.create_dataset("data", data=lib["numpy"].ones(size // 8))
    return file


@kind("sklearn", "a forest")
def forest(size: int) -> object:
    features = lib["numpy"].random.default_rng(0).normal(size=(size // 1200, 6))
    kind = importlib.import_module("sklearn.ensemble").RandomForestRegressor
    return kind(20, random_state=0).fit(features[:, 1:], features[:, 0])


@kind("sklearn", "a tree of neighbours")
def neighbours(size: int) -> object:
    points = lib["numpy"].random.default_rng(0).normal(size=(size // 52, 5))
    return importlib.import_module("sklearn.neighbors").KDTree(points)


@kind("jax", "an array")
def jax_array(size: int) -> object:
    return lib["jax"].numpy.ones(size // 4).block_until_ready()


@kind("torch", "a tensor")
def tensor(size: int) -> object:
    return lib["torch"].ones(size // 4)


@kind("torch", "a module")
def module(size: int) -> object:
    return lib["torch"].nn.Linear(1000, size // 4000)


@kind("torch", "an optimizer")
def stepped(size: int) -> object:
    torch = lib["torch"]
    model = torch.nn.Linear(int((size / 16) ** 0.5), int((size / 16) ** 0.5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, model.in_features)).sum().backward()
    optimizer.step()
    return optimizer


@kind("torch", "a storage")
def storage(size: int) -> object:
    return lib["torch"].ones(size // 4).untyped_storage()


@kind("torch", "many tensors")
def many_tensors(size: int) -> object:
    return [lib["torch"].ones(number % 180) for number in range(size // 840)]


@kind("torch", "many parameters")
def many_parameters(size: int) -> object:
    torch = lib["torch"]
    return [torch.nn.Parameter(torch.ones(number % 90)) for number in range(size // 850)]


@kind("torch", "many views")
def many_views(size: int) -> object:
    return list(lib["torch"].ones(size // 600))


@kind("torch", "a sparse tensor")
def sparse_tensor(size: int) -> object:
    return lib["torch"].ones(1000, size // 20_000).to_sparse()


@kind("shapely", "points")
def shapely_points(size: int) -> object:
    return lib["shapely"].points(lib["numpy"].ones((size // 210, 2)))


@kind("shapely", "polygons")
def polygons(size: int) -> object:
    return list(lib["shapely"].polygons(lib["numpy"].ones((size // 1260, 40, 2))))


@kind("shapely", "collections")
def shapely_collections(size: int) -> object:
    return [lib["shapely"].multipoints(lib["numpy"].ones((10, 2))) for _ in range(size // 1690)]


@kind("numba.typed", "a list")
def typed_list(size: int) -> Any:
    items = lib["numba.typed"].List()
    for number in range(size // 9):
        items.append(number)
    return items


@kind("numba.typed", "a dict")
def typed_dict(size: int) -> Any:
    numba: Any = sys.modules["numba"]
    items = lib["numba.typed"].Dict.empty(numba.int64, numba.float64)
    for number in range(size // 40):
        items[number] = 1.0
    return items


@kind("spacy", "a vocabulary")
def vocabulary(size: int) -> object:
    pipeline = lib["spacy"].blank("en")
    for text in texts(size // 200):
        pipeline.vocab[text]
    return pipeline


@kind("lightgbm", "a model")
def booster(size: int) -> object:
    data = lib["numpy"].random.default_rng(0).normal(size=(50_000, 6))
    options = {"num_leaves": 1023, "min_data_in_leaf": 1, "verbose": -1, "num_threads": 1}
    return lib["lightgbm"].train(
        options, lib["lightgbm"].Dataset(data[:, 1:], data[:, 0]), 2 + 3 * size // MIB
    )


@kind("xgboost", "a model")
def trees(size: int) -> object:
    data = lib["numpy"].random.default_rng(0).normal(size=(50_000, 6))
    matrix = lib["xgboost"].DMatrix(data[:, 1:], data[:, 0])
    return lib["xgboost"].train({"max_depth": 13, "nthread": 1}, matrix, 2 + 2 * size // MIB)


@kind("xgboost", "a matrix")
def xgboost_matrix(size: int) -> object:
    return lib["xgboost"].DMatrix(lib["numpy"].ones((size // 80, 10)))


def settle() -> int:
    """Free what can be freed; return the private and shared pages in RAM, without code of
    libraries.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def each(make: Callable[[int], object]) -> tuple[int, int]:
    """Return the growth of the process when an object is made, and the object's size."""
    compiles = {"jax", "torch"} & lib.keys()  # and keeps workspaces for each size
    # Their buffers grow by steps, so that a smaller one has a larger part to spare.
    grows = make in (short_texts, long_texts)
    size = 32 * MIB if compiles or grows else 16 * MIB
    if make in KINDS[""].values():
        size //= 2  # the objects of Python itself leave the smallest gaps
    make(size if compiles else 200_000 if lib else 1000)  # makes a library load everything
    before = settle()
    kept = make(size)
    return settle() - before, Sizes().measure(kept).size_bytes


def mixed(seed: int) -> tuple[int, int]:
    """Return the growth of the process when a mixture is made, and the size of its named parts."""
    generator = random.Random(seed)
    kinds = {
        f"{library} {name}": make
        for library in ("", *MIXED)
        for name, make in KINDS[library].items()
        if lib.get(library, library == "")
    }
    chosen = generator.sample(sorted(kinds), generator.randint(3, 10))
    shares = {name: generator.uniform(0.1, 1) for name in chosen}
    size = generator.uniform(70, 160) * MIB / sum(shares.values())
    for name in chosen:
        kinds[name](200_000)
    before = settle()
    free = own_pages().free_heap_bytes
    named = {name: kinds[name](int(share * size)) for name, share in shares.items()}
    grown = settle() - before
    freed = own_pages().free_heap_bytes - free
    return grown, top.measure_names(named, {}).device_bytes["cpu"] + freed


def forked(work: Callable[[Any], object], argument: object) -> object:
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, json.dumps(work(argument)).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as file:
        return json.load(file)


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    for name in ("numpy", *(arguments if mode == "each" else MIXED)):
        with suppress(ImportError):
            lib[name] = importlib.import_module(name)
    gc.collect()
    gc.freeze()  # each process would follow what libraries have made on import
    outcomes: dict[str, object] = {}
    if mode == "each":
        for library in arguments or [""]:
            outcomes |= {
                f"{library}: {kind}": forked(each, make) for kind, make in KINDS[library].items()
            }
    else:
        outcomes |= {seed: forked(mixed, int(seed)) for seed in arguments}
    print(json.dumps(outcomes))

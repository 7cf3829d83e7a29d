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


def mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    for start in range(0, size, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def shared_array(size: int) -> Any:
    """Return an array of a pool's workers, whose memory multiprocessing has mapped."""
    array = multiprocessing.Array("d", size // 8)
    ctypes.memset(ctypes.addressof(array.get_obj()), 1, size)
    return array


def written(size: int) -> io.BytesIO:
    stream = io.BytesIO()
    stream.write(b"x" * size)
    return stream


def written_text(size: int) -> io.StringIO:
    stream = io.StringIO()
    for number in range(size // 10_050):
        stream.write(f"{number:05d}" * 2000)
    return stream


def read_text(size: int) -> io.StringIO:
    """Return a stream that keeps four bytes for each character, because it was read."""
    stream = io.StringIO()
    stream.write("x" * (size // 4))
    stream.seek(0)
    stream.read(1)
    return stream


def database(size: int, *, place: str = ":memory:") -> sqlite3.Connection:
    connection = sqlite3.connect(place)
    connection.execute("pragma cache_size=-1000000")
    connection.execute("create table t (text text)")
    connection.executemany("insert into t values (?)", (("x" * 1000,) for _ in range(size // 1100)))
    return connection


def deserialized(size: int) -> sqlite3.Connection:
    with contextlib.closing(database(size)) as original:
        original.commit()
        data = original.serialize()
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    return connection


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


def structured(size: int) -> object:
    array = lib["numpy"].zeros(size // 95, [("text", object), ("number", "i4")])
    array["text"] = texts(size // 95)
    return array


HAS_TEXTS = find_spec("numpy") is not None and version("numpy") >= "2"


def short_texts(size: int) -> object:
    return lib["numpy"].array(
        [f"{number:07d}" for number in range(size // 16)], lib["numpy"].dtypes.StringDType()
    )


def long_texts(size: int) -> object:
    array = lib["numpy"].array(texts(size // 130, 100), lib["numpy"].dtypes.StringDType())
    return [array, array[5:10]]


def views(size: int) -> object:
    base = lib["numpy"].ones(size // 8)
    return [base[start::7] for start in range(7)]


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


def forest(size: int) -> object:
    features = lib["numpy"].random.default_rng(0).normal(size=(size // 1200, 6))
    kind = importlib.import_module("sklearn.ensemble").RandomForestRegressor
    return kind(20, random_state=0).fit(features[:, 1:], features[:, 0])


def neighbours(size: int) -> object:
    points = lib["numpy"].random.default_rng(0).normal(size=(size // 52, 5))
    return importlib.import_module("sklearn.neighbors").KDTree(points)


def booster(size: int) -> object:
    data = lib["numpy"].random.default_rng(0).normal(size=(50_000, 6))
    options = {"num_leaves": 1023, "min_data_in_leaf": 1, "verbose": -1, "num_threads": 1}
    return lib["lightgbm"].train(
        options, lib["lightgbm"].Dataset(data[:, 1:], data[:, 0]), 2 + 3 * size // MIB
    )


def trees(size: int) -> object:
    data = lib["numpy"].random.default_rng(0).normal(size=(50_000, 6))
    matrix = lib["xgboost"].DMatrix(data[:, 1:], data[:, 0])
    return lib["xgboost"].train({"max_depth": 13, "nthread": 1}, matrix, 2 + 2 * size // MIB)


def in_memory_file(size: int) -> Any:
    file = lib["h5py"].File("none.h5", "w", driver="core", backing_store=False)
    file.create_dataset("data", data=lib["numpy"].ones(size // 8))
    return file


def in_memory_store(size: int) -> object:
    zarr = lib["zarr"]
    return zarr.create_array(
        zarr.storage.MemoryStore(), data=lib["numpy"].ones(size // 8), compressors=None
    )


def vocabulary(size: int) -> object:
    pipeline = lib["spacy"].blank("en")
    for text in texts(size // 200):
        pipeline.vocab[text]
    return pipeline


def typed_list(size: int) -> Any:
    items = lib["numba.typed"].List()
    for number in range(size // 9):
        items.append(number)
    return items


def typed_dict(size: int) -> Any:
    numba: Any = sys.modules["numba"]
    items = lib["numba.typed"].Dict.empty(numba.int64, numba.float64)
    for number in range(size // 40):
        items[number] = 1.0
    return items


def stepped(size: int) -> object:
    torch = lib["torch"]
    model = torch.nn.Linear(int((size / 16) ** 0.5), int((size / 16) ** 0.5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, model.in_features)).sum().backward()
    optimizer.step()
    return optimizer


KINDS: dict[str, dict[str, Callable[[int], object]]] = {
    "": {
        "texts": lambda size: texts(size // 90),
        "long texts": lambda size: texts(size // 5000, 5000),
        "wide texts": lambda size: [f"{'☃' * 40}{number:030d}" for number in range(size // 230)],
        "a text": lambda size: "x" * size,
        "numbers": lambda size: list(range(10**6, 10**6 + size // 40)),
        "floats": lambda size: [float(number) for number in range(size // 40)],
        "times": lambda size: [
            datetime.datetime.fromtimestamp(number) for number in range(size // 56)
        ],
        "bytes": lambda size: [bytes(3000) for _ in range(size // 3048)],
        "a bytearray": lambda size: bytearray(b"x") * size,
        "dicts": lambda size: [
            {"number": number, "text": str(number)} for number in range(size // 300)
        ],
        "a dict": lambda size: {number: str(number) for number in range(size // 130)},
        "texts as keys": lambda size: [{text: None} for text in texts(size // 400, 100)],
        "a counter": lambda size: collections.Counter(texts(size // 170)),
        "groups": lambda size: collections.defaultdict(
            list, {number: [number] * 99 for number in range(size // 1000)}
        ),
        "a tree": lambda size: json.loads(
            json.dumps([{"a": [n, {"b": str(n)}], "c": n} for n in range(size // 700)])
        ),
        "lists": lambda size: [[number, None, number] for number in range(size // 120)],
        "tuples": lambda size: [(number, str(number)) for number in range(size // 150)],
        "sets": lambda size: [{number, -number} for number in range(size // 300)],
        "a set": lambda size: set(texts(size // 130)),
        "named tuples": lambda size: [Point(number, None) for number in range(size // 110)],
        "user's objects": lambda size: [User(number) for number in range(size // 280)],
        "user's empty objects": lambda size: [Empty() for _ in range(size // 90)],
        "user's lists": lambda size: [Words((number,)) for number in range(size // 130)],
        "user's dicts": lambda size: [Table(number=number) for number in range(size // 260)],
        "user's objects with slots": lambda size: [
            Slotted(number) for number in range(size // 140)
        ],
        "a deque": lambda size: collections.deque(float(number) for number in range(size // 42)),
        "an array.array": lambda size: array.array("d", [1.0]) * (size // 8),
        "a BytesIO": lambda size: io.BytesIO(b"x" * size),
        "a written BytesIO": written,
        "a StringIO": lambda size: io.StringIO("x" * (size // 4)),
        "a written StringIO": written_text,
        "a StringIO that was read": read_text,
        "a database in memory": database,
        "a database of a file": lambda size: database(size, place=""),
        **({"a deserialized database": deserialized} if sys.version_info >= (3, 11) else {}),
        "a memory map": mapped,
        "a ctypes array": lambda size: (ctypes.c_char * size).from_buffer_copy(b"x" * size),
        "a ctypes array of a buffer": lambda size: (ctypes.c_char * size).from_buffer(
            bytearray(b"x") * size
        ),
        "a shared array": shared_array,
        "a memoryview": lambda size: memoryview(b"x" * size)[10:20],
        "a closure": lambda size: (lambda content: lambda: content)(texts(size // 90)),
        "a generator": lambda size: (lambda found: (next(found), found)[1])(
            map(len, itertools.cycle(texts(size // 90)))
        ),
    },
    "numpy": {
        "an array": lambda size: lib["numpy"].ones(size // 8),
        "a view": lambda size: lib["numpy"].ones(size // 8)[5:10],
        "views": views,
        "many arrays": lambda size: [
            lib["numpy"].ones(20 + number % 180) for number in range(size // 1100)
        ],
        "objects": lambda size: lib["numpy"].array(texts(size // 90), dtype=object),
        "texts": lambda size: lib["numpy"].arange(size // 132).astype("U33"),
        "rows": rows,
        "structured objects": structured,
        **(
            {"short texts of StringDType": short_texts, "texts of StringDType": long_texts}
            if HAS_TEXTS
            else {}
        ),
    },
    "pandas": {
        "objects": lambda size: lib["pandas"].DataFrame(
            {"text": texts(size // 90), "n": 1.5}, dtype=object
        ),
        "texts": lambda size: lib["pandas"].DataFrame(
            {"text": ["some longer text than usual"] * (size // 40)}, dtype="string[pyarrow]"
        ),
        "a frame": lambda size: lib["pandas"].DataFrame(
            {name: lib["numpy"].ones(size // 32) for name in "abcd"}
        ),
        "parts": lambda size: dict(
            tuple(
                lib["pandas"]
                .DataFrame({"n": lib["numpy"].arange(size // 24) % 9, "v": 1.5})
                .groupby("n")
            )
        ),
        "merged objects": lambda size: (lambda frame: frame.merge(frame, on="n"))(
            lib["pandas"].DataFrame(
                {"n": range(size // 220), "text": texts(size // 220)}, dtype=object
            )
        ),
        "a categorical": lambda size: lib["pandas"].Series(
            lib["pandas"].Categorical.from_codes(lib["numpy"].zeros(size, "i1"), ["a"])
        ),
        "an index that was searched": lambda size: (lambda index: (5 in index, index)[1])(
            lib["pandas"].Index(lib["numpy"].arange(size // 28)[::-1] * 7)
        ),
    },
    "pyarrow": {
        "texts": lambda size: lib["pyarrow"].array(
            lib["numpy"].full(size // 30, "some longer text than usual")
        ),
        "a table": lambda size: lib["pyarrow"].table(
            {name: lib["numpy"].ones(size // 16) for name in "ab"}
        ),
        "a slice": lambda size: lib["pyarrow"].array(lib["numpy"].ones(size // 8)).slice(5, 5),
        "categories": lambda size: (
            lib["pyarrow"].array(lib["numpy"].full(size // 4, "a text")).dictionary_encode()
        ),
    },
    "polars": {
        "texts": lambda size: lib["polars"].select(
            lib["polars"].int_range(size // 1020).cast(str) + "x" * 1000
        ),
        "short texts": lambda size: lib["polars"].select(
            lib["polars"].int_range(size // 16).cast(str)
        ),
        "a frame": lambda size: lib["polars"].DataFrame({"a": lib["numpy"].ones(size // 8)}),
        "a series": lambda size: lib["polars"].int_range(size // 8, eager=True),
        "lists": lambda size: lib["polars"].select(
            lib["polars"].int_range(size // 24).repeat_by(2)
        ),
        "shared columns": shared,
        "objects": lambda size: lib["polars"].Series(
            [[number] for number in range(size // 136)], dtype=lib["polars"].Object
        ),
    },
    "polars.datatypes": {
        "an Enum": lambda size: lib["polars"].Series(
            ["x"], dtype=lib["polars"].Enum(["x", *texts(size // 170, 100)])
        ),
        "a Categorical": lambda size: (
            lib["polars"]
            .int_range(size // 100, eager=True)
            .cast(str)
            .cast(lib["polars"].Categorical)
        ),
    },
    "PIL.Image": {
        "an image": lambda size: lib["PIL.Image"].new("RGB", (1000, size // 4000), "red"),
        "images": lambda size: [
            lib["PIL.Image"].new("L", (128, 128)) for _ in range(size // 17_500)
        ],
    },
    "scipy.sparse": {
        "a matrix": lambda size: lib["scipy.sparse"].random(
            1000, size // 3600, 0.3, "csr", random_state=0
        )
    },
    "xarray": {
        "a dataset": lambda size: lib["xarray"].Dataset({"a": ("x", lib["numpy"].ones(size // 8))})
    },
    "zarr": {"an array": in_memory_store},
    "h5py": {"a file": in_memory_file},
    "sklearn": {"a forest": forest, "a tree of neighbours": neighbours},
    "jax": {"an array": lambda size: lib["jax"].numpy.ones(size // 4).block_until_ready()},
    "torch": {
        "a tensor": lambda size: lib["torch"].ones(size // 4),
        "a module": lambda size: lib["torch"].nn.Linear(1000, size // 4000),
        "an optimizer": stepped,
        "a storage": lambda size: lib["torch"].ones(size // 4).untyped_storage(),
        "many tensors": lambda size: [
            lib["torch"].ones(number % 180) for number in range(size // 840)
        ],
        "many parameters": lambda size: [
            lib["torch"].nn.Parameter(lib["torch"].ones(number % 90))
            for number in range(size // 850)
        ],
        "many views": lambda size: list(lib["torch"].ones(size // 600)),
        "a sparse tensor": lambda size: lib["torch"].ones(1000, size // 20_000).to_sparse(),
    },
    "shapely": {
        "points": lambda size: lib["shapely"].points(lib["numpy"].ones((size // 210, 2))),
        "polygons": lambda size: list(
            lib["shapely"].polygons(lib["numpy"].ones((size // 1260, 40, 2)))
        ),
        "collections": lambda size: [
            lib["shapely"].multipoints(lib["numpy"].ones((10, 2))) for _ in range(size // 1690)
        ],
    },
    "numba.typed": {"a list": typed_list, "a dict": typed_dict},
    "spacy": {"a vocabulary": vocabulary},
    "lightgbm": {"a model": booster},
    "xgboost": {
        "a model": trees,
        "a matrix": lambda size: lib["xgboost"].DMatrix(lib["numpy"].ones((size // 80, 10))),
    },
}
"""Functions that make an object of about as many bytes, by library."""


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

"""How much memory objects of any kind hold, against the process's resident memory."""

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import FrameType

import pytest

from ipygpumem.heap.sizes import Size, Sizes
from tests import hostile
from tests.alone import printed

PROLOGUE = """
import array, collections, ctypes, gc, io, json, mmap, os, sys
from pathlib import Path
from ipygpumem.heap.sizes import Size, Sizes

MIB = 1 << 20
trim = ctypes.CDLL(None).malloc_trim

def resident():
    gc.collect()
    trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024  # without code of libraries

class User:
    def __init__(self, number):
        self.number, self.text, self.pair = number, str(number), [number, None]

class Empty: pass
class Words(list): pass
class Table(dict): pass

class Slotted:
    __slots__ = ("number", "text")
    def __init__(self, number):
        self.number, self.text = number, str(number)

Point = collections.namedtuple("Point", "x y")

def mapped():
    found = mmap.mmap(-1, 32 * MIB)
    for start in range(0, 32 * MIB, mmap.PAGESIZE):
        found[start] = 1
    return found

def forest():
    generator = numpy.random.default_rng(0)
    features = generator.normal(size=(20_000, 5))
    return ensemble.RandomForestRegressor(20, random_state=0).fit(features, generator.normal(size=20_000))

def neighbours():
    return neighbors.KDTree(numpy.random.default_rng(0).normal(size=(400_000, 5)))

def booster(lightgbm, rounds):
    generator = numpy.random.default_rng(0)
    data = lightgbm.Dataset(generator.normal(size=(50_000, 5)), generator.normal(size=50_000))
    return lightgbm.train({"num_leaves": 1023, "min_data_in_leaf": 1, "verbose": -1, "num_threads": 1}, data, rounds)

def trees(xgboost, rounds):
    generator = numpy.random.default_rng(0)
    data = xgboost.DMatrix(generator.normal(size=(50_000, 5)), generator.normal(size=50_000))
    return xgboost.train({"max_depth": 13, "nthread": 1}, data, rounds)

def vocabulary(spacy):
    pipeline = spacy.blank("en")
    for number in range(200_000):
        pipeline.vocab[f"word{number}"]
    return pipeline

def stepped(torch):
    model = torch.nn.Linear(2048, 2048)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(8, 2048)).sum().backward()
    optimizer.step()
    return optimizer
"""
EPILOGUE = """
kept = []

def measured(make):
    before = resident()
    kept.append([make()])
    return resident() - before, Sizes().measure(kept[-1][0]).size_bytes

def apart(make):
    reader, writer = os.pipe()
    if not os.fork():  # its small objects leave no gaps for the next kind
        os.write(writer, json.dumps(measured(make)).encode())
        os._exit(0)
    os.wait()
    return json.loads(os.read(reader, 1000))

print(json.dumps({name: (measured if ":" in name else apart)(make) for name, make in KINDS.items()}))
"""
PLAIN = {
    "short texts": "lambda: [f'text {number}' for number in range(500_000)]",
    "numbers": "lambda: list(range(1_000_000, 2_500_000))",
    "floats": "lambda: [float(number) for number in range(1_000_000)]",
    "a text": "lambda: 'x' * (32 * MIB)",
    "bytes": "lambda: b'x' * (32 * MIB)",
    "a bytearray": "lambda: bytearray(b'x') * (32 * MIB)",
    "dicts": "lambda: [{'number': number, 'text': str(number)} for number in range(150_000)]",
    "a dict": "lambda: {number: str(number) for number in range(300_000)}",
    "texts as keys": "lambda: [{'x' * 100 + str(number): None} for number in range(100_000)]",
    "a counter": "lambda: collections.Counter(f'text {number}' for number in range(200_000))",
    "lists": "lambda: [[number, None, number] for number in range(200_000)]",
    "tuples": "lambda: [(number, str(number)) for number in range(300_000)]",
    "sets": "lambda: [{number, -number} for number in range(100_000)]",
    "named tuples": "lambda: [Point(number, None) for number in range(300_000)]",
    "user's objects": "lambda: [User(number) for number in range(150_000)]",
    "user's empty objects": "lambda: [Empty() for _ in range(300_000)]",
    "user's lists": "lambda: [Words((number,)) for number in range(200_000)]",
    "user's dicts": "lambda: [Table(number=number) for number in range(100_000)]",
    "user's objects with slots": "lambda: [Slotted(number) for number in range(250_000)]",
    "a deque": "lambda: collections.deque(float(number) for number in range(700_000))",
    "an array.array": "lambda: array.array('d', [1.0]) * (4 * MIB)",
    "a BytesIO": "lambda: io.BytesIO(b'x' * (32 * MIB))",
    "a written BytesIO": "lambda: (lambda stream: (stream.write(b'x' * (32 * MIB)), stream)[1])(io.BytesIO())",
    "a memory map": "mapped",
    "a ctypes array": "lambda: (ctypes.c_char * (32 * MIB)).from_buffer_copy(b'x' * (32 * MIB))",
    "a memoryview": "lambda: memoryview(b'x' * (32 * MIB))[10:20]",
    "a closure": "lambda: (lambda content: lambda: content)(b'x' * (32 * MIB))",
}
LIBRARIES = {
    "numpy": {
        "an array": "lambda: numpy.ones(4 * MIB)",
        "a view": "lambda: numpy.ones(4 * MIB)[5:10]",
        "many arrays": "lambda: [numpy.ones(200) for _ in range(20_000)]",
        "an array of texts": "lambda: numpy.array([str(number) for number in range(500_000)], dtype=object)",
    },
    "pandas": {
        "a frame with objects": "lambda: pandas.DataFrame({'text': [str(n) for n in range(400_000)]}, dtype=object)",
        "a frame with texts": "lambda: pandas.DataFrame({'text': numpy.full(10**6, 'some longer text than usual')})",
        "a frame": "lambda: pandas.DataFrame({name: numpy.ones(MIB) for name in 'abcd'})",
        "a series": "lambda: pandas.Series(numpy.ones(4 * MIB))",
        "a categorical": "lambda: pandas.Series(pandas.Categorical.from_codes(numpy.zeros(20 * MIB, 'i1'), ['a']))",
        "an index that was searched": "lambda: (lambda i: (5 in i, i)[1])(pandas.Index(numpy.arange(MIB)[::-1] * 7))",
    },
    "pyarrow": {
        "texts": "lambda: pyarrow.array(numpy.full(700_000, 'some longer text than usual'))",
        "a table": "lambda: pyarrow.table({'a': numpy.ones(2 * MIB), 'b': pyarrow.array(numpy.ones(2 * MIB))})",
        "a slice": "lambda: pyarrow.array(numpy.ones(4 * MIB)).slice(5, 5)",
        "categories": "lambda: pyarrow.array(numpy.full(8 * MIB, 'a text')).dictionary_encode()",
    },
    "polars": {
        "a frame with texts": "lambda: polars.select(polars.int_range(40_000).cast(str) + 'x' * 1000)",
        "a frame": "lambda: polars.DataFrame({'a': numpy.ones(4 * MIB)})",
        "a series": "lambda: polars.Series(numpy.ones(4 * MIB))",
    },
    "PIL": {"an image": "lambda: Image.new('RGB', (3000, 3000), 'red')"},
    "scipy": {"a sparse matrix": "lambda: sparse.random(3000, 3000, 0.3, 'csr', random_state=0)"},
    "xarray": {"a dataset": "lambda: xarray.Dataset({'a': ('x', numpy.ones(4 * MIB))})"},
    "zarr": {
        "an array": "lambda: zarr.create_array(zarr.storage.MemoryStore(), data=numpy.ones(4 * MIB), compressors=None)"
    },
    "sklearn": {"a forest": "forest", "a tree of neighbours": "neighbours"},
    "jax": {"an array": "lambda: jax.numpy.ones(8 * MIB).block_until_ready()"},
    "torch": {
        "a tensor": "lambda: torch.ones(8 * MIB)",
        "a module": "lambda: torch.nn.Linear(2048, 2048)",
        "an optimizer": "lambda: stepped(torch)",
        "a storage": "lambda: torch.ones(8 * MIB).untyped_storage()",
        "a sparse tensor": "lambda: torch.eye(2000).to_sparse() if False else torch.ones(2000, 1000).to_sparse()",
    },
    "spacy": {"a vocabulary": "lambda: vocabulary(spacy)"},
    "lightgbm": {"a model": "lambda: booster(lightgbm, 80)"},
    "xgboost": {
        "a model": "lambda: trees(xgboost, 30)",
        "a matrix": "lambda: xgboost.DMatrix(numpy.ones((400_000, 10)))",
    },
}
WARM = """
for code in FIRST:
    exec(code)
"""
FIRST = {
    "jax": "jax.numpy.ones(8 * MIB)",
    "lightgbm": "booster(lightgbm, 2)",
    "pandas": "pandas.DataFrame({'a': ['x']}), pandas.DataFrame({'a': ['x']}, dtype=object)",
    "polars": "polars.select(polars.int_range(2).cast(str) + 'x')",
    "pyarrow": "pyarrow.array(['x']).dictionary_encode()",
    "spacy": "list(spacy.blank('en').pipe(['text']))",
    "torch": "stepped(torch)",
    "xgboost": "trees(xgboost, 2)",
    "zarr": "zarr.create_array(zarr.storage.MemoryStore(), data=numpy.ones(4), compressors=None)",
}
"""Code that makes a library load everything before anything is measured."""
TOGETHER = ["numpy pandas pyarrow polars PIL scipy xarray"]
REST = "zarr sklearn spacy lightgbm xgboost", "jax torch"
TOGETHER += [pytest.param(names, marks=pytest.mark.thorough) for names in REST]
ROUGH = {"lightgbm: a model", "xgboost: a model", "xgboost: a matrix"}
"""Kinds whose size is estimated."""


def measured(kinds: dict[str, str], setup: str = "", first: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Return by kind how much a process grew when such an object was made, and the object's size."""
    table = "KINDS = {" + ", ".join(f"{name!r}: {code}" for name, code in kinds.items()) + "}"
    code = "\n".join((PROLOGUE, setup, f"FIRST = {first!r}", WARM, table, EPILOGUE))
    env = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the default one keeps freed memory
    found: dict[str, tuple[int, int]] = json.loads(printed("-c", code, env=env).splitlines()[-1])
    return found


def wrong(found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return the kinds whose size is not that of the growth."""
    assert min(truth for truth, _ in found.values()) > 4 << 20, found
    within = {name: 0.5 if name in ROUGH else 0.08 for name in found}
    return {name: both for name, both in found.items() if abs(both[1] / both[0] - 1) > within[name]}


linux = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux shows it")


@linux
def test_sizes_of_python_objects_are_those_of_the_process() -> None:
    assert wrong(measured(PLAIN)) == {}


@linux
@pytest.mark.parametrize("names", TOGETHER)
def test_sizes_of_library_objects_are_those_of_the_process(names: str) -> None:
    here = [name for name in names.split() if find_spec(name)]
    imports = [f"import {name}" for name in dict.fromkeys(["numpy", *here])]
    imports += ["from PIL import Image"] * ("PIL" in here) + ["from scipy import sparse"] * ("scipy" in here)
    imports += ["from sklearn import ensemble, neighbors"] * ("sklearn" in here)
    kinds = {f"{name}: {kind}": code for name in here for kind, code in LIBRARIES[name].items()}
    first = [FIRST[name] for name in here if name in FIRST]
    assert wrong(measured(kinds, "\n".join(imports), first)) == {}


class User:
    def __init__(self, content: object) -> None:
        self.content = content


def test_memory_that_several_objects_share_is_counted_once() -> None:
    text, sizes = "x" * (1 << 20), Sizes()
    both = [text, [text], {"again": text}, User(text)]
    assert 1 << 20 < sizes.measure(both).size_bytes < (1 << 20) + 2000
    assert sizes.measure({"again": text}).size_bytes < 2000
    assert sizes.measure(both).objects == 0


def test_an_array_and_a_tensor_on_its_memory_are_counted_once() -> None:
    numpy = pytest.importorskip("numpy")
    arrow = pytest.importorskip("pyarrow")
    array = numpy.ones(1 << 17)
    both = [array, array[10:], memoryview(array), arrow.array(array), arrow.array(array).slice(10).to_numpy()]
    assert 1 << 20 < Sizes().measure(both).size_bytes < (1 << 20) + 5000
    assert 1 << 20 < Sizes().measure(both[::-1]).size_bytes < (1 << 20) + 5000


def test_columns_that_polars_objects_share_are_counted_once() -> None:
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    table = arrow.table({"a": range(1 << 15), "text": [f"{number:0100d}" for number in range(1 << 15)]})
    frame = polars.from_arrow(table.cast(arrow.schema([("a", "int64"), ("text", arrow.string_view())])))
    more = [frame.with_columns(b="a"), frame["text"], frame.head(9), frame.filter(polars.col("a") % 3000 == 0), table]
    size = Sizes().measure(frame).size_bytes
    assert size == pytest.approx((8 + 16 + 100) << 15, rel=0.01)
    assert Sizes().measure([frame, *more[:-1]]).size_bytes < 1.01 * size
    assert Sizes().measure([frame, table]).size_bytes < 1.01 * size + (108 << 15)  # views of texts are polars' own
    named = Sizes({"frame": frame, "part": more[1]})
    assert (named.measure(frame, "frame").size_bytes, named.measure(more[1], "part").also_in) == (size, ("frame",))
    odd = polars.DataFrame({"things": [object()] * 1000})  # without buffers
    assert Sizes().measure(odd).size_bytes > 8000


def test_an_object_that_shares_memory_without_a_name_knows_with_which() -> None:
    texts = [f"text {number}" for number in range(10_000)]
    names = {"small": [texts[0]], "first": texts[:], "second": texts[:]}
    sizes = Sizes(names)
    small, first, again = (sizes.measure(value, name) for name, value in names.items())
    assert small.also_in == first.also_in == ()
    assert again.also_in == ("first",)
    assert again.size_bytes < 90_000


def test_a_named_object_is_counted_under_its_own_name() -> None:
    data = ["x" * (1 << 20)]
    names = {"wrapper": User(data), "data": data}
    sizes = Sizes(names)
    wrapper, own = (sizes.measure(value, name) for name, value in names.items())
    assert wrapper.also_in == ("data",)
    assert wrapper.size_bytes < 1000 < 1 << 20 < own.size_bytes
    assert sizes.measure(data, "data").size_bytes == 0


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([b"x" * 100_000, [], "text"], {"bytes": 1, "list": 1, "str": 1}),
        (["text"] * 70, {"str": 70}),
        ({"a": "x" * 9000, 1: [1]}, {'["a"]': 1, "[1]": 1}),
        (dict.fromkeys(range(1000), 1.5), {"float": 1000}),
        (User([1, 2]), {".content": 1}),
    ],
    ids=["items of several types", "texts", "a dict", "numbers", "an object"],
)
def test_parts_are_named_as_the_user_knows_them(value: object, parts: dict[str, int]) -> None:
    found = Sizes().measure(value)
    assert {part.name: part.items for part in found.parts} == parts
    assert 0 < sum(part.size_bytes for part in found.parts) <= found.size_bytes


def test_parts_of_a_frame_are_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": ["x" * 1000] * 9 + ["y" * 10_000], "a": 1.0, "b": 2.0}).astype({"text": object})
    frame["other"] = pandas.Series([["z" * 20_000]] * 10, dtype=object)
    parts = {part.name: part.size_bytes for part in Sizes().measure(frame.copy()).parts}  # consolidates them
    assert list(parts)[:2] == ["other", "text"]
    assert parts["a"] == parts["b"] >= 80


def test_nothing_of_a_hostile_object_runs_and_its_neighbours_are_measured() -> None:
    text = b"x" * (1 << 20)
    kinds = (hostile.Hostile, hostile.Container, hostile.Sequence, hostile.Slotted, hostile.Lazy, hostile.Oom)
    objects = [hostile.made(kind, [text] if kind is hostile.Sequence else None) for kind in kinds]
    with hostile.untouched():
        for value in ([*objects, text], *objects):
            found = Sizes({"data": value}).measure(value, "data")
        together = Sizes().measure([*objects, text])
    assert found.size_bytes < 3000
    assert 1 << 20 < together.size_bytes < (1 << 20) + 5000


def test_users_subclasses_of_libraries_are_read_without_their_code() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    arrow, polars = pytest.importorskip("pyarrow"), pytest.importorskip("polars")
    labels = object.__new__(hostile.Meta("Labels", (pandas.Index,), hostile.body))
    frame = object.__new__(hostile.Meta("Frame", (pandas.DataFrame,), hostile.body))
    other = object.__new__(hostile.Meta("Other", (polars.DataFrame,), hostile.body))
    plain = pandas.DataFrame({"number": numpy.ones(1 << 17), "thing": numpy.empty(1 << 17, object)})
    plain._mgr.blocks[1].values.fill(hostile.made(hostile.Hostile))
    plain._mgr.axes[0] = labels
    object.__setattr__(frame, "_mgr", plain._mgr)
    object.__setattr__(other, "_df", polars.DataFrame({"number": numpy.ones(1 << 17)})._df)

    class Words(arrow.ExtensionArray):  # type: ignore[misc]  # pyarrow is untyped
        buffers = hostile.trap("buffers")

    class WordType(arrow.ExtensionType):  # type: ignore[misc]  # as above
        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        def __arrow_ext_class__(self) -> type:
            return Words

    words = arrow.ExtensionArray.from_storage(WordType(arrow.int64(), "words"), arrow.array(numpy.ones(1 << 17, "i8")))
    assert type(words) is Words
    with hostile.untouched():
        sizes = [Sizes().measure(value).size_bytes for value in (frame, other, words)]
    assert [round(size / (1 << 20), 1) for size in sizes] == [2, 1, 1]


def test_a_limit_is_reported_and_a_long_list_is_sampled() -> None:
    assert not Sizes(limit=3000).measure([[str(number)] for number in range(3000)]).complete
    chain: list[object] = []
    for _ in range(100_000):
        chain = [chain]
    linked = Sizes().measure(chain)
    assert linked.complete
    assert linked.size_bytes == pytest.approx(100_000 * 80, rel=0.01)
    long = Sizes().measure([str(number) for number in range(10**6, 3 * 10**6)])
    assert long.complete
    assert long.notes == ("estimated from a sample of its items",)
    assert long.size_bytes == pytest.approx(2 * 10**6 * (64 + 8), rel=0.01)


MANY = ("[str(n) for n in range(10**5)]", "[{'number': n, 'text': str(n)} for n in range(50_000)]")


@pytest.mark.parametrize("code", [*MANY, "dict.fromkeys(range(10**5), 1.5)"])
def test_no_function_is_called_for_each_object(code: str) -> None:
    found, calls = calls_for(eval(code))
    assert found.objects > 100_000
    assert calls - calls_for([])[1] < found.objects / 25  # some for each chunk of thousands


def calls_for(value: object) -> tuple[Size, int]:
    """Return an object's size, and how many Python functions were called."""
    calls, sizes = 0, Sizes()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        return sizes.measure(value), calls
    finally:
        sys.setprofile(None)

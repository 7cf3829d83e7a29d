"""Objects whose memory a C library keeps uncounted are told from those whose every
byte is known.
"""

import ctypes
import importlib
import sys
import textwrap
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.heap import structs
from ipygpumem.heap.knowledge import certainty
from ipygpumem.heap.knowledge.own_bytes import OwnBytes
from ipygpumem.inventory import top
from ipygpumem.inventory.top import LargestNames
from ipygpumem.report.inventory import top_report, why_report
from tests.steps import works

KEEPERS = {
    "lzma": ("lzma", "lzma.LZMACompressor()"),
    "zlib": ("zlib", "zlib.compressobj()"),
    "bz2": ("bz2", "bz2.BZ2Decompressor()"),
    "pyexpat": ("xml.parsers.expat", "xml.parsers.expat.ParserCreate()"),
    "scipy": ("scipy.sparse.linalg", "scipy.sparse.linalg.splu(scipy.sparse.eye(3, format='csc'))"),
    "polars": ("polars", "polars.LazyFrame({'a': [1]})._ldf"),
    "protobuf": ("google.protobuf.struct_pb2", "google.protobuf.struct_pb2.Value()"),
    "tokenizers": ("tokenizers", "tokenizers.Tokenizer(tokenizers.models.BPE())"),
    "rpds": ("rpds", "rpds.HashTrieMap()"),
    "pyarrow": ("pyarrow", "pyarrow.BufferOutputStream()"),
    "faiss": ("faiss", "faiss.IndexFlatL2(4)"),
    "lxml": ("lxml.etree", "lxml.etree.Element('a')"),
    "duckdb": ("duckdb", "duckdb.connect()"),
    "igraph": ("igraph", "igraph.Graph()"),
    "annoy": ("annoy", "annoy.AnnoyIndex(4, 'angular')"),
    "cv2": ("cv2", "cv2.UMat(4, 4, 0)"),
    "jaxlib": ("jax", "jax.jit(len)"),
}
"""Modules and expressions of objects that keep memory, by the name of the library that users know.
"""

COUNTED = {
    "built-in": (
        "sys",
        "[1, 1.5, 'a', b'a', None, [], {}, {1}, range(3), slice(1), len, type, iter([])]",
    ),
    "functions": (
        "functools",
        "[functools.partial(len, []), functools.lru_cache(len), property(len), print.__call__]",
    ),
    "iterators": (
        "itertools",
        "[itertools.chain([]), itertools.tee([])[0], itertools.count(), map(len, []), zip([])]",
    ),
    "containers": (
        "collections",
        "[collections.deque(), collections.Counter('ab'), collections.OrderedDict(a=1)]",
    ),
    "dates": (
        "datetime",
        "[datetime.datetime.now(), datetime.timedelta(1), datetime.timezone.utc]",
    ),
    "zones": ("zoneinfo", "[zoneinfo.ZoneInfo.no_cache('UTC')]"),
    "numbers": ("decimal", "[decimal.Decimal(1), decimal.getcontext()]"),
    "patterns": ("re", "[re.compile('a'), re.match('a', 'a')]"),
    "paths": ("pathlib", "[pathlib.Path('a'), uuid.uuid4()]"),
    "locks": (
        "threading",
        "[threading.Lock(), threading.RLock(), threading.local(), threading.Condition()]",
    ),
    "streams": ("io", "[io.BytesIO(b'a'), io.StringIO('a'), io.BufferedReader(io.BytesIO())]"),
    "databases": ("sqlite3", "[sqlite3.connect(':memory:')]"),
    "random": (
        "random",
        "[random.Random(), hashlib.sha256(), struct.Struct('d'), array.array('d')]",
    ),
    "ctypes": (
        "ctypes",
        "[(ctypes.c_int * 3)(), ctypes.c_void_p(1), ctypes.pointer(ctypes.c_int())]",
    ),
    "numpy": (
        "numpy",
        "[numpy.ones(3), numpy.float64(1), numpy.dtype('f8'), numpy.add, "
        "numpy.random.default_rng()]",
    ),
    "pandas": (
        "pandas",
        "[pandas.Timestamp('2020'), pandas.NaT, pandas.NA, pandas.Interval(0, 1)]",
    ),
    "pyarrow": (
        "pyarrow",
        "[pyarrow.table({'a': [1]}), pyarrow.int64(), pyarrow.scalar(1), pyarrow.scalar('a')]",
    ),
    "polars": (
        "polars",
        "[polars.DataFrame({'a': [1]})._df, polars.col('a')._pyexpr, polars.Series([1])._s]",
    ),
    "matplotlib": (
        "matplotlib.ft2font",
        "[matplotlib.ft2font.FT2Font.__new__(matplotlib.ft2font.FT2Font)]",
    ),
    "sklearn": ("sklearn.metrics", "[sklearn.metrics.DistanceMetric.get_metric('euclidean')]"),
    "pillow": ("PIL.Image", "[PIL.Image.new('L', (1, 1)), PIL.Image.new('L', (1, 1)).im]"),
    "yarl": ("yarl", "[yarl.URL('http://a.b'), regex.compile('a')]"),
    "jax": ("jax", "[jax.numpy.ones(3), jax.devices()[0], jax.tree_util.tree_structure([1])]"),
    "h5py": ("h5py", "[h5py.File('none.h5', 'w', driver='core', backing_store=False).id]"),
}
"""Modules and expressions of usual objects, all of whose memory is counted."""


def value_of(module: str, expression: str) -> Any:
    """Return the value of an expression that names modules; skip the test if the first is not
    installed.
    """
    first = pytest.importorskip(module)
    names: dict[str, Any] = {
        module.partition(".")[0]: sys.modules[module.partition(".")[0]],
        "first": first,
    }
    for name in ("array", "hashlib", "struct", "uuid"):
        names[name] = importlib.import_module(name)
    if "regex" in expression:
        names["regex"] = pytest.importorskip("regex")
    return eval(expression, names)


@pytest.mark.parametrize("library", KEEPERS)
def test_a_library_that_keeps_memory_is_named(library: str) -> None:
    item = value_of(*KEEPERS[library])
    assert OwnBytes().uncounted([item, "text", 3]) == {library}


@pytest.mark.parametrize("kind", COUNTED)
def test_usual_objects_keep_no_uncounted_memory(kind: str) -> None:
    items = value_of(*COUNTED[kind])
    assert OwnBytes().uncounted(items) == set()


def test_a_users_subclass_keeps_what_its_base_keeps() -> None:
    arrow = pytest.importorskip("pyarrow")

    class Mine(arrow.NativeFile):  # type: ignore[misc]  # pyarrow is untyped
        pass

    assert OwnBytes().uncounted([Mine()]) == {"pyarrow"}


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """Return a module like that of a library with Python classes around C objects."""
    module = ModuleType("vectors")
    module.__file__ = "/usr/lib/site-packages/vectors.py"
    code = """
        import ctypes
        class Index:  # as SWIG writes it
            thisown = property(lambda self: True)
        class Handle:
            def __init__(self):
                self.pointer = ctypes.c_void_p(1)
        class Text:
            def __init__(self):
                self.text = "text"
    """
    exec(textwrap.dedent(code), module.__dict__)
    sys.modules["vectors"] = module
    yield module
    del sys.modules["vectors"]


def test_classes_around_c_objects_keep_memory(library: Any) -> None:
    class Mine(library.Index):  # type: ignore[misc]  # made at run time
        pass

    assert OwnBytes().uncounted([library.Index()]) == {"vectors"}
    assert OwnBytes().uncounted([Mine()]) == {"vectors"}
    assert OwnBytes().uncounted([library.Handle()]) == {"vectors"}
    assert OwnBytes().uncounted([library.Text()]) == set()


def test_a_users_object_with_a_pointer_keeps_memory() -> None:
    class Handle:
        def __init__(self, pointer: object) -> None:
            self.pointer = pointer

    own_bytes = OwnBytes()
    assert own_bytes.uncounted([Handle(ctypes.c_void_p(1))]) == {"ctypes"}


def test_memory_that_cannot_be_read_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "can_read_text_streams", lambda: False)
    assert OwnBytes().uncounted([importlib.import_module("io").StringIO()]) == {"io"}


def test_each_type_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = list[type]()
    of = certainty.Keepers.of

    def counting(self: certainty.Keepers, kind: type, example: object = None) -> str:
        examined.append(kind)
        return of(self, kind, example)

    monkeypatch.setattr(certainty.Keepers, "of", counting)
    own_bytes = OwnBytes()
    for _ in range(3):
        own_bytes.uncounted([1, 2, "text", [], []])
    assert sorted(kind.__name__ for kind in examined) == ["int", "list", "str"]


class Cache:
    def __init__(self) -> None:
        self.compressors = [zlib.compressobj() for _ in range(20)]
        self.rows = [bytes(1000)]


@pytest.mark.parametrize(
    "value",
    [
        zlib.compressobj(),
        [zlib.compressobj(), "text"],
        {"first": zlib.compressobj()},
        Cache(),
        [(zlib.compressobj(),)] * 2,
    ],
    ids=["itself", "in a list", "in a dict", "many in an attribute", "twice"],
)
def test_memory_that_nothing_counts_is_said_in_top_and_why(value: object) -> None:
    note = "zlib keeps memory that is not counted"
    (row,) = top.take({"value": value}, {}, references={}).names
    assert row.is_at_least
    assert note in row.notes
    (table,) = top_report(LargestNames((row,), {}, 0.0)).tables
    assert table.rows[0][0].startswith("at least ")
    found = ipygpumem.why(value)
    assert found.is_at_least
    assert note in found.notes
    assert "all of it" not in str(why_report(found).head)


def test_what_is_known_to_the_last_byte_is_said_to_be_all() -> None:
    value = {"rows": [bytes(1000)], "names": ("a", "b")}
    (row,) = top.take({"value": value}, {}, references={}).names
    assert not row.is_at_least
    assert row.notes == ()


def test_a_small_view_says_what_it_keeps_alive() -> None:
    numpy = pytest.importorskip("numpy")
    view = numpy.ones((1 << 16, 8))[:10]
    (row,) = top.take({"view": view}, {}, references={}).names
    assert row.notes == ("10 × 8 of an array of 4 MiB: .copy()",)
    assert ipygpumem.why(view).notes == row.notes


LEAK = """%%experiment leaky
keeper["z"] = [zlib.compressobj(), bytearray(2 << 20)]
"""


def test_leaks_say_at_least_where_memory_is_not_counted(kernel: Kernel) -> None:
    works(kernel, "import zlib; keeper = {}", LEAK)
    (text,) = works(kernel, "%gpumem leaks").reports("leaks")
    headline, row = text.splitlines()
    assert headline == "1 leak · at least 2 MiB"
    assert row.strip().startswith("at least 2 MiB · list")
    assert "zlib keeps memory that is not counted" in row

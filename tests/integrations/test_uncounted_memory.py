"""Which objects of real libraries keep memory that is not counted."""

import importlib
import sys
from typing import Any

import pytest

from ipygpumem.heap.knowledge.own_bytes import OwnBytes

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
    "netCDF4": ("netCDF4", "netCDF4.Dataset('none.nc', 'w', diskless=True, persist=False)"),
    "hnswlib": ("hnswlib", "hnswlib.Index('l2', 4)"),
    "rapidfuzz": ("rapidfuzz.distance", "rapidfuzz.distance.Editops([], 1, 1)"),
    "rtree": ("rtree.index", "rtree.index.Index().handle"),
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
        "[polars.DataFrame({'a': [1]})._df, polars.Series([1])._s, polars.Int64()]",
    ),
    "matplotlib": (
        "matplotlib.ft2font",
        "[matplotlib.ft2font.FT2Font.__new__(matplotlib.ft2font.FT2Font)]",
    ),
    "sklearn": ("sklearn.metrics", "[sklearn.metrics.DistanceMetric.get_metric('euclidean')]"),
    "pillow": ("PIL.Image", "[PIL.Image.new('L', (1, 1)), PIL.Image.new('L', (1, 1)).im]"),
    "yarl": ("yarl", "[yarl.URL('http://a.b'), regex.compile('a')]"),
    "jax": ("jax", "[jax.numpy.ones(3), jax.devices()[0], jax.tree_util.tree_structure([1])]"),
    "shapely": ("shapely", "[shapely.Point(1, 2)]"),
    "bitarray": ("bitarray", "[bitarray.bitarray(8)]"),
    "pyroaring": ("pyroaring", "[pyroaring.BitMap([1])]"),
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


def test_an_expression_of_polars_may_keep_a_whole_series() -> None:
    expression = value_of("polars", "polars.lit(polars.Series([1.0, 2.0]))._pyexpr")
    assert OwnBytes().uncounted([expression]) == {"polars"}


@pytest.mark.parametrize("kind", COUNTED)
def test_usual_objects_keep_no_uncounted_memory(kind: str) -> None:
    items = value_of(*COUNTED[kind])
    assert OwnBytes().uncounted(items) == set()


def test_a_users_subclass_keeps_the_same_memory_as_its_base() -> None:
    arrow = pytest.importorskip("pyarrow")

    class Mine(arrow.NativeFile):  # type: ignore[misc]  # pyarrow is untyped
        pass

    assert OwnBytes().uncounted([Mine()]) == {"pyarrow"}

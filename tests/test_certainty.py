"""Objects whose memory a C library keeps uncounted are told from those whose every byte is known.

tests/integrations/test_uncounted_memory.py has the objects of real libraries.
"""

import ast
import ctypes
import importlib
import sys
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.kinds import structs
from ipygpumem.heap.knowledge import certainty
from ipygpumem.heap.knowledge.own_bytes import OwnBytes
from ipygpumem.heap.knowledge.size_methods import size_method
from ipygpumem.inventory.names import top
from ipygpumem.inventory.names.top import LargestNames
from ipygpumem.report.top import top_report
from ipygpumem.report.why import why_report
from tests.steps import run_cells


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


def _sized_class(module: str, method: object) -> type:
    """Return a class with a ``__sizeof__`` and fields of its own, as Cython makes it."""
    return type("Bitmap", (), {"__module__": module, "__sizeof__": method, "__slots__": ("a",)})


def test_a_size_that_cython_has_compiled_counts(library: Any) -> None:
    class cython_function_or_method:  # noqa: N801  # the name that Cython gives its functions
        def __get__(self, item: object, kind: object) -> Any:
            return lambda: 1 << 20

        def __call__(self, item: object) -> int:
            return 1 << 20

    bitmap = _sized_class("vectors", cython_function_or_method())()
    assert OwnBytes().of([bitmap]) >= 1 << 20
    assert OwnBytes().each([bitmap, "text"])[0] >= 1 << 20


def test_a_size_written_in_python_never_runs_and_is_not_counted(library: Any) -> None:
    def fails(self: object) -> int:
        raise AssertionError

    bitmap = _sized_class("vectors", fails)()
    # Without its data.
    assert OwnBytes().of([bitmap]) < 100
    assert not size_method(type(bitmap)).is_of_cython
    assert size_method(type(bitmap)).is_of_object  # so it says "at least" if it has fields in C


def test_memory_that_cannot_be_read_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "can_read_text_streams", lambda: False)
    assert OwnBytes().uncounted([importlib.import_module("io").StringIO()]) == {"io"}


def test_each_type_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = list[type]()
    library_of = certainty.UncountedLibraries.library_of

    def counting(self: certainty.UncountedLibraries, kind: type, example: object = None) -> str:
        examined.append(kind)
        return library_of(self, kind, example)

    monkeypatch.setattr(certainty.UncountedLibraries, "library_of", counting)
    own_bytes = OwnBytes()
    for _ in range(3):
        own_bytes.uncounted([1, 2, "text", [], []])
    assert sorted(kind.__name__ for kind in examined) == ["int", "list", "str"]


class Cache:
    def __init__(self) -> None:
        self.compressors = [zlib.compressobj() for _ in range(20)]
        self.rows = [bytes(1000)]


@pytest.mark.usefixtures("others_out_of_sight")
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
    (row,) = top.measure_names({"value": value}, {}, references={}).names
    assert row.is_at_least
    assert note in row.notes
    (table,) = top_report(LargestNames((row,), {}, 0.0)).tables
    assert table.rows[0][0].startswith("at least ")
    ownership = ipygpumem.why(value)
    assert ownership.is_at_least
    assert note in ownership.notes
    assert "all of it" not in str(why_report(ownership).head)


def test_a_name_that_frees_nothing_frees_no_uncertain_memory() -> None:
    value = zlib.compressobj()
    row = top.measure_names({"value": value}, {}, references={}).names[0]
    row = row._replace(freed_bytes={})
    (table,) = top_report(LargestNames((row,), {}, 0.0)).tables
    assert table.rows[0][list(table.columns).index("del frees")] == "0 B"


def test_a_completely_counted_size_is_not_marked_at_least() -> None:
    value = {"rows": [bytes(1000)], "names": ("a", "b")}
    (row,) = top.measure_names({"value": value}, {}, references={}).names
    assert not row.is_at_least
    assert row.notes == ()


def test_a_small_view_names_the_memory_that_it_keeps_alive() -> None:
    numpy = pytest.importorskip("numpy")
    view = numpy.ones((1 << 16, 8))[:10]
    (row,) = top.measure_names({"view": view}, {}, references={}).names
    assert row.notes == ("10 × 8 of an array of 4 MiB: .copy()",)
    assert ipygpumem.why(view).notes == row.notes


LEAK = """%%experiment leaky
keeper["z"] = [zlib.compressobj(), bytearray(2 << 20)]
"""


def test_leaks_say_at_least_where_memory_is_not_counted(kernel: Kernel) -> None:
    run_cells(kernel, "import zlib; keeper = {}", LEAK)
    (text,) = run_cells(kernel, "%gpumem leaks").leaks()
    headline, row = text.splitlines()
    assert headline == "1 leak · at least 2 MiB"
    assert row.strip().startswith("at least 2 MiB · list")
    assert "zlib keeps memory that is not counted" in row


def test_no_text_of_a_report_guesses() -> None:
    """A cause is named with the figure that points to it, or not at all."""
    guesses = list[str]()
    for path in sorted(Path(ipygpumem.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and id(node) not in documentation and "probably" in node.value.lower():
                guesses.append(f"{path.name}:{node.lineno}: {node.value}")
    assert guesses == []

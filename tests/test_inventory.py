"""Arrays and inventories without torch: in plain scripts, with NumPy, and with a torch that is not
all there.
"""

import json
import mmap
import pickle
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ipygpumem.heap.bulk import CHUNK
from ipygpumem.heap.kinds.arrays import Array, describe, elements
from ipygpumem.heap.walks.named_arrays import NamedArrays
from ipygpumem.introspect import users_modules
from ipygpumem.inventory.arrays import records, survey
from ipygpumem.inventory.arrays.records import Inventory, TensorRecord
from ipygpumem.inventory.remaining import baseline
from ipygpumem.shell.notebook_inventory import inventory_of_notebook
from tests import hostile
from tests.alone import printed
from tests.hiding import show_modules

numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def take(**names: object) -> dict[str, TensorRecord]:
    return {
        row.name: row
        for row in survey.take_inventory(names.items()).tensors
        if row.name is not None
    }


def paths_of(**roots: object) -> list[str]:
    arrays = NamedArrays()
    return [arrays.paths[key] for key in arrays.named(roots.items())]


def script(folder: Path, code: str) -> list[str]:
    """Run a script without IPython and return the lines that it printed."""
    (folder / "train.py").write_text(code, encoding="utf-8")
    return printed(folder / "train.py").splitlines()


def test_a_script_works_without_ipython_or_torch(tmp_path: Path) -> None:
    printed = script(
        tmp_path,
        textwrap.dedent(
            """\
            import sys, numpy, ipygpumem
            data = numpy.ones(1000)
            def train(batch):
                before = ipygpumem.tensors()
                hidden = batch * 2
                after = ipygpumem.tensors()
                return before, ipygpumem.diff(before, after)
            before, diff = train(numpy.ones(2000))
            print([(row.name, row.size_bytes, row.cell) for row in before.tensors if row.name])
            print([row.name for row in diff.added], diff.removed)
            print(diff.before.rpartition('train.py')[2], diff.after.rpartition('train.py')[2])
            print('torch' in sys.modules, 'IPython' in sys.modules)
            """
        ),
    )
    assert printed == [
        "[('batch', 16000, None), ('data', 8000, None)]",
        "['hidden'] ()",
        ":4 :6",
        "False False",
    ]


def test_an_array_held_only_by_a_closure_variable_is_listed(tmp_path: Path) -> None:
    printed = script(
        tmp_path,
        textwrap.dedent(
            """\
            import numpy, ipygpumem
            def inner(): return ipygpumem.tensors()
            def outer():
                hidden = numpy.ones(1234)
                return inner()
            print([row.name for row in outer().tensors if row.shape == (1234,)])
            """
        ),
    )
    assert printed == ["[None]"]


def test_views_of_one_memory_count_once() -> None:
    data = bytearray(1000)
    one = numpy.frombuffer(data, numpy.uint8)
    two = numpy.frombuffer(data, numpy.uint8)
    array = numpy.ones(100)
    rows = take(one=one, two=two, array=array, view=array[5:])
    assert {name: (row.size_bytes, row.aliases) for name, row in rows.items()} == {
        "one": (1000, 1),
        "array": (800, 1),
    }


def test_paths_are_the_shortest_and_read_like_python() -> None:
    class Holder:
        __slots__ = ("x",)

    class Plain:
        pass

    slotted = Holder()
    plain = Plain()
    slotted.x, plain.inner = numpy.ones(1), {"run3": [numpy.ones(2)], 7: (numpy.ones(3),)}

    def function(default: Any = numpy.ones(4)) -> Any:  # noqa: B008  # the point of the test
        return default

    both = numpy.ones(5)
    paths = paths_of(slotted=slotted, plain=plain, function=function, deep=[[both]], both=both)
    assert paths == [
        "both",
        "slotted.x",
        "function.__defaults__[0]",
        'plain.inner["run3"][0]',
        "plain.inner[7][0]",
    ]


def test_a_part_that_was_displayed_has_the_path_of_its_variable(loaded: InteractiveShell) -> None:
    loaded.run_cell("""
    import numpy
    steps = {'a': [numpy.ones(1 << 17)]}
    steps['a'];
    """)
    loaded.run_cell("steps['a'][0]", store_history=True)
    loaded.run_cell("numpy.ones(1 << 18)", store_history=True)
    inventory = inventory_of_notebook(loaded)
    large = [row.name for row in inventory.tensors if row.size_bytes >= 1 << 20]
    assert large == ["Out[2]", 'steps["a"][0]']


def test_a_cycle_ends_and_a_huge_tree_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: list[Any] = [numpy.ones(1)]
    loop.append(loop)
    assert paths_of(loop=loop) == ["loop[0]"]
    monkeypatch.setattr("ipygpumem.heap.walks.named_arrays.MOST_OBJECTS", 10)
    tree = [[[numpy.ones(1)]] for i in range(100)]
    assert (
        survey.take_inventory([("tree", tree)]).notes[0].startswith("the search for names stopped")
    )


@pytest.mark.parametrize(
    "make", [lambda i: [i], lambda i: {"a": i, "b": []}, lambda i: (i, [str(i)])]
)
def test_plain_objects_are_examined_in_bulk(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int], object]
) -> None:
    monkeypatch.setattr("ipygpumem.heap.walks.named_arrays.MOST_OBJECTS", 3 * CHUNK)
    items = [make(i) for i in range(4 * CHUNK)]
    box = [numpy.ones(3)]
    inventory = survey.take_inventory(
        [("items", items), ("items", {"again": items}), ("last", [*items, box]), ("box", box)]
    )
    assert inventory.notes == ()
    assert [row.name for row in inventory.tensors if row.name] == ["box[0]"]
    inventory = survey.take_inventory([("items", items), ("last", [*items, box])])
    assert [row.name for row in inventory.tensors if row.name] == [f"last[{4 * CHUNK}][0]"]


def test_a_first_search_stops_in_a_huge_container_without_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show_modules(monkeypatch)
    # No locals, because a search looks at those, too.
    made = SimpleNamespace(beside=numpy.ones(1), deep=numpy.ones(2))
    plain = [{"a": i, "b": []} for i in range(30_000)]
    arrays, complete = baseline.arrays_within_reach(
        {"plain": plain, "beside": {"x": [made.beside]}}
    )
    assert [array is made.beside for array in arrays] == [True]
    assert not complete
    del arrays
    arrays, complete = baseline.arrays_within_reach(
        {"pairs": [(i, numpy.ones(1)) for i in range(21_000)], "deep": made.deep}
    )
    assert len({id(array) for array in arrays}) == 21_001
    assert complete
    del arrays
    arrays, complete = baseline.arrays_within_reach(
        {f"name{i}": i for i in range(50_000)} | {"last": made.deep}
    )
    assert [array is made.deep for array in arrays] == [True]
    assert complete


def test_objects_with_hostile_attributes_are_never_asked() -> None:
    strange = hostile.made(hostile.Slotted, numpy.ones(3))
    lazy = hostile.made(hostile.Lazy)
    with hostile.untouched():
        assert paths_of(strange=strange, lazy=lazy) == ["strange.content"]


def test_a_dict_that_another_thread_changes_stops_nothing() -> None:
    """Large, and with threads that take turns often: a loop in Python over its items would fail
    within five turns.
    """
    changing: dict[int, object] = {
        0: numpy.ones(1),
        **{number: [number] for number in range(1, 50_000)},
    }
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            changing[number % 50_000] = [number]
            changing.pop((number * 7) % 50_000, None)

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()

    # The thread changes the dict while it is searched.
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(5):
            survey.take_inventory([("changing", changing)])
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def inventory_of(*rows: TensorRecord) -> Inventory:
    return Inventory(rows, 0.0)


WEIGHT = TensorRecord(
    "model.weight", "Parameter", (2, 3), "float32", "cuda:0", 24, "parameter", storage=1
)
LOSS = TensorRecord("losses[0]", "Tensor", (), "float32", "cuda:0", 4, cell=3, storage=2)
ARRAY = TensorRecord(None, "ndarray", (10,), "float64", "cpu", 80, storage=3)


def test_a_bracket_in_a_pattern_stands_for_itself() -> None:
    inventory = inventory_of(WEIGHT, LOSS, ARRAY)
    assert records.select(inventory, ["losses[0]"]).tensors == (LOSS,)
    assert records.select(inventory, ["model.*"], device="cuda").tensors == (WEIGHT,)
    assert records.select(inventory, device="cpu").tensors == (ARRAY,)
    assert records.select(inventory, kind="parameter", min_bytes=25).tensors == ()


def test_groups_add_up() -> None:
    rows = (WEIGHT, LOSS, ARRAY)
    assert records.group(rows, "name") == (("(no name)", 1, 80), ("model", 1, 24), ("losses", 1, 4))
    assert records.group(rows, "kind") == (("other", 2, 84), ("parameter", 1, 24))
    assert records.group(rows, "shape")[1] == ("2 × 3 float32", 1, 24)
    assert records.group(rows, "cell") == (("(unknown)", 2, 104), ("cell 3", 1, 4))
    assert records.group(rows, "device") == (("cpu", 1, 80), ("cuda:0", 2, 28))


def test_an_inventory_survives_its_dictionary_and_a_copy() -> None:
    box = {"x": [numpy.ones(10), numpy.ones(20)]}
    inventory = survey.take_inventory([("box", box)])
    again = Inventory.from_dict(json.loads(json.dumps(inventory.to_dict())))
    assert again == inventory == pickle.loads(pickle.dumps(inventory))
    assert hash(again.tensors) == hash(inventory.tensors)


def test_an_inventory_holds_no_object_of_the_users() -> None:
    class Key:
        pass

    key = Key()
    arrays = [numpy.ones(3) for _ in range(10)]
    box = {key: arrays[:5], 1: arrays[5:]}
    inventory = survey.take_inventory([("box", box), ("arrays", arrays)])
    references = [weakref.ref(key), *map(weakref.ref, arrays)]
    del key, arrays, box
    assert [reference() for reference in references] == [None] * 11
    assert {f"arrays[{place}]" for place in range(10)} <= {row.name for row in inventory.tensors}


def size(value: object) -> int:
    array = describe(value)
    assert isinstance(array, Array)
    return array.size_bytes


def test_a_views_size_is_that_of_its_base() -> None:
    # The bytes of 1000, of 1 and of 10 numbers of 8 bytes.
    assert size(numpy.ones(1000)[:10][2:]) == 8000
    assert size(numpy.broadcast_to(numpy.ones(1), (1000, 1000))) == 8
    assert size(numpy.lib.stride_tricks.as_strided(numpy.ones(10), (5, 5), (0, 8))) == 80


def test_an_arrays_size_is_that_of_its_elements() -> None:
    assert size(numpy.empty((0, 5))) == 0
    # Ten elements of 4 + 8 bytes.
    assert size(numpy.zeros(10, [("a", "i4"), ("b", "f8")])) == 120
    assert describe([1]) is None


def test_an_arrays_size_includes_a_buffer_that_it_keeps_alive(tmp_path: Path) -> None:
    assert size(numpy.frombuffer(b"x" * 100, numpy.uint8)) == 100
    file = tmp_path / "map"
    file.write_bytes(bytes(8192))
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0)
        assert size(numpy.frombuffer(mapped, numpy.uint8)) == 8192
    assert size(numpy.memmap(file, numpy.uint8)[:10]) == 8192


def test_the_elements_of_object_arrays_are_seen() -> None:
    inner = numpy.ones(3)
    array = numpy.empty((1, 2), object)
    array[0, 1] = inner
    items = elements(array)
    assert items is not None
    assert items[0][1] is inner
    assert elements(numpy.ones(3)) is None


def test_the_notebooks_alias_mp_main_is_no_user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing multiprocessing adds it as ``__mp_main__``: growth was said to be held by
    ``__mp_main__.___``.
    """
    notebook = ModuleType("__main__")
    notebook.__file__ = "/home/someone/script.py"
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setitem(sys.modules, "__mp_main__", notebook)
    modules = users_modules()
    assert modules["__main__"] is notebook
    assert "__mp_main__" not in modules

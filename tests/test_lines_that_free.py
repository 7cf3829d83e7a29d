"""The parts of a line that removes an object from several places, and their order."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from ipygpumem import introspect
from ipygpumem.heap.holders.referrer_graph import ReferrerGraph
from ipygpumem.heap.holders.registries import Registries
from ipygpumem.heap.holders.rows import Row
from ipygpumem.heap.holders.search import explain
from ipygpumem.heap.kinds.arrays import storage_key
from ipygpumem.heap.live.heap import Heap
from ipygpumem.heap.paths import container_steps
from ipygpumem.heap.paths.cuts import Cut, Kind
from ipygpumem.heap.paths.patches import line_that_stops, started_patches
from ipygpumem.heap.paths.remedies import Holder, Remedy
from ipygpumem.heap.paths.roots import Root, Roots
from ipygpumem.heap.paths.statements import statement_of
from ipygpumem.heap.paths.ways import Way, joined
from ipygpumem.introspect import is_ours, is_users
from ipygpumem.inventory.rows.held_rows import HeldRow
from ipygpumem.inventory.rows.merging import merged
from ipygpumem.records import RetainedArray

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


class Item:
    """An object that many places hold."""

    part: object = None


def way(line: str) -> Way:
    return Way(Holder("a place", Remedy.of_text(line)))


@pytest.mark.parametrize(
    ("positions", "line"), [(range(300), "its.clear()"), (range(9, 300), "del its[9:]")]
)
def test_an_item_of_many_is_removed_once(positions: Sequence[int], line: str) -> None:
    """The reference to an item of many has no code of its own."""
    alone = [Cut(Kind.ITEM, 1, "its", f"its[{place}]", place, 300) for place in positions]
    of_many = [alone[0].of_item(place, None) for place in positions]
    assert statement_of([*alone, *of_many]) == line


@pytest.mark.parametrize("is_first", [True, False])
def test_an_object_is_deleted_after_its_parts_are_used(is_first: bool) -> None:
    ways = [way("del its[0]"), way("its[0]._sampler_iter.close()")]
    advice = joined(ways if is_first else ways[::-1]).holder.advice
    assert advice == "its[0]._sampler_iter.close(); del its[0]"


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        (["a.opt = None", ""], "a.opt = None  # and remove it from a place"),
        (["", "a.opt = None", "del b"], "a.opt = None; del b  # and remove it from a place"),
        (["", ""], ""),
        (["del a", "remove it from there"], "del a  # and remove it from a place"),
        (
            ["close() it when it is done", "del a", "del b  # if nothing needs it", ""],
            "del a; del b  # and close() it when it is done, and remove it from a place; "
            "if nothing needs it",
        ),
        (["close() it", "stop() it"], "close() it, and stop() it"),
        (
            ["f.cache_clear()", "%xdel _5"],
            'f.cache_clear(); get_ipython().run_line_magic("xdel", "_5")',
        ),
    ],
)
def test_lines_are_joined_and_other_places_named_in_a_comment(
    lines: list[str], advice: str
) -> None:
    assert joined(list(map(way, lines))).holder.advice == advice


def test_a_file_whose_name_begins_as_our_folder_is_the_user_s() -> None:
    folder = Path(introspect.__file__).parent
    assert is_ours(str(folder / "api" / "shell.py"))
    assert not is_ours(f"{folder}_demo.py")
    assert is_users(f"{folder.parent.parent}/{folder.name}_demo.py")


def test_a_name_is_deleted_after_the_items_below_it() -> None:
    name = Cut(Kind.NAME, 0, "", "mock")
    item = Cut(Kind.ITEM, 1, "mock.calls", "mock.calls[0]", size=2)
    assert statement_of([name, item]) == "del mock.calls[0]; del mock"


def test_an_item_inside_a_tuple_is_deleted_before_earlier_items() -> None:
    item = Cut(Kind.ITEM, 1, "queue", "queue[0]", size=2)
    inner = Cut(Kind.KEY, 2, "queue[1][0]", 'queue[1][0]["key"]', size=1)
    assert statement_of([item, inner]) == 'del queue[1][0]["key"]; del queue[0]'


def test_a_value_is_deleted_after_the_items_below_it() -> None:
    value = Cut(Kind.KEY, 0, "outer", 'outer["m"]', size=1)
    item = Cut(Kind.ITEM, 1, 'outer["m"].calls', 'outer["m"].calls[0]', size=2)
    assert statement_of([value, item]) == 'del outer["m"].calls[0]; del outer["m"]'


def test_a_list_that_contains_itself_in_an_array_is_not_entered() -> None:
    endless: list[object] = []
    endless += [endless, endless]
    child = object()
    assert container_steps._indices_in_array([child, endless], child, None, 1) == ["[0]"]
    assert container_steps._indices_in_array([[endless], [[child]]], child, None, 1) == []


def row_of(path: str, line: str, size: int, name: str = "", cuts: Sequence[Cut] = ()) -> HeldRow:
    """Return the row of a tensor with the references that its line removes."""
    row = RetainedArray(name, "Tensor", (size,), "float32", "cpu", size, arrays=1)
    return HeldRow(row, Holder(path, Remedy.of_text(line, cuts)))


def advices(rows: Sequence[HeldRow]) -> list[tuple[int, str]]:
    """Return the size and the advice of the merged rows."""
    return [
        (row.row.size_bytes, row.holder.advice) for row in merged(rows) if row.holder is not None
    ]


def test_rows_whose_gradients_one_call_clears_are_one() -> None:
    rows = [
        row_of("the gradient of layers.0", "layers.zero_grad()", 8),
        row_of("the gradient of layers.1", "layers.zero_grad()", 4),
        row_of("another", "net.zero_grad()", 2),
    ]
    assert advices(rows) == [(12, "layers.zero_grad()"), (2, "net.zero_grad()")]


def test_a_key_that_names_figures_stays_a_key() -> None:
    place = 'notebook variable cache["matplotlib figure"]'
    line = 'del cache["matplotlib figure"]'
    rows = [row_of(f"{place}[{at}]", f"{line}[{at}]", 8) for at in range(2)]
    (row,) = merged(rows)
    assert row.holder == Holder(f"{place}[0], and 1 more there", Remedy(f"{line}[1]; {line}[0]"))


def test_rows_are_merged_if_one_line_names_objects_of_another() -> None:
    rows = [
        row_of("the optimizer", 'del runs["opt"]', 8),
        row_of("the state", 'del runs["m"]; runs["opt"].state.clear()  # begins again', 4),
        row_of("the gradient", 'runs["m"].zero_grad()', 2),
        row_of("another", 'del runs["m2"]', 1),
    ]
    line = 'runs["m"].zero_grad(); del runs["m"]; runs["opt"].state.clear(); del runs["opt"]'
    assert advices(rows) == [(14, f"{line}  # begins again"), (1, 'del runs["m2"]')]


@pytest.mark.parametrize("line", ["%xdel _4", "del a.b"])
def test_rows_that_one_line_deletes_are_one(line: str) -> None:
    rows = [row_of("a weight", line, 2), row_of("a bias", line, 1), row_of("another", "b.c()", 4)]
    assert advices(rows) == [(4, "b.c()"), (3, line)]


@pytest.mark.parametrize("line", ["del a.b", "a.b = None", "for item in a.b: del item.x"])
def test_rows_stay_apart_if_no_line_fails_after_another(line: str) -> None:
    rows = [row_of("one", line, 2), row_of("other", "del a.c", 1)]
    assert merged(rows) == rows


def cut_of_value(key: str, position: int) -> Cut:
    """Return the reference of a dict ``d`` with five values to one of these."""
    return Cut(Kind.KEY, 1, "d", f"d[{key}]", position, 5)


@pytest.mark.parametrize(("first", "second"), [('"a"', '"b"'), ("1", "3")])
def test_rows_of_a_dict_stay_apart_for_any_kind_of_key(first: str, second: str) -> None:
    rows = [
        row_of(f"d[{first}]", f"del d[{first}]", 2, "x0", [cut_of_value(first, 0)]),
        row_of(f"d[{second}]", f"del d[{second}]", 1, "x1", [cut_of_value(second, 1)]),
    ]
    assert merged(rows) == rows


@pytest.mark.parametrize(("first", "second"), [('"a"', '"b"'), ("1", "3")])
def test_a_value_is_reached_by_its_key_after_another_was_deleted(first: str, second: str) -> None:
    outer = cut_of_value(first, 0)
    part = Cut(Kind.ATTRIBUTE, 2, f"d[{first}]", f"d[{first}].part", outer=outer)
    rows = [
        row_of(f"d[{first}].part", f"d[{first}].part = None", 2, "x0", [part]),
        row_of(f"d[{second}]", f"del d[{second}]", 1, "x1", [cut_of_value(second, 1)]),
    ]
    assert merged(rows) == rows


def patches_of(kind: str) -> list[Any]:
    """Return patches that replace attributes, two of which are alike in some way."""
    one = Item()
    other = Item()
    settings = {"a": 1}
    patches: dict[str, list[Any]] = {
        "of different names": [mock.patch("json.dumps"), mock.patch("json.loads")],
        "of equal names": [mock.patch("json.dumps"), mock.patch("pickle.dumps")],
        "of one attribute": [mock.patch("json.dumps"), mock.patch("json.dumps")],
        "of instances": [
            mock.patch.object(one, "part", 1),
            mock.patch.object(other, "part", 2),
        ],
        "of a dict": [mock.patch.dict(settings, a=2), mock.patch("json.dumps")],
    }
    return [*patches[kind], mock.patch("json.load")]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "of different names",
        "of equal names",
        "of one attribute",
        "of instances",
        "of a dict",
    ],
)
def test_lines_that_stop_patches_work_in_any_order(kind: str, is_reversed: bool) -> None:
    originals = json.dumps, json.loads, json.load, pickle.dumps
    for patch in patches_of(kind):
        patch.start()
    lines = list(map(line_that_stops, started_patches()))
    if is_reversed:
        lines.reverse()
    for line in lines:
        exec(line, {})
    assert started_patches() == []
    assert originals == (json.dumps, json.loads, json.load, pickle.dumps)


def test_a_line_stops_only_the_patches_of_its_attribute() -> None:
    first = mock.patch("json.dumps")
    second = mock.patch("json.loads")
    first.start()
    second.start()
    exec(line_that_stops(first), {})
    remaining = started_patches()
    second.stop()
    assert remaining == [second]


def calls_to_explain(number: int) -> int:
    """Return the number of our functions that a search calls for an object in a number of dicts."""
    item = Item()
    names = {"rows": [{"item": item} for _ in range(number)]}
    heap = Heap()
    roots = Roots(
        {id(names): Root.of_variable}, hidden=frozenset({id(sys._getframe())}), names=names
    )
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call" and is_ours(frame.f_code.co_filename):
            calls += 1

    sys.setprofile(count)
    try:
        holders = explain((), heap, roots, objects=[item], all_places=True)
    finally:
        sys.setprofile(None)
    assert "and " in holders["object", id(item)].path
    return calls


def test_calls_are_linear_in_the_number_of_an_objects_holders() -> None:
    calls_to_explain(10)
    # Twice the holders, about twice the calls.
    assert calls_to_explain(800) < 2.2 * calls_to_explain(400)


def test_arrays_of_one_line_are_not_compared_with_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpy = pytest.importorskip("numpy")
    number = 300
    names = {"outer": {"x": [numpy.ones(3) for _ in range(number)]}}
    keys = [storage_key(array) for array in names["outer"]["x"]]
    heap = Heap()
    roots = Roots(
        {id(names): Root.of_variable}, hidden=frozenset({id(sys._getframe())}), names=names
    )
    reached = ReferrerGraph._ids_reached
    starts_of_each = list[int]()

    # Counts how many arrays each search begins with.
    def count(edges: Any, starts: Any, within: Any) -> Any:
        starts = list(starts)
        starts_of_each.append(len(starts))
        return reached(edges, starts, within)

    monkeypatch.setattr(ReferrerGraph, "_ids_reached", staticmethod(count))
    holders = explain(keys[:1], heap, roots, rows={keys[0]: Row(keys)}, all_places=True)
    assert holders[keys[0]].remedy.line == 'outer["x"].clear()'
    # Comparing each with each would take number * number.
    assert sum(starts_of_each) < 10 * number


VIEWS = 300
"""More items of one container than are written one by one."""


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("{'rows': list(data)}", "rows.clear()"),
        ("{'rows': [None, *data]}", "del rows[1:]"),
        ("{'rows': [None, *data[:100], None, *data[100:]]}", "del rows[102:]; del rows[1:101]"),
        (
            "{'rows': [item for row in data for item in (row, None)]}",
            "remove them from there",
        ),
        ("{'rows': dict(enumerate(data))}", "rows.clear()"),
        ("{'rows': [(number, row) for number, row in enumerate(data)]}", "rows.clear()"),
    ],
)
def test_a_line_removes_all_of_many_views_of_an_array(names: str, line: str) -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.ones((VIEWS, 1000))
    namespace = eval(names, {"data": data})
    key = ("numpy", id(data))
    del data
    heap = Heap()
    frame = frozenset({id(sys._getframe())})
    roots = Roots({id(namespace): Root.of_variable}, hidden=frame, names=namespace)
    rows = {key: Row([key])}
    holder = explain([key], heap, roots, rows=rows, all_places=True)[key]
    assert f", and {VIEWS - 1} more there" in holder.path
    assert holder.advice == line


def test_no_line_switches_a_debugger_off(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = contextlib.nullcontext().__exit__  # a library's function that takes any arguments
    for name in ("trace", "profile"):
        for owner, attribute in ((sys, f"get{name}"), (threading, f"_{name}_hook")):
            value = (lambda: tool) if owner is sys else tool
            monkeypatch.setattr(owner, attribute, value)
        root = Root.of_module("threading", f"_{name}_hook", "threading")
        assert root.cut is None
    assert id(tool) not in Registries.read({}).registered


def test_a_users_own_tracer_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*arguments: object) -> None:
        pass

    monkeypatch.setattr(sys, "getprofile", lambda: profile)
    root = Registries.read({}).registered[id(profile)]
    assert root.cut is not None
    assert root.cut.statement == "import sys; sys.setprofile(None)"

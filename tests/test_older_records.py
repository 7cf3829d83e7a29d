"""New data in many older objects of one list has one row, and one line removes it from all."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from tests.older_records import OLDER_RECORDS, assert_no_leaks, record_rows
from tests.steps import SHOW_LIBRARIES, experiment, run_cells, tidied_kernel

# Freed, because the data of a test would take the free pages of an earlier one.
shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", hides_libraries=True)


class Case(NamedTuple):
    """Older records, new data in them, and the row of the report."""

    setup: str
    """Makes ``records``."""
    experiment: str
    objects: int
    line: str


CASES = {
    "each dict": Case(
        "records = dicts(1500)",
        "for each in records: each['words'] = words(30)",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "many dicts": Case(
        "records = dicts(5000)",
        "for each in records: each['words'] = words(30)",
        objects=5000,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "two keys": Case(
        "records = dicts(1500)",
        "for each in records: each['words'], each['more'] = words(30), words(20)",
        objects=3000,
        line='for _item in records: del _item["more"]; del _item["words"]; del _item',
    ),
    "every second dict": Case(
        "records = dicts(3000)",
        "for each in records[::2]: each['words'] = words(30)",
        objects=1500,
        line='for _item in records: _item.pop("words", None); del _item',
    ),
    "dicts in a row": Case(
        "records = dicts(3000)",
        "for each in records[100:1600]: each['words'] = words(30)",
        objects=1500,
        line='for _item in records[100:1600]: del _item["words"]; del _item',
    ),
    "few instances": Case(
        "records = instances(Document, 60)",
        "for each in records: each.words = words(1000)",
        objects=60,
        line="for _item in records: _item.words = None; del _item",
    ),
    "instances": Case(
        "records = instances(Document, 1500)",
        "for each in records: each.words = words(30)",
        objects=1500,
        line="for _item in records: _item.words = None; del _item",
    ),
    "every second instance": Case(
        "records = instances(Document, 3000)",
        "for each in records[::2]: each.words = words(30)",
        objects=1500,
        line='for _item in records: vars(_item).pop("words", None); del _item',
    ),
    "texts in dicts": Case(
        "records = dicts(1500)",
        "for each in records: each['words'] = texts(each['number'])",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "texts in dicts with one value": Case(
        "records = [{'text': f'text {each}'} for each in range(1500)]",
        "for each in records: each['words'] = texts(each['text'])",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "bytes in every second dict": Case(
        "records = dicts(1500)",
        "for each in records[::2]: each['words'] = texts(each['number']).encode()",
        objects=750,
        line='for _item in records: _item.pop("words", None); del _item',
    ),
    "texts in instances": Case(
        "records = instances(Document, 1500)",
        "for each in records: each.words = texts(each.number)",
        objects=1500,
        line="for _item in records: _item.words = None; del _item",
    ),
    "texts in slots": Case(
        "records = instances(Slotted, 1500)",
        "for each in records: each.words = texts(each.number)",
        objects=1500,
        line="for _item in records: _item.words = None; del _item",
    ),
    "dicts of texts": Case(
        "records = dicts(1500)",
        "for each in records: each['words'] = {'name': texts(each['number']), 'number': 1}",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "tuples of texts in dicts with one value": Case(
        "records = [{'text': f'text {each}'} for each in range(1500)]",
        "for each in records: each['words'] = texts(each['text']), 1",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "a list of a few words elsewhere": Case(
        """
        records = dicts(1500)
        later = {}
        """,
        """
        later['words'] = {'more': words(2)}
        for each in records: each['words'] = words(30)
        """,
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "lists and texts": Case(
        "records = dicts(1500)",
        "for each in records: each['words'], each['more'] = words(30), texts(each['number'])",
        objects=3000,
        line='for _item in records: del _item["more"]; del _item["words"]; del _item',
    ),
    "arrays in dicts": Case(
        "records = dicts(1500)",
        "for each in records: each['words'] = np.ones(5000)",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "arrays in instances with older arrays": Case(
        """
        records = instances(Document, 1500)
        for each in records: each.older = np.ones(100)
        del each
        """,
        "for each in records: each.words = np.ones(5000)",
        objects=1500,
        line="for _item in records: _item.words = None; del _item",
    ),
    "arrays in place of the first values": Case(
        "records = [{'words': None, **each} for each in dicts(1500)]",
        "for each in records: each['words'] = np.ones(5000)",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "texts in place of the first values": Case(
        "records = [{'words': None, **each} for each in dicts(1500)]",
        "for each in records: each['words'] = texts(each['number'])",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "arrays in tracked dicts": Case(
        """
        records = dicts(1500)
        for each in records: each['tags'] = [each['text']]
        del each
        """,
        "for each in records: each['words'] = np.ones(5000)",
        objects=1500,
        line='for _item in records: del _item["words"]; del _item',
    ),
    "instances with slots": Case(
        "records = instances(Slotted, 1500)",
        "for each in records: each.words = words(30)",
        objects=1500,
        line="for _item in records: _item.words = None; del _item",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_takes_new_data_out_of_older_records(notebook: Kernel, name: str) -> None:
    case = CASES[name]
    run_cells(
        notebook,
        OLDER_RECORDS,
        case.setup,
        "before = [stays(each) for each in records]",
        experiment(case.experiment),
    )
    assert record_rows(notebook) == [(case.objects, "notebook variable records", case.line)]
    run_cells(notebook, case.line)
    assert not notebook.value("any(map(has_new, records))")
    assert notebook.value("[stays(each) for each in records] == before")
    assert_no_leaks(notebook)


@pytest.mark.parametrize(
    "made", ["({'kind': 'a', 'words': words(30)})", "((words(30), 'a'))"], ids=["dict", "tuple"]
)
def test_records_in_the_places_of_dead_ones_are_new(notebook: Kernel, made: str) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        inbox = [{"kind": "a", "number": each} for each in range(3000)]
        inbox += [(each, "a") for each in range(3000)]
        out = []
        """,
        experiment(f"while inbox: inbox.pop(); out.append{made}"),
    )
    assert record_rows(notebook) == [(6000, "notebook variable out", "out.clear()")]


def test_an_older_value_under_the_same_key_stays(notebook: Kernel) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        records = dicts(3000)
        for each in records[1::20]: each["words"] = ["older"]
        """,
        """
        %%experiment e
        for each in records[::2]: each["words"], each[("a", "key")] = words(30), words(30)
        """,
    )
    for row in record_rows(notebook):
        if row.line.startswith("for "):
            run_cells(notebook, row.line)
    assert notebook.value("all(each['words'] == ['older'] for each in records[1::20])")


@pytest.mark.parametrize("slots", ["('words',)", "('__dict__',)"])
def test_a_slot_of_some_records_is_removed_in_words(notebook: Kernel, slots: str) -> None:
    """``vars`` of a record has no slots."""
    run_cells(notebook, OLDER_RECORDS, f"class Part(Slotted): __slots__ = {slots}")
    run_cells(
        notebook,
        "records = [Part() for _ in range(3000)]",
        experiment("for each in records[::2]: each.words = words(30)"),
    )
    (row,) = record_rows(notebook)
    assert row.line == "remove it from all of these"


def test_lists_of_ipython_are_in_no_row(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES, OLDER_RECORDS, "records = instances(Document, 100)")
    for number in range(3):  # IPython's history makes new lists as it goes
        run_cells(notebook, experiment(f"for each in records: each.words{number} = words(600)"))
        line = f"for _item in records: _item.words{number} = None; del _item"
        assert record_rows(notebook) == [(100, "notebook variable records", line)]


def test_older_elements_of_a_set_stay(notebook: Kernel) -> None:
    """A call that removes many elements gives the remaining ones other positions."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "kept = {'alpha', 'beta'}",
        experiment("kept.update(f's{number}' for number in range(50_000))"),
    )
    (row,) = record_rows(notebook)
    run_cells(notebook, row.line)
    assert notebook.value("kept == {'alpha', 'beta'}")


def test_a_large_array_in_one_older_record_is_named(notebook: Kernel) -> None:
    run_cells(notebook, OLDER_RECORDS, "records = [{'tags': [number]} for number in range(1000)]")
    run_cells(notebook, experiment("records[7]['words'] = np.ones(1 << 20)"))
    assert record_rows(notebook) == [
        (1, 'notebook variable records[7]["words"]', 'del records[7]["words"]')
    ]
    run_cells(notebook, "del records")


def test_a_row_s_holder_is_the_outermost_object(notebook: Kernel) -> None:
    """It was "notebook variable older, notebook variable older[1], and 2900 more there"."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "older = [{'number': 1}]; items = []",
        """
        %%experiment e
        items = [{"words": np.ones(500)} for _ in range(3000)]
        older.extend(items[each] for each in range(3000))
        """,
    )
    (row,) = record_rows(notebook)
    assert (row.path, row.line) == ("notebook variable older", "del older[1:]")
    run_cells(notebook, "older.clear()")


def test_a_leak_is_reached_after_twenty_thousand_arrays(notebook: Kernel) -> None:
    """The search asks about all of them at once, the largest rows first."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "box, lists, dicts = [], [], {}",
        """
        %%experiment a
        box.append({"words": np.ones(1 << 18)})
        for each in range(10_000): lists.append({"words": np.ones(500), "number": each})
        """,
        experiment("for each in range(10_000): dicts[each] = [np.ones(500), each]", name="b"),
    )
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert "held by notebook variable box[0] · to free it: del box[0]" in leaks
    run_cells(notebook, "box.clear(); lists.clear(); dicts.clear()")


def test_the_records_of_a_leak_are_listed_once(notebook: Kernel) -> None:
    """Once for each record took 15 s for 10,000 of them."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        from ipygpumem.shell.searches.survivors import Survivors
        calls = []
        list_records = Survivors._identities_of_records
        def list_and_note(self):
            calls.append(1)
            return list_records(self)
        Survivors._identities_of_records = list_and_note
        box = [{"number": 1}]
        """,
        experiment("made = [{'words': np.ones(2000)} for _ in range(300)]; box.extend(made)"),
    )
    run_cells(
        notebook,
        """
        calls.clear()
        %gpumem leaks
        """,
    )
    # Not once for each of 300 objects.
    assert 0 < notebook.value("len(calls)") < 10
    run_cells(notebook, "Survivors._identities_of_records = list_records; box.clear()")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "many[59_000]['words'] = np.ones(1 << 20)",
            (1, 'notebook variable many[59000]["words"]', 'del many[59000]["words"]'),
        ),
        (
            "many[59_000]['words'] = 'text ' * (1 << 20)",
            (1, 'notebook variable many[59000]["words"]', 'del many[59000]["words"]'),
        ),
    ],
    ids=["array", "text"],
)
def test_new_memory_in_one_of_many_older_records_is_named(
    kernel: Kernel, code: str, expected: tuple[int, str, str]
) -> None:
    """It was "not named: no known object and no free page accounts for them"."""
    run_cells(
        kernel,
        "%load_ext ipygpumem",
        OLDER_RECORDS,
        """
        import ctypes
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # glibc maps each block of a megabyte
        many = [{'text': str(each), 'list': [each]} for each in range(60_000)]
        """,
        experiment(code),
    )
    assert record_rows(kernel) == [expected]


def test_lists_in_few_older_objects_are_named(notebook: Kernel) -> None:
    """Each of them is too small for a row."""
    run_cells(notebook, OLDER_RECORDS, "records = instances(Document, 20)")
    run_cells(notebook, experiment("for each in records: each.words = words(2000)"))
    (row,) = record_rows(notebook)
    assert (row.objects, row.path) == (20, "notebook variable records")
    run_cells(notebook, row.line)
    assert not notebook.value("any(map(has_new, records))")


_IMPORT = """
number = len(sys.modules)
sys.modules.update((f"made_{number + each}", types.ModuleType("made")) for each in range(100))
""".strip()
"""Stands for the import of a large library."""


def test_data_in_older_records_is_named_despite_an_import(notebook: Kernel) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        import sys, types
        records = dicts(1500)
        """,
    )
    inside = f"{_IMPORT}\nfor each in records: each['words'] = words(100)"
    run_cells(notebook, experiment(inside))
    line = 'for _item in records: del _item["words"]; del _item'
    assert record_rows(notebook) == [(1500, "notebook variable records", line)]


def test_an_import_is_not_asked_for_its_many_small_objects(notebook: Kernel) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        import sys, types, json
        json.JSONDecoder.kept = []
        del json
        """,
    )
    inside = f"{_IMPORT}\nsys.modules['json'].JSONDecoder.kept += map(words, [3000] * 100)"
    run_cells(notebook, experiment(inside))
    assert record_rows(notebook) == []


_FAR_FROM_NAMES = """
class Store:
    def __init__(self): self.metrics = {"loss": []}
class Trainer:
    def __init__(self): self.store = Store()
trainers = [Trainer()]
vars(trainers[0]), vars(trainers[0].store)  # gives each a dict
def appender():
    kept = []
    def append(item): kept.append(item)
    return append
append = appender()
"""
"""Makes older lists that are more than three references away from a name."""


@pytest.mark.parametrize(
    ("put", "place", "options"),
    [
        pytest.param(
            "trainers[0].store.metrics['loss'].append",
            'trainers[0].store.metrics["loss"]',
            "",
            id="a list of an object",
        ),
        pytest.param("append", "append.__closure__[0].cell_contents", "", id="a list of a closure"),
        pytest.param(
            "append",
            "append.__closure__[0].cell_contents",
            "--keep more",
            id="a list of a closure, next to a kept one",
        ),
    ],
)
def test_small_arrays_far_from_a_name_are_left(
    notebook: Kernel, put: str, place: str, options: str
) -> None:
    run_cells(notebook, OLDER_RECORDS, _FAR_FROM_NAMES)
    code = f"""
        more = [np.ones(1 << 14) for _ in range(20)]
        for _ in range(40): {put}(np.ones(1 << 14))
        """
    run_cells(notebook, experiment(code, options=options))
    assert [(row.objects, row.line) for row in record_rows(notebook)] == [(40, f"{place}.clear()")]
    run_cells(notebook, f"{place}.clear()")
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_an_older_text_key_of_a_dict_stays(notebook: Kernel) -> None:
    """The collector lists it only once the dict has another kind of key."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "records = {'a': 1}",
        experiment("for each in range(30): records[each] = np.ones(1 << 14)"),
    )
    (row,) = record_rows(notebook)
    assert row.objects == 30
    run_cells(notebook, row.line)
    assert notebook.value("records") == {"a": 1}


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        pytest.param(
            "records, _item = dicts(1500), ['mine']",
            "for each in records: each['_item'] = words(30)",
            'for _item2 in records: del _item2["_item"]; del _item2',
            id="_item",
        ),
        pytest.param(
            """
            _item = records = dicts(1500)
            del records
            """,
            "for each in _item: each['words'] = words(30)",
            'for _item2 in _item: del _item2["words"]; del _item2',
            id="_item as the list",
        ),
        pytest.param(
            """
            records = {'a': 1}
            _key = 'mine'
            """,
            "for each in range(30): records[each] = np.ones(1 << 14)",
            "for _key2 in list(records)[1:]: del records[_key2], _key2",
            id="_key",
        ),
        pytest.param(
            """
            import collections
            records = collections.deque([1])
            _position = 'mine'
            """,
            "for each in range(30): records.append(np.ones(1 << 14))",
            "for _position2 in range(30, 0, -1): del records[_position2], _position2",
            id="_position",
        ),
    ],
)
def test_a_loop_in_a_line_binds_no_variable_of_the_user(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    run_cells(notebook, OLDER_RECORDS, older, experiment(code))
    assert [row.line for row in record_rows(notebook)] == [line]
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert line[:30] in leaks
    mine = "[globals().get(name) for name in ('_key', '_position', '_item')]"
    before = notebook.value(f"list(map(id, {mine}))")
    run_cells(notebook, line)
    assert notebook.value(f"list(map(id, {mine}))") == before
    assert_no_leaks(notebook)
    run_cells(notebook, "_key = _position = _item = None; del _key, _position, _item")

"""New data in many older objects of one list has one row, and one line removes it from all."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.paths.ages import Ages, LearnedAges
from tests.steps import SHOW_LIBRARIES, tidied_kernel, works

# Freed, because the data of a test would take the free pages of an earlier one.
shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", hides_libraries=True)
_SETUP = """
import numpy as np
def rows():
    from ipygpumem.shell.app import app_of
    survivors = app_of(get_ipython()).experiments.finished[-1].survivors
    return [(row.objects, row.holder.path, row.holder.advice) for row in survivors]
class Document:
    pass
class Slotted:
    __slots__ = ("number", "words")
def dicts(number):
    return [{"number": each, "text": f"text {each}"} for each in range(number)]
def instances(kind, number):
    made = [kind() for _ in range(number)]
    for position, each in enumerate(made):
        each.number = position
    return made
def texts(number):
    return f"{number} " * 1000
def words(number):
    return [str(each) for each in range(1000, 1000 + number)]
def stays(record):
    return record["text"] if type(record) is dict else record.number
def has_new(record):
    if type(record) is dict:
        return not record.keys() <= {"number", "text", "tags"}
    return getattr(record, "words", None) is not None
"""
"""Makes older records."""


class Case(NamedTuple):
    """Older records, new data in them, and the row of the report."""

    records: str
    experiment: str
    objects: int
    line: str


CASES = {
    "each dict": Case(
        "dicts(1500)",
        "for each in records: each['words'] = words(30)",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "many dicts": Case(
        "dicts(5000)",
        "for each in records: each['words'] = words(30)",
        5000,
        'for _item in records: del _item["words"]; del _item',
    ),
    "two keys": Case(
        "dicts(1500)",
        "for each in records: each['words'], each['more'] = words(30), words(20)",
        3000,
        'for _item in records: del _item["more"]; del _item["words"]; del _item',
    ),
    "every second dict": Case(
        "dicts(3000)",
        "for each in records[::2]: each['words'] = words(30)",
        1500,
        'for _item in records: _item.pop("words", None); del _item',
    ),
    "dicts in a row": Case(
        "dicts(3000)",
        "for each in records[100:1600]: each['words'] = words(30)",
        1500,
        'for _item in records[100:1600]: del _item["words"]; del _item',
    ),
    "few instances": Case(
        "instances(Document, 60)",
        "for each in records: each.words = words(1000)",
        60,
        "for _item in records: _item.words = None; del _item",
    ),
    "instances": Case(
        "instances(Document, 1500)",
        "for each in records: each.words = words(30)",
        1500,
        "for _item in records: _item.words = None; del _item",
    ),
    "every second instance": Case(
        "instances(Document, 3000)",
        "for each in records[::2]: each.words = words(30)",
        1500,
        'for _item in records: vars(_item).pop("words", None); del _item',
    ),
    "texts in dicts": Case(
        "dicts(1500)",
        "for each in records: each['words'] = texts(each['number'])",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "texts in dicts with one value": Case(
        "[{'text': f'text {each}'} for each in range(1500)]",
        "for each in records: each['words'] = texts(each['text'])",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "bytes in every second dict": Case(
        "dicts(1500)",
        "for each in records[::2]: each['words'] = texts(each['number']).encode()",
        750,
        'for _item in records: _item.pop("words", None); del _item',
    ),
    "texts in instances": Case(
        "instances(Document, 1500)",
        "for each in records: each.words = texts(each.number)",
        1500,
        "for _item in records: _item.words = None; del _item",
    ),
    "texts in slots": Case(
        "instances(Slotted, 1500)",
        "for each in records: each.words = texts(each.number)",
        1500,
        "for _item in records: _item.words = None; del _item",
    ),
    "dicts of texts": Case(
        "dicts(1500)",
        "for each in records: each['words'] = {'name': texts(each['number']), 'number': 1}",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "tuples of texts in dicts with one value": Case(
        "[{'text': f'text {each}'} for each in range(1500)]",
        "for each in records: each['words'] = texts(each['text']), 1",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "a list of a few words elsewhere": Case(
        "dicts(1500)\nlater = {}",
        "later['words'] = {'more': words(2)}\nfor each in records: each['words'] = words(30)",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "lists and texts": Case(
        "dicts(1500)",
        "for each in records: each['words'], each['more'] = words(30), texts(each['number'])",
        3000,
        'for _item in records: del _item["more"]; del _item["words"]; del _item',
    ),
    "arrays in dicts": Case(
        "dicts(1500)",
        "for each in records: each['words'] = np.ones(5000)",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "arrays in instances with older arrays": Case(
        "instances(Document, 1500)\nfor each in records: each.older = np.ones(100)\ndel each",
        "for each in records: each.words = np.ones(5000)",
        1500,
        "for _item in records: _item.words = None; del _item",
    ),
    "arrays in place of the first values": Case(
        "[{'words': None, **each} for each in dicts(1500)]",
        "for each in records: each['words'] = np.ones(5000)",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "texts in place of the first values": Case(
        "[{'words': None, **each} for each in dicts(1500)]",
        "for each in records: each['words'] = texts(each['number'])",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "arrays in tracked dicts": Case(
        "dicts(1500)\nfor each in records: each['tags'] = [each['text']]\ndel each",
        "for each in records: each['words'] = np.ones(5000)",
        1500,
        'for _item in records: del _item["words"]; del _item',
    ),
    "instances with slots": Case(
        "instances(Slotted, 1500)",
        "for each in records: each.words = words(30)",
        1500,
        "for _item in records: _item.words = None; del _item",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_takes_new_data_out_of_older_records(notebook: Kernel, name: str) -> None:
    case = CASES[name]
    works(
        notebook,
        _SETUP,
        f"records = {case.records}",
        "before = [stays(each) for each in records]",
        f"%%experiment e\n{case.experiment}",
    )
    assert notebook.value("rows()") == [(case.objects, "notebook variable records", case.line)]
    works(notebook, case.line)
    assert not notebook.value("any(map(has_new, records))")
    assert notebook.value("[stays(each) for each in records] == before")
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks


@pytest.mark.parametrize(
    "made", ["({'kind': 'a', 'words': words(30)})", "((words(30), 'a'))"], ids=["dict", "tuple"]
)
def test_records_in_the_places_of_dead_ones_are_new(notebook: Kernel, made: str) -> None:
    works(
        notebook,
        _SETUP,
        """
        inbox = [{"kind": "a", "number": each} for each in range(3000)]
        inbox += [(each, "a") for each in range(3000)]
        out = []
        """,
        f"%%experiment e\nwhile inbox: inbox.pop(); out.append{made}",
    )
    assert notebook.value("rows()") == [(6000, "notebook variable out", "out.clear()")]


def test_an_older_value_under_the_same_key_stays(notebook: Kernel) -> None:
    works(
        notebook,
        _SETUP,
        """
        records = dicts(3000)
        for each in records[1::20]: each["words"] = ["older"]
        """,
        """%%experiment e
for each in records[::2]: each["words"], each[("a", "key")] = words(30), words(30)
""",
    )
    for _, _, line in notebook.value("rows()"):
        if line.startswith("for "):
            works(notebook, line)
    assert notebook.value("all(each['words'] == ['older'] for each in records[1::20])")


@pytest.mark.parametrize("slots", ["('words',)", "('__dict__',)"])
def test_a_slot_of_some_records_is_removed_in_words(notebook: Kernel, slots: str) -> None:
    """``vars`` of a record has no slots."""
    works(notebook, _SETUP, f"class Part(Slotted): __slots__ = {slots}")
    works(
        notebook,
        "records = [Part() for _ in range(3000)]",
        "%%experiment e\nfor each in records[::2]: each.words = words(30)",
    )
    ((_, _, line),) = notebook.value("rows()")
    assert line == "remove it from all of these"


def test_lists_of_ipython_are_in_no_row(notebook: Kernel) -> None:
    works(notebook, SHOW_LIBRARIES, _SETUP, "records = instances(Document, 100)")
    for number in range(3):  # IPython's history makes new lists as it goes
        works(notebook, f"%%experiment e\nfor each in records: each.words{number} = words(600)")
        line = f"for _item in records: _item.words{number} = None; del _item"
        assert notebook.value("rows()") == [(100, "notebook variable records", line)]


def test_older_elements_of_a_set_stay(notebook: Kernel) -> None:
    """A call that removes many elements gives the remaining ones other positions."""
    works(
        notebook,
        _SETUP,
        "kept = {'alpha', 'beta'}",
        "%%experiment e\nkept.update(f's{number}' for number in range(50_000))",
    )
    ((_, _, line),) = notebook.value("rows()")
    works(notebook, line)
    assert notebook.value("kept == {'alpha', 'beta'}")


def test_a_large_array_in_one_older_record_is_named(notebook: Kernel) -> None:
    works(notebook, _SETUP, "records = [{'tags': [number]} for number in range(1000)]")
    works(notebook, "%%experiment e\nrecords[7]['words'] = np.ones(1 << 20)")
    assert notebook.value("rows()") == [
        (1, 'notebook variable records[7]["words"]', 'del records[7]["words"]')
    ]
    works(notebook, "del records")


_MANY_OLDER = {
    "after many None": ("[None] * 100_000", "many[90_000] = ('t', [np.ones(1 << 21)])"),
    "after many records": (
        "[{'text': str(each), 'list': [each]} for each in range(60_000)]",
        "many[59_000]['words'] = [np.ones(1 << 21)]",
    ),
    "behind many keys": (
        "{(each, 'key'): None for each in range(100_000)}",
        "many[(90_000, 'key')] = ('t', [np.ones(1 << 21)])",
    ),
}


@pytest.mark.parametrize("name", _MANY_OLDER)
def test_an_older_array_deep_among_many_objects_is_in_no_row(notebook: Kernel, name: str) -> None:
    """Its line deleted it. The start of an experiment must not take long: it does not look at each
    object.
    """
    many, put_array = _MANY_OLDER[name]
    works(
        notebook,
        _SETUP,
        f"import mmap; hold = []; many = {many}; {put_array}",
        "%gpumem free",  # free pages may hide that something has grown
        """%%experiment e
block = mmap.mmap(-1, 32 << 20)
block.write(bytes(32 << 20))
hold.append(block)
""",
    )
    assert notebook.value("rows()") == [(1, "notebook variable hold[0]", "del hold[0]")]
    works(notebook, "hold.clear(); del many")


def test_an_array_of_an_earlier_experiment_is_not_listed_again(notebook: Kernel) -> None:
    """The lists of our search referred to it, too: it seemed to be in a new container."""
    works(
        notebook,
        _SETUP,
        "many = [[{'number': each}] for each in range(60_000)]; objects = instances(Document, 9)",
        """%%experiment first
def make_function(array):
    return lambda: array
many[10][0]["function"] = make_function(np.ones(1 << 22))
""",
        """%%experiment second
objects[7].words = np.ones(15 << 18)
objects[8].words = np.ones(1 << 19)
""",
    )
    ((_, path, _),) = notebook.value("rows()")
    assert path == "notebook variable objects[…].words"
    works(notebook, "del many, objects")


def test_a_row_s_holder_is_the_outermost_object(notebook: Kernel) -> None:
    """It was "notebook variable older, notebook variable older[1], and 2900 more there"."""
    works(
        notebook,
        _SETUP,
        "older = [{'number': 1}]; items = []",
        """%%experiment e
items = [{"words": np.ones(500)} for _ in range(3000)]
older.extend(items[each] for each in range(3000))
""",
    )
    ((_, path, line),) = notebook.value("rows()")
    assert (path, line) == ("notebook variable older", "del older[1:]")
    works(notebook, "older.clear()")


def test_a_leak_is_reached_after_twenty_thousand_arrays(notebook: Kernel) -> None:
    """The search asks about all of them at once, the largest rows first."""
    works(
        notebook,
        _SETUP,
        "box, lists, dicts = [], [], {}",
        """%%experiment a
box.append({"words": np.ones(1 << 18)})
for each in range(10_000): lists.append({"words": np.ones(500), "number": each})
""",
        "%%experiment b\nfor each in range(10_000): dicts[each] = [np.ones(500), each]",
    )
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert "held by notebook variable box[0] · to free it: del box[0]" in leaks
    works(notebook, "box.clear(); lists.clear(); dicts.clear()")


def test_the_records_of_a_leak_are_listed_once(notebook: Kernel) -> None:
    """Once for each record took 15 s for 10,000 of them."""
    works(
        notebook,
        _SETUP,
        """
        from ipygpumem.shell.survivors import Survivors
        calls = []
        list_records = Survivors._identities_of_records
        def list_and_note(self):
            calls.append(1)
            return list_records(self)
        Survivors._identities_of_records = list_and_note
        box = [{"number": 1}]
        """,
        "%%experiment e\nmade = [{'words': np.ones(2000)} for _ in range(300)]; box.extend(made)",
    )
    works(notebook, "calls.clear()\n%gpumem leaks")
    assert 0 < notebook.value("len(calls)") < 10
    works(notebook, "Survivors._identities_of_records = list_records; box.clear()")


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
    works(
        kernel,
        "%load_ext ipygpumem",
        _SETUP,
        """
        import ctypes
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # glibc maps each block of a megabyte
        many = [{'text': str(each), 'list': [each]} for each in range(60_000)]
        """,
        f"%%experiment e\n{code}",
    )
    assert kernel.value("rows()") == [expected]


@pytest.mark.parametrize(
    "code",
    [
        "holder = Document(); holder.words = many[59_000]['words']; many[5]['new'] = holder",
        "many[5]['new'] = (many[59_000]['words'], np.ones(1 << 20))",
    ],
    ids=["instance", "tuple"],
)
def test_no_line_removes_an_older_array_that_has_a_new_holder(kernel: Kernel, code: str) -> None:
    works(
        kernel,
        _SETUP,
        """
        many = [{'number': each, 'list': [each]} for each in range(60_000)]
        many[59_000]['words'] = np.ones(1 << 20)
        """,
        f"%%experiment e\n{code}",
    )
    for _, _, line in kernel.value("rows()"):
        works(kernel, line)
    assert kernel.value("len(many[59_000]['words'])") == 1 << 20


@pytest.mark.parametrize(
    ("records", "older", "new"),
    [
        (
            "[{'number': each} for each in range(60_000)]",
            "many[59_000]['older']",
            "many[59_000]['list']",
        ),
        ("instances(Document, 60_000)", "many[59_000].older", "vars(many[59_000])['list']"),
    ],
    ids=["dict", "attributes"],
)
def test_an_older_dict_that_gets_a_list_keeps_its_older_array(
    kernel: Kernel, records: str, older: str, new: str
) -> None:
    """The collector tracks the dict since then only, so that it seems to be new."""
    works(
        kernel,
        _SETUP,
        f"many = {records}\n{older} = np.ones(1 << 18)",
        f"%%experiment e\n{new} = [np.ones(1 << 20)]",
    )
    for _, _, line in kernel.value("rows()"):
        works(kernel, line)
    assert kernel.value(f"len({older})") == 1 << 18


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        ("{'buffer': bytearray(b'head')}", "records[3]['buffer'].extend(bytes(1 << 24))", ""),
        ("bytearray(b'head')", "records[3].extend(bytes(1 << 24))", ""),
        ("{}", "records[3]['new'] = np.ones(1 << 20)", 'del records[3]["new"]'),
        ("{}", "records[3]['new'] = [np.ones(1 << 20)]", 'del records[3]["new"]'),
        (
            "{'new': None, 'id': 1, 'text': 'a'}",
            "del records[3]['new']; records[3]['new'] = [np.ones(1 << 20)]",
            'del records[3]["new"]',
        ),
    ],
)
def test_an_older_item_that_changes_stays(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """``del records[3]`` removed it with its older data."""
    works(notebook, _SETUP, f"records = [{older} for _ in range(300)]", f"%%experiment e\n{code}")
    assert [row[2] for row in notebook.value("rows()")] == ([line] if line else [])


@pytest.mark.parametrize(
    "record",
    [
        "[1, large()]",
        "{'number': 1, 'words': large()}",
        "(1, [large()])",
        "np.array([large(), 1], object)",
    ],
)
@pytest.mark.parametrize("number", [10, 1500])
def test_a_record_in_an_older_one_is_removed_as_a_whole(
    notebook: Kernel, number: int, record: str
) -> None:
    """The line removed the array alone, so that a broken record remained."""
    works(
        notebook,
        _SETUP,
        f"large = lambda: np.ones(1 << 21)\nrecords = dicts({number})",
        f"%%experiment e\nrecords[3]['new'] = {record}",
    )
    line = 'del records[3]["new"]'
    assert [row[2] for row in notebook.value("rows()")] == [line]
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert line in leaks
    works(notebook, line)
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks


def test_an_older_dict_in_an_older_record_keeps_its_older_data(notebook: Kernel) -> None:
    """The collector tracks it only since it has a list, so that it seems to be new."""
    works(
        notebook,
        _SETUP,
        "records = [{'number': each, 'inner': {'older': np.ones(each)}} for each in range(1500)]",
        "%%experiment e\nrecords[3]['inner']['new'] = [np.ones(1 << 21)]",
    )
    ((_, _, line),) = notebook.value("rows()")
    assert line.startswith('del records[3]["inner"]["new"]')


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        ("words(1000)", "records[500] = texts(1) * 1000", "records[500] = None"),
        (
            "{each: each for each in words(1000)}",
            "records['1500'] = texts(1) * 1000",
            'del records["1500"]',
        ),
        (
            "words(1000)",
            "for each in range(100, 200): records[each] = texts(each) * 10",
            "records[100:200] = [None] * 100",
        ),
        (
            "dicts(1000)",
            "for each in range(100, 200): records[each] = {'words': texts(each) * 10}",
            "records[100:200] = [None] * 100",
        ),
        (
            "dicts(1000)",
            "for each in range(100, 200): records[each] = {'words': [np.ones(1 << 13)]}",
            "records[100:200] = [None] * 100",
        ),
    ],
)
def test_new_data_in_the_places_of_older_items_is_named(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """It was "not named", but for that which the collector tracks. The line keeps the places of
    later items.
    """
    works(notebook, _SETUP, f"records = {older}", f"%%experiment e\n{code}")
    assert [row[2] for row in notebook.value("rows()")] == [line]
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert line in leaks
    works(notebook, line)
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        ("[None] * 10", "records[3] = large()", "records[3] = None"),
        ("[None] * 10", "records[:] = map(large, range(10))", "records[:] = [None] * len(records)"),
        (
            "[None] * 10",
            "for each in (1, 2, 3, 5, 7, 8): records[each] = large()",
            "records[1:4] = [None] * 3; records[5] = None; records[7:9] = [None] * 2",
        ),
        (
            "dicts(40)",
            "for each in range(0, 40, 4): records[each] = large()",
            "records[0:37:4] = [None] * 10",
        ),
        (
            "dicts(40)",
            "for each in (0, 3, 7, 9, 14, 22): records[each] = large()",
            "[records.__setitem__(place, None) for place in (0, 3, 7, 9, 14, 22)];",
        ),
        (
            "[None] * 300",
            "for each in range(0, 300, 3): records[each] = large()",
            "records[0:298:3] = [None] * 100",
        ),
        (
            "[None] * 10",
            "records[2] = records[7] = large()",
            "records[7] = None; records[2] = None",
        ),
        (
            "[None] * 300",
            "one = large()\nfor each in range(300):\n"
            "    if each % 7 in (1, 2, 4): records[each] = one",
            "records[:] = [None if item is records[1] else item for item in records]",
        ),
        ("[1, [None] * 10]", "records[1][3] = large()", "records[1][3] = None"),
        # These lists are longer than they were: nothing had the places of the new items.
        ("[None] * 10", "records.append(large())", "del records[10]"),
        ("dicts(300)", "records.append(large())", "del records[300]"),
        ("[]", "records += map(large, range(10))", "records.clear()"),
    ],
)
def test_a_line_moves_no_later_item_of_a_list(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """``del records[3]`` gave each later result the number of another step."""
    works(
        notebook,
        _SETUP,
        """
        def large(number=0):
            return np.ones(1 << 19) + number
        """,
        f"records = {older}",
        f"%%experiment e\n{code}",
    )
    assert [row[2] for row in notebook.value("rows()")] == [line]
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert line[:40] in leaks
    works(notebook, line)
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks


def test_a_list_at_the_address_of_a_dead_one_is_not_that_list() -> None:
    """``records = []`` was taken for an earlier list of ten items."""
    items = list(range(10))
    key = id(items)
    was_empty = Ages(
        are_known=True, length_before=lambda _: 0, learned=LearnedAges(lengths={key: 10})
    )
    is_new = Ages(are_known=True, new=lambda: {key}, learned=LearnedAges(lengths={key: 10}))
    for ages in (was_empty, is_new):
        assert not ages.learn_length(items)
        assert not ages.learned.lengths
    is_new.learned.columns[key] = ['"a"']
    assert is_new.learn_columns(items) == ()


@pytest.mark.parametrize(
    "owner", ["bytearray(1 << 24)", "array.array('d', bytes(1 << 24))", "written(1 << 24)"]
)
def test_memory_that_another_object_owns_has_all_of_its_holders(
    notebook: Kernel, owner: str
) -> None:
    """The line removed the NumPy array alone, which freed nothing."""
    works(
        notebook,
        _SETUP,
        """
        import array, mmap
        def written(size):
            owner = mmap.mmap(-1, size)
            owner[:] = b"1" * size
            return owner
        records = dicts(10)
        """,
        f"%%experiment e\nowner = records[3]['owner'] = {owner}\n"
        "records[4]['new'] = np.frombuffer(owner, 'u1')",
    )
    ((_, _, line),) = notebook.value("rows()")
    assert line == 'del records[4]["new"]; del records[3]["owner"]'
    # It said "del records", which drops the older ones, too.
    (why,) = works(notebook, '%gpumem why records[4]["new"]').reports("why")
    assert line in why


def test_an_array_deep_in_older_objects_is_named(notebook: Kernel) -> None:
    works(notebook, _SETUP, "deep = [[{'inner': [Document()]}]]; deep[0][0]['inner'][0].all = [1]")
    works(notebook, "%%experiment e\ndeep[0][0]['inner'][0].all.append(np.ones(1 << 19))")
    ((_, path, line),) = notebook.value("rows()")
    assert path == 'notebook variable deep[0][0]["inner"][0].all[1]'
    assert line == 'del deep[0][0]["inner"][0].all[1]'
    works(notebook, "del deep")


@pytest.mark.parametrize(
    ("older", "first", "second"),
    [
        ("{'old': 1}", "older['first']", "older['second']"),
        ("Slotted()", "older.number", "older.words"),
        ("types.SimpleNamespace(old=1)", "older.first", "older.second"),
    ],
)
def test_one_line_removes_all_records_of_one_older_object(
    notebook: Kernel, older: str, first: str, second: str
) -> None:
    works(notebook, _SETUP, f"import types, weakref\nolder, refs = {older}, []")
    works(
        notebook,
        f"""
        %%experiment e
        array = np.ones(1 << 19)
        {first} = (1, array)
        {second} = [(array, 2)]
        refs.append(weakref.ref(array))
        """,
    )
    ((_, _, line),) = notebook.value("rows()")
    works(notebook, line)
    assert notebook.value("refs[-1]() is None") is True


def test_lists_in_few_older_objects_are_named(notebook: Kernel) -> None:
    """Each of them is too small for a row."""
    works(notebook, _SETUP, "records = instances(Document, 20)")
    works(notebook, "%%experiment e\nfor each in records: each.words = words(2000)")
    ((number, path, line),) = notebook.value("rows()")
    assert (number, path) == (20, "notebook variable records")
    works(notebook, line)
    assert not notebook.value("any(map(has_new, records))")


class Moved(NamedTuple):
    """Code that moves older data, and a pattern of the row's line; empty if it leaves nothing."""

    before: str
    experiment: str
    line: str


MOVED = {
    "dicts to another list": Moved(
        "inbox, archive = dicts(4000), []",
        """
        while inbox: archive.append(inbox.pop())
        for each in range(1500): archive.append(words(30))
        """,
        r"del archive\[4000:\]",
    ),
    "dicts into a filtered list": Moved(
        "a = Document(); a.rows = dicts(4000)",
        """
        a.rows = [row for row in a.rows if row["number"] % 10]
        a.more = [words(30) for _ in range(1500)]
        """,
        r"a\.more = None",
    ),
    "dicts into tuples": Moved(
        "inbox, done = dicts(3000), []",
        "while inbox: done.append((inbox.pop(), words(30)))",
        r"done\.clear\(\)  # also drops .* of older data",
    ),
    "dicts that get a list": Moved(
        "inbox, archive = dicts(3000), []",
        """
        while inbox:
            row = inbox.pop()
            row["words"] = words(30)
            archive.append(row)
        """,
        r'for _item in archive: del _item\["words"\]; del _item',
    ),
    "texts into new dicts": Moved(
        """
        a = Document()
        a.rows = [{"number": each, "text": f"{each} " * 50} for each in range(3000)]
        """,
        "a.rows = [{**row, 'words': row['text'].split()} for row in a.rows]",
        r"a\.rows = None  # also drops .* of older data",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_lines_spare_moved_data_or_mention_it(notebook: Kernel, name: str) -> None:
    case = MOVED[name]
    experiment = textwrap.dedent(case.experiment).strip()
    works(notebook, _SETUP, textwrap.dedent(case.before), f"%%experiment e\n{experiment}")
    lines = [line for _, _, line in notebook.value("rows()")]
    assert len(lines) == 1, lines
    assert re.fullmatch(case.line, lines[0])


_IMPORT = """
number = len(sys.modules)
sys.modules.update((f"made_{number + each}", types.ModuleType("made")) for each in range(100))
""".strip()
"""Stands for the import of a large library."""


def test_data_in_older_records_is_named_despite_an_import(notebook: Kernel) -> None:
    works(notebook, _SETUP, "import sys, types\nrecords = dicts(1500)")
    inside = f"{_IMPORT}\nfor each in records: each['words'] = words(100)"
    works(notebook, f"%%experiment e\n{inside}")
    line = 'for _item in records: del _item["words"]; del _item'
    assert notebook.value("rows()") == [(1500, "notebook variable records", line)]


def test_an_import_is_not_asked_for_its_many_small_objects(notebook: Kernel) -> None:
    works(notebook, _SETUP, "import sys, types, json\njson.JSONDecoder.kept = []\ndel json")
    inside = f"{_IMPORT}\nsys.modules['json'].JSONDecoder.kept += map(words, [3000] * 100)"
    works(notebook, f"%%experiment e\n{inside}")
    assert notebook.value("rows()") == []


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("frame.loc[2, 'texts'] = 'w' * (1 << 24)", "del frame['texts']  # the column was there"),
        (
            "frame['texts'] = np.ones(1 << 18, complex)",
            "del frame['texts']  # the column was there",
        ),
        ("frame['new'] = np.ones(1 << 18)", "del frame['new']"),
        (
            "frame['texts'] = np.ones(1 << 18, complex); frame['new'] = np.ones(1 << 18)",
            "del frame['texts'], frame['new']  # 'texts' was there",
        ),
    ],
)
def test_a_line_says_that_a_column_was_there_before(kernel: Kernel, code: str, line: str) -> None:
    """pandas makes a new array of a whole column of texts if one of them changes."""
    pytest.importorskip("pandas", "3")
    works(
        kernel,
        _SETUP,
        """
        import pandas
        frame = pandas.DataFrame({"number": range(1 << 18), "texts": ["a"] * (1 << 18)})
        """,
        f"%%experiment e\n{code}",
    )
    ((_, _, advice),) = kernel.value("rows()")
    assert advice.replace('"', "'").removesuffix(" before") == line
    (leaks,) = works(kernel, "%gpumem leaks").leaks()
    assert advice in leaks


@pytest.mark.parametrize("part", ["frame[['a', 'old']]", "frame.groupby('stays')"])
def test_a_line_removes_all_columns_that_a_deleted_name_had(kernel: Kernel, part: str) -> None:
    pytest.importorskip("pandas", "3")
    works(
        kernel,
        _SETUP,
        """
        import pandas
        frame = pandas.DataFrame({"stays": np.zeros(1 << 18), "old": np.zeros(1 << 18)})
        """,
        f"%%experiment e\nfor each in ['old', 'a']: frame[each] = np.ones(1 << 18)\npart = {part}",
    )
    ((_, _, advice),) = kernel.value("rows()")
    line, _, remark = advice.partition("  # ")
    assert sorted(line.removeprefix("del ").split(", ")) == ['frame["a"]', 'frame["old"]']
    assert remark == '"old" was there before'
    works(kernel, line)
    assert works(kernel, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


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
    ("put", "place", "kept"),
    [
        ("trainers[0].store.metrics['loss'].append", 'trainers[0].store.metrics["loss"]', ""),
        ("append", "append.__closure__[0].cell_contents", ""),
        ("append", "append.__closure__[0].cell_contents", " --keep more"),
    ],
)
def test_small_arrays_far_from_a_name_are_left(
    notebook: Kernel, put: str, place: str, kept: str
) -> None:
    works(notebook, _SETUP, _FAR_FROM_NAMES)
    code = (
        f"more = [np.ones(1 << 14) for _ in range(20)]\nfor _ in range(40): {put}(np.ones(1 << 14))"
    )
    works(notebook, f"%%experiment e{kept}\n{code}")
    assert [(number, line) for number, _, line in notebook.value("rows()")] == [
        (40, f"{place}.clear()")
    ]
    works(notebook, f"{place}.clear()")
    assert works(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


def test_an_older_text_key_of_a_dict_stays(notebook: Kernel) -> None:
    """The collector lists it only once the dict has another kind of key."""
    works(
        notebook,
        _SETUP,
        "records = {'a': 1}",
        "%%experiment e\nfor each in range(30): records[each] = np.ones(1 << 14)",
    )
    ((number, _, line),) = notebook.value("rows()")
    assert number == 30
    works(notebook, line)
    assert notebook.value("records") == {"a": 1}


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        (
            "records, _item = dicts(1500), ['mine']",
            "for each in records: each['_item'] = words(30)",
            'for _item2 in records: del _item2["_item"]; del _item2',
        ),
        (
            "_item = records = dicts(1500); del records",
            "for each in _item: each['words'] = words(30)",
            'for _item2 in _item: del _item2["words"]; del _item2',
        ),
        (
            "records = {'a': 1}; _key = 'mine'",
            "for each in range(30): records[each] = np.ones(1 << 14)",
            "for _key2 in list(records)[1:]: del records[_key2], _key2",
        ),
        (
            "import collections; records = collections.deque([1]); _position = 'mine'",
            "for each in range(30): records.append(np.ones(1 << 14))",
            "for _position2 in range(30, 0, -1): del records[_position2], _position2",
        ),
    ],
)
def test_a_loop_in_a_line_binds_no_variable_of_the_user(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    works(notebook, _SETUP, older, f"%%experiment e\n{code}")
    assert [row[2] for row in notebook.value("rows()")] == [line]
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert line[:30] in leaks
    mine = "[globals().get(name) for name in ('_key', '_position', '_item')]"
    before = notebook.value(f"list(map(id, {mine}))")
    works(notebook, line)
    assert notebook.value(f"list(map(id, {mine}))") == before
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks
    works(notebook, "_key = _position = _item = None; del _key, _position, _item")


IN_ARRAYS = {
    "an array": (
        "box = np.empty(50, object); box[0] = 'older'",
        "for each in range(1, 41): box[each] = np.ones(100_000)",
        "box[1:41] = None",
    ),
    "an array with an older list": (
        "box = np.empty(50, object); box[49] = [1, 2]",
        "for each in range(1, 41): box[each] = words(2000)",
        "box[1:41] = None",
    ),
    "rows of a table": (
        "box = np.empty((10, 10), object); box[0, 0] = 'older'",
        "for each in range(20): box[2 + each // 10, each % 10] = np.ones(100_000)",
        "box[2:4, 0:10] = None",
    ),
    "every third element": (
        "box = np.empty(5000, object)",
        "for each in range(9, 100, 3): box[each] = np.ones(100_000)",
        "box[9:100:3] = None",
    ),
    "any elements": (
        "box = np.empty(50, object)",
        "for each in (1, 2, 4, 7, 11, 16, 22, 29, 37, 46): box[each] = np.ones(100_000)",
        "box[[1, 2, 4, 7, 11, 16, 22, 29, 37, 46]] = None",
    ),
    "a field": (
        "box = np.empty(100, dtype=[('g', object), ('f', object)])",
        "for each in range(20): box['f'][each] = np.ones(100_000)",
        'box["f"][0:20] = None',
    ),
    "an array in an older dict": (
        "box = {'older': [np.empty(30, object)]}; box['older'][0][20:] = 'older'",
        "for each in range(20): box['older'][0][each] = np.ones(100_000)",
        'box["older"][0][0:20] = None',
    ),
    "a data frame": (
        "box = pandas.DataFrame({'a': np.empty(50, object), 'n': 1, 'b': np.empty(50, object)})",
        "for each in range(1, 41): box.iat[each, 2] = np.ones(100_000)",
        "[box.iat.__setitem__((row, 2), None) for row in range(1, 41)];",
    ),
    "a long data frame": (
        "box = pandas.DataFrame({'n': range(5000), 'a': np.empty(5000, object)})",
        "for each in range(0, 100, 10): box.iat[each, 1] = words(2000)",
        "[box.iat.__setitem__(place, None) for place in ((0, 1), (10, 1), (20, 1), (30, 1), "
        "(40, 1), (50, 1), (60, 1), (70, 1), (80, 1), (90, 1))];",
    ),
    "a series": (
        "box = pandas.Series(np.empty(60, object))",
        "for each in range(10, 20): box.iat[each] = np.ones(100_000)",
        "[box.iat.__setitem__(row, None) for row in range(10, 20)];",
    ),
}


@pytest.mark.parametrize("name", IN_ARRAYS)
def test_new_data_in_an_older_array_of_objects_is_named(notebook: Kernel, name: str) -> None:
    """It was "not named", or the line dropped the whole column."""
    older, code, line = IN_ARRAYS[name]
    if "pandas" in older:
        pytest.importorskip("pandas", "3")
        works(notebook, "import pandas")
    works(notebook, _SETUP, older, f"%%experiment e\n{code}")
    assert [row[2] for row in notebook.value("rows()")] == [line]
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("1 leak")
    assert line[:30] in leaks
    works(notebook, line)
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("no leak"), leaks
    works(notebook, "del box")


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        (
            "records, older = {}, [np.ones(90_000)]",
            "records['new'] = np.ones(1 << 19), older.pop()",
            'del records["new"]  # also drops 703.2 KiB of older data',
        ),
        (
            "records, older = {}, Document(); older.small = np.ones(40_000)",
            "made = Document(); made.data, made.small = np.ones(1 << 19), older.small\n"
            "records['new'] = made; del older.small",
            'del records["new"]  # also drops 312.6 KiB of older data',
        ),
        (
            "records, older = {}, dicts(3000)",
            "records['new'] = [np.ones(1 << 19), older]; del older",
            'del records["new"]  # also drops ',
        ),
    ],
)
def test_leaks_mentions_little_older_data_as_the_report_does(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    works(notebook, _SETUP, older, f"%%experiment e\n{code}")
    ((_, _, advice),) = notebook.value("rows()")
    assert advice.startswith(line)
    (leaks,) = works(notebook, "%gpumem leaks").leaks()
    in_leaks = leaks.rpartition("to free it: ")[2]
    # A small text, by which the older data is recognised, stays alive.
    assert re.sub(r"\.\d", "", in_leaks) == re.sub(r"\.\d", "", advice)


@pytest.mark.parametrize("data", ["np.ones(1 << 19)", "[0.5 * each for each in range(300_000)]"])
def test_leaks_has_no_default_argument_of_a_kept_function(notebook: Kernel, data: str) -> None:
    """The experiment's report has no row for it, either."""
    experiment = f"%%experiment e --keep function\ndata = {data}\ndef function(a=data): pass"
    works(notebook, _SETUP, experiment)
    assert notebook.value("rows()") == []
    assert works(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]

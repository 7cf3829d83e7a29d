"""Lines remove new data from older objects, and keep those and their older data."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.paths.ages import Ages, LearnedAges
from tests.older_records import OLDER_RECORDS, assert_no_leaks, record_rows
from tests.steps import experiment, run_cells, tidied_kernel

# Freed, because the data of a test would take the free pages of an earlier one.
shared_kernel, notebook = tidied_kernel("%reset -f", "%gpumem free", hides_libraries=True)

_MANY_OLDER = {
    "after many None": """
        many = [None] * 100_000
        many[90_000] = ('t', [np.ones(1 << 21)])
        """,
    "after many records": """
        many = [{'text': str(each), 'list': [each]} for each in range(60_000)]
        many[59_000]['words'] = [np.ones(1 << 21)]
        """,
    "behind many keys": """
        many = {(each, 'key'): None for each in range(100_000)}
        many[(90_000, 'key')] = ('t', [np.ones(1 << 21)])
        """,
}
"""Code that puts an older array deep among many objects."""


@pytest.mark.parametrize("name", _MANY_OLDER)
def test_an_older_array_deep_among_many_objects_is_in_no_row(notebook: Kernel, name: str) -> None:
    """Its line deleted it. The start of an experiment must not take long: it does not look at each
    object.
    """
    run_cells(
        notebook,
        OLDER_RECORDS,
        "import mmap; hold = []",
        _MANY_OLDER[name],
        "%gpumem free",  # free pages may hide that something has grown
        """
        %%experiment e
        block = mmap.mmap(-1, 32 << 20)
        block.write(bytes(32 << 20))
        hold.append(block)
        """,
    )
    assert record_rows(notebook) == [(1, "notebook variable hold[0]", "del hold[0]")]
    run_cells(notebook, "hold.clear(); del many")


def test_an_array_of_an_earlier_experiment_is_not_listed_again(notebook: Kernel) -> None:
    """The lists of our search referred to it, too: it seemed to be in a new container."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "many = [[{'number': each}] for each in range(60_000)]; objects = instances(Document, 9)",
        """
        %%experiment first
        def make_function(array):
            return lambda: array
        many[10][0]["function"] = make_function(np.ones(1 << 22))
        """,
        """
        %%experiment second
        objects[7].words = np.ones(15 << 18)
        objects[8].words = np.ones(1 << 19)
        """,
    )
    (row,) = record_rows(notebook)
    assert row.path == "notebook variable objects[…].words"
    run_cells(notebook, "del many, objects")


@pytest.mark.parametrize(
    "code",
    [
        """
        holder = Document()
        holder.words = many[59_000]['words']
        many[5]['new'] = holder
        """,
        "many[5]['new'] = (many[59_000]['words'], np.ones(1 << 20))",
    ],
    ids=["instance", "tuple"],
)
def test_no_line_removes_an_older_array_that_has_a_new_holder(notebook: Kernel, code: str) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        many = [{'number': each, 'list': [each]} for each in range(60_000)]
        many[59_000]['words'] = np.ones(1 << 20)
        """,
        experiment(code),
    )
    for row in record_rows(notebook):
        run_cells(notebook, row.line)
    assert notebook.value("len(many[59_000]['words'])") == 1 << 20


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
    notebook: Kernel, records: str, older: str, new: str
) -> None:
    """The collector tracks the dict since then only, so that it seems to be new."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        f"""
        many = {records}
        {older} = np.ones(1 << 18)
        """,
        experiment(f"{new} = [np.ones(1 << 20)]"),
    )
    for row in record_rows(notebook):
        run_cells(notebook, row.line)
    assert notebook.value(f"len({older})") == 1 << 18


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        pytest.param(
            "{'buffer': bytearray(b'head')}",
            "records[3]['buffer'].extend(bytes(1 << 24))",
            "",
            id="bytes of a dict",
        ),
        pytest.param("bytearray(b'head')", "records[3].extend(bytes(1 << 24))", "", id="bytes"),
        pytest.param(
            "{}",
            "records[3]['new'] = np.ones(1 << 20)",
            'del records[3]["new"]',
            id="an array in a dict",
        ),
        pytest.param(
            "{}",
            "records[3]['new'] = [np.ones(1 << 20)]",
            'del records[3]["new"]',
            id="a list in a dict",
        ),
        pytest.param(
            "{'new': None, 'id': 1, 'text': 'a'}",
            """
            del records[3]['new']
            records[3]['new'] = [np.ones(1 << 20)]
            """,
            'del records[3]["new"]',
            id="a list in place of an older value",
        ),
    ],
)
def test_an_older_item_that_changes_stays(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """``del records[3]`` removed it with its older data."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        f"records = [{older} for _ in range(300)]",
        experiment(code),
    )
    assert [row.line for row in record_rows(notebook)] == ([line] if line else [])


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
    run_cells(
        notebook,
        OLDER_RECORDS,
        f"""
        def large(): return np.ones(1 << 21)
        records = dicts({number})
        """,
        experiment(f"records[3]['new'] = {record}"),
    )
    line = 'del records[3]["new"]'
    assert [row.line for row in record_rows(notebook)] == [line]
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert line in leaks
    run_cells(notebook, line)
    assert_no_leaks(notebook)


def test_an_older_dict_in_an_older_record_keeps_its_older_data(notebook: Kernel) -> None:
    """The collector tracks it only since it has a list, so that it seems to be new."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        "records = [{'number': each, 'inner': {'older': np.ones(each)}} for each in range(1500)]",
        experiment("records[3]['inner']['new'] = [np.ones(1 << 21)]"),
    )
    (row,) = record_rows(notebook)
    assert row.line.startswith('del records[3]["inner"]["new"]')


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        pytest.param(
            "words(1000)", "records[500] = texts(1) * 1000", "records[500] = None", id="one item"
        ),
        pytest.param(
            "{each: each for each in words(1000)}",
            "records['1500'] = texts(1) * 1000",
            'del records["1500"]',
            id="one key",
        ),
        pytest.param(
            "words(1000)",
            "for each in range(100, 200): records[each] = texts(each) * 10",
            "records[100:200] = [None] * 100",
            id="neighbours",
        ),
        pytest.param(
            "dicts(1000)",
            "for each in range(100, 200): records[each] = {'words': texts(each) * 10}",
            "records[100:200] = [None] * 100",
            id="dicts",
        ),
        pytest.param(
            "dicts(1000)",
            "for each in range(100, 200): records[each] = {'words': [np.ones(1 << 13)]}",
            "records[100:200] = [None] * 100",
            id="dicts of lists",
        ),
    ],
)
def test_new_data_in_the_places_of_older_items_is_named(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """It was "not named", but for that which the collector tracks. The line keeps the places of
    later items.
    """
    run_cells(notebook, OLDER_RECORDS, f"records = {older}", experiment(code))
    assert [row.line for row in record_rows(notebook)] == [line]
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert line in leaks
    run_cells(notebook, line)
    assert_no_leaks(notebook)


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        pytest.param("[None] * 10", "records[3] = large()", "records[3] = None", id="one item"),
        pytest.param(
            "[None] * 10",
            "records[:] = map(large, range(10))",
            "records[:] = [None] * len(records)",
            id="all items",
        ),
        pytest.param(
            "[None] * 10",
            "for each in (1, 2, 3, 5, 7, 8): records[each] = large()",
            "records[1:4] = [None] * 3; records[5] = None; records[7:9] = [None] * 2",
            id="neighbours",
        ),
        pytest.param(
            "dicts(40)",
            "for each in range(0, 40, 4): records[each] = large()",
            "records[0:37:4] = [None] * 10",
            id="every fourth item",
        ),
        pytest.param(
            "dicts(40)",
            "for each in (0, 3, 7, 9, 14, 22): records[each] = large()",
            "[records.__setitem__(place, None) for place in (0, 3, 7, 9, 14, 22)];",
            id="any items",
        ),
        pytest.param(
            "[None] * 300",
            "for each in range(0, 300, 3): records[each] = large()",
            "records[0:298:3] = [None] * 100",
            id="every third item",
        ),
        pytest.param(
            "[None] * 10",
            "records[2] = records[7] = large()",
            "records[7] = None; records[2] = None",
            id="two places of one object",
        ),
        pytest.param(
            "[None] * 300",
            """
            one = large()
            for each in range(300):
                if each % 7 in (1, 2, 4): records[each] = one
            """,
            "records[:] = [None if item is records[1] else item for item in records]",
            id="many places of one object",
        ),
        pytest.param(
            "[1, [None] * 10]",
            "records[1][3] = large()",
            "records[1][3] = None",
            id="a list in a list",
        ),
        # These lists are longer than they were: nothing had the places of the new items.
        pytest.param(
            "[None] * 10", "records.append(large())", "del records[10]", id="an item at the end"
        ),
        pytest.param(
            "dicts(300)",
            "records.append(large())",
            "del records[300]",
            id="an item at the end of many",
        ),
        pytest.param(
            "[]",
            "records += map(large, range(10))",
            "records.clear()",
            id="all items of a list that was empty",
        ),
    ],
)
def test_a_line_moves_no_later_item_of_a_list(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    """``del records[3]`` gave each later result the number of another step."""
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        def large(number=0):
            return np.ones(1 << 19) + number
        """,
        f"records = {older}",
        experiment(code),
    )
    assert [row.line for row in record_rows(notebook)] == [line]
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert line[:40] in leaks
    run_cells(notebook, line)
    assert_no_leaks(notebook)


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
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        import array, mmap
        def written(size):
            owner = mmap.mmap(-1, size)
            owner[:] = b"1" * size
            return owner
        records = dicts(10)
        """,
        f"""
        %%experiment e
        owner = records[3]['owner'] = {owner}
        records[4]['new'] = np.frombuffer(owner, 'u1')
        """,
    )
    (row,) = record_rows(notebook)
    assert row.line == 'del records[4]["new"]; del records[3]["owner"]'
    # It said "del records", which drops the older ones, too.
    (why,) = run_cells(notebook, '%gpumem why records[4]["new"]').reports("why")
    assert row.line in why


def test_an_array_deep_in_older_objects_is_named(notebook: Kernel) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        "deep = [[{'inner': [Document()]}]]; deep[0][0]['inner'][0].all = [1]",
    )
    run_cells(notebook, experiment("deep[0][0]['inner'][0].all.append(np.ones(1 << 19))"))
    (row,) = record_rows(notebook)
    assert row.path == 'notebook variable deep[0][0]["inner"][0].all[1]'
    assert row.line == 'del deep[0][0]["inner"][0].all[1]'
    run_cells(notebook, "del deep")


@pytest.mark.parametrize(
    ("older", "first", "second"),
    [
        pytest.param("{'old': 1}", "older['first']", "older['second']", id="keys of a dict"),
        pytest.param("Slotted()", "older.number", "older.words", id="slots"),
        pytest.param(
            "types.SimpleNamespace(old=1)", "older.first", "older.second", id="attributes"
        ),
    ],
)
def test_one_line_removes_all_records_of_one_older_object(
    notebook: Kernel, older: str, first: str, second: str
) -> None:
    run_cells(
        notebook,
        OLDER_RECORDS,
        f"""
        import types, weakref
        older, refs = {older}, []
        """,
    )
    run_cells(
        notebook,
        f"""
        %%experiment e
        array = np.ones(1 << 19)
        {first} = (1, array)
        {second} = [(array, 2)]
        refs.append(weakref.ref(array))
        """,
    )
    (row,) = record_rows(notebook)
    run_cells(notebook, row.line)
    assert notebook.value("refs[-1]() is None") is True


class Moved(NamedTuple):
    """Code that moves older data, and a pattern of the row's line; empty if it leaves nothing."""

    before: str
    code: str
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
        """
        a = Document()
        a.rows = dicts(4000)
        """,
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
    run_cells(notebook, OLDER_RECORDS, case.before, experiment(case.code))
    lines = [row.line for row in record_rows(notebook)]
    assert len(lines) == 1, lines
    assert re.fullmatch(case.line, lines[0])


@pytest.mark.parametrize(
    ("code", "line"),
    [
        pytest.param(
            "frame.loc[2, 'texts'] = 'w' * (1 << 24)",
            "del frame['texts']  # the column was there",
            id="one text",
        ),
        pytest.param(
            "frame['texts'] = np.ones(1 << 18, complex)",
            "del frame['texts']  # the column was there",
            id="a column",
        ),
        pytest.param("frame['new'] = np.ones(1 << 18)", "del frame['new']", id="a new column"),
        pytest.param(
            """
            frame['texts'] = np.ones(1 << 18, complex)
            frame['new'] = np.ones(1 << 18)
            """,
            "del frame['texts'], frame['new']  # 'texts' was there",
            id="a column and a new one",
        ),
    ],
)
def test_a_line_says_that_a_column_was_there_before(notebook: Kernel, code: str, line: str) -> None:
    """pandas makes a new array of a whole column of texts if one of them changes."""
    pytest.importorskip("pandas", "3")
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        import pandas
        frame = pandas.DataFrame({"number": range(1 << 18), "texts": ["a"] * (1 << 18)})
        """,
        experiment(code),
    )
    (row,) = record_rows(notebook)
    assert row.line.replace('"', "'").removesuffix(" before") == line
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert row.line in leaks


@pytest.mark.parametrize("part", ["frame[['a', 'old']]", "frame.groupby('stays')"])
def test_a_line_removes_all_columns_that_a_deleted_name_had(notebook: Kernel, part: str) -> None:
    pytest.importorskip("pandas", "3")
    run_cells(
        notebook,
        OLDER_RECORDS,
        """
        import pandas
        frame = pandas.DataFrame({"stays": np.zeros(1 << 18), "old": np.zeros(1 << 18)})
        """,
        f"""
        %%experiment e
        for each in ['old', 'a']: frame[each] = np.ones(1 << 18)
        part = {part}
        """,
    )
    (row,) = record_rows(notebook)
    line, _, remark = row.line.partition("  # ")
    assert sorted(line.removeprefix("del ").split(", ")) == ['frame["a"]', 'frame["old"]']
    assert remark == '"old" was there before'
    run_cells(notebook, line)
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]


IN_ARRAYS = {
    "an array": (
        """
        box = np.empty(50, object)
        box[0] = 'older'
        """,
        "for each in range(1, 41): box[each] = np.ones(100_000)",
        "box[1:41] = None",
    ),
    "an array with an older list": (
        """
        box = np.empty(50, object)
        box[49] = [1, 2]
        """,
        "for each in range(1, 41): box[each] = words(2000)",
        "box[1:41] = None",
    ),
    "rows of a table": (
        """
        box = np.empty((10, 10), object)
        box[0, 0] = 'older'
        """,
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
        """
        box = {'older': [np.empty(30, object)]}
        box['older'][0][20:] = 'older'
        """,
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
        run_cells(notebook, "import pandas")
    run_cells(notebook, OLDER_RECORDS, older, experiment(code))
    assert [row.line for row in record_rows(notebook)] == [line]
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    assert leaks.startswith("1 leak")
    assert line[:30] in leaks
    run_cells(notebook, line)
    assert_no_leaks(notebook)
    run_cells(notebook, "del box")


@pytest.mark.parametrize(
    ("older", "code", "line"),
    [
        pytest.param(
            "records, older = {}, [np.ones(90_000)]",
            "records['new'] = np.ones(1 << 19), older.pop()",
            'del records["new"]  # also drops 703.2 KiB of older data',
            id="an array of a list",
        ),
        pytest.param(
            """
            records, older = {}, Document()
            older.small = np.ones(40_000)
            """,
            """
            made = Document()
            made.data, made.small = np.ones(1 << 19), older.small
            records['new'] = made
            del older.small
            """,
            'del records["new"]  # also drops 312.6 KiB of older data',
            id="an array of an object",
        ),
        pytest.param(
            "records, older = {}, dicts(3000)",
            """
            records['new'] = [np.ones(1 << 19), older]
            del older
            """,
            'del records["new"]  # also drops ',
            id="records",
        ),
    ],
)
def test_leaks_mentions_little_older_data_as_the_report_does(
    notebook: Kernel, older: str, code: str, line: str
) -> None:
    run_cells(notebook, OLDER_RECORDS, older, experiment(code))
    (row,) = record_rows(notebook)
    assert row.line.startswith(line)
    (leaks,) = run_cells(notebook, "%gpumem leaks").leaks()
    in_leaks = leaks.rpartition("to free it: ")[2]
    # A small text, by which the older data is recognised, stays alive.
    assert re.sub(r"\.\d", "", in_leaks) == re.sub(r"\.\d", "", row.line)


@pytest.mark.parametrize("data", ["np.ones(1 << 19)", "[0.5 * each for each in range(300_000)]"])
def test_leaks_has_no_default_argument_of_a_kept_function(notebook: Kernel, data: str) -> None:
    """The experiment's report has no row for it, either."""
    experiment = f"%%experiment e --keep function\ndata = {data}\ndef function(a=data): pass"
    run_cells(notebook, OLDER_RECORDS, experiment)
    assert record_rows(notebook) == []
    assert run_cells(notebook, "%gpumem leaks").leaks() == ["no leak of at least 1 MiB was found"]

"""A line that also drops data from before the experiment says so."""

import json
import re
import sys
from typing import NamedTuple

import pytest

from benchmarks.harness.kernel import Kernel
from tests.steps import SHOW_LIBRARIES, experiment, run_cells, tidied_kernel

pytest.importorskip("numpy", reason="these tests need NumPy, which comes with the extra 'torch'")

_DEFINITIONS = """
import functools, gc
import numpy as np

MIB = 1 << 17

class Node:
    def __init__(self, data, next):
        self.data = data
        self.next = next

class Branch:
    def __init__(self, parent, data):
        self.parent, self.data, self.branches = parent, data, []

class NeverDeletes(list):
    def __delitem__(self, position):
        raise TypeError("not this list")

def texts(mib):
    return [str(number) * 100 for number in range(10 ** 5, 10 ** 5 + mib * 1600)]

def rows():
    import json
    import ipygpumem
    survivors = ipygpumem.experiments()[-1].survivors
    return json.dumps([(row.size_bytes / 2 ** 20, row.holder.advice) for row in survivors])

def mib_of(value):
    from ipygpumem.heap.sizes.sizes import Sizes
    return Sizes().measure(value).size_bytes / 2 ** 20
"""
shared_kernel, kernel = tidied_kernel(
    "%reset -f", "%config IPyGpuMem.quiet = True", _DEFINITIONS, hides_libraries=True
)


class Row(NamedTuple):
    """A row of an experiment's report."""

    mib: float
    line: str


def rows_after(kernel: Kernel, before: str, code: str) -> list[Row]:
    """Return the rows of an experiment that runs a block of code."""
    # Garbage of earlier tests, freed by the experiment's end, would hide what that leaves.
    run_cells(kernel, before, "gc.collect();", experiment(code))
    return [Row(mib, line) for mib, line in json.loads(kernel.value("rows()"))]


def line_of(kernel: Kernel, before: str, code: str) -> str:
    """Return the line of the only row after an experiment."""
    (row,) = rows_after(kernel, before, code)
    return row.line


@pytest.mark.parametrize(
    ("before", "code", "line"),
    [
        pytest.param(
            'box = {"top": (np.ones(4 * MIB), (np.ones(4 * MIB), None))}',
            'box["top"] = (np.ones(16 * MIB), box["top"])',
            'del box["top"]  # also drops 8 MiB of older data',
            id="a stack of tuples",
        ),
        pytest.param(
            'box = {"run  # 3": (np.ones(4 * MIB), None)}',
            'box["run  # 3"] = (np.ones(16 * MIB), box["run  # 3"])',
            r'del box["run  \x23 3"]  # also drops 4 MiB of older data',
            id="a key that looks like a comment",
        ),
        pytest.param(
            """
            box = {"top": (np.ones(4 * MIB), None)}
            second = [box["top"]]
            """,
            'box["top"] = (np.ones(16 * MIB), box["top"])',
            'del box["top"]',
            id="an older tuple that has another holder",
        ),
        pytest.param(
            """
            one, other = np.ones(4 * MIB), np.ones(4 * MIB)
            box = {}
            """,
            """
            box["all"] = (one, other, np.ones(16 * MIB))
            del one
            """,
            'del box["all"]  # also drops 4 MiB of older data',
            id="an older array whose name the experiment deletes",
        ),
        pytest.param(
            """
            @functools.cache
            def load(number):
                return np.full(4 * MIB, float(number))
            load(1), load(2);
            """,
            "load(3)[:0].copy();",
            "load.cache_clear()  # also drops 8 MiB of older data",
            id="results in a cache",
        ),
        pytest.param(
            """
            def hold(data):
                yield data
            owner, holds = Branch(None, Node(1, None)), []
            """,
            """
            made = np.ones(16 * MIB)
            owner.data = made, owner.data
            holds.append(hold(made))
            next(holds[0])
            """,
            re.compile(
                r"holds\[0\].close\(\); owner.data = None  # also drops \d+ B of older data"
            ),
            id="a little data, and a generator",
        ),
        pytest.param(
            """
            def stack():
                rows = [[np.ones(4 * MIB)]]
                while True:
                    rows.append((yield))
            stacked = stack()
            next(stacked)
            """,
            "stacked.send(np.ones(16 * MIB))",
            "stacked.close()  # also drops 4 MiB of older data",
            id="a local name of a generator",
            marks=pytest.mark.skipif(
                sys.version_info < (3, 11),
                reason="an experiment finds no new array in a generator of Python 3.10",
            ),
        ),
        pytest.param(
            "fixed = NeverDeletes([[np.ones(4 * MIB)]])",
            "fixed.append(np.ones(16 * MIB))",
            "del fixed  # it deletes no items; also drops 4 MiB of older data",
            id="a list that deletes nothing",
        ),
        pytest.param(
            "fixed = NeverDeletes([np.ones(4 * MIB)])",
            """
            x = np.ones(16 * MIB)
            fixed.append(x[1:])
            fixed.append(x[2:])
            """,
            "del fixed  # it deletes no items; also drops 4 MiB of older data",
            id="a list with two views of one new array",
        ),
        pytest.param(
            "first, second, runs = [np.ones(4 * MIB)], [np.ones(4 * MIB)], []",
            """
            runs.append((np.ones(16 * MIB), first)); runs.append((np.ones(16 * MIB), second))
            del first, second
            """,
            "runs.clear()  # also drops 8 MiB of older data",
            id="two items of a list",
        ),
        pytest.param(
            "box, o = {}, [np.ones(4 * MIB)]",
            """
            node = Node((np.ones(16 * MIB), o), np.empty(1, object))
            node.next[0] = node
            box["node"] = node
            del node, o
            """,
            'box["node"].next = None; del box["node"]  # also drops 4 MiB of older data',
            id="an object in a cycle through an array",
        ),
        pytest.param(
            """
            tree = Branch(None, None)
            o = np.ones(4 * MIB)
            """,
            """
            tree.branches.append(Branch(tree, (o, {'new': np.ones(16 * MIB)})))
            del o
            """,
            "del tree.branches[0]  # also drops 4 MiB of older data",
            id="an older array in a child that refers to its parent",
        ),
        pytest.param(
            "fixed, o = NeverDeletes([[np.ones(4 * MIB)]]), [np.ones(2 * MIB)]",
            """
            fixed.append((np.ones(16 * MIB), o))
            del o
            """,
            "del fixed  # it deletes no items; also drops 6 MiB of older data",
            id="older data behind new data in an older list",
        ),
        pytest.param(
            """
            from concurrent.futures import Future
            done, o = Future(), [np.ones(4 * MIB)]
            """,
            """
            done.set_result((np.ones(16 * MIB), o))
            del o
            """,
            "del done  # also drops 4 MiB of older data",
            id="the result of an older future",
        ),
        pytest.param(
            """
            from concurrent.futures import Future
            done, o = Future(), [np.ones(4 * MIB)]
            assert vars(done)
            """,
            """
            done.set_result((np.ones(16 * MIB), o))
            del o
            """,
            "del done  # also drops 4 MiB of older data",
            id="the result of an older future with a dict of attributes",
        ),
        pytest.param(
            f"""
            {SHOW_LIBRARIES}
            import sys
            o = [np.ones(4 * MIB)]
            """,
            """
            sys.stash = (o, np.ones(16 * MIB))
            del o
            """,
            "del sys.stash  # also drops 4 MiB of older data",
            id="an attribute of a library's module",
        ),
        pytest.param(
            "tree = Branch(None, np.ones(4 * MIB))",
            "tree.branches.append(Branch(tree, np.ones(16 * MIB)))",
            "del tree.branches[0]",
            id="a child that refers to its older parent",
        ),
    ],
)
def test_a_line_names_the_older_data_that_it_drops(
    kernel: Kernel, before: str, code: str, line: str | re.Pattern[str]
) -> None:
    printed_line = line_of(kernel, before, code)
    if isinstance(line, str):
        assert printed_line == line
    else:
        assert line.fullmatch(printed_line), printed_line


_TEXTS = {
    "a new list in an attribute": (
        "box = Branch(None, ['a' * 4 * 2**20, b'b' * 2 * 2**20, bytearray(2 * 2**20)])",
        "box.data = box.data + ['n' * 16 * 2**20]",
        "box.data = None",
    ),
    "a new list of many": (
        "box = {'all': [str(number) * 2**13 for number in range(1024, 2048)][:256]}",
        "box['all'] = box['all'] + ['n' * 16 * 2**20]",
        'del box["all"]',
    ),
    "a new list of 13,000": (
        "box = Branch(None, [str(number) * 100 for number in range(10**5, 10**5 + 12_910)])",
        "box.data = box.data + ['n' * 16 * 2**20]",
        "box.data = None",
    ),
    "new records in a new list": (
        "box = {'all': [{'id': n, 'text': str(n) * 2**13} for n in range(1024, 1280)]}",
        "box['all'] = box['all'] + [{'id': 0, 'text': 'n' * 16 * 2**20}]",
        'del box["all"]',
    ),
    "a new tuple of many": (
        "box = {'all': tuple(str(number) * 2**13 for number in range(1024, 1280))}",
        "box['all'] = (*box['all'], 'n' * 16 * 2**20)",
        'del box["all"]',
    ),
    "deep in new containers": (
        "box, text = {}, 'a' * 8 * 2**20",
        "box['all'] = {'rows': [{'deep': [(text, [1]), 'n' * 16 * 2**20]}]}; del text",
        'del box["all"]',
    ),
    "a new object": (
        "box = {'top': Branch(None, 'a' * 8 * 2**20)}",
        "box['top'] = Branch('n' * 16 * 2**20, box['top'].data)",
        'del box["top"]',
    ),
    "a new tuple": (
        "box = {'top': ('a' * 8 * 2**20,)}",
        "box['top'] = (box['top'][0], 'n' * 16 * 2**20)",
        'del box["top"]',
    ),
    "a new dict, by a name that the experiment deletes": (
        "box, text = {}, 'a' * 8 * 2**20",
        "box['all'] = {'older': text, 'new': 'n' * 16 * 2**20}; del text",
        'del box["all"]',
    ),
}


@pytest.mark.parametrize(("before", "code", "line"), _TEXTS.values(), ids=_TEXTS)
def test_older_text_that_moves_is_not_new(
    kernel: Kernel, before: str, code: str, line: str
) -> None:
    (row,) = rows_after(kernel, before, code)
    assert row.mib == pytest.approx(16, rel=0.01)
    remark = re.escape(f"{line}  # also drops ") + r"8(\.\d)? MiB of "
    assert re.fullmatch(f"{remark}older data", row.line)
    (text,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert re.search(rf"  16(\.\d)? MiB · .* · to free it: {remark}older data", text)


def test_lines_that_drop_older_data_together_say_so(kernel: Kernel) -> None:
    """Each line alone leaves it in the other place."""
    rows = rows_after(
        kernel,
        "shelf, files, o = {}, {}, np.ones(4 * MIB)",
        "shelf['a'] = (np.ones(16 * MIB), o); files['b'] = (np.ones(8 * MIB), o); del o",
    )
    assert [row.line for row in rows] == [
        'del shelf["a"]',
        'del files["b"]  # also drops 4 MiB of older data',
    ]


def test_new_bytearrays_in_place_of_older_ones_are_new(kernel: Kernel) -> None:
    rows = rows_after(
        kernel,
        "box = Branch(None, [bytearray(8192) for _ in range(200)])",
        "box.data = None; box.data = [bytearray(200_000) for _ in range(200)]",
    )
    assert (38, "box.data = None") in [(round(row.mib), row.line) for row in rows]


def test_new_text_at_the_place_of_an_older_one_is_new(kernel: Kernel) -> None:
    rows = rows_after(
        kernel,
        "box = {'top': ['a' * 8 * 2**20]}",
        """
        place = id(box["top"].pop())
        made = [str(number) * 2**23 for number in range(9)]  # some at the place of the dead one
        at_place = [text for text in made if id(text) == place] or made[:1]
        box["top"] = [*at_place, "n" * 32 * 2**20]  # the experiment has also freed 8 MiB
        del made, at_place
        """,
    )
    # An earlier case has left a cycle that Python never frees.
    assert (40, 'del box["top"]') in [(round(row.mib), row.line) for row in rows]


def test_older_data_behind_a_new_object_is_not_in_its_row(kernel: Kernel) -> None:
    (row,) = rows_after(
        kernel,
        "head = Node(None, Node(texts(8), None))",
        "head.next = Node(texts(16), head.next)",
    )
    of_list = kernel.value("mib_of(head.next.data)")
    assert row.mib == pytest.approx(of_list, rel=0.05)
    assert re.fullmatch(r"head.next = None  # also drops 8.\d MiB of older data", row.line)


@pytest.mark.parametrize(
    ("before", "code", "row"),
    [
        pytest.param(
            "b = NeverDeletes([np.ones(4 * MIB)])",
            "b.append(np.ones(16 * MIB))",
            ("16 MiB", "del b  # it deletes no items; also drops 4 MiB of other data"),
            id="a list that deletes nothing",
        ),
        pytest.param(
            "b = Branch(None, np.ones(4 * MIB))",
            "b.branches.append(Branch(b, np.ones(16 * MIB)))",
            ("16 MiB", "del b.branches[0]"),
            id="a child that refers to its older parent",
        ),
    ],
)
def test_leaks_says_which_other_data_a_line_drops(
    kernel: Kernel, before: str, code: str, row: tuple[str, str]
) -> None:
    assert row in rows_of_leaks(kernel, before, code)


def test_leaks_says_that_a_line_drops_an_older_list_in_a_new_one(kernel: Kernel) -> None:
    rows = rows_of_leaks(kernel, "b = [[texts(8)]]", "b[0] = [texts(16), b[0]]")
    new = f"{kernel.value('mib_of(b[0][0])'):.1f} MiB"  # a text is smaller from Python 3.12 on
    older = f"{kernel.value('mib_of(b[0][1])'):.1f} MiB"
    assert (new, f"b[0] = None  # also drops {older} of older data") in rows


def rows_of_leaks(kernel: Kernel, before: str, code: str) -> list[tuple[str, str]]:
    """Return the size and the line of each row of ``%gpumem leaks`` after an experiment."""
    run_cells(kernel, before, experiment(code))
    (text,) = run_cells(kernel, "%gpumem leaks").leaks()
    return re.findall(r"^  (.*?) · .* · to free it: (.*)$", text, re.MULTILINE)


_ALSO_OLDER = "also drops an older array, which has grown"


@pytest.mark.parametrize(
    ("before", "code", "lines"),
    [
        pytest.param(
            "n = np.arange(2000.)",
            "n.resize(2 * MIB, refcheck=False)",
            [f"del n  # {_ALSO_OLDER}"],
            id="an array with a name",
        ),
        pytest.param(
            "n = np.ones(MIB)",
            "n.resize(2 * MIB, refcheck=False)",
            [f"del n  # {_ALSO_OLDER}"],
            id="a large array with a name",
        ),
        pytest.param(
            "n = np.arange(2000.)",
            """
            n.resize(2 * MIB, refcheck=False)
            kept.append([n[:9]])
            """,
            [f"del kept[0]; del n  # {_ALSO_OLDER}"],
            id="an array with a new view",
        ),
        pytest.param(
            "n = Node(np.arange(2000.), None)",
            """
            kept.append(np.ones(2 * MIB))
            del n.data
            """,
            ["del kept[0]"],
            id="an array in a list, after an older one has died",
        ),
    ],
)
def test_a_line_says_that_an_array_is_older_than_its_memory(
    kernel: Kernel, before: str, code: str, lines: list[str]
) -> None:
    run_cells(kernel, "kept = []")
    assert [row.line for row in rows_after(kernel, before, code)] == lines
    (text,) = run_cells(kernel, "%gpumem leaks").leaks()
    assert all(line in text for line in lines)
    # ``leaks`` forgets the arrays, whose places are free now.
    run_cells(kernel, *lines, "%gpumem leaks")

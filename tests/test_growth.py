"""An experiment's report says which older containers have grown."""

import re

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.kinds.libraries import VISITS_BUFFER
from tests.steps import experiment, run_quietly, tidied_kernel

shared_kernel, notebook = tidied_kernel(
    "%experiment end", "%reset -f", "%gpumem free", hides_libraries=True
)

LINE_OF_GROWTH = r"^ *(\S+) grew by ([\d.]+) MiB(?:, (from .* items))?(?: · to free it: (.*))?$"
WITHOUT_LINE = ("a filled bytearray", "an array", "a text stream", "a stream of bytes")
CASES = {
    "a bytearray": ("buf = bytearray()", "buf.extend(bytes(64 << 20))", "buf", 64),
    "a filled bytearray": ("buf = bytearray(30 << 20)", "buf.extend(bytes(64 << 20))", "buf", 64),
    "a list of one number": ("buf = []", "buf.extend([7] * (1 << 20))", "buf", 8),
    "a list of numbers": ("buf = []", "buf.extend(range(1000, 301_000))", "buf", 11.4),
    "a dict": ("buf = {}", "buf.update(dict.fromkeys(range(300_000)))", "buf", 19.1),
    "a counter": (
        "from collections import Counter\nbuf = Counter()",
        "buf.update(range(300_000))",
        "buf",
        19.1,
    ),
    "a dict of lists": (
        "from collections import defaultdict\nbuf = defaultdict(list)",
        "for n in range(300_000): buf[n] = 1",
        "buf",
        19.1,
    ),
    "a set": ("buf = set()", "buf.update(range(300_000))", "buf", 17.1),
    "a deque": (
        "from collections import deque\nbuf = deque()",
        "buf.extend([7] * (1 << 20))",
        "buf",
        8.25,
    ),
    "an array": (
        "import array\nbuf = array.array('d')",
        "buf.frombytes(bytes(64 << 20))",
        "buf",
        66,
    ),
    "a text stream": ("import io\nbuf = io.StringIO()", "buf.write('x' * (64 << 20))", "buf", 64),
    "a stream of bytes": ("import io\nbuf = io.BytesIO()", "buf.write(bytes(64 << 20))", "buf", 64),
    "an attribute": (
        "class A: pass\na = A(); a.buf = bytearray()",
        "a.buf.extend(bytes(64 << 20))",
        "a.buf",
        64,
    ),
    "an item": (
        "outer = {'b': [bytearray()]}",
        "outer['b'][0].extend(bytes(64 << 20))",
        'outer["b"][0]',
        64,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_objects_that_grew_are_named_with_their_growth(notebook: Kernel, case: str) -> None:
    before, grows, path, size = CASES[case]
    run_quietly(notebook, before)
    (text,) = run_quietly(notebook, experiment(grows, name="grows")).survivors()
    if case == "a stream of bytes" and VISITS_BUFFER:
        assert "bytes · held by notebook variable buf" in text
        return
    growth = re.search(LINE_OF_GROWTH, text, re.MULTILINE)
    assert growth is not None, text
    assert growth[1] == path
    assert float(growth[2]) == pytest.approx(size, rel=0.06)
    assert "not named" not in text, text

    # The report of leaks says the same.
    (leaks,) = run_quietly(notebook, "%gpumem leaks").reports("leaks")
    assert growth[0].strip() in leaks

    # The advised line empties it.
    if case in WITHOUT_LINE:
        assert growth[4] is None
    else:
        assert growth[4] == f"{path}.clear()"
        run_quietly(notebook, growth[4])
        assert kernel_length(notebook, path) == 0
        (leaks,) = run_quietly(notebook, "%gpumem leaks").reports("leaks")
        assert "grew by" not in leaks


def test_leaks_says_that_a_line_drops_later_items(notebook: Kernel) -> None:
    run_quietly(notebook, "buf = []")
    run_quietly(notebook, experiment("buf.extend(map(float, range(300_000)))", name="grows"))
    run_quietly(notebook, "buf.extend(map(float, range(300_000)))")
    (leaks,) = run_quietly(notebook, "%gpumem leaks").reports("leaks")
    growth = re.search(LINE_OF_GROWTH, leaks, re.MULTILINE)
    assert growth is not None, leaks
    assert float(growth[2]) == pytest.approx(11.4, rel=0.06)
    assert growth[4] == "buf.clear()  # also drops its other items"


WITH_OLDER = {
    "list": ("buf = [1.5, 2.5]", "buf.extend(map(float, range(300_000)))"),
    "sorted list": ("buf = [1.5, 2.5]", "buf.extend(map(float, range(300_000))); buf.sort()"),
    "bytearray": ("buf = bytearray(b'ab')", "buf[0:0] = bytes(8 << 20)"),
    "set": ("buf = {1, 2}", "buf.update(range(1000, 301_000))"),
    "dict": ("buf = {1: 'a', 2: 'b'}", "buf.update(dict.fromkeys(range(1000, 301_000)))"),
}


@pytest.mark.parametrize("case", WITH_OLDER)
def test_a_line_says_that_it_drops_older_items(notebook: Kernel, case: str) -> None:
    before, grows = WITH_OLDER[case]
    run_quietly(notebook, before)
    (text,) = run_quietly(notebook, experiment(grows, name="grows")).survivors()
    growth = re.search(LINE_OF_GROWTH, text, re.MULTILINE)
    assert growth is not None, text
    assert growth[4] == "buf.clear()  # also drops 2 older items"


def test_two_attributes_of_one_object_may_grow(notebook: Kernel) -> None:
    """Writing the first path gives the object a dict, and then it refers to this only."""
    run_quietly(
        notebook,
        """
        class A: pass
        a = A(); a.rows = []; a.names = {}
        """,
    )
    grows = "a.rows.extend(range(300_000)); a.names.update(dict.fromkeys(range(300_000)))"
    (text,) = run_quietly(notebook, experiment(grows, name="grows")).survivors()
    assert {path for path, *_ in re.findall(LINE_OF_GROWTH, text, re.MULTILINE)} == {
        "a.rows",
        "a.names",
    }


def test_an_attribute_grows_next_to_one_with_an_array(notebook: Kernel) -> None:
    """Writing the path of the array gave the object a dict, behind which the list was not found."""
    run_quietly(
        notebook,
        """
        import numpy as np
        class A: pass
        a = A(); a.rows = []; a.best = None
        """,
    )
    grows = "a.rows.extend(map(float, range(1_000_000))); a.best = np.ones(1 << 21)"
    (text,) = run_quietly(notebook, experiment(grows, name="grows")).reports("experiment")
    ((path, size, *_),) = re.findall(LINE_OF_GROWTH, text, re.MULTILINE)
    assert path == "a.rows"
    assert float(size) == pytest.approx(38.6, rel=0.02), "32 bytes for each number"
    assert "not named" not in text, text


def kernel_length(kernel: Kernel, path: str) -> int:
    length = kernel.value(f"len({path})")
    assert isinstance(length, int)
    return length


def test_a_list_that_had_items_is_named_with_their_number(notebook: Kernel) -> None:
    """Emptying it would lose the older items, so there is no line that frees it."""
    run_quietly(notebook, "rows = list(range(1000))")
    (text,) = run_quietly(
        notebook, experiment("rows.extend([7] * (1 << 20))", name="grows")
    ).reports("experiment")
    growth = re.search(LINE_OF_GROWTH, text, re.MULTILINE)
    assert growth is not None, text
    assert growth[1] == "rows"
    assert growth[3] == "from 1,000 to 1,049,576 items"
    assert growth[4] is None


TOGETHER = {
    "a long list": (
        "class A: pass\na = A(); a.rows = [bytearray(8192) for _ in range(200)]",
        "for row in a.rows: row.extend(bytes(300_000))",
        "a.rows",
        "in 200 of its items",
    ),
    "records": (
        "rows = [{'bytes': bytearray(5000)} for _ in range(200)]",
        "for row in rows: row['bytes'].extend(bytes(300_000))",
        "rows",
        "in 200 of its items",
    ),
    "a short list": (
        "rows = [bytearray(5000) for _ in range(90)]",
        "for row in rows: row.extend(bytes(700_000))",
        "rows",
        "in 90 of its items",
    ),
    "a dict": (
        "groups = {'k': {n: [7] * (n + 1) for n in range(90)}}",
        "for row in groups['k'].values(): row.extend([7] * 15_000)",
        'groups["k"]',
        "in 90 of its items",
    ),
    "a long dict": (
        "groups = {n: set(range(200)) for n in range(300)}",
        "for row in groups.values(): row.update(range(1000))",
        "groups",
        "in 300 of its items",
    ),
    "a part of a list": (
        "rows = [bytearray(5000) for _ in range(90)]",
        "for row in rows[:50]: row.extend(bytes(700_000))",
        "rows",
        "in 50 of its items",
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_small_objects_that_grew_together_are_named_once(notebook: Kernel, case: str) -> None:
    before, grows, path, items = TOGETHER[case]
    run_quietly(notebook, before)
    (text,) = run_quietly(notebook, experiment(grows, name="grows")).reports("experiment")
    rows = re.findall(r"^ *(\S+) grew by ([\d.]+) MiB, (in .* items)$", text, re.MULTILINE)
    assert [(row[0], row[2]) for row in rows] == [(path, items)], text
    assert "not named" not in text, text


def test_new_objects_in_an_older_list_have_not_grown(notebook: Kernel) -> None:
    run_quietly(
        notebook,
        """
        class A: pass
        a = A(); a.rows = [bytearray(8192) for _ in range(200)]
        """,
    )
    (text,) = run_quietly(
        notebook,
        """
        %%experiment grows
        a.rows = None
        a.rows = [bytearray(300_000) for _ in range(200)]
        """,
    ).reports("experiment")
    assert "grew by" not in text, text
    assert "a.rows = None" in text


def test_objects_that_did_not_grow_are_not_named(notebook: Kernel) -> None:
    run_quietly(notebook, "buf = bytearray(30 << 20); keeper = []")
    (text,) = run_quietly(
        notebook, experiment("x = bytes(64 << 20); keeper.append(x)", name="grows")
    ).reports("experiment")
    assert "grew by" not in text, text

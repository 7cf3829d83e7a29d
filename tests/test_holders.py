"""``%gpumem why`` names every holder, in a kernel of its own."""

import json
from typing import Any

import pytest

from tests.kernel import Kernel
from tests.steps import kernel_with, works
from tests.test_sizes import linux

MIB = 1 << 20
_ASK = """
def ask(name):
    import json
    from ipygpumem.shell.app import app_of
    display, reports = app_of(get_ipython()).context.display, []
    shown, display.show = display.show, lambda new, *_, **__: reports.extend(new)
    try:
        get_ipython().run_line_magic("gpumem", f"why {name}")
    finally:
        display.show = shown
    (record,) = reports[0].records
    return json.dumps(record.to_dict())
"""
kernel = kernel_with("%load_ext ipygpumem", _ASK)


def why(kernel: Kernel, name: str) -> Any:
    """Return the record of ``%gpumem why name``."""
    return json.loads(kernel.value(f"ask({name!r})"))


def holders(answer: Any) -> dict[str, str]:
    """Return the line for each holder of at least a tenth of an object."""
    size = sum(answer["device_bytes"].values())
    found = {}
    for part in answer["held"]:
        if sum(part["device_bytes"].values()) >= size / 10:
            found[part["holder"]["path"]] = part["holder"]["advice"]
    return found


def test_a_dict_holds_its_text_keys(kernel: Kernel) -> None:
    works(
        kernel,
        """
        table = {str(number) * 20: number for number in range(50_000)}
        keys = list(table)
        """,
    )
    answer = why(kernel, "keys")
    assert holders(answer) == {"notebook variable table (as a key)": "del table"}


@pytest.mark.parametrize(
    "make",
    [
        "collections.OrderedDict((key, 0) for key in texts)",
        "collections.defaultdict(int, dict.fromkeys(texts, 0))",
        "collections.Counter(texts)",
        "dict.fromkeys(texts)",
        "types.MappingProxyType(dict.fromkeys(texts))",
        "Table(dict.fromkeys(texts))",
    ],
)
def test_keys_of_every_dict_are_held_by_it(kernel: Kernel, make: str) -> None:
    works(
        kernel,
        f"""
        import collections, types
        class Table(dict): pass
        texts = [str(number) * 20 for number in range(20_000)]
        table = {make}
        """,
    )
    paths = list(holders(why(kernel, "texts")))
    assert len(paths) == 1
    assert paths[0].startswith("notebook variable table")


@linux
@pytest.mark.parametrize(
    "make",
    [
        "collections.OrderedDict((str(n) * 20, [n]) for n in range(20_000))",
        "collections.OrderedDict((n + 1000, [n]) for n in range(20_000))",
        "collections.OrderedDict((str(n) * 9, n) for n in range(300_000))",
        "collections.OrderedDict((n + 1000, n) for n in range(300_000))",
        "Ordered((str(n) * 20, [n]) for n in range(20_000))",
        "collections.OrderedDict([('x' * 8_000_000, 1)])",
        "collections.UserDict(collections.OrderedDict((str(n) * 20, n) for n in range(20_000)))",
        "collections.Counter({str(n) * 20: n for n in range(20_000)})",
    ],
)
def test_del_frees_a_dict_with_its_keys(kernel: Kernel, make: str) -> None:
    works(
        kernel,
        f"""
        import collections
        class Ordered(collections.OrderedDict): pass
        table = {make}
        """,
    )
    answer = why(kernel, "table")
    assert holders(answer) == {}
    assert sum(answer["freed_bytes"].values()) >= 0.98 * sum(answer["device_bytes"].values())


_SHARED_DATABASE = """
import sqlite3
def connect():
    return sqlite3.connect("file:shared?mode=memory&cache=shared", uri=True)
def fill(connection):
    connection.execute("create table if not exists texts (text)")
    connection.executemany("insert into texts values (?)", [("y" * 1000,)] * 20_000)
    connection.commit()
"""


def test_connections_of_one_cache_hold_it_together(kernel: Kernel) -> None:
    works(kernel, _SHARED_DATABASE, "first = connect(); second = connect(); fill(first)")
    answer = why(kernel, "first")
    assert sum(answer["device_bytes"].values()) > 19 * MIB
    assert sum(answer["freed_bytes"].values()) < MIB
    assert holders(answer) == {"notebook variable second": "del second"}
    works(kernel, "second.close(); del second")
    answer = why(kernel, "first")
    assert sum(answer["freed_bytes"].values()) > 19 * MIB
    works(kernel, "first.close(); del first")


def test_three_connections_of_one_cache_hold_it(kernel: Kernel) -> None:
    works(kernel, _SHARED_DATABASE, "first = connect(); fill(first)")
    works(kernel, "several = [connect(), connect()]")
    assert set(holders(why(kernel, "first")).values()) == {"del several"}
    works(kernel, "for one in [first, *several]: one.close()", "del first, several, one")


def test_connections_of_two_databases_are_apart(kernel: Kernel) -> None:
    works(
        kernel,
        _SHARED_DATABASE,
        "first = connect(); second = sqlite3.connect(':memory:'); fill(first); fill(second)",
    )
    for name in ("first", "second"):
        answer = why(kernel, name)
        assert sum(answer["freed_bytes"].values()) > 19 * MIB
        assert holders(answer) == {}

"""%gpumem status in a real kernel: what the memory consists of, at any moment and without side effects."""

from __future__ import annotations

import re

from ipygpumem.units import GIB, MIB, parse_bytes
from tests.kernel import Kernel
from tests.smoke.steps import ok

_ROW = re.compile(r"^ +([\d.]+ (?:[KMGTP]i)?B)  +(\S.*?)  +\S", re.MULTILINE)
_TITLE = re.compile(r"^  RAM: ([\d.]+ (?:[KMGTP]i)?B), (.+)$", re.MULTILINE)


def parts(kernel: Kernel) -> dict[str, int]:
    """Return the rows of the host's table; they sum to its title but for what rounding loses."""
    (status,) = ok(kernel, "%gpumem status").reports("status")
    title = _TITLE.search(status)
    assert title is not None, status
    table = re.split(r"\n  (?:no experiment is open|experiment |child processes, by )", status[title.end() :])[0]
    rows = {name: parse_bytes(size) for size, name in _ROW.findall(table)}
    assert abs(sum(rows.values()) - parse_bytes(title[1])) < len(rows) * GIB // 100, status
    return rows


def own(rows: dict[str, int]) -> int:
    return sum(size for name, size in rows.items() if name.startswith(("this process", "arrays:")))


def test_the_hosts_parts_sum_to_its_total_and_follow_what_cells_do(notebook: Kernel) -> None:
    before = own(parts(notebook))
    ok(notebook, "block = bytearray(b'x') * (512 << 20)")
    held = own(parts(notebook))
    assert abs(held - before - 512 * MIB) < 32 * MIB
    ok(notebook, "del block")
    assert abs(own(parts(notebook)) - before) < 32 * MIB


def test_it_imports_no_framework_and_changes_nothing_of_the_collectors(notebook: Kernel) -> None:
    ok(notebook, "import gc, sys, threading")
    look = (
        "(gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), threading.active_count(), 'torch' in sys.modules)"
    )
    before = notebook.value(look)
    parts(notebook)
    assert notebook.value(look) == before


def test_it_keeps_no_object_alive(notebook: Kernel) -> None:
    ok(
        notebook,
        "import gc, weakref\nclass Thing: pass\nthing = Thing()\nthing.block = bytearray(1 << 20)\n"
        "died = []\nweakref.finalize(thing, died.append, 1).atexit = False",
    )
    parts(notebook)
    ok(notebook, "del thing")
    assert notebook.value("died") == [1]

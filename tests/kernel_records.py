"""Records of ``%gpumem why`` and ``%gpumem leaks`` in a kernel, which the code here returns."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from benchmarks.harness.kernel import Kernel
from tests.steps import run_cells

READ_WHY = """
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


def why_record(kernel: Kernel, name: str) -> Any:
    """Return the record of ``%gpumem why name``."""
    return json.loads(kernel.value(f"ask({name!r})"))


def lines_by_holder(answer: Any) -> dict[str, str]:
    """Return the line for each holder of at least a tenth of an object."""
    size = sum(answer["device_bytes"].values())
    line_by_path = {}
    for part in answer["held"]:
        if sum(part["device_bytes"].values()) >= size / 10:
            line_by_path[part["holder"]["path"]] = part["holder"]["advice"]
    return line_by_path


READ_LEAKS = """
def leak_rows():
    import json
    from ipygpumem.shell.app import app_of
    display, reports = app_of(get_ipython()).context.display, []
    shown, display.show = display.show, lambda new, *_, **__: reports.extend(new)
    try:
        get_ipython().run_line_magic("gpumem", "leaks")
    finally:
        display.show = shown
    last_rows[:] = [row for report in reports for row in report.records if hasattr(row, "holder")]
    return rows(last_rows)
last_rows = []
from ipygpumem.shell.app import app_of
app = app_of(get_ipython())
def survivor_rows():
    return rows(app_of(get_ipython()).experiments.finished[-1].survivors)
def rows(records):
    import json
    return json.dumps([(row.size_bytes, row.holder.path, row.holder.advice) for row in records])
import asyncio, concurrent.futures, gc, weakref
import numpy as np
watched = []
def array():
    made = np.ones(10_000)
    watched.append(weakref.ref(made))
    return made
async def wait(data):
    await asyncio.sleep(1000)
async def give():
    return array()
"""


class Row(NamedTuple):
    """A row of ``%gpumem leaks`` or of an experiment's report."""

    size_bytes: int
    path: str
    """The holder, as the report writes it."""
    line: str
    """The line that frees the row; words if none can."""


def leak_rows(kernel: Kernel) -> list[Row]:
    """Return the rows of ``%gpumem leaks``."""
    return [Row(*fields) for fields in json.loads(kernel.value("leak_rows()"))]


def survivor_rows(kernel: Kernel) -> list[Row]:
    """Return the rows of the last experiment's report."""
    return [Row(*fields) for fields in json.loads(kernel.value("survivor_rows()"))]


class Survivor(NamedTuple):
    """An object, or several, that an experiment has left."""

    type_name: str
    size_bytes: int
    path: str | None
    """The holder, as the report writes it; None if none is known."""
    line: str | None


_SURVIVORS = """[
    (row.type_name, row.size_bytes)
    + ((row.holder.path, row.holder.advice) if row.holder else (None, None))
    for row in __import__("ipygpumem").experiments()[-1].survivors
]"""


def survivors(kernel: Kernel) -> list[Survivor]:
    """Return the rows of the last experiment's report, in a kernel without READ_LEAKS."""
    return [Survivor(*fields) for fields in kernel.value(_SURVIVORS)]


def assert_lines_free_all(kernel: Kernel, rows: list[Row]) -> None:
    """Run the lines of rows, after which ``%gpumem leaks`` has no row."""
    for row in rows:
        run_cells(kernel, row.line)
    assert leak_rows(kernel) == []


def survivor_parts(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last experiment."""
    return dict(kernel.value("app.experiments.finished[-1].survivors[0].parts"))


def leak_parts(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last ``leak_rows``."""
    return dict(kernel.value("last_rows[0].parts"))


def number_alive(kernel: Kernel) -> int:
    """Return the number of arrays that are still alive."""
    run_cells(kernel, "import asyncio, gc; await asyncio.sleep(0); gc.collect();")
    return int(kernel.value("sum(one() is not None for one in watched)"))


RSS = """(lambda: (
    __import__("gc").collect(),
    __import__("ctypes").CDLL(None).malloc_trim(0),
    sum(
        int(line.split()[1]) << 10
        for line in open("/proc/self/status")
        if line.startswith(("RssAnon", "RssShmem"))
    ),
)[-1])()"""


def total(device_bytes: Any) -> int:
    return sum(device_bytes.values())

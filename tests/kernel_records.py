"""Records of ``%gpumem why`` and ``%gpumem leaks`` in a kernel, which the code here returns."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness.kernel import Kernel
from tests.steps import works

ASK = """
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


def why(kernel: Kernel, name: str) -> Any:
    """Return the record of ``%gpumem why name``."""
    return json.loads(kernel.value(f"ask({name!r})"))


def holders(answer: Any) -> dict[str, str]:
    """Return the line for each holder of at least a tenth of an object."""
    size = sum(answer["device_bytes"].values())
    line_by_path = {}
    for part in answer["held"]:
        if sum(part["device_bytes"].values()) >= size / 10:
            line_by_path[part["holder"]["path"]] = part["holder"]["advice"]
    return line_by_path


LEFT = """
def left():
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
def left_by_experiment():
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


def left(kernel: Kernel) -> list[tuple[int, str, str]]:
    """Return the bytes, the holder and the line of each row of ``%gpumem leaks``."""
    return [tuple(row) for row in json.loads(kernel.value("left()"))]


def left_by_experiment(kernel: Kernel) -> list[tuple[int, str, str]]:
    """Return the bytes, the holder and the line of each row of the last experiment."""
    return [tuple(row) for row in json.loads(kernel.value("left_by_experiment()"))]


def parts_at_the_end(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last experiment."""
    return dict(kernel.value("app.experiments.finished[-1].survivors[0].parts"))


def parts_later(kernel: Kernel) -> dict[str, int]:
    """Return the parts of the only row of the last ``left``."""
    return dict(kernel.value("last_rows[0].parts"))


def alive(kernel: Kernel) -> int:
    """Return the number of arrays that are still alive."""
    works(kernel, "import asyncio, gc; await asyncio.sleep(0); gc.collect();")
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

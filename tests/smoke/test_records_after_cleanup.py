"""A record is made once everything that gives memory back has run: line, report, history, pictures, exports agree."""

from __future__ import annotations

import json

import pytest

from tests.kernel import Kernel
from tests.smoke.steps import fails, ok, sizes

MIB = 2**20
LAST = """import json
_cell = ipygpumem.last()
_host = _cell.usages[0]
print(json.dumps([_host.before_bytes, _host.after_bytes, _host.peak_bytes, _cell.reclaimed.get("cpu", 0)]))"""
ENDINGS = {
    "an experiment": ("%%experiment big --keep total\nblock = bytearray(256 << 20)\ntotal = len(block)", None),
    "experiments inside each other": (
        "%%experiment outer\ninner = ipygpumem.experiment('inner').start()\nblock = bytearray(256 << 20)",
        None,
    ),
    "a recovery": (
        "def fill():\n    block = bytearray(256 << 20)\n    raise MemoryError\n\nfill()",
        "MemoryError",
    ),
    "a recovery in an experiment": (
        "%%experiment failing\nother = bytearray(128 << 20)\ndef fill():\n    block = bytearray(128 << 20)\n"
        "    raise MemoryError\n\nfill()",
        "MemoryError",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_cell_kept_what_is_left_after_its_own_clean_up(notebook: Kernel, ending: str) -> None:
    """What its code held when it ended is in the peak, and what came back of it has a field of its own."""
    code, error = ENDINGS[ending]
    ok(notebook, "import ipygpumem\n%gpumem free")
    reply = ok(notebook, code) if error is None else fails(notebook, code, error)
    line = reply.reports("cell")[0].splitlines()[0]
    assert abs(sizes(line, "RAM")) < 16
    assert abs(sizes(line, "peak") - 256) < 16
    before, after, peak, reclaimed = json.loads(ok(notebook, LAST).stdout)
    assert abs(after - before) < 16 * MIB
    assert abs(peak - before - 256 * MIB) < 16 * MIB
    assert abs(reclaimed - 256 * MIB) < 16 * MIB


def test_all_that_tells_of_a_session_tells_the_same(notebook: Kernel) -> None:
    """After an experiment of one cell: pictures, exports, history, its own record and the cell's."""
    ok(notebook, "import ipygpumem\n%gpumem free")
    reply = ok(notebook, "%%experiment big\nblock = bytearray(256 << 20)")
    assert reply.reports("cell")[0].count(" now") == 1
    found = ok(
        notebook,
        """import csv, json, pathlib, tempfile
_file = pathlib.Path(tempfile.mkdtemp(), "session.csv")
ipygpumem.export(_file)
with _file.open() as _lines:
    _row = [row for row in csv.DictReader(_lines) if row["device"] == "cpu"][-1]
_cell, _record = ipygpumem.last(), ipygpumem.experiments()[-1]
print(json.dumps([_cell.usages[0].after_bytes, _record.usages[0].after_bytes, int(_row["after_bytes"])]))
print(_record.cells[-1] == _cell)""",
    ).stdout.splitlines()
    cell, experiment, exported = json.loads(found[0])
    assert cell == exported
    assert abs(cell - experiment) < MIB
    assert found[1] == "True"

"""Records are small, can be pickled, and are read whatever their version; test_export takes them through JSON."""

from __future__ import annotations

import pickle

from ipygpumem.model import CellRecord, ExperimentRecord, Usage


def test_records_that_there_are_many_of_have_no_dict_and_are_pickled() -> None:
    usage = Usage("cpu", 1, 2, 3, None, "kernel")
    cell = CellRecord(1, "id", None, 0.0, 1.0, True, None, (usage,), "digest", "x = 1")
    assert not hasattr(cell, "__dict__")
    assert not hasattr(usage, "__dict__")
    assert pickle.loads(pickle.dumps(cell)) == cell


def test_records_of_older_and_newer_versions_are_read() -> None:
    cell = CellRecord(1, "id", None, 0.0, 1.0, True, None, (), "digest", "x = 1").to_dict()
    old_cell = {key: cell[key] for key in cell if key not in ("source_digest", "source_line", "recovery")}
    read = CellRecord.from_dict({**old_cell, "later_bytes": 5})
    assert (read.source_digest, read.source_line, read.recovery) == ("", "", None)
    experiment = ExperimentRecord("a", 0.0, 1.0, (read,), (), {}, {}, (), (), (), ()).to_dict()
    del experiment["parameters"], experiment["ooms"]
    old = ExperimentRecord.from_dict(experiment)
    assert (old.parameters, old.ooms, old.cells) == ({}, 0, (read,))

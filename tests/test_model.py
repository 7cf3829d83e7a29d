"""Records survive their way through JSON."""

from __future__ import annotations

import functools
import json
import pickle
import types
import typing
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipygpumem import model
from ipygpumem.model import CellRecord, EngineRecord, ExperimentRecord, Usage
from ipygpumem.record import Record

RECORDS = [
    kind for kind in vars(model).values() if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
]


@pytest.mark.parametrize("kind", RECORDS)
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a machine may be busy
@given(data=st.data())
def test_a_record_survives_json(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(_values(kind))
    assert kind.from_dict(json.loads(json.dumps(record.to_dict()))) == record


@functools.cache  # Hypothesis examines each strategy anew: that takes longer than all records
def _values(hint: object) -> st.SearchStrategy[object]:
    arguments = typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, (Record, tuple)):  # a tuple with names is a row of a record
        hints = typing.get_type_hints(hint)
        if hint is EngineRecord:  # an experiment has engines, and each of them an experiment, which has none
            hints["record"] = type(None)
        return st.builds(hint, **{name: _values(inner) for name, inner in hints.items()})
    if typing.get_origin(hint) in (tuple, Sequence):
        return st.lists(_values(arguments[0]), max_size=2).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=3), _values(arguments[1]), max_size=2)
    if typing.get_origin(hint) is types.UnionType:
        return st.one_of(*map(_values, arguments))
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(arguments)
    return {
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=5),
        bool: st.booleans(),
        type(None): st.none(),
    }[hint]  # type: ignore[index]  # the plain types that are left


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

"""What a cell's and an experiment's records say beside the figures: source, recovery, parameters, OOMs."""

from __future__ import annotations

import enum
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import ExperimentError
from ipygpumem.magics.experiment import parse_parameters
from ipygpumem.records import CellRecord, ExperimentRecord
from ipygpumem.shell.experiments import checked_parameters
from ipygpumem.shell.ipython.sources import cell_that_bound, describing_line


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("loss = train()\nloss", "loss = train()"),
        ("\n\n# first\n%%time\n  loss = train()", "loss = train()"),
        ("import torch\nfrom x import (\n    y,\n    z)\nrun(y)", "run(y)"),
        ("# a comment\n%matplotlib inline", "%matplotlib inline"),
        ("", ""),
        ("x = '" + "y" * 200 + "'", "x = '" + "y" * 74 + "…"),
        ("#\n" * 10_000 + "x = 1", "#"),
    ],
)
def test_the_first_line_that_says_what_a_cell_does(source: str, line: str) -> None:
    assert describing_line(source) == line
    assert len(describing_line(source)) <= 80


def test_each_out_of_memory_error_counts_once_for_every_experiment_that_it_met(loaded: InteractiveShell) -> None:
    loaded.run_cell("%experiment start outer")
    loaded.run_cell("raise MemoryError")
    loaded.run_cell("%%experiment inner\nraise MemoryError")
    loaded.run_cell("1 / 0")
    loaded.run_cell("import ipygpumem\nwith ipygpumem.experiment('a'), ipygpumem.experiment('b'): raise MemoryError")
    loaded.run_cell(
        "for _ in range(3):\n"
        "    try:\n"
        "        with ipygpumem.experiment('caught'): raise MemoryError\n"
        "    except MemoryError: pass"
    )
    loaded.run_cell("%experiment end")
    counts = [(record.name, record.ooms) for record in ipygpumem.experiments()]
    assert counts == [("inner", 1), ("b", 1), ("a", 1), *[("caught", 1)] * 3, ("outer", 6)]


def test_notes_become_parameters(loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    notes = "--note lr=1e-3 bs=64 --note 'optimizer=AdamW fused' amp=True n=-0 big=1e400 not=nan odd=1_0 none= a=b=c"
    notes += " id=12345678901234567890"
    loaded.run_cell(f"%%experiment one {notes} --report none\n1")
    loaded.run_line_magic("config", "IPyGpuMem.experiment_report = 'full'")
    with ipygpumem.experiment("two", note={"lr": 0.5, "amp": True, "name": Mode.FAST, "loss": float("nan")}):
        pass
    one, two = (record.parameters for record in ipygpumem.experiments())
    texts = {
        "optimizer": "AdamW fused",
        "amp": "True",
        "big": "inf",
        "not": "nan",
        "odd": "1_0",
        "none": "",
        "a": "b=c",
        "id": "12345678901234567890",
    }
    assert one == {"lr": 0.001, "bs": 64, "n": 0, **texts}
    assert two == {"lr": 0.5, "amp": "True", "name": "fast", "loss": "nan"}
    assert type(two["name"]) is str
    assert "noted: lr=0.5, amp=True, name=fast, loss=nan" in capsys.readouterr().out
    result = loaded.run_cell("%experiment start --note lr=1 run")
    assert "name" in str(result.error_in_exec)


class Mode(str, enum.Enum):
    """A text of a class of its own."""

    FAST = "fast"


@pytest.mark.parametrize("given", [5, [("lr", 1)], {1: 2}, {"a b": 1}, {"x": [1]}, {"x": 10**400}, {"x": 2**63}])
def test_a_note_from_python_holds_names_numbers_and_text(given: Any) -> None:
    with pytest.raises(ExperimentError, match="note"):
        checked_parameters(given)


@pytest.mark.parametrize("words", [["lr"], ["=1"], ["a b=1"], ["1=2"], ["x=1", "x=2"]])
def test_a_note_that_is_none_is_one_clear_line(words: list[str]) -> None:
    with pytest.raises(ExperimentError, match="--note: ") as caught:
        parse_parameters(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["%%experiment a --keep x", "%%autofit n=3"])
def test_a_cell_in_which_time_runs_one_of_our_magics_has_bound_what_its_code_binds(
    loaded: InteractiveShell, line: str
) -> None:
    loaded.run_cell("x = 0", store_history=True)
    loaded.run_cell(f"%%time\n{line}\nx = 1", store_history=True)
    assert cell_that_bound(loaded, "x") == 2


def test_records_of_older_and_newer_versions_are_read() -> None:
    cell = CellRecord(1, "id", None, 0.0, 1.0, True, None, (), "digest", "x = 1").to_dict()
    old_cell = {key: cell[key] for key in cell if key not in ("source_digest", "source_line", "recovery")}
    read = CellRecord.from_dict({**old_cell, "later_bytes": 5})
    assert (read.source_digest, read.source_line, read.recovery) == ("", "", None)
    experiment = ExperimentRecord("a", 0.0, 1.0, (read,), (), {}, {}, (), (), (), ()).to_dict()
    del experiment["parameters"], experiment["ooms"]
    old = ExperimentRecord.from_dict(experiment)
    assert (old.parameters, old.ooms, old.cells) == ({}, 0, (read,))

"""Records go to whoever subscribes; what fails there never reaches a cell."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import GpuMemError, NotLoadedError
from ipygpumem.model import CellRecord, ExperimentRecord


@pytest.fixture
def loaded(shell: InteractiveShell) -> InteractiveShell:
    shell.run_line_magic("load_ext", "ipygpumem")
    return shell


def test_every_cell_and_experiment_comes_once_in_the_order_in_which_they_finish(loaded: InteractiveShell) -> None:
    records: list[Any] = []
    undo = ipygpumem.subscribe(records.append)
    loaded.run_cell("x = 1")
    loaded.run_cell("%%experiment one\ny = 2")
    loaded.run_cell("%experiment start two")
    loaded.run_cell("%experiment end")
    undo()
    undo()
    loaded.run_cell("z = 3")
    kinds = [type(record) for record in records]
    assert kinds == [CellRecord, CellRecord, ExperimentRecord, CellRecord, ExperimentRecord, CellRecord]
    assert [record.name for record in records if type(record) is ExperimentRecord] == ["one", "two"]
    assert [record for record in records if type(record) is CellRecord] == list(ipygpumem.history())[:-1]


def test_one_that_fails_is_dropped_and_one_that_is_interrupted_stays(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[Any] = []

    def broken(record: Any) -> None:
        raise ValueError("no space\nleft")

    def leave(record: Any) -> None:
        raise SystemExit

    def slow(record: Any) -> None:
        records.append(record)
        raise KeyboardInterrupt

    for one in (broken, leave, slow):
        ipygpumem.subscribe(one)
    undo = ipygpumem.subscribe(records.append)
    assert loaded.run_cell("x = 1").success
    assert loaded.run_cell("x = 2").success
    undo()
    said = capsys.readouterr().err
    assert said.count("broken failed and gets no more records (ValueError: no space\N{REPLACEMENT CHARACTER}left)") == 1
    assert "slow was interrupted; it stays subscribed" in said
    assert len(records) == 4


def test_a_subscription_lasts_through_a_reload_and_its_undo_too(shell: InteractiveShell) -> None:
    records: list[Any] = []
    shell.run_line_magic("load_ext", "ipygpumem")
    undo = ipygpumem.subscribe(records.append)
    shell.run_line_magic("unload_ext", "ipygpumem")
    shell.run_cell("x = 1")
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell("x = 2")
    assert [record.source_line for record in records] == ["x = 2"]
    undo()
    shell.run_cell("x = 3")
    assert len(records) == 1
    assert not [name for name in vars(shell) if "ipygpumem" in name]


def test_what_cannot_be_called_and_a_shell_without_the_extension_are_named(shell: InteractiveShell) -> None:
    with pytest.raises(NotLoadedError):
        ipygpumem.subscribe(print)
    shell.run_line_magic("load_ext", "ipygpumem")
    with pytest.raises(GpuMemError, match="can be called"):
        ipygpumem.subscribe(5)  # type: ignore[arg-type]  # that is the mistake

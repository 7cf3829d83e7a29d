"""The examples in docstrings run, as in a script or in a notebook with one finished cell."""

import doctest
import importlib
from pathlib import Path

import numpy
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem

_SCRIPT = (
    "api.fitting",
    "api.freeing",
    "api.inventories",
    "api.loops",
    "api.traces",
    "fitting.reservations",
)
_SCRIPT += (
    "extras.moving.moving",
    "extras.moving.releasing",
    "extras.tracker.tracker",
    "records",
    "probes.device_memory",
    "reading",
    "units",
)


def run(name: str) -> int:
    module = importlib.import_module(f"ipygpumem.{name}")
    names = {"__name__": "__main__", "ipygpumem": ipygpumem, "numpy": numpy, "torch": torch}
    failed, tried = doctest.testmod(module, extraglobs=names, optionflags=doctest.REPORT_NDIFF)
    assert failed == 0
    return tried


@pytest.mark.usefixtures("script_memory", "others_out_of_sight")
@pytest.mark.parametrize("name", _SCRIPT)
def test_examples_of_scripts_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(name)


@pytest.mark.parametrize("name", ["shell.python", "extras.panel.panel", "extras.pictures.plot"])
def test_examples_of_notebooks(
    name: str, loaded: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded.run_cell("%%experiment demo --report none\nx = 1", store_history=True)
    assert run(name)

"""The recipes of docs/traces.md: loggers that subscribe."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.alone import ROOT


def recipe(title: str) -> str:
    """Return the code below a line of docs/traces.md that begins with ``title``."""
    text = (ROOT / "docs" / "traces.md").read_text("utf-8").split("### Loggers")[1]
    code_block = re.search(rf"^{title}.*?```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code_block
    return code_block[1]


@pytest.fixture(scope="module")
def accumulator() -> Any:
    """TensorBoard's reader, imported before a test looks for import hooks: absl, which it needs,
    installs one.
    """
    return importlib.import_module("tensorboard.backend.event_processing.event_accumulator")


def test_tensorboard_has_the_peak_of_every_cell(
    accumulator: Any, shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell.run_cell("""
    %load_ext ipygpumem
    import ipygpumem
    """)
    assert shell.run_cell(recipe("TensorBoard")).success
    peaks = []
    for number in range(3):
        shell.run_cell(f"x = bytearray({number} * 2**24)")
        peaks.append(shell.run_cell("ipygpumem.last().usages[0].peak_bytes").result)
    shell.run_cell("stop(); writer.close()")
    (folder,) = (tmp_path / "runs").glob("memory/*cpu*")
    events = accumulator.EventAccumulator(str(folder)).Reload().Scalars("peak_bytes")
    assert [event.step for event in events] == list(range(7))  # the recipe's own cell is the first
    assert [event.value for event in events[1::2]] == pytest.approx(peaks)


class FakeLogger:
    """Has ``log_metrics`` as MLflow and ``log`` as W&B, with MLflow's rule for names."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        assert all(re.fullmatch(r"[\w./ -]+", name) for name in metrics)
        self.logged.append(metrics)

    def log(self, data: dict[str, float]) -> None:
        self.logged.append(data)


@pytest.mark.parametrize(("title", "module"), [("MLflow", "mlflow"), ("Weights", "wandb")])
def test_other_recipes_run_against_a_stand_in(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, title: str, module: str
) -> None:
    logger = FakeLogger()
    monkeypatch.setitem(sys.modules, module, logger)
    shell.run_cell("""
    %load_ext ipygpumem
    import ipygpumem
    """)
    assert shell.run_cell(recipe(title)).success
    assert shell.run_cell("x = 1").success
    shell.run_cell("stop()")
    assert len(logger.logged) == 2
    assert all(logger.logged)  # with one metric for each device

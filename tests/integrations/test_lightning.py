"""The callback in Lightning's Trainer."""

from __future__ import annotations

import copy
import csv
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from ipygpumem.integrations.lightning import MemoryCallback
from tests.integrations.steps import (
    OF_PHASES,
    Card,
    Network,
    Optimizer,
    is_closed,
    is_sampled_after_a_cell,
    on_card,
    records,
    rows,
    run_example,
    sample_one_more,
    weights,
)


class Module(LightningModule):
    def __init__(self, card: Card | None = None) -> None:
        super().__init__()
        self.network, self.card = Network(card), card

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.network(x), y)

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("loss", self.training_step(batch, number))

    def configure_optimizers(self) -> Any:
        return Optimizer(self.parameters(), self.card)


def fit(
    folder: Path, *callbacks: Callback, card: Card | None = None, module: LightningModule | None = None, **options: Any
) -> Trainer:
    """Train two steps an epoch, for two epochs."""
    usual: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few workers for the data, and its like
        trainer = Trainer(
            accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), **{**usual, **quiet, **options}
        )
        trainer.fit(module or Module(card), DataLoader(rows(), batch_size=4), DataLoader(rows(1)))
    return trainer


def test_each_epoch_is_in_the_loggers_and_in_the_trainers_metrics(card: Card, tmp_path: Path) -> None:
    trainer = fit(tmp_path, MemoryCallback(), card=card, logger=CSVLogger(tmp_path))
    assert records() == [("epoch", 1, 1, 33), ("epoch", 2, 0, 32)]
    assert on_card(trainer.callback_metrics) == {"kept_mib": 0.0, "peak_mib": 32.0}
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        logged = [row for row in csv.DictReader(file) if row["mem/cuda_0/peak_mib"]]
    assert [(row["epoch"], row["mem/cuda_0/kept_mib"], row["mem/cuda_0/peak_mib"]) for row in logged] == [
        ("0", "1.0", "33.0"),
        ("1", "0.0", "32.0"),
    ]
    assert set(on_card(logged[0])) == {"kept_mib", "peak_mib"}


MINE = "mem/cuda_0/peak_mib"
"""A name of ours that the user's code logs, too."""


def own_log(where: str) -> type[Module]:
    """Return a module that logs 7 under that name, in one of its hooks."""

    def hook(self: Module, *batch: Any) -> Any:
        result = getattr(Module, where)(self, *batch)
        self.log(MINE, 7.0)
        return result

    return type("Logging", (Module,), {where: hook})


@pytest.mark.parametrize(
    "where",
    ["training_step", "validation_step", "on_train_epoch_end", "on_validation_epoch_end", "on_train_epoch_start"],
)
def test_a_name_that_the_module_logs_itself_is_left_to_it_and_said_once(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Two logs of one name in the same hook, as Lightning has it, are an error of the later one: the module's."""
    fit(tmp_path / "alone", module=own_log(where)(), logger=CSVLogger(tmp_path / "alone"))
    trainer = fit(tmp_path, MemoryCallback(), module=own_log(where)(card), logger=CSVLogger(tmp_path / "ours"))
    assert trainer.callback_metrics[MINE] == 7.0
    theirs = mine_in(tmp_path / "alone")
    assert theirs
    assert mine_in(tmp_path / "ours") == theirs
    assert len([row for row in logged_rows(tmp_path / "ours") if row["mem/cuda_0/kept_mib"]]) == 2
    assert capsys.readouterr().err.count(f"something else logs {MINE} already") == 1


def logged_rows(folder: Path) -> list[dict[str, str]]:
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def mine_in(folder: Path) -> list[tuple[str, str]]:
    """Return where and what was logged under the name."""
    return [(row["step"], row[MINE]) for row in logged_rows(folder) if row[MINE]]


def test_another_callbacks_log_of_the_same_name_stays_and_can_be_monitored(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log(MINE, 7.0, logger=False)

    monitor = EarlyStopping(MINE, check_on_train_epoch_end=True)
    trainer = fit(tmp_path, MemoryCallback(), Own(), monitor, card=card, logger=CSVLogger(tmp_path))
    assert (trainer.callback_metrics[MINE], monitor.best_score) == (7.0, 7.0)
    assert capsys.readouterr().err.count("already, and so this memory callback does not") == 1


def test_our_figures_can_be_monitored(card: Card, tmp_path: Path) -> None:
    monitor = EarlyStopping(MINE, check_on_train_epoch_end=True)
    fit(tmp_path, monitor, MemoryCallback(), card=card)
    assert monitor.best_score == 32.0


def test_figures_have_the_axis_that_the_module_gives_its_own(card: Card, tmp_path: Path) -> None:
    """As Lightning's documentation says it of a metric that is called ``step``."""

    class ByEpoch(Module):
        def on_train_epoch_end(self) -> None:
            self.log("step", 100.0 * (self.current_epoch + 1))

    fit(tmp_path, MemoryCallback(), module=ByEpoch(card), logger=CSVLogger(tmp_path))
    assert mine_in(tmp_path) == [("100", "33.0"), ("200", "32.0")]


def test_an_epoch_before_an_error_is_logged(card: Card, tmp_path: Path) -> None:
    class Bad(Module):
        def on_train_epoch_end(self) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fit(tmp_path, MemoryCallback(), module=Bad(card), logger=CSVLogger(tmp_path))
    assert mine_in(tmp_path) == [("1", "33.0")]


def test_each_phase_is_exact(card: Card, tmp_path: Path) -> None:
    trainer = fit(tmp_path, MemoryCallback(phases=True), card=card, max_epochs=1)
    assert on_card(trainer.callback_metrics) == OF_PHASES
    assert [label for label, *_ in records()] == ["forward", "backward", "optimizer", "validation", "epoch"]


def test_one_that_was_added_twice_measures_the_same(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    trainer = fit(tmp_path, callback, callback, card=card, max_epochs=1)
    assert on_card(trainer.callback_metrics) == OF_PHASES
    assert len(records()) == 5


def test_the_figures_of_a_second_one_are_not_taken_for_the_users(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = CSVLogger(tmp_path)
    trainer = fit(tmp_path, MemoryCallback(phases=True), MemoryCallback(), card=card, logger=logger)
    assert on_card(trainer.callback_metrics)["peak_mib"] == 32.0
    assert mine_in(tmp_path) == [("1", "33.0")] * 2 + [("3", "32.0")] * 2
    assert "something else logs" not in capsys.readouterr().err


def test_every_process_can_monitor_its_figures_and_the_first_alone_logs_them(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor stops the training of a process that has no such metric."""
    monkeypatch.setattr(Trainer, "is_global_zero", False)
    monitor = EarlyStopping(MINE, check_on_train_epoch_end=True)
    fit(tmp_path, monitor, MemoryCallback(), card=card, logger=CSVLogger(tmp_path))
    assert monitor.best_score == 32.0
    assert not any(MINE in row for row in logged_rows(tmp_path))


def test_every_batch_counts_when_gradients_are_accumulated(card: Card, tmp_path: Path) -> None:
    class Second(Module):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            card.move(0, 64 * number)
            return super().training_step(batch, number)

    callback = MemoryCallback(phases=True)
    figures = on_card(fit(tmp_path, callback, module=Second(card), accumulate_grad_batches=2).callback_metrics)
    assert (figures["forward/peak_mib"], figures["backward/peak_mib"], figures["optimizer/peak_mib"]) == (64, 16, 3)


def test_manual_optimization_tells_only_backward_and_validation(card: Card, tmp_path: Path) -> None:
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = super().training_step(batch, number)
            if loss.requires_grad:
                self.manual_backward(loss)
                self.optimizers().step()
                self.network(batch[0])
            return loss

    fit(tmp_path, MemoryCallback(phases=True), module=Manual(card), max_epochs=1)
    assert [label for label, *_ in records()] == ["backward", "validation", "epoch"]


def test_an_optimizer_that_computes_the_loss_again_is_no_phase(card: Card, tmp_path: Path) -> None:
    class Again(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    fit(tmp_path, MemoryCallback(phases=True), module=Again(card), max_epochs=1)
    assert [label for label, *_ in records()] == ["forward", "backward", "validation", "epoch"]


def test_a_validation_of_the_users_own_is_none_of_the_trainings(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    trainer = fit(tmp_path, callback, card=card, max_epochs=1)
    before = records()
    trainer.validate(Module(card), DataLoader(rows(1)), verbose=False)
    assert records() == before
    assert is_closed(callback.epochs)


def test_the_training_gives_the_same_weights_as_without(card: Card, tmp_path: Path) -> None:
    def train(*callbacks: Callback) -> list[float]:
        trainer = fit(tmp_path, *callbacks)
        return weights(trainer.lightning_module)

    assert train(MemoryCallback(phases=True)) == train()


@pytest.mark.usefixtures("card", "broken_meter")
def test_a_failure_of_ours_is_said_once_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path, MemoryCallback(phases=True)).global_step == 4
    assert capsys.readouterr().err.count("ipygpumem: the memory callback failed (RuntimeError: no counters here)") == 1


def test_after_an_error_in_the_training_nothing_is_open(card: Card, tmp_path: Path) -> None:
    class Bad(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise ValueError("mine")

    callback = MemoryCallback(phases=True)
    with pytest.raises(ValueError, match="mine"):
        fit(tmp_path, callback, module=Bad(card))
    assert is_closed(callback.epochs)
    assert records() == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_that_another_callback_answers_with_an_error_leaves_nothing_open(
    card: Card, tmp_path: Path, error: type[BaseException]
) -> None:
    class Bad(Callback):
        def on_validation_end(self, *more: Any) -> None:
            if trainer_state["fails"]:
                raise error("mine")

        def on_exception(self, *more: Any) -> None:
            raise error("again")

    trainer_state = {"fails": True}
    sample_one_more()
    callback = MemoryCallback(phases=True)
    with pytest.raises(error) as raised:
        fit(tmp_path, Bad(), callback, card=card, num_sanity_val_steps=0)
    assert not is_sampled_after_a_cell()
    before = len(records())
    trainer_state["fails"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Trainer(accelerator="cpu", logger=False, callbacks=[callback], enable_progress_bar=False)
        again.validate(Module(card), DataLoader(rows(1)), verbose=False)
    assert len(records()) == before
    assert is_closed(callback.epochs)
    del raised


def test_the_callback_can_be_copied_and_pickled(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    fit(tmp_path, callback, card=card, max_epochs=1)
    gc.collect()
    for other in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert other.epochs.phases
        assert is_closed(other.epochs)


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = run_example("Lightning")["trainer"].callback_metrics
    assert {"mem/cpu/peak_mib", "mem/cpu/forward/peak_mib"} <= set(metrics)

"""The callback in Hugging Face's Trainer."""

from __future__ import annotations

import gc
import pickle
import traceback
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerCallback, TrainingArguments

from ipygpumem.integrations.hf import MemoryCallback
from tests.integrations.steps import (
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

ROWS = [{"x": x, "labels": y} for x, y in rows()]


class Model(Network):
    """The network as the trainer wants it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = super().forward(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def trainer(
    folder: Path, *callbacks: TrainerCallback, card: Card | None = None, kind: type[Trainer] = Trainer, **options: Any
) -> Any:
    """Return a trainer of two steps an epoch, for two epochs."""
    usual = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "logging_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    model = Model(card)
    data = options.pop("eval_dataset", ROWS[:1])
    return kind(
        model,
        TrainingArguments(str(folder), **{**usual, **options}),
        train_dataset=ROWS,
        eval_dataset=data,
        optimizers=(Optimizer(model.parameters(), card), None),
        callbacks=list(callbacks),
    )


def logged(trainer: Any) -> list[dict[str, float]]:
    """Return what the trainer's log has of the card."""
    return [figures for entry in trainer.state.log_history if (figures := on_card(entry))]


def test_each_epoch_is_in_the_log_and_in_tensorboard(card: Card, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trained = trainer(tmp_path, MemoryCallback(), card=card, report_to="tensorboard")
    trained.train()
    assert logged(trained) == [{"kept_mib": 1.0, "peak_mib": 21.0}, {"kept_mib": 0.0, "peak_mib": 20.0}]
    assert records() == [("epoch", 1, 1, 21), ("epoch", 2, 0, 20)]
    entries = [entry for entry in trained.state.log_history if "mem/cuda_0/peak_mib" in entry]
    assert [(entry["epoch"], entry["step"]) for entry in entries] == [(1.0, 2), (2.0, 4)]
    (folder,) = {path.parent for path in (tmp_path / "runs").rglob("events*")}
    board = EventAccumulator(str(folder))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/mem/cuda_0/peak_mib")] == [(2, 21.0), (4, 20.0)]
    assert len(board.Scalars("train/loss")) == 2


def test_the_phases_are_those_that_the_trainer_lets_one_tell_apart(card: Card, tmp_path: Path) -> None:
    trained = trainer(tmp_path, MemoryCallback(phases=True), card=card, eval_strategy="epoch")
    trained.train()
    first, validated, second, again = logged(trained)
    passes = {"forward_backward/kept_mib": 0.0, "forward_backward/peak_mib": 20.0}
    assert first == {
        "kept_mib": 1.0,
        "peak_mib": 21.0,
        "optimizer/kept_mib": 1.0,
        "optimizer/peak_mib": 3.0,
        **passes,
    }
    assert second == {
        "kept_mib": 0.0,
        "peak_mib": 20.0,
        "optimizer/kept_mib": 0.0,
        "optimizer/peak_mib": 3.0,
        **passes,
    }
    assert validated == again == {"validation/kept_mib": 0.0, "validation/peak_mib": 32.0}
    assert [label for label, *_ in records()] == ["forward_backward", "optimizer", "epoch", "validation"] * 2


def test_a_validation_inside_an_epoch_counts_for_it(card: Card, tmp_path: Path) -> None:
    trained = trainer(
        tmp_path, MemoryCallback(phases=True), card=card, eval_strategy="steps", eval_steps=1, num_train_epochs=1
    )
    trained.train()
    first, second, epoch = logged(trained)
    assert first == second == {"validation/kept_mib": 0.0, "validation/peak_mib": 32.0}
    assert epoch["peak_mib"] == 33.0


def test_one_that_was_added_twice_measures_the_same(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    trained = trainer(tmp_path, callback, callback, card=card, eval_strategy="epoch")
    trained.train()
    assert [(label, number) for label, number, *_ in records()] == [
        (label, number) for number in (1, 2) for label in ("forward_backward", "optimizer", "epoch", "validation")
    ]
    assert [len(figures) for figures in logged(trained)] == [6, 2, 6, 2]


def test_gradients_of_several_batches_are_one_run(card: Card, tmp_path: Path) -> None:
    trained = trainer(
        tmp_path, MemoryCallback(phases=True), card=card, gradient_accumulation_steps=2, num_train_epochs=1
    )
    trained.train()
    assert [(label, peak) for label, _, _, peak in records()] == [
        ("forward_backward", 20),
        ("optimizer", 3),
        ("epoch", 20),
    ]


def test_each_of_several_data_sets_is_a_validation(card: Card, tmp_path: Path) -> None:
    trained = trainer(
        tmp_path,
        MemoryCallback(phases=True),
        card=card,
        eval_strategy="epoch",
        eval_dataset={"one": ROWS[:1], "two": ROWS[:2]},
        num_train_epochs=1,
        save_strategy="epoch",
    )
    trained.train()
    assert [label for label, *_ in records()][-2:] == ["validation", "validation"]


def test_what_another_callback_evaluates_is_no_validation_of_the_trainers(card: Card, tmp_path: Path) -> None:
    class Again(TrainerCallback):
        def on_save(self, *args: Any, **more: Any) -> None:
            card.move(0, 500)
            trained.evaluate()

    trained = trainer(
        tmp_path,
        MemoryCallback(phases=True),
        Again(),
        card=card,
        eval_strategy="epoch",
        num_train_epochs=1,
        save_strategy="epoch",
    )
    trained.train()
    assert [peak for label, _, _, peak in records() if label == "validation"] == [32]


def test_an_evaluation_of_the_users_own_is_none_of_the_trainings(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    trained = trainer(tmp_path, callback, card=card)
    trained.evaluate()
    trained.train()
    trained.evaluate()
    assert "validation" not in [label for label, *_ in records()]
    assert is_closed(callback.epochs)


def test_a_training_that_goes_on_counts_its_epochs_on(card: Card, tmp_path: Path) -> None:
    trainer(tmp_path, card=card, num_train_epochs=1, save_strategy="epoch").train()
    trainer(tmp_path, MemoryCallback(), card=card).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [(label, number) for label, number, *_ in records()] == [("epoch", 2)]


def test_the_training_gives_the_same_weights_and_logs_as_without(card: Card, tmp_path: Path) -> None:
    def train(*callbacks: TrainerCallback) -> tuple[list[float], list[dict[str, Any]]]:
        trained = trainer(tmp_path, *callbacks, eval_strategy="epoch", seed=3)
        trained.train()
        log = [entry for entry in trained.state.log_history if not any(name.startswith("mem/") for name in entry)]
        return weights(trained.model), [
            {name: value for name, value in entry.items() if "runtime" not in name and "second" not in name}
            for entry in log
        ]

    assert train(MemoryCallback(phases=True)) == train()


def test_a_trainers_own_log_keeps_what_it_has_collected(card: Card, tmp_path: Path) -> None:
    class Collecting(Trainer):
        """As those do that train with preferences: a log takes along what was collected since the last."""

        collected: list[int]

        def log(self, logs: dict[str, float], *more: Any) -> None:
            if "loss" in logs:
                logs["collected"] = len(self.collected)
            self.collected.clear()
            super().log(logs, *more)

        def training_step(self, *inputs: Any) -> torch.Tensor:
            self.collected.append(1)
            return super().training_step(*inputs)

    trained = trainer(tmp_path, MemoryCallback(), card=card, kind=Collecting)
    trained.collected = []
    trained.train()
    assert [entry["collected"] for entry in trained.state.log_history if "collected" in entry] == [2, 2]
    assert len(logged(trained)) == 2


@pytest.mark.usefixtures("card", "broken_meter")
def test_a_failure_of_ours_is_said_once_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = trainer(tmp_path, MemoryCallback(phases=True), eval_strategy="epoch")
    trained.train()
    assert trained.state.global_step == 4
    assert capsys.readouterr().err.count("ipygpumem: the memory callback failed (RuntimeError: no counters here)") == 1


def test_another_callback_that_fails_at_our_entry_does_not_stop_the_training(
    card: Card, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
            if "train_loss" not in logs:
                seen.append(logs["loss"])

    seen: list[float] = []
    trained = trainer(tmp_path, MemoryCallback(), Losses(), card=card)
    trained.train()
    assert (trained.state.global_step, len(seen)) == (4, 2)
    assert capsys.readouterr().err.count("the memory callback failed (KeyError: 'loss')") == 1


def test_after_an_interrupt_the_next_training_is_measured(card: Card, tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **more: Any) -> None:
            raise KeyboardInterrupt

    callback = MemoryCallback(phases=True)
    trained = trainer(tmp_path, callback, Interrupt(), card=card)
    with pytest.raises(KeyboardInterrupt):
        trained.train()
    trained.remove_callback(Interrupt)
    trained.train()
    assert [(label, number) for label, number, *_ in records() if label == "epoch"] == [("epoch", 1), ("epoch", 2)]


HOOKS = ("on_epoch_begin", "on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end", "on_evaluate")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_anywhere_nothing_of_the_training_is_measured_any_more(
    card: Card, tmp_path: Path, hook: str, error: type[BaseException]
) -> None:
    sample_one_more()
    trained = trainer(tmp_path, MemoryCallback(phases=True), failing(hook, error)(), card=card, eval_strategy="epoch")
    with pytest.raises(error, match="mine") as raised:  # its traceback keeps the frames alive, as a notebook's does
        trained.train()
    assert not is_sampled_after_a_cell()
    before = len(records())
    trained.evaluate()
    assert len(records()) == before
    del raised


def failing(hook: str, error: type[BaseException]) -> type[TrainerCallback]:
    """Return a callback that fails once."""

    def fail(self: Any, *args: Any, **more: Any) -> None:
        if not failed:
            failed.append(hook)
            raise error("mine")

    failed: list[str] = []
    return type("Failing", (TrainerCallback,), {hook: fail})


def test_a_validation_at_the_start_counts_nothing_of_the_training_that_an_error_ended(
    card: Card, tmp_path: Path
) -> None:
    bad = failing("on_epoch_end", ValueError)()
    trained = trainer(tmp_path, MemoryCallback(phases=True), bad, card=card, eval_strategy="epoch", eval_on_start=True)
    with pytest.raises(ValueError, match="mine"):
        trained.train()
    card.move(0, 500)
    trained.train()
    assert [peak for label, _, _, peak in records() if label == "validation"] == [32, 32]


def test_a_training_inside_another_ones_step_gets_none_of_its_figures(card: Card, tmp_path: Path) -> None:
    """As where a model is distilled or labels are made anew, with the same callback."""
    callback = MemoryCallback()
    inner = trainer(tmp_path / "inner", callback, card=card, num_train_epochs=1)

    class Inside(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 1:
                inner.train()

    outer = trainer(tmp_path / "outer", callback, Inside(), card=card)
    outer.train()
    assert (len(logged(inner)), len(logged(outer))) == (1, 1)


def test_the_callback_keeps_no_trainer_alive_and_can_be_pickled(card: Card, tmp_path: Path) -> None:
    callback = MemoryCallback(phases=True)
    trained = trainer(tmp_path, callback, card=card)
    trained.train()
    other = pickle.loads(pickle.dumps(callback))
    assert other.epochs.phases
    seen = weakref.ref(trained)
    del trained
    gc.collect()  # the trainer itself has circles
    assert seen() is None


def test_after_an_error_that_is_kept_without_its_locals_the_trainer_and_its_model_can_go(
    card: Card, tmp_path: Path
) -> None:
    """Up to Python 3.12 a look at a frame's names leaves a copy there, which clearing the frame does not reach."""

    class Bad(TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            raise ValueError("mine")

    trained = trainer(tmp_path, MemoryCallback(), Bad(), card=card)
    seen = [weakref.ref(trained), weakref.ref(trained.model)]
    with pytest.raises(ValueError, match="mine") as raised:
        trained.train()
    traceback.clear_frames(raised.tb)
    del trained
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = run_example("Hugging Face")["trainer"].state.log_history
    assert len([entry for entry in log if "mem/cpu/peak_mib" in entry]) == 2
    assert "mem/cpu/forward_backward/peak_mib" in log[0]

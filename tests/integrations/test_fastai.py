"""The callback in fastai's Learner, or in a stand-in with its documented order of events."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations import fastai_stand_in
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

loss = torch.nn.functional.mse_loss


@pytest.fixture(scope="module")
def fast() -> Iterator[Any]:
    """fastai's names that tests use, and ``learner(card, *callbacks)``: two steps an epoch, quiet."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("fastai") is None:
            fastai_stand_in.install(patch)
            names, make = vars(fastai_stand_in), _stand_in
        else:
            names, make = vars(importlib.import_module("fastai.basics")), _real
        patch.delitem(sys.modules, "ipygpumem.integrations.fastai", raising=False)
        ours = importlib.import_module("ipygpumem.integrations.fastai")
        yield SimpleNamespace(**{**names, "learner": make, "MemoryCallback": ours.MemoryCallback})


def _stand_in(card: Card | None, *callbacks: Any) -> Any:
    network = Network(card)
    batches = [list(torch.utils.data.DataLoader(rows(number), batch_size=4)) for number in (8, 1)]
    learner = fastai_stand_in.Learner(*batches, network, loss, Optimizer(network.parameters(), card), callbacks)
    learner.logger = lambda log: None
    return learner


def _real(card: Card | None, *callbacks: Any) -> Any:
    basics = importlib.import_module("fastai.basics")
    data = basics.DataLoaders(basics.DataLoader(rows(), bs=4), basics.DataLoader(rows(1), bs=4))
    optimizer = partial(basics.OptimWrapper, opt=partial(Optimizer, card=card))
    learner = basics.Learner(data, Network(card), loss, optimizer, cbs=list(callbacks))
    learner.create_mbar, learner.logger = False, lambda log: None
    return learner


def shown(learner: Any) -> list[dict[str, Any]]:
    """Return what each row of the recorder's table says of the card."""
    names = list(learner.recorder.metric_names)[1:-1]
    return [on_card(dict(zip(names, row, strict=True))) for row in learner.recorder.values]


def test_each_epoch_is_in_the_recorders_table(card: Card, fast: Any) -> None:
    lines: list[list[Any]] = []

    class Reader(fast.Callback):  # type: ignore[misc]
        order = 51  # that of fastai's own for TensorBoard

        def before_fit(self) -> None:
            lines.append(list(self.learn.recorder.metric_names))

        def after_epoch(self) -> None:
            lines.append(list(self.learn.recorder.log))

    learner = fast.learner(card, Reader(), fast.MemoryCallback())
    learner.fit(2)
    assert list(learner.recorder.metric_names)[3:] == [
        *("mem/cpu/kept_mib", "mem/cpu/peak_mib", "mem/cuda_0/kept_mib", "mem/cuda_0/peak_mib", "time")
    ]
    assert shown(learner) == [{"kept_mib": 1.0, "peak_mib": 33.0}, {"kept_mib": 0.0, "peak_mib": 32.0}]
    assert [line[5:7] for line in lines] == [list(learner.recorder.metric_names)[5:7], [1.0, 33.0], [0.0, 32.0]]
    assert {len(line) for line in lines} == {8}
    assert records() == [("epoch", 1, 1, 33), ("epoch", 2, 0, 32)]


def test_a_column_that_somebody_else_has_made_is_left_to_him_and_said_once(
    card: Card, fast: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loggers make a dict of names and values: the later of two would take the place of the first."""

    class Own(fast.Callback):  # type: ignore[misc]
        order = 50.2

        def before_fit(self) -> None:
            names = self.learn.recorder.metric_names
            self.learn.recorder.metric_names = [*names[:-1], "mem/cuda_0/peak_mib", names[-1]]

        def after_validate(self) -> None:
            self.learn.recorder.log += [7.0]

    learner = fast.learner(card, Own(), fast.MemoryCallback())
    learner.fit(1)
    learner.fit(1)
    assert shown(learner) == [{"peak_mib": 7.0, "kept_mib": 0.0}]
    assert list(learner.recorder.metric_names).count("mem/cuda_0/peak_mib") == 1
    assert capsys.readouterr().err.count("something else logs mem/cuda_0/peak_mib already") == 1


@pytest.mark.parametrize("same", [True, False])
def test_one_that_was_added_twice_or_beside_another_makes_each_column_once(
    card: Card, fast: Any, same: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = fast.MemoryCallback()
    learner = fast.learner(card, callback, callback if same else fast.MemoryCallback())
    for kept in (1.0, 0.0):
        learner.fit(1)
        names = list(learner.recorder.metric_names)
        assert len(names) == len(set(names)) == 8
        assert len(learner.recorder.values[-1]) == 6  # without the epoch and the time
        assert shown(learner) == [{"kept_mib": kept, "peak_mib": 32.0 + kept}]
    assert capsys.readouterr().err == ""


def test_each_phase_is_exact(card: Card, fast: Any) -> None:
    learner = fast.learner(card, fast.MemoryCallback(phases=True))
    learner.fit(1)
    assert shown(learner) == [OF_PHASES]
    assert [label for label, *_ in records()] == ["forward", "backward", "optimizer", "validation", "epoch"]


def cancelling(fast: Any, event: str, error: str, order: float = 10) -> Any:
    """Return a callback that cancels something at an event."""

    def cancel(self: Any) -> None:
        raise getattr(fast, error)

    return type("Cancelling", (fast.Callback,), {event: cancel, "order": order})()


def test_steps_that_are_cancelled_are_no_optimizer_phase(card: Card, fast: Any) -> None:
    for error in ("CancelStepException", "CancelBatchException"):
        learner = fast.learner(card, fast.MemoryCallback(phases=True), cancelling(fast, "before_step", error))
        learner.fit(1)
        (row,) = shown(learner)
        assert row["backward/peak_mib"] == 16.0
        assert row["optimizer/peak_mib"] != row["optimizer/peak_mib"]  # not a number: there was none
    assert "optimizer" not in [label for label, *_ in records()]


def test_a_cancelled_validation_moves_no_figure_below_another_name(card: Card, fast: Any) -> None:
    learner = fast.learner(card, fast.MemoryCallback(), cancelling(fast, "before_validate", "CancelValidException"))
    learner.fit(1)
    assert len(learner.recorder.values[0]) == 1
    assert [label for label, *_ in records()] == ["epoch"]


def test_an_epoch_that_is_cancelled_is_remembered_if_it_had_begun(card: Card, fast: Any) -> None:
    fast.learner(card, fast.MemoryCallback(), cancelling(fast, "before_epoch", "CancelEpochException", 70)).fit(1)
    assert records() == []
    fast.learner(card, fast.MemoryCallback(), cancelling(fast, "after_train", "CancelEpochException")).fit(1)
    assert [label for label, *_ in records()] == ["epoch"]


def test_a_training_that_is_cancelled_leaves_nothing_open(card: Card, fast: Any) -> None:
    callback = fast.MemoryCallback(phases=True)
    fast.learner(card, callback, cancelling(fast, "after_batch", "CancelFitException")).fit(1)
    assert is_closed(callback.epochs)
    assert records() == []


def test_a_validation_of_the_users_own_returns_what_it_did(card: Card, fast: Any) -> None:
    callback = fast.MemoryCallback(phases=True)
    learner = fast.learner(card, callback)
    learner.fit(1)
    before = records()
    assert len(learner.validate()) == 1
    assert records() == before
    assert is_closed(callback.epochs)


def test_the_training_gives_the_same_weights_as_without(card: Card, fast: Any) -> None:
    def train(*callbacks: Any) -> list[float]:
        learner = fast.learner(None, *callbacks)
        learner.fit(2)
        return weights(learner.model)

    assert train(fast.MemoryCallback(phases=True)) == train()


@pytest.mark.usefixtures("card", "broken_meter")
def test_a_failure_of_ours_is_said_once_and_the_training_goes_on(fast: Any, capsys: pytest.CaptureFixture[str]) -> None:
    learner = fast.learner(None, fast.MemoryCallback(phases=True))
    learner.fit(2)
    assert len(learner.recorder.values) == 2
    assert capsys.readouterr().err.count("ipygpumem: the memory callback failed (RuntimeError: no counters here)") == 1


def test_after_an_error_in_the_training_the_next_is_measured(card: Card, fast: Any) -> None:
    class Bad(fast.Callback):  # type: ignore[misc]
        fails = True

        def before_step(self) -> None:
            if self.fails:
                raise ValueError("mine")

    bad = Bad()
    learner = fast.learner(card, fast.MemoryCallback(phases=True), bad)
    with pytest.raises(ValueError, match="mine"):
        learner.fit(1)
    bad.fails = False
    learner.fit(1)
    assert [label for label, *_ in records()] == ["forward", "backward", "optimizer", "validation", "epoch"]


def test_after_an_error_nothing_of_the_training_is_measured_any_more(card: Card, fast: Any) -> None:
    class Bad(fast.Callback):  # type: ignore[misc]
        def before_step(self) -> None:
            raise KeyboardInterrupt

    sample_one_more()
    callback = fast.MemoryCallback(phases=True)
    learner = fast.learner(card, callback, Bad())
    with pytest.raises(KeyboardInterrupt) as raised:
        learner.fit(1)
    assert not is_sampled_after_a_cell()
    before = len(records())
    learner.validate()
    assert len(records()) == before
    assert is_closed(callback.epochs)
    del raised


def real_only(test: Callable[..., None]) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec("fastai") is None, reason="fastai is not installed")(test)


@real_only
def test_a_search_for_a_rate_is_no_training_and_the_learner_can_be_pickled(
    card: Card, fast: Any, tmp_path: Any
) -> None:
    learner = fast.learner(None, fast.MemoryCallback(phases=True))
    learner.fit(1)
    before = records()
    learner.path = tmp_path
    schedule = importlib.import_module("fastai.callback.schedule")
    with learner.no_bar():
        schedule.Learner.lr_find(learner, num_it=20, stop_div=False, suggest_funcs=None, show_plot=False)
        learner.get_preds()
    assert records() == before
    learner.logger = print
    loaded = pickle.loads(pickle.dumps(learner))
    assert [callback.epochs.phases for callback in loaded.cbs if isinstance(callback, fast.MemoryCallback)] == [True]


@real_only
def test_the_example_of_the_page_runs(fast: Any) -> None:
    assert "mem/cpu/peak_mib" in run_example("fastai")["learner"].recorder.metric_names

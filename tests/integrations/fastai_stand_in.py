"""What fastai's documentation says of its training loop, for where fastai is not installed.

CI has no fastai. It needs torchvision, and the index has that for CUDA alone: it installs beside the CPU build of
torch, but its import fails there, and with it those of transformers and Lightning, which look for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

_INNER = {
    *("before_batch", "after_pred", "after_loss", "before_backward", "after_cancel_backward", "after_backward"),
    *("before_step", "after_step", "after_cancel_batch", "after_batch"),
}


def _exception(name: str) -> type[Exception]:
    return type(name, (Exception,), {})


CancelBatchException = _exception("CancelBatchException")
CancelValidException = _exception("CancelValidException")
Never = _exception("Never")


class Callback:
    """A method for each event; those of batches run in training, in validation, or in both."""

    order: float = 0
    run_train = run_valid = run = True
    learn: Any = None

    def __call__(self, event: str) -> None:
        wanted = self.run_train if self.learn.training else self.run_valid
        if self.run and (event not in _INNER or wanted):
            getattr(self, event, lambda: None)()
        if event == "after_fit":
            self.run = True


class Recorder(Callback):
    """Keeps the names and the values of the table."""

    order = 50
    add_time = True

    def before_fit(self) -> None:
        self.values: list[Any] = []
        self.metric_names = ["epoch", "train_loss", "valid_loss", "time"]

    def before_epoch(self) -> None:
        self.log: list[Any] = [self.learn.epoch]
        self.is_valid = True

    def after_train(self) -> None:
        self.log += [1.0]

    def after_cancel_validate(self) -> None:
        self.is_valid = False

    def after_validate(self) -> None:
        self.log += [1.0] if self.is_valid else []

    def after_epoch(self) -> None:
        self.learn.final_record = self.log[1:]
        self.values.append(self.learn.final_record)
        self.log.append("00:00")
        self.learn.logger(self.log)


class Learner:
    """Trains a network, and tells its callbacks, lowest order first."""

    def __init__(self, train: Any, valid: Any, model: Any, loss: Any, optimizer: Any, cbs: Iterable[Callback]) -> None:
        self.data, self.model, self.loss_func, self.opt = (train, valid), model, loss, optimizer
        self.training, self.epoch = False, 0
        self.logger: Callable[[Any], None] = print
        self.recorder = Recorder()
        self.cbs = [self.recorder, *cbs]
        for callback in self.cbs:
            callback.learn = self

    def __call__(self, event: str) -> None:
        for callback in sorted(self.cbs, key=lambda callback: callback.order):
            callback(event)

    def _around(self, name: str, cancelled: type[Exception], work: Callable[[], None]) -> None:
        try:
            self(f"before_{name}")
            work()
        except cancelled:
            self(f"after_cancel_{name}")
        self(f"after_{name}")

    def _batch(self, x: torch.Tensor, y: torch.Tensor) -> None:
        predicted = self.model(x)
        self("after_pred")
        loss = self.loss_func(predicted, y)
        self("after_loss")
        if self.training:
            self._around("backward", Never, loss.backward)
            self._around("step", Never, self.opt.step)
            self.opt.zero_grad()

    def _batches(self, *, training: bool) -> None:
        self.training = training
        self.model.train(training)
        for x, y in self.data[not training]:
            self._around("batch", CancelBatchException, lambda x=x, y=y: self._batch(x, y))

    def _validate(self) -> None:
        with torch.no_grad():
            self._around("validate", CancelValidException, lambda: self._batches(training=False))

    def _epoch(self) -> None:
        self._around("train", Never, lambda: self._batches(training=True))
        self._validate()

    def fit(self, epochs: int) -> None:
        def run() -> None:
            for self.epoch in range(epochs):
                self._around("epoch", Never, self._epoch)

        self._around("fit", Never, run)

    def validate(self) -> Any:
        self.training = False
        for event in ("before_fit", "before_epoch"):
            self(event)
        self._validate()
        for event in ("after_epoch", "after_fit"):
            self(event)
        return self.final_record


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the callback find a ``fastai``."""
    names = ("fastai", "fastai.callback", "fastai.callback.core")
    for name in names:
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].Callback = Callback  # type: ignore[attr-defined]

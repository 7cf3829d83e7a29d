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

_INNER = ("batch", "pred", "loss", "backward", "step")
"""How the names of those events end that come for each batch."""
CancelBatchException, CancelValidException = (type(name, (Exception,), {}) for name in ("batch", "validation"))


class Callback:
    """A method for each event; those of batches run in training, in validation, or in both."""

    order: float = 0
    run_train = run_valid = run = True
    learn: Any = None

    def __call__(self, event: str) -> None:
        wanted = self.run_train if self.learn.training else self.run_valid
        if self.run and (wanted or not event.endswith(_INNER)):
            getattr(self, event, lambda: None)()
        if event == "after_fit":
            self.run = True


class Recorder(Callback):
    """Keeps the names and the values of the table; a validation that is cancelled has none."""

    order = 50
    add_time = True

    def before_fit(self) -> None:
        self.values: list[Any] = []
        self.metric_names = ["epoch", "train_loss", "valid_loss", "time"]

    def before_epoch(self) -> None:
        self.log: list[Any] = [self.learn.epoch]
        self.valid = [1.0]

    def after_train(self) -> None:
        self.log += [1.0]

    def after_cancel_validate(self) -> None:
        self.valid = []

    def after_validate(self) -> None:
        self.log += self.valid

    def after_epoch(self) -> None:
        self.values.append(self.log[1:])
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

    def _around(self, name: str, work: Callable[[], None], *cancelled: type[Exception]) -> None:
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
            self._around("backward", loss.backward)
            self._around("step", self.opt.step)
            self.opt.zero_grad()

    def _batches(self, *, training: bool) -> None:
        self.training = training
        self.model.train(training)
        for x, y in self.data[not training]:
            self._around("batch", lambda x=x, y=y: self._batch(x, y), CancelBatchException)

    def _validate(self) -> None:
        with torch.no_grad():
            self._around("validate", lambda: self._batches(training=False), CancelValidException)

    def _epoch(self) -> None:
        self._around("train", lambda: self._batches(training=True))
        self._validate()

    def fit(self, epochs: int) -> None:
        def run() -> None:
            for self.epoch in range(epochs):
                self._around("epoch", self._epoch)

        self._around("fit", run)

    def validate(self) -> None:
        self.training = False
        for event in ("before_fit", "before_epoch"):
            self(event)
        self._validate()
        for event in ("after_epoch", "after_fit"):
            self(event)


def install(patch: pytest.MonkeyPatch) -> None:
    names = ("fastai", "fastai.callback", "fastai.callback.core")
    for name in names:
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].Callback = Callback  # type: ignore[attr-defined]

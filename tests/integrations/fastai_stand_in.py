"""The events and the recorder that fastai's documentation gives its training loop, for where fastai is not installed.

CI has no fastai. It needs torchvision, and the index has that for CUDA alone: it installs beside the CPU build of
torch, but its import fails there, and with it those of transformers and Lightning, which look for it.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch


class CancelValidException(Exception):  # noqa: N818  # its name in fastai
    """Ends a validation."""


class Callback:
    """A method for each event; those of batches run in training, in validation, or in both."""

    order: float = 0
    run_train = run_valid = run = True
    learn: Any = None


class Recorder(Callback):
    """Keeps the names and the values of the table; a validation that is cancelled has none."""

    order = 50
    add_time = True

    def before_fit(self) -> None:
        self.values: list[Any] = []
        self.metric_names = ["epoch", "train_loss", "valid_loss", "time"]

    def before_epoch(self) -> None:
        self.log, self.valid = [self.learn.epoch, 1.0], [1.0]

    def after_cancel_validate(self) -> None:
        self.valid = []

    def after_validate(self) -> None:
        self.log += self.valid

    def after_epoch(self) -> None:
        self.values.append(self.log[1:])
        self.log = [*self.log, "00:00"]


class Learner:
    """Trains a network, and calls its callbacks at each event, lowest order first."""

    def __init__(self, train: Any, valid: Any, model: Any, loss: Any, optimizer: Any, cbs: Iterable[Callback]) -> None:
        self.data, self.model, self.loss_func, self.opt = (train, valid), model, loss, optimizer
        self.training, self.epoch, self.recorder = False, 0, Recorder()
        self.cbs = sorted([self.recorder, *cbs], key=lambda callback: callback.order)
        for callback in self.cbs:
            callback.learn = self

    def __call__(self, *events: str) -> None:
        for event in events:
            for callback in self.cbs:
                wanted = callback.run_train if self.training else callback.run_valid
                if callback.run and (wanted or not event.endswith(("batch", "step"))):
                    getattr(callback, event, lambda: None)()
                callback.run = callback.run or event == "after_fit"

    def _part(self, name: str, work: Callable[[], None]) -> None:
        try:
            self(f"before_{name}")
            work()
        except CancelValidException:
            self(f"after_cancel_{name}")
        self(f"after_{name}")

    def _batches(self, *, training: bool) -> None:
        self.training = training
        self.model.train(training)
        for x, y in self.data[not training]:
            self("before_batch")
            loss = self.loss_func(self.model(x), y)
            if training:
                loss.backward()
                self("before_step")
                self.opt.step()
                self.opt.zero_grad()
            self("after_batch")

    def _validate(self) -> None:
        with torch.no_grad():
            self._part("validate", lambda: self._batches(training=False))

    def fit(self, epochs: int) -> None:
        self("before_fit")
        for self.epoch in range(epochs):
            self("before_epoch")
            self._part("train", lambda: self._batches(training=True))
            self._validate()
            self("after_epoch")
        self("after_fit")

    def validate(self) -> None:
        self.training = False
        self("before_fit", "before_epoch")
        self._validate()
        self("after_epoch", "after_fit")


def install(patch: pytest.MonkeyPatch) -> None:
    names = ("fastai", "fastai.callback", "fastai.callback.core")
    for name in names:
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].Callback = Callback  # type: ignore[attr-defined]

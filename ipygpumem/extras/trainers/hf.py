"""A callback for Hugging Face's ``Trainer`` that logs each epoch's memory."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.extras.trainers.epochs import Epochs, close, harmless, needs
from ipygpumem.heap.knowledge.frames import peek, stack
from ipygpumem.introspect import is_instance

with needs("transformers", "transformers[torch]"):
    from transformers import Trainer, TrainerCallback


_LOOP = "_inner_training_loop"
"""The trainer's method with the loop over epochs."""


class HfMemoryCallback(TrainerCallback):
    """Logs each epoch's kept memory and its peak on every device in use, with names such as
    ``mem/cuda_0/kept_mib``.
    """

    def __init__(self) -> None:
        self.epochs = Epochs()

    on_train_begin = close  # an error ended the training before

    @harmless
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.begin(_epochs_before(state) + 1)

    on_train_end = close

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        _log(self.epochs.end())


def _epochs_before(state: Any) -> int:
    """Return the number of finished epochs.

    It is read from the trainer's loop, because for some data sets ``state.epoch`` is a fraction at
    the start of an epoch.
    """
    for frame in stack(sys._getframe(1)):
        if frame.f_code.co_name == _LOOP:
            number = peek(frame).get("epoch")
            if type(number) is int:
                return number
            break
    return int(state.epoch or 0)


def _log(figures: dict[str, float]) -> None:
    """Log figures with the trainer whose training loop has called a hook.

    The hook does not receive the trainer. Adding the figures to a log of the trainer would not
    reach the callbacks that receive it before ours.
    """
    if not figures:
        return
    for frame in stack(sys._getframe(1)):
        trainer: Any = None
        if frame.f_code.co_varnames[:1] == ("self",):
            # Not from f_locals, which would keep the trainer alive after an error.
            trainer = peek(frame).get("self")
        if is_instance(trainer, Trainer):
            is_log_due = trainer.control.should_log
            try:
                # The base class's method: the methods of some trainers clear the values collected
                # for the next log.
                Trainer.log(trainer, figures)
            finally:
                trainer.control.should_log = is_log_due  # ``log`` has reset it
            break

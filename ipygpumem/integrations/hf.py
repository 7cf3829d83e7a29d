"""A callback for Hugging Face's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from ipygpumem.integrations.epochs import Epochs, explain, harmless
from ipygpumem.introspect import is_instance
from ipygpumem.objects.holders.frames import peek

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    explain(error, "transformers", "transformers[torch]")
    raise

_NEAR = 6
"""Frames from a hook of ours up to the trainer's training loop, and some more."""


class MemoryCallback(TrainerCallback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like.

    The trainer tells nobody where the forward pass ends, so that both passes are one phase.

    Args:
        phases: measure the phases ``forward_backward``, ``optimizer`` and ``validation``, too.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.epochs = Epochs(phases=phases)
        self._number = 0
        self._evaluated: Any = None
        """The metrics of the last evaluation: one that is added twice hears of each twice."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_evaluated": None}

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.close()  # an error ended the training before
        self._number = int(state.epoch or 0)

    @harmless
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        if not self.epochs.is_open:  # else it was added twice
            self._number += 1
            self.epochs.begin(self._number, loop="_inner_training_loop")

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.enter("forward_backward")

    @harmless
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.leave("forward_backward")
        self.epochs.enter("optimizer")

    @harmless
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.leave("optimizer")

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self._await_validation(control)

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self._log(state, self.epochs.end())
        self._await_validation(control)

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any) -> None:  # noqa: D102
        if metrics is not None and metrics is self._evaluated:
            return
        self._evaluated = metrics
        self.epochs.leave("validation")
        self._log(state, self.epochs.take("validation"))
        self.epochs.enter("validation")  # of the next data set, if there are several; else it does not count

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.skip()

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.close()

    def _await_validation(self, control: Any) -> None:
        """Begin the validation that the trainer is about to do: it tells when it has ended, and not when it begins."""
        if control.should_evaluate:
            self.epochs.enter("validation")

    def _log(self, state: Any, figures: dict[str, float]) -> None:
        if not figures:
            return
        trainer = _trainer_above(sys._getframe(1))
        if trainer is None:
            state.log_history.append({**figures, "epoch": state.epoch, "step": state.global_step})
            return
        control = trainer.control
        wanted = control.should_log
        try:
            # The base's own: those of other trainers empty what they have collected for the next log.
            Trainer.log(trainer, figures)
        finally:
            control.should_log = wanted  # a log that was due is due still


def _trainer_above(frame: FrameType | None) -> Any | None:
    """Return the trainer whose training loop has called a hook: callbacks are not told.

    Other callbacks get what is logged before ours do, so that what we added to it would reach none of them.
    """
    for _ in range(_NEAR):
        if frame is None:
            break
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = peek(frame).get("self")  # not from f_locals, which keeps the trainer alive after an error
            if is_instance(caller, Trainer):
                return caller
        frame = frame.f_back
    return None

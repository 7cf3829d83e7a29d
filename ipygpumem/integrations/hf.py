"""A callback for Hugging Face's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.integrations.epochs import Epochs, close, harmless, needs, phase_hook
from ipygpumem.introspect import is_instance
from ipygpumem.objects.holders.frames import peek, stack

with needs("transformers", "transformers[torch]"):
    from transformers import Trainer, TrainerCallback


class MemoryCallback(TrainerCallback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like.

    The trainer tells nobody where the forward pass ends, so that both passes are one phase.
    ``phases``: measure ``forward_backward``, ``optimizer`` and ``validation``, too.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.epochs = Epochs(phases=phases)
        self._number = 0

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.close()  # an error ended the training before
        self._number = int(state.epoch or 0)

    @harmless
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self._number += 1
        self.epochs.begin(self._number, loop="_inner_training_loop")

    on_step_begin = phase_hook(begins="forward_backward")
    on_pre_optimizer_step = phase_hook(ends="forward_backward", begins="optimizer")
    on_optimizer_step = phase_hook(ends="optimizer")
    on_save = phase_hook()
    on_train_end = close

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin the validation that the trainer is about to do: it tells when it has ended, and not when it begins."""
        if control.should_evaluate:
            self.epochs.enter("validation")

    @harmless
    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        _log(state, self.epochs.end())
        if control.should_evaluate:
            self.epochs.enter("validation")

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: D102
        self.epochs.leave("validation")
        _log(state, self.epochs.take("validation"))
        self.epochs.enter("validation")  # of the next data set, if there are several; else it does not count


def _log(state: Any, figures: dict[str, float]) -> None:
    """Log figures with the trainer whose training loop has called a hook: callbacks are not told which.

    Other callbacks get what is logged before ours do, so that what we added to it would reach none of them.
    """
    if not figures:
        return
    for frame in stack(sys._getframe(1)):
        # Not from f_locals, which keeps the trainer alive after an error.
        trainer: Any = peek(frame).get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if is_instance(trainer, Trainer):
            wanted = trainer.control.should_log
            try:
                # The base's own: those of other trainers empty what they have collected for the next log.
                Trainer.log(trainer, figures)
            finally:
                trainer.control.should_log = wanted  # a log that was due is due still
            break

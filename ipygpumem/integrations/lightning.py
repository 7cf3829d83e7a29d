"""A callback for Lightning's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.integrations.epochs import Epochs, close, harmless, needs, phase_hook

with needs("lightning", "lightning"):
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # its older name, with classes of its own
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
import torch  # Lightning needs it


class MemoryCallback(Callback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like.

    With manual optimization only ``backward`` and ``validation`` are phases: nobody tells where others end.
    ``phases``: measure ``forward``, ``backward``, ``optimizer`` and ``validation``, too.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.epochs = Epochs(phases=phases)
        self._closures = 0

    on_fit_start = close  # another callback's error may have kept ours from hearing of one
    on_before_zero_grad = phase_hook(ends="forward")
    on_before_backward = phase_hook(ends="forward", begins="backward")
    on_after_backward = phase_hook(ends="backward")
    on_validation_start = phase_hook(begins="validation")
    on_validation_end = phase_hook(ends="validation")
    on_train_end = close
    on_exception = close

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.begin(trainer.current_epoch + 1, loop="fit")

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *more: Any) -> None:  # noqa: D102
        self._closures = 0
        if pl_module.automatic_optimization:
            self.epochs.enter("forward")

    @harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self._closures += 1
        if pl_module.automatic_optimization:
            self.epochs.enter("optimizer")

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:  # noqa: D102
        if self._closures == 1:  # one that computes the loss again has further passes inside
            self.epochs.leave("optimizer")
        self.epochs.enter()

    @harmless
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what the epoch has cost: not with ``self.log``, where a name of the module's that is ours is an error."""
        figures = self.epochs.end()
        # For those that monitor one of them, who come next.
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in figures.items()})
        if figures and trainer.is_global_zero:
            stepped = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
            for logger in trainer.loggers:
                logger.log_metrics(
                    metrics={**figures, "epoch": trainer.current_epoch},
                    step=max(0, stepped - 1),  # as Lightning finds it for an epoch
                )
                logger.save()

"""A callback for Lightning's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.integrations.epochs import Epochs, close, harmless, needs

with needs("lightning", "lightning"):
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # its older name, with classes of its own
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
import torch  # Lightning needs it


class MemoryCallback(Callback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like."""

    def __init__(self) -> None:
        self.epochs = Epochs()

    on_fit_start = close  # another callback's error may have kept ours from hearing of one
    on_train_end = close
    on_exception = close

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.begin(trainer.current_epoch + 1)

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

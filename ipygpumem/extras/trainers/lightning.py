"""A callback for Lightning's ``Trainer`` that logs each epoch's memory."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.extras.trainers.epochs import Epochs, close, harmless, needs

with needs("lightning", "lightning"):
    # Its older name has its own classes.
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
import torch  # Lightning needs it


class LightningMemoryCallback(Callback):
    """Logs each epoch's kept memory and its peak on every device in use, with names such as
    ``mem/cuda_0/kept_mib``.
    """

    def __init__(self) -> None:
        self.epochs = Epochs()

    on_fit_start = close  # after another callback's error ours may not have been called
    on_train_end = close
    on_exception = close

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.begin(trainer.current_epoch + 1)

    @harmless
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epoch's memory; not with ``self.log``, which fails if the module logs the same
        name.
        """
        figures = self.epochs.end()
        # For later callbacks that monitor one of them.
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in figures.items()}
        )
        if figures and trainer.is_global_zero:
            loop = trainer.fit_loop.epoch_loop
            steps = getattr(loop, "_batches_that_stepped", trainer.global_step)
            for logger in trainer.loggers:
                logger.log_metrics(
                    metrics={**figures, "epoch": trainer.current_epoch},
                    step=max(0, steps - 1),  # like Lightning's own epoch logs
                )
                logger.save()

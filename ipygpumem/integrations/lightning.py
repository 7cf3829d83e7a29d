"""A callback for Lightning's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.integrations.epochs import Epochs, explain, harmless

try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # its older name, with classes of its own
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    explain(error, "lightning", "lightning")
    raise


class MemoryCallback(Callback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like.

    With manual optimization only ``backward`` and ``validation`` are phases: nobody tells where others end.

    Args:
        phases: measure the phases ``forward``, ``backward``, ``optimizer`` and ``validation``, too.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.epochs = Epochs(phases=phases)
        self._closures = 0

    @harmless
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget what is open: another callback's error may have kept ours from hearing of one."""
        self.epochs.close()

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.begin(trainer.current_epoch + 1, loop="fit")

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *more: Any) -> None:  # noqa: D102
        self._closures = 0
        if pl_module.automatic_optimization:
            self.epochs.enter("forward")

    @harmless
    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self.epochs.leave("forward")

    @harmless
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:  # noqa: D102
        self.epochs.leave("forward")
        self.epochs.enter("backward")

    @harmless
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.leave("backward")

    @harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: D102
        self._closures += 1
        if pl_module.automatic_optimization:
            self.epochs.enter("optimizer")

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any) -> None:  # noqa: D102
        if self._closures == 1:  # one that computes the loss again has further passes inside
            self.epochs.leave("optimizer")
        self.epochs.skip()

    @harmless
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.enter("validation")

    @harmless
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.leave("validation")

    @harmless
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        figures = self.epochs.end()
        if figures and trainer.is_global_zero:
            pl_module.log_dict(figures, rank_zero_only=True)

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self.epochs.close()

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: D102
        self.epochs.close()

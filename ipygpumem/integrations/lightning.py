"""A callback for Lightning's ``Trainer``: what each epoch costs, in its log."""

from __future__ import annotations

import sys
from typing import Any

from ipygpumem.integrations.epochs import Epochs, explain, harmless
from ipygpumem.introspect import is_instance

try:
    if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:  # its older name, with classes of its own
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
except ModuleNotFoundError as error:
    explain(error, "lightning", "lightning")
    raise
import torch  # Lightning needs it


class MemoryCallback(Callback):
    """Logs what each epoch keeps and its peak, on every device in use, as ``mem/cuda_0/kept_mib`` and its like.

    With manual optimization only ``backward`` and ``validation`` are phases: nobody tells where others end.

    Args:
        phases: measure the phases ``forward``, ``backward``, ``optimizer`` and ``validation``, too.
    """

    def __init__(self, *, phases: bool = False) -> None:
        self.epochs = Epochs(phases=phases)
        self._closures = 0
        self._shown: dict[str, Any] = {}
        """What of ours is among the trainer's metrics, under the same names."""
        self._unlogged: tuple[dict[str, float], int] | None = None

    @harmless
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget what is open: another callback's error may have kept ours from hearing of one."""
        self.epochs.close()
        self._unlogged = None

    @harmless
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self._log(trainer)
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
        if self.epochs.phase != "optimizer":  # else it was added twice
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
        if figures:
            self._unlogged = (figures, trainer.current_epoch) if trainer.is_global_zero else None
            ours = self._left_to_us(trainer, figures)
            self._shown = {name: torch.tensor(value) for name, value in ours.items()}
            trainer.callback_metrics.update(self._shown)  # for those that monitor one of them, who come next

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: D102
        self._log(trainer)
        self.epochs.close()

    @harmless
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: D102
        self.epochs.close()
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        """Log what the epoch before has cost, to the loggers.

        Not with ``self.log``, which lets the module's own log of the same name fail or be mixed with ours; and once
        its hooks have run, in which it may log that name.
        """
        unlogged, self._unlogged = self._unlogged, None
        if unlogged is None:
            return
        figures, epoch = unlogged
        ours = {**self._left_to_us(trainer, figures), "epoch": epoch}
        stepped = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        step = int(trainer.logged_metrics.get("step", max(0, stepped - 1)))  # as Lightning finds it for an epoch
        for logger in trainer.loggers:
            logger.log_metrics(metrics=ours, step=step)
            logger.save()

    def _left_to_us(self, trainer: Any, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures whose names the user's code does not log itself."""
        metrics, logged = trainer.callback_metrics, trainer.logged_metrics
        callbacks = [callback for callback in trainer.callbacks if is_instance(callback, MemoryCallback)]
        ours = [callback._shown.get(name) for callback in callbacks for name in figures]
        users = [name for name in figures if name in metrics and not any(metrics[name] is value for value in ours)]
        self.epochs.leave_to_user([*users, *(figures.keys() & logged)], say=trainer.is_global_zero)
        return {name: value for name, value in figures.items() if name not in self.epochs.left_out}

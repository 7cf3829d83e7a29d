"""A callback for fastai's ``Learner``: what each epoch costs, in its table."""

from __future__ import annotations

from typing import Any

from ipygpumem.integrations.epochs import Epochs, explain, harmless
from ipygpumem.introspect import is_instance

try:
    from fastai.callback.core import Callback
except ModuleNotFoundError as error:
    explain(error, "fastai", "fastai")
    raise

PHASES = ("forward", "backward", "optimizer", "validation")


class MemoryCallback(Callback):
    """Adds what each epoch keeps and its peak to the recorder, as ``mem/cuda_0/kept_mib`` and its like.

    The devices are those that hold memory when the training begins.

    Args:
        phases: measure the phases ``forward``, ``backward``, ``optimizer`` and ``validation``, too.
    """

    order = 50.5
    """After the recorder (50), which makes the names that we add to, and before all who read them (51 and 60)."""
    run_valid = False

    def __init__(self, *, phases: bool = False) -> None:
        super().__init__()
        self.epochs = Epochs(phases=phases)
        self._names: list[str] = []
        self._place = 0
        self._columns: Any = None
        """The recorder's names, with ours: one that was added twice hears of each training twice."""

    @harmless
    def before_fit(self) -> None:
        """Name the columns; not in ``lr_find`` and ``get_preds``, as with fastai's own loggers."""
        has_recorder = hasattr(self.learn, "recorder")
        if has_recorder and self._columns is not None and self._columns is self.learn.recorder.metric_names:
            return
        self.epochs.close()
        self._names = []
        self.run = not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")
        if self.run and has_recorder:
            names = self.learn.recorder.metric_names
            ours = self.epochs.names(PHASES)
            others = [callback for callback in self.learn.cbs if is_instance(callback, MemoryCallback)]
            shown = {name for callback in others for name in callback._names}
            self.epochs.leave_to_user(name for name in ours if name in names and name not in shown)
            self._names = [name for name in ours if name not in names]
            self._place = len(names) - bool(self.learn.recorder.add_time)
            self._columns = names[: self._place] + self._names + names[self._place :]
            self.learn.recorder.metric_names = self._columns

    @harmless
    def before_train(self) -> None:  # noqa: D102
        self.epochs.begin(self.learn.epoch + 1, loop="fit")

    @harmless
    def before_batch(self) -> None:  # noqa: D102
        self.epochs.enter("forward")

    @harmless
    def after_loss(self) -> None:  # noqa: D102
        self.epochs.leave("forward")

    @harmless
    def before_backward(self) -> None:  # noqa: D102
        self.epochs.enter("backward")

    @harmless
    def after_backward(self) -> None:  # noqa: D102
        self.epochs.leave("backward")

    @harmless
    def before_step(self) -> None:  # noqa: D102
        self.epochs.enter("optimizer")

    @harmless
    def after_step(self) -> None:  # noqa: D102
        self.epochs.leave("optimizer")

    @harmless
    def after_batch(self) -> None:  # noqa: D102
        self.epochs.skip()

    @harmless
    def before_validate(self) -> None:  # noqa: D102
        self.epochs.enter("validation")

    @harmless
    def after_validate(self) -> None:
        """End the epoch, after the recorder has its own values and before it shows them."""
        self.epochs.leave("validation")
        figures = self.epochs.end()
        # Fewer values than names: a part of the epoch was cancelled, and ours would stand below other names.
        if figures and self._names and len(self.learn.recorder.log) == self._place:
            self.learn.recorder.log += [figures.get(name, float("nan")) for name in self._names]

    @harmless
    def after_epoch(self) -> None:  # noqa: D102
        self.epochs.end()  # of an epoch that was cancelled before its validation

    @harmless
    def after_fit(self) -> None:  # noqa: D102
        self.epochs.close()

"""A callback for fastai's ``Learner`` that adds each epoch's memory to its table."""

from __future__ import annotations

from ipygpumem.api.shell import current_traces
from ipygpumem.extras.trainers.epochs import Epochs, close, harmless, names_of, needs

with needs("fastai", "fastai"):
    from fastai.callback.core import Callback


class FastaiMemoryCallback(Callback):
    """Adds each epoch's kept memory and its peak to the recorder, under names such as ``mem/cuda_0/kept_mib``.

    The columns are the devices in use when the training begins.
    """

    order = 50.5
    """After the recorder (50), which creates the list of names, and before its readers (51 and 60)."""
    run_valid = False

    def __init__(self) -> None:
        super().__init__()
        self.epochs = Epochs()
        self._names: list[str] = []
        self._place = 0

    @harmless
    def before_fit(self) -> None:
        """Name the columns; not in ``lr_find`` and ``get_preds``, like fastai's own loggers."""
        self.epochs.close()
        self.run = not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")
        names = self.learn.recorder.metric_names if self.run and hasattr(self.learn, "recorder") else []
        if self._names and self._names[0] in names:  # the callback was added twice
            return
        held = [device for device, reading in current_traces().meter.now().items() if reading.current_bytes]
        ours = [name for device in held for name in names_of(device)]
        self._names = [name for name in ours if names and name not in names]
        if self._names:
            self._place = len(names) - bool(self.learn.recorder.add_time)
            self.learn.recorder.metric_names = names[: self._place] + self._names + names[self._place :]

    @harmless
    def before_train(self) -> None:  # noqa: D102
        self.epochs.begin(self.learn.epoch + 1)

    after_fit = close

    @harmless
    def after_validate(self) -> None:
        """End the epoch, after the recorder has its own values and before it shows them."""
        figures = self.epochs.end()
        # Fewer values than names: part of the epoch was cancelled, and ours would be below other names.
        if figures and self._names and len(self.learn.recorder.log) == self._place:
            self.learn.recorder.log += [figures.get(name, float("nan")) for name in self._names]

    @harmless
    def after_epoch(self) -> None:  # noqa: D102
        self.epochs.end()  # an epoch that was cancelled before its validation

"""A callback for fastai's ``Learner``: what each epoch costs, in its table."""

from __future__ import annotations

from ipygpumem.api.shell import current_traces
from ipygpumem.integrations.epochs import Epochs, close, harmless, names_of, needs, phase_hook

with needs("fastai", "fastai"):
    from fastai.callback.core import Callback

_PHASES = ("forward", "backward", "optimizer", "validation")


class MemoryCallback(Callback):
    """Adds what each epoch keeps and its peak to the recorder, as ``mem/cuda_0/kept_mib`` and its like.

    The devices are those that hold memory when the training begins.
    ``phases``: measure ``forward``, ``backward``, ``optimizer`` and ``validation``, too.
    """

    order = 50.5
    """After the recorder (50), which makes the names that we add to, and before all who read them (51 and 60)."""
    run_valid = False

    def __init__(self, *, phases: bool = False) -> None:
        super().__init__()
        self.epochs = Epochs(phases=phases)
        self._names: list[str] = []
        self._place = 0

    @harmless
    def before_fit(self) -> None:
        """Name the columns; not in ``lr_find`` and ``get_preds``, as with fastai's own loggers."""
        self.epochs.close()
        self.run = not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")
        names = self.learn.recorder.metric_names if self.run and hasattr(self.learn, "recorder") else []
        if self._names and self._names[0] in names:  # it was added twice
            return
        held = [device for device, reading in current_traces().meter.now().items() if reading.current_bytes]
        phases = ["epoch", *(_PHASES if self.epochs.phases else ())]
        ours = [name for phase in phases for device in held for name in names_of(device, phase)]
        self._names = [name for name in ours if names and name not in names]
        if self._names:
            self._place = len(names) - bool(self.learn.recorder.add_time)
            self.learn.recorder.metric_names = names[: self._place] + self._names + names[self._place :]

    @harmless
    def before_train(self) -> None:  # noqa: D102
        self.epochs.begin(self.learn.epoch + 1, loop="fit")

    before_batch = phase_hook(begins="forward")
    after_loss = phase_hook(ends="forward")
    before_backward = phase_hook(begins="backward")
    after_backward = phase_hook(ends="backward")
    before_step = phase_hook(begins="optimizer")
    after_step = phase_hook(ends="optimizer")
    after_batch = phase_hook()
    before_validate = phase_hook(begins="validation")
    after_fit = close

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

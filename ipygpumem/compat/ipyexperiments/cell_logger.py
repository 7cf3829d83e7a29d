"""What each cell cost, as ipyexperiments' cell logger gives it. The line below a cell is the notebook's own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import psutil
from IPython import get_ipython

from ipygpumem.compat.ipyexperiments.utils.mem import b2mb as b2mb
from ipygpumem.compat.ipyexperiments.utils.mem import get_nvml_gpu_id as get_nvml_gpu_id
from ipygpumem.errors import ExperimentError
from ipygpumem.measuring.meter import Measurement
from ipygpumem.model import CellRecord, Usage
from ipygpumem.notebook.cell import Cell
from ipygpumem.notebook.experiments.experiment import Experiment
from ipygpumem.notebook.notebook import Notebook, find_notebook
from ipygpumem.notebook.part import Part
from ipygpumem.probes.accelerators import loaded_torch
from ipygpumem.reports.layout import Report
from ipygpumem.scopes.seeding import SeedOnImport, is_seed, seed_generators

__all__ = [  # a user's "Cell" or "Usage" is none of ours
    "CellLogger",
    "CellLoggerData",
    "CellLoggerMemory",
    "CellLoggerTime",
    "b2mb",
    "cpu_ram_used",
    "get_nvml_gpu_id",
    "set_seed",
]


class CellLoggerMemory(NamedTuple):
    """What a cell kept, how far it rose above that and above its start, and what is in use after it; bytes."""

    used_delta: int
    peaked_delta: int
    used_total: int


class CellLoggerTime(NamedTuple):
    """How long a cell took, in seconds."""

    time_delta: float


class CellLoggerData(NamedTuple):
    """What the last finished cell cost."""

    cpu: CellLoggerMemory
    gpu: CellLoggerMemory
    time: CellLoggerTime


_NOTHING = CellLoggerMemory(0, 0, 0)
_NAMES_OF_FIGURES = {
    f"{device}_mem_{name}": (device, field)
    for device in ("cpu", "gpu")
    for name, field in {
        "used_delta": "used_delta",
        "peaked_delta": "peaked_delta",
        "used_new": "used_total",
        "used_prev": "used_total",
    }.items()
}
"""The logger's attributes that are figures of its ``data``, as the device and the field there."""


def cpu_ram_used() -> int:
    """Return this process's RSS in bytes."""
    rss: int = psutil.Process().memory_info().rss
    return rss


def set_seed(seed: int = 0) -> None:
    """Set the random generators of Python, NumPy and torch, and make cuDNN deterministic; 0 leaves them alone.

    Raises:
        ExperimentError: it is no whole number that fits into 64 bits.
    """
    if _checked(seed):
        seed_generators(seed)
        torch: Any = loaded_torch()
        if torch is not None:
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False


def _checked(seed: int) -> int:
    if not is_seed(seed):
        raise ExperimentError("seed must be a whole number that fits into 64 bits")
    return seed


class CellLogger(Part):
    """Keeps what the last finished cell cost in ``data``; the first is the rest of the cell that starts it.

    Once it is stopped, it has what that cell had cost by then.

    Args:
        notebook: the shell's.
        device: the CUDA device, such as ``cuda:0``; empty for the host alone.
        compact: kept for who asks: the report below a cell is the notebook's.
        gc_collect: the same.
        set_seed: what generators are set to before each cell; 0 leaves them alone.

    Raises:
        ExperimentError: the seed is none.
    """

    def __init__(self, notebook: Notebook, device: str, *, compact: bool, gc_collect: bool, set_seed: int) -> None:
        self._notebook = notebook
        self._device = device
        self.backend = "pytorch" if device else "cpu"
        self.compact, self.gc_collect, self.set_seed = compact, gc_collect, set_seed
        self.time_start = 0.0
        self._seed_on_import = SeedOnImport(set_seed)
        self._cell: Measurement | None = None
        self._is_whole = False
        self.data = CellLoggerData(_NOTHING, _NOTHING, CellLoggerTime(0))

    def __getattr__(self, name: str) -> int:
        device, field = _NAMES_OF_FIGURES.get(name, ("", ""))
        if not device:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        figure: int = getattr(getattr(self.data, device), field)
        return figure

    @property
    def running(self) -> bool:
        """Whether it goes along with cells."""
        return any(part is self for part in self._notebook.session.parts)

    @property
    def set_seed(self) -> int:
        """What generators are set to before each cell; refused where it is set, since a hook could only warn."""
        return self._seed

    @set_seed.setter
    def set_seed(self, seed: int) -> None:
        self._seed = _checked(seed)

    @property
    def time_delta(self) -> float:
        """How long the last finished cell took, in seconds."""
        return self.data.time.time_delta

    def start(self) -> CellLogger:
        """Go along with cells from now on, and return itself; nothing more if it does so already.

        Raises:
            ExperimentError: ipygpumem was unloaded meanwhile.
        """
        if find_notebook(get_ipython()) is not self._notebook:
            raise ExperimentError("this cell logger is over: ipygpumem was unloaded")
        if not self.running:
            self._notebook.join(self)
            if self.set_seed:
                self._seed_on_import.install()
                set_seed(self.set_seed)
            self._begin()
        return self

    def stop(self) -> None:
        """Go along no more."""
        self._notebook.leave(self)
        self._seed_on_import.remove()
        self._end()

    def close(self) -> None:
        """Stop: the extension is being unloaded."""
        self.stop()

    def cell_begins(self, cell: Cell) -> None:
        """Reset the generators, and begin a span of our own: nobody else's can be read in the middle of the cell."""
        set_seed(self.set_seed)
        self._begin()
        self._is_whole = True

    def cell_ended(self, cell: Cell, record: CellRecord | None) -> Sequence[Report]:
        """Note what a cell cost."""
        if record is not None and self._is_whole:
            self._end()
            self._note(record.usages, record.duration_seconds)
        return ()

    def shown(self) -> None:
        """Note what a cell cost whose record is not what counts, as of the first cell, or that has none."""
        self._end()

    def _begin(self) -> None:
        self.time_start, self._started = time.time(), time.perf_counter()
        self._cell = self._notebook.tools.meter.start()

    def _end(self) -> None:
        if self._cell is not None:
            usages, self._cell = self._notebook.tools.meter.stop(self._cell), None
            self._note(usages, time.perf_counter() - self._started)

    def _note(self, usages: Iterable[Usage], seconds: float) -> None:
        memory = {usage.device: _memory(usage) for usage in usages}
        cpu, gpu = memory.get("cpu", _NOTHING), memory.get(self._device, _NOTHING)
        self.data = CellLoggerData(cpu, gpu, CellLoggerTime(seconds))


def _memory(usage: Usage) -> CellLoggerMemory:
    """Return the figures of a device; what is in use on a whole device does not count our allocator's cache."""
    total = usage.after_bytes
    if usage.used_bytes is not None and usage.reserved_bytes is not None:
        total += usage.used_bytes - usage.reserved_bytes
    return CellLoggerMemory(usage.delta_bytes, usage.peak_delta_bytes - max(0, usage.delta_bytes), total)


class SwitchedOff(Part):
    """Keeps an option off while it goes along, and sets it back when the last such part for it has left.

    Args:
        notebook: the shell's.
        option: its name.
    """

    def __init__(self, notebook: Notebook, option: str) -> None:
        self._notebook = notebook
        self.option = option
        others = self._others()
        self.before: bool = others[0].before if others else getattr(notebook.tools.config, option)

    def start(self) -> None:
        """Switch the option off."""
        self._notebook.join(self)  # first, or an interrupt would leave it off
        setattr(self._notebook.tools.config, self.option, False)

    def stop(self) -> None:
        """Let the option be what it was; once, since it may have been set anew after that."""
        if self not in self._notebook.session.parts:
            return
        self._notebook.leave(self)
        if not self._others():
            setattr(self._notebook.tools.config, self.option, self.before)

    def close(self) -> None:
        """Stop: the extension is being unloaded."""
        self.stop()

    def _others(self) -> list[SwitchedOff]:
        same = [part for part in self._notebook.session.parts if isinstance(part, SwitchedOff)]
        return [part for part in same if part.option == self.option and part is not self]


class UntilEnd(Part):
    """Stops what goes along with an experiment where not its ``finish`` but a magic, or one around it, has ended that.

    Args:
        notebook: the shell's.
        experiment: the experiment.
        parts: what goes along with it.
    """

    def __init__(self, notebook: Notebook, experiment: Experiment, parts: Sequence[CellLogger | SwitchedOff]) -> None:
        self._notebook = notebook
        self._experiment = experiment
        self._parts = tuple(parts)

    def start(self) -> None:
        """Watch from now on."""
        self._notebook.join(self)

    def stop(self) -> None:
        """Watch no more."""
        self._notebook.leave(self)

    def cell_begins(self, cell: Cell) -> None:
        """Stop all if the experiment is over."""
        if not self._experiment.is_open:
            for part in (self, *self._parts):
                part.stop()

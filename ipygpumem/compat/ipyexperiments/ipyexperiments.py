"""ipyexperiments' classes: an experiment begins where one is made, and ends with ``finish``, ``del`` or ``with``.

Names follow ipyexperiments' rule: those that were not there before go at the end, and older ones stay as they are
bound then. Unlike its ``finish``, names are deleted by name: an older name of the same object stays.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import TracebackType
from typing import Any, NamedTuple

from IPython import get_ipython

from ipygpumem.compat.ipyexperiments import cell_logger
from ipygpumem.compat.ipyexperiments.cell_logger import CellLogger, SwitchedOff, UntilEnd
from ipygpumem.compat.ipyexperiments.cell_logger import b2mb as b2mb
from ipygpumem.compat.ipyexperiments.cell_logger import get_nvml_gpu_id as get_nvml_gpu_id
from ipygpumem.compat.ipyexperiments.utils.mem import device_memory
from ipygpumem.errors import ExperimentError, quoted
from ipygpumem.freeing.reclaim import empty_device_caches
from ipygpumem.introspect import is_instance, text_of
from ipygpumem.notebook.experiments.experiment import Experiment
from ipygpumem.notebook.experiments.options import ExperimentOptions
from ipygpumem.notebook.notebook import Notebook, find_notebook, notebook_of
from ipygpumem.objects.holders.frames import stack
from ipygpumem.probes.host import available_bytes, total_bytes
from ipygpumem.reports.layout import Report, Table, device_label
from ipygpumem.units import format_bytes

__all__ = ["IPyExperimentsCPU", "IPyExperimentsPytorch"]


class IPyExperimentMemory(NamedTuple):
    """What an experiment took of one device and gave back, and what is free there now; bytes."""

    consumed: int
    reclaimed: int
    available: int


class IPyExperimentData(NamedTuple):
    """An experiment's figures; those of ``gpu`` are zero without one."""

    cpu: IPyExperimentMemory
    gpu: IPyExperimentMemory


class IPyExperiments:
    """An experiment over the notebook's cells, which begins here; ipyexperiments' parameters, under their names.

    Args:
        exp_enable: False leaves the names alone and logs cells only.
        cl_enable: False logs no cells, and hides the line below them meanwhile.
        cl_compact: without effect: the report below a cell is one line.
        cl_gc_collect: False collects no garbage after cells.
        cl_set_seed: what the random generators are set to before each cell; 0 leaves them alone.

    Raises:
        NotLoadedError: there is no IPython.
        ExperimentError: this class has no backend, or its backend does not work here.
    """

    backend = ""

    def __init__(
        self,
        exp_enable: bool = True,
        cl_enable: bool = True,
        cl_compact: bool = False,
        cl_gc_collect: bool = True,
        cl_set_seed: int = 0,
    ) -> None:
        self._runs = False
        self.enable, self.cl_enable = exp_enable, cl_enable
        self.cl_kwargs: dict[str, Any] = {"compact": cl_compact, "gc_collect": cl_gc_collect, "set_seed": cl_set_seed}
        self.start_time = time.time()
        self._notebook = _notebook()
        options = ExperimentOptions(
            self._free_name(), drop_imports=True, seed=cl_set_seed
        )  # a seed that cannot be is refused here
        options.seed = None  # the cell logger seeds: it may run without an experiment
        self._experiment = Experiment(
            self._notebook.experiments, options, lambda value: is_instance(value, IPyExperiments)
        )
        self.gpu_current_device_id = self._preload()
        device = f"cuda:{self.gpu_current_device_id}" if self.has_gpu else ""
        self._devices = ["cpu", *([device] if device else [])]
        self.cl = CellLogger(self._notebook, device, **self.cl_kwargs) if cl_enable else None
        parts: list[CellLogger | SwitchedOff] = [self.cl or SwitchedOff(self._notebook, "report")]
        if not cl_gc_collect:
            parts.append(SwitchedOff(self._notebook, "collect_garbage"))
        until_end = [UntilEnd(self._notebook, self._experiment, parts)] if exp_enable else []
        self._parts = [*until_end, *parts]  # first, or the logger would seed once more
        self._start()

    @property
    def has_gpu(self) -> bool:
        """Whether it measures a GPU, too."""
        return self.backend == "pytorch"

    @property
    def running(self) -> bool:
        """Whether it has begun and has not ended; an unloading ends it, too."""
        if self.enable:
            return self._runs and self._experiment.is_open
        return self._runs and find_notebook(get_ipython()) is self._notebook

    @property
    def reclaimed(self) -> bool:
        """Whether its end has given memory back."""
        return self._experiment.record is not None

    def _free_name(self) -> str:
        taken = {opened.name for opened in self._notebook.experiments.open}
        name, number = type(self).__name__, 1
        while name in taken:
            number += 1
            name = f"{type(self).__name__} {number}"
        return name

    def _preload(self) -> int:
        """Make the backend ready, and return the number of its device; -1 for none."""
        raise ExperimentError("use IPyExperimentsCPU or IPyExperimentsPytorch: this class has no backend")

    def _start(self) -> None:
        if self.enable:
            self.var_names_start = self.get_var_names()
            self.cpu_ram_used_start, self.gpu_ram_used_start = self.cpu_ram_used(), self.gpu_ram_used()
            self._show([self._state(f"{self._experiment.name} started")])
        self._runs = True
        try:
            if self.enable:
                self._experiment.start()
                self._experiment.opened.scope.share(list(self._notebook.tools.namespace))
            for part in self._parts:
                part.start()
        except BaseException:  # an interrupt, too: nobody has it in his hands to end it
            if self.running:
                self.finish()
            raise

    # -- names ------------------------------------------------------------------------------------------------

    def keep_var_names(self, *args: str) -> None:
        """Let these names stay at the end.

        Raises:
            ValueError: one of them is no text.
        """
        if not all(is_instance(name, str) for name in args):
            raise ValueError("keep_var_names takes names as text: keep_var_names('model', 'score')")
        self._experiment.keep(*args)

    @property
    def var_names_keep(self) -> list[str]:
        """The names that stay at the end; what is added to the list stays, too."""
        return self._experiment.opened.options.patterns

    @var_names_keep.setter
    def var_names_keep(self, names: list[str]) -> None:
        if type(names) not in (list, tuple, set) or not all(is_instance(name, str) for name in names):
            raise ValueError("var_names_keep is a list of names as text: ['model', 'score']")
        self.var_names_keep[:] = names

    def get_var_names(self) -> list[str]:
        """Return the notebook's names, those of before the experiment included."""
        found: list[str] = self._notebook.tools.shell.run_line_magic("who_ls", "")
        return found

    # -- figures ----------------------------------------------------------------------------------------------

    @property
    def data(self) -> IPyExperimentData:
        """What it has taken so far; once it is finished, what it had taken then and what came back.

        Raises:
            ExperimentError: ipygpumem was unloaded meanwhile.
        """
        cpu, gpu = (self._memory(device) for device in ("cpu", self._devices[-1]))
        return IPyExperimentData(cpu, gpu if self.has_gpu else IPyExperimentMemory(0, 0, 0))

    def _memory(self, device: str) -> IPyExperimentMemory:
        record, consumed, reclaimed = self._experiment.record, 0, 0
        if record is not None:
            consumed, reclaimed = record.consumed.get(device, 0), record.reclaimed.get(device, 0)
        elif self.enable:
            if not self.running:
                raise ExperimentError(
                    f"experiment {quoted(self._experiment.name)} has no figures: ipygpumem was unloaded"
                )
            consumed = sum(usage.delta_bytes for usage in self._experiment.usage() if usage.device == device)
        available = self.cpu_ram_avail() if device == "cpu" else self.gpu_ram_avail()
        return IPyExperimentMemory(consumed, reclaimed, available)

    def cpu_ram(self) -> tuple[int, int, int]:
        """Return what the host has, what of it is available, and this process's RSS."""
        return self.cpu_ram_total(), self.cpu_ram_avail(), self.cpu_ram_used()

    def cpu_ram_total(self) -> int:
        """Return what this process could have at most: the machine's memory, or its container's."""
        return total_bytes()

    def cpu_ram_avail(self) -> int:
        """Return what this process could still get."""
        return available_bytes()

    def cpu_ram_used(self) -> int:
        """Return this process's RSS."""
        return cell_logger.cpu_ram_used()

    def gpu_ram(self) -> tuple[int, int, int]:
        """Empty torch's cache, and return what the GPU has, what of it is free, and what all processes use."""
        if not self.has_gpu:
            return 0, 0, 0
        self.gpu_clear_cache()
        total, free, used = device_memory(self.gpu_current_device_id)
        return total, free, used

    def gpu_ram_avail(self) -> int:
        """Empty torch's cache, and return what of the GPU is free."""
        return self.gpu_ram()[1]

    def gpu_ram_used(self) -> int:
        """Empty torch's cache, and return what all processes use of the GPU."""
        return self.gpu_ram()[2]

    def gpu_clear_cache(self) -> None:
        """Return what torch caches to the GPU."""
        empty_device_caches()

    def print_state(self) -> None:
        """Show what is used, free and there."""
        self._show([self._state("now")])

    def _state(self, headline: str) -> Report:
        sizes = [self.cpu_ram(), *([self.gpu_ram()] if self.has_gpu else [])]
        rows = tuple(
            (device_label(device), *map(format_bytes, (used, free, total)))
            for device, (total, free, used) in zip(self._devices, sizes, strict=True)
        )
        columns = ("device", "used", "free", "total")
        return Report("experiment", headline, tables=(Table("", columns, rows, frozenset(columns[1:])),))

    def _show(self, reports: list[Report]) -> None:
        if self._notebook.tools.config.experiment_report != "none":
            self._notebook.tools.screen.show(reports)

    # -- its end ----------------------------------------------------------------------------------------------

    def finish(self) -> IPyExperimentData | None:
        """End it, show its report and return its data; None if it only logged cells.

        Raises:
            ExperimentError: ipygpumem was unloaded meanwhile.
        """
        for part in self._parts:
            part.stop()
        self._parts, self.cl = [], None
        if self.enable and self._experiment.record is None:
            self._end()
        self._runs = False
        if not self.enable:
            return None
        data = self.data
        self.cpu_ram_cons, self.gpu_ram_cons = data.cpu.consumed, data.gpu.consumed
        return data

    def _end(self) -> None:
        experiments, opened = self._notebook.experiments, self._experiment.opened
        if self._experiment.is_open:
            names = list(self._notebook.tools.namespace)
            opened.scope.share(name for name in names if is_instance(name, str) and name.startswith("_"))
            experiments.put_inside(opened)
        self._show([*experiments.close_experiment(opened), self._state("now")])
        self._notebook.subscribers.shown()

    def __enter__(self) -> IPyExperiments:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.running:
            if error is not None and self.enable:
                self._experiment.failed_by(error)
            self.finish()

    def __del__(self) -> None:
        if "_runs" in vars(self) and self.running and not sys.is_finalizing():
            if self.enable and _names_are_reset():
                self._experiment.opened.scope.share(list(self._notebook.tools.namespace))
            try:
                self.finish()
            except KeyboardInterrupt:  # Python drops it here, and nobody could ask for the rest of the end
                self.finish()


class IPyExperimentsCPU(IPyExperiments):
    """An experiment that measures the host's memory."""

    backend = "cpu"

    def _preload(self) -> int:
        return -1


class IPyExperimentsGPU(IPyExperimentsCPU):
    """What all experiments with a GPU are; only ``IPyExperimentsPytorch`` can be used."""

    backend = "gpu-generic"

    def _preload(self) -> int:
        return IPyExperiments._preload(self)


class IPyExperimentsPytorch(IPyExperimentsGPU):
    """An experiment that measures the host's memory and that of torch's current CUDA device."""

    backend = "pytorch"

    def _preload(self) -> int:
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ExperimentError("torch sees no CUDA device here: use IPyExperimentsCPU")
        index: int = torch.cuda.current_device()
        torch.ones(1, device=index)  # the context is not the experiment's
        return index


def _notebook() -> Notebook:
    """Return the notebook of this shell; the extension is loaded if it is not."""
    shell: Any = get_ipython()
    if shell is not None and find_notebook(shell) is None:
        shell.run_line_magic("load_ext", "ipygpumem")
    return notebook_of(shell)


def _names_are_reset() -> bool:
    """Whether IPython is deleting all names, one by one: it fails where one of them is gone already."""
    return any(
        frame.f_code.co_name in ("reset", "reset_selective")
        and text_of(frame.f_globals.get("__name__")).startswith("IPython.core.")
        for frame in stack(sys._getframe(1))
    )

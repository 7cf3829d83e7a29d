"""Every option, as traitlets: ``%config IPyGpuMem``, configuration files and the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traitlets import Bool, Enum, TraitError, TraitType
from traitlets.config import Configurable

from ipygpumem.errors import UnitError
from ipygpumem.units import checked_bytes, finite, number_in, whole


class Number(TraitType):
    """An option that a function checks, as arguments of Python functions and options of commands are checked."""

    def __init__(self, default: float, check: Callable[..., object], *, help: str, **bounds: float) -> None:  # noqa: A002
        super().__init__(default, help=help)
        self._check, self._bounds = check, bounds

    def validate(self, obj: Any, value: Any) -> Any:
        """Return the value as a number."""
        try:
            return self._check(value, **self._bounds)
        except UnitError as error:
            raise TraitError(f"IPyGpuMem.{self.name}: {error}") from None

    def from_string(self, text: str) -> Any:
        """Return the number on the command line, to be validated; a size needs no unit there: its option says bytes."""
        return number_in(text)


class IPyGpuMem(Configurable):
    """Options of the ipygpumem extension."""

    notebook: object = None
    """What has these options; see ``notebook_of``."""
    extension: Any = None

    report = Bool(True, help="Show the one-line report after every cell (%gpumem on|off).").tag(config=True)
    bar = Bool(
        True,
        help="Draw a bar for each device that a cell changed: in use before, kept, the peak above that. The plain text "
        "of a notebook's output has none.",
    ).tag(config=True)
    quiet = Bool(
        False,
        help="Show no line after cells that moved no device by a MiB. Errors, growth, child processes that hold "
        "memory, and every other report are shown.",
    ).tag(config=True)
    min_cell_seconds = Number(
        0.0,
        finite,
        least=0,
        help="Show no line after cells that were shorter than this, unless they grow with every run.",
    ).tag(config=True)
    experiment_report = Enum(
        ["full", "compact", "none"], "full", help="What an experiment shows at its end, unless --report says otherwise."
    ).tag(config=True)
    release_frames = Enum(
        ["never", "oom", "oom+interrupt", "always"],
        "oom+interrupt",
        help="After which errors the frames of the traceback give up their locals, so that their memory comes back. "
        "'always' means that %debug finds no locals after any error.",
    ).tag(config=True)
    collect_garbage = Bool(
        True,
        help="Collect garbage after a cell: what it has made, and all that there is when that is cheap beside the cell "
        "(see garbage_share).",
    ).tag(config=True)
    garbage_share = Number(
        0.05,
        finite,
        least=0,
        help="Largest share of a cell's CPU time that collecting all garbage after it may be predicted to take.",
    ).tag(config=True)
    host_peak = Enum(
        ["kernel", "sampled"],
        "kernel",
        help="How the host's peak is measured. 'kernel' is exact on Linux and resets the process's high-water mark, "
        "which resource.getrusage().ru_maxrss shows too; 'sampled' leaves that mark alone and may miss short peaks.",
    ).tag(config=True)
    sample_seconds = Number(
        0.02,
        finite,
        least=0.001,
        most=3600,
        help="Time between two samples where peaks must be sampled; read when the extension loads.",
    ).tag(config=True)
    min_held_bytes = Number(
        2**20,
        checked_bytes,
        help="Smallest size that is listed among what a traceback held or what survived an experiment.",
    ).tag(config=True)
    history_length = Number(
        10_000, whole, most=10**6, help="How many finished cells are remembered; read when the extension loads."
    ).tag(config=True)
    record = Bool(
        False,
        help="Keep a recording of the cells and their memory in a file that outlives the kernel "
        "(%gpumem record, %gpumem postmortem).",
    ).tag(config=True)
    record_max_bytes = Number(
        8 * 2**20,
        checked_bytes,
        least=2**16,
        help="The most that one kernel's recording may take; read when recording begins.",
    ).tag(config=True)

"""Options as traitlets, set by ``%config IPyGpuMem``, configuration files or the command line."""

from __future__ import annotations

from typing import Any

from traitlets import Bool, Enum, TraitError, TraitType
from traitlets.config import Configurable

from ipygpumem.errors import UnitError
from ipygpumem.units import checked_bytes, number_in


class Size(TraitType):
    """A number of bytes, or a text such as ``2MiB``."""

    def validate(self, obj: Any, value: Any) -> Any:
        """Return the value as a number of bytes."""
        try:
            return checked_bytes(value)
        except UnitError as error:
            raise TraitError(f"IPyGpuMem.{self.name}: {error}") from None

    def from_string(self, text: str) -> Any:
        """Return the value given on the command line, before validation; a number without a unit
        means bytes.
        """
        return number_in(text)


class IPyGpuMem(Configurable):
    """Options of the ipygpumem extension."""

    extension: Any = None
    """The ``Extension`` with these options; None until it registers itself."""

    report = Bool(True, help="Show the one-line report after every cell (%gpumem on|off).").tag(
        config=True
    )
    bar = Bool(
        True,
        help="Draw a bar for each device that a cell changed: in use before, kept, the peak "
        "above that. The plain text of a notebook's output has none.",
    ).tag(config=True)
    quiet = Bool(
        False,
        help="Show no line after cells that changed no device by a MiB. Errors, growth, child "
        "processes that hold memory, and every other report are shown. To set it: "
        "%config IPyGpuMem.quiet = True; and so with the other options.",
    ).tag(config=True)
    experiment_report = Enum(
        ["full", "compact", "none"],
        "full",
        help="Level of detail of an experiment's report, unless --report is given.",
    ).tag(config=True)
    release_frames = Enum(
        ["never", "oom", "oom+interrupt", "always"],
        "oom+interrupt",
        help="Errors after which the locals of the traceback's frames are cleared to free "
        "their memory. 'oom': out-of-memory errors; 'oom+interrupt': Ctrl-C too; 'always': all "
        "errors, so that %debug finds no locals.",
    ).tag(config=True)
    collect_garbage = Bool(
        True,
        help="Collect garbage after a cell: always the objects made by the cell, and all "
        "garbage if that is cheap compared to the cell.",
    ).tag(config=True)
    host_peak = Enum(
        ["kernel", "sampled"],
        "kernel",
        help="How the host's peak is measured. 'kernel' is exact on Linux and resets the "
        "process's high-water mark, which resource.getrusage().ru_maxrss shows too; "
        "'sampled' leaves that mark alone and may miss short peaks.",
    ).tag(config=True)
    min_held_bytes = Size(
        2**20,
        help="Minimum size of listed objects that a traceback held, or that survived an "
        "experiment: a number of bytes, or a text such as '2MiB'.",
    ).tag(config=True)
    recorder = Bool(
        False,
        help="Keep a recording of the cells and their memory in a file that outlives the kernel "
        "(%gpumem recorder, %gpumem postmortem).",
    ).tag(config=True)


def config_of(shell: Any) -> IPyGpuMem | None:
    """Return the options of the extension in ``shell``, or None if it is not loaded."""
    for configurable in getattr(shell, "configurables", ()):
        if type(configurable) is IPyGpuMem and configurable.extension is not None:
            return configurable
    return None

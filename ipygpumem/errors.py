"""The exceptions of ipygpumem; in a notebook each is shown as one line without a traceback."""

from __future__ import annotations

import sys


class GpuMemError(Exception):
    """Base class of all exceptions of ipygpumem."""


NOT_LOADED = "ipygpumem is not loaded here: run %load_ext ipygpumem first"


class NotLoadedError(GpuMemError):
    """The extension is not loaded in this IPython shell, or there is no shell."""


class ExperimentError(GpuMemError):
    """An experiment does not support the requested operation."""


class FileError(GpuMemError):
    """A file cannot be written, would overwrite a foreign file, or cannot be read as an export."""


class RecordingError(GpuMemError):
    """The flight recorder cannot write, or a file is not a recording."""


class PlotError(GpuMemError):
    """A figure cannot be drawn."""


class AutofitError(GpuMemError):
    """No value fits in memory, or the arguments of autofit are invalid."""


class BudgetError(GpuMemError):
    """A budget names no device or no size."""


class ClusterError(GpuMemError):
    """There is no cluster, it has no such engine, or its engines failed."""


class TraceError(GpuMemError):
    """A trace does not support the requested operation."""


class MemoryExpectationError(GpuMemError, AssertionError):
    """Code used more memory than ``ipygpumem.expect`` or a test's marker allows."""


class MissingLibraryError(GpuMemError, ImportError):
    """A trainer's callback needs a library that is not installed."""


class ReleasedError(GpuMemError, AttributeError):
    """An object was used after ``ipygpumem.release`` had emptied it."""


class DeviceError(GpuMemError):
    """A device does not exist here, or does not support the operation."""


class ProbeError(GpuMemError):
    """A user's probe fails, or returns invalid readings."""


class EstimateError(GpuMemError):
    """The memory of code cannot be estimated without running it."""


class UnitError(GpuMemError, ValueError):
    """A value is not a size, or not a number that an option or argument accepts."""


def quoted(value: object) -> str:
    """Return a short representation of a text or number for a message; of any other object only the
    type.
    """
    if type(value) not in (int, float, str):
        return f"an object of type {type(value).__name__}"
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print very long ones
    return repr(value[:60] + "…" if type(value) is str and len(value) > 60 else value)


def how_to_install(requirement: str) -> str:
    """Return the line that installs a package into the environment of this process.

    In IPython that is ``%pip``: ``!pip`` and a terminal's ``pip`` may belong to another Python.
    """
    if not requirement.isidentifier():
        requirement = f"'{requirement}'"
    shells = getattr(sys.modules.get("IPython.core.interactiveshell"), "InteractiveShell", None)
    if shells is not None and shells.initialized():
        return f"%pip install {requirement}"
    return f"{sys.executable} -m pip install {requirement}"


def ellipsize(text: object, most: int = 160) -> str:
    """Return a path or any text for a message, shortened in the middle, because the ends
    distinguish names.
    """
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most // 2]}…{whole[-(most // 2) :]}"


def describe_error(error: BaseException) -> str:
    """Return an error's type and the first line of its message; torch adds lines with general
    advice.

    Of our own exceptions, return the message alone.
    """
    if isinstance(error, GpuMemError):
        return str(error)
    return f"{type(error).__name__}: {ellipsize(str(error).partition(chr(10))[0], 600)}"

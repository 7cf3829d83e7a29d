"""What ipygpumem raises on purpose: at the edge of a notebook it becomes one line without a traceback."""

from __future__ import annotations


class GpuMemError(Exception):
    """Base class of every exception that ipygpumem raises on purpose."""


class NotLoadedError(GpuMemError):
    """The extension is not loaded in this IPython shell, or there is no shell."""


class ExperimentError(GpuMemError):
    """An experiment was asked for something that it cannot do."""


class FileError(GpuMemError):
    """A file cannot be written, is not ours to write over, or cannot be read as an export."""


class RecordingError(GpuMemError):
    """The flight recorder cannot write, or a file is not a recording."""


class PlotError(GpuMemError):
    """A picture cannot be made."""


class AutofitError(GpuMemError):
    """No value fits in memory, or autofit was asked for something that it cannot do."""


class BudgetError(GpuMemError):
    """A budget names no device or no size."""


class ClusterError(GpuMemError):
    """There is no cluster, it has no such engine, or its engines failed."""


class TraceError(GpuMemError):
    """A trace was asked for something that it cannot do."""


class MissingLibraryError(GpuMemError, ImportError):
    """A trainer's callback needs a library that is not installed."""


class ReleasedError(GpuMemError, AttributeError):
    """An object was used after ``ipygpumem.release`` had emptied it."""


class DeviceError(GpuMemError):
    """A device is not here, or cannot do what it was asked for."""


class ProbeError(GpuMemError):
    """A probe that others wrote does not answer, or its answer makes no sense."""


class EstimateError(GpuMemError):
    """The memory that code takes cannot be found without running it."""


class UnitError(GpuMemError, ValueError):
    """A value is not a size, or not a number that an option or an argument takes."""


def quoted(value: object) -> str:
    """Return a text or number as a message shows it, in few letters; of any other object only its type."""
    if type(value) not in (int, float, str):
        return f"an object of type {type(value).__name__}"
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"  # Python refuses to write one of many digits
    return repr(value[:60] + "…" if type(value) is str and len(value) > 60 else value)


def short(text: object, most: int = 160) -> str:
    """Return a path, or a text of others', as a message shows it: the middle gives way, since ends tell names apart."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[: most // 2]}…{whole[-(most // 2) :]}"


def said(error: BaseException) -> str:
    """Return an error's type and the first line of its text: torch adds more that say nothing about it.

    The text alone if we raised it on purpose.
    """
    if isinstance(error, GpuMemError):
        return str(error)
    return f"{type(error).__name__}: {short(str(error).partition(chr(10))[0], 600)}"

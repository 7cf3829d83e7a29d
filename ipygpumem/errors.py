"""The exceptions of ipygpumem; in a notebook each is shown without our own frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ipygpumem.notebook import current_shell

OUR_FOLDER = f"{Path(__file__).parent}{os.sep}"
"""The beginning of the names of this package's files."""
_MODULES_BETWEEN = (
    "IPython.core.interactiveshell",
    "IPython.core.magic",
    "decorator",
    "contextlib",
)
"""Modules whose frames lie between a cell and our code, or between two of our functions."""


class GpuMemError(Exception):
    """Base class of all exceptions of ipygpumem."""

    is_users_mistake = True
    """False if the user's line is right, but a package that it needs is missing."""

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: only the user's frames, since the message says
        what is wrong.
        """
        traceback = _without_our_frames(self.__traceback__)
        shell = current_shell()
        if traceback is None or shell is None:
            return [f"{type(self).__name__}: {self}"]
        context = self.__context__
        if context is not None and _begins_in_ours(context.__traceback__):
            # Such as the KeyError of a file's missing field: the message says all about it. An
            # error that the user's code was handling is shown above, as usual.
            self.__suppress_context__ = True
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(self), self, traceback, tb_offset=0
        )
        return lines


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback without frames of this package and of IPython's magics."""
    steps = []
    while traceback is not None:
        frame = traceback.tb_frame
        is_between = frame.f_globals.get("__name__") in _MODULES_BETWEEN
        if not is_between and not frame.f_code.co_filename.startswith(OUR_FOLDER):
            steps.append(traceback)
        traceback = traceback.tb_next
    return traceback_of_steps(steps)


def traceback_of_steps(steps: Sequence[TracebackType]) -> TracebackType | None:
    """Return a new traceback of some steps, the outermost first; None without any."""
    traceback: TracebackType | None = None
    for step in reversed(steps):
        traceback = TracebackType(traceback, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return traceback


def _begins_in_ours(traceback: TracebackType | None) -> bool:
    """Return True if the outermost frame of a traceback is ours: our code has caught the error, so
    it is not the user's.
    """
    if traceback is None:
        return False
    return traceback.tb_frame.f_code.co_filename.startswith(OUR_FOLDER)


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


class CallError(GpuMemError, TypeError):
    """A function got an argument of a wrong type."""


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
    if type(value) is str and len(value) > 60:
        return repr(value[:60] + "…")
    return repr(value)


def how_to_install(requirement: str) -> str:
    """Return the line that installs a package into the environment of this process.

    In IPython that is ``%pip``: ``!pip`` and a terminal's ``pip`` may belong to another Python.
    """
    if not requirement.isidentifier():
        requirement = f"'{requirement}'"
    if current_shell() is not None:
        return f"%pip install {requirement}"
    return f"{sys.executable} -m pip install {requirement}"


def not_installed(kind: type[GpuMemError], what_needs: str, requirement: str) -> GpuMemError:
    """Return an error about a missing package, which says how to install it.

    Args:
        kind: the error's class.
        what_needs: the beginning of the message, such as ``plot needs``.
        requirement: the package, such as ``matplotlib``.
    """
    line = how_to_install(requirement)
    error = kind(f"{what_needs} {requirement}, which is not installed: {line}")
    error.is_users_mistake = False
    return error


def ellipsize(text: object, length: int = 160) -> str:
    """Return a path or any text for a message, shortened to about ``length`` characters in the
    middle, because the ends distinguish names.
    """
    whole = str(text)
    if len(whole) <= length:
        return whole
    half = length // 2
    return f"{whole[:half]}…{whole[-half:]}"


def describe_error(error: BaseException) -> str:
    """Return an error's type and the first line of its message; torch adds lines with general
    advice.

    Of our own exceptions, return the message alone.
    """
    if isinstance(error, GpuMemError):
        return str(error)
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {ellipsize(first_line, 600)}"

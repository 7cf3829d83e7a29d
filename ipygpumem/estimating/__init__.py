"""Estimates what code would take on a device: runs it on fake tensors, and logs their storages."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
import types
from pathlib import Path
from typing import Any

from ipygpumem.errors import EstimateError
from ipygpumem.introspect import is_ours, is_users
from ipygpumem.objects.holders.frames import stack, steps


def loaded() -> Any:
    """Load what makes estimates and summaries, which imports torch.

    Raises:
        EstimateError: torch is not installed, or lacks what fake tensors need.
    """
    if importlib.util.find_spec("torch") is None:
        raise EstimateError("an estimate needs torch, which is not installed")
    try:
        return importlib.import_module("ipygpumem.estimating.running")
    except (ImportError, AttributeError) as error:
        version = importlib.import_module("torch").__version__
        raise EstimateError(f"torch {version} is too old for estimates: it lacks fake tensors ({error})") from error


def users_line(frame: types.FrameType | None = None) -> str:
    """Return where the user's code is now: the innermost line that is no library's, if there is one."""
    first = frame or sys._getframe(1)
    here = next((caller for caller in stack(first) if is_users(caller.f_code.co_filename)), first)
    return line_text(here.f_code.co_filename, here.f_lineno)


def users_line_of(traceback: types.TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback, as ``users_line`` does."""
    lines = [(step.tb_frame.f_code.co_filename, step.tb_lineno) for step in steps(traceback)]
    innermost = ([line for line in lines if is_users(line[0])] or lines[:1])[-1:]
    return line_text(*innermost[0]) if innermost else ""


def line_text(name: str, number: int) -> str:
    """Return how a line is named: its file, if it has one, its number and what stands there."""
    source = linecache.getline(name, number).strip()
    # A cell's file, where it has one, has a name that says nothing.
    has_file = Path(name).is_file() and "ipykernel" not in Path(name).parent.name
    place = f"{Path(name).name}, line {number}" if has_file else f"line {number}"
    return f"{place}: {source}" if source else place


def users_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without our frames, and without frames that ours called to follow an operation."""
    every = list(steps(traceback))
    files = [step.tb_frame.f_code.co_filename for step in every]
    users = max((number for number, name in enumerate(files) if is_users(name)), default=len(files))
    end = next((number for number, name in enumerate(files) if number > users and is_ours(name)), len(files))
    kept = None
    for step, name in zip(every[:end][::-1], files[:end][::-1], strict=True):
        if not is_ours(name):
            kept = types.TracebackType(kept, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return kept
